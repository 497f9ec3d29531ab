//! The memory-resident tables, slots and runs, and the lookup of key sequences in them.
//!
//! [`super::RunIndex`] guards the tables with one read-write lock. A probe holds the lock once, for
//! reading: for less than a microsecond for some hundred pages. A writer changes slots in *batches*
//! of at most [`LOCK_BATCH`] pages, and retentions in batches of at most 1,024. The writer holds
//! the lock for writing during one batch at a time, and a reader may see the state between two
//! batches. A run that is being inserted therefore has length zero until all its slots exist, and a
//! cut reduces the length of a run before it removes slots.

use super::runs::{Cut, NO_RUN, Runs};
use super::slots::{Number, Slots};
use ritornello_format::{PageHash, PageHashes, ScopeSlot};

/// Maximum pages whose slots are written under one hold of the lock.
pub(crate) const LOCK_BATCH: usize = if cfg!(feature = "loom") { 2 } else { 256 };

/// Number of runs that a walk looks up at the same time.
const LOOKAHEAD_RUNS: usize = 8;

/// Bytes per run in the list of touched runs, which grows by doubling.
const TOUCHED_BYTES: usize = 2 * size_of::<Number>();

#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) slots: Slots,
    pub(crate) runs: Runs,
}

impl Tables {
    /// Builds the tables of runs that have no slots yet. The second result lists pairs of runs that
    /// have a page in common, the run with the higher number first; a run that has a page twice is
    /// paired with itself.
    pub(crate) fn build(runs: Runs) -> (Self, Vec<(Number, Number)>) {
        let (slots, pairs) = Slots::build(|visit| {
            for run in 1..runs.end() {
                for (at, hash) in runs.hot(run).pages().iter().enumerate() {
                    if *hash != PageHash::NONE {
                        visit(*hash, run, at as u16);
                    }
                }
            }
        });
        let same = |[(a, at), (b, bt)]: &[(Number, u16); 2]| {
            let (one, other) = (runs.hot(*a), runs.hot(*b));
            one.scope == other.scope
                && one.pages().get(usize::from(*at)) == other.pages().get(usize::from(*bt))
        };
        let mut twins: Vec<(Number, Number)> = pairs
            .iter()
            .filter(|pair| same(pair))
            .map(|[a, b]| (b.0.max(a.0), b.0.min(a.0)))
            .collect();
        twins.sort_unstable();
        (Self { slots, runs }, twins)
    }

