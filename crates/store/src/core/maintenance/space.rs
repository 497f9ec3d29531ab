//! Space maintenance: a thread that empties sealed segments, and scrubs.

use crate::core::absence::ABSENT_INTERVAL;
use crate::core::maintenance::scrub::Scrub;
use crate::core::{BackgroundThread, StoreCore};
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, ErrorKind, Manifest, Result, SegmentId};
use ritornello_index::RunId;
use ritornello_volume::transfer::Control;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum pause between two passes.
const PASS_INTERVAL: Duration = Duration::from_secs(10);
/// Pause before a retry of segments that could not be emptied, for example because of a lease.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Maximum evictions until the index fits a smaller share.
const INDEX_ROUNDS: u32 = 64;
/// Maximum time that a removal waits for a sync.
const SYNC_TIMEOUT: Duration = Duration::from_secs(300);

/// The maintenance thread and its progress.
#[derive(Default)]
pub(crate) struct SpaceMaintenance {
    thread: Arc<BackgroundThread>,
    stopped: Arc<AtomicBool>,
    /// Completed passes.
    passes: Mutex<u64>,
    pass_ended: Condvar,
    pub(crate) scrub: Mutex<Scrub>,
}

impl SpaceMaintenance {
    pub(crate) fn wake(&self) {
        self.thread.wake();
    }

    /// Stops the thread and joins it.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.thread.stop();
        self.note_pass();
    }

    /// Waits until a pass after the `seen`th has ended, at most until `deadline`. Returns the
    /// number of passes.
    pub(crate) fn wait(&self, seen: u64, deadline: Instant) -> u64 {
        let mut passes = self.passes.lock();
        while *passes == seen && !self.stopped.load(Ordering::Acquire) {
            if self.pass_ended.wait_until(&mut passes, deadline).timed_out() {
                break;
            }
        }
        *passes
    }

    fn note_pass(&self) {
        *self.passes.lock() += 1;
        self.pass_ended.notify_all();
    }

    /// Returns the control that cancels the thread's transfers when the thread must end.
    pub(crate) fn control(&self) -> Control {
        Control { cancelled: Some(Arc::clone(&self.stopped)), ..Control::default() }
    }
}

impl StoreCore {
    /// Starts the thread, which ends when the core is closed or dropped.
    pub(crate) fn start_maintenance(self: &Arc<Self>) -> Result<()> {
        let (core, thread) = (Arc::downgrade(self), Arc::clone(&self.maintenance.thread));
        let thread = std::thread::Builder::new()
            .name("ritornello-maintenance".to_owned())
            .spawn(move || run(&core, &thread))
            .map_err(|e| Error::retry("no thread to maintain the store's space").because(e))?;
        *self.maintenance.thread.thread.lock() = Some(thread);
        Ok(())
    }

    /// Empties sealed segments and removes them. Returns whether some remain because of a lease on
    /// their runs or a put that writes to them.
    ///
    /// # Errors
    /// File-system errors; the caller may retry.
    pub(crate) fn maintain_space(&self, control: &Control) -> Result<bool> {
        self.state.lock().release_quarantined();
        self.remove_empty_segments()?;
        let mut left = false;
        for segment in self.sealed_segments() {
            if control.stop().is_some() || self.rounds.cause().is_some() {
                return Ok(true);
            }
            self.empty_segment(segment, control)?;
            left |= !self.remove_empty_segments()?.contains(&segment)
                && self.state.lock().space.is_sealed(segment);
        }
        self.fit_index(control)?;
        self.retire_volumes()?;
        Ok(left)
    }

