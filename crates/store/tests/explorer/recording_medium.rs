//! A process's view of a disk that records, at random moments, the disk's state after a power loss.

use crate::rng::Rng;
use parking_lot::Mutex;
use ritornello_medium::{Access, Medium, MediumFault, MediumFile, Room, SimDisk, SimProcess};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// Maximum moments recorded between two calls of [`RecordingMedium::take_states`].
const MOMENTS: usize = 10;

/// An action to run within an operation.
type Action = Box<dyn FnOnce() + Send>;

#[derive(Clone, Debug)]
pub struct RecordingMedium {
    process: SimProcess,
    recorder: Arc<Mutex<Recorder>>,
}

struct Recorder {
    rng: Rng,
    /// Chooses when writes in flight land; `rng` chooses the recorded moments.
    landing_rng: Rng,
    /// The share of recorded changes: one in `record_one_in`.
    record_one_in: u64,
    states: Vec<(u64, SimDisk)>,
    /// Opens of segments until an open fails because no file handle is free.
    failing_open: Option<u64>,
    /// Action to run after a number of further changes.
    concurrent_action: Option<(u64, Action)>,
    /// Digest of all changes to the disk, in order.
    changes_digest: DefaultHasher,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("states", &self.states.len()).finish_non_exhaustive()
    }
}

/// Segments are written with `io_uring`, so their writes can outlive a process.
fn is_segment(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("seg-"))
}

impl RecordingMedium {
    /// Creates the first process of a history of `operations` operations.
    pub fn new(disk: &SimDisk, seed: u64, operations: u64) -> Self {
        let (mut rng, landing_rng) = (Rng::new(!seed), Rng::new(seed ^ 0x1a4d));
        let record_one_in = 1 + rng.below(4) + operations / 40;
        let recorder = Recorder {
            rng,
            landing_rng,
            record_one_in,
            states: Vec::new(),
            failing_open: None,
            concurrent_action: None,
            changes_digest: DefaultHasher::new(),
        };
        Self { process: disk.process(is_segment), recorder: Arc::new(Mutex::new(recorder)) }
    }

    /// Creates a process on `disk` with the same recorder.
    pub fn on_disk(&self, disk: &SimDisk) -> Self {
        Self { process: disk.process(is_segment), recorder: Arc::clone(&self.recorder) }
    }

    /// Creates a process on the same disk.
    pub fn new_process(&self) -> Self {
        self.on_disk(self.disk())
    }

    pub fn disk(&self) -> &SimDisk {
        self.process.disk()
    }

    /// The disks recorded since the last call, with the seeds of their crashes.
    pub fn take_states(&self) -> Vec<(u64, SimDisk)> {
        std::mem::take(&mut self.recorder.lock().states)
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

    /// Makes the `nth` following open of a segment (starting at 1) fail because no file handle is
    /// free.
    pub fn fail_open(&self, nth: u64) {
        self.recorder.lock().failing_open = Some(nth);
    }

    /// Cancels [`Self::fail_open`]. Returns whether no open failed.
    pub fn heal_open(&self) -> bool {
        self.recorder.lock().failing_open.take().is_some()
    }

    /// Lands some of the writes in flight, once in `one_in` calls on average.
    pub fn land_writes(&self, one_in: u64) {
        if self.disk().in_flight() == 0 {
            return;
        }
        let seed = {
            let mut recorder = self.recorder.lock();
            recorder.landing_rng.one_in(one_in).then(|| recorder.landing_rng.next())
        };
        if let Some(seed) = seed {
            self.disk().land(seed);
        }
    }

    /// Runs `action` after `after` changes, in the thread that makes the next change.
    pub fn concurrent_action(&self, after: u64, action: Action) {
        self.recorder.lock().concurrent_action = Some((after, action));
    }

    /// Runs the action now if it is still pending.
    pub fn end_concurrent_action(&self) {
        let waiting = self.recorder.lock().concurrent_action.take();
        if let Some((_, action)) = waiting {
            action();
        }
    }

    /// Runs before every change: lands writes, and runs a pending action.
    fn before_change(&self) {
        if self.is_dead() {
            return;
        }
        self.land_writes(8);
        let mut recorder = self.recorder.lock();
        match &mut recorder.concurrent_action {
            Some((after @ 1.., _)) => *after -= 1,
            _ => {
                drop(recorder);
                self.end_concurrent_action();
            }
        }
    }

    /// Whether this open of a segment must fail.
    fn open_fails(&self, path: &Path) -> bool {
        let mut recorder = self.recorder.lock();
        match &mut recorder.failing_open {
            Some(left) if is_segment(path) => {
                *left -= 1;
                let fails = *left == 0;
                if fails {
                    recorder.failing_open = None;
                }
                fails
            }
            _ => false,
        }
    }

    pub fn changes_digest(&self) -> u64 {
        self.recorder.lock().changes_digest.finish()
    }

    fn record(&self, action: impl Hash) {
        let mut recorder = self.recorder.lock();
        action.hash(&mut recorder.changes_digest);
        let record_one_in = recorder.record_one_in;
        if recorder.states.len() < MOMENTS && recorder.rng.one_in(record_one_in) {
            for _ in 0..=recorder.rng.below(3) {
                let seed = recorder.rng.next();
                recorder.states.push((seed, self.disk().crash(seed)));
            }
        }
    }
}

impl Medium for RecordingMedium {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.process.create_dir(path)
    }
    fn open(&self, path: &Path, access: Access) -> io::Result<Arc<dyn MediumFile>> {
        if self.open_fails(path) {
            return Err(MediumFault::NoSystemFiles.error());
        }
        if access.create {
            self.before_change();
        }
        let file = self.process.open(path, access)?;
        if access.create {
            self.record((0, path.extension()));
        }
        Ok(Arc::new(RecordingFile { file, recording: self.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.before_change();
        self.process.rename(from, to)?;
        self.record((1, from, to));
        Ok(())
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.before_change();
        self.process.remove(path)?;
        self.record(2);
        Ok(())
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.process.list(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.before_change();
        self.process.sync_dir(dir)?;
        self.record((3, dir));
        Ok(())
    }
    fn room(&self, dir: &Path) -> io::Result<Room> {
        self.process.room(dir)
    }
}

#[derive(Debug)]
struct RecordingFile {
    file: Arc<dyn MediumFile>,
    recording: RecordingMedium,
}

impl MediumFile for RecordingFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.recording.before_change();
        self.file.write_at(buffer, offset)?;
        self.recording.record((4, offset, buffer.len()));
        Ok(())
    }
    fn sync_data(&self) -> io::Result<()> {
        self.recording.before_change();
        self.file.sync_data()?;
        self.recording.record(5);
        Ok(())
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.recording.before_change();
        self.file.allocate(length)?;
        self.recording.record((6, length));
        Ok(())
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.recording.before_change();
        self.file.set_len(length)?;
        self.recording.record((7, length));
        Ok(())
    }
    fn drain(&self) -> io::Result<()> {
        // A drain changes no stored bytes, so no moment is recorded.
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
