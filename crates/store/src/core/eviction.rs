//! Evicting pages: from the store, or from a scope with a quota.

use super::StoreCore;
use super::eviction_cause::EvictionCause;
use super::residents::Spared;
use super::state::State;
use super::step::STEP_UNITS;
use crate::eviction::Victim;
use parking_lot::MutexGuard;
use ritornello_format::ScopeSlot;

/// Units freed on avoided volumes, relative to the units that an eviction needs, after which the
/// eviction stops. If the runs of a chain alternate between an avoided volume and another volume,
/// each usable unit costs one unit on the avoided volume, so a factor of 1 would leave no margin.
const WASTE_FACTOR: u64 = 4;

impl StoreCore {
    /// Evicts pages, leaves first, until at least `units` usable units are freed, or no page can be
    /// evicted, and counts the pages by `cause`. Usable units are neither in sealed segments nor on
    /// avoided volumes; to make room in the index, all units are usable. Lets waiting threads take
    /// the lock between steps. Returns the number of usable units freed, at most `units`; `None` if
    /// no page was evicted.
    ///
    /// For space, spares runs that are only on avoided volumes, because no put gets their space.
    /// After a while these runs are the oldest, so the policy would choose them first. If a step
    /// finds no other victim, evicts runs on avoided volumes that follow an evictable run on a
    /// usable volume. Stops after the step in which the units freed on avoided volumes in this call
    /// reach [`WASTE_FACTOR`] times `units`.
    pub(super) fn evict(
        &self,
        state: &mut MutexGuard<'_, State>,
        units: u64,
        cause: EvictionCause,
    ) -> Option<u64> {
        let (mut left, mut any) = (units, false);
        let mut wasted_max = units.saturating_mul(WASTE_FACTOR);
        let mut spares_followers = true;
        while left > 0 {
            if any {
                MutexGuard::bump(state);
            }
            let for_space = cause == EvictionCause::Space;
            let avoided = state.space.allocator().avoided().filter(|_| for_space);
            let avoided: Vec<u8> = avoided.collect();
            spares_followers &= !avoided.is_empty();
            let leaving = state.space.unusable_limbo_units();
            let wasted = state.space.avoided_limbo_units();
            let spared = Spared { volumes: &avoided, followers: spares_followers };
            let victims = self.victims(state, None, left, spared);
            if !self.remove_victims(state, None, &victims, cause) {
                if spares_followers {
                    spares_followers = false;
                    continue;
                }
                break;
            }
            any = true;
            let gone: u64 = victims.iter().map(|victim| victim.units).sum();
            if !for_space {
                left = left.saturating_sub(gone);
                continue;
            }
            // Do not count space in sealed segments and on avoided volumes, because no put gets it.
            let unusable = state.space.unusable_limbo_units() - leaving;
            left = left.saturating_sub(gone.saturating_sub(unusable));
            let wasted = state.space.avoided_limbo_units().saturating_sub(wasted);
            wasted_max = wasted_max.saturating_sub(wasted);
            if wasted_max == 0 {
                break;
            }
        }
        any.then_some(units - left)
    }

    /// Evicts pages from a scope with a quota, leaves first, until at least `units` or
    /// [`STEP_UNITS`] are freed, whichever is less, or no page can be evicted. Returns whether any
    /// page was evicted.
    pub(super) fn evict_from(&self, state: &mut State, slot: ScopeSlot, units: u64) -> bool {
        let victims = self.victims(state, Some(slot), units, Spared::default());
        self.remove_victims(state, Some(slot), &victims, EvictionCause::Quota)
    }

    /// Chooses victims that hold at least `units` or [`STEP_UNITS`], whichever is less, or fewer
    /// if the policy finds no further victim. Chooses no `spared` run.
    fn victims(
        &self,
        state: &mut State,
        slot: Option<ScopeSlot>,
        units: u64,
        spared: Spared<'_>,
    ) -> Vec<Victim> {
        let State { residents, leases, .. } = state;
        let units = units.min(STEP_UNITS);
        residents.victims(slot, units, leases, &self.hidden, self.index.as_ref(), spared)
    }

    /// Removes the victims chosen by the store's eviction policy, or by the policy of the scope in
    /// `slot`. Returns whether any page was removed.
    fn remove_victims(
        &self,
        state: &mut State,
        slot: Option<ScopeSlot>,
        victims: &[Victim],
        cause: EvictionCause,
    ) -> bool {
        let mut pages = 0;
        let policy = state.residents.followed_policy(slot);
        for victim in victims {
            let removed = self.index.truncate(victim.run, victim.keep_pages);
            if removed.is_empty() {
                state.residents.forget_victim(slot, victim.run);
            }
            self.miss_causes.note_evicted(&removed, cause, policy);
            pages += state.apply_removals(removed, None).0;
        }
        self.count_evicted(pages, cause);
        self.wake_if_limbo_is_large(state);
        pages > 0
    }

    pub(super) fn count_evicted(&self, pages: u64, cause: EvictionCause) {
        let counter = match cause {
            EvictionCause::Space => &self.counters.evicted_space,
            EvictionCause::Quota => &self.counters.evicted_quota,
            EvictionCause::Index => &self.counters.evicted_index,
            EvictionCause::Segment => &self.counters.evicted_segment,
        };
        counter.add(pages);
        self.counters.evicted_pages.add(pages);
    }

    /// Wakes the periodic thread (`maintenance/periodic.rs`) if the limbo is large: the thread then
    /// syncs, which makes the limbo reusable.
    pub(super) fn wake_if_limbo_is_large(&self, state: &State) {
        if state.space.is_limbo_large() {
            self.maintenance.wake_periodic();
        }
    }
}
