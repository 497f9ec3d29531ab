//! Liveness of an owner that holds the lock but may not answer.
//!
//! A stopped process (SIGSTOP, a frozen container, a debugger) keeps its lock and answers nothing.
//! No other process may take over, because writes that the stopped process began may still be
//! issued. A process that waits for its disk keeps its lock and answers no calls either, but it
//! still answers the handshake of another connection of a connected client, because this handshake
//! takes no lock of the core. When a call has waited for [`PROBE_AFTER`], a probe thread starts
//! such a handshake. A probe of an owner is unrelated to probes for pages. If the owner does not
//! answer the handshake either, it is marked silent: pending calls fail, and later calls are not
//! sent. The probe thread waits for a reply, then marks the owner responsive.

use parking_lot::Mutex;
use ritornello_store::rule::LaterCall;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time after which a waiting call starts a probe.
pub(crate) const PROBE_AFTER: Duration = Duration::from_secs(1);
/// Minimum time from an answered probe to the next probe of a responsive owner.
const PROBE_PAUSE: Duration = Duration::from_secs(5);
/// Number of deferred calls from which on releases are dropped while the owner is silent: their
/// leases expire. Aborts are deferred without a limit, because the store's space bounds the
/// reservations.
const DEFERRED_MAX: usize = 4096;

/// One client's view of its owner's liveness.
#[derive(Debug, Default)]
pub(crate) struct OwnerLiveness {
    silent: AtomicBool,
    probe: Mutex<ProbeState>,
    /// Calls to make once the owner responds again.
    deferred: Mutex<Vec<LaterCall>>,
}

#[derive(Debug, Default)]
struct ProbeState {
    /// Whether a probe thread is running.
    running: bool,
    answered: Option<Instant>,
}

impl OwnerLiveness {
    /// Returns whether the owner is marked silent.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Acquire)
    }

    /// Marks the owner silent. Returns whether it was responsive before.
    pub(crate) fn mark_silent(&self) -> bool {
        !self.silent.swap(true, Ordering::AcqRel)
    }

    /// Returns whether the caller must run a probe: no probe is running, and the owner is silent or
    /// answered no probe during the last [`PROBE_PAUSE`]. The caller ends the probe with
    /// [`OwnerLiveness::end_probe`].
    pub(crate) fn begin_probe(&self) -> bool {
        let mut probe = self.probe.lock();
        let recent = probe.answered.is_some_and(|answered| answered.elapsed() < PROBE_PAUSE);
        let begins = !probe.running && (!recent || self.is_silent());
        probe.running |= begins;
        begins
    }

    /// Ends a probe and removes the silent mark: the owner answered or died, or the probe could not
    /// start. Returns whether the owner was silent before.
    pub(crate) fn end_probe(&self, answered: bool) -> bool {
        let mut probe = self.probe.lock();
        probe.running = false;
        probe.answered = answered.then(Instant::now);
        self.silent.swap(false, Ordering::AcqRel)
    }

    /// Defers a call. Returns whether the caller must make all deferred calls now: the silence has
    /// ended, and the thread that ended it may have missed this call.
    #[must_use]
    pub(crate) fn defer(&self, call: LaterCall) -> bool {
        let mut deferred = self.deferred.lock();
        if deferred.len() < DEFERRED_MAX || matches!(call, LaterCall::Abort(_)) {
            deferred.push(call);
        }
        !self.is_silent()
    }

    pub(crate) fn take_deferred(&self) -> Vec<LaterCall> {
        std::mem::take(&mut *self.deferred.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_store::LeaseNumber;

    #[test]
    fn one_probe_runs_at_a_time() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.begin_probe() && !liveness.begin_probe());
        assert!(liveness.mark_silent() && !liveness.mark_silent() && liveness.is_silent());
        assert!(liveness.end_probe(true) && !liveness.is_silent());
        assert!(!liveness.begin_probe(), "no probe may begin directly after an answer");
        assert!(liveness.mark_silent() && liveness.begin_probe());
        liveness.end_probe(false);
        assert!(liveness.begin_probe());
    }

    fn release(lease: u64) -> LaterCall {
        LaterCall::Release(LeaseNumber(lease))
    }

    #[test]
    fn deferred_releases_are_bounded() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.mark_silent());
        assert!((0..5000).all(|lease| !liveness.defer(release(lease))));
        assert!(!liveness.defer(LaterCall::Abort(9)));
        let deferred = liveness.take_deferred();
        assert_eq!(deferred[..DEFERRED_MAX].last(), Some(&release(DEFERRED_MAX as u64 - 1)));
        assert_eq!(deferred[DEFERRED_MAX..], [LaterCall::Abort(9)]);
        assert!(liveness.take_deferred().is_empty());
    }

    #[test]
    fn call_deferred_after_silence_is_sent_now() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.mark_silent() && liveness.end_probe(true));
        assert!(liveness.take_deferred().is_empty());
        assert!(liveness.defer(LaterCall::Abort(9)) && liveness.defer(release(7)));
        assert_eq!(liveness.take_deferred(), [LaterCall::Abort(9), release(7)]);
    }
}
