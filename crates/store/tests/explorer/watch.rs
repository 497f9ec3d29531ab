//! A disk that, every now and then, notes how it would come up had the power gone just now.

use crate::dice::Dice;
use parking_lot::Mutex;
use ritornello_medium::{Access, Medium, MediumFile, Room, SimDisk};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// Moments noted between two calls of [`Watched::taken`] at most.
const MOMENTS: usize = 10;

/// Something that happens within something else.
type Deed = Box<dyn FnOnce() + Send>;

#[derive(Clone, Debug)]
pub struct Watched {
    disk: SimDisk,
    notes: Arc<Mutex<Notes>>,
}

struct Notes {
    dice: Dice,
    /// One operation in this many is noted.
    rarity: u64,
    taken: Vec<(u64, SimDisk)>,
    /// The process is killed after so many changes more: the rest never happens.
    left: Option<u64>,
    /// Happens after so many changes more.
    meanwhile: Option<(u64, Deed)>,
    /// What was done to the disk, in order.
    deeds: DefaultHasher,
}

impl std::fmt::Debug for Notes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notes").field("taken", &self.taken.len()).finish_non_exhaustive()
    }
}

impl Watched {
    /// Of a life of so many acts.
    pub fn new(disk: SimDisk, seed: u64, acts: u64) -> Self {
        let mut dice = Dice::new(!seed);
        let rarity = 1 + dice.below(4) + acts / 40;
        let deeds = DefaultHasher::new();
        let notes = Notes { dice, rarity, taken: Vec::new(), left: None, meanwhile: None, deeds };
        Self { disk, notes: Arc::new(Mutex::new(notes)) }
    }

    /// The same notebook over another disk.
    pub fn over(&self, disk: SimDisk) -> Self {
        Self { disk, notes: Arc::clone(&self.notes) }
    }

    pub fn disk(&self) -> &SimDisk {
        &self.disk
    }

    /// The disks noted since the last call, with the seeds of their crashes.
    pub fn taken(&self) -> Vec<(u64, SimDisk)> {
        std::mem::take(&mut self.notes.lock().taken)
    }

    /// Lets `after` more changes happen and then no other, until [`Watched::revive`].
    pub fn kill(&self, after: u64) {
        self.notes.lock().left = Some(after);
    }

    pub fn revive(&self) {
        self.notes.lock().left = None;
    }

    /// Lets `after` changes happen and then `deed`, in the thread that makes the next one.
    pub fn meanwhile(&self, after: u64, deed: Deed) {
        self.notes.lock().meanwhile = Some((after, deed));
    }

    /// If that was too long to wait, it happens now.
    pub fn end_meanwhile(&self) {
        let waiting = self.notes.lock().meanwhile.take();
        if let Some((_, deed)) = waiting {
            deed();
        }
    }

    /// Counts a change that is about to happen.
    fn allow(&self) -> io::Result<()> {
        let mut notes = self.notes.lock();
        match &mut notes.left {
            None => {}
            Some(0) => return Err(io::ErrorKind::BrokenPipe.into()),
            Some(left) => *left -= 1,
        }
        match &mut notes.meanwhile {
            Some((after @ 1.., _)) => *after -= 1,
            _ => {
                drop(notes);
                self.end_meanwhile();
            }
        }
        Ok(())
    }

    pub fn deeds(&self) -> u64 {
        self.notes.lock().deeds.finish()
    }

    fn note(&self, deed: impl Hash) {
        let mut notes = self.notes.lock();
        deed.hash(&mut notes.deeds);
        let rarity = notes.rarity;
        if notes.taken.len() < MOMENTS && notes.dice.one_in(rarity) {
            for _ in 0..=notes.dice.below(3) {
                let seed = notes.dice.next();
                notes.taken.push((seed, self.disk.crash(seed)));
            }
        }
    }
}

impl Medium for Watched {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        if access.create {
            self.allow()?;
        }
        let file = self.disk.open(path, access)?;
        if access.create {
            self.note((0, path.extension()));
        }
        Ok(Arc::new(WatchedFile { file, watched: self.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.allow()?;
        self.disk.rename(from, to)?;
        self.note((1, from, to));
        Ok(())
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.allow()?;
        self.disk.remove(path)?;
        self.note(2);
        Ok(())
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.disk.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.allow()?;
        self.disk.sync_dir(dir)?;
        self.note((3, dir));
        Ok(())
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.disk.room(dir)
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
        self.watched.allow()?;
        self.file.write_at(buffer, offset)?;
        self.watched.note((4, offset, buffer.len()));
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        self.watched.allow()?;
        self.file.sync_data()?;
        self.watched.note(5);
        Ok(())
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.watched.allow()?;
        self.file.allocate(length)?;
        self.watched.note((6, length));
        Ok(())
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.watched.allow()?;
        self.file.set_len(length)?;
        self.watched.note((7, length));
        Ok(())
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
