//! The cache: the tiers of one list ([`TierSpec`]), opened together.

use super::local_tier::{self, LocalTier};
use super::lookup::{Lookup, LookupOptions, TierLease};
use super::lookups::Lookups;
use super::lower_tiers::LowerTiers;
use super::prefetcher::Prefetcher;
use super::promotion::Promotions;
use super::prompt::name_of;
use super::rate::RateLimiter;
use super::read::Read;
use super::spec::{TierLocation, TierSpec, host_dir};
use super::stats::{CacheStats, Counter, ReportedCounters};
use super::tier_policies::{PrefetchPolicy, WritePolicy};
use super::tier_set::{RemoteHandle, TierSet};
use super::tier_writer::TierWriter;
use crate::remote::RemoteTier;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, ErrorKind, PageHash, Result, Scope, check_keys};
use ritornello_store::{Ticket, check_sections};
use ritornello_volume::page_memory::PageTarget;
use ritornello_volume::process_id;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Default limit of the bytes that may wait to be written to one tier.
const WRITE_QUEUE_BYTES: u64 = 512 << 20;
/// Maximum time that [`Cache::flush`] waits for queued writes.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time that [`Cache::close`] waits for background work. After this time it abandons
/// threads that hang in a backend.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Maximum time that a lookup stays pending while pages are fetched from the remote.
    pub prefetch: PrefetchPolicy,
    /// Maximum bytes that wait to be written to one tier; further pages are dropped.
    pub write_queue: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { prefetch: PrefetchPolicy::default(), write_queue: WRITE_QUEUE_BYTES }
    }
}

/// See the [module](super).
#[derive(Debug)]
pub struct Cache {
    pub(super) tiers: Arc<TierSet>,
    pub(super) lower: Arc<LowerTiers>,
    promotions: Arc<Promotions>,
    prefetcher: Arc<Prefetcher>,
    lookups: Lookups,
    /// The counters that this process reports to the owner of the lowest local tier, until this
    /// reference is dropped.
    _reported: Arc<ReportedCounters>,
    closing: AtomicBool,
    process: u32,
}

impl Cache {
    /// Opens the tiers of a list. `open_remote` opens a remote by its address. `open_remote` must
    /// not send a request: a remote that is down must cause misses, but must not fail the opening.
    ///
    /// # Errors
    /// Errors of opening a store, and of `open_remote`; `Invalid` if the list has no local tier, or
    /// the host tier's capacity reaches the memory limit of this process's control group.
    pub fn open(
        list: &[TierSpec],
        settings: &Settings,
        open_remote: impl Fn(&str) -> Result<RemoteTier>,
    ) -> Result<Self> {
        let (mut local_tiers, mut remote) = (Vec::new(), None);
        for (at, spec) in list.iter().enumerate() {
            let (dir, further_dirs, capacity) = match &spec.location {
                TierLocation::Remote(address) => {
                    let tier = open_remote(address.expose())?;
                    remote = Some(RemoteHandle { tier, rate: RateLimiter::new(spec.rate) });
                    continue;
                }
                TierLocation::Host { dir, capacity } => {
                    let dir = dir.clone().unwrap_or_else(|| host_dir(list));
                    (dir, Vec::new(), Some(*capacity))
                }
                TierLocation::Disk { dir, further_dirs, capacity } => {
                    (dir.clone(), further_dirs.clone(), *capacity)
                }
            };
            let below = list.get(at + 1).is_some_and(|below| below.write == WritePolicy::WriteBack);
            let node = local_tier::open(spec.tier(), dir, further_dirs, capacity, below)?;
            let rate = RateLimiter::new(spec.rate);
            let capacity = capacity.unwrap_or(u64::MAX);
            local_tiers.push(LocalTier { kind: spec.tier(), node, capacity, rate });
        }
        if local_tiers.is_empty() {
            return TierSpec::list::<&str>(&[]).and(Err(Error::invalid("no local tier")));
        }
        let tiers = Arc::new(TierSet::new(local_tiers, remote));
        for (spec, cap) in list.iter().filter_map(|spec| Some((spec, spec.rate?))) {
            tiers.gate.set_cap(spec.tier(), cap);
        }
        let policies: Vec<_> = list.iter().map(|spec| (spec.tier(), spec.write)).collect();
        let lower = Arc::new(LowerTiers::new(&tiers, &policies, settings.write_queue));
        let promotions = Arc::new(Promotions::new(&tiers, settings.write_queue));
        let prefetcher = Prefetcher::new(&tiers, &lower);
        let lookups = Lookups {
            tiers: Arc::clone(&tiers),
            lower: Arc::clone(&lower),
            promotions: Arc::clone(&promotions),
            prefetcher: Arc::clone(&prefetcher),
            policy: settings.prefetch,
            probed: Counter::default(),
            missed: Counter::default(),
        };
        let remote = tiers.remote.as_ref().map(|remote| Arc::clone(remote.tier.call_counters()));
        let writers = lower.writers.iter().chain(&promotions.writer);
        let reported = Arc::new(ReportedCounters {
            gate: Arc::clone(&tiers.gate.counts),
            remote,
            loads: Arc::clone(&tiers.loads),
            queued: writers.map(|w| (w.to, Arc::clone(w.queue.byte_counter()))).collect(),
        });
        tiers.lowest().node.report_cache(Arc::clone(&reported) as _);
        Ok(Self {
            tiers,
            lower,
            promotions,
            prefetcher,
            lookups,
            _reported: reported,
            closing: AtomicBool::new(false),
            process: process_id(),
        })
    }

