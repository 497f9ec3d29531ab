//! Moves runs to a new place, under the same run id and generation.
//!
//! **A crash is harmless at any moment.** The copy is durable before the index names it, so the
//! place that the journal names after a crash, old or new, holds the run. The old place goes into
//! limbo with the journal record that replaces it, or when the leases on the run end. No earlier
//! record names the new place, so if the process ends before this record is durable, the next owner
//! finds the run in its old place, and the new place free.

use super::SpaceDeadline;
use crate::catalog::Refusal;
use crate::core::StoreCore;
use crate::core::maintenance::verify::{Unreadable, Verification};
use crate::core::state::State;
use parking_lot::MutexGuard;
use ritornello_format::{Error, ErrorKind, Extent, PageHash, Place, Result, SegmentId, UNIT};
use ritornello_index::{RunId, RunView};
use ritornello_volume::transfer::{Control, failed_volume};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Copies are synced after this number of bytes, or after [`BATCH_RUNS`].
const BATCH_BYTES: u64 = 32 << 20;
/// Copies are synced after this number of runs, or after [`BATCH_BYTES`].
const BATCH_RUNS: usize = 128;
/// Number of failed copies in succession after which the remaining runs are left for a later
/// attempt. After this number of failed writes on one volume, puts and copies avoid the volume.
const FAILED_COPIES_MAX: u32 = 8;
/// Maximum time that the move of a run waits for free space.
const SPACE_TIMEOUT: Duration = Duration::from_secs(30);

/// A copied run whose index entry still names the old place.
struct Copied {
    run: RunId,
    view: RunView,
    place: Place,
}

/// How the copy of a run ended.
enum Copy {
    Done(Copied),
    /// The run was removed, or has no extents.
    Gone,
    /// A volume of the run, or of its new place, completes no operation.
    Stalled,
}

/// Result of a relocation.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    /// Number of runs moved.
    pub(crate) moved: u64,
    /// Runs for which no space was found, or that cannot be read now.
    pub(crate) stuck: Vec<RunId>,
}

impl StoreCore {
    /// Moves runs to free space, which eviction provides if needed. Skips removed runs and runs on
    /// volumes that have stalled, and removes pages that fail verification.
    ///
    /// # Errors
    /// `Retry` if `control` stopped the work, a copy failed, or a sync has not ended in time: runs
    /// not moved keep their place. `Fatal` if a sync failed: the store is poisoned.
    ///
    /// Begins no further copy after [`FAILED_COPIES_MAX`] failed copies in succession, or after a
    /// failed copy that took [`SPACE_TIMEOUT`] or longer.
    pub(crate) fn relocate(&self, runs: &[RunId], control: &Control) -> Result<Moving> {
        let mut moving = Moving::default();
        let mut batch: Vec<Copied> = Vec::new();
        let (mut bytes, mut has_stalled) = (0, false);
        let (mut failed, mut failures) = (None, 0);
        for &run in runs {
            // A copy has shown that a stalled volume still completes no operation: skip further
            // runs on stalled volumes.
            if has_stalled && self.index.place(run).is_some_and(|at| self.segments.is_stalled(&at))
            {
                continue;
            }
            let begun = Instant::now();
            match self.copy(run, control) {
                Ok(Copy::Done(copied)) => {
                    bytes += copied.place.units() * UNIT;
                    batch.push(copied);
                    failures = 0;
                }
                Ok(Copy::Gone) => {}
                Ok(Copy::Stalled) => has_stalled = true,
                Err(error) if error.kind() == ErrorKind::Miss => moving.stuck.push(run),
                Err(error) if error.kind() != ErrorKind::Retry || control.stop().is_some() => {
                    self.forget_copies(batch);
                    return Err(error);
                }
                Err(error) => {
                    failed.get_or_insert(error);
                    failures += 1;
                    // If the copy waited for space in vain, further copies would too.
                    if failures == FAILED_COPIES_MAX || begun.elapsed() >= SPACE_TIMEOUT {
                        break;
                    }
                }
            }
            if bytes >= BATCH_BYTES || batch.len() == BATCH_RUNS {
                moving.moved += self.switch_to_copies(std::mem::take(&mut batch))?;
                bytes = 0;
            }
        }
        moving.moved += self.switch_to_copies(batch)?;
        failed.map_or(Ok(moving), Err)
    }

