//! Finding: how far a prompt is known, on which tiers, and how much of that to load.

use super::Cache;
use super::figures::tier_word;
use super::policy::WritePolicy;
use super::prefetch::{Prefetch, Stage, Stopped};
use super::prompt::Pages;
use super::shared::Shared;
use super::write_queue::PendingPut;
use crate::gate::{Decision, LoadMode, LoadQuery, TierSpan};
use ritornello_format::residency::Tier;
use ritornello_format::{ErrorKind, PageHash, Result, Scope, check_keys};
use ritornello_store::LeaseNumber;
use std::sync::Arc;
use std::time::Duration;

/// A prompt that lies on two tiers in turns is followed through so many turns at most.
const MAX_ROUNDS: usize = 4;

/// What an engine says of a prompt besides its keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupOptions {
    /// Whether the gate decides.
    pub mode: LoadMode,
    /// Tokens of a page; zero: the gate is not asked, all that is found is loaded if any may be.
    pub page_tokens: u64,
    /// Bytes that loading a page moves, where a page lies in more objects than this one, which are
    /// looked for by the same keys; zero: the scope's.
    pub page_bytes: u64,
    /// Tokens that the engine has already.
    pub computed: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
}

/// Whether to ask again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// No: this is the answer.
    Ready,
    /// Yes: the remote has not said what it has.
    Asking,
    /// Yes: pages are on their way.
    Loading,
}

impl Readiness {
    /// In one lower-case word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Asking => "asking",
            Self::Loading => "loading",
        }
    }
}

/// A lease on pages of one tier of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierLease {
    /// The tier.
    pub tier: Tier,
    /// Its store's name for it.
    pub lease: LeaseNumber,
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Whether it is the answer, or the caller is to ask again.
    pub readiness: Readiness,
    /// Where the leading pages lie, in order; on the remote as far as that is known.
    pub spans: Vec<TierSpan>,
    /// Leading pages that are on this machine.
    pub local: usize,
    /// Leading pages that the engine is to have after loading those of them that it lacks; zero, or
    /// no more than it has: nothing is worth loading. They are kept by `leases`.
    pub load: usize,
    /// Pages of those that were brought from the remote for this prompt, told once.
    pub brought: usize,
    /// Pages that have come of those that are on their way, and how many those are.
    pub progress: (usize, usize),
    /// What the gate thinks, where it was asked and knows something.
    pub decision: Option<Decision>,
    /// To be released when the pages were loaded; they run out by themselves.
    pub leases: Vec<TierLease>,
}

/// What this machine has of a prompt, stretch by stretch, with a lease on each, and the page before
/// which that begins.
struct LocalPrefix {
    spans: Vec<TierSpan>,
    leases: Vec<(usize, TierLease)>,
}

impl Cache {
    /// Looks for a prompt, from its first page on; what is to be loaded is kept for `ttl`, and rises from
    /// the disk to host memory in the background. It never waits for a remote: where that is to be asked, or pages come from there, it says that the
    /// caller is to ask again, as the prefetch policy has it.
    ///
    /// # Errors
    /// `Invalid` for a key that is none; `Closed`.
    pub fn find(
        &self,
        scope: &Arc<Scope>,
        keys: &[&[u8]],
        ttl: Duration,
        options: &LookupOptions,
    ) -> Result<Found> {
        self.check()?;
        check_keys(keys)?;
        // Who waits asks often: that costs no more than the last key.
        let waits = keys.last().and_then(|last| {
            let job = self.shared.prefetches.get(PageHash::of(&scope.id(), last))?;
            self.shared.pending_answer(keys.len(), options, &job)
        });
        if let Some(found) = waits.filter(|_| options.mode != LoadMode::Never) {
            return Ok(found);
        }
        let boxed = keys.iter().map(|key| (*key).into()).collect();
        let pages = Pages::new(Arc::clone(scope), boxed, None)?;
        self.shared.find(&pages, ttl, options)
    }

