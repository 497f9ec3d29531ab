//! Whether an owner that lives is heard.
//!
//! A stopped process (SIGSTOP, a frozen container, a debugger) keeps its lock and says nothing. It
//! cannot be deposed: what it was about to write, it may write yet. A process that waits for its
//! disk keeps its lock and says nothing, too, but it still greets whoever knocks, because a greeting
//! takes none of its engine's locks. So when a call has waited for a while, a thread knocks. If
//! that is not answered either, the owner counts as silent: calls that wait for it end, later ones
//! are not made. The thread goes on listening at the probe, and the answer ends the silence.

use parking_lot::Mutex;
use ritornello_store::LeaseNumber;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A call that has waited this long has somebody knock.
pub(crate) const PROBE_AFTER: Duration = Duration::from_secs(1);
/// After an answer nobody knocks for this long.
const PROBE_PAUSE: Duration = Duration::from_secs(5);
/// Leases whose end is told later; further ones run out by themselves.
const DEFERRED_LEASES_MAX: usize = 4096;

/// What one client knows of its owner's liveness.
#[derive(Debug, Default)]
pub(crate) struct OwnerLiveness {
    silent: AtomicBool,
    probe: Mutex<ProbeState>,
    deferred: Mutex<Deferred>,
}

#[derive(Debug, Default)]
struct ProbeState {
    /// Whether a thread is at it.
    running: bool,
    answered: Option<Instant>,
}

/// What the owner is to be told when it is heard again.
#[derive(Debug, Default)]
pub(crate) struct Deferred {
    /// Nobody reads under these leases any more.
    pub(crate) leases: Vec<LeaseNumber>,
    /// Nobody writes to these reservations any more.
    pub(crate) reservations: Vec<u64>,
}

impl OwnerLiveness {
    /// Whether the owner counts as silent.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Acquire)
    }

    /// From now on it does. Returns whether that is news.
    pub(crate) fn mark_silent(&self) -> bool {
        !self.silent.swap(true, Ordering::AcqRel)
    }

    /// Whether the caller is to knock: nobody does, and nobody was answered just now. It says
    /// [`OwnerLiveness::end_probe`] when it is done.
    pub(crate) fn begin_probe(&self) -> bool {
        let mut probe = self.probe.lock();
        let assured = probe.answered.is_some_and(|answered| answered.elapsed() < PROBE_PAUSE);
        let goes = !probe.running && (!assured || self.is_silent());
        probe.running |= goes;
        goes
    }

    /// Nobody is at the probe any more, and a silence is over: the owner answered, or it is gone.
    /// Returns whether there was one.
    pub(crate) fn end_probe(&self, answered: bool) -> bool {
        let mut probe = self.probe.lock();
        probe.running = false;
        probe.answered = answered.then(Instant::now);
        self.silent.swap(false, Ordering::AcqRel)
    }

    /// Keeps in mind that a lease is over, and says whether to tell at once what was kept: the
    /// silence may have ended meanwhile, and who ended it did not see this any more.
    #[must_use]
    pub(crate) fn defer_release(&self, lease: LeaseNumber) -> bool {
        let mut deferred = self.deferred.lock();
        if deferred.leases.len() < DEFERRED_LEASES_MAX {
            deferred.leases.push(lease);
        }
        !self.is_silent()
    }

    /// The same of a reservation. There are no more of them than there was space.
    #[must_use]
    pub(crate) fn defer_abort(&self, reservation: u64) -> bool {
        let mut deferred = self.deferred.lock();
        deferred.reservations.push(reservation);
        !self.is_silent()
    }

    /// What was kept in mind.
    pub(crate) fn take_deferred(&self) -> Deferred {
        std::mem::take(&mut *self.deferred.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_knocks_and_an_answer_reassures() {
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
    fn what_could_not_be_told_is_kept_within_bounds() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.mark_silent());
        assert!((0..5000).all(|lease| !liveness.defer_release(LeaseNumber(lease))));
        assert!(!liveness.defer_abort(9));
        let deferred = liveness.take_deferred();
        assert_eq!((deferred.leases.len(), deferred.reservations), (DEFERRED_LEASES_MAX, vec![9]));
        assert!(liveness.take_deferred().leases.is_empty());
    }

    #[test]
    fn what_is_kept_behind_the_end_of_a_silence_is_told_at_once() {
        let liveness = OwnerLiveness::default();
        assert!(liveness.mark_silent() && liveness.end_probe(true));
        assert!(liveness.take_deferred().reservations.is_empty());
        assert!(liveness.defer_abort(9) && liveness.defer_release(LeaseNumber(7)));
        assert_eq!(liveness.take_deferred().reservations, [9]);
    }
}
