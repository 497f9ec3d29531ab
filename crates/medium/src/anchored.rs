//! A medium that stays in one directory, even if the directory's path leads elsewhere later.

use crate::{Access, FileOwner, Medium, MediumFile, Room};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Reaches all paths below one directory through that directory's descriptor.
///
/// A file system can be mounted over a directory in use, and the directory can be moved. The path
/// of the directory then leads to another directory, possibly to the directory of another store, to
/// which this process must not write. The descriptor keeps referring to the directory that was
/// opened. Paths outside the directory are used unchanged.
#[derive(Clone, Debug)]
pub struct Anchored {
    inner: Arc<dyn Medium>,
    path: PathBuf,
    /// The path `/proc/self/fd/N` that leads to the open directory.
    through: PathBuf,
    /// Keeps the descriptor open.
    _dir: Arc<File>,
}

impl Anchored {
    /// Wraps `inner`: everything below `path` is reached through `dir`, the open directory at
    /// `path`. `None` if `/proc` is not mounted.
    #[must_use]
    pub fn new(inner: Arc<dyn Medium>, path: &Path, dir: File) -> Option<Self> {
        let through = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
        let is_mounted = through.is_dir();
        is_mounted.then(|| Self { inner, path: path.to_owned(), through, _dir: Arc::new(dir) })
    }

    fn reach(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.path) {
            Ok(rest) if rest.as_os_str().is_empty() => self.through.clone(),
            Ok(rest) => self.through.join(rest),
            Err(_) => path.to_owned(),
        }
    }
}

impl Medium for Anchored {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.inner.create_dir(&self.reach(path))
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        self.inner.open(&self.reach(path), access)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.inner.rename(&self.reach(from), &self.reach(to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.inner.remove(&self.reach(path))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.inner.list(&self.reach(dir))
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.inner.sync_dir(&self.reach(dir))
    }

    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.inner.room(&self.reach(dir))
    }

    fn owner(&self, dir: &Path) -> io::Result<FileOwner> {
        self.inner.owner(&self.reach(dir))
    }

    fn close_to_others(&self, dir: &Path) -> io::Result<()> {
        self.inner.close_to_others(&self.reach(dir))
    }

    fn host_path(&self, path: &Path) -> PathBuf {
        self.inner.host_path(&self.reach(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;

    const WRITE: Access = Access { write: true, create: true, direct: false };

    #[test]
    fn anchored_paths_follow_a_moved_directory() {
        let root = tempfile::tempdir().unwrap();
        let (dir, moved) = (root.path().join("dir"), root.path().join("moved"));
        Host.create_dir(&dir).unwrap();
        let open = File::open(&dir).unwrap();
        let medium = Anchored::new(Arc::new(Host), &dir, open).unwrap();
        std::fs::rename(&dir, &moved).unwrap();
        Host.create_dir(&dir).unwrap();

        medium.create_dir(&dir).unwrap();
        medium.create_dir(&dir.join("a/b")).unwrap();
        medium.open(&dir.join("a/new"), WRITE).unwrap();
        medium.rename(&dir.join("a/new"), &dir.join("f")).unwrap();
        medium.sync_dir(&dir).unwrap();
        assert_eq!(medium.list(&dir).unwrap(), ["a", "f"]);
        assert_eq!(Host.list(&moved).unwrap(), ["a", "f"]);
        std::fs::write(medium.host_path(&dir.join("g")), "").unwrap();
        medium.remove(&dir.join("g")).unwrap();
        assert!(medium.room(&dir).is_ok() && medium.owner(&dir).unwrap().is_this_user);
        medium.close_to_others(&dir).unwrap();
        assert_eq!(
            Host.list(&dir).unwrap(),
            [""; 0],
            "no file may be created in the new directory at the old path"
        );

        medium.open(&root.path().join("beside"), WRITE).unwrap();
        assert!(root.path().join("beside").exists());
    }
}
