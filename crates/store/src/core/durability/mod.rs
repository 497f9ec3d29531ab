//! Reclaiming space: eviction, the limbo of freed space, and the sync that empties it.
//!
//! Space freed by an eviction is not reused before the journal record that frees it is durable.
//! Otherwise a crash could revive entries whose place holds another run: the checksums would catch
//! that, but a probe would have promised a hit.

pub(crate) mod numbers;
pub(crate) mod poisoned;

use crate::core::absence::hidden::Hidden;
use crate::core::limits::retention::Retention;
use crate::core::{STEP_RUNS, State, StoreCore};
use crate::eviction::{EvictionContext, Victim};
use crate::lease::LeaseTable;
use parking_lot::MutexGuard;
use ritornello_format::{Extent, Result, ScopeSlot, SegmentId, UNIT};
use ritornello_index::{PrefixIndex, RunId};
use std::time::{Duration, Instant};

/// Maximum units evicted under one hold of the owner's lock, which bounds the delay of waiting
/// threads.
pub(crate) const STEP_UNITS: u64 = (16 << 20) / UNIT;
/// Maximum time that a sync waits for earlier syncs.
const SYNC_TIMEOUT: Duration = Duration::from_secs(300);
/// Unsynced bytes of the index journal that trigger a sync.
pub(crate) const PENDING_BYTES_MAX: u64 = 16 << 20;

/// Answers an eviction policy's queries about runs.
pub(crate) struct ProtectedRuns<'a> {
    pub(crate) leases: &'a LeaseTable,
    pub(crate) retention: &'a Retention,
    /// Runs in absent space: evicting them would free no usable space.
    pub(crate) hidden: &'a Hidden,
    pub(crate) index: &'a dyn PrefixIndex,
}

impl EvictionContext for ProtectedRuns<'_> {
    fn is_protected(&self, run: RunId) -> bool {
        self.leases.is_leased(run) || self.retention.is_retained(run) || self.hidden.is_absent(run)
    }
    fn page_key(&self, run: RunId, page: u32) -> u64 {
        self.index.page(run, page).map_or(0, |page| page.low())
    }
}

impl StoreCore {
    /// Evicts about `units` from segments that are not sealed, leaves first, and passes the lock on
    /// between steps. Returns whether any page was evicted.
    pub(crate) fn evict(&self, state: &mut MutexGuard<'_, State>, units: u64) -> bool {
        let (mut left, mut any) = (units, false);
        while left > 0 {
            if any {
                MutexGuard::bump(state);
            }
            let leaving = state.sealed_limbo_units();
            let State { eviction, leases, retention, .. } = &mut **state;
            let hidden = &self.hidden;
            let held = ProtectedRuns { leases, retention, hidden, index: self.index.as_ref() };
            let victims = eviction.victims(left.min(STEP_UNITS), &held);
            if !self.remove_victims(state, &victims, None) {
                break;
            }
            any = true;
            // Space in sealed segments does not count, because no put can use it.
            let gone: u64 = victims.iter().map(|victim| victim.units).sum();
            left = left.saturating_sub(gone.saturating_sub(state.sealed_limbo_units() - leaving));
        }
        any
    }

    /// Removes the victims chosen by the store's eviction policy, or by the policy of the scope in
    /// `slot`. Returns whether any page was removed.
    pub(crate) fn remove_victims(
        &self,
        state: &mut State,
        victims: &[Victim],
        slot: Option<ScopeSlot>,
    ) -> bool {
        let mut pages = 0;
        for victim in victims {
            let removed = self.index.truncate(victim.run, victim.keep_pages);
            if removed.is_empty() {
                // The index does not know the run. The policy must remove it too, or would choose
                // it again.
                match slot {
                    Some(slot) => state.usage.remove_run(slot, victim.run),
                    None => state.eviction.remove(victim.run),
                }
            }
            pages += state.apply_removals(removed, None).0;
        }
        self.counters.evicted_pages.add(pages);
        self.wake_if_limbo_is_large(state);
        pages > 0
    }

