//! Spilled pages: pages for which the first tier had no space, kept in staging until the lower
//! tiers have them.

use super::prompt::PromptPages;
use super::shared::Shared;
use super::tier_policies::WritePolicy;
use super::write_queue::PendingPut;
use ritornello_volume::staging::StagedPages;
use std::sync::{Arc, OnceLock};

/// Spilled pages of one put; empty if the first tier took all pages. Each queued write that may
/// need spilled pages holds a reference.
#[derive(Debug, Default)]
pub(super) struct Spilled(OnceLock<(usize, StagedPages)>);

impl Spilled {
    /// The bytes of page `page` of the prompt, if it was spilled.
    pub(super) fn page(&self, page: usize) -> Option<&[u8]> {
        let (first, pages) = self.0.get()?;
        pages.bytes(page.checked_sub(*first)?)
    }
}

impl Shared {
    /// Spills pages `first..` of a prompt, for which the first tier has no space: the pages stay in
    /// staging until the lower tiers have written them. If more than half of staging is in use, the
    /// pages are dropped instead, because new puts need the memory more.
    pub(super) fn spill(
        self: &Arc<Self>,
        spilled: &Arc<Spilled>,
        pages: &PromptPages,
        first: usize,
        staged: StagedPages,
    ) {
        let staging = self.first_tier().store().staging().stats();
        if staging.in_use > staging.capacity / 2 {
            return;
        }
        let range = first..pages.len();
        let _ = spilled.0.set((first, staged));
        // A write-back tier is written when pages leave the tier above; spilled pages leave it now.
        // The write queues of tiers with other policies already wait for the put.
        if let Some(queue) =
            self.write_queues.first().filter(|queue| queue.policy == WritePolicy::WriteBack)
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
