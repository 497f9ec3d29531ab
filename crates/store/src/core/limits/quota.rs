//! Quotas: eviction within a scope.
//!
//! A scope with a quota has its own eviction policy, in addition to the store's: least recently
//! used first, and leaves before their ancestors. A put that would exceed the quota therefore
//! evicts pages of the same scope. In a full store, however, a put may evict pages of any scope to
//! find space, even within its quota.

use crate::catalog::{Refusal, ScopeRef};
use crate::core::StoreCore;
use crate::core::residents::resident;
use crate::core::state::State;
use crate::core::step::STEP_RUNS;
use crate::stats::{SCOPES_SHOWN, ScopeUsage};
use parking_lot::{Condvar, Mutex, MutexGuard};
use ritornello_codec::Codec;
use ritornello_format::{RUN_HEADER_UNITS_MAX, ScopeSlot, UNIT};
use ritornello_index::RunId;
use std::time::Instant;

/// Lets one thread at a time build or drop the eviction policy of a scope with a quota.
#[derive(Default)]
pub(crate) struct QuotaBuilds {
    /// Locked while a policy is built or dropped. Precedes the core state's lock in the lock order.
    one_at_a_time: Mutex<()>,
    /// Signals that the build of a policy has ended, or that a policy was removed.
    ended: Condvar,
}

impl State {
    /// Returns the units of a scope: of stored runs, promised to puts (see
    /// [`StoreCore::make_quota_space`]), and reserved.
    fn units_of_scope(&self, slot: ScopeSlot) -> u64 {
        self.residents.usage.units(slot) + self.reservations.units_of_scope(slot)
    }
}

impl StoreCore {
    /// Maximum pages of a put, each of `page_units` units, that the scope's quota can hold;
    /// `usize::MAX` without a quota.
    pub(crate) fn pages_within_quota(&self, scope: ScopeRef, page_units: u32) -> usize {
        let Some(quota) = self.scopes.settings(scope.slot).quota_bytes else { return usize::MAX };
        let units = (quota / UNIT).saturating_sub(u64::from(RUN_HEADER_UNITS_MAX));
        usize::try_from(units / u64::from(page_units.max(1))).unwrap_or(usize::MAX)
    }

    /// Promises `units` to a scope: they count as its usage until the put has a reservation. If the
    /// scope has a quota, first evicts pages of the scope, in steps, until the units fit the quota.
    /// The caller ends the promise with
    /// [`Usage::release_promise`](super::usage::Usage::release_promise).
    ///
    /// # Errors
    /// `Quota` if no further page of the scope may be evicted; `Deadline` if the scope's eviction
    /// policy is still being built at `deadline`.
    pub(crate) fn make_quota_space(
        &self,
        slot: ScopeSlot,
        units: u64,
        deadline: Instant,
    ) -> std::result::Result<(), Refusal> {
        let mut state = self.state.lock();
        loop {
            // Promise the units even without a quota, so that a quota set before the write counts
            // them.
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
            // Drop the policy without the core state's lock, because a large policy takes time to
            // drop.
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

    /// Builds the policy of a scope unless it exists, from the index and from the events recorded
    /// since the build began.
    fn build_scope_eviction(&self, slot: ScopeSlot) {
        if !self.state.lock().residents.usage.begin_build(slot) {
            return;
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
            let Some((eviction, pending)) = state.residents.usage.build(slot) else { return false };
            let mut next: Vec<RunId> = runs.by_ref().take(STEP_RUNS).collect();
            if next.is_empty() {
                next.extend(pending.drain(..pending.len().min(STEP_RUNS)));
            }
            // The build does not end while removals are in progress. The removed pages are no
            // longer in the index, so this policy may not have counted these pages. If the build
            // ended now, the rest of the removals would subtract them from the policy
            // (`Usage::remove`).
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
                state.residents.usage.end_build(slot);
            }
            !whole
        });
        self.quota_builds.ended.notify_all();
    }

    /// Applies all quotas and limits of retention after opening: the capacity may have changed, or
    /// a crash may have undone an eviction.
    pub(crate) fn enforce_quotas(&self) {
        for slot in self.scopes.with_quota() {
            self.apply_quota(slot);
        }
        let retaining = self.state.lock().residents.retention.scopes();
        retaining.into_iter().for_each(|slot| self.trim_retention(slot));
    }

    /// The largest scopes by the units that they hold, at most [`SCOPES_SHOWN`].
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
