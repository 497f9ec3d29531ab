//! Retention: eviction skips a run until the time that its put named.
//!
//! The ancestors of a retained run are retained with it, and count towards the limits. A run's
//! retention ends no earlier than the retention of its descendants. Above the limit, the retention
//! that ends first is released; if several end at the same time, the latest is released first, so
//! that leaves precede their ancestors.
//!
//! Retention prevents eviction only. Deleting pages, dropping scopes and removing damaged pages end
//! a retention.

use super::store_clock::{RETENTION_MAX, StoreClock};
use crate::core::StoreCore;
use crate::core::durability::PENDING_BYTES_MAX;
use crate::core::state::{STEP_RUNS, State};
use parking_lot::MutexGuard;
use ritornello_format::{PageHash, ScopeSlot, UNIT};
use ritornello_index::RunId;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

/// By default a scope retains at most 1/`DEFAULT_SHARE` of its quota, or of the store.
const DEFAULT_SHARE: u64 = 4;
/// All scopes together retain at most 1/`STORE_SHARE` of the store, independent of their settings,
/// so that eviction always finds victims.
const STORE_SHARE: u64 = 2;
/// Interval of durable clock records while runs are retained.
const CLOCK_INTERVAL: Duration = Duration::from_secs(600);

/// End, reversed order of arrival, and run: the smallest is released first.
type End = (u64, Reverse<u64>, RunId);

#[derive(Clone, Copy, Debug)]
struct Retained {
    slot: ScopeSlot,
    end: u64,
    order: u64,
    units: u64,
}

impl Retained {
    fn key(&self, run: RunId) -> End {
        (self.end, Reverse(self.order), run)
    }
}

/// The retained runs.
#[derive(Debug)]
pub(crate) struct Retention {
    clock: StoreClock,
    runs: HashMap<RunId, Retained>,
    ends: BTreeSet<End>,
    scopes: HashMap<ScopeSlot, (u64, BTreeSet<End>)>,
    units: u64,
    order: u64,
    /// When the clock was last recorded.
    noted: Option<Instant>,
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

    /// Retains a run that a former owner retained until `end`.
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

    /// Retained units of a scope.
    pub(crate) fn units_of(&self, slot: ScopeSlot) -> u64 {
        self.scopes.get(&slot).map_or(0, |(units, _)| *units)
    }

    /// Scopes with retained runs.
    pub(crate) fn scopes(&self) -> Vec<ScopeSlot> {
        self.scopes.keys().copied().collect()
    }

    fn end_of(&self, run: RunId) -> Option<u64> {
        self.runs.get(&run).map(|held| held.end)
    }

