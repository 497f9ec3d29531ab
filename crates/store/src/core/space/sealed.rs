//! Emptying sealed segments: their runs move or are evicted, then their files are removed.

use super::StoreSpace;
use crate::core::StoreCore;
use crate::core::durability::SYNC_TIMEOUT;
use crate::core::shape::ShapeChange;
use ritornello_format::{Error, Manifest, Result, SegmentId};
use ritornello_index::RunId;
use ritornello_volume::transfer::Control;
use std::time::Instant;

impl StoreSpace {
    /// Releases quarantined space of sealed segments, which is not reused anyway.
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
    /// Empties and removes sealed segments, evicts until the index's files fit their share of the
    /// capacity, and retires drained volumes. Returns true if the work was stopped or a sealed
    /// segment was left. A segment is left, for example, because a run in it is protected or is the
    /// prefix of another run, or because a put writes to the segment. Segments with withheld space
    /// are skipped and do not count as left.
    ///
    /// # Errors
    /// File-system errors; the caller may retry.
    pub(crate) fn maintain_space(&self, control: &Control) -> Result<bool> {
        self.state.lock().space.release_quarantined();
        self.remove_empty_segments()?;
        let mut left = false;
        let sealed = self.state.lock().space.sealed_segments();
        for segment in sealed {
            if control.stop().is_some() || self.lifecycle.is_poisoned() {
                return Ok(true);
            }
            self.empty_segment(segment, control)?;
            left |= !self.remove_empty_segments()?.contains(&segment)
                && self.state.lock().space.allocator.is_sealed(segment);
        }
        self.fit_index(control)?;
        self.retire_volumes()?;
        Ok(left)
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
        self.make_durable()
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
                let (pages, _) = state.apply_removals(removed, None);
                self.counters.evicted_pages.add(pages);
            }
        }
    }

    /// Removes the files of empty sealed segments. Returns those segments.
    fn remove_empty_segments(&self) -> Result<Vec<SegmentId>> {
        let until = Instant::now() + SYNC_TIMEOUT;
        let busy = || Error::retry("the disk is still busy with an earlier sync");
        let change = self.shape.change_by(until).ok_or_else(busy)?;
        let sealed = self.state.lock().space.allocator.sealed();
        let is_empty = |id: &SegmentId| self.state.lock().space.allocator.is_empty(*id);
        let empty: Vec<SegmentId> = sealed.iter().copied().filter(is_empty).collect();
        if empty.is_empty() {
            return Ok(empty);
        }
        self.record_used_numbers(&change, &sealed)?;
        // Pause syncs, because a sync would reopen a dirty segment that is being removed.
        let _paused = self.lifecycle.rounds().between(until)?;
        for &id in &empty {
            let mut state = self.state.lock();
            state.unsynced.segments.remove(&id);
            state.space.allocator.begin_removal(id);
            drop(state);
            self.segments.remove(id)?;
            if let Err(error) = self.state.lock().space.allocator.remove_segment(id) {
                tracing::error!(%error, "a segment was removed that is in use");
            }
            self.counters.segments_removed.add(1);
        }
        Ok(empty)
    }

    /// Records durably, before a segment is removed, that its number is never reused: a process
    /// with the old file open must not take another file for it.
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
