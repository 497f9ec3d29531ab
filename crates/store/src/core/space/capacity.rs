//! Changing the capacity and the directories of a store in use.
//!
//! The manifest records the target durably before any action. A larger capacity is available
//! immediately. If the capacity shrinks or a directory is drained, the segments beyond each
//! directory's share are sealed, and the maintenance thread (`maintenance/space_thread.rs`) empties
//! and removes them. If the owner ends half-way, the next owner continues from the manifest.

use super::StoreSpace;
use crate::budget::Budget;
use crate::core::StoreCore;
use crate::core::absence::Absence;
use crate::core::eviction_cause::EvictionCause;
use crate::core::state::State;
use ritornello_format::{Error, ErrorKind, Manifest, Result, UNIT};
use ritornello_index::RunId;
use ritornello_volume::transfer::Control;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, Instant};

/// Maximum rounds of syncs, checkpoints and evictions in which the index's files shrink to their
/// share of the capacity.
const INDEX_ROUNDS: u32 = 64;
/// Pause while another thread writes a checkpoint.
const CHECKPOINT_PAUSE: Duration = Duration::from_millis(200);

/// A change to the space of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CapacityChange {
    /// Sets the capacity, in bytes.
    Capacity(u64),
    /// Adds a directory for segments. If it is a directory of the store that is absent because its
    /// file `VOLUME` was lost, writes this file again.
    AddVolume(String),
    /// Drains a directory: new runs are placed in other directories, and its runs are moved or
    /// evicted.
    DrainVolume(String),
    /// Gives up an absent directory and its pages.
    ForgetVolume(String),
}

impl StoreCore {
    /// Changes capacity or directories. Returns when the change is complete. If segments are still
    /// being emptied after `timeout`, returns `Retry`, and the change continues in the background.
    /// After adding a directory, returns without waiting for segments to be emptied.
    ///
    /// # Errors
    /// `Invalid` if the capacity is below two segments, if leased, retained and reserved bytes
    /// would take more than 95 % of its segments, or if it is, on tmpfs, too large for the memory;
    /// if the directory is already in use, unknown, another store's, or the store's last directory.
    /// `Retry` if another change, or the creation of a segment file, has not ended after `timeout`:
    /// this change is then not begun; `Retry` also if a directory to which `VOLUME` was written
    /// again is still absent, or if the store is poisoned; `Closed`; `Fatal` if a write or sync
    /// failed: the store is poisoned; file-system errors.
    pub fn change_capacity(&self, change: &CapacityChange, timeout: Duration) -> Result<()> {
        self.lifecycle.check_writable()?;
        let deadline = Instant::now() + timeout;
        let (mut forgotten, mut marked, mut drained) = (None, None, None);
        {
            let Some(shape) = self.shape.change_by(deadline) else {
                let error = Error::retry(
                    "another change of the capacity or the directories has not ended: try again",
                );
                return Err(self.with_stalled(error));
            };
            // Wait for a segment that is being created: if the maximum segments of its volume
            // shrank now, the allocator could refuse the segment, and its file would be orphaned.
            let Some(_growing) = self.shape.pause_growth(deadline) else {
                let error = Error::retry("a segment file is being created: try again");
                return Err(self.with_stalled(error));
            };
            let mut manifest = Manifest::clone(&self.shape.manifest());
            let mut candidate = None;
            match change {
                CapacityChange::Capacity(bytes) => manifest.capacity = *bytes,
                CapacityChange::AddVolume(dir) => {
                    let name = self.shape.directory().volume_name(Path::new(dir))?;
                    match manifest.volumes.iter().position(|volume| volume.dir == name) {
                        Some(at) => marked = Some(self.mark_again(&mut manifest, at as u8)?),
                        None => candidate = Some(self.add_volume(&mut manifest, name)?),
                    }
                }
                CapacityChange::DrainVolume(dir) => {
                    drained = Some(self.evacuate_volume(&mut manifest, dir)?)
                }
                CapacityChange::ForgetVolume(dir) => {
                    forgotten = Some(self.forget_volume(&mut manifest, dir)?)
                }
            }
            let budget = Budget::divide(manifest.capacity, manifest.segment_bytes)?;
            self.check_protected_runs_fit(&budget)?;
            self.check_fits_into_memory(&manifest)?;
            shape.write(&manifest)?;
            if let Some(candidate) = candidate {
                self.segments.add_volume(candidate);
            }
            self.index.set_budget(budget.index_bytes);
            self.scopes.set_bytes_max(budget.registry_bytes);
            {
                let mut state = self.state.lock();
                if let Some(number) = forgotten {
                    state.absence.retire(number);
                }
                let State { space, absence, .. } = &mut *state;
                space.share_out(absence, &manifest, &budget);
            }
            shape.set_budget(budget);
            shape.publish(manifest);
        }
        if let Some(number) = forgotten {
            // If this process ends here, the next owner drops the remaining runs, because the
            // manifest already records the change.
            self.retire_absent_volume(number, deadline)?;
        }
        if let Some(number) = marked {
            match self.reattach_absent() {
                // A sync that has not ended does not keep the directory from being used.
                Err(error) if error.kind() != ErrorKind::Retry => return Err(error),
                _ => {}
            }
            if let Some(why) = self.state.lock().absence.why(number) {
                let said = "the directory is still absent, although VOLUME was written to it again";
                return Err(Error::retry(said).with("why", why));
            }
        }
        if matches!(change, CapacityChange::AddVolume(_)) {
            self.maintenance.space.wake();
            return Ok(());
        }
        self.await_maintenance(deadline, drained)
    }

