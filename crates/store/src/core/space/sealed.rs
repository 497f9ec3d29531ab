//! Emptying sealed segments: their runs move or are evicted, then their files are removed.

use super::StoreSpace;
use crate::core::StoreCore;
use crate::core::durability::{BACKGROUND_SYNC_TIMEOUT, busy};
use crate::core::eviction_cause::EvictionCause;
use crate::core::miss_causes::MissCause;
use crate::core::shape::ShapeChange;
use ritornello_format::{Error, ErrorKind, Manifest, Result, SegmentId};
use ritornello_index::RunId;
use ritornello_volume::transfer::Control;
use std::time::Instant;

impl StoreSpace {
    /// Releases quarantined space of sealed segments, so that the segments can become empty. This
    /// space is reused only if the segment is unsealed.
    fn release_quarantined(&mut self) {
        let gone = self.quarantine.release(|segment| self.allocator.is_sealed(segment));
        self.limbo.add(gone);
    }

    /// Sealed segments that can be emptied, the emptiest first.
    fn sealed_segments(&self) -> Vec<SegmentId> {
        let mut sealed = self.allocator.sealed();
        // A segment with withheld space must be drained first: this space can be neither moved nor
        // evicted.
        sealed.retain(|id| !self.draining.holds(*id));
        sealed.sort_by_key(|id| std::cmp::Reverse(self.allocator.free_in(*id)));
        sealed
    }
}

impl StoreCore {
    /// Empties and removes sealed segments, shrinks the index's files to their share of the
    /// capacity, and retires drained volumes. Returns true if the work was stopped, the store is
    /// poisoned, or a sealed segment was left. A segment is left, for example, because a run in it
    /// is protected or is the prefix of another run, or because a put writes to the segment.
    /// Segments with withheld space are skipped and do not count as left.
    ///
    /// # Errors
    /// The first error of a volume, after the segments of the other volumes were emptied; the
    /// caller may retry. `Fatal` if a sync failed: the store is poisoned.
    pub(crate) fn maintain_space(&self, control: &Control) -> Result<bool> {
        self.free_given_up_copies();
        self.state.lock().space.release_quarantined();
        let (mut left, mut failed) = (false, Vec::new());
        self.remove_empty_segments(&mut failed)?;
        let sealed = self.state.lock().space.sealed_segments();
        for segment in sealed {
            if control.stop().is_some() || self.lifecycle.is_poisoned() {
                return Ok(true);
            }
            // Skip only the volumes that failed: their errors may concern a single disk.
            if has_failed(&failed, segment) {
                continue;
            }
            match self.empty_segment(segment, control) {
                Err(error) if error.kind() == ErrorKind::Retry => {
                    failed.push((segment.volume(), error));
                    continue;
                }
                emptied => emptied?,
            }
            left |= !self.remove_empty_segments(&mut failed)?.contains(&segment)
                && self.state.lock().space.allocator.is_sealed(segment);
        }
        self.fit_index(control)?;
        self.retire_volumes()?;
        failed.into_iter().next().map_or(Ok(left), |(_, error)| Err(error))
    }

    fn empty_segment(&self, segment: SegmentId, control: &Control) -> Result<()> {
        let mut runs: Vec<(u64, RunId)> = Vec::new();
        self.index.for_each(&mut |run, view| {
            let is_in_segment = view.place.extents.iter().any(|extent| extent.segment == segment);
            if is_in_segment && !self.hidden.is_absent(run) {
                runs.push((view.place.generation, run));
            }
        });
        runs.sort_unstable();
        let runs: Vec<RunId> = runs.into_iter().map(|(_, run)| run).collect();
        let moving = self.relocate(&runs, control)?;
        self.evict_stuck(&moving.stuck);
        self.make_durable_in_background()
    }

    /// Evicts runs for which no other place was found or that cannot be read now, unless they are
    /// protected or are the prefix of other runs.
    fn evict_stuck(&self, runs: &[RunId]) {
        let mut state = self.state.lock();
        for &run in runs {
            let held = state.leases.is_leased(run)
                || state.residents.retention.is_retained(run)
                || self.hidden.is_absent(run);
            if !held && !self.index.has_children(run) {
                let removed = self.index.truncate(run, 0);
                let cause = EvictionCause::Segment;
                self.miss_causes.note_removed(&removed, MissCause::Evicted(cause));
                let (pages, _) = state.apply_removals(removed, None);
                self.count_evicted(pages, cause);
            }
        }
    }

    /// Removes the files of empty sealed segments, except on volumes in `failed`. Adds a volume to
    /// `failed` if a file on it cannot be removed. Returns the segments removed.
    fn remove_empty_segments(&self, failed: &mut Vec<(u8, Error)>) -> Result<Vec<SegmentId>> {
        let until = Instant::now() + BACKGROUND_SYNC_TIMEOUT;
        let change = self.shape.change_by(until).ok_or_else(busy)?;
        let sealed = self.state.lock().space.allocator.sealed();
        let is_empty = |id: &SegmentId| self.state.lock().space.allocator.is_empty(*id);
        let mut empty: Vec<SegmentId> = sealed.iter().copied().filter(is_empty).collect();
        empty.retain(|id| !has_failed(failed, *id));
        if empty.is_empty() {
            return Ok(empty);
        }
        self.record_used_numbers(&change, &sealed)?;
        // Pause syncs, because a sync would reopen an unsynced segment while it is removed.
        let _paused = self.lifecycle.rounds().between(until)?;
        let mut removed = Vec::new();
        for id in empty {
            if has_failed(failed, id) {
                continue;
            }
            let mut state = self.state.lock();
            state.unsynced.segments.remove(&id);
            state.space.allocator.begin_removal(id);
            drop(state);
            if let Err(error) = self.on_volume(id.volume(), move |segments| segments.remove(id)) {
                failed.push((id.volume(), error));
                continue;
            }
            removed.push(id);
            if let Err(error) = self.state.lock().space.allocator.remove_segment(id) {
                tracing::error!(%error, "a removed segment still had space in use: report this");
            }
            self.counters.segments_removed.add(1);
        }
        Ok(removed)
    }

    /// Records durably, before a segment is removed, that its number is never reused: a process
    /// that has the removed file open must not use it for a new segment of the same number.
    fn record_used_numbers(&self, change: &ShapeChange<'_>, sealed: &[SegmentId]) -> Result<()> {
        let mut manifest = Manifest::clone(&self.shape.manifest());
        for id in sealed {
            if let Some(volume) = manifest.volumes.get_mut(usize::from(id.volume())) {
                volume.first_segment = volume.first_segment.max(id.number() + 1);
            }
        }
        if manifest != *self.shape.manifest() {
            change.write(&manifest)?;
            self.state.lock().space.start_numbers(&manifest);
            change.publish(manifest);
        }
        Ok(())
    }
}

/// Whether `failed` has the volume of a segment.
fn has_failed(failed: &[(u8, Error)], segment: SegmentId) -> bool {
    failed.iter().any(|(volume, _)| *volume == segment.volume())
}
