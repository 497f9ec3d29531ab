//! One owner's time, and what of the time before it is certain.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// What clients are told about their owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnerEpoch {
    /// Identity of the store.
    pub(crate) store: [u8; 16],
    /// The owner's number, counted since the store was made.
    pub(crate) owner: u32,
    /// Whether the owner before it closed the store, and so lost nothing.
    pub(crate) clean: bool,
    /// Whether a put or a delete is durable when it is acknowledged.
    pub(crate) durable: bool,
}

impl OwnerEpoch {
    /// Whether everything is still there that the owner of that number acknowledged.
    pub(crate) fn preserves(&self, owner: u32) -> bool {
        owner == self.owner || (self.clean && owner.checked_add(1) == Some(self.owner))
    }
}

/// Puts and deletes that an owner acknowledged and that no flush has covered yet. An owner that dies
/// loses those of its last seconds, and a flush that the next owner answers must report it.
#[derive(Debug, Default)]
pub(crate) struct Unflushed(Mutex<FlushMark>);

/// What a flush sets out to cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlushMark {
    /// The first owner that acknowledged one.
    pub(crate) owner: Option<u32>,
    /// Counts changes, so that a flush does not take credit for those that came after it began.
    changes: u64,
}

impl Unflushed {
    /// A put or a delete was acknowledged.
    pub(crate) fn note(&self, epoch: &OwnerEpoch) {
        if !epoch.durable {
            let mut mark = self.0.lock();
            mark.changes += 1;
            mark.owner = Some(mark.owner.map_or(epoch.owner, |owner| owner.min(epoch.owner)));
        }
    }

    /// A flush begins.
    pub(crate) fn mark(&self) -> FlushMark {
        *self.0.lock()
    }

    /// It is done: all that was there at the mark is covered, or reported as lost.
    pub(crate) fn complete_flush(&self, mark: FlushMark) {
        let mut now = self.0.lock();
        if *now == mark {
            now.owner = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(owner: u32, clean: bool) -> OwnerEpoch {
        OwnerEpoch { store: [0; 16], owner, clean, durable: false }
    }

    #[test]
    fn only_the_same_owner_or_the_heir_of_one_that_closed_keeps_everything() {
        assert!(epoch(4, false).preserves(4));
        assert!(epoch(5, true).preserves(4));
        assert!(!epoch(5, false).preserves(4));
        assert!(!epoch(6, true).preserves(4));
    }

    #[test]
    fn a_flush_covers_what_came_before_it() {
        let unflushed = Unflushed::default();
        assert_eq!(unflushed.mark().owner, None);
        unflushed.note(&OwnerEpoch { durable: true, ..epoch(1, true) });
        assert_eq!(unflushed.mark().owner, None);
        unflushed.note(&epoch(2, true));
        unflushed.note(&epoch(3, true));
        let early = unflushed.mark();
        assert_eq!(early.owner, Some(2));
        unflushed.note(&epoch(3, true));
        unflushed.complete_flush(early);
        assert_eq!(unflushed.mark().owner, Some(2), "one came after the mark");
        unflushed.complete_flush(unflushed.mark());
        assert_eq!(unflushed.mark().owner, None);
    }
}
