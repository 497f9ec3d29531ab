//! Write-back: tracks dirty pages, which are not yet on a lower tier, and writes them to the lower
//! tier before their tier evicts them.
//!
//! The tier above is a shared store, whose own eviction does not know which pages are dirty. While
//! the store is nearly full, dirty pages may therefore use only a quarter of it: the least recently
//! used dirty pages are written to the lower tier and then evicted. The eviction must be explicit,
//! because the read for the write makes these pages the most recently used pages of the store.

use super::WritePolicy;
use super::local_tier::LocalTier;
use super::prompt::PromptPages;
use super::shared::Shared;
use super::write_queue::{PendingPut, WriteQueue};
use parking_lot::Mutex;
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, Scope};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

/// Used quarters of the tier above at which the tier counts as nearly full.
const FULL_QUARTERS: u64 = 3;
/// Quarters of a nearly full tier that may be dirty.
const DIRTY_QUARTERS: u64 = 1;
/// Pages per write-back batch.
const BATCH_PAGES: usize = 64;

/// Pages that this process put on the tier above and that are not on any lower tier.
#[derive(Debug, Default)]
pub(super) struct DirtyPages(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    pages: HashMap<PageHash, PageRecord>,
    dirty_bytes: u64,
}

/// A page and its parent; a prompt is reconstructed by following parents. A page stays recorded
/// while it is dirty or has recorded children.
#[derive(Debug)]
struct PageRecord {
    scope: Arc<Scope>,
    page_bytes: u64,
    key: Box<[u8]>,
    parent: Option<PageHash>,
    /// The key of the preceding page, for the first known page of a prompt whose beginning is
    /// unknown.
    parent_key: Option<Box<[u8]>>,
    dirty: bool,
    /// Number of recorded pages whose parent is this page.
    children: u32,
}

impl DirtyPages {
    fn add(&self, pages: &PromptPages, range: Range<usize>) {
        let mut state = self.0.lock();
        let known = |at: &usize| state.pages.contains_key(&pages.hashes[*at]);
        let from = (0..range.start).rev().find(known).map_or(0, |last| last + 1);
        for at in from..range.end {
            let page = pages.hashes[at];
            let parent = at.checked_sub(1).map(|parent| pages.hashes[parent]);
            if let Entry::Vacant(place) = state.pages.entry(page) {
                place.insert(PageRecord {
                    scope: Arc::clone(&pages.scope),
                    page_bytes: pages.page_bytes,
                    key: pages.keys[at].clone(),
                    parent,
                    parent_key: pages.parent.clone().filter(|_| at == 0),
                    dirty: false,
                    children: 0,
                });
                if let Some(parent) = parent.and_then(|parent| state.pages.get_mut(&parent)) {
                    parent.children += 1;
                }
            }
            if let Some(record) = state.pages.get_mut(&page)
                && at >= range.start
                && !std::mem::replace(&mut record.dirty, true)
            {
                state.dirty_bytes += pages.page_bytes;
            }
        }
    }

    /// Whether this page or a descendant of this page is dirty.
    fn contains(&self, page: &PageHash) -> bool {
        self.0.lock().pages.contains_key(page)
    }

    fn dirty_bytes(&self) -> u64 {
        self.0.lock().dirty_bytes
    }

    /// Up to `max_pages` dirty pages, in any order.
    fn sample(&self, max_pages: usize) -> Vec<PageHash> {
        let state = self.0.lock();
        let dirty = state.pages.iter().filter(|(_, record)| record.dirty);
        dirty.map(|(page, _)| *page).take(max_pages).collect()
    }

