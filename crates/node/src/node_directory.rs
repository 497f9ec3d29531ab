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
use ritornello_medium::{Anchored, Host, Medium, Owner};
use ritornello_store::{Directory, foreign_directory};
use rustix::fs::{Dir, Mode, OFlags};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The directory of the clients' lock files.
pub(crate) const CLIENTS: &str = "clients";

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

/// An open directory with its lock file.
#[derive(Debug)]
pub(crate) struct NodeDirectory {
    pub(crate) process: Process,
    pub(crate) lock: DirectoryLock,
    /// Names that this process holds: its own locks look free to itself.
    pub(crate) names: Mutex<BTreeSet<String>>,
    pub(crate) mismatch: OwnerMismatch,
    path: PathBuf,
    identity: Identity,
    mounts: Mounts,
    dir: File,
}

impl NodeDirectory {
    /// Opens an existing directory that is empty or holds a store, and revokes other users' access.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let refused = |error: io::Error| unusable(path, error);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir: File = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| refused(error.into()))?
            .into();
        let found = dir.metadata().map_err(refused)?;
        let owner = Owner::of(&found);
        if !owner.is_this_user {
            return Err(foreign_directory(path, owner));
        }
        if owner.is_open {
            rustix::fs::fchmod(&dir, Mode::RWXU).map_err(|error| refused(error.into()))?;
        }
        match rustix::fs::mkdirat(&dir, CLIENTS, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(refused(error.into())),
        }
        let lock = DirectoryLock::open(dir.as_fd()).map_err(refused)?;
        Ok(Self {
            process: Process::current(),
            lock,
            names: Mutex::default(),
            mismatch: OwnerMismatch::default(),
            path: path.to_owned(),
            identity: Identity { device: found.dev(), inode: found.ino() },
            mounts: Mounts::around(path),
            dir,
        })
    }

    /// The path it was opened by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The directory itself, even if it was moved.
    pub(crate) fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// Lists the UTF-8 names in `part`, a directory below this one.
    pub(crate) fn names_in(&self, part: &str) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&self.dir, part, flags, Mode::empty())?;
        let entries = Dir::new(dir)?.filter_map(|entry| {
            entry.map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).transpose()
        });
        Ok(entries.collect::<rustix::io::Result<_>>()?)
    }

    /// Returns whether the path now leads to another directory: this one was moved, or mounted
    /// over.
    pub(crate) fn is_elsewhere(&self) -> bool {
        Identity::of(&self.path).ok() != Some(self.identity)
    }

    /// Device and inode.
    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// The mounts when the directory was opened.
    pub(crate) fn mounts(&self) -> &Mounts {
        &self.mounts
    }

    /// Returns whether `store`, which was opened here, belongs at the path's new target: a file
    /// system was mounted over this directory, or the directory was moved and another store is in
    /// its place. After an unmount it does not: the path then leads below the mount point, where a
    /// store that was on the mounted disk has no place.
    pub(crate) fn is_superseded(&self, store: [u8; 16]) -> bool {
        if !self.is_elsewhere() {
            return false;
        }
        let there = Directory::new(Arc::new(Host), &self.path).manifest().ok().flatten();
        match there.map(|manifest| manifest.uuid) {
            // Another mount of the same directory, or a file system with unstable inode numbers.
            Some(uuid) if uuid == store => false,
            found => match self.mounts.place(&self.path) {
                Place::New => true,
                Place::Same => found.is_some(),
                Place::Below => false,
            },
        }
    }

    /// Wraps `medium` so that the store's files are reached through this directory's descriptor,
    /// even if the path leads elsewhere later.
    ///
    /// # Errors
    /// The errors of `dup(2)`.
    pub(crate) fn anchor(&self, medium: Arc<dyn Medium>) -> io::Result<Arc<dyn Medium>> {
        let anchored = Anchored::new(Arc::clone(&medium), &self.path, self.dir.try_clone()?);
        Ok(anchored.map_or_else(
            || {
                tracing::warn!(
                    dir = %self.path.display(),
                    "/proc is not mounted: the store's files are reached by its path; never move it \
                     or mount over it while it is open"
                );
                medium
            },
            |anchored| Arc::new(anchored) as Arc<dyn Medium>,
        ))
    }

    /// Takes the directory's lock. Returns `false` if another process holds it.
    pub(crate) fn try_own(&self) -> Result<bool> {
        // A process that opens the store by its path would not find this owner.
        if self.is_elsewhere() {
            return Err(Error::fatal(
                "the store's directory was moved or replaced: open it again where it is now",
            )
            .with("dir", self.path.display()));
        }
        self.lock.try_acquire(self.dir())
    }
}

/// The error for an unusable directory, with advice.
pub(crate) fn unusable(path: &Path, error: io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "this is a file, not a directory: name a directory"
        }
        io::ErrorKind::NotFound => "there is no store here yet: give a capacity to make one",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "the directory cannot be written: run as its owner, or name another one"
        }
        io::ErrorKind::StorageFull => "the disk is full: free some space and open again",
        _ => {
            return Error::retry("the store's directory failed")
                .with("dir", path.display())
                .because(error);
        }
    };
    Error::invalid(advice).with("dir", path.display()).because(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn directory_of_another_user_is_left_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        // Whether or not root runs this test, one of the two directories belongs to another user.
        let path = if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(dir.path(), Some(12_345), None).unwrap();
            dir.path()
        } else {
            Path::new("/")
        };
        let error = NodeDirectory::open(path).unwrap_err();
        assert_eq!(error.kind(), ritornello_format::ErrorKind::Invalid);
        assert!(error.to_string().contains("another user"), "{error}");
        assert!(!path.join("LOCK").exists());
    }

    /// A Kubernetes volume with `fsGroup`: its owner is another user, its group is one of this process.
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
}
