//! What a cache counts.

use super::shared::Shared;
use crate::gate::Decision;
use crate::remote::RemoteStats;
use ritornello_format::residency::Tier;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The name of a tier, as users and metrics have it.
#[must_use]
pub const fn tier_word(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Remote => "remote",
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counts of one tier.
#[derive(Debug, Default)]
pub(super) struct TierCounts {
    pub(super) found: Count,
    pub(super) loaded: Count,
    pub(super) loaded_bytes: Count,
    pub(super) load_micros: Count,
    pub(super) written: Count,
    pub(super) written_bytes: Count,
    pub(super) dropped: Count,
    pub(super) lost: Count,
    pub(super) promoted: Count,
}

impl TierCounts {
    pub(super) fn load(&self, pages: u64, bytes: u64, took: Duration) {
        self.loaded.add(pages);
        self.loaded_bytes.add(bytes);
        self.load_micros.add(took.as_micros() as u64);
    }
}

/// Counts of a cache.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) tiers: [TierCounts; 4],
    pub(super) asked: Count,
    pub(super) missed: Count,
    pub(super) prefetch: PrefetchCounts,
    pub(super) gate: GateCounts,
}

#[derive(Debug, Default)]
pub(super) struct PrefetchCounts {
    pub(super) started: Count,
    pub(super) completed: Count,
    pub(super) cancelled: Count,
    pub(super) declined: Count,
    pub(super) failed: Count,
    pub(super) refused: Count,
    pub(super) pages: Count,
    pub(super) bytes: Count,
}

#[derive(Debug, Default)]
pub(super) struct GateCounts {
    all: Count,
    some: Count,
    none: Count,
    judged: Count,
    load_micros: Count,
    regret_micros: Count,
}

impl GateCounts {
    pub(super) fn decided(&self, found: usize, decision: &Decision) {
        let count = match decision.pages {
            0 => &self.none,
            pages if pages < found => &self.some,
            _ => &self.all,
        };
        count.add(1);
    }

    /// A load that was decided for took so long.
    pub(super) fn judge(&self, load: Duration, compute: Duration, recompute: Duration) {
        self.judged.add(1);
        self.load_micros.add(load.as_micros() as u64);
        if !recompute.is_zero() {
            let regret = (load + compute).saturating_sub(recompute);
            self.regret_micros.add(regret.as_micros() as u64);
        }
    }
}

/// Figures of a cache, since it was opened.
#[derive(Clone, Debug, Serialize)]
pub struct CacheStats {
    /// The tiers, fastest first.
    pub tiers: Vec<TierStats>,
    /// Pages that were asked for, and those of them that were nowhere.
    pub asked_pages: u64,
    /// See there.
    pub missed_pages: u64,
    /// Pages brought up from the remote before they are loaded.
    pub prefetch: PrefetchStats,
    /// What was loaded rather than computed, and whether that was right.
    pub gate: GateStats,
    /// Nodes of the page table.
    pub table_nodes: u64,
    /// Pages that it knows.
    pub table_pages: u64,
}

/// Figures of one tier.
#[derive(Clone, Debug, Serialize)]
pub struct TierStats {
    /// `host`, `disk` or `remote`.
    pub tier: &'static str,
    /// Pages that were found there when a prompt was asked for.
    pub found_pages: u64,
    /// Pages that were loaded from there: to the engine, of the remote to the tier above.
    pub loaded_pages: u64,
    /// Their bytes.
    pub loaded_bytes: u64,
    /// How long that took, all loads together.
    pub load_seconds: f64,
    /// Pages that were written there from the tier above, in the background.
    pub written_pages: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Bytes that wait to be written there.
    pub queued_bytes: u64,
    /// Bytes that wait to be loaded from there.
    pub loading_bytes: u64,
    /// Pages that were not written there: the queue was full, or the tier refused or failed.
    pub dropped_pages: u64,
    /// Pages that had left the tiers above before they could be written there.
    pub lost_pages: u64,
    /// Pages that were put there because they were loaded from below.
    pub promoted_pages: u64,
    /// Calls of the backend.
    pub remote: Option<CallStats>,
}