    /// Takes the prompt that ends with the last recorded page of `victim`. Returns the prompt, and
    /// the range of pages to write, which starts at the first dirty page: of the pages of `victim`,
    /// or with `whole` of the entire prompt. Pages in the range are marked clean.
    fn take_prompt(&self, victim: &[PageHash], whole: bool) -> Option<(PromptPages, Range<usize>)> {
        let mut state = self.0.lock();
        // Pages of other processes, which are not recorded, may follow the pages of this process.
        let count = victim.iter().rposition(|page| state.pages.contains_key(page))? + 1;
        let (mut prompt, mut keys, mut parent_key) = (Vec::new(), Vec::new(), None);
        let mut next = Some(victim[count - 1]);
        // The whole chain is read before any mark changes: a prompt that cannot be reconstructed
        // stays dirty.
        while let Some(page) = next {
            let record = state.pages.get(&page)?;
            prompt.push(page);
            keys.push(record.key.clone());
            (next, parent_key) = (record.parent, record.parent_key.clone());
        }
        prompt.reverse();
        keys.reverse();
        let is_dirty = |page: &PageHash| state.pages.get(page).is_some_and(|record| record.dirty);
        let end = prompt.len();
        let from = if whole { 0 } else { end.saturating_sub(count) };
        let range = from + prompt[from..].iter().position(is_dirty)?..end;
        let scope = Arc::clone(&state.pages.get(&prompt[end - 1])?.scope);
        let pages = PromptPages::new(scope, keys, parent_key).ok()?;
        for page in &prompt[range.clone()] {
            state.mark_clean(page);
        }
        Some((pages, range))
    }

    /// Marks a page that will not be written as clean.
    fn mark_clean(&self, page: PageHash) {
        self.0.lock().mark_clean(&page);
    }
}

impl State {
    fn mark_clean(&mut self, page: &PageHash) {
        if let Some(record) = self.pages.get_mut(page)
            && std::mem::take(&mut record.dirty)
        {
            self.dirty_bytes -= record.page_bytes;
        }
        let mut next = Some(*page);
        while let Some(page) = next
            && self.pages.get(&page).is_some_and(|record| !record.dirty && record.children == 0)
        {
            next = self.pages.remove(&page).and_then(|record| record.parent);
            if let Some(parent) = next.and_then(|parent| self.pages.get_mut(&parent)) {
                parent.children -= 1;
            }
        }
    }
}

impl Shared {
    /// Records pages that arrived on a tier as dirty, if the tier below is a write-back tier.
    pub(super) fn record_arrival(
        self: &Arc<Self>,
        tier: Tier,
        pages: &PromptPages,
        range: Range<usize>,
    ) {
        let above = self.tiers().position(|other| other == tier);
        let below =
            above.and_then(|at| self.tiers().nth(at + 1)).and_then(|to| self.write_queue(to));
        let late =
            |queue: &&WriteQueue| queue.policy == WritePolicy::WriteBack && queue.accepts(pages);
        let Some(queue) = below.filter(late).filter(|_| !range.is_empty()) else { return };
        queue.dirty.add(pages, range.clone());
        self.mark_present(tier, pages, range);
        self.watch_fill(queue);
    }

    /// Writes dirty pages to the lower tier while the tier above is nearly full and too many of its
    /// pages are dirty.
    pub(super) fn write_back_if_full(self: &Arc<Self>, queue: &WriteQueue) {
        let dirty = queue.dirty.dirty_bytes();
        let Some(above) = self.tier_above(queue.to).filter(|_| dirty > 0) else { return };
        let Ok(stats) = above.store().stats() else { return };
        let (used, all) =
            (stats.catalog.used_bytes, stats.catalog.segments_max * stats.catalog.segment_bytes);
        let nearly_full = used >= all / 4 * FULL_QUARTERS;
        let too_dirty = || queue.dirty.dirty_bytes() > all / 4 * DIRTY_QUARTERS;
        while nearly_full && too_dirty() && queue.has_room() && self.write_back_batch(queue, true) {
        }
    }