    /// Retains a run, or changes its end.
    fn retain(&mut self, run: RunId, slot: ScopeSlot, units: u64, end: u64) {
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

    /// Subtracts the tail that a run lost.
    pub(crate) fn shrink(&mut self, run: RunId, gone: u64) {
        let Some(held) = self.runs.get_mut(&run) else { return };
        let gone = gone.min(held.units);
        held.units -= gone;
        self.units -= gone;
        if let Some((total, _)) = self.scopes.get_mut(&held.slot) {
            *total -= gone;
        }
    }

    /// Releases runs whose end is not after `now`, at most [`STEP_RUNS`].
    fn expire(&mut self, now: u64) -> Vec<RunId> {
        let ended = self.ends.iter().take_while(|(end, ..)| *end <= now).take(STEP_RUNS);
        let ended: Vec<RunId> = ended.map(|(_, _, run)| *run).collect();
        ended.iter().for_each(|run| self.release(*run));
        ended
    }

    /// Releases runs of one scope above `most` units, at most [`STEP_RUNS`].
    fn trim_scope(&mut self, slot: ScopeSlot, most: u64) -> Vec<RunId> {
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

    /// Releases runs of all scopes above `most` units, at most [`STEP_RUNS`].
    fn trim(&mut self, most: u64) -> Vec<RunId> {
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

impl StoreCore {
    /// Maximum units that a scope may retain.
    pub(crate) fn retained_units_max(&self, slot: ScopeSlot, state: &State) -> u64 {
        let settings = self.scopes.settings(slot);
        let store = state.space.allocator().capacity_units();
        let share = settings.quota_bytes.map_or(store, |quota| store.min(quota / UNIT));
        let own = settings.retained_bytes.map_or(share / DEFAULT_SHARE, |bytes| bytes / UNIT);
        own.min(store / STORE_SHARE)
    }

    /// Retains the runs of the stored pages among `pages`, and their ancestors, until the system
    /// clock shows `until`.
    pub(crate) fn retain(&self, slot: ScopeSlot, pages: &[PageHash], until: u64) {
        let mut state = self.state.lock();
        let Some(end) = state.residents.retention.clock.end(until) else { return };
        let mut last = None;
        for (at, page) in (1..).zip(pages) {
            if at % STEP_RUNS == 0 {
                MutexGuard::bump(&mut state);
            }
            let Some((run, _)) = self.index.locate(slot, *page) else { continue };
            if last.replace(run) != Some(run) {
                self.retain_path(&mut state, slot, Some(run), end);
            }
        }
        drop(state);
        self.trim_retention(slot);
    }

    /// Extends the retention of a newly linked child's ancestors to its own end. Returns whether
    /// further runs were retained; the caller then trims.
    #[must_use]
    pub(crate) fn retain_parents(&self, state: &mut State, slot: ScopeSlot, child: RunId) -> bool {
        let Some(held) = state.residents.retention.runs.get(&child).copied() else { return false };
        let parent = self.index.run(child).and_then(|view| view.parent);
        let grew = self.retain_path(state, slot, parent.map(|(parent, _)| parent), held.end);
        if grew {
            // The ancestors were just added, so the child is added again to follow them in the
            // order.
            state.residents.retention.retain(child, slot, held.units, held.end);
        }
        grew
    }

    /// Retains `run` and its ancestors whose retention ends earlier. Starts at the root, so that
    /// among runs with the same end a leaf is added after its ancestors. Returns whether anything
    /// changed.
    fn retain_path(
        &self,
        state: &mut State,
        slot: ScopeSlot,
        run: Option<RunId>,
        end: u64,
    ) -> bool {
        let mut path = Vec::new();
        // Links may form a ring.
        let mut seen = HashSet::new();
        let mut next = run;
        while let Some(run) = next.filter(|run| seen.insert(*run))
            && state.residents.retention.end_of(run).is_none_or(|known| known < end)
            && let Some(view) = self.index.run(run)
        {
            let units = view.live_extents().iter().map(|extent| u64::from(extent.units)).sum();
            path.push((run, units));
            next = view.parent.map(|(parent, _)| parent);
        }
        let mut changes = Vec::with_capacity(path.len());
        for (run, units) in path.into_iter().rev() {
            state.residents.retention.retain(run, slot, units, end);
            changes.push((run, end));
        }
        self.counters.runs_retained.add(changes.len() as u64);
        if !changes.is_empty() {
            let retention = &mut state.residents.retention;
            self.index.retain(&changes, retention.clock.now());
            retention.noted = Some(Instant::now());
        }
        !changes.is_empty()
    }

    /// Releases retentions above the limits of the scope and of the store.
    pub(crate) fn trim_retention(&self, slot: ScopeSlot) {
        self.state.in_steps(|state| {
            let most = self.retained_units_max(slot, state);
            let retention = &mut state.residents.retention;
            let mut released = retention.trim_scope(slot, most);
            released.extend(retention.trim(state.space.allocator().capacity_units() / STORE_SHARE));
            if !released.is_empty() {
                self.counters.retentions_displaced.add(released.len() as u64);
                self.unretain(retention, &released);
            }
            !released.is_empty()
        });
    }

    /// Releases ended retentions, records the clock, and releases retentions above the limit of a
    /// store that has shrunk.
    pub(crate) fn maintain_retention(&self) {
        let now = self.state.lock().residents.retention.clock.now();
        self.state.in_steps(|state| {
            let retention = &mut state.residents.retention;
            let expired = retention.expire(now);
            let most = state.space.allocator().capacity_units() / STORE_SHARE;
            let mut released = retention.trim(most);
            self.counters.retentions_lapsed.add(expired.len() as u64);
            self.counters.retentions_displaced.add(released.len() as u64);
            released.extend(expired);
            let due = retention.noted.is_none_or(|noted| noted.elapsed() > CLOCK_INTERVAL);
            if !released.is_empty() || (due && retention.units > 0) {
                retention.noted = Some(Instant::now());
                self.unretain(retention, &released);
            }
            // Inserts are refused while much of the journal is unsynced, so further releases wait
            // for a sync.
            !released.is_empty() && self.index.stats().pending_bytes < PENDING_BYTES_MAX
        });
    }

    /// Records the end of retentions, and the clock.
    fn unretain(&self, retention: &mut Retention, runs: &[RunId]) {
        let changes: Vec<(RunId, u64)> = runs.iter().map(|run| (*run, 0)).collect();
        self.index.retain(&changes, retention.clock.now());
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
        // A root and two leaves that end together, a run that ends later, and a run of a different
        // scope.
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
    fn expiry_works_in_steps() {
        let mut retention = Retention::new(StoreClock::starting_at(0, || 0));
        let many = 3 * STEP_RUNS as u64;
        (0..many).for_each(|run| retention.retain(RunId(run), ScopeSlot(1), 1, 50));
        assert_eq!(retention.expire(50).len(), STEP_RUNS);
        assert_eq!(retention.trim_scope(ScopeSlot(1), 0).len(), STEP_RUNS);
        assert_eq!(retention.trim(10).len(), STEP_RUNS - 10);
        assert_eq!(retention.units(), 10);
    }
}
