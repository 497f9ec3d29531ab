//! The recorded length of RocksDB's manifest. Without this length, a manifest that lost its end
//! reads as an older database, and RocksDB deletes the files that the shortened manifest does not
//! name.
//!
//! `lsm.seal` holds the name and the length of the manifest at the last open, or at the last close
//! that did not fail. RocksDB syncs a manifest before it uses the manifest, so a crash makes no
//! manifest shorter. If RocksDB has begun another manifest after the seal was written, the seal
//! proves nothing.

use std::path::Path;
use std::{fs, io};

/// Name and length of the manifest that `CURRENT` names.
fn list(database: &Path) -> io::Result<(String, u64)> {
    let name = fs::read_to_string(database.join("CURRENT"))?.trim_end().to_owned();
    let length = fs::metadata(database.join(&name))?.len();
    Ok((name, length))
}

/// Records the manifest's length. A failure is logged, and leaves the index usable, with the
/// earlier seal or without a seal.
pub(super) fn write(database: &Path, seal: &Path) {
    let written =
        list(database).and_then(|(name, length)| fs::write(seal, format!("{name} {length}\n")));
    if let Err(error) = written {
        tracing::warn!(
            %error,
            path = %seal.display(),
            "the length of RocksDB's manifest could not be recorded: the next open cannot notice \
             that the manifest lost its end"
        );
    }
}

/// Whether the manifest is shorter than its recorded length. `false` if no length is recorded for
/// this manifest.
pub(super) fn is_broken(database: &Path, seal: &Path) -> bool {
    let Ok(text) = fs::read_to_string(seal) else { return false };
    let Some((name, length)) = text.trim_end().rsplit_once(' ') else { return false };
    let Ok(length) = length.parse::<u64>() else { return false };
    list(database).is_ok_and(|(now, present)| now == name && present < length)
}
