//! Reads pages from the local tiers, each page from the fastest tier that has it.

use super::local_tier::LocalTier;
use super::prompt::PromptPages;
use super::tier_set::TierSet;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, Scope};
use ritornello_store::{Outcome, PutOptions};
use ritornello_volume::page_memory::{BorrowedPagesMut, PageTarget, SelectedPages};
use ritornello_volume::transfer::Control;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum passes over the local tiers. In a chained scope a tier delivers, in one pass, pages up
/// to the next page that it lacks, and consecutive pages may alternate between tiers.
const MAX_ROUNDS: usize = 4;

/// Default reason for pages that were not read.
const NOT_FOUND: &str = "not_found";

/// One read of pages, each from the fastest local tier that has it.
pub(super) struct Read<'a> {
    pub(super) tiers: &'a TierSet,
    pub(super) scope: &'a Arc<Scope>,
    /// The key of the page before the first page, if any.
    pub(super) parent: Option<&'a [u8]>,
    pub(super) keys: &'a [&'a [u8]],
    pub(super) target: &'a dyn PageTarget,
    pub(super) control: &'a Control,
}

impl Read<'_> {
    /// Reads the available pages into the target, and stores pages from lower tiers in the first
    /// tier.
    pub(super) fn run(&self) -> Outcome {
        let Self { tiers, scope, keys, target, control, .. } = *self;
        let page_bytes = scope.resolved_page_bytes().unwrap_or(0);
        let mut read = PartialRead::new(keys.len());
        for _ in 0..MAX_ROUNDS {
            let before = read.missing.len();
            for (at, tier) in tiers.local.iter().enumerate() {
                let Some((loaded, took)) = read.read_tier(tier, scope, keys, target, control)
                else {
                    continue;
                };
                let pages = loaded.len() as u64;
                tiers.record_load(tier.kind, pages, pages * page_bytes, took);
                if at > 0 && control.stop().is_none() {
                    self.store(&loaded);
                }
            }
            if read.missing.is_empty() || read.missing.len() == before || !scope.chained {
                break;
            }
        }
        read.outcome(keys.len(), page_bytes)
    }

    /// Copies the pages `loaded` from the target to the first tier. Pages for which staging has no
    /// space are skipped.
    fn store(&self, loaded: &[usize]) {
        let first_tier = self.tiers.first();
        let counts = self.tiers.counts(first_tier.kind);
        for run in loaded.chunk_by(|a, b| a + 1 == *b) {
            let source = SelectedPages::new(self.target, run).filled();
            let before = run[0].checked_sub(1).map(|before| self.keys[before]).or(self.parent);
            let keys: Vec<Box<[u8]>> = run.iter().map(|page| self.keys[*page].into()).collect();
            let requested = first_tier.store().submit_put_copy(
                Arc::clone(self.scope),
                keys,
                &source,
                PutOptions::after(before),
                Control::default(),
            );
            match requested {
                Ok(_) => counts.promoted.add(run.len() as u64),
                Err(error) => {
                    counts.dropped.add(run.len() as u64);
                    tracing::debug!(%error, "pages were not copied to the first tier");
                }
            }
        }
    }
}

/// Copies pages to `buffer`, one after another, for a write to the tier `to`: from the tiers above
/// it, or from the tiers below it if `to` is the first tier. Returns the number of leading pages
/// copied.
pub(super) fn copy_for(
    tiers: &TierSet,
    to: Tier,
    pages: &PromptPages,
    range: Range<usize>,
    buffer: &mut [u8],
    control: &Control,
) -> usize {
    let page_bytes = pages.page_bytes as usize;
    let keys = pages.refs(range.clone());
    let mut copied = 0;
    let is_source =
        |tier: &&LocalTier| tier.kind != to && (tier.kind < to || to == tiers.first().kind);
    for _ in 0..MAX_ROUNDS {
        let before = copied;
        for tier in tiers.local.iter().filter(is_source) {
            let rest = &mut buffer[copied * page_bytes..range.len() * page_bytes];
            let mut slices: Vec<&mut [u8]> = rest.chunks_exact_mut(page_bytes).collect();
            let target = BorrowedPagesMut::new(&mut slices);
            let all: Vec<usize> = (0..range.len() - copied).collect();
            let mut read = PartialRead { missing: all, background: true, reason: NOT_FOUND };
            if let Some((got, _)) =
                read.read_tier(tier, &pages.scope, &keys[copied..], &target, control)
            {
                copied += got.iter().enumerate().take_while(|(at, page)| at == *page).count();
            }
            if copied == range.len() {
                return copied;
            }
        }
        if copied == before {
            break;
        }
    }
    copied
}

/// A read in progress: the pages still missing, and the reason for the miss.
struct PartialRead {
    missing: Vec<usize>,
    /// Whether the read waits for a tier's rate limit with `RateLimiter::wait_in_steps`, so that
    /// loads can start between its steps.
    background: bool,
    reason: &'static str,
}

impl PartialRead {
    fn new(pages: usize) -> Self {
        Self { missing: (0..pages).collect(), background: false, reason: NOT_FOUND }
    }

    /// Reads missing pages from `tier`. Returns the indices of the pages read, and the duration of
    /// the read. The duration of a background read includes the delay by earlier transfers, the
    /// duration of other reads does not. `None` if no page was read.
    fn read_tier(
        &mut self,
        tier: &LocalTier,
        scope: &Scope,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        control: &Control,
    ) -> Option<(Vec<usize>, Duration)> {
        if self.missing.is_empty() {
            return None;
        }
        let (begun, store) = (Instant::now(), tier.store());
        let failed = |error: &Error| {
            tracing::debug!(%error, tier = ?tier.kind, "a tier could not be read");
            error.kind().word()
        };
        let mut requested: Vec<usize> = self.missing.clone();
        // A delay by other transfers must not count against the measured speed of the tier.
        let mut others = Duration::ZERO;
        if tier.rate.is_capped() {
            let requested_keys: Vec<&[u8]> = requested.iter().map(|page| keys[*page]).collect();
            let present =
                store.exists(scope, &requested_keys).map_err(|error| self.reason = failed(&error));
            let mut present = present.ok()?.into_iter();
            let mut open = true;
            requested.retain(|_| {
                open &= present.next() == Some(true) || !scope.chained;
                open
            });
            let bytes = requested.len() as u64 * scope.resolved_page_bytes().ok()?;
            if requested.is_empty() {
                return None;
            }
            others = match self.background {
                true => tier.rate.wait_in_steps(bytes, control).then_some(others)?,
                false => tier.rate.wait(bytes, control)?,
            };
        }
        let requested_keys: Vec<&[u8]> = requested.iter().map(|page| keys[*page]).collect();
        let picked = SelectedPages::new(target, &requested);
        // A section is reported once all missing pages have it. `get_batch` knows only the pages
        // passed to it, so it must report no sections if other pages are missing too.
        let rest = requested.len() < self.missing.len() && control.sections.is_some();
        let whole = rest.then(|| Control { sections: None, ..control.clone() });
        let control = whole.as_ref().unwrap_or(control);
        let outcome = match store.get_batch(scope, &requested_keys, &picked, control) {
            Ok(outcome) => outcome,
            Err(error) => {
                self.reason = failed(&error);
                return None;
            }
        };
        if outcome.reason != NOT_FOUND && !outcome.reason.is_empty() {
            self.reason = outcome.reason;
        }
        let is_read = |at: usize| outcome.ok[at];
        let filled: Vec<usize> = requested
            .iter()
            .enumerate()
            .filter(|(at, _)| is_read(*at))
            .map(|(_, page)| *page)
            .collect();
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
