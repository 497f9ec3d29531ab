//! The retained runs, in the order in which their retention ends.

use super::store_clock::{RETENTION_MAX, StoreClock};
use crate::core::step::STEP_RUNS;
use ritornello_format::ScopeSlot;
use ritornello_index::RunId;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

/// Sort key of a retention: the time of the store's clock at which it ends, then its number in the
/// order of arrival, latest first, then its run. The retention with the smallest key is released
/// first.
type End = (u64, Reverse<u64>, RunId);

#[derive(Clone, Copy, Debug)]
pub(super) struct Retained {
    slot: ScopeSlot,
    pub(super) end: u64,
    order: u64,
    pub(super) units: u64,
}

impl Retained {
    fn key(&self, run: RunId) -> End {
        (self.end, Reverse(self.order), run)
    }
}

#[derive(Debug)]
pub(crate) struct Retention {
    pub(super) clock: StoreClock,
    runs: HashMap<RunId, Retained>,
    ends: BTreeSet<End>,
    /// For each scope, its retained units, and the ends of its retentions.
    scopes: HashMap<ScopeSlot, (u64, BTreeSet<End>)>,
    units: u64,
    order: u64,
    /// When the time of `clock` was last recorded in the index; `None` if this owner has not
    /// recorded it.
    pub(super) noted: Option<Instant>,
}

impl Retention {
    pub(crate) fn new(clock: StoreClock) -> Self {
        Self {
            clock,
            runs: HashMap::new(),
            ends: BTreeSet::new(),
            scopes: HashMap::new(),
            units: 0,
            order: 0,
            noted: None,
        }
    }

    /// Retains a run that a former owner retained until `end`, but at most [`RETENTION_MAX`] from
    /// now.
    pub(crate) fn restore(&mut self, run: RunId, slot: ScopeSlot, units: u64, end: u64) {
        let end = end.min(self.clock.now().saturating_add(RETENTION_MAX));
        self.retain(run, slot, units, end);
    }

    pub(crate) fn is_retained(&self, run: RunId) -> bool {
        self.runs.contains_key(&run)
    }

    /// Total retained units.
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    pub(crate) fn units_of(&self, slot: ScopeSlot) -> u64 {
        self.scopes.get(&slot).map_or(0, |(units, _)| *units)
    }

    pub(crate) fn scopes(&self) -> Vec<ScopeSlot> {
        self.scopes.keys().copied().collect()
    }

    pub(super) fn get(&self, run: RunId) -> Option<Retained> {
        self.runs.get(&run).copied()
    }

    pub(super) fn end_of(&self, run: RunId) -> Option<u64> {
        self.runs.get(&run).map(|held| held.end)
    }

    /// Retains a run until `end`, which replaces the end of an earlier retention of the run.
    pub(super) fn retain(&mut self, run: RunId, slot: ScopeSlot, units: u64, end: u64) {
        self.release(run);
        self.order += 1;
        let held = Retained { slot, end, order: self.order, units };
        self.runs.insert(run, held);
        self.ends.insert(held.key(run));
        let (total, ends) = self.scopes.entry(slot).or_default();
        *total += units;
        ends.insert(held.key(run));
        self.units += units;
    }

    /// Ends the retention of a run.
    pub(crate) fn release(&mut self, run: RunId) {
        let Some(held) = self.runs.remove(&run) else { return };
        self.ends.remove(&held.key(run));
        self.units -= held.units;
        if let Some((total, ends)) = self.scopes.get_mut(&held.slot) {
            *total -= held.units;
            ends.remove(&held.key(run));
            if ends.is_empty() {
                self.scopes.remove(&held.slot);
            }
        }
    }

    /// Subtracts `gone` units, which were cut off the end of a retained run.
    pub(crate) fn shrink(&mut self, run: RunId, gone: u64) {
        let Some(held) = self.runs.get_mut(&run) else { return };
        let gone = gone.min(held.units);
        held.units -= gone;
        self.units -= gone;
        if let Some((total, _)) = self.scopes.get_mut(&held.slot) {
            *total -= gone;
        }
    }

    /// Releases runs whose retention ends at `now` or before, at most [`STEP_RUNS`].
    pub(super) fn expire(&mut self, now: u64) -> Vec<RunId> {
        let ended = self.ends.iter().take_while(|(end, ..)| *end <= now).take(STEP_RUNS);
        let ended: Vec<RunId> = ended.map(|(_, _, run)| *run).collect();
        ended.iter().for_each(|run| self.release(*run));
        ended
    }

    /// Releases runs of one scope, earliest end first, until it retains at most `most` units.
    /// Releases at most [`STEP_RUNS`] runs.
    pub(super) fn trim_scope(&mut self, slot: ScopeSlot, most: u64) -> Vec<RunId> {
        let mut released = Vec::new();
        while released.len() < STEP_RUNS
            && let Some((total, ends)) = self.scopes.get(&slot)
            && *total > most
            && let Some(&(_, _, run)) = ends.first()
        {
            self.release(run);
            released.push(run);
        }
        released
    }

    /// Releases runs, earliest end first, until all scopes together retain at most `most` units.
    /// Releases at most [`STEP_RUNS`] runs.
    pub(super) fn trim(&mut self, most: u64) -> Vec<RunId> {
        let mut released = Vec::new();
        while released.len() < STEP_RUNS
            && self.units > most
            && let Some(&(_, _, run)) = self.ends.first()
        {
            self.release(run);
            released.push(run);
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(runs: &[RunId]) -> Vec<u64> {
        runs.iter().map(|run| run.0).collect()
    }

    #[test]
    fn earliest_end_is_released_first_leaves_before_roots() {
        let (a, b) = (ScopeSlot(1), ScopeSlot(2));
        let mut retention = Retention::new(StoreClock::starting_at(0, || 0));
        // Retain a root and two leaves that end together, a run that ends later, and a run of a
        // different scope.
        for (run, slot, end) in [(1, a, 50), (2, a, 50), (3, a, 50), (4, a, 90), (5, b, 40)] {
            retention.retain(RunId(run), slot, 10, end);
        }
        assert_eq!((retention.units(), retention.units_of(a), retention.units_of(b)), (50, 40, 10));
        assert_eq!(names(&retention.trim_scope(a, 25)), [3, 2]);
        assert_eq!(names(&retention.trim(20)), [5]);
        retention.shrink(RunId(4), 4);
        assert_eq!((retention.units(), retention.units_of(a)), (16, 16));
        assert!(retention.is_retained(RunId(1)) && !retention.is_retained(RunId(2)));
        assert_eq!(names(&retention.expire(49)), [] as [u64; 0]);
        assert_eq!(names(&retention.expire(50)), [1]);
        retention.release(RunId(4));
        assert_eq!((retention.units(), retention.units_of(a), retention.ends.len()), (0, 0, 0));
        assert!(retention.scopes.is_empty());
    }

    #[test]
    fn one_call_releases_a_bounded_number_of_runs() {
        let mut retention = Retention::new(StoreClock::starting_at(0, || 0));
        let many = 3 * STEP_RUNS as u64;
        (0..many).for_each(|run| retention.retain(RunId(run), ScopeSlot(1), 1, 50));
        assert_eq!(retention.expire(50).len(), STEP_RUNS);
        assert_eq!(retention.trim_scope(ScopeSlot(1), 0).len(), STEP_RUNS);
        assert_eq!(retention.trim(10).len(), STEP_RUNS - 10);
        assert_eq!(retention.units(), 10);
    }
}
