//! Promotion: copies pages from disk to host memory before they are loaded.
//!
//! A load usually follows a lookup. While the engine schedules the request, pages found on disk are
//! promoted by a job of the first tier's write queue, under that queue's limits. No caller waits
//! for a promotion, since the pages can be loaded from disk as well. When the cache starts to load
//! pages, it cancels promotion jobs that end with the last of these pages: the load itself stores
//! the pages in the first tier, so a promotion would read them a second time.

use super::pending_put::PendingPut;
use super::prompt::PromptPages;
use super::tier_policies::WritePolicy;
use super::tier_set::TierSet;
use super::tier_writer::TierWriter;
use crate::gate::TierSpan;
use ritornello_format::PageHash;
use ritornello_format::residency::Tier;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Pause of promotions after a job that left pages unwritten and was not cancelled.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Promotions to the first tier.
#[derive(Debug)]
pub(super) struct Promotions {
    /// The writer to the first tier; `None` with a single local tier, because pages are
    /// promoted from the second local tier.
    pub(super) writer: Option<Arc<TierWriter>>,
}

impl Promotions {
    /// Creates the promotions of a cache; at most `max_bytes` bytes wait to be promoted.
    pub(super) fn new(tiers: &Arc<TierSet>, max_bytes: u64) -> Self {
        let to = (tiers.first().kind, WritePolicy::Never);
        let writer = || TierWriter::new(tiers, to, max_bytes, None);
        Self { writer: (tiers.local.len() > 1).then(writer) }
    }

    /// In a chained scope, queues promotions of the pages in `requested` that were found on disk,
    /// unless promotions pause ([`RETRY_AFTER`]).
    pub(super) fn promote(&self, pages: &PromptPages, found: &[TierSpan], requested: Range<usize>) {
        let Some(writer) = self.writer.as_ref().filter(|_| pages.scope.chained) else { return };
        let mut end = 0;
        for span in found {
            let start = end.max(requested.start);
            end += span.pages;
            let range = start..end.min(requested.end);
            if span.tier != Tier::Disk || range.is_empty() {
                continue;
            }
            if writer.queue.failed_at().is_some_and(|since| since.elapsed() < RETRY_AFTER) {
                return;
            }
            // The lookup found the page on disk and missed it on the first tier, so an entry of the
            // page table that has it on the first tier is stale.
            writer.forget(pages, range.clone());
            writer.write(pages, range, PendingPut::default());
        }
    }

    /// Cancels promotions of ranges of pages that end with `page`, because the cache is loading
    /// these pages.
    pub(super) fn cancel_last(&self, page: PageHash) {
        self.cancel(|pages, range| {
            range.end.checked_sub(1).is_some_and(|end| pages.hashes[end] == page)
        });
    }

    /// Cancels promotions of a prompt. Returns whether any were queued or running.
    pub(super) fn cancel_prompt(&self, name: PageHash) -> bool {
        self.cancel(|pages, _| pages.name() == Some(name))
    }

    fn cancel(&self, filter: impl Fn(&PromptPages, &Range<usize>) -> bool) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.cancel(filter))
    }
}
