//! Writing back: which pages of a tier are nowhere below it, and which of them go down before the
//! tier lets them go.
//!
//! The tier is a store, shared, and lets go of what it likes when it is full. So while it is nearly full,
//! no more than a part of it may be nowhere else: what was used longest ago is written down, and leaves.
//! (Were it left there, having been read would make it the last to go.)

use super::WritePolicy;
use super::prompt::Pages;
use super::shared::Shared;
use super::shelf::Shelf;
use super::writer::{After, Link};
use parking_lot::Mutex;
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, Scope};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The tier above is nearly full at so many quarters,
const FULL_QUARTERS: u64 = 3;
/// and then at most so many quarters of it may be nowhere below it.
const DIRTY_QUARTERS: u64 = 1;
/// Pages that are written down at once.
const BATCH: usize = 64;

/// Pages that are nowhere below the tier above, as far as this process put them there.
#[derive(Debug, Default)]
pub(super) struct Back(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    pages: HashMap<PageHash, Line>,
    dirty_bytes: u64,
}

/// A page, and the one before it: prompts are put together from these.
#[derive(Debug)]
struct Line {
    scope: Arc<Scope>,
    page_bytes: u64,
    key: Box<[u8]>,
    before: Option<PageHash>,
    /// The key before a first page that is not a prompt's.
    parent: Option<Box<[u8]>>,
    dirty: bool,
}

impl Back {
    fn add(&self, pages: &Pages, range: Range<usize>) {
        let mut lines = self.0.lock();
        for at in 0..range.end {
            let line = lines.pages.entry(pages.hashes[at]).or_insert_with(|| Line {
                scope: Arc::clone(&pages.scope),
                page_bytes: pages.page_bytes,
                key: pages.keys[at].clone(),
                before: at.checked_sub(1).map(|before| pages.hashes[before]),
                parent: pages.parent.clone().filter(|_| at == 0),
                dirty: false,
            });
            if range.contains(&at) && !line.dirty {
                line.dirty = true;
                lines.dirty_bytes += pages.page_bytes;
            }
        }
    }

    fn dirty_bytes(&self) -> u64 {
        self.0.lock().dirty_bytes
    }

    /// Some dirty pages, whichever.
    fn some(&self, most: usize) -> Vec<PageHash> {
        let lines = self.0.lock();
        let dirty = lines.pages.iter().filter(|(_, line)| line.dirty);
        dirty.map(|(page, _)| *page).take(most).collect()
    }

    /// The prompt that ends with the last of these pages that is known here, and which of them (with
    /// `whole`, of all its pages) are dirty, from the first on. They are taken to be clean from now on.
    fn take(&self, victim: &[PageHash], whole: bool) -> Option<(Pages, Range<usize>)> {
        let mut lines = self.0.lock();
        // Behind pages of this process may be those of another.
        let count = victim.iter().rposition(|page| lines.pages.contains_key(page))? + 1;
        let (mut prompt, mut keys, mut parent) = (Vec::new(), Vec::new(), None);
        let mut next = Some(victim[count - 1]);
        // All of it before any mark is touched: what cannot be put together stays dirty.
        while let Some(page) = next {
            let line = lines.pages.get(&page)?;
            prompt.push(page);
            keys.push(line.key.clone());
            (next, parent) = (line.before, line.parent.clone());
        }
        prompt.reverse();
        keys.reverse();
        let is_dirty = |page: &PageHash| lines.pages.get(page).is_some_and(|line| line.dirty);
        let end = prompt.len();
        let from = if whole { 0 } else { end.saturating_sub(count) };
        let range = from + prompt[from..].iter().position(is_dirty)?..end;
        let scope = Arc::clone(&lines.pages.get(&prompt[end - 1])?.scope);
        let pages = Pages::new(scope, keys, parent).ok()?;
        for page in &prompt[range.clone()] {
            lines.clean(page);
        }
        Some((pages, range))
    }

    /// Gives up a page.
    fn forget(&self, page: PageHash) {
        self.0.lock().clean(&page);
    }
}

impl Lines {
    fn clean(&mut self, page: &PageHash) {
        if let Some(line) = self.pages.get_mut(page)
            && std::mem::take(&mut line.dirty)
        {
            self.dirty_bytes -= line.page_bytes;
        }
        // Dirty pages are the only reason to know any.
        if self.dirty_bytes == 0 {
            self.pages.clear();
        }
    }
}

