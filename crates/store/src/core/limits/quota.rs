//! Usage of each scope, and eviction within a scope that has a quota.
//!
//! A scope with a quota has its own eviction policy, in addition to the store's: least recently
//! used first, and leaves before their ancestors. A put within the quota therefore never evicts
//! pages of another scope.

use crate::catalog::{Refusal, ScopeRef};
use crate::core::StoreCore;
use crate::core::residents::resident;
use crate::core::state::{STEP_RUNS, State};
use crate::eviction::{Eviction, PolicyKind, Resident, Used};
use crate::stats::{SCOPES_SHOWN, ScopeUsage};
use parking_lot::{Condvar, Mutex, MutexGuard};
use ritornello_codec::Codec;
use ritornello_format::{RUN_HEADER_UNITS_MAX, ScopeSlot, UNIT};
use ritornello_index::{Removed, RunId};
use std::collections::HashMap;
use std::time::Instant;

/// The holdings of all scopes.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    scopes: HashMap<ScopeSlot, Holding>,
}

#[derive(Debug, Default)]
struct Holding {
    units: u64,
    pages: u64,
    /// Units promised to puts that are in no reservation yet.
    promised: u64,
    /// The scope's own policy, if it has a quota.
    eviction: Option<Box<dyn Eviction>>,
    /// While the policy is being built: runs added, used or cut since the build began, to be
    /// applied last and in this order.
    pending: Option<Vec<RunId>>,
}

impl Holding {
    /// Returns whether the policy applies an event of `run` now; otherwise records it for later.
    fn applies_now(&mut self, run: RunId) -> bool {
        match &mut self.pending {
            Some(pending) => pending.push(run),
            None => return true,
        }
        false
    }
}

impl Usage {
    /// Creates empty holdings; the scopes in `limited` have a quota.
    pub(crate) fn new(limited: Vec<ScopeSlot>) -> Self {
        let eviction = || Some(PolicyKind::Lru.build());
        let empty = |slot| (slot, Holding { eviction: eviction(), ..Holding::default() });
        Self { scopes: limited.into_iter().map(empty).collect() }
    }

    /// Adds a run.
    pub(crate) fn admit(&mut self, slot: ScopeSlot, resident: &Resident, pages: u64, units: u64) {
        let holding = self.scopes.entry(slot).or_default();
        holding.units += units;
        holding.pages += pages;
        if holding.applies_now(resident.run)
            && let Some(eviction) = &mut holding.eviction
        {
            eviction.admit(resident);
        }
    }

    pub(crate) fn link(&mut self, slot: ScopeSlot, child: RunId, parent: RunId, page: u32) {
        let Some(holding) = self.scopes.get_mut(&slot) else { return };
        if holding.applies_now(child)
            && let Some(eviction) = &mut holding.eviction
        {
            eviction.link(child, parent, page);
        }
    }

    pub(crate) fn hit(&mut self, slot: ScopeSlot, path: &[Used]) {
        let Some(holding) = self.scopes.get_mut(&slot) else { return };
        match (&mut holding.pending, &mut holding.eviction) {
            (Some(pending), _) => pending.extend(path.iter().map(|used| used.run)),
            (None, Some(eviction)) => eviction.hit(path),
            (None, None) => {}
        }
    }

    /// Subtracts removed pages. A moved run takes the same units as before.
    pub(crate) fn remove(&mut self, gone: &Removed) {
        if gone.pages == 0 && !gone.whole {
            return;
        }
        let Some(holding) = self.scopes.get_mut(&gone.scope) else { return };
        let units = gone.extents.iter().map(|extent| u64::from(extent.units)).sum();
        holding.units = holding.units.saturating_sub(units);
        holding.pages = holding.pages.saturating_sub(u64::from(gone.pages));
        if (gone.whole || holding.applies_now(gone.run))
            && let Some(eviction) = &mut holding.eviction
        {
            if gone.whole {
                eviction.remove(gone.run)
            } else {
                eviction.shrink(gone.run, gone.pages)
            }
        }
        if holding.pages == 0 && holding.promised == 0 && holding.eviction.is_none() {
            self.scopes.remove(&gone.scope);
        }
    }

