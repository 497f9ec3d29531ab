//! Evicting pages: from the store, or from a scope with a quota.

use super::StoreCore;
use super::state::State;
use super::step::STEP_UNITS;
use crate::eviction::Victim;
use parking_lot::MutexGuard;
use ritornello_format::ScopeSlot;

impl StoreCore {
    /// Evicts pages, leaves first, until about `units` units that puts can get are freed. Lets
    /// waiting threads take the lock between steps. Returns whether any page was evicted.
    pub(super) fn evict(&self, state: &mut MutexGuard<'_, State>, units: u64) -> bool {
        let (mut left, mut any) = (units, false);
        while left > 0 {
            if any {
                MutexGuard::bump(state);
            }
            let leaving = state.space.unusable_limbo_units();
            let victims = self.victims(state, None, left);
            if !self.remove_victims(state, None, &victims) {
                break;
            }
            any = true;
            // Do not count space in sealed segments and on avoided volumes, because no put gets it.
            let gone: u64 = victims.iter().map(|victim| victim.units).sum();
            let unusable = state.space.unusable_limbo_units() - leaving;
            left = left.saturating_sub(gone.saturating_sub(unusable));
        }
        any
    }

    /// Evicts about `units`, at most [`STEP_UNITS`], from a scope with a quota, leaves first.
    /// Returns whether any page was evicted.
    pub(super) fn evict_from(&self, state: &mut State, slot: ScopeSlot, units: u64) -> bool {
        let victims = self.victims(state, Some(slot), units);
        self.remove_victims(state, Some(slot), &victims)
    }

    fn victims(&self, state: &mut State, slot: Option<ScopeSlot>, units: u64) -> Vec<Victim> {
        let State { residents, leases, .. } = state;
        let units = units.min(STEP_UNITS);
        residents.victims(slot, units, leases, &self.hidden, self.index.as_ref())
    }

    /// Removes the victims chosen by the store's eviction policy, or by the policy of the scope in
    /// `slot`. Returns whether any page was removed.
    fn remove_victims(
        &self,
        state: &mut State,
        slot: Option<ScopeSlot>,
        victims: &[Victim],
    ) -> bool {
        let mut pages = 0;
        for victim in victims {
            let removed = self.index.truncate(victim.run, victim.keep_pages);
            if removed.is_empty() {
                state.residents.forget_victim(slot, victim.run);
            }
            pages += state.apply_removals(removed, None).0;
        }
        self.counters.evicted_pages.add(pages);
        self.wake_if_limbo_is_large(state);
        pages > 0
    }

    /// Wakes the periodic thread, whose sync makes the limbo reusable.
    pub(super) fn wake_if_limbo_is_large(&self, state: &State) {
        if state.space.is_limbo_large() {
            self.maintenance.wake_periodic();
        }
    }
}
