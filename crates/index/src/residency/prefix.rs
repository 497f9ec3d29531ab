//! The answer: how far each worker's prefix goes, found by intersecting sets along a chain.

use super::{Holder, Tier, Tiers, Worker};

/// What a worker holds of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The worker.
    pub worker: Worker,
    /// Leading pages that it holds, on whatever tiers.
    pub pages: u32,
    /// How many of them lie on each of [`Tier::ALL`] and on none that is faster. They add up to
    /// `pages`.
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

/// The workers whose prefixes reach a place in a chain, and those whose ended before.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    /// In order of workers, each with its tiers of the last page.
    alive: Vec<(Prefix, Tiers)>,
    /// The shortest first; of equal length, the last worker first.
    done: Vec<Prefix>,
    begun: bool,
}

impl Prefixes {
    /// Goes on by `pages` pages that `holders` hold, in order of workers. `false`: nobody is left.
    pub(super) fn step(&mut self, holders: &[Holder], pages: u32) -> bool {
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
                let goes_on = rest.first().filter(|holder| holder.worker == prefix.worker);
                match goes_on {
                    Some(holder) => *tiers = holder.tiers,
                    None => self.done.push(*prefix),
                }
                goes_on.is_some()
            });
            self.done[ended..].reverse();
        }
        self.again(pages)
    }

    /// Goes on by `pages` pages with the same holders as the last.
    pub(super) fn again(&mut self, pages: u32) -> bool {
        for (prefix, tiers) in &mut self.alive {
            prefix.add(*tiers, pages);
        }
        !self.alive.is_empty()
    }

    /// All of them, the longest first.
    pub(super) fn finish(self) -> Vec<Prefix> {
        let mut all = self.done;
        all.extend(self.alive.iter().rev().map(|(prefix, _)| *prefix));
        all.reverse();
        all
    }
}
