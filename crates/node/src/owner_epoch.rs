//! One owner's time, and what of the time before it is certain.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// What clients are told about their owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Term {
    /// Identity of the store.
    pub(crate) store: [u8; 16],
    /// The owner's number, counted since the store was made.
    pub(crate) owner: u32,
    /// Whether the owner before it closed the store, and so lost nothing.
    pub(crate) clean: bool,
    /// Whether a put or a delete is durable when it is acknowledged.
    pub(crate) durable: bool,
}

impl Term {
    /// Whether everything is still there that the owner of that number acknowledged.
    pub(crate) fn keeps(&self, owner: u32) -> bool {
        owner == self.owner || (self.clean && owner.checked_add(1) == Some(self.owner))
    }
}

/// Puts and deletes that an owner acknowledged and that no flush has covered yet. An owner that dies
/// loses those of its last seconds, and a flush that the next owner answers must report it.
#[derive(Debug, Default)]
pub(crate) struct Unflushed(Mutex<Mark>);

/// What a flush sets out to cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The first owner that acknowledged one.
    pub(crate) owner: Option<u32>,
    /// Counts changes, so that a flush does not take credit for those that came after it began.
    changes: u64,
}

impl Unflushed {
    /// A put or a delete was acknowledged.
    pub(crate) fn note(&self, term: &Term) {
        if !term.durable {
            let mut mark = self.0.lock();
            mark.changes += 1;
            mark.owner = Some(mark.owner.map_or(term.owner, |owner| owner.min(term.owner)));
        }
    }

    /// A flush begins.
    pub(crate) fn mark(&self) -> Mark {
        *self.0.lock()
    }

    /// It is done: all that was there at the mark is covered, or reported as lost.
    pub(crate) fn settle(&self, mark: Mark) {
        let mut now = self.0.lock();
        if *now == mark {
            now.owner = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn term(owner: u32, clean: bool) -> Term {
        Term { store: [0; 16], owner, clean, durable: false }
    }

    #[test]
    fn only_the_same_owner_or_the_heir_of_one_that_closed_keeps_everything() {
        assert!(term(4, false).keeps(4));
        assert!(term(5, true).keeps(4));
        assert!(!term(5, false).keeps(4));
        assert!(!term(6, true).keeps(4));
    }

    #[test]
    fn a_flush_covers_what_came_before_it() {
        let unflushed = Unflushed::default();
        assert_eq!(unflushed.mark().owner, None);
        unflushed.note(&Term { durable: true, ..term(1, true) });
        assert_eq!(unflushed.mark().owner, None);
        unflushed.note(&term(2, true));
        unflushed.note(&term(3, true));
        let early = unflushed.mark();
        assert_eq!(early.owner, Some(2));
        unflushed.note(&term(3, true));
        unflushed.settle(early);
        assert_eq!(unflushed.mark().owner, Some(2), "one came after the mark");
        unflushed.settle(unflushed.mark());
        assert_eq!(unflushed.mark().owner, None);
    }
}