    /// Bytes of memory that the tables take, and bytes set aside for the list of touched runs.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.bytes() + self.runs.bytes() + self.runs.live as usize * TOUCHED_BYTES
    }

    /// Estimates the bytes of memory that a run with these pages and `extents` extents would add.
    pub(crate) fn growth(&self, pages: &[PageHash], extents: usize) -> usize {
        self.slots.growth(pages) + self.runs.growth(pages.len(), extents) + TOUCHED_BYTES
    }

    /// The run of a page, and the page's number in it.
    #[inline]
    pub(crate) fn find(&self, scope: ScopeSlot, hash: PageHash) -> Option<(Number, u16)> {
        self.slots.candidates(hash).find(|&(run, page)| {
            let hot = self.runs.hot(run);
            hot.scope == scope && hot.pages_from(page) > 0 && hot.is(usize::from(page), hash)
        })
    }

    /// Matches the keys starting at `at` with one run. Returns the run, the number of its first
    /// page that matches, and how many pages match.
    ///
    /// In a chained scope a hash commits to all pages before it. If run and keys have equal hashes
    /// at the last position that both have, all earlier pages are therefore equal. If these hashes
    /// differ, bisection finds the last common page. In other scopes pages are compared one by one.
    #[inline]
    pub(crate) fn match_run(
        &self,
        scope: ScopeSlot,
        keys: &(impl PageHashes + ?Sized),
        at: usize,
    ) -> Option<(Number, u16, usize)> {
        let hash = keys.at(at);
        if hash == PageHash::NONE {
            return None;
        }
        for (run, page) in self.slots.candidates(hash) {
            let hot = self.runs.hot(run);
            let span = hot.pages_from(page).min(keys.len() - at);
            if span == 0 || hot.scope != scope {
                continue;
            }
            let first = usize::from(page);
            if hot.chained {
                let last = if span == 1 { hash } else { keys.at(at + span - 1) };
                if hot.is(first + span - 1, last) {
                    return Some((run, page, span));
                }
            }
            if span == 1 && hot.chained || !hot.is(first, hash) {
                continue;
            }
            let pages = &hot.pages()[first..];
            if hot.chained {
                // Invariant: run and keys agree at the offset `same`, and differ at the offset
                // `other`.
                let (mut same, mut other) = (0, span - 1);
                while other - same > 1 {
                    let middle = same.midpoint(other);
                    if pages[middle] == keys.at(at + middle) {
                        same = middle;
                    } else {
                        other = middle;
                    }
                }
                return Some((run, page, same + 1));
            }
            let common = (1..span).take_while(|&next| pages[next] == keys.at(at + next)).count();
            return Some((run, page, common + 1));
        }
        None
    }

    /// Walks along `keys`, run by run, and returns the number of keys that were found. Calls
    /// `visit` for each match with the run, its first page that matches, the number of pages that
    /// match, and the position of the first of them in `keys`.
    #[inline]
    pub(crate) fn walk(
        &self,
        scope: ScopeSlot,
        keys: &(impl PageHashes + ?Sized),
        mut visit: impl FnMut(Number, u16, usize, usize),
    ) -> usize {
        let mut at = 0;
        let mut guess = true;
        while at < keys.len() {
            let Some((run, page, count)) = self.match_run(scope, keys, at) else { break };
            visit(run, page, count, at);
            at += count;
            if guess && at < keys.len() {
                at = self.match_next_runs(scope, keys, at, count, &mut visit);
                guess = false;
            }
        }
        at
    }

    /// Continues a walk from `at` with the guess that the next runs match `stride` keys each, like
    /// the run before them. Looks up [`LOOKAHEAD_RUNS`] runs together, so that the processor waits
    /// for all their cache lines at the same time. Visits the match at each guessed position. Tries
    /// only the first of the [`Slots::candidates`] there, and stops before the position if its run
    /// does not match up to the run's end or the end of `keys`. Also stops after a match of other
    /// than `stride` keys. Visits nothing in a scope that is not chained. Returns the position at
    /// which the walk continues.
    #[inline]
    fn match_next_runs(
        &self,
        scope: ScopeSlot,
        keys: &(impl PageHashes + ?Sized),
        mut at: usize,
        stride: usize,
        visit: &mut impl FnMut(Number, u16, usize, usize),
    ) -> usize {
        while at < keys.len() {
            let guesses = LOOKAHEAD_RUNS.min((keys.len() - at).div_ceil(stride));
            let mut hashes = [PageHash::NONE; LOOKAHEAD_RUNS];
            let mut found = [(NO_RUN, 0); LOOKAHEAD_RUNS];
            let mut prefetched = 0;
            for (guess, hash) in hashes[..guesses].iter_mut().enumerate() {
                *hash = keys.at(at + guess * stride);
                prefetched ^= self.slots.touch(*hash);
            }
            for guess in 0..guesses {
                found[guess] = self.slots.candidates(hashes[guess]).next().unwrap_or((NO_RUN, 0));
                prefetched ^= self.runs.hot(found[guess].0).pages_from(0) as u64;
            }
            std::hint::black_box(prefetched);
            let start = at;
            for guess in 0..guesses {
                let from = start + guess * stride;
                let (run, page) = found[guess];
                let hot = self.runs.hot(run);
                let span = hot.pages_from(page).min(keys.len() - from);
                if span == 0 || hot.scope != scope || !hot.chained {
                    break;
                }
                // Comparing the last page suffices: in a chained scope its hash commits to all
                // pages before it.
                let last = if span == 1 { hashes[guess] } else { keys.at(from + span - 1) };
                if !hot.is(usize::from(page) + span - 1, last) {
                    break;
                }
                visit(found[guess].0, found[guess].1, span, from);
                at = from + span;
                if span != stride {
                    return at;
                }
            }
            if at != start + guesses * stride {
                return at;
            }
        }
        at
    }

    /// Adds the slots of some pages of a run.
    ///
    /// # Errors
    /// The number of the first page that exists already.
    pub(crate) fn add_slots(
        &mut self,
        run: Number,
        pages: std::ops::Range<usize>,
    ) -> Result<(), usize> {
        let Self { slots, runs } = self;
        let (scope, hashes) = (runs.hot(run).scope, runs.all_pages(run));
        for page in pages {
            let hash = hashes[page];
            // Use all hashes of `run`: `Hot::pages` is empty until the run is published.
            let same = |(other, at): (Number, u16)| {
                runs.hot(other).scope == scope
                    && if other == run { hashes } else { runs.hot(other).pages() }
                        .get(usize::from(at))
                        == Some(&hash)
            };
            if hash != PageHash::NONE && !slots.insert(hash, run, page as u16, same) {
                return Err(page);
            }
        }
        Ok(())
    }

    /// Removes the slots of the pages `hashes`, whose numbers start at `first`.
    pub(crate) fn drop_slots(&mut self, run: Number, first: usize, hashes: &[PageHash]) {
        for (at, hash) in hashes.iter().enumerate() {
            if *hash != PageHash::NONE {
                self.slots.remove(*hash, run, (first + at) as u16);
            }
        }
    }

    /// Removes a run and its slots, at recovery.
    pub(crate) fn discard(&mut self, run: Number) -> Option<Cut> {
        let cut = self.runs.cut(run, 0)?;
        self.drop_slots(run, 0, &cut.hashes);
        Some(cut)
    }

    /// The cuts that remove all but the first `keep` pages of `run`, and all descendants of the
    /// removed pages. Lists each run with the number of pages that it keeps; a parent precedes its
    /// children in the list.
    pub(crate) fn closure(&self, run: Number, keep: u16) -> Vec<(Number, u16)> {
        let mut removals = vec![(run, keep)];
        let mut at = 0;
        while let Some(&(next, from)) = removals.get(at) {
            let first = removals.len();
            removals.extend(self.runs.children(next, from).map(|child| (child, 0)));
            // The loop reaches every other run once, from the run's single parent. The loop reaches
            // `run` again only if `run` is its own descendant, which the keys of real prompts never
            // cause. Remove the whole of `run` then.
            if let Some(again) = removals[first..].iter().position(|&(child, _)| child == run) {
                removals.swap_remove(first + again);
                if keep > 0 && removals[0].1 > 0 {
                    removals[0].1 = 0;
                    let before = |child: &Number| self.runs.cold(*child).parent_page < keep;
                    let more: Vec<_> =
                        self.runs.children(run, 0).filter(before).filter(|c| *c != run).collect();
                    removals.extend(more.into_iter().map(|child| (child, 0)));
                }
            }
            at += 1;
        }
        removals
    }
}
