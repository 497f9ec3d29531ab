//! Finds records that RocksDB would read in an endless loop, before a database is opened.
//!
//! RocksDB's manifest and its write-ahead logs consist of blocks of 32 KiB, which hold records. A
//! record has a checksum (4 bytes), a length (2), a type (1), and data. Some types belong to
//! recycled logs. In a file whose first record is of a different type, RocksDB 11.8 does not skip a
//! record of a recycled log, and reads it again and again (`Reader::ReadPhysicalRecord` in its
//! `db/log_reader.cc`). This crate does not recycle logs, so these types are damage; a single
//! flipped bit can produce them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

const BLOCK: usize = 32 << 10;

/// The logs of a database that have a record of a recycled log, with the offset of the first of
/// these records.
pub(crate) fn find_in_logs(database: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let entries = match fs::read_dir(database) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "log")
            && let Some(at) = find_in_file(&path)?
        {
            found.push((path, at));
        }
    }
    Ok(found)
}

/// Truncates each log at the offset beside it. Later logs may build on the records that are cut
/// off, so the caller first marks the database as damaged.
pub(crate) fn truncate_logs(logs: &[(PathBuf, u64)]) -> io::Result<()> {
    for (path, at) in logs {
        tracing::warn!(path = %path.display(), at, "a log of the index is damaged and is truncated");
        OpenOptions::new().write(true).open(path)?.set_len(*at)?;
    }
    Ok(())
}

/// Whether the manifest that `CURRENT` names has a record of a recycled log. `false` if the
/// manifest cannot be read: RocksDB reports such a failure itself.
pub(crate) fn is_in_manifest(database: &Path) -> bool {
    fs::read_to_string(database.join("CURRENT"))
        .and_then(|name| find_in_file(&database.join(name.trim_end())))
        .is_ok_and(|at| at.is_some())
}

/// Offset of the first record of a recycled log in a file.
fn find_in_file(path: &Path) -> io::Result<Option<u64>> {
    let mut file = File::open(path)?;
    let (mut start, mut block) = (0, Vec::with_capacity(BLOCK));
    loop {
        block.clear();
        Read::by_ref(&mut file).take(BLOCK as u64).read_to_end(&mut block)?;
        if let Some(at) = find_in_block(&block) {
            return Ok(Some(start + at as u64));
        }
        if block.len() < BLOCK {
            return Ok(None);
        }
        start += BLOCK as u64;
    }
}

/// Offset of the first record of a recycled log in a block.
fn find_in_block(block: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(&[_, _, _, _, low, high, kind]) = block.get(at..).and_then(<[u8]>::first_chunk) {
        // The types of recycled logs are four for fragments, one for timestamp sizes, and one for
        // the predecessor log.
        if matches!(kind, 5..=8 | 11 | 131) {
            return Some(at);
        }
        at += 7 + usize::from(u16::from_le_bytes([low, high]));
    }
    None
}
