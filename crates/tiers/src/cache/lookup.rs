//! Lookup: determines how many leading pages of a prompt are stored, on which tiers, and how many
//! pages to load.

use super::Cache;
use super::prefetch::{Prefetch, Stage, Stopped};
use super::prompt::PromptPages;
use super::shared::Shared;
use super::stats::tier_name;
use super::tier_policies::WritePolicy;
use super::write_queue::PendingPut;
use crate::gate::{LoadDecision, LoadMode, LoadQuery, TierSpan};
use ritornello_format::residency::Tier;
use ritornello_format::{ErrorKind, PageHash, Result, Scope, check_keys};
use ritornello_store::LeaseNumber;
use std::sync::Arc;
use std::time::Duration;

/// Maximum rounds over the local tiers for a prompt whose pages alternate between them.
const MAX_ROUNDS: usize = 4;

/// Properties of a prompt besides its keys, supplied by the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupOptions {
    /// Whether the gate decides how much to load.
    pub mode: LoadMode,
    /// Tokens per page. Zero skips the gate: all pages found are loaded, unless the mode forbids
    /// it.
    pub page_tokens: u64,
    /// Bytes moved to load one page, if the page is also stored in other objects with the same
    /// keys; zero means the page bytes of the scope.
    pub page_bytes: u64,
    /// Number of leading tokens whose pages the engine already holds.
    pub computed: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
}

/// Whether a lookup has its final answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The answer is final.
    Ready,
    /// The remote has not answered yet: the caller should repeat the lookup.
    Querying,
    /// Pages are being fetched from the remote: the caller should repeat the lookup.
    Loading,
}

impl Readiness {
    /// The name in lower case.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Querying => "querying",
            Self::Loading => "loading",
        }
    }
}

/// A lease on pages of one local tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierLease {
    /// The tier.
    pub tier: Tier,
    /// The number that the tier's store gave the lease.
    pub lease: LeaseNumber,
}

/// The result of a lookup.
#[derive(Clone, Debug, PartialEq)]
pub struct Lookup {
    /// Whether this is the final answer.
    pub readiness: Readiness,
    /// Tiers of the leading pages, in prompt order; remote pages only if the remote has answered.
    pub spans: Vec<TierSpan>,
    /// Leading pages on this machine.
    pub local: usize,
    /// Leading pages that the engine should have after the load, leased by `leases`; the engine
    /// loads the pages that it lacks. If the engine already has that number of pages, no load is
    /// worthwhile.
    pub load: usize,
    /// Pages fetched from the remote for this prompt; reported once.
    pub fetched: usize,
    /// Pages fetched so far, and pages to fetch in all.
    pub progress: (usize, usize),
    /// The gate's decision; `None` if the lookup skipped the gate or the gate has no measurements.
    pub decision: Option<LoadDecision>,
    /// Leases to release after the pages are loaded; unreleased leases expire.
    pub leases: Vec<TierLease>,
}

/// The local pages of a prompt: their tiers, and the leases, each with the index of its first page.
struct LocalPrefix {
    spans: Vec<TierSpan>,
    leases: Vec<(usize, TierLease)>,
}

impl Cache {
    /// Looks up a prompt, starting at its first page. Pages to load are leased for `ttl`, and pages
    /// to load from disk are promoted to host memory in the background. The call never waits for a
    /// remote: while the remote is queried or pages are fetched, the result is
    /// [`Readiness::Querying`] or [`Readiness::Loading`], for as long as the prefetch policy
    /// allows, and the caller should repeat the lookup.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`.
    pub fn lookup(
        &self,
        scope: &Arc<Scope>,
        keys: &[&[u8]],
        ttl: Duration,
        options: &LookupOptions,
    ) -> Result<Lookup> {
        self.check()?;
        check_keys(keys)?;
        // Callers poll a pending lookup often, so the answer to a pending lookup is found by the
        // hash of the last key alone.
        let waits = keys.last().and_then(|last| {
            let job = self.shared.prefetches.get(PageHash::of(&scope.id(), last))?;
            self.shared.pending_answer(keys.len(), options, &job)
        });
        if let Some(found) = waits.filter(|_| options.mode != LoadMode::Never) {
            return Ok(found);
        }
        let boxed = keys.iter().map(|key| (*key).into()).collect();
        let pages = PromptPages::new(Arc::clone(scope), boxed, None)?;
        self.shared.lookup(&pages, ttl, options)
    }

