//! The residency backend `memory`: one map under one lock, the oracle for tests of other backends.

use super::{Holder, Prefix, Residency, ResidencyStats, Tier, Tiers, Worker, check};
use crate::sync::Mutex;
use ritornello_format::{PageHash, PageHashes, Result, ScopeSlot};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

type Holders = BTreeMap<Worker, Tiers>;

/// A residency index in one map under one lock, not durable. Its methods are described at `trait`
/// [`Residency`].
#[derive(Debug)]
pub struct MemoryResidency(Mutex<HashMap<(ScopeSlot, PageHash), Holders>>);

impl Default for MemoryResidency {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryResidency {
    /// An index without pages.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl Residency for MemoryResidency {
    fn put(
        &self,
        scope: ScopeSlot,
        worker: Worker,
        tier: Tier,
        _parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> Result<()> {
        check(pages)?;
        let mut map = self.0.lock();
        for page in pages {
            let tiers = map.entry((scope, *page)).or_default().entry(worker).or_default();
            *tiers = tiers.with(tier.into());
        }
        Ok(())
    }

    fn prefixes(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Prefix> {
        let map = self.0.lock();
        let holders = |at: usize| map.get(&(scope, pages.at(at)));
        let first = if pages.is_empty() { None } else { holders(0) };
        let prefix = |worker: &Worker| {
            let mut prefix = Prefix::empty(*worker);
            let held = (0..pages.len()).map_while(|at| holders(at)?.get(worker));
            held.for_each(|tiers| prefix.add(*tiers, 1));
            prefix
        };
        let mut prefixes: Vec<Prefix> =
            first.into_iter().flat_map(|h| h.keys()).map(prefix).collect();
        prefixes.sort_by_key(|prefix| (Reverse(prefix.pages), prefix.worker));
        prefixes
    }

    fn holders(&self, scope: ScopeSlot, page: PageHash) -> Vec<Holder> {
        let map = self.0.lock();
        let holders = map.get(&(scope, page)).into_iter().flatten();
        holders.map(|(worker, tiers)| Holder { worker: *worker, tiers: *tiers }).collect()
    }

    fn remove_blocks(&self, scope: ScopeSlot, worker: Worker, tiers: Tiers, pages: &[PageHash]) {
        if check(pages).is_err() {
            return;
        }
        let mut map = self.0.lock();
        for page in pages {
            let Some(holders) = map.get_mut(&(scope, *page)) else { continue };
            if let Some(held) = holders.get_mut(&worker) {
                *held = held.without(tiers);
            }
            holders.retain(|_, held| !held.is_empty());
            if holders.is_empty() {
                map.remove(&(scope, *page));
            }
        }
    }

    fn clear_worker(&self, worker: Worker) {
        self.0.lock().retain(|_, holders| {
            holders.remove(&worker);
            !holders.is_empty()
        });
    }

    fn clear_scope(&self, scope: ScopeSlot) {
        self.0.lock().retain(|(of, _), _| *of != scope);
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn maintain(&self) -> Result<()> {
        Ok(())
    }

    fn stats(&self) -> ResidencyStats {
        let map = self.0.lock();
        // Count one leaf of a `BTreeMap` for each page: a leaf has room for eleven entries, which
        // suffice for the holders of most pages.
        let page = size_of::<(ScopeSlot, PageHash, Holders)>() + 1 + 11 * size_of::<Holder>();
        let memory_bytes = (map.len() * page * 8 / 7) as u64;
        ResidencyStats { pages: map.len() as u64, memory_bytes, ..ResidencyStats::default() }
    }
}