    /// Evicts pages that were written to the lower tier, and their descendants, from the tier
    /// above. The pages stay if further pages of the prompt were put since, because the further
    /// pages are on no other tier, or if the pages were found or put again, because a load will
    /// follow.
    pub(super) fn evict_source(
        &self,
        queue: &WriteQueue,
        pages: &PromptPages,
        range: Range<usize>,
    ) {
        let Some(above) = self.tier_above(queue.to).filter(|_| !range.is_empty()) else { return };
        let first = range.start..range.start + 1;
        let (used, _) = self.table.lock(above.kind, &pages.hashes, first.clone());
        if used > 0 {
            self.table.unlock(above.kind, &pages.hashes, first);
        }
        if used > 0 || queue.dirty.contains(&pages.hashes[range.start]) {
            return;
        }
        if let Err(error) = above.store().delete(&pages.scope, &pages.refs(range)) {
            tracing::debug!(%error, "pages that were written back could not be evicted from the tier above");
        }
    }

    fn tier_above(&self, below: Tier) -> Option<&LocalTier> {
        self.local_tiers.iter().rev().find(|tier| tier.kind < below)
    }

    /// Queues writes of one batch of dirty pages; with `evict_source` the tier above then evicts
    /// them. Returns whether dirty pages remain.
    pub(super) fn write_back_batch(
        self: &Arc<Self>,
        queue: &WriteQueue,
        evict_source: bool,
    ) -> bool {
        let Some(above) = self.tier_above(queue.to) else { return false };
        let victims = self.table.evict(above.kind, BATCH_PAGES);
        for victim in &victims {
            if let Some((pages, range)) = queue.dirty.take_prompt(&victim.pages, false) {
                self.queue_write_back(queue, &pages, range, evict_source);
            }
        }
        // Dirty pages that are no longer in the page table are not in any victim.
        let forgotten =
            if victims.is_empty() { queue.dirty.sample(BATCH_PAGES) } else { Vec::new() };
        for page in forgotten {
            match queue.dirty.take_prompt(&[page], true) {
                Some((pages, range)) => self.queue_write_back(queue, &pages, range, evict_source),
                None => queue.dirty.mark_clean(page),
            }
        }
        queue.dirty.dirty_bytes() > 0
    }

    fn queue_write_back(
        self: &Arc<Self>,
        queue: &WriteQueue,
        pages: &PromptPages,
        range: Range<usize>,
        evict_source: bool,
    ) {
        self.table.forget(queue.to, &pages.hashes, range.clone());
        self.queue_write_with(queue, pages, range, PendingPut::default(), evict_source);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cache, LookupOptions, Settings, TierSpec};
    use super::*;
    use ritornello_format::Error;
    use ritornello_store::PutOptions;
    use ritornello_volume::page_memory::BorrowedPages;
    use ritornello_volume::transfer::Control;
    use std::time::Duration;

    fn prompt(pages: u8) -> PromptPages {
        let scope = Arc::new(Scope::opaque("back", 10, true));
        PromptPages::new(scope, (0..pages).map(|at| vec![at; 16].into()).collect(), None).unwrap()
    }

    #[test]
    fn pages_of_other_processes_change_no_mark() {
        let (dirty, all) = (DirtyPages::default(), prompt(9));
        let ours = PromptPages::new(Arc::clone(&all.scope), all.keys[..5].to_vec(), None).unwrap();
        dirty.add(&ours, 1..5);
        assert!(dirty.take_prompt(&all.hashes[5..], false).is_none());
        assert_eq!(dirty.dirty_bytes(), 40);
        let (pages, range) = dirty.take_prompt(&all.hashes[3..], false).unwrap();
        assert_eq!((pages.len(), range), (5, 3..5));
        assert_eq!(dirty.dirty_bytes(), 20);
        let (pages, range) = dirty.take_prompt(&dirty.sample(1), true).unwrap();
        assert_eq!((range.start, range.end), (1, pages.len()));
    }

