//! The dirty pages of a write-back tier: pages on the tier above that are still to be written to
//! the write-back tier.

use super::prompt::PromptPages;
use parking_lot::Mutex;
use ritornello_format::{PageHash, Scope};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

/// Pages that this process stored on the tier above, and whose write to the write-back tier has not
/// been queued.
#[derive(Debug, Default)]
pub(super) struct DirtyPages(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    pages: HashMap<PageHash, PageRecord>,
    dirty_pages: u64,
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
    /// The key of the preceding page, for the first page of a put that did not name the earlier
    /// pages of its prompt.
    parent_key: Option<Box<[u8]>>,
    dirty: bool,
    children: u32,
}

impl DirtyPages {
    /// Marks pages `range` dirty. Records the earlier pages back to the nearest recorded page as
    /// clean, so that the prompt can be reconstructed.
    pub(super) fn add(&self, pages: &PromptPages, range: Range<usize>) {
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
                state.dirty_pages += 1;
                state.dirty_bytes += pages.page_bytes;
            }
        }
    }

    /// Returns whether the page or a descendant of it is dirty.
    pub(super) fn contains(&self, page: &PageHash) -> bool {
        self.0.lock().pages.contains_key(page)
    }

    pub(super) fn dirty_bytes(&self) -> u64 {
        self.0.lock().dirty_bytes
    }

    /// Returns how many dirty pages of mean length have `bytes`.
    pub(super) fn pages_in(&self, bytes: u64) -> u64 {
        let state = self.0.lock();
        let mean = state.dirty_bytes.checked_div(state.dirty_pages).unwrap_or(0);
        bytes.checked_div(mean).unwrap_or(0)
    }

    /// Returns up to `max_pages` dirty pages, in any order.
    pub(super) fn sample(&self, max_pages: usize) -> Vec<PageHash> {
        let state = self.0.lock();
        let dirty = state.pages.iter().filter(|(_, record)| record.dirty);
        dirty.map(|(page, _)| *page).take(max_pages).collect()
    }

    /// Takes dirty pages of one prompt, which the caller then writes. `victim` holds consecutive
    /// pages of the prompt: pages that the page table chose to evict, or one sampled dirty page.
    /// Returns the prompt up to the last recorded page of `victim`, and the range of pages to
    /// write. The range starts at the first dirty page of `victim`, or with `whole` at the first
    /// dirty page of the prompt, and ends with the returned prompt. Returns `None` if there is no
    /// such dirty page, or the prompt cannot be reconstructed. Pages in the range are marked clean.
    pub(super) fn take_prompt(
        &self,
        victim: &[PageHash],
        whole: bool,
    ) -> Option<(PromptPages, Range<usize>)> {
        let mut state = self.0.lock();
        // In `victim`, pages of other processes, which are not recorded here, may follow the pages
        // of this process.
        let count = victim.iter().rposition(|page| state.pages.contains_key(page))? + 1;
        let (mut prompt, mut keys, mut parent_key) = (Vec::new(), Vec::new(), None);
        let mut next = Some(victim[count - 1]);
        // The whole prompt is read before any page is marked clean: a prompt that cannot be
        // reconstructed stays dirty.
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

    /// Marks a page clean without a write: the page will never be written to the write-back tier.
    pub(super) fn mark_clean(&self, page: PageHash) {
        self.0.lock().mark_clean(&page);
    }
}

impl State {
    fn mark_clean(&mut self, page: &PageHash) {
        if let Some(record) = self.pages.get_mut(page)
            && std::mem::take(&mut record.dirty)
        {
            self.dirty_pages -= 1;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(pages: u8) -> PromptPages {
        let scope = Arc::new(Scope::opaque("back", 10, true));
        PromptPages::new(scope, (0..pages).map(|at| vec![at; 16].into()).collect(), None).unwrap()
    }

    #[test]
    fn victim_pages_of_other_processes_are_ignored() {
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
        // Make prompts with a common beginning of random length, in chained and in unchained
        // scopes.
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
            assert_eq!((state.dirty_pages, state.dirty_bytes), (dirty as u64, 10 * dirty as u64));
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
