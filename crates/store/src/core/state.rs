//! The state that must change together, under one lock.
//!
//! Each component keeps its own invariants; the functions of this module change several components
//! in one step.

use super::absence::Absence;
use super::limits::index_memory::IndexMemory;
use super::reservations::Reservations;
use super::residents::Residents;
use super::space::StoreSpace;
use super::step::STEP_RUNS;
use crate::lease::LeaseTable;
use parking_lot::{Condvar, Mutex, MutexGuard};
use ritornello_format::{Extent, SegmentId};
use ritornello_index::{Removed, RunId};
use std::collections::BTreeSet;

/// State that must change together: finding a run, pinning it and freeing its space exclude one
/// another. The state's lock is held across I/O only while the index `lsm` accesses its files, and
/// a probe does not take it.
pub(crate) struct State {
    pub(super) space: StoreSpace,
    pub(super) residents: Residents,
    pub(super) leases: LeaseTable,
    pub(super) reservations: Reservations,
    pub(super) absence: Absence,
    pub(super) unsynced: Unsynced,
    pub(super) removals: PendingRemovals,
    pub(super) index_memory: IndexMemory,
}

/// Counts the removals that the index has made and that are not completely applied to the other
/// components.
#[derive(Debug, Default)]
pub(crate) struct PendingRemovals {
    /// Calls of [`StateLock::apply_removals`] in progress.
    pub(super) in_steps: usize,
    /// Number of scopes whose runs the index is removing.
    pub(super) dropping: usize,
}

/// Changes that the next sync round makes durable.
#[derive(Debug, Default)]
pub(super) struct Unsynced {
    /// Segments that were written and not synced since.
    pub(super) segments: BTreeSet<SegmentId>,
    /// Whether pages were used: their recency is not durable yet.
    pub(super) uses: bool,
}

impl Unsynced {
    pub(super) fn note(&mut self, extents: &[Extent]) {
        self.segments.extend(extents.iter().map(|extent| extent.segment));
    }
}

impl State {
    /// Applies removals from the index. Extents go into limbo, or are deferred while their run is
    /// leased. Returns the number of removed pages, and the extents of `damaged_run`, whose bytes
    /// failed verification. The extents of `damaged_run` are not freed: the caller quarantines
    /// them.
    pub(super) fn apply_removals(
        &mut self,
        removed: Vec<Removed>,
        damaged_run: Option<RunId>,
    ) -> (u64, Vec<Extent>) {
        let (mut pages, mut damaged_extents) = (0, Vec::new());
        for gone in removed {
            pages += u64::from(gone.pages);
            self.residents.remove(&gone);
            // The space of an absent segment is never freed.
            let extents = self.space.only_present(gone.extents);
            if damaged_run == Some(gone.run) {
                damaged_extents.extend(extents);
            } else {
                let free = self.leases.defer(gone.run, extents);
                self.space.add_to_limbo(free);
            }
        }
        (pages, damaged_extents)
    }

    /// Ends a lease, and adds to the limbo the space that no lease defers any longer.
    pub(super) fn release_lease(&mut self, lease: u64) {
        let freed = self.leases.release(lease);
        self.space.add_to_limbo(freed);
    }
}

pub(crate) struct StateLock {
    state: Mutex<State>,
    /// Signals that a removal is completely applied.
    removals_applied: Condvar,
}

impl StateLock {
    pub(super) fn new(state: State) -> Self {
        Self { state: Mutex::new(state), removals_applied: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Calls `step` under the lock until it returns false, and lets waiting threads take the lock
    /// between two calls.
    pub(super) fn in_steps(&self, mut step: impl FnMut(&mut State) -> bool) {
        loop {
            let mut state = self.state.lock();
            let more = step(&mut state);
            MutexGuard::unlock_fair(state);
            if !more {
                return;
            }
        }
    }

    /// Applies removals from the index in the given order, as [`State::apply_removals`] does, and
    /// lets waiting threads take the lock after every [`STEP_RUNS`] removals.
    pub(super) fn apply_removals(
        &self,
        state: &mut MutexGuard<'_, State>,
        removed: Vec<Removed>,
        damaged_run: Option<RunId>,
    ) -> (u64, Vec<Extent>) {
        let (mut pages, mut damaged_extents) = (0, Vec::new());
        let mut removed = removed.into_iter().peekable();
        state.removals.in_steps += 1;
        while removed.peek().is_some() {
            let (more, found) =
                state.apply_removals(removed.by_ref().take(STEP_RUNS).collect(), damaged_run);
            pages += more;
            damaged_extents.extend(found);
            if removed.peek().is_some() {
                MutexGuard::bump(state);
            }
        }
        state.removals.in_steps -= 1;
        self.removals_applied.notify_all();
        (pages, damaged_extents)
    }

    /// Waits until no removal is pending, and locks the state.
    pub(super) fn lock_without_removals(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        while state.removals.in_steps + state.removals.dropping > 0 {
            self.removals_applied.wait(&mut state);
        }
        state
    }
}
