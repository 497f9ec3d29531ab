//! The epoch of one owner, and which acknowledged writes of earlier epochs are known to have
//! survived.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// An owner's epoch, as sent to its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnerEpoch {
    /// Identity of the store.
    pub(crate) store: [u8; 16],
    /// Number of the epoch, counted since the store was created.
    pub(crate) owner: u32,
    /// Whether the previous owner closed the store, and so lost nothing.
    pub(crate) clean: bool,
    /// Whether a put or a delete is durable when it is acknowledged.
    pub(crate) durable: bool,
}

impl OwnerEpoch {
    /// Returns whether every write that was acknowledged in epoch `owner` still exists.
    pub(crate) fn preserves(&self, owner: u32) -> bool {
        owner == self.owner || (self.clean && owner.checked_add(1) == Some(self.owner))
    }
}

/// Puts and deletes that an owner acknowledged and that no flush has covered. An owner that dies
/// loses those since its last sync, and a flush in the next epoch must report the loss.
#[derive(Debug, Default)]
pub(crate) struct Unflushed(Mutex<FlushMark>);

/// The acknowledgements that a flush covers if it succeeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlushMark {
    /// The earliest epoch with an uncovered acknowledgement.
    pub(crate) owner: Option<u32>,
    /// Counts acknowledgements, so that a flush does not cover acknowledgements that came after it
    /// began.
    changes: u64,
}

impl Unflushed {
    /// Records an acknowledged put or delete.
    pub(crate) fn note(&self, epoch: &OwnerEpoch) {
        if !epoch.durable {
            let mut mark = self.0.lock();
            mark.changes += 1;
            mark.owner = Some(mark.owner.map_or(epoch.owner, |owner| owner.min(epoch.owner)));
        }
    }

    /// Returns the mark of a flush that begins now.
    pub(crate) fn mark(&self) -> FlushMark {
        *self.0.lock()
    }

    /// Records that everything up to `mark` is durable, or was reported as lost.
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
    fn same_epoch_or_clean_successor_preserves_puts() {
        assert!(epoch(4, false).preserves(4));
        assert!(epoch(5, true).preserves(4));
        assert!(!epoch(5, false).preserves(4));
        assert!(!epoch(6, true).preserves(4));
    }

    #[test]
    fn flush_covers_earlier_acknowledgements() {
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
        assert_eq!(unflushed.mark().owner, Some(2), "a put was acknowledged after the mark");
        unflushed.complete_flush(unflushed.mark());
        assert_eq!(unflushed.mark().owner, None);
    }
}
