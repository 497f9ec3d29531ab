//! State shared by a cache's calls and its threads.

use super::load_tracker::LoadTracker;
use super::local_tier::LocalTier;
use super::prefetch::Prefetches;
use super::prompt::PromptPages;
use super::rate::RateLimiter;
use super::stats::{Counters, TierCounters};
use super::tier_policies::{PrefetchPolicy, WritePolicy};
use super::write_queue::WriteQueue;
use crate::gate::Gate;
use crate::remote::{Prompt, RemoteTier};
use crate::{PageTable, Residence};
use parking_lot::Mutex;
use ritornello_format::residency::Tier;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum pages of the page table; the least recently used pages beyond this number are removed
/// from the table.
const TABLE_PAGES: u64 = 1 << 20;

/// The remote tier of a cache and its settings.
#[derive(Debug)]
pub(super) struct RemoteHandle {
    pub(super) tier: RemoteTier,
    pub(super) write: WritePolicy,
    pub(super) rate: RateLimiter,
}

#[derive(Debug)]
pub(super) struct Shared {
    /// The host and disk tiers; at least one.
    pub(super) local_tiers: Vec<LocalTier>,
    pub(super) remote: Option<RemoteHandle>,
    /// One queue for each tier below the first, and last, if there are two local tiers, the queue
    /// of promotions to the first.
    pub(super) write_queues: Vec<WriteQueue>,
    pub(super) prefetches: Prefetches,
    pub(super) policy: PrefetchPolicy,
    pub(super) table: PageTable,
    pub(super) loads: Arc<LoadTracker>,
    pub(super) counts: Counters,
    pub(super) closing: AtomicBool,
    gate: Mutex<Gate>,
    /// Bytes and seconds of loads that this process measured since the last
    /// [`take_measured`](Self::take_measured), by tier.
    measured: Mutex<[(u64, f64); 4]>,
    opened: Instant,
}

impl Shared {
    pub(super) fn new(
        local_tiers: Vec<LocalTier>,
        remote: Option<RemoteHandle>,
        policy: PrefetchPolicy,
        write_queue: u64,
    ) -> Self {
        let below = local_tiers.iter().skip(1).map(|tier| (tier.kind, tier.write));
        let remotes = remote.iter().map(|slot| (Tier::Remote, slot.write));
        let promotion = local_tiers.first().filter(|_| local_tiers.len() > 1);
        let promotion = promotion.map(|first_tier| (first_tier.kind, WritePolicy::Never));
        let write_queues = below.chain(remotes).chain(promotion);
        let write_queues =
            write_queues.map(|(tier, write)| WriteQueue::new(tier, write, write_queue));
        let write_queues = write_queues.collect();
        Self {
            write_queues,
            local_tiers,
            remote,
            prefetches: Prefetches::default(),
            policy,
            table: PageTable::new(),
            loads: Arc::default(),
            counts: Counters::default(),
            closing: AtomicBool::new(false),
            gate: Mutex::default(),
            measured: Mutex::default(),
            opened: Instant::now(),
        }
    }

    pub(super) fn tiers(&self) -> impl Iterator<Item = Tier> {
        let remotes = self.remote.iter().map(|_| Tier::Remote);
        self.local_tiers.iter().map(|tier| tier.kind).chain(remotes)
    }

    pub(super) fn rates(&self) -> impl Iterator<Item = (Tier, &RateLimiter)> {
        let remotes = self.remote.iter().map(|slot| (Tier::Remote, &slot.rate));
        self.local_tiers.iter().map(|tier| (tier.kind, &tier.rate)).chain(remotes)
    }

    pub(super) fn first_tier(&self) -> &LocalTier {
        &self.local_tiers[0]
    }

    pub(super) fn local_tier(&self, kind: Tier) -> Option<&LocalTier> {
        self.local_tiers.iter().find(|tier| tier.kind == kind)
    }

    pub(super) fn write_queue(&self, to: Tier) -> Option<&WriteQueue> {
        self.write_queues.iter().find(|queue| queue.to == to)
    }

    pub(super) fn counts_of(&self, tier: Tier) -> &TierCounters {
        &self.counts.tiers[tier as usize]
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Seconds on the gate's clock.
    pub(super) fn clock(&self) -> f64 {
        self.opened.elapsed().as_secs_f64()
    }

    pub(super) fn gate<T>(&self, run: impl FnOnce(&mut Gate) -> T) -> T {
        run(&mut self.gate.lock())
    }

    /// Records a load from `tier` in the statistics, in the gate and for
    /// [`take_measured`](Self::take_measured).
    pub(super) fn record_load(&self, tier: Tier, pages: u64, bytes: u64, took: Duration) {
        if bytes == 0 {
            return;
        }
        self.counts_of(tier).load(pages, bytes, took);
        self.gate(|gate| gate.record_load(tier, bytes, took, self.clock()));
        let kept = &mut self.measured.lock()[tier as usize];
        *kept = (kept.0 + bytes, kept.1 + took.as_secs_f64());
    }

    /// Loads measured since the last call, by tier.
    pub(super) fn take_measured(&self) -> [(u64, f64); 4] {
        std::mem::take(&mut *self.measured.lock())
    }

    /// Marks pages as present on a tier.
    pub(super) fn mark_present(&self, tier: Tier, pages: &PromptPages, range: Range<usize>) {
        for new in self.table.claim(tier, Residence::Loading, &pages.hashes, range) {
            self.table.mark_present(tier, &pages.hashes, new, &[]);
        }
    }

    /// Keeps the table within [`TABLE_PAGES`].
    pub(super) fn trim_table(&self) {
        if self.table.stats().pages > TABLE_PAGES {
            for tier in [Tier::Remote, Tier::Disk, Tier::Host] {
                let _ = self.table.evict(tier, TABLE_PAGES as usize / 8);
            }
        }
    }
}

/// Lends the first `end` pages as a prompt of the remote tier.
pub(super) fn with_prompt<T>(
    pages: &PromptPages,
    end: usize,
    run: impl FnOnce(&Prompt<'_>) -> T,
) -> T {
    let keys = pages.refs(0..end);
    run(&Prompt { scope: &pages.id, page_bytes: pages.page_bytes, keys: &keys })
}
