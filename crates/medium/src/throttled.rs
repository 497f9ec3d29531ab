//! A medium with a limited rate per directory, which simulates slow disks on any machine.

use crate::{Access, FileOwner, Medium, MediumFile, Room};
use parking_lot::Mutex;
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limits the bytes per second that are read from and written to the files below some directories.
///
/// All reads and writes of the files below one directory, by any thread, share one rate. Other
/// directories do not slow them. Only transfers of bytes are limited, not metadata, allocation and
/// syncs. Files outside the directories are not limited. A limited file exposes no descriptor, so
/// its transfers are blocking calls.
#[derive(Clone, Debug)]
pub struct Throttled {
    inner: Arc<dyn Medium>,
    disks: Vec<(PathBuf, Arc<Disk>)>,
}

impl Throttled {
    /// Wraps `inner`. Each of `dirs` is limited to `bytes_per_second`, at least one byte.
    #[must_use]
    pub fn new(inner: Arc<dyn Medium>, dirs: &[PathBuf], bytes_per_second: u64) -> Self {
        let disk = || Arc::new(Disk::new(bytes_per_second));
        Self { inner, disks: dirs.iter().map(|dir| (dir.clone(), disk())).collect() }
    }

    /// The disk that holds `path`; `None` if `path` is not limited.
    fn disk(&self, path: &Path) -> Option<Arc<Disk>> {
        let found = self.disks.iter().find(|(dir, _)| path.starts_with(dir));
        found.map(|(_, disk)| Arc::clone(disk))
    }
}

impl Medium for Throttled {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        let inner = self.inner.open(path, access)?;
        Ok(match self.disk(path) {
            Some(disk) => Arc::new(ThrottledFile { inner, disk }),
            None => inner,
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.inner.list(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.inner.sync_dir(dir)
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
struct Disk {
    start: Instant,
    pace: Mutex<Pace>,
}

impl Disk {
    fn new(bytes_per_second: u64) -> Self {
        Self { start: Instant::now(), pace: Mutex::new(Pace::new(bytes_per_second)) }
    }

    /// Runs `transfer`, which moves `bytes`, and returns no earlier than the disk's rate permits.
    fn limit<T>(&self, bytes: usize, transfer: impl FnOnce() -> T) -> T {
        let end = self.pace.lock().reserve(self.start.elapsed(), bytes as u64);
        let result = transfer();
        // Delay the caller until the time at which the transfer ends at the disk's rate.
        std::thread::sleep(end.saturating_sub(self.start.elapsed()));
        result
    }
}

/// The schedule of a disk that makes one transfer at a time.
#[derive(Clone, Copy, Debug)]
struct Pace {
    bytes_per_second: u64,
    /// End of the last reserved transfer, since the disk's start. An idle disk accumulates no
    /// credit.
    busy_until: Duration,
}

impl Pace {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), busy_until: Duration::ZERO }
    }

    /// Schedules a transfer of `bytes` that is requested at `now`, after all scheduled transfers.
    /// Returns the end of the transfer. Both times are since the disk's start.
    fn reserve(&mut self, now: Duration, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let length = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.busy_until = self.busy_until.max(now).saturating_add(length);
        self.busy_until
    }
}

#[derive(Debug)]
struct ThrottledFile {
    inner: Arc<dyn MediumFile>,
    disk: Arc<Disk>,
}

impl MediumFile for ThrottledFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.disk.limit(buffer.len(), || self.inner.read_at(buffer, offset))
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.disk.limit(buffer.len(), || self.inner.write_at(buffer, offset))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        self.inner.allocate(length)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.inner.set_len(length)
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

    /// `None`, because a transfer through the descriptor would not be limited.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_simulated(&self) -> bool {
        self.inner.is_simulated()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Host, SimDisk};

    const WRITE: Access = Access { write: true, create: true, direct: false };
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn transfers_follow_each_other_at_the_rate() {
        let mut pace = Pace::new(1000);
        assert_eq!(pace.reserve(Duration::ZERO, 500), SECOND / 2);
        // Both transfers are requested while the disk is busy, so each begins at the end of the
        // previous transfer.
        assert_eq!(pace.reserve(SECOND / 4, 500), SECOND);
        assert_eq!(pace.reserve(SECOND / 4, 2000), 3 * SECOND);
        assert_eq!(pace.reserve(SECOND, 0), 3 * SECOND);
    }

    #[test]
    fn idle_disk_accumulates_no_credit() {
        let mut pace = Pace::new(1000);
        assert_eq!(pace.reserve(10 * SECOND, 1000), 11 * SECOND);
        assert_eq!(pace.reserve(60 * SECOND, 1000), 61 * SECOND);
    }

    #[test]
    fn extreme_lengths_do_not_overflow() {
        let mut pace = Pace::new(0);
        pace.reserve(Duration::MAX, u64::MAX);
        assert_eq!(pace.reserve(SECOND, u64::MAX), Duration::MAX);
    }

    #[test]
    fn only_files_below_the_directories_are_limited() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ["a", "b"].map(|name| root.path().join(name));
        // At a byte per second, a limited write of 4,096 bytes would take more than an hour.
        let slow = Throttled::new(Arc::new(Host), &dirs, 1);
        for dir in &dirs {
            slow.create_dir(dir).unwrap();
        }
        let open = |name: &str| slow.open(&root.path().join(name), WRITE).unwrap();
        let (a, beside, similar) = (open("a/f"), open("f"), open("ab"));
        beside.write_at(&[7; 4096], 0).unwrap();
        similar.write_at(&[7; 4096], 0).unwrap();
        assert!(a.descriptor().is_none() && beside.descriptor().is_some());
        assert!(!a.is_simulated());
        // Metadata and syncs are not limited.
        a.allocate(4096).unwrap();
        a.sync_data().unwrap();
        assert_eq!(a.length().unwrap(), 4096);

        let disk = |name| slow.disk(&root.path().join(name)).unwrap();
        assert!(Arc::ptr_eq(&disk("a/f"), &disk("a/g")));
        assert!(!Arc::ptr_eq(&disk("a/f"), &disk("b/f")));
    }

    #[test]
    fn reads_and_writes_of_a_directory_share_its_schedule() {
        let dirs = [PathBuf::from("/a"), PathBuf::from("/b")];
        let slow = Throttled::new(Arc::new(SimDisk::new(1 << 20)), &dirs, 1 << 30);
        let open = |name| slow.open(Path::new(name), WRITE).unwrap();
        slow.create_dir(&dirs[0]).unwrap();
        slow.create_dir(&dirs[1]).unwrap();
        let (f, g) = (open("/a/f"), open("/a/g"));
        assert!(f.is_simulated());
        let busy = |name| slow.disk(Path::new(name)).unwrap().pace.lock().busy_until;
        let bytes = [5; 64 << 10];
        f.write_at(&bytes, 0).unwrap();
        let first = busy("/a/f");
        g.write_at(&bytes, 0).unwrap();
        let second = busy("/a/f");
        let mut read = [0; 64 << 10];
        assert_eq!(f.read_at(&mut read, 0).unwrap(), read.len());
        assert_eq!(read, bytes);
        assert!(Duration::ZERO < first && first < second && second < busy("/a/g"));
        assert_eq!(busy("/b/f"), Duration::ZERO);
    }
}