/// What was asked of a backend.
#[derive(Clone, Debug, Serialize)]
pub struct CallStats {
    /// Calls that were made.
    pub calls: u64,
    /// Of those that were made again.
    pub retries: u64,
    /// Calls that failed in the end.
    pub failures: u64,
    /// Of those: too late.
    pub late: u64,
    /// Calls that were not made, since the remote had failed too often.
    pub spared: u64,
    /// Whether the remote is left alone now.
    pub open: bool,
    /// Pages that were found and did not come: gone, damaged, or too late.
    pub pages_lost: u64,
    /// Pages that were there already when they were to be written.
    pub pages_there: u64,
    /// Objects that came and were not believed: cut, damaged, of another version, or of other pages.
    pub damaged: u64,
    /// Objects without a seal, although the remote has a key.
    pub unsealed: u64,
    /// Objects sealed with a key that the key file does not hold.
    pub unknown_key: u64,
    /// Objects whose seal does not fit: forged, damaged, or two keys have one id.
    pub wrong_tag: u64,
}

/// Figures of prefetching.
#[derive(Clone, Debug, Serialize)]
pub struct PrefetchStats {
    /// Prompts whose pages the remote was asked for.
    pub started: u64,
    /// Those that brought what was worth it.
    pub completed: u64,
    /// Those that were given up on request.
    pub cancelled: u64,
    /// Those that found nothing that is worth it, or for which the first tier has no room.
    pub declined: u64,
    /// Those that ended at a page that did not come, or without an answer.
    pub failed: u64,
    /// Those for which there was no room in the queue.
    pub refused: u64,
    /// Pages that were brought.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Prefetches that wait or are under way.
    pub running: u64,
}

/// Figures of the gate.
#[derive(Clone, Debug, Serialize)]
pub struct GateStats {
    /// Prompts of which all that was found was loaded.
    pub all: u64,
    /// Prompts of which a leading part was.
    pub some: u64,
    /// Prompts of which it was cheaper to compute everything.
    pub none: u64,
    /// Loads whose time was reported.
    pub judged: u64,
    /// That time, all together.
    pub load_seconds: f64,
    /// What those loads took beyond the time that computing all would have taken.
    pub regret_seconds: f64,
}

pub(super) fn snapshot(shared: &Shared) -> CacheStats {
    let queued = shared.loads.queued();
    let counts = &shared.counts;
    let tiers = shared.tiers().map(|tier| {
        let of = &counts.tiers[tier as usize];
        let remote = shared.remote.as_ref().filter(|_| tier == Tier::Remote);
        TierStats {
            tier: tier_word(tier),
            found_pages: of.found.get(),
            loaded_pages: of.loaded.get(),
            loaded_bytes: of.loaded_bytes.get(),
            load_seconds: of.load_micros.get() as f64 / 1e6,
            written_pages: of.written.get(),
            written_bytes: of.written_bytes.get(),
            queued_bytes: shared.write_queue(tier).map_or(0, |queue| queue.queued_bytes()),
            loading_bytes: queued[tier as usize],
            dropped_pages: of.dropped.get(),
            lost_pages: of.lost.get(),
            promoted_pages: of.promoted.get(),
            remote: remote.map(|remote| calls(&remote.tier.stats())),
        }
    });
    let (prefetch, gate, table) = (&counts.prefetch, &counts.gate, shared.table.stats());
    CacheStats {
        tiers: tiers.collect(),
        asked_pages: counts.asked.get(),
        missed_pages: counts.missed.get(),
        prefetch: PrefetchStats {
            started: prefetch.started.get(),
            completed: prefetch.completed.get(),
            cancelled: prefetch.cancelled.get(),
            declined: prefetch.declined.get(),
            failed: prefetch.failed.get(),
            refused: prefetch.refused.get(),
            pages: prefetch.pages.get(),
            bytes: prefetch.bytes.get(),
            running: shared.prefetches.running(),
        },
        gate: GateStats {
            all: gate.all.get(),
            some: gate.some.get(),
            none: gate.none.get(),
            judged: gate.judged.get(),
            load_seconds: gate.load_micros.get() as f64 / 1e6,
            regret_seconds: gate.regret_micros.get() as f64 / 1e6,
        },
        table_nodes: table.nodes,
        table_pages: table.pages,
    }
}

fn calls(stats: &RemoteStats) -> CallStats {
    CallStats {
        calls: stats.calls.calls,
        retries: stats.calls.retries,
        failures: stats.calls.failures,
        late: stats.calls.late,
        spared: stats.calls.spared,
        open: stats.calls.open,
        pages_lost: stats.pages_lost,
        pages_there: stats.pages_there,
        damaged: stats.refused.damaged,
        unsealed: stats.refused.unsealed,
        unknown_key: stats.refused.unknown_key,
        wrong_tag: stats.refused.wrong_tag,
    }
}
