//! Retention: eviction skips a run until the time that its put requested, unless the retention is
//! released earlier because a limit is exceeded.
//!
//! The ancestors of a retained run are retained with it, and count towards the limits. A run's
//! retention ends no earlier than the retention of its descendants. Above a limit, the retention
//! that ends first is released. If several end at the same time, the run retained last is released
//! first, so that leaves precede their ancestors.
//!
//! Retention prevents eviction only. Deleting pages, dropping scopes and removing damaged pages end
//! a retention.

use super::retained_runs::Retention;
use crate::core::StoreCore;
use crate::core::durability::PENDING_BYTES_MAX;
use crate::core::state::State;
use crate::core::step::STEP_RUNS;
use parking_lot::MutexGuard;
use ritornello_format::{PageHash, ScopeSlot, UNIT};
use ritornello_index::RunId;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// By default a scope retains at most 1/`DEFAULT_SHARE` of its quota, or, without a quota, of the
/// store's capacity.
const DEFAULT_SHARE: u64 = 4;
/// All scopes together retain at most 1/`STORE_SHARE` of the store's capacity, independently of
/// their settings, so that eviction finds victims among the other pages.
const STORE_SHARE: u64 = 2;
/// Interval at which the time of the store's clock is recorded in the index while runs are
/// retained.
const CLOCK_INTERVAL: Duration = Duration::from_secs(600);

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
    /// clock shows `until`. Does nothing if `until` is zero.
    pub(crate) fn retain(&self, slot: ScopeSlot, pages: &[PageHash], until: u64) {
        if until == 0 {
            return;
        }
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

    /// Extends the retention of a newly linked child's ancestors to the end of the child's
    /// retention. Returns whether further runs were retained: the caller then trims the retention.
    #[must_use]
    pub(crate) fn retain_parents(&self, state: &mut State, slot: ScopeSlot, child: RunId) -> bool {
        let Some(held) = state.residents.retention.get(child) else { return false };
        let parent = self.index.run(child).and_then(|view| view.parent);
        let grew = self.retain_path(state, slot, parent.map(|(parent, _)| parent), held.end);
        if grew {
            // Add the child again: its ancestors were just added, and must precede it in the order.
            state.residents.retention.retain(child, slot, held.units, held.end);
        }
        grew
    }

    /// Retains `run` and its ancestors whose retention ends earlier, ancestors first, so that among
    /// runs with the same end a leaf is added after its ancestors. Returns whether anything
    /// changed.
    fn retain_path(
        &self,
        state: &mut State,
        slot: ScopeSlot,
        run: Option<RunId>,
        end: u64,
    ) -> bool {
        let mut path = Vec::new();
        // The set of seen runs ends the loop even if parents form a ring.
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

    /// Releases retentions that have ended, records the time of the store's clock in the index, and
    /// releases retentions above the limit of the store, which a smaller capacity may have lowered.
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
            if !released.is_empty() || (due && retention.units() > 0) {
                retention.noted = Some(Instant::now());
                self.unretain(retention, &released);
            }
            // The index refuses inserts while much of its journal is unsynced, so further releases
            // wait for a sync.
            !released.is_empty() && self.index.stats().pending_bytes < PENDING_BYTES_MAX
        });
    }

    /// Records in the index that `runs` are no longer retained, and the time of the store's clock.
    fn unretain(&self, retention: &mut Retention, runs: &[RunId]) {
        let changes: Vec<(RunId, u64)> = runs.iter().map(|run| (*run, 0)).collect();
        self.index.retain(&changes, retention.clock.now());
    }
}
