//! # ritornello-medium
//!
//! The interface between Ritornello and the file system: two small traits with the operations that
//! Ritornello uses, so that tests can run the code that uses these traits on a faulty or a
//! simulated disk.
//!
//! **Promises.** [`Host`] uses the machine's own file system. [`Faulty`] fails on
//! schedule; [`Watched`] reports changes to a test; [`Throttled`] limits the rate of a directory;
//! [`Anchored`] keeps using a directory that is moved or hidden by a mount; [`SimDisk`] loses and
//! tears unsynced data when it crashes. A [`SimProcess`] on a simulated disk can be killed with
//! writes in flight, and directories of the disk can be unmounted.
//!
//! **Must not know** the meaning of stored bytes: this crate handles bytes and paths.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

mod anchored;
mod change;
mod faulty;
mod file_owner;
mod host;
mod schedule;
mod sim;
mod sparse;
mod throttled;
mod tree;
mod watched;

pub use anchored::Anchored;
pub use faulty::Faulty;
pub use file_owner::FileOwner;
pub use host::Host;
pub use schedule::{MediumFault, Op, Rule, Schedule};
pub use sim::{SimDisk, SimProcess};
pub use throttled::Throttled;
pub use watched::{DiskChange, Watch, Watched};

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Access {
    /// Opens for writing as well as reading.
    pub write: bool,
    /// Creates the file if it does not exist.
    pub create: bool,
    /// Bypasses the page cache (`O_DIRECT`): offsets, lengths and memory must be multiples of 4
    /// KiB.
    pub direct: bool,
}

/// Whether an error means that the disk cannot return a file's contents.
#[must_use]
pub fn is_unreadable(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let numbers = [Errno::IO, Errno::UCLEAN, Errno::BADMSG].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}

/// [`Room::kind`] of tmpfs, a file system in memory.
pub const TMPFS: u64 = 0x0102_1994;

/// Space on the file system that holds a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Room {
    /// Bytes available to an unprivileged process.
    pub available: u64,
    /// Total bytes of the file system.
    pub total: u64,
    /// `f_type` of `statfs(2)`.
    pub kind: u64,
}

/// A file system.
pub trait Medium: Send + Sync + Debug {
    /// Creates `path` and its parents; on the host, with mode 0700.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Opens a regular file. On the host a new file has mode 0600, and a symbolic link or a file of
    /// another user cannot be opened for writing.
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>>;
    /// Replaces `to` by `from` atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Lists the names in a directory, sorted.
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>>;
    /// Makes creations, renames and removals in `dir` durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Returns the space of the file system that holds `dir`.
    fn room(&self, dir: &Path) -> io::Result<Room>;
    /// Returns the owner of the directory `dir`. By default the owner is this process's user, the
    /// only user of a simulated disk.
    fn owner(&self, dir: &Path) -> io::Result<FileOwner> {
        let _ = dir;
        Ok(FileOwner::this_user())
    }
    /// Revokes other users' access to a directory of this user: mode 0700. By default does nothing,
    /// because a simulated disk has no other users.
    fn close_to_others(&self, dir: &Path) -> io::Result<()> {
        let _ = dir;
        Ok(())
    }
    /// Returns the path by which a library that opens files without the medium reaches `path`.
    /// Valid as long as the medium exists. By default the path is `path`.
    fn host_path(&self, path: &Path) -> PathBuf {
        path.to_owned()
    }
}

/// An open file.
pub trait MediumFile: Send + Sync + Debug {
    /// Reads up to `buffer.len()` bytes at `offset`; fewer only at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all of `buffer` at `offset`.
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()>;
    /// `fdatasync`: makes everything written to the file, by any process, durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Allocates blocks for the first `length` bytes, and extends a shorter file to `length` bytes.
    fn allocate(&self, length: u64) -> io::Result<()>;
    /// Truncates or extends the file.
    fn set_len(&self, length: u64) -> io::Result<()>;
    /// Waits until all direct writes to the file that any process has begun have ended, including
    /// writes of dead processes. Writes that begin during this call may wait for it. On the host
    /// only ext4 and XFS are known to wait for these writes.
    ///
    /// `io_uring` outlives its process: a killed process releases its file locks while its writes
    /// are still queued in the block layer. Space to which a killed process may have been writing
    /// is safe to reuse only after this call.
    ///
    /// # Errors
    /// File-system errors. After an error, writes of the dead process may still be queued.
    fn drain(&self) -> io::Result<()>;
    /// Length in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Bytes of allocated blocks.
    fn allocated(&self) -> io::Result<u64>;
    /// The descriptor, for `io_uring`. `None` for a file of a simulated disk, and where transfers
    /// must pass through the medium: the caller then transfers bytes with [`MediumFile::read_at`]
    /// and [`MediumFile::write_at`].
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
    /// Whether the caller must make one call at a time, without direct I/O, so that a test is
    /// repeatable. By default true for a file without a descriptor.
    fn is_simulated(&self) -> bool {
        self.descriptor().is_none()
    }
}
