//! Guarantees of an index whose records become durable only after the data that they name.

#![allow(clippy::panic, reason = "a suite panics where a promise is broken")]

use super::{contents, pages, place};
use crate::{NewRun, PrefixIndex};
use ritornello_format::{Error, ErrorKind, ScopeSlot};

/// An index, and a way to open it as it would be after a power loss.
pub struct PersistentIndex {
    /// The open index.
    pub index: Box<dyn PrefixIndex>,
    /// Opens the index again, with only the durable state.
    pub after_power_loss: Box<dyn Fn() -> Box<dyn PrefixIndex>>,
}

impl PersistentIndex {
    fn insert(&self, generation: u64) {
        let pages = pages(generation, 3);
        let place = place(generation, 3);
        let scope = ScopeSlot(1);
        let run =
            NewRun { scope, chained: true, parent: None, pages: &pages, place: &place, recency: 1 };
        assert!(self.index.insert(&run).is_ok(), "a valid run is accepted");
    }

    fn generations(&self) -> Vec<u64> {
        contents(&*(self.after_power_loss)()).into_keys().collect()
    }
}

pub(super) fn changes_during_data_sync_wait_for_next_sync(persistent: &PersistentIndex) {
    persistent.insert(1);
    let sync_data = || {
        assert!(
            persistent.generations().is_empty(),
            "records must not be durable before their data"
        );
        persistent.insert(2);
        Ok(())
    };
    assert!(persistent.index.sync_after(&sync_data).is_ok());
    assert_eq!(
        persistent.generations(),
        [1],
        "changes during the data sync must wait for the next sync"
    );
    assert!(persistent.index.sync().is_ok());
    assert_eq!(persistent.generations(), [1, 2]);
}

pub(super) fn failed_data_sync_withholds_records(persistent: &PersistentIndex) {
    persistent.insert(1);
    let failed = persistent.index.sync_after(&|| Err(Error::retry("not now")));
    assert_eq!(failed.map_err(|error| error.kind()), Err(ErrorKind::Retry));
    assert!(persistent.generations().is_empty(), "records must not be durable without their data");
    persistent.insert(2);
    assert!(persistent.index.sync().is_ok(), "a sync after a failed data sync must succeed");
    assert_eq!(
        persistent.generations(),
        [1, 2],
        "the sync must make both runs durable, also the run from before the failed data sync"
    );
}

pub(super) fn sync_may_nest_in_data_sync(persistent: &PersistentIndex) {
    persistent.insert(1);
    let sync_data = || {
        persistent.insert(2);
        persistent.index.sync()?;
        assert_eq!(persistent.generations(), [1, 2], "a sync in `sync_data` makes both durable");
        persistent.insert(3);
        Ok(())
    };
    assert!(persistent.index.sync_after(&sync_data).is_ok());
    assert_eq!(persistent.generations(), [1, 2]);
}
