//! Computes the prefix of a chain that each worker holds, by intersecting the sets of holders of
//! consecutive pages.

use super::{Holder, Tier, Tiers, Worker};

/// The prefix of a chain that a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The worker.
    pub worker: Worker,
    /// Number of leading pages that the worker holds, on any tier.
    pub pages: u32,
    /// Number of pages of the prefix by the fastest tier that holds them, in the order of
    /// [`Tier::ALL`]. The sum is `pages`.
    pub on: [u32; Tier::ALL.len()],
}

impl Prefix {
    pub(super) fn empty(worker: Worker) -> Self {
        Self { worker, pages: 0, on: [0; Tier::ALL.len()] }
    }

    pub(super) fn add(&mut self, tiers: Tiers, pages: u32) {
        if let Some(tier) = tiers.fastest() {
            self.on[tier as usize] += pages;
            self.pages += pages;
        }
    }
}

/// The workers whose prefixes reach a position in a chain, and the prefixes that ended before.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    /// Prefixes that have not ended, ordered by worker, each with the worker's tiers of the last
    /// page.
    alive: Vec<(Prefix, Tiers)>,
    /// Prefixes that have ended, the shortest first; if lengths are equal, the highest worker
    /// first.
    done: Vec<Prefix>,
    begun: bool,
}

impl Prefixes {
    /// Advances by `pages` pages that have the holders `holders`, which are ordered by worker.
    /// Returns `false` if every prefix has ended.
    pub(super) fn extend(&mut self, holders: &[Holder], pages: u32) -> bool {
        if !self.begun {
            self.begun = true;
            let first = |holder: &Holder| (Prefix::empty(holder.worker), holder.tiers);
            self.alive.extend(holders.iter().map(first));
        } else {
            let ended = self.done.len();
            let mut rest = holders;
            self.alive.retain_mut(|(prefix, tiers)| {
                let before = rest.iter().take_while(|holder| holder.worker < prefix.worker).count();
                rest = &rest[before..];
                let continued = rest.first().filter(|holder| holder.worker == prefix.worker);
                match continued {
                    Some(holder) => *tiers = holder.tiers,
                    None => self.done.push(*prefix),
                }
                continued.is_some()
            });
            self.done[ended..].reverse();
        }
        self.extend_same(pages)
    }

    /// Advances by `pages` pages that have the holders of the last call. Returns `false` if every
    /// prefix has ended.
    pub(super) fn extend_same(&mut self, pages: u32) -> bool {
        for (prefix, tiers) in &mut self.alive {
            prefix.add(*tiers, pages);
        }
        !self.alive.is_empty()
    }

    /// All prefixes, the longest first.
    pub(super) fn finish(self) -> Vec<Prefix> {
        let mut all = self.done;
        all.extend(self.alive.iter().rev().map(|(prefix, _)| *prefix));
        all.reverse();
        all
    }
}
