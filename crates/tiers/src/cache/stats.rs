//! Statistics of a cache.

use super::load_tracker::LoadTracker;
use crate::gate::LoadDecision;
use crate::remote::{CallCounters, RemoteStats};
use ritornello_format::residency::Tier;
use ritornello_store::{CacheCounters, CacheCounts, CacheQueues};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The name of a tier, for users and metrics.
#[must_use]
pub const fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Remote => "remote",
    }
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct TierCounters {
    pub(super) found: Counter,
    pub(super) loaded: Counter,
    pub(super) loaded_bytes: Counter,
    pub(super) load_micros: Counter,
    pub(super) written: Counter,
    pub(super) written_bytes: Counter,
    pub(super) dropped: Counter,
    pub(super) lost: Counter,
    pub(super) promoted: Counter,
}

impl TierCounters {
    pub(super) fn load(&self, pages: u64, bytes: u64, took: Duration) {
        self.loaded.add(pages);
        self.loaded_bytes.add(bytes);
        self.load_micros.add(took.as_micros() as u64);
    }

    /// The counters as statistics of `tier`; other fields are zero.
    pub(super) fn stats(&self, tier: Tier) -> TierStats {
        TierStats {
            tier: tier_name(tier),
            found_pages: self.found.get(),
            loaded_pages: self.loaded.get(),
            loaded_bytes: self.loaded_bytes.get(),
            load_seconds: self.load_micros.get() as f64 / 1e6,
            written_pages: self.written.get(),
            written_bytes: self.written_bytes.get(),
            queued_bytes: 0,
            loading_bytes: 0,
            dropped_pages: self.dropped.get(),
            lost_pages: self.lost.get(),
            promoted_pages: self.promoted.get(),
            remote: None,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct PrefetchCounters {
    pub(super) started: Counter,
    pub(super) completed: Counter,
    pub(super) cancelled: Counter,
    pub(super) not_worthwhile: Counter,
    pub(super) failed: Counter,
    pub(super) queue_full: Counter,
    pub(super) pages: Counter,
    pub(super) bytes: Counter,
}

impl PrefetchCounters {
    /// The counters as statistics, with `running` prefetches queued or running.
    pub(super) fn stats(&self, running: u64) -> PrefetchStats {
        PrefetchStats {
            started: self.started.get(),
            completed: self.completed.get(),
            cancelled: self.cancelled.get(),
            not_worthwhile: self.not_worthwhile.get(),
            failed: self.failed.get(),
            queue_full: self.queue_full.get(),
            pages: self.pages.get(),
            bytes: self.bytes.get(),
            running,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct GateCounters {
    all: Counter,
    some: Counter,
    none: Counter,
    judged: Counter,
    load_micros: Counter,
    regret_micros: Counter,
}

impl GateCounters {
    /// Counts a decision that a lookup returns. `found` is the number of local pages that the
    /// engine lacks.
    pub(super) fn decided(&self, found: usize, decision: &LoadDecision) {
        let count = match decision.pages {
            0 => &self.none,
            pages if pages < found => &self.some,
            _ => &self.all,
        };
        count.add(1);
    }

    /// Records the outcome of a load that the gate decided on. A duration `load` of more than a day
    /// counts as a day.
    pub(super) fn record_outcome(&self, load: Duration, compute: Duration, recompute: Duration) {
        let load = load.min(Duration::from_secs(86_400));
        self.judged.add(1);
        self.load_micros.add(load.as_micros() as u64);
        if !recompute.is_zero() {
            let regret = (load + compute).saturating_sub(recompute);
            self.regret_micros.add(regret.as_micros() as u64);
        }
    }

    pub(super) fn stats(&self) -> GateStats {
        GateStats {
            all: self.all.get(),
            some: self.some.get(),
            none: self.none.get(),
            judged: self.judged.get(),
            load_seconds: self.load_micros.get() as f64 / 1e6,
            regret_seconds: self.regret_micros.get() as f64 / 1e6,
        }
    }
}

/// The counters of a cache that its process reports to the owner of the lowest local tier's store.
#[derive(Debug)]
pub(super) struct ReportedCounters {
    pub(super) gate: Arc<GateCounters>,
    pub(super) remote: Option<Arc<CallCounters>>,
    pub(super) loads: Arc<LoadTracker>,
    /// Bytes queued to be written to a tier, or to be promoted to it. No reference to a tier: the
    /// thread that reports must not drop a tier's last reference, and so close the tier.
    pub(super) queued: Vec<(Tier, Arc<AtomicU64>)>,
}

impl CacheCounters for ReportedCounters {
    fn counts(&self) -> CacheCounts {
        let GateCounters { all, some, none, load_micros, regret_micros, .. } = &*self.gate;
        let gate = [all, some, none, load_micros, regret_micros].map(Counter::get);
        let remote = self.remote.as_ref();
        let calls = remote.map(|remote| remote.counts()).unwrap_or_default();
        let durations = remote.map(|remote| remote.durations()).unwrap_or_default();
        let mut counts = gate.into_iter().chain(calls).chain(durations.into_iter().flatten());
        std::array::from_fn(|_| counts.next().unwrap_or_default())
    }

    fn queues(&self) -> CacheQueues {
        let queued = |tier| {
            let of_tier = self.queued.iter().filter(|(to, _)| *to == tier);
            of_tier.map(|(_, bytes)| bytes.load(Relaxed)).sum()
        };
        let tiers = [Tier::Host, Tier::Disk, Tier::Remote];
        let ([host, disk, remote], loading) = (tiers.map(queued), self.loads.queued());
        let [from_host, from_disk, from_remote] = tiers.map(|tier| loading[tier as usize]);
        [host, disk, remote, from_host, from_disk, from_remote]
    }
}

/// Statistics of a cache since it was opened.
#[derive(Clone, Debug, Serialize)]
pub struct CacheStats {
    /// The tiers, fastest first.
    pub tiers: Vec<TierStats>,
    /// Pages of the lookups that got a final answer.
    pub probed_pages: u64,
    /// Pages among [`probed_pages`](Self::probed_pages) that were found on no tier. A page that is
    /// only on the remote counts as missed unless a prefetch of the prompt has ended and found the
    /// page.
    pub missed_pages: u64,
    /// Prefetches from the remote.
    pub prefetch: PrefetchStats,
    /// Decisions of the gate, and the measured times of the decided loads.
    pub gate: GateStats,
    /// Nodes of the page table's tree: rows of consecutive pages that are on the same tiers.
    pub table_nodes: u64,
    /// Pages in the page table.
    pub table_pages: u64,
}

/// Statistics of one tier.
#[derive(Clone, Debug, Serialize)]
pub struct TierStats {
    /// `host`, `disk` or `remote`.
    pub tier: &'static str,
    /// Pages that lookups with a final answer found on the tier.
    pub found_pages: u64,
    /// Pages loaded from the tier: to the engine, or from the remote to the first tier.
    pub loaded_pages: u64,
    /// Bytes of the loaded pages.
    pub loaded_bytes: u64,
    /// Total seconds of the loads from the tier, without the delays by earlier transfers at a rate
    /// limit.
    pub load_seconds: f64,
    /// Pages written to the tier in the background: from the tiers above it, or from staging if the
    /// first tier had no space for them.
    pub written_pages: u64,
    /// Bytes of the written pages.
    pub written_bytes: u64,
    /// Bytes queued to be written to the tier.
    pub queued_bytes: u64,
    /// Bytes of the queued and running loads from the tier.
    pub loading_bytes: u64,
    /// Pages not written to the tier: the queue was full, the write did not end in time, or the
    /// tier refused or failed the write; or, for a remote, the keys from the beginning of the
    /// prompt are unknown.
    pub dropped_pages: u64,
    /// Pages that could not be written because no other tier could supply them in time, and the
    /// pages after them in a chained scope.
    pub lost_pages: u64,
    /// Pages put to the first tier after a load from a lower local tier, even if the put stored
    /// fewer; and pages copied to the first tier before an expected load. Zero for other tiers.
    pub promoted_pages: u64,
    /// Calls of the backend; only for the remote.
    pub remote: Option<CallStats>,
}

/// Calls of a backend and their outcome.
#[derive(Clone, Debug, Serialize)]
pub struct CallStats {
    /// Attempts made, retries included.
    pub calls: u64,
    /// Attempts that were retries.
    pub retries: u64,
    /// Calls that ended with an error or timed out. A panic of the backend is not counted, unless
    /// the caller notices it only after the deadline of the call.
    pub failures: u64,
    /// Failed calls that timed out.
    pub late: u64,
    /// Calls not made because the circuit breaker was open, or because all threads for calls to the
    /// remote were busy and the queue of calls was full.
    pub spared: u64,
    /// Whether the circuit breaker is open now.
    pub open: bool,
    /// Times that the circuit breaker opened.
    pub breaker_openings: u64,
    /// Seconds that the circuit breaker was open, including the current opening.
    pub breaker_open_seconds: f64,
    /// Bytes of objects read from the remote, without answers after their deadline.
    pub read_bytes: u64,
    /// Bytes of objects written to the remote, without writes that ended after their deadline.
    pub written_bytes: u64,
    /// Pages that were found and could not be read: removed, damaged, or timed out.
    pub pages_lost: u64,
    /// Pages that were not written because the remote had them.
    pub pages_present: u64,
    /// Objects rejected as damaged: truncated, with invalid checksums, with an unsupported version,
    /// or with different pages than requested.
    pub damaged: u64,
    /// Objects rejected because they have no seal although the remote has a key.
    pub unsealed: u64,
    /// Objects rejected because the key file lacks the key of their seal.
    pub unknown_key: u64,
    /// Objects rejected because the authenticator does not match: the object is forged or damaged,
    /// or two key files give different keys the same id.
    pub wrong_tag: u64,
}

/// Statistics of prefetching.
#[derive(Clone, Debug, Serialize)]
pub struct PrefetchStats {
    /// Prefetches started.
    pub started: u64,
    /// Prefetches that fetched all pages worth fetching.
    pub completed: u64,
    /// Prefetches cancelled on request, or while they ran when the cache was closed.
    pub cancelled: u64,
    /// Prefetches without a page worth fetching, or without space on the first tier.
    pub not_worthwhile: u64,
    /// Prefetches whose query of the remote failed or was not answered in time; and prefetches, not
    /// cancelled, that could not fetch a page or put it to the first tier.
    pub failed: u64,
    /// Prefetches not started because too many prefetches were queued, because the outcomes of too
    /// many were kept for later lookups, or because no thread could be started.
    pub queue_full: u64,
    /// Pages fetched from the remote and stored on the first tier.
    pub pages: u64,
    /// Bytes of the fetched pages.
    pub bytes: u64,
    /// Prefetches queued or running.
    pub running: u64,
}

/// Statistics of the gate.
#[derive(Clone, Debug, Serialize)]
pub struct GateStats {
    /// Lookups for which the gate chose to load all found pages.
    pub all: u64,
    /// Lookups for which the gate chose to load a leading part of the found pages.
    pub some: u64,
    /// Lookups for which the gate chose to load no page: loading would have saved at most 5 % of
    /// the time to compute, or the lookup forbade loads.
    pub none: u64,
    /// Loads whose duration was reported with
    /// [`Cache::record_outcome`](super::Cache::record_outcome).
    pub judged: u64,
    /// Total seconds of the loads whose time was reported.
    pub load_seconds: f64,
    /// Total seconds by which reported loads, plus the estimated time of computing the tokens after
    /// the loaded pages, exceeded the estimated time of computing all tokens that the engine
    /// lacked.
    pub regret_seconds: f64,
}

impl From<RemoteStats> for CallStats {
    fn from(stats: RemoteStats) -> Self {
        Self {
            calls: stats.calls.calls,
            retries: stats.calls.retries,
            failures: stats.calls.failures,
            late: stats.calls.late,
            spared: stats.calls.spared,
            open: stats.calls.open,
            breaker_openings: stats.calls.openings,
            breaker_open_seconds: stats.calls.open_time.as_secs_f64(),
            read_bytes: stats.calls.read_bytes,
            written_bytes: stats.calls.written_bytes,
            pages_lost: stats.pages_lost,
            pages_present: stats.pages_present,
            damaged: stats.rejected.damaged,
            unsealed: stats.rejected.unsealed,
            unknown_key: stats.rejected.unknown_key,
            wrong_tag: stats.rejected.wrong_tag,
        }
    }
}