    #[test]
    fn only_dirty_pages_and_ancestors_are_recorded() {
        let (dirty, mut random) = (DirtyPages::default(), 1_u64);
        let mut below = |max_pages: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % max_pages
        };
        // Prompts that fork from prompt 0 at some page, in chained and unchained scopes.
        let mut prompt = |chained: bool| {
            let (number, fork) = (below(4), below(30));
            let own = |at: usize| if at < fork { [0; 2] } else { [number as u8, fork as u8] };
            let key = |at: usize| [own(at).repeat(4), vec![at as u8; 8]].concat().into();
            let scope = Arc::new(Scope::opaque("back", 10, chained));
            let all = PromptPages::new(scope, (0..40).map(key).collect(), None).unwrap();
            (all, below(40), 1 + below(8), below(4))
        };
        for step in 0..3_000 {
            let (all, from, count, what) = prompt(step % 5 > 0);
            let range = from..40.min(from + count);
            match what {
                0 | 1 => dirty.add(&all, range),
                2 => drop(dirty.take_prompt(&all.hashes[range], step % 2 == 0)),
                _ => dirty.sample(count).into_iter().for_each(|page| dirty.mark_clean(page)),
            }
            let state = dirty.0.lock();
            let dirty = state.pages.values().filter(|record| record.dirty).count();
            assert_eq!(state.dirty_bytes, 10 * dirty as u64);
            let mut children = HashMap::<PageHash, u32>::new();
            for parent in state.pages.values().filter_map(|record| record.parent) {
                *children.entry(parent).or_default() += 1;
            }
            assert!(children.keys().all(|page| state.pages.contains_key(page)));
            for (page, record) in &state.pages {
                assert_eq!(record.children, children.get(page).copied().unwrap_or(0));
                assert!(record.dirty || record.children > 0);
            }
        }
        dirty.sample(usize::MAX).into_iter().for_each(|page| dirty.mark_clean(page));
        assert!(dirty.0.lock().pages.is_empty());
    }

    #[test]
    fn written_pages_stay_if_reused() {
        let (dir, ttl) = (tempfile::tempdir().unwrap(), Duration::from_secs(60));
        let dir = dir.path().display();
        let list =
            [format!("host 16MiB {dir}/host"), format!("disk {dir}/disk 16MiB write=write_back")];
        let list = TierSpec::list(&list).unwrap();
        let cache = Cache::open(&list, &Settings::default(), |_| Err(Error::retry("no remote")));
        let cache = cache.unwrap();
        let (shared, all) = (&cache.shared, prompt(12));
        let queue = shared.write_queue(Tier::Disk).unwrap();
        let put = |first: usize, end: usize| {
            let keys = all.keys[..end].to_vec();
            let bytes = vec![&[7_u8; 10][..]; end - first];
            let source = BorrowedPages::new(&bytes);
            let (scope, options) = (Arc::clone(&all.scope), PutOptions::default());
            let put = cache.submit_put(scope, keys, first, &source, options, Control::default());
            assert_eq!(put.unwrap().wait(Some(ttl)).unwrap().pages, end - first);
        };
        let take = |end: usize| {
            assert!(!shared.table.evict(Tier::Host, end).is_empty());
            queue.dirty.take_prompt(&all.hashes[..end], false).unwrap()
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
        shared.evict_source(queue, &pages, range);
        assert_eq!(local(), 12, "further pages were put");
        put(0, 12);
        let (pages, range) = take(12);
        assert_eq!(local(), 12);
        shared.evict_source(queue, &pages, range);
        assert_eq!(local(), 12, "the pages were found again");
        put(0, 12);
        let (pages, range) = take(12);
        shared.evict_source(queue, &pages, range);
        assert_eq!(local(), 0);
    }

    #[test]
    fn incomplete_prompt_stays_dirty() {
        let (dirty, all) = (DirtyPages::default(), prompt(6));
        dirty.add(&all, 0..6);
        dirty.0.lock().pages.remove(&all.hashes[2]);
        assert!(dirty.take_prompt(&all.hashes[..], false).is_none());
        assert_eq!(dirty.dirty_bytes(), 60);
        dirty.mark_clean(all.hashes[5]);
        assert_eq!(dirty.dirty_bytes(), 50);
    }
}