    /// Copies a run to free space. The index still names the run's old place.
    ///
    /// # Errors
    /// `Miss` if the run must keep its place.
    fn copy(&self, run: RunId, control: &Control) -> Result<Copy> {
        let Some(view) = self.index.run(run) else { return Ok(Copy::Gone) };
        if view.place.extents.is_empty() {
            return Ok(Copy::Gone);
        }
        let Place { header_units, page_units, .. } = view.place;
        let pages = view.pages.len() as u32;
        let until = SpaceDeadline::until(Instant::now() + SPACE_TIMEOUT);
        let extents = match self.find_space(header_units, page_units, pages, until) {
            Ok(extents) => extents,
            Err(Refusal::NoSpace) => {
                return Err(Error::miss("a run cannot be moved: no space for the copy"));
            }
            Err(refusal) => {
                return Err(Error::retry("a run cannot be moved").with("why", refusal.word()));
            }
        };
        let mut place = Place { extents, ..view.place.clone() };
        // Eviction for the new place may have removed the run, or its tail.
        if !self.is_unchanged(run, &view) {
            self.state.lock().space.free(&place.extents);
            return self.copy(run, control);
        }
        let live: Vec<bool> = view.pages.iter().map(|page| *page != PageHash::NONE).collect();
        let Some(copied) = self.copy_stored(&view.place, &place, &live, control) else {
            return Ok(Copy::Stalled);
        };
        match copied {
            Ok(checksum) => {
                place.header_checksum = checksum;
                Ok(Copy::Done(Copied { run, view, place }))
            }
            Err(error) => {
                let is_stalled =
                    self.segments.is_stalled(&view.place) || self.segments.is_stalled(&place);
                self.free_failed_copy(place.extents, &error);
                if error.kind() == ErrorKind::Retry && is_stalled && control.stop().is_none() {
                    return Ok(Copy::Stalled);
                }
                match error.kind() {
                    // Remove pages that fail verification, and copy the remaining pages.
                    ErrorKind::Miss => {
                        let mut report = Verification::default();
                        self.verify_run(run, &view, &mut report, Unreadable::Keep, control);
                        if self.is_unchanged(run, &view) {
                            Err(error)
                        } else {
                            self.copy(run, control)
                        }
                    }
                    ErrorKind::Invalid => Err(Error::miss("a run cannot be moved").because(error)),
                    _ => Err(error),
                }
            }
        }
    }

    /// Whether a run still holds the same pages in the same place as in `view`.
    fn is_unchanged(&self, run: RunId, view: &RunView) -> bool {
        let now = self.index.run(run);
        now.is_some_and(|now| now.pages == view.pages && now.place == view.place)
    }

    /// Makes copies durable, then names them in the index as the places of their runs. Returns the
    /// number of runs moved.
    fn switch_to_copies(&self, batch: Vec<Copied>) -> Result<u64> {
        if batch.is_empty() {
            return Ok(0);
        }
        let segments: BTreeSet<SegmentId> =
            batch.iter().flat_map(|copied| &copied.place.extents).map(|e| e.segment).collect();
        let segments: Vec<SegmentId> = segments.into_iter().collect();
        if let Err(error) = self.sync_copies(segments) {
            self.forget_copies(batch);
            return Err(error);
        }
        let mut state = self.state.lock();
        let moved =
            batch.into_iter().filter(|copied| self.switch_to_copy(&mut state, copied)).count();
        self.wake_if_limbo_is_large(&state);
        Ok(moved as u64)
    }

    fn switch_to_copy(&self, state: &mut MutexGuard<'_, State>, copied: &Copied) -> bool {
        let Copied { run, view, place } = copied;
        state.space.note_written(&place.extents);
        let same = self.is_unchanged(*run, view);
        let Some(gone) = same.then(|| self.index.relocate(*run, place)).flatten() else {
            state.space.free(&place.extents);
            return false;
        };
        let free = state.leases.defer(*run, gone.extents);
        state.space.add_to_limbo(free);
        // The new place has space for removed pages too. Nothing was copied there, so this space is
        // free without a sync round.
        let holes: Vec<Extent> = (0u32..)
            .zip(&view.pages)
            .filter(|(_, page)| **page == PageHash::NONE)
            .flat_map(|(page, _)| place.page(page))
            .collect();
        state.space.free(&holes);
        self.counters.runs_moved.add(1);
        self.counters.bytes_moved.add(place.units() * UNIT);
        true
    }

    /// Frees the place of a copy that failed with `error`. If the disk failed a write there, treats
    /// the place like the place of a failed put, so that the next attempt does not get it again.
    fn free_failed_copy(&self, extents: Vec<Extent>, error: &Error) {
        let space = &mut self.state.lock().space;
        let reusable = match failed_volume(error) {
            Some(volume) => {
                self.counters.runs_failed.add(1);
                space.note_failed(extents, &[volume])
            }
            None => extents,
        };
        space.free(&reusable);
    }

    /// Frees copies that the index does not name.
    fn forget_copies(&self, batch: Vec<Copied>) {
        let mut state = self.state.lock();
        for copied in batch {
            state.space.free(&copied.place.extents);
        }
    }
}
