//! The directory of a store, where its processes find each other.
//!
//! ```text
//! LOCK              held by the owner                    see `lock`
//! owner.sock        where the owner listens              see `socket`
//! clients/<name>    held by a client while it may write  see `presence`
//! ```

use crate::lock::DirectoryLock;
use crate::mismatch::OwnerMismatch;
use crate::mounts::{Mounts, Place};
use crate::process::Process;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_medium::{Anchored, FileOwner, Host, Medium};
use ritornello_store::{Directory, foreign_directory};
use rustix::fs::{Dir, Mode, OFlags};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Name of the subdirectory that holds the clients' lock files.
pub(crate) const CLIENTS: &str = "clients";

/// Whether this process has logged that the kernel does not report mounts.
static IS_UNKNOWN_LOGGED: AtomicBool = AtomicBool::new(false);

/// Identifies a directory independently of the path that leads to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Returns the identity of the file system object at `path`.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let found = std::fs::metadata(path)?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }
}

/// Why a process leaves its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    MountedOver,
    Replaced,
    /// The store failed, and its file system was unmounted. A store that works is not left.
    Unmounted,
    /// The store failed, and its directory was moved or removed. A store that works is not left.
    Moved,
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MountedOver => "a file system was mounted over the store",
            Self::Replaced => "another store took the place of the store's directory",
            Self::Unmounted => "the store failed, and its file system was unmounted",
            Self::Moved => "the store failed, and its directory was moved or removed",
        })
    }
}

/// An open directory with its lock file.
#[derive(Debug)]
pub(crate) struct NodeDirectory {
    pub(crate) process: Process,
    pub(crate) lock: DirectoryLock,
    /// Names under which this process is a client, see [`crate::presence`]: each is inserted before
    /// its file under `clients/` exists, and removed after the file. The set is needed because
    /// `fcntl` reports a process's own locks as free.
    pub(crate) names: Mutex<BTreeSet<String>>,
    pub(crate) mismatch: OwnerMismatch,
    path: PathBuf,
    identity: Identity,
    mounts: Mounts,
    dir: File,
}

