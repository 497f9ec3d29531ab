//! The directory of a store, where its processes find each other.
//!
//! ```text
//! LOCK              held by the owner                    see `lock`
//! owner.sock        where the owner listens              see `socket`
//! clients/<name>    held by a client while it may write  see `presence`
//! ```

use crate::lock::DirectoryLock;
use crate::mismatch::OwnerMismatch;
use crate::process::Process;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_medium::{Anchored, Medium, Owner};
use ritornello_store::foreign_directory;
use rustix::fs::{Mode, OFlags};
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
    /// The mount point below which the directory was opened.
    mount: PathBuf,
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
            mount: mount_point(path),
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

    /// Returns whether the path now leads to another directory: this one was moved, or mounted
    /// over.
    pub(crate) fn is_elsewhere(&self) -> bool {
        Identity::of(&self.path).ok() != Some(self.identity)
    }

    /// Returns whether the store belongs at the path's new target: a disk was mounted over this
    /// directory, or the path leads to another store. After an unmount it does not: the directory
    /// below a mount point is no place for a store that was on the mounted disk.
    pub(crate) fn is_superseded(&self) -> bool {
        if !self.is_elsewhere() || !is_mount_point(&self.mount) {
            return false;
        }
        // A disk that was mounted above the directory may not contain the directory yet.
        let device = self.path.ancestors().find_map(|part| Identity::of(part).ok());
        device.is_some_and(|found| found.device != self.identity.device)
            || self.path.join("MANIFEST").exists()
    }

    /// Wraps `medium` so that the store's files are reached through this directory's descriptor,
    /// even if the path leads elsewhere later.
    ///
    /// # Errors
    /// Those of `dup(2)`.
    pub(crate) fn anchor(&self, medium: Arc<dyn Medium>) -> io::Result<Arc<dyn Medium>> {
        Ok(Arc::new(Anchored::new(medium, &self.path, self.dir.try_clone()?)))
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

fn mount_point(path: &Path) -> PathBuf {
    path.ancestors().find(|part| is_mount_point(part)).unwrap_or(Path::new("/")).to_owned()
}

fn is_mount_point(path: &Path) -> bool {
    let Some(parent) = path.parent() else { return true };
    match (Identity::of(path), Identity::of(parent)) {
        (Ok(here), Ok(above)) => here.device != above.device,
        _ => false,
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
