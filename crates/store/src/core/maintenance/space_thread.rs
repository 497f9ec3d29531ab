//! The thread that maintains the store's space: it reattaches absent space, empties sealed
//! segments, shrinks the index's files, and scrubs.

use super::BackgroundThread;
use super::scrub::Scrub;
use crate::core::StoreCore;
use crate::core::absence::ABSENT_INTERVAL;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_volume::transfer::Control;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum pause between two passes.
const PASS_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum pause after a pass that could not empty a sealed segment, for example because a run in
/// it is leased, or that failed, except with a `Fatal` error.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

#[derive(Default)]
pub(crate) struct SpaceThread {
    thread: Arc<BackgroundThread>,
    stopped: Arc<AtomicBool>,
    passes: Mutex<u64>,
    pass_ended: Condvar,
    pub(crate) scrub: Mutex<Scrub>,
}

impl SpaceThread {
    pub(crate) fn wake(&self) {
        self.thread.wake();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.thread.has_ended()
    }

    /// Stops the thread. Returns false if it has not ended by `deadline`.
    pub(crate) fn stop(&self, deadline: Instant) -> bool {
        self.stopped.store(true, Ordering::Release);
        let ended = self.thread.stop(deadline);
        // Wake the callers of `wait`.
        self.note_pass();
        ended
    }

    /// Waits until the number of ended passes differs from `seen` or the thread is stopped, at most
    /// until `deadline`. Returns the number of ended passes.
    pub(crate) fn wait(&self, seen: u64, deadline: Instant) -> u64 {
        let mut passes = self.passes.lock();
        while *passes == seen && !self.stopped.load(Ordering::Acquire) {
            if self.pass_ended.wait_until(&mut passes, deadline).timed_out() {
                break;
            }
        }
        *passes
    }

    fn note_pass(&self) {
        *self.passes.lock() += 1;
        self.pass_ended.notify_all();
    }

    /// Returns the control that cancels the thread's transfers when the thread must end.
    pub(crate) fn control(&self) -> Control {
        Control { cancelled: Some(Arc::clone(&self.stopped)), ..Control::default() }
    }
}

impl StoreCore {
    /// Starts the thread, which ends when the core is closed or dropped.
    ///
    /// # Errors
    /// `Retry` if the thread cannot be started.
    pub(crate) fn start_maintenance(self: &Arc<Self>) -> Result<()> {
        let (core, thread) = (Arc::downgrade(self), Arc::clone(&self.maintenance.space.thread));
        let thread = std::thread::Builder::new()
            .name("ritornello-maintenance".to_owned())
            .spawn(move || run(&core, &thread))
            .map_err(|e| {
                Error::retry(
                    "the thread that maintains the store's space could not be started: check the \
                     limit of threads",
                )
                .because(e)
            })?;
        self.maintenance.space.thread.set(thread);
        Ok(())
    }
}

fn run(core: &Weak<StoreCore>, thread: &BackgroundThread) {
    let mut pause = Duration::ZERO;
    loop {
        if thread.sleep(pause) {
            return;
        }
        let Some(core) = core.upgrade() else { return };
        pause = PASS_INTERVAL;
        if core.is_degraded() {
            if let Err(error) = core.reattach_absent() {
                tracing::warn!(%error, "absent volumes could not be reattached");
            }
            pause = ABSENT_INTERVAL;
        }
        if core.needs_maintenance() {
            match core.maintain_space(&core.maintenance.space.control()) {
                Ok(false) => {}
                Ok(true) => pause = pause.min(RETRY_PAUSE),
                // The store is poisoned. The owner logs this when it reopens the store.
                Err(_) if core.lifecycle.is_poisoned() => {}
                Err(error) => {
                    let again =
                        if error.kind() == ErrorKind::Fatal { PASS_INTERVAL } else { RETRY_PAUSE };
                    pause = pause.min(again);
                    tracing::warn!(
                        %error,
                        "a pass that empties sealed segments and shrinks the index failed"
                    );
                }
            }
        }
        core.maintenance.space.note_pass();
        pause = pause.min(core.scrub_next());
    }
}
