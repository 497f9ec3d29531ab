//! The lock of a directory: the process that holds it owns the store.

use crate::process::Process;
use crate::record_lock::{self, LockHolder};
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;

const NAME: &str = "LOCK";
/// Maximum consecutive times that another process may remove the file while this process locks it.
const REPLACED_MAX: u32 = 8;

/// The open `LOCK` file. A process has at most one of these per directory ([`crate::open_stores`]
/// ensures it), because closing a second descriptor would release the lock.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    process: Process,
    file: Mutex<Option<File>>,
}

impl DirectoryLock {
    /// Opens `LOCK` in `dir`, and creates it if it does not exist. Does not lock it.
    pub(crate) fn open(dir: BorrowedFd<'_>) -> io::Result<Self> {
        let file = Mutex::new(Some(open(dir)?));
        Ok(Self { process: Process::current(), file })
    }

    /// Opens `LOCK` in `dir` read-only, to find the holder of its lock; `None` if the file does not
    /// exist. The lock cannot be taken through the result.
    pub(crate) fn observe(dir: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(dir, NAME, flags, Mode::empty()) {
            Ok(file) => {
                let file = Mutex::new(Some(file.into()));
                Ok(Some(Self { process: Process::current(), file }))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the lock. Returns `false` if another process holds it.
    pub(crate) fn try_acquire(&self, dir: BorrowedFd<'_>) -> Result<bool> {
        let mut slot = self.file.lock();
        for _ in 0..REPLACED_MAX {
            let file = slot.as_ref().ok_or_else(closed)?;
            if !record_lock::try_lock(file).map_err(unlockable)? {
                return Ok(false);
            }
            if is_named(dir, file) {
                return Ok(true);
            }
            // Another process removed the file before this process locked it, so this lock excludes
            // no process that opens `LOCK` now. Close the removed file, and try the current file.
            *slot = Some(open(dir).map_err(unlockable)?);
        }
        Err(Error::retry("another process keeps removing the store's LOCK file: end that process"))
    }

    /// The other process that owns the store, if any.
    pub(crate) fn holder(&self) -> Result<Option<LockHolder>> {
        let slot = self.file.lock();
        record_lock::holder(slot.as_ref().ok_or_else(closed)?).map_err(unlockable)
    }

    /// Releases the lock; it may be taken again.
    pub(crate) fn release(&self) {
        if let Some(file) = self.file.lock().as_ref()
            && let Err(error) = record_lock::unlock(file)
        {
            tracing::warn!(
                %error,
                "the store's LOCK file cannot be unlocked: it stays locked until this process ends"
            );
        }
    }

    /// Closes the file permanently. A close in `drop` could come after this process has opened the
    /// directory again, and would release the lock of the later opening.
    pub(crate) fn close(&self) {
        if self.process.is_current() {
            self.file.lock().take();
        }
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // In a forked child this descriptor is a copy. The child may hold the lock through another
        // descriptor, and closing the copy would release it, so the copy stays open.
        if !self.process.is_current()
            && let Some(file) = self.file.get_mut().take()
        {
            let _ = file.into_raw_fd();
        }
    }
}

fn open(dir: BorrowedFd<'_>) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::openat(dir, NAME, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Whether `file` is the current `LOCK` file of the directory.
fn is_named(dir: BorrowedFd<'_>, file: &File) -> bool {
    let named = rustix::fs::statat(dir, NAME, AtFlags::SYMLINK_NOFOLLOW);
    match (named, file.metadata()) {
        (Ok(named), Ok(own)) => (named.st_dev, named.st_ino) == (own.dev(), own.ino()),
        _ => false,
    }
}

fn unlockable(error: io::Error) -> Error {
    Error::retry("the store's LOCK file cannot be locked: put the store on a local disk")
        .because(error)
}

/// Returns the error for calls on a closed store.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed: open it again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn lock_uses_a_new_file_if_its_file_was_removed() {
        let dir = tempfile::tempdir().unwrap();
        let fd = File::open(dir.path()).unwrap();
        let lock = DirectoryLock::open(fd.as_fd()).unwrap();
        std::fs::remove_file(dir.path().join(NAME)).unwrap();
        assert!(lock.try_acquire(fd.as_fd()).unwrap());
        assert!(is_named(fd.as_fd(), lock.file.lock().as_ref().unwrap()));
        assert!(
            lock.holder().unwrap().is_none(),
            "a record lock never conflicts within its own process"
        );
        lock.close();
        assert_eq!(lock.try_acquire(fd.as_fd()).unwrap_err().kind(), ErrorKind::Closed);
    }
}
