//! Reservations that this process may be writing to, with their issuers.

use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Reservations by number, each with the owner that issued it.
///
/// An issuer that is no longer in use, the client of a former owner, is kept as long as one of its
/// reservations is pending: its name stays locked, so that the space stays withheld from others.
#[derive(Debug)]
pub(crate) struct PendingReservations<G> {
    state: Mutex<State<G>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<G> {
    open: HashMap<u64, G>,
    /// Calls of `reserve` that have not returned.
    in_flight: usize,
    closed: bool,
}

impl<G: Clone> PendingReservations<G> {
    pub(crate) fn new() -> Self {
        let state = State { open: HashMap::new(), in_flight: 0, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Begins a call of `reserve`. Returns `false` if reservations are closed.
    pub(crate) fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.in_flight += usize::from(!state.closed);
        !state.closed
    }

    /// Ends a call of `reserve` and adds its reservation, if any.
    pub(crate) fn complete(&self, reserved: Option<(u64, G)>) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        state.open.extend(reserved);
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the issuer of a pending reservation.
    pub(crate) fn issuer(&self, reservation: u64) -> Option<G> {
        self.state.lock().open.get(&reservation).cloned()
    }

    /// Removes a reservation that is no longer written to. Returns its issuer.
    pub(crate) fn remove(&self, reservation: u64) -> Option<G> {
        let issuer = self.state.lock().open.remove(&reservation);
        self.changed.notify_all();
        issuer
    }

    /// Accepts reservations again, unless `closing` is set.
    pub(crate) fn reopen(&self, closing: &AtomicBool) {
        let mut state = self.state.lock();
        state.closed = closing.load(Ordering::Acquire);
    }

    /// Refuses new reservations and waits until no reservation is pending. Returns `false` on
    /// timeout.
    pub(crate) fn close(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        while state.in_flight > 0 || !state.open.is_empty() {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return state.in_flight == 0 && state.open.is_empty();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn close_waits_for_pending_reservations() {
        let reservations = PendingReservations::new();
        let soon = || Instant::now() + Duration::from_millis(20);
        assert!(reservations.begin() && reservations.begin());
        assert!(!reservations.close(soon()));
        assert!(!reservations.begin(), "closed");
        reservations.complete(None);
        reservations.complete(Some((7, "owner")));
        assert!(!reservations.close(soon()));
        assert_eq!(reservations.issuer(7), Some("owner"));
        std::thread::scope(|scope| {
            let closing =
                scope.spawn(|| reservations.close(Instant::now() + Duration::from_secs(30)));
            assert_eq!(reservations.remove(7), Some("owner"));
            assert!(closing.join().unwrap());
        });
        assert_eq!(reservations.remove(7), None);
        reservations.reopen(&AtomicBool::new(true));
        assert!(!reservations.begin(), "closed permanently");
        reservations.reopen(&AtomicBool::new(false));
        assert!(reservations.begin());
    }
}
