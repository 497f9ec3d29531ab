//! Work on a store's directory that no process has open.

use crate::home::{Home, Identity, unusable};
use crate::registry;
use ritornello_format::{Error, Result};
use std::path::Path;
use std::time::{Duration, Instant};

/// A store that this process is opening or closing is waited for this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Does `work` in `path`, a directory without symbolic links that holds a store, with its lock.
///
/// # Errors
/// `Invalid` if a process owns the store, this one included; `Retry` if a thread of this process is
/// opening or closing it; those of `work`.
pub(crate) fn alone<T>(path: &Path, work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let slot = registry::slot(Identity::of(path).map_err(|error| unusable(path, error))?)?;
    let Some(open) = slot.try_lock_until(Instant::now() + PATIENCE) else {
        return Err(Error::retry("another thread has been opening or closing this store for long")
            .with("dir", path.display()));
    };
    if open.upgrade().is_some_and(|shared| !shared.is_closed()) {
        return Err(Error::invalid("this process has the store open: close it first")
            .with("dir", path.display()));
    }
    let home = Home::open(path)?;
    if !home.try_own()? {
        let owner = home.lock.holder()?.map_or(0, |holder| holder.0);
        return Err(Error::invalid("a process owns this store: stop it first")
            .with("pid", owner)
            .with("dir", path.display()));
    }
    let done = work(path);
    home.lock.close();
    done
}