    /// Ends a lease of this process or another.
    ///
    /// # Errors
    /// `Closed`; errors of the connection to the tier's owner.
    pub fn release(&self, lease: TierLease) -> Result<()> {
        self.check()?;
        self.shared.local_tier(lease.tier).map_or(Ok(()), |tier| tier.store().release(lease.lease))
    }

    /// Whether each page is on a local tier, also after a missing page.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store.
    pub fn exists(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.check()?;
        check_keys(keys)?;
        let mut present = vec![false; keys.len()];
        for tier in &self.shared.local_tiers {
            let found = tier.store().exists(scope, keys)?;
            present.iter_mut().zip(found).for_each(|(present, found)| *present |= found);
        }
        Ok(present)
    }

    /// Cancels prefetches and promotions of a prompt whose request has ended. Returns whether any
    /// were queued or running.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`.
    pub fn cancel(&self, scope: &Scope, keys: &[&[u8]]) -> Result<bool> {
        self.check()?;
        check_keys(keys)?;
        let Some(last) = keys.last() else { return Ok(false) };
        let name = PageHash::of(&scope.id(), last);
        let promotions_cancelled =
            self.shared.cancel_promotions(|pages, _| pages.name() == Some(name));
        let job = self.shared.prefetches.get(name);
        let stopped = self.shared.prefetches.cancel(name);
        match (stopped, job) {
            (Some(Stopped::Waiting), _) => self.shared.counts.prefetch.cancelled.add(1),
            // The prefetch is complete: release its leases.
            (None, Some(job)) => {
                self.shared.take_fetched(&job);
            }
            _ => {}
        }
        Ok(promotions_cancelled || stopped.is_some())
    }
}

