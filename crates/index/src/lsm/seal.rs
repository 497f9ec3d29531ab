//! How long RocksDB's list of files has been: without it, one that lost its end reads as an older
//! database, and the files that it does not name are deleted.
//!
//! `lsm.seal` holds the list's name and length, as they were when the index was last opened or
//! closed. RocksDB syncs its list before it relies on it, so no crash makes it shorter. Where it has
//! begun another since, the seal says nothing.

use std::path::Path;
use std::{fs, io};

/// The list that `CURRENT` names, and its length.
fn list(database: &Path) -> io::Result<(String, u64)> {
    let name = fs::read_to_string(database.join("CURRENT"))?.trim_end().to_owned();
    let length = fs::metadata(database.join(&name))?.len();
    Ok((name, length))
}

/// What cannot be written leaves the index unsealed, which is no reason not to use it.
pub(super) fn write(database: &Path, seal: &Path) {
    let written =
        list(database).and_then(|(name, length)| fs::write(seal, format!("{name} {length}\n")));
    if let Err(error) = written {
        tracing::warn!(%error, path = %seal.display(), "the index could not be sealed");
    }
}

/// Whether the list of files has become shorter.
pub(super) fn is_broken(database: &Path, seal: &Path) -> bool {
    let Ok(text) = fs::read_to_string(seal) else { return false };
    let Some((name, length)) = text.trim_end().rsplit_once(' ') else { return false };
    let Ok(length) = length.parse::<u64>() else { return false };
    list(database).is_ok_and(|(now, there)| now == name && there < length)
}
