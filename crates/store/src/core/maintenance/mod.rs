//! Background work: the periodic thread, the thread that keeps the store at its capacity, and
//! drains.

mod periodic;
mod salvage;
pub(crate) mod scrub;
pub(crate) mod space_thread;
pub(crate) mod verify;

use crate::core::ClientAlive;
use crate::core::space::drain::Drain;
use parking_lot::Mutex;
use ritornello_volume::ForkSafeLock;
use space_thread::SpaceThread;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of checks whether a thread has ended: a join has no timeout.
const END_CHECK: Duration = Duration::from_millis(1);

/// The background threads of a core.
pub(crate) struct Maintenance {
    periodic: BackgroundThread,
    pub(super) space: SpaceThread,
    pub(super) drain: Drain,
    /// Returns whether the client whose lock file has the given name may still be writing.
    alive: ClientAlive,
}

impl Maintenance {
    pub(super) fn new(alive: ClientAlive) -> Self {
        Self {
            periodic: BackgroundThread::default(),
            space: SpaceThread::default(),
            drain: Drain::default(),
            alive,
        }
    }

    /// Wakes the periodic thread, which then begins its next pass without waiting for the end of
    /// its pause.
    pub(super) fn wake_periodic(&self) {
        self.periodic.wake();
    }

    /// Whether the threads have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.space.has_ended() && self.periodic.has_ended()
    }

    /// Stops the threads and joins them. Returns false if a thread has not ended by `deadline`, for
    /// example because a disk does not answer. Does not wait for a running drain, which ends when
    /// the device has completed earlier writes.
    pub(super) fn stop(&self, deadline: Instant) -> bool {
        let space = self.space.stop(deadline);
        self.periodic.stop(deadline) && space
    }
}

/// A background thread and its wake-up flag.
#[derive(Default)]
pub(crate) struct BackgroundThread {
    wakeup: ForkSafeLock<WakeState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct WakeState {
    woken: bool,
    stopping: bool,
}

impl BackgroundThread {
    /// Sets the thread, which [`BackgroundThread::stop`] joins.
    fn set(&self, thread: JoinHandle<()>) {
        *self.thread.lock() = Some(thread);
    }

    fn wake(&self) {
        self.wakeup.lock().woken = true;
        self.wakeup.wake_one();
    }

    /// Sleeps until woken, for at most `long`. May wake spuriously. Returns whether the thread must
    /// end.
    fn sleep(&self, long: Duration) -> bool {
        let mut wakeup = self.wakeup.lock();
        if !wakeup.woken && !wakeup.stopping {
            wakeup = self.wakeup.wait_for(wakeup, long);
        }
        wakeup.woken = false;
        wakeup.stopping
    }

    fn has_ended(&self) -> bool {
        self.thread.lock().as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Stops the thread and joins it, unless it is the calling thread. Returns false if it has not
    /// ended by `deadline`.
    fn stop(&self, deadline: Instant) -> bool {
        self.wakeup.lock().stopping = true;
        self.wakeup.wake_one();
        let mut slot = self.thread.lock();
        let is_other =
            |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if !slot.as_ref().is_some_and(is_other) {
            return true;
        }
        while slot.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(END_CHECK);
        }
        // A panic of the thread was reported when it happened.
        let _ = slot.take().map(JoinHandle::join);
        true
    }
}
