//! Guarantees of an index that survives power loss.

#![allow(clippy::panic, reason = "a suite panics where a promise is broken")]

use super::{contents, pages, place};
use crate::{NewRun, PrefixIndex};
use ritornello_format::{Error, ErrorKind, ScopeSlot};

/// An index, and a way to open it as it would be after a power loss.
pub struct Kept {
    /// It.
    pub index: Box<dyn PrefixIndex>,
    /// Opens it again, with only the durable state.
    pub after_power_loss: Box<dyn Fn() -> Box<dyn PrefixIndex>>,
}

impl Kept {
    fn insert(&self, generation: u64) {
        let pages = pages(generation, 3);
        let place = place(generation, 3);
        let scope = ScopeSlot(1);
        let run =
            NewRun { scope, chained: true, parent: None, pages: &pages, place: &place, recency: 1 };
        assert!(self.index.insert(&run).is_ok(), "a sound run is taken");
    }

    fn generations(&self) -> Vec<u64> {
        contents(&*(self.after_power_loss)()).into_keys().collect()
    }
}

pub(super) fn changes_during_data_sync_wait_for_next_sync(kept: &Kept) {
    kept.insert(1);
    let sync_data = || {
        assert!(kept.generations().is_empty(), "nothing is durable before its data");
        kept.insert(2);
        Ok(())
    };
    assert!(kept.index.sync_after(&sync_data).is_ok());
    assert_eq!(kept.generations(), [1], "what came after the data was taken waits");
    assert!(kept.index.sync().is_ok());
    assert_eq!(kept.generations(), [1, 2]);
}

pub(super) fn failed_data_sync_holds_records_back(kept: &Kept) {
    kept.insert(1);
    let failed = kept.index.sync_after(&|| Err(Error::retry("not now")));
    assert_eq!(failed.map_err(|error| error.kind()), Err(ErrorKind::Retry));
    assert!(kept.generations().is_empty(), "nothing is durable without its data");
    kept.insert(2);
    assert!(kept.index.sync().is_ok(), "it may be tried again");
    assert_eq!(kept.generations(), [1, 2], "in the order in which they came");
}

pub(super) fn sync_may_nest_in_data_sync(kept: &Kept) {
    kept.insert(1);
    let sync_data = || {
        kept.insert(2);
        kept.index.sync()?;
        assert_eq!(kept.generations(), [1, 2], "whoever says that data is durable is believed");
        kept.insert(3);
        Ok(())
    };
    assert!(kept.index.sync_after(&sync_data).is_ok());
    assert_eq!(kept.generations(), [1, 2]);
}
