//! The cache: tiers of one list, opened together.

use super::local_tier::{self, LocalTier};
use super::prompt::PromptPages;
use super::rate::RateLimiter;
use super::shared::{RemoteHandle, Shared};
use super::spec::{TierLocation, TierSpec, host_dir};
use super::spill::Spilled;
use super::stats::{CacheStats, snapshot};
use super::tier_policies::{PrefetchPolicy, WritePolicy};
use super::write_queue::PendingPut;
use crate::remote::RemoteTier;
use ritornello_format::residency::Tier;
use ritornello_format::{Error, ErrorKind, PageHash, Result, Scope};
use ritornello_store::{PutOptions, StorePolicy, Ticket, check_sections};
use ritornello_volume::page_memory::{PageSource, PageTarget};
use ritornello_volume::process_id;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Default limit of the bytes that may wait to be written to one tier.
const WRITE_QUEUE_BYTES: u64 = 512 << 20;
/// Maximum time that `flush` and `close` wait for background work. After `CLOSE_TIMEOUT`, threads
/// that hang in a backend are abandoned.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Settings of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Maximum time that a lookup stays pending while pages are fetched from the remote.
    pub prefetch: PrefetchPolicy,
    /// Bytes that may wait to be written to one tier; pages beyond that are dropped.
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
    pub(super) shared: Arc<Shared>,
    process: u32,
}

impl Cache {
    /// Opens the tiers of a list. `open_remote` opens a remote by its address and must not send a
    /// request: a remote that is down now costs hits, like one that fails later.
    ///
    /// # Errors
    /// Errors of opening a store, and of `open_remote`; `Invalid` if the list has no local tier.
    pub fn open(
        list: &[TierSpec],
        settings: &Settings,
        open_remote: impl Fn(&str) -> Result<RemoteTier>,
    ) -> Result<Self> {
        let (mut local_tiers, mut remote) = (Vec::new(), None);
        for (at, spec) in list.iter().enumerate() {
            let (dir, capacity) = match &spec.location {
                TierLocation::Remote(address) => {
                    let tier = open_remote(address.expose())?;
                    remote = Some(RemoteHandle {
                        tier,
                        write: spec.write,
                        rate: RateLimiter::new(spec.rate),
                    });
                    continue;
                }
                TierLocation::Host { dir, capacity } => {
                    (dir.clone().unwrap_or_else(|| host_dir(list)), Some(*capacity))
                }
                TierLocation::Disk { dir, capacity } => (dir.clone(), *capacity),
            };
            let below = list.get(at + 1).is_some_and(|below| below.write == WritePolicy::WriteBack);
            let node = local_tier::open(spec.tier(), dir, capacity, below)?;
            let rate = RateLimiter::new(spec.rate);
            let capacity = capacity.unwrap_or(u64::MAX);
            local_tiers.push(LocalTier {
                kind: spec.tier(),
                node,
                capacity,
                write: spec.write,
                rate,
            });
        }
        if local_tiers.is_empty() {
            return TierSpec::list::<&str>(&[]).and(Err(Error::invalid("a cache has tiers")));
        }
        let shared = Shared::new(local_tiers, remote, settings.prefetch, settings.write_queue);
        for (spec, cap) in list.iter().filter_map(|spec| Some((spec, spec.rate?))) {
            shared.gate(|gate| gate.set_cap(spec.tier(), cap));
        }
        Ok(Self { shared: Arc::new(shared), process: process_id() })
    }

    /// The policy of the lowest local tier, which keeps pages longest.
    ///
    /// # Errors
    /// `Closed` in a forked child, and once the cache is closed.
    pub fn policy(&self) -> Result<StorePolicy> {
        self.check()?;
        let lowest = self.shared.local_tiers.last();
        Ok(lowest.map(|tier| tier.node.policy().clone()).unwrap_or_default())
    }

