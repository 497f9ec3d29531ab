//! A medium that reports changes of files and names to a test, except new directories and access
//! rights.

use crate::{Access, FileOwner, Medium, MediumFile, Room};
use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An operation that may change the disk, with its path and further arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskChange<'a> {
    /// [`Medium::open`].
    Open(&'a Path, Access),
    /// [`Medium::rename`]: from the first path to the second.
    Rename(&'a Path, &'a Path),
    /// [`Medium::remove`].
    Remove(&'a Path),
    /// [`Medium::sync_dir`].
    SyncDir(&'a Path),
    /// [`MediumFile::write_at`]: the offset, and the number of bytes.
    Write(&'a Path, u64, usize),
    /// [`MediumFile::sync_data`].
    SyncData(&'a Path),
    /// [`MediumFile::allocate`]: the length.
    Allocate(&'a Path, u64),
    /// [`MediumFile::set_len`]: the length.
    SetLen(&'a Path, u64),
}

/// The receiver of a [`Watched`] medium's reports. A receiver may wait, and may use the inner
/// medium.
pub trait Watch: Send + Sync + Debug {
    /// Called before a change. By default does nothing.
    ///
    /// # Errors
    /// If this method fails, the change is not made, and the caller of the change gets the error.
    fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
        let _ = change;
        Ok(())
    }

    /// Called after a change that succeeded. By default does nothing.
    fn after(&self, change: &DiskChange<'_>) {
        let _ = change;
    }
}

/// Wraps any medium and reports its changes to a [`Watch`]. Transfers through a file's descriptor
/// are not reported.
#[derive(Clone, Debug)]
pub struct Watched {
    inner: Arc<dyn Medium>,
    watch: Arc<dyn Watch>,
}

impl Watched {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Medium>, watch: Arc<dyn Watch>) -> Self {
        Self { inner, watch }
    }

    fn make<T>(
        &self,
        change: DiskChange<'_>,
        make: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        self.watch.before(&change)?;
        let made = make()?;
        self.watch.after(&change);
        Ok(made)
    }
}

impl Medium for Watched {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        let change = DiskChange::Open(path, access);
        let inner = self.make(change, || self.inner.open(path, access))?;
        Ok(Arc::new(WatchedFile { inner, path: path.to_owned(), medium: self.clone() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.make(DiskChange::Rename(from, to), || self.inner.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.make(DiskChange::Remove(path), || self.inner.remove(path))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.inner.list(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.make(DiskChange::SyncDir(dir), || self.inner.sync_dir(dir))
    }

    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.inner.room(dir)
    }

    fn owner(&self, dir: &Path) -> io::Result<FileOwner> {
        self.inner.owner(dir)
    }

    fn close_to_others(&self, dir: &Path) -> io::Result<()> {
        self.inner.close_to_others(dir)
    }

    fn host_path(&self, path: &Path) -> PathBuf {
        self.inner.host_path(path)
    }
}

#[derive(Debug)]
struct WatchedFile {
    inner: Arc<dyn MediumFile>,
    path: PathBuf,
    medium: Watched,
}

impl MediumFile for WatchedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(buffer, offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        let change = DiskChange::Write(&self.path, offset, buffer.len());
        self.medium.make(change, || self.inner.write_at(buffer, offset))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.medium.make(DiskChange::SyncData(&self.path), || self.inner.sync_data())
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let change = DiskChange::Allocate(&self.path, length);
        self.medium.make(change, || self.inner.allocate(length))
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let change = DiskChange::SetLen(&self.path, length);
        self.medium.make(change, || self.inner.set_len(length))
    }

    fn drain(&self) -> io::Result<()> {
        self.inner.drain()
    }

    fn length(&self) -> io::Result<u64> {
        self.inner.length()
    }

    fn allocated(&self) -> io::Result<u64> {
        self.inner.allocated()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SimDisk;
    use parking_lot::Mutex;

    /// Counts changes, and refuses writes to files named "refused".
    #[derive(Debug, Default)]
    struct Counter(Mutex<(u32, u32)>);

    impl Watch for Counter {
        fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
            self.0.lock().0 += 1;
            match change {
                DiskChange::Write(path, ..) if path.ends_with("refused") => {
                    Err(io::ErrorKind::BrokenPipe.into())
                }
                _ => Ok(()),
            }
        }

        fn after(&self, _: &DiskChange<'_>) {
            self.0.lock().1 += 1;
        }
    }

    #[test]
    fn changes_are_reported_or_refused() {
        let counter = Arc::new(Counter::default());
        let disk = SimDisk::new(1 << 20);
        let medium = Watched::new(Arc::new(disk.clone()), Arc::clone(&counter) as Arc<dyn Watch>);
        let access = Access { write: true, create: true, direct: false };
        for (name, stored) in [("/refused", false), ("/taken", true)] {
            let file = medium.open(Path::new(name), access).unwrap();
            assert_eq!(file.write_at(b"x", 0).is_ok(), stored);
            assert_eq!(file.length().unwrap(), u64::from(stored));
        }
        assert_eq!(*counter.0.lock(), (4, 3));
    }
}