    pub(crate) fn wake_if_limbo_is_large(&self, state: &State) {
        if state.limbo.units() * 2 > state.space.reserve_units() {
            self.periodic.wake();
        }
    }

    /// Syncs the data, then the index, then frees the limbo. Requests that arrive during a round
    /// share the next round. Puts continue during a round; commits made after the data sync began
    /// belong to the next round.
    ///
    /// # Errors
    /// `Fatal`: the store is poisoned. `Retry` if no round could begin.
    pub(crate) fn make_durable(&self) -> Result<()> {
        self.make_durable_by(Instant::now() + SYNC_TIMEOUT)
    }

    /// Like [`StoreCore::make_durable`], if earlier rounds end by `deadline`.
    ///
    /// # Errors
    /// `Retry` if earlier rounds have not ended by `deadline`.
    pub(crate) fn make_durable_by(&self, deadline: Instant) -> Result<()> {
        self.rounds.join(deadline, || self.sync_all())
    }

    /// Runs one sync round.
    fn sync_all(&self) -> Result<()> {
        let started = Instant::now();
        // The limbo is taken before the index seals its records, so that the sealed records include
        // the records which free this space.
        let (limbo, returned) = {
            let mut state = self.state.lock();
            (state.limbo.take(), state.draining.take_undurable())
        };
        let synced = self.index.sync_after(&|| self.sync_dirty());
        // If the removals of this space are durable, it may be drained.
        self.state.lock().draining.put_back(returned, synced.is_ok());
        if let Err(error) = synced {
            self.state.lock().limbo.put_back(limbo);
            return Err(error.with("store", self.options.dir.display()));
        }
        let mut limbo = limbo.chunks(STEP_RUNS);
        self.in_steps(|state| {
            let Some(extents) = limbo.next() else { return false };
            self.free(state, extents);
            state.limbo.remove(extents);
            true
        });
        self.counters.syncs.add(1);
        self.counters.sync_micros.add(started.elapsed().as_micros() as u64);
        Ok(())
    }

    /// Syncs the data of all runs in the index. At most one thread may do this at a time: segments
    /// that another thread took are no longer dirty, and not durable either.
    fn sync_dirty(&self) -> Result<()> {
        let dirty = std::mem::take(&mut self.state.lock().dirty);
        let segments: Vec<_> = dirty.iter().copied().collect();
        let synced = self.segments.sync(&segments);
        if synced.is_err() {
            self.state.lock().dirty.extend(dirty);
        }
        synced
    }

    /// Syncs `segments` between two rounds.
    ///
    /// # Errors
    /// `Fatal` if the sync failed: the store is poisoned. `Retry` if earlier rounds have not ended.
    pub(crate) fn sync_segments(&self, segments: &[SegmentId]) -> Result<()> {
        let _paused = self.rounds.between(Instant::now() + SYNC_TIMEOUT)?;
        self.rounds.check()?;
        self.segments.sync(segments).inspect_err(|error| self.rounds.poison(error))
    }

    /// Returns extents to the allocator. A double free is a bug: the space is leaked rather than
    /// allocated twice.
    pub(crate) fn free(&self, state: &mut State, extents: &[Extent]) {
        for extent in extents {
            if let Err(error) = state.space.free(std::slice::from_ref(extent)) {
                tracing::error!(%error, "freed twice: the extent is left out of use until reopened");
            }
        }
    }

    /// Quarantines space whose bytes failed verification. Above one sixteenth of the store, the
    /// oldest extents go into limbo.
    pub(crate) fn quarantine(&self, state: &mut State, extents: Vec<Extent>) {
        let bound = state.space.capacity_units() / 16;
        state.quarantine_units += extents.iter().map(|e| u64::from(e.units)).sum::<u64>();
        state.quarantine.extend(extents);
        while state.quarantine_units > bound {
            let Some(oldest) = state.quarantine.pop_front() else { break };
            state.quarantine_units -= u64::from(oldest.units);
            state.limbo.add([oldest]);
        }
    }
}

const _: () = assert!(UNIT == 4096, "the arithmetic above counts 4 KiB units");
