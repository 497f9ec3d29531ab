//! Reading pages from the tiers of this machine, each from the fastest that has it.

use super::prompt::Pages;
use super::shared::Shared;
use super::shelf::Shelf;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, Scope};
use ritornello_store::{Outcome, PutOptions};
use ritornello_volume::memory::{BorrowedPagesMut, PageTarget, Picked};
use ritornello_volume::transfer::Control;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stretch that lies on two tiers in turns is read in so many turns at most.
const TURNS: usize = 4;

/// Why a page that was not read was not.
const ABSENT: &str = "absent";

impl Shared {
    /// Fills what it can of `target`; what came from below the first tier is put there.
    pub(super) fn read(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        parent: Option<&[u8]>,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        control: &Control,
    ) -> Outcome {
        let mut read = Read::new(keys.len());
        for _ in 0..TURNS {
            let before = read.missing.len();
            for (at, shelf) in self.shelves.iter().enumerate() {
                let Some((came, took)) = read.turn(shelf, scope, keys, target, control) else {
                    continue;
                };
                let page_bytes = scope.resolved_page_bytes().unwrap_or(0);
                let bytes = came.len() as u64 * page_bytes;
                self.measured(shelf.tier, came.len() as u64, bytes, took);
                if at > 0 && control.stop().is_none() {
                    self.promote(scope, parent, keys, target, &came);
                }
            }
            if read.missing.is_empty() || read.missing.len() == before || !scope.chained {
                break;
            }
        }
        read.outcome(keys.len(), scope.resolved_page_bytes().unwrap_or(0))
    }

    /// The tier that reading these pages will take longest on.
    pub(super) fn slowest_of(&self, scope: &Scope, keys: &[Box<[u8]>]) -> Tier {
        let (last, faster) = self.shelves.split_last().map_or((self.top(), &[][..]), |split| split);
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let has_all =
            |shelf: &&Shelf| shelf.store().probe(scope, &keys).is_ok_and(|n| n == keys.len());
        faster.iter().find(has_all).unwrap_or(last).tier
    }

    /// Puts what was just read into the first tier, from where it was read to. What finds no room
    /// in staging is not.
    fn promote(
        &self,
        scope: &Arc<Scope>,
        parent: Option<&[u8]>,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        came: &[usize],
    ) {
        let top = self.top();
        for run in came.chunk_by(|a, b| a + 1 == *b) {
            let source = Picked::new(target, run).filled();
            let before = run[0].checked_sub(1).map(|before| keys[before]).or(parent);
            let keys: Vec<Box<[u8]>> = run.iter().map(|page| keys[*page].into()).collect();
            let asked = top.store().submit_put_copy(
                Arc::clone(scope),
                keys,
                &source,
                PutOptions::after(before),
                Control::default(),
            );
            let counts = self.counts_of(top.tier);
            match asked {
                Ok(_) => counts.promoted.add(run.len() as u64),
                Err(error) => {
                    counts.dropped.add(run.len() as u64);
                    tracing::debug!(%error, "pages were not promoted");
                }
            }
        }
    }

    /// Copies pages to `buffer`, one after another, from the tiers above `to`, or where that is the
    /// first one, from those below; nobody waits for it. Returns how many of the first of them came.
    pub(super) fn copy(
        &self,
        to: Tier,
        pages: &Pages,
        range: Range<usize>,
        buffer: &mut [u8],
        control: &Control,
    ) -> usize {
        let page_bytes = pages.page_bytes as usize;
        let keys = pages.refs(range.clone());
        let mut came = 0;
        let is_source =
            |shelf: &&Shelf| shelf.tier != to && (shelf.tier < to || to == self.top().tier);
        for _ in 0..TURNS {
            let before = came;
            for shelf in self.shelves.iter().filter(is_source) {
                let rest = &mut buffer[came * page_bytes..range.len() * page_bytes];
                let mut slices: Vec<&mut [u8]> = rest.chunks_exact_mut(page_bytes).collect();
                let target = BorrowedPagesMut::new(&mut slices);
                let all: Vec<usize> = (0..range.len() - came).collect();
                let mut read = Read { missing: all, ..Read::new(0) };
                if let Some((got, _)) =
                    read.turn(shelf, &pages.scope, &keys[came..], &target, control)
                {
                    came += got.iter().enumerate().take_while(|(at, page)| at == *page).count();
                }
                if came == range.len() {
                    return came;
                }
            }
            if came == before {
                break;
            }
        }
        came
    }
}

/// A read that is under way.
struct Read {
    missing: Vec<usize>,
    reason: &'static str,
}

impl Read {
    fn new(pages: usize) -> Self {
        Self { missing: (0..pages).collect(), reason: ABSENT }
    }

    /// Reads what is still missing and `shelf` has; which pages that were, and how long it took.
    fn turn(
        &mut self,
        shelf: &Shelf,
        scope: &Scope,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        control: &Control,
    ) -> Option<(Vec<usize>, Duration)> {
        if self.missing.is_empty() {
            return None;
        }
        let (begun, store) = (Instant::now(), shelf.store());
        let failed = |error: &Error| {
            tracing::debug!(%error, tier = ?shelf.tier, "a tier could not be read");
            error.kind().word()
        };
        let mut asked: Vec<usize> = self.missing.clone();
        // How fast a tier is does not depend on who else waits for it.
        let mut others = Duration::ZERO;
        if shelf.rate.is_capped() {
            let wanted: Vec<&[u8]> = asked.iter().map(|page| keys[*page]).collect();
            let there = store.exists(scope, &wanted).map_err(|error| self.reason = failed(&error));
            let mut there = there.ok()?.into_iter();
            let mut open = true;
            asked.retain(|_| {
                open &= there.next() == Some(true) || !scope.chained;
                open
            });
            let bytes = asked.len() as u64 * scope.resolved_page_bytes().ok()?;
            if asked.is_empty() {
                return None;
            }
            others = shelf.rate.wait(bytes, control)?;
        }
        let wanted: Vec<&[u8]> = asked.iter().map(|page| keys[*page]).collect();
        let picked = Picked::new(target, &asked);
        // A section has come when all that is missing has it, not when some pages have.
        let rest = asked.len() < self.missing.len() && control.sections.is_some();
        let whole = rest.then(|| Control { sections: None, ..control.clone() });
        let control = whole.as_ref().unwrap_or(control);
        let outcome = match store.get_batch(scope, &wanted, &picked, control) {
            Ok(outcome) => outcome,
            Err(error) => {
                self.reason = failed(&error);
                return None;
            }
        };
        if outcome.reason != ABSENT && !outcome.reason.is_empty() {
            self.reason = outcome.reason;
        }
        let came = |at: usize| outcome.ok[at];
        let filled: Vec<usize> =
            asked.iter().enumerate().filter(|(at, _)| came(*at)).map(|(_, page)| *page).collect();
        if filled.is_empty() {
            return None;
        }
        self.missing.retain(|page| filled.binary_search(page).is_err());
        Some((filled, begun.elapsed().saturating_sub(others)))
    }

    fn outcome(self, pages: usize, page_bytes: u64) -> Outcome {
        let mut ok = vec![true; pages];
        self.missing.iter().for_each(|page| ok[*page] = false);
        let leading = ok.iter().take_while(|ok| **ok).count();
        Outcome {
            pages: leading,
            bytes: (pages - self.missing.len()) as u64 * page_bytes,
            reason: if self.missing.is_empty() { "" } else { self.reason },
            ok,
            ..Outcome::default()
        }
    }
}
