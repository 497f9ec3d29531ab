//! Which pages have runs hanging from them: how far the tail of a run may be cut.

use ritornello_index::RunId;
use std::collections::BTreeMap;

/// Counts, for each page, the runs that hang from it. Names of runs are never reused, so what is
/// said of a run that is gone, or not there yet, does no harm.
#[derive(Debug, Default)]
pub(super) struct Tails(BTreeMap<(RunId, u32), u32>);

impl Tails {
    /// One more run hangs from page `page` of `run`.
    pub(super) fn attach(&mut self, (run, page): (RunId, u32)) {
        *self.0.entry((run, page)).or_default() += 1;
    }

    /// One run less hangs from page `page` of `run`.
    pub(super) fn detach(&mut self, (run, page): (RunId, u32)) {
        let Some(count) = self.0.get_mut(&(run, page)) else {
            debug_assert!(false, "detached from {run:?} but never attached");
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.0.remove(&(run, page));
        }
    }

    /// Leading pages of `run` that others hang from.
    pub(super) fn held(&self, run: RunId) -> u32 {
        let last = self.0.range((run, 0)..=(run, u32::MAX)).next_back();
        last.map_or(0, |((_, page), _)| page.saturating_add(1))
    }
}
