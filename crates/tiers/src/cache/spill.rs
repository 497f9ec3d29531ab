//! What the first tier could not take, kept until those below have it.

use super::policy::WritePolicy;
use super::prompt::Pages;
use super::shared::Shared;
use super::write_queue::PendingPut;
use ritornello_volume::staging::StagedPages;
use std::sync::{Arc, OnceLock};

/// Pages of one put; empty if all are on the first tier. Who may have to write them down holds it.
#[derive(Debug, Default)]
pub(super) struct Spilled(OnceLock<(usize, StagedPages)>);

impl Spilled {
    /// The bytes of a page of the prompt.
    pub(super) fn page(&self, page: usize) -> Option<&[u8]> {
        let (first, pages) = self.0.get()?;
        pages.bytes(page.checked_sub(*first)?)
    }
}

impl Shared {
    /// Pages `first..` of a prompt have no room on the first tier. They stay in staging for those who
    /// write them down, unless half of that is taken: puts need it more.
    pub(super) fn spill(
        self: &Arc<Self>,
        spilled: &Arc<Spilled>,
        pages: &Pages,
        first: usize,
        staged: StagedPages,
    ) {
        let staging = self.top().store().staging().stats();
        if staging.in_use > staging.capacity / 2 {
            return;
        }
        let range = first..pages.len();
        let _ = spilled.0.set((first, staged));
        // Who is written to when pages leave the tier above is so now; others wait for the put.
        if let Some(queue) =
            self.write_queues.first().filter(|queue| queue.policy == WritePolicy::Back)
        {
            self.table.forget(queue.to, &pages.hashes, range.clone());
            self.queue_write_with(
                queue,
                pages,
                range,
                PendingPut { ticket: None, spilled: Some(Arc::clone(spilled)) },
                false,
            );
        }
    }
}
