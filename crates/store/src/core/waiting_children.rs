//! Runs that were committed before the page that they follow.

use ritornello_format::{PageHash, ScopeSlot};
use std::collections::BTreeSet;

/// Maximum runs that wait. A further run makes the table forget all of them, because most then wait
/// for pages that are never committed. A forgotten run is linked by the next put that covers both
/// the run's first page and the page before it.
const WAITING_MAX: usize = 4096;

/// Runs that wait for the page that they follow, each as the scope and hash of that page, and the
/// hash of the run's first page.
#[derive(Debug, Default)]
pub(super) struct WaitingChildren(BTreeSet<(ScopeSlot, PageHash, PageHash)>);

impl WaitingChildren {
    /// Remembers a run until `parent` is committed: `child` is the run's first page.
    pub(super) fn insert(&mut self, slot: ScopeSlot, parent: PageHash, child: PageHash) {
        if self.0.len() >= WAITING_MAX {
            self.0.clear();
        }
        self.0.insert((slot, parent, child));
    }

    /// Removes and returns the runs that wait for one of `pages`: for each, the index in `pages` of
    /// the page that it waits for, and the run's first page.
    pub(super) fn take(&mut self, slot: ScopeSlot, pages: &[PageHash]) -> Vec<(u32, PageHash)> {
        let mut taken = Vec::new();
        if self.0.is_empty() {
            return taken;
        }
        for (at, &page) in (0..).zip(pages) {
            let of_page = (slot, page, PageHash([0; 16]))..=(slot, page, PageHash([0xff; 16]));
            taken.extend(self.0.range(of_page).map(|&(_, _, child)| (at, child)));
        }
        for &(at, child) in &taken {
            self.0.remove(&(slot, pages[at as usize], child));
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCOPE: ScopeSlot = ScopeSlot(1);

    fn page(number: usize) -> PageHash {
        PageHash((number as u128).to_be_bytes())
    }

    #[test]
    fn every_child_of_a_page_is_returned_once() {
        let mut waiting = WaitingChildren::default();
        for child in [10, 11, 11] {
            waiting.insert(SCOPE, page(1), page(child));
        }
        waiting.insert(SCOPE, page(2), page(20));
        waiting.insert(ScopeSlot(2), page(1), page(30));
        let pages = [page(2), page(1)];
        let expected = [(0, page(20)), (1, page(10)), (1, page(11))];
        assert_eq!(waiting.take(SCOPE, &pages), expected);
        assert_eq!(waiting.take(SCOPE, &pages), []);
        assert_eq!(waiting.take(ScopeSlot(2), &pages), [(1, page(30))]);
    }

    #[test]
    fn full_table_is_cleared_before_the_next_insert() {
        let mut waiting = WaitingChildren::default();
        for number in 0..2 * WAITING_MAX {
            waiting.insert(SCOPE, page(1), page(2 + number));
        }
        assert_eq!(waiting.take(SCOPE, &[page(1)]).len(), WAITING_MAX);
    }
}
