//! Directories of a simulated disk that are separate file systems, and can be unmounted.

use super::SimDisk;
use crate::change::Chance;
use crate::tree::{Inode, Tree};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// The unmounted file systems, and the names that mounted file systems hide.
#[derive(Clone, Debug, Default)]
pub(super) struct Mounts(BTreeMap<PathBuf, Mount>);

#[derive(Clone, Debug, Default)]
struct Mount {
    unmounted: bool,
    /// While the file system is unmounted, the names in it; while it is mounted, the names under
    /// the mount point that it hides.
    unseen: Tree,
    /// Paths created under the mount point while the file system was unmounted, including paths
    /// that were removed again.
    created: Vec<PathBuf>,
}

impl Mounts {
    /// Records that a process creates `path`, if `path` is below the mount point of an unmounted
    /// file system.
    pub(super) fn note_created(&mut self, path: &Path) {
        let mut unmounted = self.0.iter_mut().filter(|(_, mount)| mount.unmounted);
        if let Some((_, mount)) =
            unmounted.find(|(dir, _)| path != dir.as_path() && path.starts_with(dir.as_path()))
        {
            mount.created.push(path.to_owned());
        }
    }

    /// All files in the `unseen` trees: no path leads to these files now.
    pub(super) fn files(&self) -> impl Iterator<Item = Inode> {
        self.0.values().flat_map(|mount| mount.unseen.files())
    }

    /// Replaces the names below `dir` in `tree` by the names that the mounted file system hid.
    /// Returns the replaced names.
    fn unmount(&mut self, tree: &mut Tree, dir: &Path) -> io::Result<&mut Tree> {
        if !tree.is_dir(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let mount = self.0.entry(dir.to_owned()).or_default();
        if mount.unmounted {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let names = tree.split_below(dir);
        tree.merge(std::mem::replace(&mut mount.unseen, names));
        mount.unmounted = true;
        mount.created.clear();
        Ok(&mut mount.unseen)
    }

    pub(super) fn crash(&self, chance: &mut Chance) -> Self {
        let mounts = self.0.iter().map(|(dir, mount)| {
            let unseen = mount.unseen.crash_below(dir, chance);
            (dir.clone(), Mount { unseen, ..mount.clone() })
        });
        Self(mounts.collect())
    }
}

impl SimDisk {
    /// Unmounts the file system in `dir` and makes its changes durable, as `umount(2)` does. Files
    /// that a process creates below `dir` afterwards belong to the file system of the mount point.
    /// Open files stay open.
    ///
    /// # Errors
    /// `NotFound` if `dir` does not exist; `InvalidInput` if its file system is not mounted.
    pub fn unmount(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let names = state.mounts.unmount(&mut state.tree, dir)?;
        names.sync_all();
        for inode in names.files() {
            if let Some(file) = state.files.get_mut(&inode) {
                file.drain();
                file.sync();
                // The page cache is dropped, including data that is only in the page cache after a
                // failed sync.
                file.now = file.durable.clone();
            }
        }
        Ok(())
    }

    /// Unmounts the file system as `umount --lazy` does while files are open: no change becomes
    /// durable, and no path leads to the file system any longer.
    ///
    /// # Errors
    /// Errors of [`SimDisk::unmount`].
    pub fn detach(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.mounts.unmount(&mut state.tree, dir).map(drop)
    }

    /// Mounts the file system again, and hides names that were created under the mount point.
    ///
    /// # Errors
    /// `InvalidInput` if the file system is not unmounted; `NotFound` if the mount point does not
    /// exist.
    pub fn mount(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let mount = state.mounts.0.get_mut(dir).filter(|mount| mount.unmounted);
        let mount = mount.ok_or(io::ErrorKind::InvalidInput)?;
        if !state.tree.is_dir(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let hidden = state.tree.split_below(dir);
        state.tree.merge(std::mem::replace(&mut mount.unseen, hidden));
        mount.unmounted = false;
        Ok(())
    }

    /// Whether `dir` is unmounted.
    #[must_use]
    pub fn is_unmounted(&self, dir: &Path) -> bool {
        self.state.lock().mounts.0.get(dir).is_some_and(|mount| mount.unmounted)
    }

    /// Paths created below `dir` between its last unmount and the next mount, including removed
    /// paths.
    #[must_use]
    pub fn created_under(&self, dir: &Path) -> Vec<PathBuf> {
        self.state.lock().mounts.0.get(dir).map_or_else(Vec::new, |mount| mount.created.clone())
    }
}
