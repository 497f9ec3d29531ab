//! Sets of holders, each stored once and named by a number: millions of pages have few different
//! sets.
//!
//! A cleared worker is removed from every set immediately, without changing pages. A set that
//! thereby becomes empty, or equal to another set, is *stale*: its pages keep its name until
//! [`super::runs::Runs::reclaim`], or a change of the pages, gives them the name of another set.

use super::{Holder, Tiers, Worker};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The name of a set. A name may be reused when no page names the set.
pub(super) type SetId = u32;
/// The empty set, which holes have, and pages of a run that have no holders yet.
pub(super) const EMPTY: SetId = 0;

#[derive(Debug)]
pub(super) struct Sets {
    /// Sets by name. The first set is always [`EMPTY`].
    entries: Vec<Set>,
    free: Vec<SetId>,
    /// Names of sets that are not stale, by contents.
    names: HashMap<Arc<[Holder]>, SetId>,
    /// Number of holders in all sets.
    held: usize,
    /// Number of pages that name a stale set.
    waiting: u64,
}

#[derive(Debug)]
struct Set {
    /// Holders, ordered by worker.
    holders: Arc<[Holder]>,
    /// Number of pages that name the set.
    pages: u64,
    stale: bool,
}

impl Sets {
    pub(super) fn new() -> Self {
        let empty: Arc<[Holder]> = Arc::new([]);
        let names = HashMap::from([(Arc::clone(&empty), EMPTY)]);
        let entries = vec![Set { holders: empty, pages: 0, stale: false }];
        Self { entries, free: Vec::new(), names, held: 0, waiting: 0 }
    }

    #[inline]
    pub(super) fn holders(&self, set: SetId) -> &[Holder] {
        self.entries.get(set as usize).map_or(&[], |entry| &entry.holders)
    }