impl NodeDirectory {
    /// Opens an existing directory, revokes other users' access, and creates `LOCK` and `clients/`
    /// in it. The caller has checked that the directory is empty or holds a store.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let refused = |error: io::Error| unusable(path, error);
        let (dir, found) = open_dir(path)?;
        if FileOwner::of(&found).is_open {
            rustix::fs::fchmod(&dir, Mode::RWXU).map_err(|error| refused(error.into()))?;
        }
        match rustix::fs::mkdirat(&dir, CLIENTS, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(refused(error.into())),
        }
        let lock = DirectoryLock::open(dir.as_fd()).map_err(refused)?;
        let opened = Self::with_lock(path, dir, &found, lock);
        if !opened.mounts.are_known() && !IS_UNKNOWN_LOGGED.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                dir = %path.display(),
                "the kernel does not say which mount the store is on: a file system that is mounted over it \
                 is not noticed, so mount disks before their stores are opened"
            );
        }
        Ok(opened)
    }

    /// Opens a store's directory and changes nothing in it; `None` if it has no `LOCK`, so no
    /// process owns the store. The caller must prevent other threads of this process from opening
    /// the store until `lock` is closed: when a process closes any descriptor of a file, the kernel
    /// releases all locks of the process on this file ([`crate::record_lock`]).
    pub(crate) fn observe(path: &Path) -> Result<Option<Self>> {
        let (dir, found) = open_dir(path)?;
        let lock = DirectoryLock::observe(dir.as_fd()).map_err(|error| unusable(path, error))?;
        Ok(lock.map(|lock| Self::with_lock(path, dir, &found, lock)))
    }

    fn with_lock(path: &Path, dir: File, found: &Metadata, lock: DirectoryLock) -> Self {
        Self {
            process: Process::current(),
            lock,
            names: Mutex::default(),
            mismatch: OwnerMismatch::default(),
            path: path.to_owned(),
            identity: Identity { device: found.dev(), inode: found.ino() },
            mounts: Mounts::around(path),
            dir,
        }
    }

    /// The path by which the directory was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A descriptor of the directory. The descriptor stays valid if the directory is moved.
    pub(crate) fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// Lists the UTF-8 names in the subdirectory `part`.
    pub(crate) fn names_in(&self, part: &str) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&self.dir, part, flags, Mode::empty())?;
        let entries = Dir::new(dir)?.filter_map(|entry| {
            entry.map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).transpose()
        });
        Ok(entries.collect::<rustix::io::Result<_>>()?)
    }

    /// Returns whether the path now leads to another directory or to no directory, for example
    /// because this directory was moved, or a file system was mounted over it.
    ///
    /// # Errors
    /// If the target of the path cannot be determined, for example because its file system fails.
    pub(crate) fn is_elsewhere(&self) -> io::Result<bool> {
        is_elsewhere(self.identity, Identity::of(&self.path))
    }

    /// The device and the inode number of the directory.
    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// The mounts that this process saw when the directory was opened, and the mount that the
    /// directory's path led to.
    pub(crate) fn mounts(&self) -> &Mounts {
        &self.mounts
    }

    /// Returns why this process must leave `store`, which was opened in this directory: a file
    /// system was mounted over the directory, or the directory was moved and another store is in
    /// its place.
    ///
    /// An unmount does not count: if the process left, the next opening of the path would use or
    /// create a store below the mount point, where the pages of the unmounted disk do not belong.
    pub(crate) fn superseded(&self, store: [u8; 16]) -> Option<Departure> {
        let found = Identity::of(&self.path);
        let is_same_device = found.as_ref().is_ok_and(|found| found.device == self.identity.device);
        if !is_elsewhere(self.identity, found).unwrap_or(false) {
            return None;
        }
        match self.mounts.place(&self.path) {
            // Leave even if the new mount holds a copy of this store, because the copy has a
            // separate owner.
            Place::New => Some(Departure::MountedOver),
            Place::Below => None,
            // An unmount changes the device too, and must not make the process leave.
            Place::Unknown if !is_same_device => None,
            Place::Same | Place::Unknown => {
                let there = Directory::new(Arc::new(Host), &self.path).manifest().ok().flatten();
                // If the manifest names the same store, the directory was not replaced: some file
                // systems change the inode numbers of their files.
                there.is_some_and(|there| there.uuid != store).then_some(Departure::Replaced)
            }
        }
    }

    /// Returns why this process must leave a failed store that is no longer found at its path.
    pub(crate) fn missing(&self) -> Option<Departure> {
        if !self.is_elsewhere().unwrap_or(false) {
            return None;
        }
        Some(match self.mounts.place(&self.path) {
            Place::Below => Departure::Unmounted,
            Place::New => Departure::MountedOver,
            Place::Same | Place::Unknown => Departure::Moved,
        })
    }

    /// Wraps `medium` so that the store's files are reached through this directory's descriptor,
    /// even if the path leads elsewhere later.
    ///
    /// # Errors
    /// Any error of `dup(2)`.
    pub(crate) fn anchor(&self, medium: Arc<dyn Medium>) -> io::Result<Arc<dyn Medium>> {
        let anchored = Anchored::new(Arc::clone(&medium), &self.path, self.dir.try_clone()?);
        Ok(anchored.map_or_else(
            || {
                tracing::warn!(
                    dir = %self.path.display(),
                    "/proc is not mounted: the store's files are reached by its path; never move \
                     the store or mount over it while it is open"
                );
                medium
            },
            |anchored| Arc::new(anchored) as Arc<dyn Medium>,
        ))
    }

    /// Takes the directory's lock. Returns `false` if another process holds it.
    pub(crate) fn try_own(&self) -> Result<bool> {
        // Do not take the lock while the path leads elsewhere: a process that opens the path would
        // not find this owner.
        match self.is_elsewhere() {
            Ok(false) => {}
            Ok(true) => {
                return Err(Error::fatal(
                    "the store's directory was moved or replaced: open it again where it is now",
                )
                .with("dir", self.path.display()));
            }
            Err(error) => {
                return Err(Error::retry(
                    "the target of the store's path cannot be determined: check the path's file \
                     system, and open the store again",
                )
                .with("dir", self.path.display())
                .because(error));
            }
        }
        self.lock.try_acquire(self.dir())
    }
}

