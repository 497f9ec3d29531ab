//! Work on a store's directory while this process does not have the store open.

use crate::node_directory::{Identity, NodeDirectory, unusable};
use crate::open_stores;
use ritornello_format::{Error, Result};
use std::path::Path;
use std::time::{Duration, Instant};

/// Maximum time to wait while another thread of this process is opening or closing the store.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `work` on `path`, the canonical directory of a store, while holding the store's lock.
///
/// # Errors
/// `Invalid` if this process has the store open, or another process owns it; `Retry` if threads of
/// this process open or close it, or ask its owner, for [`CALL_TIMEOUT`]; errors of the directory
/// and its lock; any error of `work`.
pub(crate) fn with_exclusive_store<T>(
    path: &Path,
    work: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let until = Instant::now() + CALL_TIMEOUT;
    with_unopened_store(path, until, "this process has the store open: close it first", || {
        let directory = NodeDirectory::open(path)?;
        if !directory.try_own()? {
            let owner = directory.lock.holder()?.map_or(0, |holder| holder.0);
            return Err(Error::invalid("a process owns this store: stop it first")
                .with("pid", owner)
                .with("dir", path.display()));
        }
        let done = work(path);
        directory.lock.close();
        done
    })
}

/// Runs `work` while no thread of this process can open the store in `path`, a canonical directory.
/// Without this exclusion, closing a descriptor of `LOCK` could release a lock of this process
/// ([`crate::record_lock`]).
///
/// # Errors
/// `Invalid`, with the text `is_open`, if this process has the store open; `Retry` if threads of
/// this process open or close it, or ask its owner, until `until`; errors of the directory; any
/// error of `work`.
pub(crate) fn with_unopened_store<T>(
    path: &Path,
    until: Instant,
    is_open: &'static str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let slot = open_stores::slot(Identity::of(path).map_err(|error| unusable(path, error))?)?;
    let Some(open) = slot.try_lock_until(until) else {
        return Err(Error::retry(
            "another thread of this process opens or closes this store, or asks its owner: try again \
             later",
        )
        .with("dir", path.display()));
    };
    if open.upgrade().is_some_and(|shared| !shared.is_closed()) {
        return Err(Error::invalid(is_open).with("dir", path.display()));
    }
    work()
}
