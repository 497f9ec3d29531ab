//! Whether an owner that lives is heard.
//!
//! A stopped process (SIGSTOP, a frozen container, a debugger) keeps its lock and says nothing. It
//! cannot be deposed: what it was about to write, it may write yet. A process that waits for its
//! disk keeps its lock and says nothing, too, but it still greets whoever knocks, because a greeting
//! takes none of its engine's locks. So when a call has waited for a while, a thread knocks. If
//! that is not answered either, the owner counts as silent: calls that wait for it end, later ones
//! are not made. The thread goes on listening at the door, and the answer ends the silence.

use parking_lot::Mutex;
use ritornello_store::LeaseNumber;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A call that has waited this long has somebody knock.
pub(crate) const HUSH: Duration = Duration::from_secs(1);
/// After an answer nobody knocks for this long.
const ASSURED: Duration = Duration::from_secs(5);
/// Leases whose end is told later; further ones run out by themselves.
const LEASES_KEPT: usize = 4096;

/// What one client knows of its owner's hearing.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    silent: AtomicBool,
    door: Mutex<Door>,
    untold: Mutex<Untold>,
}

#[derive(Debug, Default)]
struct Door {
    /// Whether a thread is at it.
    knocking: bool,
    answered: Option<Instant>,
}

/// What the owner is to be told when it is heard again.
#[derive(Debug, Default)]
pub(crate) struct Untold {
    /// Nobody reads under these leases any more.
    pub(crate) leases: Vec<LeaseNumber>,
    /// Nobody writes to these reservations any more.
    pub(crate) reservations: Vec<u64>,
}

impl Hearing {
    /// Whether the owner counts as silent.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Acquire)
    }

    /// From now on it does. Returns whether that is news.
    pub(crate) fn fall_silent(&self) -> bool {
        !self.silent.swap(true, Ordering::AcqRel)
    }

    /// Whether the caller is to knock: nobody does, and nobody was answered just now. It says
    /// [`Hearing::leave`] when it is done.
    pub(crate) fn go_knocking(&self) -> bool {
        let mut door = self.door.lock();
        let assured = door.answered.is_some_and(|answered| answered.elapsed() < ASSURED);
        let goes = !door.knocking && (!assured || self.is_silent());
        door.knocking |= goes;
        goes
    }

    /// Nobody is at the door any more, and a silence is over: the owner answered, or it is gone.
    /// Returns whether there was one.
    pub(crate) fn leave(&self, answered: bool) -> bool {
        let mut door = self.door.lock();
        door.knocking = false;
        door.answered = answered.then(Instant::now);
        self.silent.swap(false, Ordering::AcqRel)
    }

    /// Keeps in mind that a lease is over, and says whether to tell at once what was kept: the
    /// silence may have ended meanwhile, and who ended it did not see this any more.
    #[must_use]
    pub(crate) fn note_released(&self, lease: LeaseNumber) -> bool {
        let mut untold = self.untold.lock();
        if untold.leases.len() < LEASES_KEPT {
            untold.leases.push(lease);
        }
        !self.is_silent()
    }

    /// The same of a reservation. There are no more of them than there was space.
    #[must_use]
    pub(crate) fn note_aborted(&self, reservation: u64) -> bool {
        let mut untold = self.untold.lock();
        untold.reservations.push(reservation);
        !self.is_silent()
    }

    /// What was kept in mind.
    pub(crate) fn take_untold(&self) -> Untold {
        std::mem::take(&mut *self.untold.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_knocks_and_an_answer_reassures() {
        let hearing = Hearing::default();
        assert!(hearing.go_knocking() && !hearing.go_knocking());
        assert!(hearing.fall_silent() && !hearing.fall_silent() && hearing.is_silent());
        assert!(hearing.leave(true) && !hearing.is_silent());
        assert!(!hearing.go_knocking(), "it answered just now");
        assert!(hearing.fall_silent() && hearing.go_knocking());
        hearing.leave(false);
        assert!(hearing.go_knocking());
    }

    #[test]
    fn what_could_not_be_told_is_kept_within_bounds() {
        let hearing = Hearing::default();
        assert!(hearing.fall_silent());
        assert!((0..5000).all(|lease| !hearing.note_released(LeaseNumber(lease))));
        assert!(!hearing.note_aborted(9));
        let untold = hearing.take_untold();
        assert_eq!((untold.leases.len(), untold.reservations), (LEASES_KEPT, vec![9]));
        assert!(hearing.take_untold().leases.is_empty());
    }

    #[test]
    fn what_is_kept_behind_the_end_of_a_silence_is_told_at_once() {
        let hearing = Hearing::default();
        assert!(hearing.fall_silent() && hearing.leave(true));
        assert!(hearing.take_untold().reservations.is_empty());
        assert!(hearing.note_aborted(9) && hearing.note_released(LeaseNumber(7)));
        assert_eq!(hearing.take_untold().reservations, [9]);
    }
}
