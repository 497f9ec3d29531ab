//! The tiers of a cache, and the state of this process: the page table, the loads in progress, the
//! load gate, and the counters.

use super::load_gate::LoadGate;
use super::load_tracker::LoadTracker;
use super::local_tier::LocalTier;
use super::lookup::TierLease;
use super::prompt::PromptPages;
use super::rate::RateLimiter;
use super::stats::{TierCounters, TierStats};
use crate::remote::RemoteTier;
use crate::{PageTable, Residence};
use ritornello_format::residency::Tier;
use ritornello_format::{Result, Scope};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Number of pages above which the least recently used pages are removed from the page table.
const TABLE_PAGES: u64 = 1 << 20;

/// The remote tier of a cache, and the configured limit of its transfer rate.
#[derive(Debug)]
pub(super) struct RemoteHandle {
    pub(super) tier: RemoteTier,
    pub(super) rate: RateLimiter,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct TierSet {
    /// The host and disk tiers, fastest first; at least one.
    pub(super) local: Vec<LocalTier>,
    pub(super) remote: Option<RemoteHandle>,
    pub(super) table: PageTable,
    pub(super) loads: Arc<LoadTracker>,
    pub(super) gate: LoadGate,
    counts: [TierCounters; 4],
}

impl TierSet {
    pub(super) fn new(local: Vec<LocalTier>, remote: Option<RemoteHandle>) -> Self {
        Self {
            local,
            remote,
            table: PageTable::new(),
            loads: Arc::default(),
            gate: LoadGate::new(),
            counts: Default::default(),
        }
    }

    pub(super) fn kinds(&self) -> impl Iterator<Item = Tier> {
        let remotes = self.remote.iter().map(|_| Tier::Remote);
        self.local.iter().map(|tier| tier.kind).chain(remotes)
    }

    pub(super) fn first(&self) -> &LocalTier {
        &self.local[0]
    }

    pub(super) fn lowest(&self) -> &LocalTier {
        &self.local[self.local.len() - 1]
    }

    pub(super) fn local_tier(&self, kind: Tier) -> Option<&LocalTier> {
        self.local.iter().find(|tier| tier.kind == kind)
    }

    /// Returns the slowest local tier that is faster than `below`.
    pub(super) fn above(&self, below: Tier) -> Option<&LocalTier> {
        self.local.iter().rev().find(|tier| tier.kind < below)
    }

    /// Ends a lease on pages of a local tier.
    ///
    /// # Errors
    /// `Closed` if the tier's store is closed; errors of the connection to its owner.
    pub(super) fn release(&self, lease: TierLease) -> Result<()> {
        self.local_tier(lease.tier).map_or(Ok(()), |tier| tier.store().release(lease.lease))
    }

    /// Returns the fastest local tier that has all pages of `keys`; the slowest local tier if no
    /// tier has them all.
    pub(super) fn fastest_with(&self, scope: &Scope, keys: &[Box<[u8]>]) -> Tier {
        let (last, faster) = self.local.split_last().map_or((self.first(), &[][..]), |split| split);
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let has_all = |tier: &&LocalTier| {
            tier.store().present_prefix(scope, &keys).is_ok_and(|n| n == keys.len())
        };
        faster.iter().find(has_all).unwrap_or(last).kind
    }

    pub(super) fn counts(&self, tier: Tier) -> &TierCounters {
        &self.counts[tier as usize]
    }

    /// Records a load from `tier` in the statistics and in the gate.
    pub(super) fn record_load(&self, tier: Tier, pages: u64, bytes: u64, took: Duration) {
        if bytes > 0 {
            self.counts(tier).load(pages, bytes, took);
            self.gate.record_load(tier, bytes, took);
        }
    }

    /// Returns the bytes of the queued and running loads from each tier. For a tier with a rate
    /// limit, returns the bytes of all waiting transfers to and from the tier, if these are more.
    pub(super) fn pending_load_bytes(&self) -> [u64; 4] {
        let mut queued = self.loads.queued();
        let remotes = self.remote.iter().map(|remote| (Tier::Remote, &remote.rate));
        for (tier, rate) in self.local.iter().map(|tier| (tier.kind, &tier.rate)).chain(remotes) {
            queued[tier as usize] = queued[tier as usize].max(rate.backlog());
        }
        queued
    }

    pub(super) fn mark_present(&self, tier: Tier, pages: &PromptPages, range: Range<usize>) {
        for new in self.table.claim(tier, Residence::Loading, &pages.hashes, range) {
            self.table.mark_present(tier, &pages.hashes, new, &[]);
        }
    }

    /// If the table has more than [`TABLE_PAGES`] pages, removes the least recently used pages of
    /// each tier, at most an eighth of [`TABLE_PAGES`] per tier.
    pub(super) fn trim_table(&self) {
        if self.table.stats().pages > TABLE_PAGES {
            for tier in [Tier::Remote, Tier::Disk, Tier::Host] {
                let _ = self.table.evict(tier, TABLE_PAGES as usize / 8);
            }
        }
    }

    /// Statistics of every tier; `queued_bytes` returns the bytes queued to be written to a tier.
    pub(super) fn stats(&self, queued_bytes: impl Fn(Tier) -> u64) -> Vec<TierStats> {
        let loading = self.loads.queued();
        let stats = |tier: Tier| {
            let remote = self.remote.as_ref().filter(|_| tier == Tier::Remote);
            TierStats {
                queued_bytes: queued_bytes(tier),
                loading_bytes: loading[tier as usize],
                remote: remote.map(|remote| remote.tier.stats().into()),
                ..self.counts(tier).stats(tier)
            }
        };
        self.kinds().map(stats).collect()
    }
}