    /// Waits until no segment is sealed, no directory is being drained, and the index's files are
    /// within their share of the capacity; if `drained` is given, only until this volume is empty
    /// and removed.
    fn await_maintenance(&self, deadline: Instant, drained: Option<u8>) -> Result<()> {
        let is_pending = || {
            let is_drained = drained.is_some_and(|number| {
                let manifest = self.shape.manifest();
                manifest.volumes.get(usize::from(number)).is_some_and(|v| v.is_retired())
            });
            !is_drained && self.needs_maintenance()
        };
        let mut seen = 0;
        // Wake the maintenance thread only once: if it cannot empty a segment, it tries again after
        // a pause.
        self.maintenance.space.wake();
        loop {
            if !is_pending() {
                return Ok(());
            }
            self.lifecycle.check_writable()?;
            if self.options.background_threads {
                seen = self.maintenance.space.wait(seen, deadline);
            } else {
                self.maintain_space(&Control::default())?;
            }
            if Instant::now() >= deadline && is_pending() {
                let sealed = self.state.lock().space.allocator.sealed().len();
                let error = Error::retry(
                    "segments are still being emptied, or the index is above its share of the \
                     capacity: the work continues in the background",
                );
                return Err(self.with_stalled(error.with("segments_to_go", sealed)));
            }
        }
    }

    /// Shrinks the files of the index to their share of the capacity: writes checkpoints, and
    /// evicts if these do not suffice. Stops after [`INDEX_ROUNDS`] rounds, or if `control` stops
    /// it, even if the files are still too large.
    pub(super) fn fit_index(&self, control: &Control) -> Result<()> {
        let most = self.shape.budget().index_bytes;
        let mut written = self.index.stats().checkpoints;
        for _ in 0..INDEX_ROUNDS {
            let before = self.index.stats();
            if before.disk_bytes <= most || control.stop().is_some() {
                return Ok(());
            }
            // There are two checkpoint files. After both were rewritten they contain no removed
            // runs, so only evictions can shrink them further.
            if before.checkpoints >= written + 2 {
                let mut state = self.state.lock();
                let units = state.space.allocator.total_units() / 16;
                self.evict(&mut state, units, EvictionCause::Index);
                written = before.checkpoints;
            }
            self.make_durable_in_background()?;
            self.index.maintain_after(&|| self.make_durable_in_background())?;
            if self.index.stats().checkpoints == before.checkpoints {
                // Another thread is writing a checkpoint.
                std::thread::sleep(CHECKPOINT_PAUSE);
            }
        }
        Ok(())
    }

