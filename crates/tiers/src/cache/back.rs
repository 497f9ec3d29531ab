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
use std::collections::hash_map::Entry;
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

/// A page, and the one before it, which is known as well: prompts are put together from these. It is
/// known for as long as it is dirty or something behind it is known.
#[derive(Debug)]
struct Line {
    scope: Arc<Scope>,
    page_bytes: u64,
    key: Box<[u8]>,
    before: Option<PageHash>,
    /// The key before a first page that is not a prompt's.
    parent: Option<Box<[u8]>>,
    dirty: bool,
    /// Pages that name this one as the one before.
    behind: u32,
}

impl Back {
    fn add(&self, pages: &Pages, range: Range<usize>) {
        let mut lines = self.0.lock();
        let known = |at: &usize| lines.pages.contains_key(&pages.hashes[*at]);
        let from = (0..range.start).rev().find(known).map_or(0, |last| last + 1);
        for at in from..range.end {
            let page = pages.hashes[at];
            let before = at.checked_sub(1).map(|before| pages.hashes[before]);
            if let Entry::Vacant(place) = lines.pages.entry(page) {
                place.insert(Line {
                    scope: Arc::clone(&pages.scope),
                    page_bytes: pages.page_bytes,
                    key: pages.keys[at].clone(),
                    before,
                    parent: pages.parent.clone().filter(|_| at == 0),
                    dirty: false,
                    behind: 0,
                });
                if let Some(before) = before.and_then(|before| lines.pages.get_mut(&before)) {
                    before.behind += 1;
                }
            }
            if let Some(line) = lines.pages.get_mut(&page)
                && at >= range.start
                && !std::mem::replace(&mut line.dirty, true)
            {
                lines.dirty_bytes += pages.page_bytes;
            }
        }
    }

    /// Whether this page or one behind it is dirty.
    fn knows(&self, page: &PageHash) -> bool {
        self.0.lock().pages.contains_key(page)
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
        let mut next = Some(*page);
        while let Some(page) = next
            && self.pages.get(&page).is_some_and(|line| !line.dirty && line.behind == 0)
        {
            next = self.pages.remove(&page).and_then(|line| line.before);
            if let Some(before) = next.and_then(|before| self.pages.get_mut(&before)) {
                before.behind -= 1;
            }
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

    /// Takes pages from the tier above the link's, where they are now; what is behind them goes as well.
    /// They stay if that has become more since they were taken, or somebody found or put them again:
    /// what was put behind them is nowhere else, and what was found is about to be loaded.
    pub(super) fn leave(&self, link: &Link, pages: &Pages, range: Range<usize>) {
        let Some(above) = self.above(link.to).filter(|_| !range.is_empty()) else { return };
        let first = range.start..range.start + 1;
        let (used, _) = self.table.lock(above.tier, &pages.hashes, first.clone());
        if used > 0 {
            self.table.unlock(above.tier, &pages.hashes, first);
        }
        if used > 0 || link.back.knows(&pages.hashes[range.start]) {
            return;
        }
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
    use super::super::{Cache, Settings, TierSpec, Wish};
    use super::*;
    use ritornello_format::Error;
    use ritornello_store::PutOptions;
    use ritornello_volume::memory::BorrowedPages;
    use ritornello_volume::transfer::Control;
    use std::time::Duration;

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
    fn only_what_is_dirty_and_what_is_before_it_is_known() {
        let (back, mut random) = (Back::default(), 1_u64);
        let mut below = |most: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % most
        };
        // Prompts that leave prompt 0 somewhere, in a scope whose keys chain and in one where they do not.
        let mut prompt = |chained: bool| {
            let (number, fork) = (below(4), below(30));
            let own = |at: usize| if at < fork { [0; 2] } else { [number as u8, fork as u8] };
            let key = |at: usize| [own(at).repeat(4), vec![at as u8; 8]].concat().into();
            let scope = Arc::new(Scope::opaque("back", 10, chained));
            let all = Pages::new(scope, (0..40).map(key).collect(), None).unwrap();
            (all, below(40), 1 + below(8), below(4))
        };
        for step in 0..3_000 {
            let (all, from, count, what) = prompt(step % 5 > 0);
            let range = from..40.min(from + count);
            match what {
                0 | 1 => back.add(&all, range),
                2 => drop(back.take(&all.hashes[range], step % 2 == 0)),
                _ => back.some(count).into_iter().for_each(|page| back.forget(page)),
            }
            let lines = back.0.lock();
            let dirty = lines.pages.values().filter(|line| line.dirty).count();
            assert_eq!(lines.dirty_bytes, 10 * dirty as u64);
            let mut behind = HashMap::<PageHash, u32>::new();
            for before in lines.pages.values().filter_map(|line| line.before) {
                *behind.entry(before).or_default() += 1;
            }
            assert!(behind.keys().all(|page| lines.pages.contains_key(page)));
            for (page, line) in &lines.pages {
                assert_eq!(line.behind, behind.get(page).copied().unwrap_or(0));
                assert!(line.dirty || line.behind > 0);
            }
        }
        back.some(usize::MAX).into_iter().for_each(|page| back.forget(page));
        assert!(back.0.lock().pages.is_empty());
    }

    #[test]
    fn pages_stay_that_were_put_or_found_again_since_they_were_taken() {
        let (dir, ttl) = (tempfile::tempdir().unwrap(), Duration::from_secs(60));
        let dir = dir.path().display();
        let list =
            [format!("host 16MiB {dir}/host"), format!("disk {dir}/disk 16MiB write=write_back")];
        let list = TierSpec::list(&list).unwrap();
        let cache =
            Cache::open(&list, &Settings::default(), |_| Err(Error::retry("there is none")));
        let cache = cache.unwrap();
        let (shared, all) = (&cache.shared, prompt(12));
        let link = shared.link(Tier::Disk).unwrap();
        let put = |first: usize, end: usize| {
            let keys = all.keys[..end].to_vec();
            let bytes = vec![&[7_u8; 10][..]; end - first];
            let source = BorrowedPages::new(&bytes);
            let (scope, terms) = (Arc::clone(&all.scope), PutOptions::default());
            let put = cache.submit_put(scope, keys, first, &source, terms, Control::default());
            assert_eq!(put.unwrap().wait(Some(ttl)).unwrap().pages, end - first);
        };
        let take = |end: usize| {
            assert!(!shared.table.evict(Tier::Host, end).is_empty());
            link.back.take(&all.hashes[..end], false).unwrap()
        };
        let local = || {
            let found = cache.find(&all.scope, &all.refs(0..all.len()), ttl, &Wish::default());
            let found = found.unwrap();
            found.leases.iter().for_each(|lease| cache.release(*lease).unwrap());
            found.local
        };
        put(0, 10);
        let (pages, range) = take(10);
        put(10, 12);
        shared.leave(link, &pages, range);
        assert_eq!(local(), 12, "more was put behind them");
        put(0, 12);
        let (pages, range) = take(12);
        assert_eq!(local(), 12);
        shared.leave(link, &pages, range);
        assert_eq!(local(), 12, "they were found");
        put(0, 12);
        let (pages, range) = take(12);
        shared.leave(link, &pages, range);
        assert_eq!(local(), 0);
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
