//! The indexes that this process has open, by the identity of their directories.
//!
//! RocksDB refuses to open a database twice in one process, but compares paths, and a directory
//! that is reached through `/proc/self/fd/N` has another path at each opening. RocksDB's file lock
//! excludes only other processes.

use ritornello_format::{Error, Result};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Device and inode of each directory. A forked child never takes this lock: see
/// [`super::recovery::refuse_in_forked_child`].
static OPEN: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// A directory that this process cannot open again until the claim is dropped.
#[derive(Debug)]
pub(super) struct Claim((u64, u64));

impl Claim {
    /// Claims the directory `dir`, whose metadata is `found`.
    ///
    /// # Errors
    /// `Retry` if this process has the index open.
    pub(super) fn take(dir: &Path, found: &Metadata) -> Result<Self> {
        let identity = (found.dev(), found.ino());
        if OPEN.lock().unwrap_or_else(PoisonError::into_inner).insert(identity) {
            return Ok(Self(identity));
        }
        Err(Error::retry("the index is still open in this process: close it first, or wait")
            .with("dir", dir.display()))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}