/// Opens the directory `path`. Fails if it belongs to another user.
fn open_dir(path: &Path) -> Result<(File, Metadata)> {
    let refused = |error: io::Error| unusable(path, error);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir: File =
        rustix::fs::open(path, flags, Mode::empty()).map_err(|error| refused(error.into()))?.into();
    let found = dir.metadata().map_err(refused)?;
    let owner = FileOwner::of(&found);
    if owner.is_this_user { Ok((dir, found)) } else { Err(foreign_directory(path, owner)) }
}

/// Whether `found`, the current identity of a path's target, differs from `opened`.
///
/// # Errors
/// Returns the error of `found`, unless it says that the path does not exist.
fn is_elsewhere(opened: Identity, found: io::Result<Identity>) -> io::Result<bool> {
    match found {
        Ok(found) => Ok(found != opened),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

/// Returns the error for a store's directory on which an operation failed with `error`, with
/// advice.
pub(crate) fn unusable(path: &Path, error: io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "the path names a file, not a directory: name a directory"
        }
        io::ErrorKind::NotFound => "there is no store here yet: give a capacity to create one",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "the directory cannot be written: run as its user, or name another directory"
        }
        io::ErrorKind::StorageFull => "the disk is full: free some space and open again",
        _ => {
            return Error::retry(
                "a file operation in the store's directory failed: check its disk, and try again",
            )
            .with("dir", path.display())
            .because(error);
        }
    };
    Error::invalid(advice).with("dir", path.display()).because(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::ErrorKind;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn directory_of_another_user_gets_no_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        // As root the test gives the new directory to another user. Otherwise it opens `/`, which
        // belongs to root.
        let path = if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(dir.path(), Some(12_345), None).unwrap();
            dir.path()
        } else {
            Path::new("/")
        };
        let error = NodeDirectory::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("another user"), "{error}");
        assert!(!path.join("LOCK").exists());
    }

    /// The directory is like a Kubernetes volume with `fsGroup`: its owner is another user, and its
    /// group is a group of this process.
    #[test]
    fn group_directory_error_names_a_subdirectory() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(12_345), None).unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o2775)).unwrap();
        let error = NodeDirectory::open(dir.path()).unwrap_err().to_string();
        let inside = dir.path().join("ritornello");
        assert!(error.contains(&format!("name {} instead", inside.display())), "{error}");
        std::fs::create_dir(&inside).unwrap();
        NodeDirectory::open(&inside).unwrap();
    }

    #[test]
    fn errors_other_than_a_missing_path_are_returned() {
        let here = Identity { device: 1, inode: 2 };
        let other = Identity { inode: 3, ..here };
        let found = |found: io::Result<Identity>| is_elsewhere(here, found).ok();
        assert_eq!((found(Ok(here)), found(Ok(other))), (Some(false), Some(true)));
        for (error, expected) in [
            (libc::ENOENT, Some(true)),
            (libc::ENOTDIR, Some(true)),
            (libc::EIO, None),
            (libc::EACCES, None),
            (libc::ELOOP, None),
        ] {
            assert_eq!(found(Err(io::Error::from_raw_os_error(error))), expected, "{error}");
        }
    }

    #[test]
    fn lock_is_refused_while_the_path_cannot_be_examined() {
        let root = tempfile::tempdir().unwrap();
        let (dir, away) = (root.path().join("dir"), root.path().join("away"));
        std::fs::create_dir(&dir).unwrap();
        let directory = NodeDirectory::open(&dir).unwrap();
        std::fs::rename(&dir, &away).unwrap();
        // The path is a link to itself: examining it fails with ELOOP.
        std::os::unix::fs::symlink(&dir, &dir).unwrap();
        assert_eq!(directory.try_own().unwrap_err().kind(), ErrorKind::Retry);
        assert_eq!((directory.superseded([1; 16]), directory.missing()), (None, None));
        std::fs::remove_file(&dir).unwrap();
        assert_eq!(directory.try_own().unwrap_err().kind(), ErrorKind::Fatal);
        assert_eq!(directory.missing(), Some(Departure::Moved));
        std::fs::rename(&away, &dir).unwrap();
        assert!(directory.try_own().unwrap());
        assert_eq!(directory.missing(), None);
    }
}
