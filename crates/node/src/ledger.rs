//! Reservations that this process may be writing to, and who gave them.

use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Reservations by their number, each with its giver.
///
/// A giver that is no longer asked, a client of a former owner, is kept here for as long as one of
/// its reservations is: its name stays locked, and so the space stays withheld from others.
#[derive(Debug)]
pub(crate) struct Ledger<G> {
    page: Mutex<Page<G>>,
    settled: Condvar,
}

#[derive(Debug)]
struct Page<G> {
    open: HashMap<u64, G>,
    /// Calls of `reserve` that may still bring a number.
    coming: usize,
    closed: bool,
}

impl<G: Clone> Ledger<G> {
    pub(crate) fn new() -> Self {
        let page = Page { open: HashMap::new(), coming: 0, closed: false };
        Self { page: Mutex::new(page), settled: Condvar::new() }
    }

    /// Announces a reservation; `false` if none is taken any more.
    pub(crate) fn begin(&self) -> bool {
        let mut page = self.page.lock();
        page.coming += usize::from(!page.closed);
        !page.closed
    }

    /// Notes what came of the one that was announced.
    pub(crate) fn note(&self, reserved: Option<(u64, G)>) {
        let mut page = self.page.lock();
        page.coming -= 1;
        page.open.extend(reserved);
        drop(page);
        self.settled.notify_all();
    }

    /// Who gave a reservation.
    pub(crate) fn giver(&self, reservation: u64) -> Option<G> {
        self.page.lock().open.get(&reservation).cloned()
    }

    /// Nothing is written to it any more. Returns who gave it.
    pub(crate) fn settle(&self, reservation: u64) -> Option<G> {
        let giver = self.page.lock().open.remove(&reservation);
        self.settled.notify_all();
        giver
    }

    /// Takes reservations again, unless the store is being closed for good.
    pub(crate) fn reopen(&self, closing: &AtomicBool) {
        let mut page = self.page.lock();
        page.closed = closing.load(Ordering::Acquire);
    }

    /// Takes no more, and waits until there are none. Whether that came about in time.
    pub(crate) fn close(&self, until: Instant) -> bool {
        let mut page = self.page.lock();
        page.closed = true;
        while page.coming > 0 || !page.open.is_empty() {
            if self.settled.wait_until(&mut page, until).timed_out() {
                return page.coming == 0 && page.open.is_empty();
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
    fn closing_waits_for_what_is_written_and_for_what_is_coming() {
        let ledger = Ledger::new();
        let soon = || Instant::now() + Duration::from_millis(20);
        assert!(ledger.begin() && ledger.begin());
        assert!(!ledger.close(soon()));
        assert!(!ledger.begin(), "closed");
        ledger.note(None);
        ledger.note(Some((7, "owner")));
        assert!(!ledger.close(soon()));
        assert_eq!(ledger.giver(7), Some("owner"));
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| ledger.close(Instant::now() + Duration::from_secs(30)));
            assert_eq!(ledger.settle(7), Some("owner"));
            assert!(closing.join().unwrap());
        });
        assert_eq!(ledger.settle(7), None);
        ledger.reopen(&AtomicBool::new(true));
        assert!(!ledger.begin(), "closed for good");
        ledger.reopen(&AtomicBool::new(false));
        assert!(ledger.begin());
    }
}