    /// Starts to read pages, each from the fastest local tier that has it. The cache owns `target`
    /// until the ticket completes. Pages read from a tier below the first are then stored in the
    /// first tier. `parent` is the key of the page before the first page, if any. If `control`
    /// names sections of the pages, a section is reported once all pages have it.
    ///
    /// # Errors
    /// `Invalid` for bad keys, sizes or sections; `Retry` if too many tickets are pending;
    /// `Closed`.
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
        let (shared, first_tier) = (Arc::clone(&self.shared), self.shared.first_tier());
        let bytes = keys.len() as u64 * scope.resolved_page_bytes()?;
        let loading = shared.loads.begin(shared.slowest_of(&scope, &keys), bytes);
        if let Some(last) = keys.last() {
            let last = PageHash::of(&scope.id(), last);
            shared.cancel_promotions(|pages, range| {
                range.end.checked_sub(1).is_some_and(|end| pages.hashes[end] == last)
            });
        }
        first_tier.store().submit_read(keys, target.len(), control, move |keys, control| {
            let outcome = shared.read(&scope, parent.as_deref(), keys, target.as_ref(), control);
            drop(loading);
            Ok(outcome)
        })
    }

    /// Starts to put pages `first..` of a prompt. The bytes are copied before this returns; pages
    /// that staging has no space for are skipped. `keys` holds the keys of the prompt, starting at
    /// its first page. A caller that lacks the earlier keys passes the key of the preceding page as
    /// `parent`; these pages are not written to a remote. The first tier is written immediately,
    /// and the ticket reports that write; lower tiers are written in the background according to
    /// their policies. Pages that the first tier has no space for are written to the lower tiers
    /// from staging.
    ///
    /// # Errors
    /// `Invalid` for bad keys or sizes, or if `first` exceeds the number of keys; `Retry` if too
    /// many tickets are pending; `Closed`.
    pub fn submit_put(
        &self,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        first: usize,
        source: &dyn PageSource,
        options: PutOptions,
        control: Control,
    ) -> Result<Ticket> {
        self.check()?;
        if first > keys.len() {
            return Err(Error::invalid("the first page to put is after the end of the prompt")
                .with("first", first)
                .with("keys", keys.len()));
        }
        let (shared, first_tier) = (&self.shared, self.shared.first_tier());
        let pages = PromptPages::new(Arc::clone(&scope), keys, options.parent)?;
        let range = first..pages.len();
        let options = PutOptions { parent: pages.before(first).map(Into::into), ..options };
        let requested = pages.keys[range.clone()].to_vec();
        let spilled = Arc::<Spilled>::default();
        let keep = {
            let (shared, pages, spilled) =
                (Arc::clone(shared), pages.clone(), Arc::clone(&spilled));
            move |at, staged| shared.spill(&spilled, &pages, first + at, staged)
        };
        let ticket = first_tier
            .store()
            .submit_put_copy_or(scope, requested, source, options, control, keep)?;
        first_tier.rate.reserve(pages.bytes(range.len()));
        shared.record_arrival(first_tier.kind, &pages, range.clone());
        for queue in shared.write_queues.iter().filter(|queue| queue.to != first_tier.kind) {
            // The engine lacked these pages, so a lower tier may have evicted pages that the table
            // lists as present.
            shared.table.forget(queue.to, &pages.hashes, range.clone());
            if queue.policy == WritePolicy::WriteThrough {
                let put = PendingPut {
                    ticket: Some(ticket.clone()),
                    spilled: Some(Arc::clone(&spilled)),
                };
                shared.queue_write(queue, &pages, range.clone(), put);
            }
        }
        Ok(ticket)
    }

    /// Records that computing `tokens` tokens after `before` earlier tokens took `took`: a sample
    /// for the gate.
    pub fn record_prefill(&self, before: u64, tokens: u64, took: Duration) {
        self.shared.gate(|gate| gate.record_prefill(before, tokens, took));
    }

    /// Records that another process loaded `bytes` bytes from `tier` in `took`: a sample for the
    /// gate.
    pub fn record_load(&self, tier: Tier, bytes: u64, took: Duration) {
        if bytes > 0 {
            self.shared.gate(|gate| gate.record_load(tier, bytes, took, self.shared.clock()));
        }
    }

    /// Loads measured since the last call, as bytes and seconds by tier, for another process to
    /// [record](Self::record_load).
    #[must_use]
    pub fn take_loads(&self) -> Vec<(Tier, u64, f64)> {
        let measured = self.shared.take_measured();
        let loads = Tier::ALL.into_iter().zip(measured).filter(|(_, (bytes, _))| *bytes > 0);
        loads.map(|(tier, (bytes, seconds))| (tier, bytes, seconds)).collect()
    }

    /// Records the duration of a load that the gate decided on. `compute` and `recompute` are the
    /// estimates of that decision.
    pub fn record_outcome(&self, load: Duration, compute: Duration, recompute: Duration) {
        self.shared.counts.gate.record_outcome(load, compute, recompute);
    }

    /// Statistics of the cache.
    ///
    /// # Errors
    /// `Closed`.
    pub fn stats(&self) -> Result<CacheStats> {
        self.check()?;
        Ok(snapshot(&self.shared))
    }

    /// Waits for all queued writes to lower tiers, then makes the local tiers durable.
    ///
    /// # Errors
    /// `Retry` if a tier does not finish its writes in time; errors of flushing a store.
    pub fn flush(&self) -> Result<()> {
        self.check()?;
        let until = Instant::now() + FLUSH_TIMEOUT;
        let first_tier = self.shared.first_tier().kind;
        for queue in self.shared.write_queues.iter().filter(|queue| queue.to != first_tier) {
            if queue.policy == WritePolicy::WriteBack {
                while self.shared.write_back_batch(queue, false) && queue.wait_until_empty(until) {}
            }
            if !queue.wait_until_empty(until) {
                return Err(Error::retry("a tier does not finish its queued writes in time"));
            }
        }
        self.shared.local_tiers.iter().try_for_each(|tier| tier.store().flush())
    }

    /// Stops background work and closes the tiers. Queued writes are discarded: call `flush` first.
    ///
    /// # Errors
    /// Errors of the stores.
    pub fn close(&self) -> Result<()> {
        if process_id() != self.process || self.shared.closing.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let shared = &self.shared;
        shared.prefetches.close();
        shared.write_queues.iter().for_each(super::write_queue::WriteQueue::close);
        let until = Instant::now() + CLOSE_TIMEOUT;
        let running = || {
            shared.prefetches.is_running()
                || shared.write_queues.iter().any(|queue| queue.is_running())
        };
        while running() && Instant::now() < until {
            thread::sleep(CLOSE_POLL_INTERVAL);
        }
        let closed: Vec<Result<()>> =
            shared.local_tiers.iter().map(|tier| tier.node.close()).collect();
        closed.into_iter().collect()
    }

    /// Fails if the cache is closed, was opened before a fork, or another store replaced one of its
    /// tiers.
    pub(super) fn check(&self) -> Result<()> {
        let why = if process_id() != self.process {
            "this cache was opened before a fork: open it again in the child"
        } else if self.shared.is_closing() {
            "the cache is closed: open it again"
        } else if self.shared.local_tiers.iter().any(|tier| tier.node.is_replaced()) {
            "another store has taken the place of a tier: open the cache again"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Closed, why))
    }

    /// Whether every call fails with `Closed`.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.check().is_err()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if process_id() == self.process {
            if let Err(error) = self.close() {
                tracing::error!(%error, "a cache was dropped and could not be closed");
            }
        } else {
            // A forked child has neither the threads nor the locks that closing relies on.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}
