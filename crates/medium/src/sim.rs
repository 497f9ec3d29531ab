//! A simulated disk in memory that may lose unsynced changes in a crash.

mod flight;
mod mounts;
mod process;

pub use process::SimProcess;

use crate::change::{Chance, Change};
use crate::sparse::{BLOCK, Sparse};
use crate::tree::{Inode, Tree};
use crate::{Access, Medium, MediumFile, Room};
use flight::InFlight;
use mounts::Mounts;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// `f_type` of a simulated disk: the value of ext4, a file system on which stores are permitted.
const KIND: u64 = 0xef53;

/// A file system in memory that tracks which changes are durable.
///
/// Contents are durable after [`MediumFile::sync_data`], names after [`Medium::sync_dir`] of their
/// directory; as in POSIX, neither suffices alone. Paths are absolute. Direct access is supported,
/// with its alignment checked.
#[derive(Clone, Debug)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    mounts: Mounts,
    files: BTreeMap<Inode, File>,
    next: Inode,
    capacity: u64,
    failing_sync: Option<FailingSync>,
}

/// A planned fault: the next sync of a file whose path contains `part` fails.
#[derive(Debug)]
struct FailingSync {
    part: String,
    seed: u64,
}

/// A file. `now` holds what reads return: `durable` with all of `pending` applied, and with the
/// writes that a failed sync dropped. `in_flight` is not applied yet.
#[derive(Clone, Debug, Default)]
struct File {
    now: Sparse,
    durable: Sparse,
    pending: Vec<Change>,
    in_flight: InFlight,
}

impl File {
    /// Applies changes: writes that were in flight, or a change that takes effect immediately.
    /// Readers then see them, but a crash may still undo them.
    fn land(&mut self, landed: Vec<Change>) {
        for change in landed {
            change.apply(&mut self.now);
            self.pending.push(change);
        }
    }

    fn drain(&mut self) {
        let landed = self.in_flight.take();
        self.land(landed);
    }

    fn sync(&mut self) {
        self.pending.drain(..).for_each(|change| change.apply(&mut self.durable));
    }

    /// Drops pending writes like a failed writeback. Reads still return their bytes; `seed` decides
    /// which of these bytes are on the disk, and later syncs do not write the missing bytes.
    /// Lengths and allocations are metadata, which the file system keeps and writes later.
    fn drop_dirty(&mut self, seed: u64) {
        let mut chance = Chance::new(seed);
        let Self { durable, pending, .. } = self;
        pending.retain(|change| {
            let is_write = matches!(change, Change::Write { .. });
            if is_write {
                change.survive(durable, &mut chance);
            }
            !is_write
        });
    }
}