impl Shared {
    /// Notes that pages came to a tier, for the tier below if that is written to late.
    pub(super) fn arrived(self: &Arc<Self>, tier: Tier, pages: &Pages, range: Range<usize>) {
        let above = self.tiers().position(|other| other == tier);
        let below = above.and_then(|at| self.tiers().nth(at + 1)).and_then(|to| self.link(to));
        let late = |link: &&Link| link.policy == WritePolicy::Back && link.takes(pages);
        let Some(link) = below.filter(late).filter(|_| !range.is_empty()) else { return };
        link.back.add(pages, range.clone());
        self.note(tier, pages, range);
        self.watch(link);
    }

    /// Has the pages written down that the tier above is about to let go.
    pub(super) fn clean(self: &Arc<Self>, link: &Link) {
        let dirty = link.back.dirty_bytes();
        let Some(above) = self.above(link.to).filter(|_| dirty > 0) else { return };
        let Ok(stats) = above.store().stats() else { return };
        let (used, all) =
            (stats.catalog.used_bytes, stats.catalog.segments_max * stats.catalog.segment_bytes);
        let nearly_full = used >= all / 4 * FULL_QUARTERS;
        let too_dirty = || link.back.dirty_bytes() > all / 4 * DIRTY_QUARTERS;
        while nearly_full && too_dirty() && link.has_room() && self.write_back(link, true) {}
    }

    /// Takes pages from the tier above `below`, where they are now; what is behind them goes as well.
    pub(super) fn leave(&self, below: Tier, pages: &Pages, range: Range<usize>) {
        let Some(above) = self.above(below).filter(|_| !range.is_empty()) else { return };
        if let Err(error) = above.store().delete(&pages.scope, &pages.refs(range)) {
            tracing::debug!(%error, "pages that were written back stay where they are");
        }
    }

    fn above(&self, below: Tier) -> Option<&Shelf> {
        self.shelves.iter().rev().find(|shelf| shelf.tier < below)
    }

    /// Has some pages written down that are nowhere below the tier above; with `leave` that lets them
    /// go then. Returns whether there are more.
    pub(super) fn write_back(self: &Arc<Self>, link: &Link, leave: bool) -> bool {
        let Some(above) = self.above(link.to) else { return false };
        let victims = self.table.evict(above.tier, BATCH);
        for victim in &victims {
            if let Some((pages, range)) = link.back.take(&victim.pages, false) {
                self.take_back(link, &pages, range, leave);
            }
        }
        // Those that the table has forgotten, so that nothing names them.
        let forgotten = if victims.is_empty() { link.back.some(BATCH) } else { Vec::new() };
        for page in forgotten {
            match link.back.take(&[page], true) {
                Some((pages, range)) => self.take_back(link, &pages, range, leave),
                None => link.back.forget(page),
            }
        }
        link.back.dirty_bytes() > 0
    }

    fn take_back(self: &Arc<Self>, link: &Link, pages: &Pages, range: Range<usize>, leave: bool) {
        self.table.forget(link.to, &pages.hashes, range.clone());
        self.take_down(link, pages, range, After::default(), leave);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(pages: u8) -> Pages {
        let scope = Arc::new(Scope::opaque("back", 10, true));
        Pages::new(scope, (0..pages).map(|at| vec![at; 16].into()).collect(), None).unwrap()
    }

    #[test]
    fn pages_of_others_behind_ours_cost_no_mark() {
        let (back, all) = (Back::default(), prompt(9));
        let ours = Pages::new(Arc::clone(&all.scope), all.keys[..5].to_vec(), None).unwrap();
        back.add(&ours, 1..5);
        assert!(back.take(&all.hashes[5..], false).is_none());
        assert_eq!(back.dirty_bytes(), 40);
        let (pages, range) = back.take(&all.hashes[3..], false).unwrap();
        assert_eq!((pages.len(), range), (5, 3..5));
        assert_eq!(back.dirty_bytes(), 20);
        let (pages, range) = back.take(&back.some(1), true).unwrap();
        assert_eq!((range.start, range.end), (1, pages.len()));
    }

    #[test]
    fn a_prompt_that_cannot_be_put_together_keeps_its_marks() {
        let (back, all) = (Back::default(), prompt(6));
        back.add(&all, 0..6);
        back.0.lock().pages.remove(&all.hashes[2]);
        assert!(back.take(&all.hashes[..], false).is_none());
        assert_eq!(back.dirty_bytes(), 60);
        back.forget(all.hashes[5]);
        assert_eq!(back.dirty_bytes(), 50);
    }
}