impl Shared {
    fn lookup(
        self: &Arc<Self>,
        pages: &PromptPages,
        ttl: Duration,
        options: &LookupOptions,
    ) -> Result<Lookup> {
        let loads = options.mode != LoadMode::Never;
        let ahead = self.remote.is_some() && pages.scope.chained && loads;
        let name = pages.name().filter(|_| ahead);
        let mut known = name.and_then(|name| self.prefetches.get(name));
        let LocalPrefix { mut spans, mut leases } = self.lease_local(pages, ttl)?;
        let local: usize = spans.iter().map(|span| span.pages).sum();
        let stale = known.as_ref().is_none_or(|job| job.is_stale());
        if name.is_some() && local < pages.len() && stale {
            known = self.prefetch(pages, *options, spans.clone());
            let waiting =
                known.as_ref().and_then(|job| self.pending_answer(pages.len(), options, job));
            if let Some(found) = waiting {
                self.release_from(&mut leases, 0);
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
            spans: Vec::new(),
        };
        if let Some((load, decision)) =
            self.decide(pages, &spans, options, self.pending_load_bytes())
        {
            found.load = load;
            let skipped = (options.computed / options.page_tokens.max(1)) as usize;
            self.counts.gate.decided(local.saturating_sub(skipped), &decision);
            found.decision = Some(decision);
        }
        let fetched = known.as_ref().map_or(0, |job| self.take_fetched(job));
        match known.map(|job| job.stage()) {
            Some(Stage::Done { known, .. }) => {
                found.fetched = fetched.min(local);
                if known > local {
                    spans.push(TierSpan { tier: Tier::Remote, pages: known - local });
                }
            }
            Some(Stage::Fetching { fetched, .. }) => found.fetched = fetched.min(local),
            _ => {}
        }
        let skipped = options.computed.checked_div(options.page_tokens).unwrap_or(0) as usize;
        self.promote(pages, &spans, skipped..found.load);
        self.release_from(&mut leases, found.load);
        found.leases = leases.into_iter().map(|(_, lease)| lease).collect();
        self.record_lookup(pages, &spans);
        found.spans = spans;
        Ok(found)
    }

    /// The answer to a lookup of `pages` pages while its prefetch runs and the policy lets it wait.
    fn pending_answer(
        &self,
        pages: usize,
        options: &LookupOptions,
        job: &Prefetch,
    ) -> Option<Lookup> {
        let local: usize = job.local.iter().map(|span| span.pages).sum();
        let stage = job.stage();
        // Until the remote answers, the number of pages to wait for is unknown and counts as zero.
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

    /// Leases the leading pages that are on local tiers.
    fn lease_local(&self, pages: &PromptPages, ttl: Duration) -> Result<LocalPrefix> {
        let keys = pages.refs(0..pages.len());
        let (mut at, mut spans, mut leases) = (0, Vec::<TierSpan>::new(), Vec::new());
        for _ in 0..MAX_ROUNDS {
            let before = at;
            for tier in &self.local_tiers {
                if at == keys.len() {
                    break;
                }
                let leased = match tier.store().lease(&pages.scope, &keys[at..], ttl) {
                    Ok(leased) => leased,
                    Err(error) if error.kind() == ErrorKind::Invalid => {
                        return Err(error);
                    }
                    Err(error) => {
                        tracing::debug!(%error, tier = tier_name(tier.kind), "a tier did not answer");
                        continue;
                    }
                };
                if leased.lease != LeaseNumber::default() {
                    leases.push((at, TierLease { tier: tier.kind, lease: leased.lease }));
                }
                match spans.last_mut() {
                    _ if leased.pages == 0 => {}
                    Some(last) if last.tier == tier.kind => last.pages += leased.pages,
                    _ => spans.push(TierSpan { tier: tier.kind, pages: leased.pages }),
                }
                at += leased.pages;
            }
            if at == before || at == keys.len() || self.local_tiers.len() == 1 {
                break;
            }
        }
        Ok(LocalPrefix { spans, leases })
    }

    /// Releases leases that begin at page `load` or later.
    fn release_from(&self, leases: &mut Vec<(usize, TierLease)>, load: usize) {
        leases.retain(|(from, lease)| {
            if *from >= load
                && let Some(tier) = self.local_tier(lease.tier)
            {
                // An error is harmless: the lease expires.
                let _ = tier.store().release(lease.lease);
            }
            *from < load
        });
    }

    /// Returns the number of leading pages that the engine should have, and the decision; `None` if
    /// `options` skip the gate or the gate has no measurements.
    pub(super) fn decide(
        &self,
        pages: &PromptPages,
        found: &[TierSpan],
        options: &LookupOptions,
        queued: [u64; 4],
    ) -> Option<(usize, LoadDecision)> {
        if options.page_tokens == 0 || found.is_empty() {
            return None;
        }
        let mut skip = (options.computed / options.page_tokens) as usize;
        let skipped = skip;
        let mut lacking = found.to_vec();
        for span in &mut lacking {
            let less = skip.min(span.pages);
            span.pages -= less;
            skip -= less;
        }
        lacking.retain(|span| span.pages > 0);
        let question = LoadQuery {
            found: &lacking,
            page_bytes: options.page_bytes.max(pages.page_bytes),
            page_tokens: options.page_tokens,
            before: options.computed,
            tokens: options.tokens.max(options.computed),
            queued,
            mode: options.mode,
        };
        let decision = self.gate(|gate| gate.decide(&question, self.clock()));
        let load = if decision.pages == 0 { 0 } else { skipped + decision.pages };
        let knows = !decision.recompute.is_zero() && !lacking.is_empty();
        knows.then_some((load, decision))
    }

    /// Bytes waiting to be loaded from each tier; for a rate-capped tier, bytes waiting in either
    /// direction if that is more.
    pub(super) fn pending_load_bytes(&self) -> [u64; 4] {
        let mut queued = self.loads.queued();
        for (tier, rate) in self.rates() {
            queued[tier as usize] = queued[tier as usize].max(rate.backlog());
        }
        queued
    }

    /// Counts the lookup, and queues writes of pages that were found often enough.
    fn record_lookup(self: &Arc<Self>, pages: &PromptPages, spans: &[TierSpan]) {
        self.counts.probed.add(pages.len() as u64);
        let mut at = 0;
        for span in spans {
            self.counts_of(span.tier).found.add(span.pages as u64);
            at += span.pages;
        }
        self.counts.missed.add((pages.len() - at.min(pages.len())) as u64);
        let by_use = |policy| matches!(policy, WritePolicy::Selective(_) | WritePolicy::WriteBack);
        if !self.write_queues.iter().any(|queue| by_use(queue.policy)) {
            return;
        }
        let mut at = 0;
        for span in spans {
            self.mark_present(span.tier, pages, at..at + span.pages);
            at += span.pages;
        }
        let _ = self.table.walk(&pages.hashes);
        for queue in &self.write_queues {
            if let WritePolicy::Selective(times) = queue.policy {
                let often = self.table.hot_prefix(&pages.hashes, times);
                self.queue_write(queue, pages, 0..often.min(at), PendingPut::default());
            }
        }
        self.trim_table();
    }
}