    /// Removes a dropped scope.
    pub(crate) fn drop_scope(&mut self, slot: ScopeSlot) {
        self.scopes.remove(&slot);
    }

    /// Pages and units of a scope.
    pub(crate) fn held(&self, slot: ScopeSlot) -> (u64, u64) {
        self.scopes.get(&slot).map_or((0, 0), |holding| (holding.pages, holding.units))
    }

    /// Whether a scope holds no page, and no put was promised space in it.
    pub(crate) fn is_empty(&self, slot: ScopeSlot) -> bool {
        let held = self.scopes.get(&slot);
        held.is_none_or(|held| held.pages == 0 && held.units == 0 && held.promised == 0)
    }

    /// The policy of a scope with a quota.
    pub(crate) fn eviction(&mut self, slot: ScopeSlot) -> Option<&mut Box<dyn Eviction>> {
        self.scopes.get_mut(&slot)?.eviction.as_mut()
    }

    fn take_eviction(&mut self, slot: ScopeSlot) -> Option<Box<dyn Eviction>> {
        self.scopes.get_mut(&slot)?.eviction.take()
    }

    /// Whether the scope's policy knows all runs of the scope.
    fn is_built(&self, slot: ScopeSlot) -> bool {
        self.scopes.get(&slot).is_some_and(|held| held.eviction.is_some() && held.pending.is_none())
    }

    fn units(&self, slot: ScopeSlot) -> u64 {
        self.scopes.get(&slot).map_or(0, |holding| holding.units + holding.promised)
    }

    /// Promises units to a scope.
    fn promise(&mut self, slot: ScopeSlot, units: u64) {
        self.scopes.entry(slot).or_default().promised += units;
    }

    /// Ends a promise of [`StoreCore::make_quota_space`], kept or not.
    pub(crate) fn release_promise(&mut self, slot: ScopeSlot, units: u64) {
        if let Some(holding) = self.scopes.get_mut(&slot) {
            holding.promised = holding.promised.saturating_sub(units);
        }
    }

    /// The scopes that hold most units, with their pages and units.
    fn largest(&self, count: usize) -> Vec<(ScopeSlot, u64, u64)> {
        let held = self.scopes.iter().map(|(slot, held)| (*slot, held.pages, held.units));
        let mut scopes: Vec<_> = held.collect();
        let most = |held: &(ScopeSlot, u64, u64)| (std::cmp::Reverse(held.2), held.0);
        if scopes.len() > count {
            scopes.select_nth_unstable_by_key(count, most);
            scopes.truncate(count);
        }
        scopes.sort_unstable_by_key(most);
        scopes
    }
}

/// Builds of scopes' own policies, one at a time.
#[derive(Default)]
pub(crate) struct QuotaBuilds {
    /// Before the state in the lock order.
    one_at_a_time: Mutex<()>,
    /// Signals that a policy is complete, or removed.
    ended: Condvar,
}

impl State {
    /// Returns the units of a scope: stored, promised and reserved.
    fn units_of_scope(&self, slot: ScopeSlot) -> u64 {
        self.residents.usage.units(slot) + self.reservations.units_of_scope(slot)
    }
}

impl StoreCore {
    /// Maximum pages of a put that the scope's quota can hold.
    pub(crate) fn pages_within_quota(&self, scope: ScopeRef, page_units: u32) -> usize {
        let Some(quota) = self.scopes.settings(scope.slot).quota_bytes else { return usize::MAX };
        let units = (quota / UNIT).saturating_sub(u64::from(RUN_HEADER_UNITS_MAX));
        usize::try_from(units / u64::from(page_units.max(1))).unwrap_or(usize::MAX)
    }

    /// Promises `units` to a scope. If the scope has a quota, first evicts within the quota, in
    /// steps. The caller ends the promise with [`Usage::release_promise`].
    pub(crate) fn make_quota_space(
        &self,
        slot: ScopeSlot,
        units: u64,
        deadline: Instant,
    ) -> std::result::Result<(), Refusal> {
        let mut state = self.state.lock();
        loop {
            // The promise is made even without a quota, so that a quota set before the write counts
            // these units.
            let most =
                self.scopes.settings(slot).quota_bytes.map_or(u64::MAX, |quota| quota / UNIT);
            let over = (state.units_of_scope(slot) + units).saturating_sub(most);
            if over == 0 {
                state.residents.usage.promise(slot, units);
                return Ok(());
            }
            if self.evict_from(&mut state, slot, over) {
                MutexGuard::bump(&mut state);
            } else if state.residents.usage.is_built(slot) {
                return Err(Refusal::Quota);
            } else if self.quota_builds.ended.wait_until(&mut state, deadline).timed_out() {
                return Err(Refusal::Deadline);
            }
        }
    }