    /// Sealed segments, the emptiest first.
    fn sealed_segments(&self) -> Vec<SegmentId> {
        let state = self.state.lock();
        let mut sealed = state.space.sealed();
        // Withheld space can neither be moved nor evicted.
        sealed.retain(|id| !state.draining.holds(*id));
        sealed.sort_by_key(|id| std::cmp::Reverse(state.space.free_in(*id)));
        sealed
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

    /// Evicts runs for which no other place was found, unless they are protected.
    fn evict_stuck(&self, runs: &[RunId]) {
        let mut state = self.state.lock();
        for &run in runs {
            let held = state.leases.is_leased(run)
                || state.retention.is_retained(run)
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
        let _shape = self.shape.try_lock_until(until).ok_or_else(busy)?;
        let sealed = self.state.lock().space.sealed();
        let is_empty = |id: &SegmentId| self.state.lock().space.is_empty(*id);
        let empty: Vec<SegmentId> = sealed.iter().copied().filter(is_empty).collect();
        if empty.is_empty() {
            return Ok(empty);
        }
        self.record_used_numbers(&sealed)?;
        // A sync would reopen segments that it finds dirty.
        let _paused = self.rounds.between(until)?;
        for &id in &empty {
            let mut state = self.state.lock();
            state.dirty.remove(&id);
            state.space.begin_removal(id);
            drop(state);
            self.segments.remove(id)?;
            if let Err(error) = self.state.lock().space.remove_segment(id) {
                tracing::error!(%error, "a segment was removed that is in use");
            }
            self.counters.segments_removed.add(1);
        }
        Ok(empty)
    }

    /// Records durably, before a segment is removed, that its number is never reused: a process
    /// with the old file open must not take another file for it.
    fn record_used_numbers(&self, sealed: &[SegmentId]) -> Result<()> {
        let mut manifest = Manifest::clone(&self.manifest());
        for id in sealed {
            if let Some(volume) = manifest.volumes.get_mut(usize::from(id.volume())) {
                volume.first_segment = volume.first_segment.max(id.number() + 1);
            }
        }
        if manifest != *self.manifest() {
            self.write_manifest(&manifest)?;
            let mut state = self.state.lock();
            for (at, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
                state.space.start_numbers_at(at, volume.first_segment);
            }
            drop(state);
            *self.manifest.write() = Arc::new(manifest);
        }
        Ok(())
    }

    /// Evicts until the index's files fit their share, which may have shrunk.
    fn fit_index(&self, control: &Control) -> Result<()> {
        let most = self.budget().index_bytes;
        let mut written = self.index.stats().checkpoints;
        for _ in 0..INDEX_ROUNDS {
            let before = self.index.stats();
            if before.disk_bytes <= most || control.stop().is_some() {
                return Ok(());
            }
            // The minimum size of the files is known only after both were rewritten.
            if before.checkpoints >= written + 2 {
                let mut state = self.state.lock();
                let units = state.space.total_units() / 16;
                self.evict(&mut state, units);
                written = before.checkpoints;
            }
            self.make_durable()?;
            self.index.maintain_after(&|| self.make_durable())?;
            if self.index.stats().checkpoints == before.checkpoints {
                // Another thread is writing a checkpoint.
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        Ok(())
    }

    /// Removes drained and empty directories from the manifest.
    fn retire_volumes(&self) -> Result<()> {
        let Some(_shape) = self.shape.try_lock_until(Instant::now() + SYNC_TIMEOUT) else {
            return Ok(());
        };
        let (there, absent) = {
            let state = self.state.lock();
            let single = state.absence.segments.keys().map(|id| id.volume());
            let absent: Vec<u8> = state.absence.volumes.keys().copied().chain(single).collect();
            (state.space.segments_by_volume(), absent)
        };
        let mut manifest = Manifest::clone(&self.manifest());
        let mut gone = Vec::new();
        for (at, volume) in (0..=u8::MAX).zip(&mut manifest.volumes) {
            let empty = there.get(usize::from(at)) == Some(&0) && !absent.contains(&at);
            if volume.draining && !volume.is_retired() && empty {
                volume.dir.clear();
                volume.draining = false;
                gone.push(at);
            }
        }
        if gone.is_empty() {
            return Ok(());
        }
        self.write_manifest(&manifest)?;
        *self.manifest.write() = Arc::new(manifest);
        for number in gone {
            self.remove_marker(number);
            self.segments.retire_volume(number);
        }
        Ok(())
    }

    /// Returns whether segments, directories or the index exceed their target.
    pub(crate) fn needs_maintenance(&self) -> bool {
        !self.state.lock().space.sealed().is_empty()
            || self.is_draining_volumes()
            || self.index.stats().disk_bytes > self.budget().index_bytes
    }
}

fn run(core: &Weak<StoreCore>, thread: &BackgroundThread) {
    let mut pause = Duration::ZERO;
    loop {
        if thread.sleep(pause) {
            return;
        }
        let Some(core) = core.upgrade() else { return };
        pause = PASS_INTERVAL;
        if core.is_degraded() {
            if let Err(error) = core.reattach_absent() {
                tracing::warn!(%error, "absent volumes could not be reattached");
            }
            pause = ABSENT_INTERVAL;
        }
        if core.needs_maintenance() {
            match core.maintain_space(&core.maintenance.control()) {
                Ok(false) => {}
                Ok(true) => pause = pause.min(RETRY_PAUSE),
                // The store is poisoned: the owner reopens it, and logs that.
                Err(_) if core.rounds.cause().is_some() => {}
                Err(error) => {
                    let again =
                        if error.kind() == ErrorKind::Fatal { PASS_INTERVAL } else { RETRY_PAUSE };
                    pause = pause.min(again);
                    tracing::warn!(%error, "sealed segments could not be emptied");
                }
            }
        }
        core.maintenance.note_pass();
        pause = pause.min(core.scrub_next());
    }
}
