//! Bringing pages from the disk to host memory ahead of their load.
//!
//! A prompt that is found is wanted. What of it lies on the disk rises while its request waits for its
//! turn, as a job of the way to the first tier, bounded as all of them are. Nobody waits for it: the
//! pages can be loaded from where they are. When this cache begins to load all of them what is left of
//! their rise ends, or they would be read twice: what was loaded is put into the first tier from where it
//! was loaded to.

use super::prompt::Pages;
use super::shared::Shared;
use super::write_queue::PendingPut;
use crate::gate::TierSpan;
use ritornello_format::residency::Tier;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A first tier that did not take what it was to is left alone for so long.
const RETRY_AFTER: Duration = Duration::from_secs(5);

impl Shared {
    /// Begins with the pages of `wanted` that were found on the disk.
    pub(super) fn promote(
        self: &Arc<Self>,
        pages: &Pages,
        found: &[TierSpan],
        wanted: Range<usize>,
    ) {
        let top = self.top().kind;
        let Some(queue) = self.write_queue(top).filter(|_| pages.scope.chained) else { return };
        let mut end = 0;
        for span in found {
            let start = end.max(wanted.start);
            end += span.pages;
            let range = start..end.min(wanted.end);
            if span.tier != Tier::Disk || range.is_empty() {
                continue;
            }
            if queue.failed_at().is_some_and(|since| since.elapsed() < RETRY_AFTER) {
                return;
            }
            // Where they were found says that they are not on the first tier, whatever is known.
            self.table.forget(top, &pages.hashes, range.clone());
            self.queue_write(queue, pages, range, PendingPut::default());
        }
    }

    /// Stops that of pages that `mine` knows. Returns whether there was anything to stop.
    pub(super) fn cancel_promotions(&self, mine: impl Fn(&Pages, &Range<usize>) -> bool) -> bool {
        let Some(queue) = self.write_queue(self.top().kind) else { return false };
        let (gone, any) = queue.cancel(mine);
        for (pages, range) in gone {
            self.table.abandon(queue.to, &pages.hashes, range);
        }
        any
    }
}