    /// Ends a lease, of this process or another.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn release(&self, lease: TierLease) -> Result<()> {
        self.check()?;
        self.shared.local_tier(lease.tier).map_or(Ok(()), |tier| tier.store().release(lease.lease))
    }

    /// Which pages are on this machine, each by itself.
    ///
    /// # Errors
    /// Like [`find`](Self::find).
    pub fn exists(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.check()?;
        check_keys(keys)?;
        let mut there = vec![false; keys.len()];
        for tier in &self.shared.local_tiers {
            let found = tier.store().exists(scope, keys)?;
            there.iter_mut().zip(found).for_each(|(there, found)| *there |= found);
        }
        Ok(there)
    }

    /// Stops what is being brought for a prompt that nobody wants any more. Returns whether anything
    /// was.
    ///
    /// # Errors
    /// `Invalid` for a key that is none; `Closed`.
    pub fn cancel(&self, scope: &Scope, keys: &[&[u8]]) -> Result<bool> {
        self.check()?;
        check_keys(keys)?;
        let Some(last) = keys.last() else { return Ok(false) };
        let name = PageHash::of(&scope.id(), last);
        let rose = self.shared.cancel_promotions(|pages, _| pages.name() == Some(name));
        let job = self.shared.prefetches.get(name);
        let stopped = self.shared.prefetches.cancel(name);
        match (stopped, job) {
            (Some(Stopped::Waiting), _) => self.shared.counts.prefetch.cancelled.add(1),
            // It is over: what came need not be kept any more.
            (None, Some(job)) => {
                self.shared.take_brought(&job);
            }
            _ => {}
        }
        Ok(rose || stopped.is_some())
    }
}

impl Shared {
    fn find(
        self: &Arc<Self>,
        pages: &Pages,
        ttl: Duration,
        options: &LookupOptions,
    ) -> Result<Found> {
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
        let mut found = Found {
            readiness: Readiness::Ready,
            local,
            load: if loads { local } else { 0 },
            brought: 0,
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
        let brought = known.as_ref().map_or(0, |job| self.take_brought(job));
        match known.map(|job| job.stage()) {
            Some(Stage::Done { known, .. }) => {
                found.brought = brought.min(local);
                if known > local {
                    spans.push(TierSpan { tier: Tier::Remote, pages: known - local });
                }
            }
            Some(Stage::Fetching { came, .. }) => found.brought = came.min(local),
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

    /// The answer while a prefetch goes on and the request for so many pages has patience.
    fn pending_answer(
        &self,
        pages: usize,
        options: &LookupOptions,
        job: &Prefetch,
    ) -> Option<Found> {
        let local: usize = job.local.iter().map(|span| span.pages).sum();
        let stage = job.stage();
        // Nothing is known to be there to wait for, until the remote has said so.
        let missing = match stage {
            Stage::Asking => 0,
            _ => (pages - local.min(pages)) as u64,
        };
        if job.since.elapsed()
            >= self.policy.max_wait(missing * options.page_tokens, job.expected())
        {
            return None;
        }
        let (readiness, progress) = match stage {
            Stage::Done { .. } => return None,
            Stage::Asking => (Readiness::Asking, (0, 0)),
            Stage::Fetching { came, of } => (Readiness::Loading, (came, of)),
        };
        Some(Found {
            readiness,
            spans: job.local.clone(),
            local: local + progress.0,
            load: 0,
            brought: progress.0,
            progress,
            decision: None,
            leases: Vec::new(),
        })
    }

    /// Leases what this machine has.
    fn lease_local(&self, pages: &Pages, ttl: Duration) -> Result<LocalPrefix> {
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
                        tracing::debug!(%error, tier = tier_word(tier.kind), "a tier did not answer");
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

    /// Releases what begins at page `load` or behind it.
    fn release_from(&self, leases: &mut Vec<(usize, TierLease)>, load: usize) {
        leases.retain(|(from, lease)| {
            if *from >= load
                && let Some(tier) = self.local_tier(lease.tier)
            {
                // It runs out by itself.
                let _ = tier.store().release(lease.lease);
            }
            *from < load
        });
    }

    /// How many leading pages the engine is to have, and why; `None` where the gate is not asked or
    /// knows nothing.
    pub(super) fn decide(
        &self,
        pages: &Pages,
        found: &[TierSpan],
        options: &LookupOptions,
        queued: [u64; 4],
    ) -> Option<(usize, Decision)> {
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

    /// Bytes that wait to be loaded from each tier, or, where a cap is, to be moved either way.
    pub(super) fn pending_load_bytes(&self) -> [u64; 4] {
        let mut queued = self.loads.queued();
        for (tier, rate) in self.rates() {
            queued[tier as usize] = queued[tier as usize].max(rate.backlog());
        }
        queued
    }

    /// Counts what was found, and has what was found often enough written down.
    fn record_lookup(self: &Arc<Self>, pages: &Pages, spans: &[TierSpan]) {
        self.counts.asked.add(pages.len() as u64);
        let mut at = 0;
        for span in spans {
            self.counts_of(span.tier).found.add(span.pages as u64);
            at += span.pages;
        }
        self.counts.missed.add((pages.len() - at.min(pages.len())) as u64);
        let by_use = |policy| matches!(policy, WritePolicy::Selective(_) | WritePolicy::Back);
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
