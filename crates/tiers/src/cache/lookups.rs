//! Lookups: determine how many leading pages of a prompt are stored, on which tiers, and how many
//! pages to load.

use super::local_prefix::LocalPrefix;
use super::lookup::{Lookup, LookupOptions, Readiness};
use super::lower_tiers::LowerTiers;
use super::prefetch::{Prefetch, Stage};
use super::prefetcher::Prefetcher;
use super::promotion::Promotions;
use super::prompt::{PromptPages, name_of};
use super::stats::Counter;
use super::tier_policies::PrefetchPolicy;
use super::tier_set::TierSet;
use crate::gate::{LoadMode, TierSpan};
use ritornello_format::residency::Tier;
use ritornello_format::{Result, Scope};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Lookups {
    pub(super) tiers: Arc<TierSet>,
    pub(super) lower: Arc<LowerTiers>,
    pub(super) promotions: Arc<Promotions>,
    pub(super) prefetcher: Arc<Prefetcher>,
    pub(super) policy: PrefetchPolicy,
    /// Pages of the lookups that got a final answer, and pages among them that were found on no
    /// tier. A page that is only on the remote counts as missed unless a prefetch of the prompt has
    /// ended and found the page.
    pub(super) probed: Counter,
    pub(super) missed: Counter,
}

impl Lookups {
    /// See [`Cache::lookup`](super::Cache::lookup).
    ///
    /// # Errors
    /// `Invalid` for an invalid key, or a scope without a valid page length.
    pub(super) fn lookup(
        &self,
        scope: &Arc<Scope>,
        keys: &[&[u8]],
        ttl: Duration,
        options: &LookupOptions,
    ) -> Result<Lookup> {
        // Callers repeat a pending lookup often, so its prefetch is found before the hashes of all
        // pages are computed.
        let waits = name_of(scope, keys).and_then(|name| {
            let job = self.prefetcher.get(name)?;
            self.pending_answer(keys.len(), options, &job)
        });
        if let Some(found) = waits.filter(|_| options.mode != LoadMode::Never) {
            return Ok(found);
        }
        let boxed = keys.iter().map(|key| (*key).into()).collect();
        let pages = PromptPages::new(Arc::clone(scope), boxed, None)?;
        self.find(&pages, ttl, options)
    }

    fn find(&self, pages: &PromptPages, ttl: Duration, options: &LookupOptions) -> Result<Lookup> {
        let (tiers, prefetcher) = (&*self.tiers, &self.prefetcher);
        let loads = options.mode != LoadMode::Never;
        let ahead = tiers.remote.is_some() && loads;
        let name = pages.name().filter(|_| ahead);
        let mut known = name.and_then(|name| prefetcher.get(name));
        let prefix = LocalPrefix::lease(tiers, pages, ttl)?;
        let local = prefix.pages();
        let stale = known.as_ref().is_none_or(|job| job.is_stale());
        if name.is_some() && local < pages.len() && stale {
            known = prefetcher.start(pages, *options, &prefix);
            let waiting =
                known.as_ref().and_then(|job| self.pending_answer(pages.len(), options, job));
            if let Some(found) = waiting {
                prefix.keep_leases(tiers, 0);
                return Ok(found);
            }
        }
        let mut found = Lookup {
            readiness: Readiness::Ready,
            local,
            load: if loads { local } else { 0 },
            fetched: 0,
            progress: (0, 0),
            decision: None,
            leases: Vec::new(),
            spans: prefix.spans.clone(),
        };
        let queued = tiers.pending_load_bytes();
        let decided = tiers.gate.decide(pages.page_bytes, &found.spans, options, queued);
        if let Some((load, decision)) = decided {
            found.load = load;
            let lacking = local.saturating_sub(options.computed_pages());
            tiers.gate.counts.decided(lacking, &decision);
            found.decision = Some(decision);
        }
        let fetched = known.as_ref().map_or(0, |job| prefetcher.take_fetched(job));
        match known.map(|job| job.stage()) {
            Some(Stage::Done { known, .. }) => {
                found.fetched = fetched.min(local);
                if known > local {
                    found.spans.push(TierSpan { tier: Tier::Remote, pages: known - local });
                }
            }
            Some(Stage::Fetching { fetched, .. }) => found.fetched = fetched.min(local),
            _ => {}
        }
        self.promotions.promote(pages, &found.spans, options.computed_pages()..found.load);
        self.record(pages, &found.spans, &prefix);
        found.leases = prefix.keep_leases(tiers, found.load);
        Ok(found)
    }

    /// Returns the answer to a lookup of `pages` pages that the caller must repeat. Returns `None`
    /// if the prefetch `job` is done, or has been queued and running for as long as the policy lets
    /// a lookup wait.
    fn pending_answer(
        &self,
        pages: usize,
        options: &LookupOptions,
        job: &Prefetch,
    ) -> Option<Lookup> {
        let local = job.local_pages();
        let stage = job.stage();
        // Before the remote answers, the number of pages to wait for is unknown and counts as zero.
        let missing = match stage {
            Stage::Querying => 0,
            _ => (pages - local.min(pages)) as u64,
        };
        if job.since.elapsed()
            >= self.policy.max_wait(missing * options.page_tokens, job.expected())
        {
            return None;
        }
        let (readiness, progress) = match stage {
            Stage::Done { .. } => return None,
            Stage::Querying => (Readiness::Querying, (0, 0)),
            Stage::Fetching { fetched, of } => (Readiness::Loading, (fetched, of)),
        };
        Some(Lookup {
            readiness,
            spans: job.local.clone(),
            local: local + progress.0,
            load: 0,
            fetched: progress.0,
            progress,
            decision: None,
            leases: Vec::new(),
        })
    }

    /// Counts the lookup, and records in the page table where the pages were found. Pages that were
    /// found often enough are queued for writes to the tiers with a selective write policy.
    fn record(&self, pages: &PromptPages, spans: &[TierSpan], prefix: &LocalPrefix) {
        self.probed.add(pages.len() as u64);
        let mut at = 0;
        for span in spans {
            self.tiers.counts(span.tier).found.add(span.pages as u64);
            at += span.pages;
        }
        self.missed.add((pages.len() - at.min(pages.len())) as u64);
        if pages.scope.chained {
            self.lower.found(pages, spans);
            return;
        }
        for (page, tier) in prefix.tiers.iter().enumerate() {
            if let Some(tier) = *tier {
                self.lower.found(&pages.select(&[page]), &[TierSpan { tier, pages: 1 }]);
            }
        }
    }
}