    /// Builds the scope's own policy if the scope has a quota, otherwise drops the policy. Evicts
    /// pages above the quota.
    pub(crate) fn apply_quota(&self, slot: ScopeSlot) {
        let builds = &self.quota_builds;
        let _build = builds.one_at_a_time.lock();
        let Some(quota) = self.scopes.settings(slot).quota_bytes else {
            let eviction = self.state.lock().residents.usage.take_eviction(slot);
            // Dropping a large policy takes time, so it happens outside the lock.
            drop(eviction);
            builds.ended.notify_all();
            return;
        };
        self.build_scope_eviction(slot);
        self.state.in_steps(|state| {
            let over = state.units_of_scope(slot).saturating_sub(quota / UNIT);
            over > 0 && self.evict_from(state, slot, over)
        });
    }

    /// Builds a scope's own policy unless it exists: first from the index, then from the events
    /// recorded since the build began.
    fn build_scope_eviction(&self, slot: ScopeSlot) {
        {
            let mut state = self.state.lock();
            let holding = state.residents.usage.scopes.entry(slot).or_default();
            if holding.eviction.is_some() {
                return;
            }
            holding.eviction = Some(PolicyKind::Lru.build());
            holding.pending = Some(Vec::new());
        }
        let mut runs: Vec<(u64, RunId)> = Vec::new();
        self.index.for_each(&mut |run, view| {
            if view.scope == slot {
                runs.push((view.recency, run));
            }
        });
        runs.sort_unstable();
        let mut runs = runs.into_iter().map(|(_, run)| run);
        self.state.in_steps(|state| {
            // The scope was dropped concurrently.
            let Some(holding) = state.residents.usage.scopes.get_mut(&slot) else { return false };
            let (Some(eviction), Some(pending)) = (&mut holding.eviction, &mut holding.pending)
            else {
                return false;
            };
            let mut next: Vec<RunId> = runs.by_ref().take(STEP_RUNS).collect();
            if next.is_empty() {
                next.extend(pending.drain(..pending.len().min(STEP_RUNS)));
            }
            // During a pending removal the index and the events recorded disagree.
            let whole = next.is_empty() && state.removals.in_steps == 0;
            for run in next {
                match self.index.run(run) {
                    Some(view) => {
                        eviction.admit(&resident(run, view.parent, &view.pages, &view.place));
                    }
                    None => eviction.remove(run),
                }
            }
            if whole {
                holding.pending = None;
            }
            !whole
        });
        self.quota_builds.ended.notify_all();
    }

    /// Applies all quotas after opening: the capacity may have changed, or a crash may have undone
    /// an eviction.
    pub(crate) fn enforce_quotas(&self) {
        for slot in self.scopes.with_quota() {
            self.apply_quota(slot);
        }
        let retaining = self.state.lock().residents.retention.scopes();
        retaining.into_iter().for_each(|slot| self.trim_retention(slot));
    }

    /// The scopes that hold most units.
    pub(crate) fn largest_scopes(&self, state: &State) -> Vec<ScopeUsage> {
        let shown = state.residents.usage.largest(SCOPES_SHOWN).into_iter();
        shown
            .filter_map(|(slot, pages, units)| {
                let scope = self.scopes.by_slot(slot)?;
                let codec = Codec::from_number(scope.codec).map_or("unknown", Codec::word);
                Some(ScopeUsage {
                    id: scope.id.to_string(),
                    model: self.scopes.model(slot),
                    codec: codec.to_owned(),
                    pages,
                    bytes: units * UNIT,
                    quota_bytes: self.scopes.settings(slot).quota_bytes,
                    retained_bytes: state.residents.retention.units_of(slot) * UNIT,
                    retained_bytes_max: self.retained_units_max(slot, state) * UNIT,
                })
            })
            .collect()
    }
}