    /// Number of sets that pages name, without [`EMPTY`]. Includes stale sets.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - 1 - self.free.len()
    }

    pub(super) fn waiting(&self) -> u64 {
        self.waiting
    }

    pub(super) fn is_stale(&self, set: SetId) -> bool {
        self.entries.get(set as usize).is_some_and(|entry| entry.stale)
    }

    /// Bytes of memory that the sets take. The estimate counts the holders, the entry and the name
    /// of each set, and the two counters of its `Arc`.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Set>()
            + self.names.capacity() * (size_of::<(Arc<[Holder]>, SetId)>() + 1)
            + self.len() * 16
            + self.held * size_of::<Holder>()
    }

    /// Moves `pages` pages from `set` to the set that has the holders of `set` and of `more`, which
    /// is ordered by worker. Returns the name of that set.
    pub(super) fn add(&mut self, set: SetId, more: &[Holder], pages: u64) -> SetId {
        let (mut old, mut new) = (self.holders(set), more);
        let known = |holder: &Holder| {
            let at = old.binary_search_by_key(&holder.worker, |other| other.worker);
            at.is_ok_and(|at| old[at].tiers.with(holder.tiers) == old[at].tiers)
        };
        if !self.is_stale(set) && new.iter().all(known) && set != EMPTY {
            return set;
        }
        let mut both = Vec::with_capacity(old.len() + new.len());
        loop {
            let next = [old, new].into_iter().flat_map(<[Holder]>::first).map(|first| first.worker);
            let Some(worker) = next.min() else { break };
            let mut tiers = Tiers::NONE;
            for side in [&mut old, &mut new] {
                if let Some((first, rest)) = side.split_first().filter(|(h, _)| h.worker == worker)
                {
                    tiers = tiers.with(first.tiers);
                    *side = rest;
                }
            }
            both.push(Holder { worker, tiers });
        }
        self.exchange(set, &both, pages)
    }

    /// Moves `pages` pages from `set` to the set that has the same holders except `worker` on
    /// `tiers`. Returns the name of that set.
    pub(super) fn take(&mut self, set: SetId, worker: Worker, tiers: Tiers, pages: u64) -> SetId {
        let holders = self.holders(set);
        let mut left = Vec::with_capacity(holders.len());
        left.extend(holders.iter().filter_map(|holder| {
            let without = holder.tiers.without(tiers);
            match holder.worker == worker {
                true if without.is_empty() => None,
                true => Some(Holder { tiers: without, ..*holder }),
                false => Some(*holder),
            }
        }));
        if left == holders { set } else { self.exchange(set, &left, pages) }
    }

    /// If `set` is stale, moves `pages` pages from `set` to the set that has the same holders and
    /// is not stale, and returns the name of that set. Otherwise returns `set`.
    pub(super) fn refresh(&mut self, set: SetId, pages: u64) -> SetId {
        if !self.is_stale(set) {
            return set;
        }
        let holders = Arc::clone(&self.entries[set as usize].holders);
        self.exchange(set, &holders, pages)
    }

    fn exchange(&mut self, old: SetId, holders: &[Holder], pages: u64) -> SetId {
        let new = match self.names.get(holders) {
            Some(name) => *name,
            None => self.name(holders.into()),
        };
        // Add the pages to the new set before the old set is released: if the new set is the old
        // set, it must not be freed in between.
        if let Some(entry) = self.entries.get_mut(new as usize).filter(|_| new != EMPTY) {
            entry.pages += pages;
        }
        self.release(old, pages);
        new
    }

    fn name(&mut self, holders: Arc<[Holder]>) -> SetId {
        self.held += holders.len();
        let entry = Set { holders: Arc::clone(&holders), pages: 0, stale: false };
        let name = match self.free.pop() {
            Some(name) => {
                self.entries[name as usize] = entry;
                name
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as SetId
            }
        };
        self.names.insert(holders, name);
        name
    }

    /// Subtracts `pages` pages that no longer name `set`, and frees the set if no page names it.
    pub(super) fn release(&mut self, set: SetId, pages: u64) {
        let Some(entry) = self.entries.get_mut(set as usize).filter(|_| set != EMPTY) else {
            return;
        };
        entry.pages -= pages;
        if entry.stale {
            self.waiting -= pages;
        }
        if entry.pages == 0 {
            let holders = std::mem::replace(&mut entry.holders, Arc::new([]));
            self.held -= holders.len();
            if !std::mem::take(&mut entry.stale) {
                self.names.remove(&holders);
            }
            self.free.push(set);
        }
    }

    /// Removes a worker from every set. Visits sets only, not pages.
    pub(super) fn clear(&mut self, worker: Worker) {
        for set in 1..self.entries.len() {
            let entry = &mut self.entries[set];
            let Ok(at) = entry.holders.binary_search_by_key(&worker, |holder| holder.worker) else {
                continue;
            };
            let left: Arc<[Holder]> =
                [&entry.holders[..at], &entry.holders[at + 1..]].concat().into();
            let before = std::mem::replace(&mut entry.holders, Arc::clone(&left));
            self.held -= 1;
            if entry.stale {
                continue;
            }
            self.names.remove(&before);
            match self.names.entry(left) {
                Entry::Vacant(name) => {
                    name.insert(set as SetId);
                }
                Entry::Occupied(_) => {
                    entry.stale = true;
                    self.waiting += entry.pages;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tier;
    use super::*;

    fn holder(worker: u32, tiers: impl Into<Tiers>) -> Holder {
        Holder { worker: Worker(worker), tiers: tiers.into() }
    }

    #[test]
    fn equal_sets_share_a_name_until_unused() {
        let mut sets = Sets::new();
        let one = sets.add(EMPTY, &[holder(2, Tier::Device)], 10);
        let both = sets.add(one, &[holder(1, Tier::Disk)], 4);
        assert_eq!(sets.holders(both), [holder(1, Tier::Disk), holder(2, Tier::Device)]);
        let other = sets.add(EMPTY, &[holder(1, Tier::Disk), holder(2, Tier::Device)], 1);
        assert_eq!((both, sets.len()), (other, 2));
        assert_eq!(
            sets.add(both, &[holder(1, Tier::Disk)], 5),
            both,
            "the set has the holder already"
        );
        assert_eq!(sets.take(both, Worker(1), Tiers::ALL, 5), one);
        assert_eq!(
            sets.take(one, Worker(2), Tier::Host.into(), 11),
            one,
            "the worker does not hold the pages on this tier"
        );
        assert_eq!(sets.take(one, Worker(2), Tiers::ALL, 11), EMPTY);
        assert_eq!((sets.len(), sets.held, sets.names.len()), (0, 0, 1));
    }

    #[test]
    fn clearing_a_worker_makes_sets_stale() {
        let mut sets = Sets::new();
        let one = sets.add(EMPTY, &[holder(1, Tier::Device)], 3);
        let two = sets.add(EMPTY, &[holder(2, Tier::Device)], 3);
        let both = sets.add(EMPTY, &[holder(1, Tier::Device), holder(2, Tier::Device)], 3);
        sets.clear(Worker(2));
        assert_eq!((sets.holders(two), sets.waiting()), (&[][..], 6));
        assert_eq!(sets.holders(both), sets.holders(one));
        assert_eq!((sets.refresh(two, 3), sets.refresh(both, 3)), (EMPTY, one));
        assert_eq!((sets.waiting(), sets.len(), sets.held), (0, 1, 1));
        // The set that is added next may take the freed name of a stale set, and is not stale.
        let next = sets.add(EMPTY, &[holder(7, Tier::Device)], 1);
        assert!(!sets.is_stale(next) && next != one);
    }
}
