//! A disk in memory that forgets what was not synced.

use crate::change::{Chance, Change};
use crate::sparse::{BLOCK, Sparse};
use crate::tree::{Inode, Tree};
use crate::{Access, Medium, MediumFile, Room};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// `f_type` of a simulated disk: that of ext4, so that nobody distrusts it.
const KIND: u64 = 0xef53;

/// A file system in memory that knows what is durable and what is not.
///
/// Contents are durable after [`MediumFile::sync_data`], names after [`Medium::sync_dir`] of their
/// directory; each alone is not enough, as POSIX has it. Paths are absolute. Direct access is
/// granted and its alignment checked.
#[derive(Clone, Debug)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    files: BTreeMap<Inode, File>,
    next: Inode,
    capacity: u64,
}

/// `now` is `durable` with all of `pending` applied.
#[derive(Clone, Debug, Default)]
struct File {
    now: Sparse,
    durable: Sparse,
    pending: Vec<Change>,
}

impl SimDisk {
    /// An empty disk of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self { state: Arc::new(Mutex::new(State { capacity, ..State::default() })) }
    }

    /// The disk as it comes up after losing power now. What was synced is there. Of the rest, each
    /// change of a name survives or not; each 4 KiB of a write survives, is lost, or is torn into
    /// 512-byte sectors. The seed decides all of it. This disk goes on as if nothing happened.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let state = self.state.lock();
        let mut chance = Chance::new(seed);
        let tree = state.tree.crash(&mut chance);
        let mut files = BTreeMap::new();
        for (&inode, file) in &state.files {
            let mut left = file.durable.clone();
            chance.turn();
            file.pending.iter().for_each(|change| change.survive(&mut left, &mut chance));
            let file = File { now: left.clone(), durable: left, pending: Vec::new() };
            files.insert(inode, file);
        }
        // Files without a name are gone.
        let named: BTreeSet<Inode> = tree.files().collect();
        files.retain(|inode, _| named.contains(inode));
        let state = State { tree, files, next: state.next, capacity: state.capacity };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Changes, of names and contents, that a crash now could undo.
    #[must_use]
    pub fn unsynced(&self) -> usize {
        let state = self.state.lock();
        state.tree.pending() + state.files.values().map(|file| file.pending.len()).sum::<usize>()
    }
}

impl State {
    fn used(&self) -> u64 {
        let sizes = self.tree.files().filter_map(|inode| self.files.get(&inode));
        sizes.map(|file| file.now.allocated()).sum()
    }

    fn file(&mut self, inode: Inode) -> io::Result<&mut File> {
        self.files.get_mut(&inode).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Applies `change`, which takes `blocks` more, if there is room.
    fn change(&mut self, inode: Inode, blocks: u64, change: Change) -> io::Result<()> {
        if blocks > 0 && self.used().saturating_add(blocks * BLOCK) > self.capacity {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let file = self.file(inode)?;
        change.apply(&mut file.now);
        file.pending.push(change);
        Ok(())
    }
}

impl Medium for SimDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.state.lock().tree.create_dir(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        let mut state = self.state.lock();
        let inode = match state.tree.get(path)? {
            Some(inode) => inode,
            None if access.create => {
                let inode = state.next;
                state.next += 1;
                state.tree.create(path, inode);
                state.files.insert(inode, File::default());
                inode
            }
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        Ok(Arc::new(SimFile { state: Arc::clone(&self.state), inode, access }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.state.lock().tree.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.state.lock().tree.remove(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.state.lock().tree.list(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.state.lock().tree.sync_dir(dir)
    }

    fn room(&self, dir: &Path) -> io::Result<Room> {
        let state = self.state.lock();
        if !state.tree.is_dir(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let available = state.capacity.saturating_sub(state.used());
        Ok(Room { available, total: state.capacity, kind: KIND })
    }
}

/// Stays usable after its name is gone, as on any Unix.
#[derive(Debug)]
struct SimFile {
    state: Arc<Mutex<State>>,
    inode: Inode,
    access: Access,
}

impl SimFile {
    /// What `O_DIRECT` asks for.
    fn check_aligned(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        let aligned = |number: u64| number.is_multiple_of(BLOCK);
        let memory = buffer.as_ptr().addr() as u64;
        if !self.access.direct
            || (aligned(offset) && aligned(buffer.len() as u64) && aligned(memory))
        {
            Ok(())
        } else {
            Err(rustix::io::Errno::INVAL.into())
        }
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.access.write { Ok(()) } else { Err(rustix::io::Errno::BADF.into()) }
    }
}

impl MediumFile for SimFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.check_aligned(buffer, offset)?;
        Ok(self.state.lock().file(self.inode)?.now.read(buffer, offset))
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.check_writable()?;
        self.check_aligned(buffer, offset)?;
        if buffer.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        let blocks = state.file(self.inode)?.now.missing(offset, buffer.len() as u64);
        state.change(self.inode, blocks, Change::Write { offset, bytes: buffer.into() })
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        let File { durable, pending, .. } = state.file(self.inode)?;
        pending.drain(..).for_each(|change| change.apply(durable));
        Ok(())
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        self.check_writable()?;
        let mut state = self.state.lock();
        let blocks = state.file(self.inode)?.now.missing(0, length);
        state.change(self.inode, blocks, Change::Allocate(length))
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.check_writable()?;
        self.state.lock().change(self.inode, 0, Change::SetLen(length))
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.state.lock().file(self.inode)?.now.length())
    }

    fn allocated(&self) -> io::Result<u64> {
        Ok(self.state.lock().file(self.inode)?.now.allocated())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests;
