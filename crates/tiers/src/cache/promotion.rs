//! Promotion: copies pages from disk to host memory before they are loaded.
//!
//! A lookup announces a load. While the request is scheduled, pages found on disk are promoted by a
//! job of the first tier's write queue, under that queue's limits. No caller waits for a promotion,
//! since the pages can be loaded from disk as well. When this cache starts to load a prompt, its
//! remaining promotion jobs are cancelled: otherwise pages would be read twice, because loaded
//! pages are stored in the first tier from the loader's buffer.

use super::prompt::PromptPages;
use super::shared::Shared;
use super::write_queue::PendingPut;
use crate::gate::TierSpan;
use ritornello_format::residency::Tier;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Pause of promotions after the first tier did not store all pages of a job.
const RETRY_AFTER: Duration = Duration::from_secs(5);

impl Shared {
    /// Queues promotions of the pages in `requested` that were found on disk.
    pub(super) fn promote(
        self: &Arc<Self>,
        pages: &PromptPages,
        found: &[TierSpan],
        requested: Range<usize>,
    ) {
        let first_tier = self.first_tier().kind;
        let Some(queue) = self.write_queue(first_tier).filter(|_| pages.scope.chained) else {
            return;
        };
        let mut end = 0;
        for span in found {
            let start = end.max(requested.start);
            end += span.pages;
            let range = start..end.min(requested.end);
            if span.tier != Tier::Disk || range.is_empty() {
                continue;
            }
            if queue.failed_at().is_some_and(|since| since.elapsed() < RETRY_AFTER) {
                return;
            }
            // A page found on disk was missed on the first tier, so the table's entry for that tier
            // is stale.
            self.table.forget(first_tier, &pages.hashes, range.clone());
            self.queue_write(queue, pages, range, PendingPut::default());
        }
    }

    /// Cancels promotions of pages that match `filter`. Returns whether any were queued or running.
    pub(super) fn cancel_promotions(
        &self,
        filter: impl Fn(&PromptPages, &Range<usize>) -> bool,
    ) -> bool {
        let Some(queue) = self.write_queue(self.first_tier().kind) else { return false };
        let (cancelled, any) = queue.cancel(filter);
        for (pages, range) in cancelled {
            self.table.abandon(queue.to, &pages.hashes, range);
        }
        any
    }
}
