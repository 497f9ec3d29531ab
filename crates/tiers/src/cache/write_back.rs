//! Write-back: chooses the dirty pages of a tier that are written to the tier below, before the
//! tier evicts them.
//!
//! The tier above is a store that several processes share, and its eviction does not know which
//! pages are dirty. While it is nearly full, the dirty pages of each process may therefore use only
//! a quarter of it: the least recently used dirty pages are written to the lower tier and then
//! evicted. The cache evicts them explicitly, because the read for the write makes them the most
//! recently used pages of the store.

use super::dirty_pages::DirtyPages;
use super::local_tier::LocalTier;
use super::prompt::PromptPages;
use super::tier_set::TierSet;
use ritornello_format::residency::Tier;
use std::ops::Range;
use std::sync::Arc;

/// The tier above counts as nearly full when `FULL_QUARTERS` quarters of it are used.
const FULL_QUARTERS: u64 = 3;
/// Quarters of a nearly full tier that the dirty pages of one process may use.
const DIRTY_QUARTERS: u64 = 1;
/// Maximum number of pages that the page table evicts for one write-back batch, or of dirty pages
/// that the batch samples. A batch may write more pages: with a sampled page also the pages before
/// it in its prompt, from the first dirty page.
const BATCH_PAGES: usize = 64;

/// The dirty pages of the tier above a write-back tier.
#[derive(Debug)]
pub(super) struct WriteBack {
    tiers: Arc<TierSet>,
    /// The write-back tier.
    to: Tier,
    dirty: DirtyPages,
}

impl WriteBack {
    pub(super) fn new(tiers: Arc<TierSet>, to: Tier) -> Self {
        Self { tiers, to, dirty: DirtyPages::default() }
    }

    fn above(&self) -> Option<&LocalTier> {
        self.tiers.above(self.to)
    }

    /// Records pages that arrived on the tier above as dirty.
    pub(super) fn add(&self, pages: &PromptPages, range: Range<usize>) {
        self.dirty.add(pages, range.clone());
        if let Some(above) = self.above() {
            self.tiers.mark_present(above.kind, pages, range);
        }
    }

    pub(super) fn dirty_bytes(&self) -> u64 {
        self.dirty.dirty_bytes()
    }

    /// Returns the maximum bytes that may be dirty now; `None` if there is no limit now, because no
    /// page is dirty, or the tier above is not nearly full or does not answer.
    pub(super) fn max_dirty_bytes(&self) -> Option<u64> {
        let above = self.above().filter(|_| self.dirty_bytes() > 0)?;
        let stats = above.store().stats().ok()?;
        let (used, all) =
            (stats.catalog.used_bytes, stats.catalog.segments_max * stats.catalog.segment_bytes);
        (used >= all / 4 * FULL_QUARTERS).then_some(all / 4 * DIRTY_QUARTERS)
    }

    /// Takes one batch of dirty pages, as ranges of prompts to write: about `room` bytes, and
    /// at least one page. Marks the pages as clean; the caller [adds](Self::add) refused pages
    /// again.
    pub(super) fn take_batch(&self, room: u64) -> Vec<(PromptPages, Range<usize>)> {
        let Some(above) = self.above() else { return Vec::new() };
        let max_pages = self.dirty.pages_in(room).clamp(1, BATCH_PAGES as u64) as usize;
        let victims = self.tiers.table.evict(above.kind, max_pages);
        let mut batch: Vec<_> = victims
            .iter()
            .filter_map(|victim| self.dirty.take_prompt(&victim.pages, false))
            .collect();
        // Dirty pages that are no longer in the page table are written once the table chooses no
        // pages to evict.
        let forgotten = if victims.is_empty() { self.dirty.sample(max_pages) } else { Vec::new() };
        for page in forgotten {
            match self.dirty.take_prompt(&[page], true) {
                Some(prompt) => batch.push(prompt),
                None => self.dirty.mark_clean(page),
            }
        }
        batch
    }

    /// Evicts pages that were written to the lower tier, and their descendants, from the tier
    /// above, also if another process has leased them: a client does not know the leases of others.
    /// Evicts nothing if this process found or put the first page again, because a load of it is
    /// likely. Evicts nothing if the first page or a page after it is dirty, because the dirty page
    /// would be evicted too, before it is written.
    pub(super) fn evict_source(&self, pages: &PromptPages, range: Range<usize>) {
        let Some(above) = self.above().filter(|_| !range.is_empty()) else { return };
        let (table, first) = (&self.tiers.table, range.start..range.start + 1);
        let (used, _) = table.lock(above.kind, &pages.hashes, first.clone());
        if used > 0 {
            table.unlock(above.kind, &pages.hashes, first);
        }
        if used > 0 || self.dirty.contains(&pages.hashes[range.start]) {
            return;
        }
        if let Err(error) = above.store().delete(&pages.scope, &pages.refs(range)) {
            tracing::debug!(%error, "pages that were written back could not be evicted from the tier above");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cache, LookupOptions, Settings, TierSpec};
    use super::*;
    use ritornello_format::{Error, Scope};
    use ritornello_store::PutOptions;
    use ritornello_volume::page_memory::BorrowedPages;
    use ritornello_volume::transfer::Control;
    use std::time::Duration;

    #[test]
    fn written_pages_stay_if_reused() {
        let (dir, ttl) = (tempfile::tempdir().unwrap(), Duration::from_secs(60));
        let dir = dir.path().display();
        let list =
            [format!("host 16MiB {dir}/host"), format!("disk {dir}/disk 16MiB write=write_back")];
        let list = TierSpec::list(&list).unwrap();
        let cache = Cache::open(&list, &Settings::default(), |_| Err(Error::retry("no remote")));
        let cache = cache.unwrap();
        let scope = Arc::new(Scope::opaque("back", 10, true));
        let keys = (0..12).map(|at| vec![at; 16].into()).collect();
        let all = PromptPages::new(scope, keys, None).unwrap();
        let write_back = cache.lower.writers[0].write_back.as_ref().unwrap();
        let put = |first: usize, end: usize| {
            let keys = all.keys[..end].to_vec();
            let bytes = vec![&[7_u8; 10][..]; end - first];
            let source = BorrowedPages::new(&bytes);
            let (scope, options) = (Arc::clone(&all.scope), PutOptions::default());
            let put =
                cache.submit_put_copy(scope, keys, first, &source, options, Control::default());
            assert_eq!(put.unwrap().wait(Some(ttl)).unwrap().pages, end - first);
        };
        let take = |end: usize| {
            assert!(!write_back.tiers.table.evict(Tier::Host, end).is_empty());
            write_back.dirty.take_prompt(&all.hashes[..end], false).unwrap()
        };
        let local = || {
            let found =
                cache.lookup(&all.scope, &all.refs(0..all.len()), ttl, &LookupOptions::default());
            let found = found.unwrap();
            found.leases.iter().for_each(|lease| cache.release(*lease).unwrap());
            found.local
        };
        put(0, 10);
        let (pages, range) = take(10);
        put(10, 12);
        write_back.evict_source(&pages, range);
        assert_eq!(local(), 12, "pages before dirty pages must stay");
        put(0, 12);
        let (pages, range) = take(12);
        assert_eq!(local(), 12);
        write_back.evict_source(&pages, range);
        assert_eq!(local(), 12, "pages that a lookup found again must stay");
        put(0, 12);
        let (pages, range) = take(12);
        write_back.evict_source(&pages, range);
        assert_eq!(local(), 0);
    }
}