    /// Looks up the pages of a prompt, starting at its first page. In an unchained scope `keys` may
    /// name any pages, and the result counts all pages found. The pages to load are leased for
    /// `ttl`. In a chained scope, if the list has a host and a disk tier, pages to load from disk
    /// are promoted to the host tier in the background. The call never waits for a remote: while
    /// the remote is queried or pages are fetched, the result is
    /// [`Querying`](super::Readiness::Querying) or [`Loading`](super::Readiness::Loading), for as
    /// long as the prefetch policy allows, and the caller should repeat the lookup.
    ///
    /// # Errors
    /// `Invalid` for an invalid key, or a scope without a valid page length; `Closed`.
    pub fn lookup(
        &self,
        scope: &Arc<Scope>,
        keys: &[&[u8]],
        ttl: Duration,
        options: &LookupOptions,
    ) -> Result<Lookup> {
        self.check()?;
        check_keys(keys)?;
        self.lookups.lookup(scope, keys, ttl, options)
    }

    /// Ends a lease of this process. A lease that is unknown, or of another process, is ignored.
    ///
    /// # Errors
    /// `Closed`; errors of the connection to the tier's owner.
    pub fn release(&self, lease: TierLease) -> Result<()> {
        self.check()?;
        self.tiers.release(lease)
    }

    /// Cancels prefetches and promotions of a prompt whose request has ended. Returns whether any
    /// were queued or running.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`.
    pub fn cancel(&self, scope: &Scope, keys: &[&[u8]]) -> Result<bool> {
        self.check()?;
        check_keys(keys)?;
        let Some(name) = name_of(scope, keys) else { return Ok(false) };
        let promotions_cancelled = self.promotions.cancel_prompt(name);
        Ok(self.prefetcher.cancel(name) || promotions_cancelled)
    }

    /// Starts to read pages, each from the fastest local tier that has it. The cache owns `target`
    /// until the ticket completes. Pages read from a tier below the first are then stored in the
    /// first tier, if staging has space for them. `parent` is the key of the page before the first
    /// page, if any. If `control` names sections of the pages, a section is reported once its bytes
    /// of all pages are in `target`.
    ///
    /// # Errors
    /// `Invalid` for invalid keys, page lengths or sections; `Retry` if too many tickets are
    /// pending; `Closed`.
    pub fn submit_get(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        parent: Option<Box<[u8]>>,
        target: Arc<dyn PageTarget>,
        control: Control,
    ) -> Result<Ticket> {
        self.check()?;
        check_sections(&scope, &control)?;
        let (tiers, first_tier) = (Arc::clone(&self.tiers), self.tiers.first());
        let bytes = keys.len() as u64 * scope.resolved_page_bytes()?;
        let loading = tiers.loads.begin(tiers.fastest_with(&scope, &keys), bytes);
        if let Some(last) = keys.last() {
            self.promotions.cancel_last(PageHash::of(&scope.id(), last));
        }
        first_tier.store().submit_read(keys, target.len(), control, move |keys, control| {
            let (parent, target) = (parent.as_deref(), target.as_ref());
            let read = Read { tiers: &tiers, scope: &scope, parent, keys, target, control };
            let outcome = read.run();
            drop(loading);
            Ok(outcome)
        })
    }

    /// The time to allow for a transfer of `bytes`, at least `least`: for a get from the tiers of
    /// this machine, or with `is_put` for a put to the first tier. See
    /// [`Store::time_limit`](ritornello_store::Store::time_limit).
    #[must_use]
    pub fn time_limit(&self, bytes: u64, least: Duration, is_put: bool) -> Duration {
        // A put's ticket does not wait for the tiers below the first.
        let tiers = if is_put { &self.tiers.local[..1] } else { &self.tiers.local };
        let limits = tiers.iter().map(|tier| tier.store().time_limit(bytes, least, is_put));
        limits.max().unwrap_or(least)
    }

