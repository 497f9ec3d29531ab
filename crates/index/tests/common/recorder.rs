//! Records, after each change of a simulated disk except allocations, two random states that a
//! power loss at this moment may leave.

use parking_lot::Mutex;
use ritornello_medium::{DiskChange, SimDisk, Watch, Watched};
use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// After each change of `disk` except allocations, adds to `crashes` two random states that a power
/// loss may leave. While `pause` is set, each write to a checkpoint waits until the test permits
/// the write.
#[derive(Clone, Debug)]
pub struct Recorder {
    pub disk: SimDisk,
    pub crashes: Arc<Mutex<Vec<SimDisk>>>,
    pub pause: Arc<Mutex<Option<Pause>>>,
}

/// Before each write to a checkpoint, a message is sent to `about`, and the write waits for a
/// message from `go`.
#[derive(Debug)]
pub struct Pause {
    pub about: Sender<()>,
    pub go: Receiver<()>,
}

impl Recorder {
    pub fn over(disk: SimDisk) -> Self {
        Self { disk, crashes: Arc::default(), pause: Arc::default() }
    }

    pub fn medium(&self) -> Watched {
        Watched::new(Arc::new(self.disk.clone()), Arc::new(self.clone()))
    }
}

impl Watch for Recorder {
    fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
        if let DiskChange::Write(path, ..) = change
            && path.to_string_lossy().contains("checkpoint")
        {
            let pause = self.pause.lock();
            // The test drops its receiver when it needs no further pause.
            if let Some(pause) = pause.as_ref().filter(|pause| pause.about.send(()).is_ok()) {
                let _ = pause.go.recv();
            }
        }
        Ok(())
    }

    fn after(&self, change: &DiskChange<'_>) {
        if matches!(change, DiskChange::Allocate(..)) {
            return;
        }
        let mut crashes = self.crashes.lock();
        let seed = crashes.len() as u64;
        crashes.push(self.disk.crash(seed * 77 + 1));
        crashes.push(self.disk.crash(seed * 99 + 2));
    }
}
