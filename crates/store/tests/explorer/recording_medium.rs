//! A medium through which one process uses the simulated disk. At random changes of the disk the
//! medium records states that a power loss at this moment could leave on the disk.

use crate::rng::Rng;
use parking_lot::Mutex;
use ritornello_medium::{DiskChange, MediumFault, SimDisk, SimProcess, Watch, Watched};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Recording pauses while this number of recorded states, or more, have not been taken by
/// [`RecordingMedium::take_states`]. One recorded moment yields up to three states, each of a
/// different power loss.
const MOMENTS: usize = 10;

/// An action that runs during another operation.
type Action = Box<dyn FnOnce() + Send>;

#[derive(Clone, Debug)]
pub struct RecordingMedium {
    process: SimProcess,
    recorder: Arc<Mutex<Recorder>>,
}

struct Recorder {
    rng: Rng,
    /// Chooses when writes in flight reach the disk; `rng` chooses the moments to record.
    landing_rng: Rng,
    /// The disk is recorded at one of `record_one_in` changes on average.
    record_one_in: u64,
    states: Vec<(u64, SimDisk)>,
    /// Number of opens of segments until one fails because no file handle is free.
    failing_open: Option<u64>,
    /// An action, and the number of changes until it runs.
    concurrent_action: Option<(u64, Action)>,
    /// Digest of the changes to the disk, in order: their kinds, offsets and lengths, the
    /// extensions of created files, and the paths of renames and of synced directories, without the
    /// bytes written.
    changes_digest: DefaultHasher,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("states", &self.states.len()).finish_non_exhaustive()
    }
}

/// Returns whether the file is a segment: segments are written with `io_uring`, so their writes can
/// outlive the process.
fn is_segment(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("seg-"))
}

impl RecordingMedium {
    /// Creates the first process of a history of `operations` operations. The more operations, the
    /// more rarely the disk is recorded.
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

    /// Creates a process on `disk` that shares this recorder.
    pub fn on_disk(&self, disk: &SimDisk) -> Self {
        Self { process: disk.process(is_segment), recorder: Arc::clone(&self.recorder) }
    }

    pub fn new_process(&self) -> Self {
        self.on_disk(self.disk())
    }

    /// Returns the file system of the process.
    pub fn medium(&self) -> Watched {
        Watched::new(Arc::new(self.process.clone()), Arc::new(self.clone()))
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

    /// Cancels [`Self::fail_open`]. Returns whether its open was still to come.
    pub fn heal_open(&self) -> bool {
        self.recorder.lock().failing_open.take().is_some()
    }

    /// Completes some of the writes in flight, once in `one_in` calls on average.
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

    /// Runs the pending action now, if it has not run.
    pub fn end_concurrent_action(&self) {
        let waiting = self.recorder.lock().concurrent_action.take();
        if let Some((_, action)) = waiting {
            action();
        }
    }

    /// Runs before every change: at random completes writes in flight, and runs the action of
    /// [`Self::concurrent_action`] when it is due.
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

    /// Returns whether this open of a segment must fail.
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

impl Watch for RecordingMedium {
    fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
        if let DiskChange::Open(path, access) = change {
            if self.open_fails(path) {
                return Err(MediumFault::NoSystemFiles.error());
            }
            if !access.create {
                return Ok(());
            }
        }
        self.before_change();
        Ok(())
    }

    fn after(&self, change: &DiskChange<'_>) {
        match *change {
            DiskChange::Open(_, access) if !access.create => {}
            DiskChange::Open(path, _) => self.record((0, path.extension())),
            DiskChange::Rename(from, to) => self.record((1, from, to)),
            DiskChange::Remove(_) => self.record(2),
            DiskChange::SyncDir(dir) => self.record((3, dir)),
            DiskChange::Write(_, offset, length) => self.record((4, offset, length)),
            DiskChange::SyncData(_) => self.record(5),
            DiskChange::Allocate(_, length) => self.record((6, length)),
            DiskChange::SetLen(_, length) => self.record((7, length)),
        }
    }
}