    /// Returns whether a segment is sealed, a directory is being drained, or the index's files
    /// exceed their share of the capacity.
    pub(crate) fn needs_maintenance(&self) -> bool {
        !self.state.lock().space.allocator.sealed().is_empty()
            || self.is_draining_volumes()
            || self.index.stats().disk_bytes > self.shape.budget().index_bytes
    }

    /// Checks, if the capacity of `budget` is smaller than the current capacity, that leased and
    /// retained runs and reservations take at most 95 % of the segments of `budget`.
    fn check_protected_runs_fit(&self, budget: &Budget) -> Result<()> {
        let segment_units = budget.segment_bytes / UNIT;
        let units = u64::from(budget.segments_max) * segment_units;
        if budget.capacity >= self.shape.budget().capacity {
            return Ok(());
        }
        let state = self.state.lock();
        let retention = &state.residents.retention;
        let leased: Vec<RunId> =
            state.leases.runs().filter(|run| !retention.is_retained(*run)).collect();
        let (retained, written) = (retention.units(), state.reservations.units());
        drop(state);
        let places = leased.into_iter().filter_map(|run| self.index.place(run));
        let leased: u64 = places.map(|place| place.units()).sum();
        // At least 5 % of the segments must remain for evictable runs.
        if leased + retained + written <= units - units / 20 {
            return Ok(());
        }
        Err(Error::invalid(
            "the bytes that may not be evicted would take more than 95 % of the segments: give a \
             larger capacity, or wait until leases, retentions and puts end",
        )
        .with("capacity", budget.capacity)
        .with("retained", retained * UNIT)
        .with("leased", leased * UNIT)
        .with("being_written", written * UNIT))
    }

    /// Checks that a larger capacity fits into memory, for a store on tmpfs.
    fn check_fits_into_memory(&self, manifest: &Manifest) -> Result<()> {
        if manifest.capacity <= self.shape.budget().capacity {
            return Ok(());
        }
        let more = manifest.capacity.saturating_sub(self.segments.allocated_bytes());
        self.shape.directory().check_memory(manifest, more)
    }
}

impl StoreSpace {
    /// Divides the maximum number of segments between the volumes. An absent volume keeps its
    /// segments and gets no new segment; nor does a volume whose segments may hold runs that the
    /// index lacks, until a salvage has searched them.
    pub(crate) fn share_out(&mut self, absence: &Absence, manifest: &Manifest, budget: &Budget) {
        let unsearched = &self.unsearched;
        let space = &mut self.allocator;
        let by_volume = space.segments_by_volume();
        let mut absent_total = 0;
        let mut existing: Vec<Option<u32>> = Vec::with_capacity(manifest.volumes.len());
        for (at, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
            let present = by_volume.get(usize::from(at)).copied().unwrap_or(0);
            let absent = absence.segments_of(at);
            absent_total += absent;
            let shares = volume.is_active() && !unsearched.contains(&at);
            existing.push(shares.then_some(present + absent));
            if absence.why(at).is_some() {
                space.stop_growth(at);
            }
        }
        let segments_max = budget.segments_max.saturating_sub(absent_total);
        let mut shares = budget.shares(&existing);
        for &volume in unsearched {
            if let Some(share) = shares.get_mut(usize::from(volume)) {
                *share = by_volume.get(usize::from(volume)).copied().unwrap_or(0);
            }
        }
        space.set_shares(&shares, segments_max);
        for segment in absence.segments() {
            // Do not reuse the number of an absent segment, whose file may exist.
            space.start_numbers_at(segment.volume(), segment.number() + 1);
        }
        self.start_numbers(manifest);
    }

    /// Starts segment numbers above the numbers of removed segments, so that no number is reused.
    pub(super) fn start_numbers(&mut self, manifest: &Manifest) {
        for (at, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
            self.allocator.start_numbers_at(at, volume.first_segment);
        }
    }
}
