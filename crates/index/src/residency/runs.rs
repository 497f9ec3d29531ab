//! The pages of the `run` backend, in memory: runs, their sets of holders, and the lookup of
//! hashes.
//!
//! A run holds pages of one chain, in the order of the chain, so that a long prefix takes few
//! steps. A run may have gaps: a page without holders leaves a hole, and holes are removed once
//! they are more than half of a run of at least 16 pages. A hash commits to all pages before it. If
//! two pages of a run match two pages of a chain that are equally far apart, the pages between them
//! therefore match as well, except for holes. The page of a hole may be in another run.
//!
//! **Clears** change no pages at first. A cleared scope loses its number, under which its pages are
//! found, and gets another number with its next put. A cleared worker is removed from the sets.
//! [`Runs::reclaim`] removes the pages later, a few runs at a time.

use super::prefix::Prefixes;
use super::sets::{EMPTY, SetId, Sets};
use super::spans::Spans;
use super::{Holder, Tiers, Worker};
use crate::run::slots::{NUMBER_MAX, Number, Slots};
use ritornello_format::{PageHash, PageHashes, ScopeSlot};
use std::collections::HashMap;
use std::ops::Range;

/// Maximum pages of a run, holes included.
const RUN_PAGES: usize = 512;
/// Runs with fewer pages keep their holes.
const COMPACT_FROM: usize = 16;
/// Number of steps after which a probe releases the lock, once it reaches the end of a run. A step
/// covers consecutive pages of a run with the same set of holders.
pub(super) const LOCK_BATCH: usize = 512;

#[derive(Debug)]
pub(super) struct Runs {
    slots: Slots,
    /// Runs by number. Number zero stands for no run.
    runs: Vec<Run>,
    free: Vec<Number>,
    sets: Sets,
    scopes: HashMap<ScopeSlot, ScopeNumber>,
    /// The scopes by number, each with its number of pages.
    alive: HashMap<ScopeNumber, (ScopeSlot, u64)>,
    next_scope: ScopeNumber,
    pages: u64,
    /// Number of pages of cleared scopes that [`Runs::reclaim`] has not removed yet.
    orphans: u64,
    /// Bytes that the hashes and spans of all runs take on the heap.
    heap: usize,
    /// The run at which [`Runs::reclaim`] continues.
    cursor: Number,
}

/// The number of a scope, until the scope is empty or cleared. Never reused.
type ScopeNumber = u64;

#[derive(Debug, Default)]
struct Run {
    scope: ScopeNumber,
    /// Number of pages that are not holes; zero in an entry of [`Runs`] that holds no run.
    live: u16,
    spans: Spans,
    /// The hashes; [`PageHash::NONE`] for holes. The last page is not a hole.
    hashes: Vec<PageHash>,
}

impl Run {
    fn heap(&self) -> usize {
        self.hashes.capacity() * size_of::<PageHash>() + self.spans.capacity() * Spans::BYTES
    }

    #[inline]
    fn is(&self, page: usize, hash: PageHash) -> bool {
        hash != PageHash::NONE && self.hashes.get(page) == Some(&hash)
    }

    fn length(&self) -> u16 {
        self.hashes.len() as u16
    }
}

impl Runs {
    pub(super) fn new() -> Self {
        Self {
            slots: Slots::new(),
            runs: vec![Run::default()],
            free: Vec::new(),
            sets: Sets::new(),
            scopes: HashMap::new(),
            alive: HashMap::new(),
            next_scope: 1,
            pages: 0,
            orphans: 0,
            heap: 0,
            cursor: 1,
        }
    }

