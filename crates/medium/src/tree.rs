//! The directories of a simulated disk, and their changes that a power loss may undo.

use crate::change::Chance;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Identifies a file's contents, independently of its names.
pub(crate) type Inode = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Dir,
    File(Inode),
}

/// A change to a directory. Refers to a file by its inode, so that any subset of the changes can be
/// applied, in order.
#[derive(Clone, Debug)]
enum Link {
    Dir(PathBuf),
    Create(PathBuf, Inode),
    Remove(PathBuf, Inode),
    /// From the first path to the second, atomically: both names change, or neither.
    Rename(PathBuf, PathBuf, Inode),
}

impl Link {
    /// The path whose directory must be synced to make this change durable.
    fn path(&self) -> &Path {
        match self {
            Self::Dir(path) | Self::Create(path, _) | Self::Remove(path, _) => path,
            Self::Rename(_, to, _) => to,
        }
    }

    fn apply(&self, names: &mut BTreeMap<PathBuf, Entry>) {
        let unlink = |names: &mut BTreeMap<PathBuf, Entry>, path: &Path, inode| {
            if names.get(path) == Some(&Entry::File(inode)) {
                names.remove(path);
            }
        };
        match self {
            Self::Dir(path) => {
                names.insert(path.clone(), Entry::Dir);
            }
            Self::Create(path, inode) => {
                names.insert(path.clone(), Entry::File(*inode));
            }
            Self::Remove(path, inode) => unlink(names, path, *inode),
            Self::Rename(from, to, inode) => {
                unlink(names, from, *inode);
                names.insert(to.clone(), Entry::File(*inode));
            }
        }
    }
}

/// All names: `now` as programs see them, `durable` as they are on the disk. A power loss applies
/// some of `pending` to `durable`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    now: BTreeMap<PathBuf, Entry>,
    durable: BTreeMap<PathBuf, Entry>,
    /// Changes not applied to `durable` yet, oldest first.
    pending: Vec<Link>,
}

impl Tree {
    pub(crate) fn files(&self) -> impl Iterator<Item = Inode> {
        self.now.values().filter_map(|entry| match entry {
            Entry::File(inode) => Some(*inode),
            Entry::Dir => None,
        })
    }

    /// A path of `inode`, if any.
    pub(crate) fn path(&self, inode: Inode) -> Option<&Path> {
        let mut entries = self.now.iter();
        entries.find(|(_, entry)| **entry == Entry::File(inode)).map(|(path, _)| path.as_path())
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn is_dir(&self, path: &Path) -> bool {
        // The root exists without an entry.
        path.parent().is_none() || self.now.get(path) == Some(&Entry::Dir)
    }

    pub(crate) fn get(&self, path: &Path) -> io::Result<Option<Inode>> {
        match self.now.get(path) {
            Some(Entry::File(inode)) => Ok(Some(*inode)),
            Some(Entry::Dir) => Err(io::ErrorKind::IsADirectory.into()),
            None if path.parent().is_some_and(|parent| self.is_dir(parent)) => Ok(None),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    pub(crate) fn find(&self, path: &Path) -> io::Result<Inode> {
        self.get(path)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(crate) fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        if !self.is_dir(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let inside = self.now.keys().filter(|path| path.parent() == Some(dir));
        Ok(inside.filter_map(|path| path.file_name().map(OsString::from)).collect())
    }

    pub(crate) fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        let mut missing: Vec<&Path> = path.ancestors().filter(|up| !self.is_dir(up)).collect();
        if missing.iter().any(|up| self.now.contains_key(*up)) {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        while let Some(up) = missing.pop() {
            self.link(Link::Dir(up.to_owned()));
        }
        Ok(())
    }

    /// Creates a file. The caller has checked that `path` is free and its directory exists.
    pub(crate) fn create(&mut self, path: &Path, inode: Inode) {
        self.link(Link::Create(path.to_owned(), inode));
    }

    pub(crate) fn remove(&mut self, path: &Path) -> io::Result<()> {
        let inode = self.find(path)?;
        self.link(Link::Remove(path.to_owned(), inode));
        Ok(())
    }

    pub(crate) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let inode = self.find(from)?;
        self.get(to)?;
        if from != to {
            self.link(Link::Rename(from.to_owned(), to.to_owned(), inode));
        }
        Ok(())
    }

    /// Makes the changes in `dir` durable, and the creation of `dir` and of the directories above
    /// it (as the journaling file systems of Linux do).
    pub(crate) fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        if !self.is_dir(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let durable = &mut self.durable;
        self.pending.retain(|link| {
            let is_on_path = matches!(link, Link::Dir(path) if dir.starts_with(path));
            let is_durable = is_on_path || link.path().parent() == Some(dir);
            if is_durable {
                link.apply(durable);
            }
            !is_durable
        });
        Ok(())
    }

    /// The names after a power loss.
    pub(crate) fn crash(&self, chance: &mut Chance) -> Self {
        self.crash_below(Path::new("/"), chance)
    }

    /// The names after a power loss, for a tree that has only names below `root`
    /// ([`Tree::split_below`]): `root` and the directories above it exist in another tree.
    pub(crate) fn crash_below(&self, root: &Path, chance: &mut Chance) -> Self {
        let mut names = self.durable.clone();
        for link in &self.pending {
            if chance.keep() {
                link.apply(&mut names);
            }
        }
        // The contents of a lost directory are lost, too.
        let dirs: Vec<PathBuf> = names
            .iter()
            .filter(|(_, entry)| **entry == Entry::Dir)
            .map(|(path, _)| path.clone())
            .collect();
        let known = |up: &Path| root.starts_with(up) || dirs.iter().any(|dir| dir == up);
        names.retain(|path, _| path.ancestors().skip(1).all(known));
        Self { now: names.clone(), durable: names, pending: Vec::new() }
    }

    /// Removes and returns everything below `dir`; the directory itself stays, empty.
    pub(crate) fn split_below(&mut self, dir: &Path) -> Self {
        let below = |path: &Path| path != dir && path.starts_with(dir);
        let split = |names: &mut BTreeMap<PathBuf, Entry>| {
            let all = std::mem::take(names);
            let (inside, outside) = all.into_iter().partition(|(path, _)| below(path));
            *names = outside;
            inside
        };
        let pending = std::mem::take(&mut self.pending);
        let (inside, outside) = pending.into_iter().partition(|link| below(link.path()));
        self.pending = outside;
        Self { now: split(&mut self.now), durable: split(&mut self.durable), pending: inside }
    }

    /// Adds the names that [`Tree::split_below`] removed from a directory, which must be empty now.
    pub(crate) fn merge(&mut self, other: Self) {
        self.now.extend(other.now);
        self.durable.extend(other.durable);
        self.pending.extend(other.pending);
    }

    /// Makes all changes durable.
    pub(crate) fn sync_all(&mut self) {
        self.pending.clear();
        self.durable.clone_from(&self.now);
    }

    fn link(&mut self, link: Link) {
        link.apply(&mut self.now);
        self.pending.push(link);
    }
}