    /// Records that computing `tokens` tokens after `before` earlier tokens took `took`: a sample
    /// for the gate.
    pub fn record_prefill(&self, before: u64, tokens: u64, took: Duration) {
        self.tiers.gate.record_prefill(before, tokens, took);
    }

    /// Records that another process loaded `bytes` bytes from `tier` in `took`: a sample for the
    /// gate.
    pub fn record_load(&self, tier: Tier, bytes: u64, took: Duration) {
        if bytes > 0 {
            self.tiers.gate.record_other_load(tier, bytes, took);
        }
    }

    /// Returns the loads that this process has measured since the last call, as bytes and seconds
    /// by tier. Another process can [record](Self::record_load) them.
    #[must_use]
    pub fn take_loads(&self) -> Vec<(Tier, u64, f64)> {
        let measured = self.tiers.gate.take_measured();
        let loads = Tier::ALL.into_iter().zip(measured).filter(|(_, (bytes, _))| *bytes > 0);
        loads.map(|(tier, (bytes, seconds))| (tier, bytes, seconds)).collect()
    }

    /// Records the duration of a load that the gate decided on. `compute` and `recompute` are the
    /// fields of that [`LoadDecision`](crate::gate::LoadDecision).
    pub fn record_outcome(&self, load: Duration, compute: Duration, recompute: Duration) {
        self.tiers.gate.counts.record_outcome(load, compute, recompute);
    }

    /// Statistics of the cache.
    ///
    /// # Errors
    /// `Closed`.
    pub fn stats(&self) -> Result<CacheStats> {
        self.check()?;
        let queued_bytes = |tier: Tier| {
            let writer = self.writers().find(|writer| writer.to == tier);
            writer.map_or(0, |writer| writer.queue.queued_bytes())
        };
        let table = self.tiers.table.stats();
        Ok(CacheStats {
            tiers: self.tiers.stats(queued_bytes),
            probed_pages: self.lookups.probed.get(),
            missed_pages: self.lookups.missed.get(),
            prefetch: self.prefetcher.stats(),
            gate: self.tiers.gate.counts.stats(),
            table_nodes: table.nodes,
            table_pages: table.pages,
        })
    }

    /// Writes all dirty pages, waits for all queued writes to lower tiers, then makes the local
    /// tiers durable.
    ///
    /// # Errors
    /// `Closed`; `Retry` if the writes to the lower tiers are not finished after 60 seconds; errors
    /// of flushing a store.
    pub fn flush(&self) -> Result<()> {
        self.check()?;
        self.lower.flush(Instant::now() + FLUSH_TIMEOUT)?;
        self.tiers.local.iter().try_for_each(|tier| tier.store().flush())
    }

    /// Stops background work and closes the tiers. Queued writes are discarded: call `flush` first.
    ///
    /// # Errors
    /// Errors of the stores.
    pub fn close(&self) -> Result<()> {
        if process_id() != self.process || self.closing.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let queues: Vec<_> = self.writers().map(|writer| &writer.queue).collect();
        self.prefetcher.close();
        queues.iter().for_each(|queue| queue.close());
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        self.prefetcher.wait_ended(deadline);
        queues.iter().for_each(|queue| queue.wait_ended(deadline));
        let closed: Vec<Result<()>> =
            self.tiers.local.iter().map(|tier| tier.node.close()).collect();
        closed.into_iter().collect()
    }

    fn writers(&self) -> impl Iterator<Item = &Arc<TierWriter>> {
        self.lower.writers.iter().chain(&self.promotions.writer)
    }

    /// Fails with `Closed` if the cache is closed, was opened before a fork, or lost one of its
    /// tiers ([`Node::is_replaced`](ritornello_node::Node::is_replaced)).
    pub(super) fn check(&self) -> Result<()> {
        let why = if process_id() != self.process {
            "this cache was opened before a fork: open it again in the child"
        } else if self.closing.load(Ordering::Acquire) {
            "the cache is closed: open it again"
        } else if self.tiers.local.iter().any(|tier| tier.node.is_replaced()) {
            "a tier is closed, because its path no longer leads to its store: open the cache again"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Closed, why))
    }

    /// Whether the calls that use the tiers fail with `Closed`.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.check().is_err()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if process_id() == self.process {
            if let Err(error) = self.close() {
                tracing::error!(%error, "a cache could not be closed when it was dropped");
            }
        } else {
            // In a forked child closing would wait for threads and locks that do not exist there.
            // Leaked references to the prefetcher and the promotions, which refer to the tiers and
            // all writers, keep these parts from being dropped.
            std::mem::forget((Arc::clone(&self.prefetcher), Arc::clone(&self.promotions)));
        }
    }
}