impl SimDisk {
    /// Creates an empty disk of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self { state: Arc::new(Mutex::new(State { capacity, ..State::default() })) }
    }

    /// Returns the disk as it comes up after losing power now. Synced data is intact. Each unsynced
    /// change of a name survives or not; each 4 KiB of an unsynced write survives, is lost, or is
    /// torn into 512-byte sectors. Writes in flight are treated as unsynced. `seed` decides each
    /// outcome. The disk on which the method is called is unaffected.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let state = self.state.lock();
        let mut chance = Chance::new(seed);
        let tree = state.tree.crash(&mut chance);
        let mounts = state.mounts.crash(&mut chance);
        let mut files = BTreeMap::new();
        for (&inode, file) in &state.files {
            let mut left = file.durable.clone();
            chance.begin_file();
            file.pending.iter().for_each(|change| change.survive(&mut left, &mut chance));
            file.in_flight.survive(&mut left, &mut chance);
            let file = File { now: left.clone(), durable: left, ..File::default() };
            files.insert(inode, file);
        }
        // Files that have lost their last name are removed.
        let named: BTreeSet<Inode> = tree.files().chain(mounts.files()).collect();
        files.retain(|inode, _| named.contains(inode));
        let (next, capacity) = (state.next, state.capacity);
        let state = State { tree, mounts, files, next, capacity, failing_sync: None };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Makes the next [`MediumFile::sync_data`] of a file whose path contains `part` fail with
    /// `EIO` and drop the file's dirty pages. As on Linux, written data then stays readable, later
    /// syncs report success, and a crash loses the data. `seed` decides which sectors reached the
    /// disk nevertheless, from none to all of them.
    ///
    /// The simulation is stricter than Linux in one respect: a later write to a dropped page of the
    /// page cache does not write the rest of that page.
    pub fn fail_next_sync(&self, part: impl Into<String>, seed: u64) {
        self.state.lock().failing_sync = Some(FailingSync { part: part.into(), seed });
    }

    /// Advances writes in flight (see [`SimProcess::kill`]): some of them land, completely or in
    /// part, in any order; the remaining writes stay in flight. `seed` decides each outcome.
    pub fn land(&self, seed: u64) {
        let mut chance = Chance::new(seed);
        for file in self.state.lock().files.values_mut() {
            if !file.in_flight.is_empty() {
                chance.begin_file();
                let landed = file.in_flight.land(&mut chance);
                file.land(landed);
            }
        }
    }

    /// Number of writes in flight. A write that has landed in part counts once for each part that
    /// has not landed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.state.lock().files.values().map(|file| file.in_flight.len()).sum()
    }

    fn open_file(&self, path: &Path, access: Access) -> io::Result<SimFile> {
        let mut state = self.state.lock();
        let inode = match state.tree.get(path)? {
            Some(inode) => inode,
            None if access.create => {
                let inode = state.next;
                state.next += 1;
                state.mounts.note_created(path);
                state.tree.create(path, inode);
                state.files.insert(inode, File::default());
                inode
            }
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        Ok(SimFile { state: Arc::clone(&self.state), inode, access })
    }

    /// Number of changes, of names and contents, that a crash now could undo. Counts neither writes
    /// in flight nor names in file systems that are detached.
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

    /// Returns the seed of the planned fault, and removes the fault, if the current sync of `inode`
    /// must fail.
    fn take_failing_sync(&mut self, inode: Inode) -> Option<u64> {
        let FailingSync { part, seed } = self.failing_sync.as_ref()?;
        let is_due = self.tree.path(inode)?.to_string_lossy().contains(part);
        let seed = is_due.then_some(*seed)?;
        self.failing_sync = None;
        Some(seed)
    }

    /// Applies `change`, which needs `blocks` further blocks, if the disk has space.
    fn change(&mut self, inode: Inode, blocks: u64, change: Change) -> io::Result<()> {
        if blocks > 0 && self.used().saturating_add(blocks * BLOCK) > self.capacity {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file(inode)?.land(vec![change]);
        Ok(())
    }
}

impl Medium for SimDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.tree.is_dir(path) {
            state.mounts.note_created(path);
        }
        state.tree.create_dir(path)
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        Ok(Arc::new(self.open_file(path, access)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        state.mounts.note_created(to);
        state.tree.rename(from, to)
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

/// An open file. The file stays usable after its name is removed, as on any Unix.
#[derive(Debug)]
struct SimFile {
    state: Arc<Mutex<State>>,
    inode: Inode,
    access: Access,
}

impl SimFile {
    /// Checks the alignment that `O_DIRECT` requires.
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

    /// Begins a write that stays in flight.
    fn begin_write(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.check_writable()?;
        self.check_aligned(buffer, offset)?;
        self.state.lock().file(self.inode)?.in_flight.begin(buffer, offset);
        Ok(())
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
        // Does not wait for writes in flight: `fdatasync` covers writes that have ended.
        let mut state = self.state.lock();
        if let Some(seed) = state.take_failing_sync(self.inode) {
            state.file(self.inode)?.drop_dirty(seed);
            return Err(rustix::io::Errno::IO.into());
        }
        state.file(self.inode)?.sync();
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
        let mut state = self.state.lock();
        // Real file systems also wait for direct writes before they truncate.
        state.file(self.inode)?.drain();
        state.change(self.inode, 0, Change::SetLen(length))
    }

    fn drain(&self) -> io::Result<()> {
        self.state.lock().file(self.inode)?.drain();
        Ok(())
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