    /// Number of pages, including cleared pages that [`Runs::reclaim`] will remove.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) fn sets(&self) -> u64 {
        self.sets.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        let runs = self.runs.capacity() * size_of::<Run>() + self.heap;
        let scopes = self.scopes.capacity() * size_of::<[u64; 5]>();
        let free = self.free.capacity() * size_of::<Number>();
        (self.slots.bytes() + runs + free + self.sets.bytes() + scopes) as u64
    }

    #[inline]
    fn find(&self, scope: ScopeNumber, hash: PageHash) -> Option<(Number, u16)> {
        self.slots.candidates(hash).find(|(run, page)| {
            let run = &self.runs[*run as usize];
            run.scope == scope && run.is((*page).into(), hash)
        })
    }

    pub(super) fn holders(&self, scope: ScopeSlot, page: PageHash) -> &[Holder] {
        let found = self.scopes.get(&scope).and_then(|scope| self.find(*scope, page));
        let set = found.map_or(EMPTY, |(run, page)| self.runs[run as usize].spans.at(page).0);
        self.sets.holders(set)
    }

    /// Advances along `keys` from `*at`, run by run, until [`LOCK_BATCH`] steps are done. Returns
    /// `false` when the lookup is complete.
    pub(super) fn prefixes(
        &self,
        scope: ScopeSlot,
        keys: &(impl PageHashes + ?Sized),
        at: &mut usize,
        prefixes: &mut Prefixes,
    ) -> bool {
        let Some(&scope) = self.scopes.get(&scope) else { return false };
        // During this call equal names of sets mean equal sets, because names are reused only under
        // the write lock.
        let mut last = EMPTY;
        let mut steps = 0;
        while steps < LOCK_BATCH {
            if *at >= keys.len() {
                return false;
            }
            let Some((run, page)) = self.find(scope, keys.at(*at)) else { return false };
            let run = &self.runs[run as usize];
            let end = page + self.common(run, page, keys, *at);
            let mut page = page;
            while page < end {
                let (set, next) = run.spans.at(page);
                if set == EMPTY {
                    // This page was removed from the run: another run may have it.
                    break;
                }
                let count = next.min(end) - page;
                let left = if set == last {
                    prefixes.extend_same(count.into())
                } else {
                    prefixes.extend(self.sets.holders(set), count.into())
                };
                if !left {
                    return false;
                }
                (last, steps, page) = (set, steps + 1, page + count);
                *at += usize::from(count);
            }
        }
        true
    }

    /// Length of the part of a run, from page `page`, that matches the keys from `at` on, except at
    /// holes. The part may end before a hole although later pages match.
    #[inline]
    fn common(&self, run: &Run, page: u16, keys: &(impl PageHashes + ?Sized), at: usize) -> u16 {
        let page = usize::from(page);
        let span = (run.hashes.len() - page).min(keys.len() - at);
        let agrees = |next: usize| run.is(page + next, keys.at(at + next));
        if agrees(span - 1) {
            return span as u16;
        }
        // Invariant: run and keys agree at the offset `same`, and differ at the offset `other`.
        let (mut same, mut other) = (0, span - 1);
        while other - same > 1 {
            let middle = same.midpoint(other);
            *(if agrees(middle) { &mut same } else { &mut other }) = middle;
        }
        same as u16 + 1
    }

    /// Whether `pages` pages can be added, even if each page begins a new run.
    pub(super) fn has_room(&self, pages: usize) -> bool {
        self.runs.len() + pages <= NUMBER_MAX as usize
    }

    /// Adds `holders`, ordered by worker, to the holders of `pages`. The caller has checked
    /// [`Runs::has_room`].
    pub(super) fn put(
        &mut self,
        scope: ScopeSlot,
        holders: &[Holder],
        parent: Option<PageHash>,
        pages: &[PageHash],
    ) {
        if pages.is_empty() {
            return;
        }
        let number = *self.scopes.entry(scope).or_insert(self.next_scope);
        if number == self.next_scope {
            self.next_scope += 1;
            self.alive.insert(number, (scope, 0));
        }
        let mut before = parent.and_then(|parent| self.find(number, parent));
        let mut at = 0;
        while at < pages.len() {
            let (run, range) = match self.find(number, pages[at]) {
                Some((run, page)) => {
                    let known = &self.runs[run as usize].hashes[usize::from(page)..];
                    let same = known.iter().zip(&pages[at..]).take_while(|(a, b)| a == b).count();
                    (run, page..page + same as u16)
                }
                None => self.append(number, before, &pages[at..]),
            };
            let Self { runs, sets, heap, .. } = self;
            let changed = &mut runs[run as usize];
            let (length, capacity) = (changed.length(), changed.spans.capacity());
            changed.spans.change(range.clone(), length, |set, pages| sets.add(set, holders, pages));
            *heap = *heap + changed.spans.capacity() * Spans::BYTES - capacity * Spans::BYTES;
            before = Some((run, range.end - 1));
            at += range.len();
        }
    }

    /// Appends the leading pages of `pages` that do not exist, at least one, without holders.
    /// Extends the run of page `before` if that page is its end and the run has fewer than
    /// [`RUN_PAGES`] pages; otherwise begins a new run.
    fn append(
        &mut self,
        scope: ScopeNumber,
        before: Option<(Number, u16)>,
        pages: &[PageHash],
    ) -> (Number, Range<u16>) {
        let is_end = |(run, page): &(Number, u16)| {
            let run = &self.runs[*run as usize];
            *page + 1 == run.length() && run.hashes.len() < RUN_PAGES
        };
        let number = match before.filter(is_end) {
            Some((run, _)) => run,
            None => self.make(scope),
        };
        let room = RUN_PAGES - self.runs[number as usize].hashes.len();
        let heap = self.runs[number as usize].heap();
        let start = self.runs[number as usize].length();
        let mut taken = 0;
        for hash in pages.iter().take(room) {
            if taken > 0 && self.find(scope, *hash).is_some() {
                break;
            }
            let run = &mut self.runs[number as usize];
            if run.hashes.len() == run.hashes.capacity() {
                let grown = (pages.len() - taken).max(run.hashes.len() / 8).max(2);
                run.hashes.reserve_exact(grown.min(room - taken));
            }
            run.hashes.push(*hash);
            self.slots.insert(*hash, number, start + taken as u16, |_| false);
            taken += 1;
        }
        let run = &mut self.runs[number as usize];
        if run.hashes.capacity() > run.hashes.len() + run.hashes.len() / 8 + 2 {
            run.hashes.shrink_to_fit();
        }
        run.spans.extend(start, EMPTY);
        run.live += taken as u16;
        self.heap = self.heap + run.heap() - heap;
        self.pages += taken as u64;
        if let Some((_, pages)) = self.alive.get_mut(&scope) {
            *pages += taken as u64;
        }
        (number, start..start + taken as u16)
    }

    fn make(&mut self, scope: ScopeNumber) -> Number {
        let run = Run { scope, ..Run::default() };
        if let Some(number) = self.free.pop() {
            self.runs[number as usize] = run;
            return number;
        }
        if self.runs.len() == self.runs.capacity() {
            self.runs.reserve_exact(64 + self.runs.len() / 8);
        }
        self.runs.push(run);
        (self.runs.len() - 1) as Number
    }

    /// Removes `worker` on `tiers` from the holders of a page.
    pub(super) fn remove(
        &mut self,
        scope: ScopeSlot,
        worker: Worker,
        tiers: Tiers,
        page: PageHash,
    ) {
        let found = self.scopes.get(&scope).and_then(|scope| self.find(*scope, page));
        if let Some((run, page)) = found {
            self.change(run, page..page + 1, |sets, set, pages| {
                sets.take(set, worker, tiers, pages)
            });
        }
    }

    /// Changes the sets of holders of the pages in `range` of a run, and removes the pages that
    /// then have no holders.
    fn change(
        &mut self,
        number: Number,
        range: Range<u16>,
        mut to: impl FnMut(&mut Sets, SetId, u64) -> SetId,
    ) {
        let Self { runs, sets, .. } = self;
        let run = &mut runs[number as usize];
        let (length, heap) = (run.length(), run.heap());
        run.spans.change(range.clone(), length, |set, pages| to(sets, set, pages));
        let mut gone = 0;
        let mut page = range.start;
        while page < range.end {
            let (set, next) = run.spans.at(page);
            let next = next.min(range.end);
            for hole in (page..next).filter(|_| set == EMPTY) {
                let hash = std::mem::take(&mut run.hashes[usize::from(hole)]);
                if hash != PageHash::NONE {
                    self.slots.remove(hash, number, hole);
                    gone += 1;
                }
            }
            page = next;
        }
        run.live -= gone;
        let kept = run.hashes.iter().rposition(|hash| *hash != PageHash::NONE);
        let kept = kept.map_or(0, |last| last + 1);
        if kept < run.hashes.len() {
            run.hashes.truncate(kept);
            run.spans.truncate(kept as u16);
        }
        if run.hashes.capacity() > 2 * kept + COMPACT_FROM {
            run.hashes.shrink_to_fit();
        }
        let scope = run.scope;
        if run.live == 0 {
            *run = Run::default();
            self.free.push(number);
        } else if kept >= COMPACT_FROM && usize::from(run.live) * 2 < kept {
            self.compact(number);
        }
        self.heap = self.heap + self.runs[number as usize].heap() - heap;
        self.subtract_pages(scope, gone.into());
    }

    /// Removes the holes of a run.
    fn compact(&mut self, number: Number) {
        let run = &mut self.runs[number as usize];
        run.spans.compact(run.length());
        let hashes = std::mem::take(&mut run.hashes);
        let live = hashes.iter().enumerate().filter(|(_, hash)| **hash != PageHash::NONE);
        run.hashes = Vec::with_capacity(run.live.into());
        for (page, hash) in live {
            self.slots.remove(*hash, number, page as u16);
            self.slots.insert(*hash, number, run.length(), |_| false);
            run.hashes.push(*hash);
        }
    }

    /// Subtracts removed pages from the counts, and removes the scope if it is empty.
    fn subtract_pages(&mut self, scope: ScopeNumber, gone: u64) {
        self.pages -= gone;
        let Some((slot, pages)) = self.alive.get_mut(&scope) else {
            self.orphans -= gone;
            return;
        };
        *pages -= gone;
        if *pages == 0 {
            self.scopes.remove(slot);
            self.alive.remove(&scope);
        }
    }

    pub(super) fn clear_worker(&mut self, worker: Worker) {
        self.sets.clear(worker);
    }

    pub(super) fn clear_scope(&mut self, scope: ScopeSlot) {
        if let Some(number) = self.scopes.remove(&scope) {
            self.orphans += self.alive.remove(&number).map_or(0, |(_, pages)| pages);
        }
    }

    /// Whether pages of cleared scopes, or pages with stale sets, remain.
    pub(super) fn is_waiting(&self) -> bool {
        self.orphans > 0 || self.sets.waiting() > 0
    }

    /// Removes cleared pages, and replaces stale sets, in the next `count` runs, or in fewer runs
    /// if these have [`RUN_PAGES`] pages together.
    pub(super) fn reclaim(&mut self, count: usize) {
        let mut changed = 0;
        for _ in 0..count {
            if !self.is_waiting() || changed >= RUN_PAGES {
                return;
            }
            self.cursor =
                if self.cursor as usize + 1 < self.runs.len() { self.cursor + 1 } else { 1 };
            let run = &self.runs[self.cursor as usize];
            let length = run.length();
            changed += usize::from(length);
            if length > 0 && !self.alive.contains_key(&run.scope) {
                self.change(self.cursor, 0..length, |sets, set, pages| {
                    sets.release(set, pages);
                    EMPTY
                });
            } else if run.spans.all(length).any(|(_, set)| self.sets.is_stale(set)) {
                self.change(self.cursor, 0..length, |sets, set, pages| sets.refresh(set, pages));
            }
        }
    }

    /// Calls `visit` for each span of run `number` that has holders, with the scope, the hash of
    /// the page before the span, the holders and the pages. Returns `false` if all run numbers are
    /// below `number`.
    pub(super) fn visit(
        &self,
        number: Number,
        mut visit: impl FnMut(ScopeSlot, Option<PageHash>, &[Holder], &[PageHash]),
    ) -> bool {
        let Some(run) = self.runs.get(number as usize) else { return false };
        if let Some((scope, _)) = self.alive.get(&run.scope) {
            for (pages, set) in run.spans.all(run.length()) {
                let holders = self.sets.holders(set);
                let pages = usize::from(pages.start)..usize::from(pages.end);
                let before = pages.start.checked_sub(1).map(|before| run.hashes[before]);
                if !holders.is_empty() {
                    let before = before.filter(|before| *before != PageHash::NONE);
                    visit(*scope, before, holders, &run.hashes[pages]);
                }
            }
        }
        true
    }
}
