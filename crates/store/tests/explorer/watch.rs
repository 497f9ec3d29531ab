//! A process's view of a disk that records, at random moments, the state in which the disk would
//! come up after a power loss.

use crate::dice::Dice;
use parking_lot::Mutex;
use ritornello_medium::{Access, Medium, MediumFault, MediumFile, Room, SimDisk, SimProcess};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// Maximum moments recorded between two calls of [`Watched::taken`].
const MOMENTS: usize = 10;

/// An action to run within an act.
type Action = Box<dyn FnOnce() + Send>;

#[derive(Clone, Debug)]
pub struct Watched {
    process: SimProcess,
    notes: Arc<Mutex<Notes>>,
}

struct Notes {
    dice: Dice,
    /// Decides when writes in flight land; `dice` decides about the moments.
    landing: Dice,
    /// One operation in this many is recorded.
    rarity: u64,
    taken: Vec<(u64, SimDisk)>,
    /// Opens of segments until one fails for want of a file handle.
    failing_open: Option<u64>,
    /// Action to run after a number of further changes.
    meanwhile: Option<(u64, Action)>,
    /// Digest of all changes to the disk, in order.
    changes_digest: DefaultHasher,
}

impl std::fmt::Debug for Notes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notes").field("taken", &self.taken.len()).finish_non_exhaustive()
    }
}

/// Segments are written with `io_uring`, so their writes can outlive a process.
fn is_segment(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("seg-"))
}

impl Watched {
    /// Creates the first process of a life of `acts` acts.
    pub fn new(disk: &SimDisk, seed: u64, acts: u64) -> Self {
        let (mut dice, landing) = (Dice::new(!seed), Dice::new(seed ^ 0x1a4d));
        let rarity = 1 + dice.below(4) + acts / 40;
        let notes = Notes {
            dice,
            landing,
            rarity,
            taken: Vec::new(),
            failing_open: None,
            meanwhile: None,
            changes_digest: DefaultHasher::new(),
        };
        Self { process: disk.process(is_segment), notes: Arc::new(Mutex::new(notes)) }
    }

    /// Creates another process, on `disk`, with the same records.
    pub fn over(&self, disk: &SimDisk) -> Self {
        Self { process: disk.process(is_segment), notes: Arc::clone(&self.notes) }
    }

    /// Creates another process on the same disk.
    pub fn another(&self) -> Self {
        self.over(self.disk())
    }

    pub fn disk(&self) -> &SimDisk {
        self.process.disk()
    }

    /// The disks recorded since the last call, with the seeds of their crashes.
    pub fn taken(&self) -> Vec<(u64, SimDisk)> {
        std::mem::take(&mut self.notes.lock().taken)
    }

    /// Kills the process after `changes` more changes, with up to `in_flight` segment writes in
    /// flight.
    pub fn kill(&self, changes: u64, in_flight: usize) {
        self.process.kill(changes, in_flight);
    }

    pub fn kill_now(&self) {
        self.process.kill_now();
    }

    pub fn is_dead(&self) -> bool {
        self.process.is_dead()
    }

    /// Makes the `nth` open of a segment from now on (from 1) fail for want of a file handle.
    pub fn fail_open(&self, nth: u64) {
        self.notes.lock().failing_open = Some(nth);
    }

    /// Ends that. Returns whether no open failed.
    pub fn heal_open(&self) -> bool {
        self.notes.lock().failing_open.take().is_some()
    }

    /// Lands some of the writes in flight, sometimes.
    pub fn pass_time(&self, one_in: u64) {
        if self.disk().in_flight() == 0 {
            return;
        }
        let seed = {
            let mut notes = self.notes.lock();
            notes.landing.one_in(one_in).then(|| notes.landing.next())
        };
        if let Some(seed) = seed {
            self.disk().land(seed);
        }
    }

    /// Runs `action` after `after` changes, in the thread that makes the next one.
    pub fn meanwhile(&self, after: u64, action: Action) {
        self.notes.lock().meanwhile = Some((after, action));
    }

    /// Runs the action now if it is still pending.
    pub fn end_meanwhile(&self) {
        let waiting = self.notes.lock().meanwhile.take();
        if let Some((_, action)) = waiting {
            action();
        }
    }

    /// Called before a change.
    fn prepare(&self) {
        if self.is_dead() {
            return;
        }
        self.pass_time(8);
        let mut notes = self.notes.lock();
        match &mut notes.meanwhile {
            Some((after @ 1.., _)) => *after -= 1,
            _ => {
                drop(notes);
                self.end_meanwhile();
            }
        }
    }

    /// Whether this open of a segment shall fail.
    fn open_fails(&self, path: &Path) -> bool {
        let mut notes = self.notes.lock();
        match &mut notes.failing_open {
            Some(left) if is_segment(path) => {
                *left -= 1;
                let fails = *left == 0;
                if fails {
                    notes.failing_open = None;
                }
                fails
            }
            _ => false,
        }
    }

    pub fn changes_digest(&self) -> u64 {
        self.notes.lock().changes_digest.finish()
    }

    fn note(&self, action: impl Hash) {
        let mut notes = self.notes.lock();
        action.hash(&mut notes.changes_digest);
        let rarity = notes.rarity;
        if notes.taken.len() < MOMENTS && notes.dice.one_in(rarity) {
            for _ in 0..=notes.dice.below(3) {
                let seed = notes.dice.next();
                notes.taken.push((seed, self.disk().crash(seed)));
            }
        }
    }
}

impl Medium for Watched {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.process.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        if self.open_fails(path) {
            return Err(MediumFault::NoSystemFiles.error());
        }
        if access.create {
            self.prepare();
        }
        let file = self.process.open(path, access)?;
        if access.create {
            self.note((0, path.extension()));
        }
        Ok(Arc::new(WatchedFile { file, watched: self.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.prepare();
        self.process.rename(from, to)?;
        self.note((1, from, to));
        Ok(())
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.prepare();
        self.process.remove(path)?;
        self.note(2);
        Ok(())
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.process.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.prepare();
        self.process.sync_dir(dir)?;
        self.note((3, dir));
        Ok(())
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.process.room(dir)
    }
}

#[derive(Debug)]
struct WatchedFile {
    file: Arc<dyn MediumFile>,
    watched: Watched,
}

impl MediumFile for WatchedFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.watched.prepare();
        self.file.write_at(buffer, offset)?;
        self.watched.note((4, offset, buffer.len()));
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        self.watched.prepare();
        self.file.sync_data()?;
        self.watched.note(5);
        Ok(())
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.watched.prepare();
        self.file.allocate(length)?;
        self.watched.note((6, length));
        Ok(())
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.watched.prepare();
        self.file.set_len(length)?;
        self.watched.note((7, length));
        Ok(())
    }
    fn drain(&self) -> io::Result<()> {
        // Changes nothing that is stored, so no moment is recorded.
        self.file.drain()
    }
    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.file.allocated()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
