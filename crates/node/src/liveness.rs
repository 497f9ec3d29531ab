//! Liveness of an owner that holds the lock but may not answer.
//!
//! A stopped process (SIGSTOP, a frozen container, a debugger) keeps its lock and answers nothing.
//! No other process may take over, because writes that the stopped process began may still be
//! issued. A process that waits for its disk keeps its lock and answers no calls either, but it
//! still answers a handshake, because a handshake takes no lock of the core. When a call has waited
//! for [`PROBE_AFTER`], a probe thread starts a handshake. If the handshake is not answered either,
//! the owner is marked silent: pending calls fail and later calls are not sent. The probe thread
//! waits for a reply, then marks the owner responsive.

use parking_lot::Mutex;
use ritornello_store::LeaseNumber;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time after which a waiting call starts a probe.
pub(crate) const PROBE_AFTER: Duration = Duration::from_secs(1);
/// Minimum time from an answered probe to the next probe of a responsive owner.
const PROBE_PAUSE: Duration = Duration::from_secs(5);
/// Maximum releases deferred while the owner is silent; further leases are left to expire.
const DEFERRED_LEASES_MAX: usize = 4096;

/// One client's view of its owner's liveness.
#[derive(Debug, Default)]
pub(crate) struct OwnerLiveness {
    silent: AtomicBool,
    probe: Mutex<ProbeState>,
    deferred: Mutex<Deferred>,
}

#[derive(Debug, Default)]
struct ProbeState {
    /// Whether a probe thread is running.
    running: bool,
    answered: Option<Instant>,
}

/// Calls to send once the owner responds again.
#[derive(Debug, Default)]
pub(crate) struct Deferred {
    /// Leases to release.
    pub(crate) leases: Vec<LeaseNumber>,
    /// Reservations to abort.
    pub(crate) reservations: Vec<u64>,
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
    /// no probe was answered within [`PROBE_PAUSE`]. The caller ends the probe with
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

    /// Defers the release of `lease`. Returns whether the caller must send all deferred calls now:
    /// the silence has ended, and the thread that ended it may have missed this call.
    #[must_use]
    pub(crate) fn defer_release(&self, lease: LeaseNumber) -> bool {
        let mut deferred = self.deferred.lock();
        if deferred.leases.len() < DEFERRED_LEASES_MAX {
            deferred.leases.push(lease);
        }
        !self.is_silent()
    }

    /// Defers the abort of `reservation`, as [`Self::defer_release`] does for a lease. Needs no
    /// limit: reservations are bounded by space.
    #[must_use]
    pub(crate) fn defer_abort(&self, reservation: u64) -> bool {
        let mut deferred = self.deferred.lock();
        deferred.reservations.push(reservation);
        !self.is_silent()
    }

    /// Takes all deferred calls.
    pub(crate) fn take_deferred(&self) -> Deferred {
        std::mem::take(&mut *self.deferred.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_probe_runs_until_answered() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.begin_probe() && !liveness.begin_probe());
        assert!(liveness.mark_silent() && !liveness.mark_silent() && liveness.is_silent());
        assert!(liveness.end_probe(true) && !liveness.is_silent());
        assert!(!liveness.begin_probe(), "it answered just now");
        assert!(liveness.mark_silent() && liveness.begin_probe());
        liveness.end_probe(false);
        assert!(liveness.begin_probe());
    }

    #[test]
    fn deferred_calls_are_bounded() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.mark_silent());
        assert!((0..5000).all(|lease| !liveness.defer_release(LeaseNumber(lease))));
        assert!(!liveness.defer_abort(9));
        let deferred = liveness.take_deferred();
        assert_eq!((deferred.leases.len(), deferred.reservations), (DEFERRED_LEASES_MAX, vec![9]));
        assert!(liveness.take_deferred().leases.is_empty());
    }

    #[test]
    fn call_deferred_after_silence_is_sent_now() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.mark_silent() && liveness.end_probe(true));
        assert!(liveness.take_deferred().reservations.is_empty());
        assert!(liveness.defer_abort(9) && liveness.defer_release(LeaseNumber(7)));
        assert_eq!(liveness.take_deferred().reservations, [9]);
    }
}
