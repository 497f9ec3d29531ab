//! Changing the capacity and the directories of a store in use.
//!
//! The manifest records the target durably before any action. A larger capacity is available
//! immediately. After a smaller capacity, or for a drained directory, the segments beyond the
//! shares are sealed, and the maintenance thread empties and removes them. If the owner ends
//! half-way, the next owner continues from the manifest.

use crate::budget::Budget;
use crate::core::absence::Absence;
use crate::core::{State, StoreCore};
use crate::directory::{Directory, LOST_AND_FOUND, VOLUMES_MAX};
use crate::volumes::VolumeState;
use ritornello_format::{Error, Manifest, Result, UNIT, VolumeMarker, VolumeRecord};
use ritornello_index::RunId;
use ritornello_volume::segments::{Candidate, Segments};
use ritornello_volume::space::Space;
use ritornello_volume::transfer::Control;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A change to the space of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CapacityChange {
    /// Sets the budget, in bytes.
    Capacity(u64),
    /// Adds a directory for segments, or marks an absent directory of the store whose marker was
    /// lost.
    AddVolume(String),
    /// Drains a directory: new runs are placed in other directories, and its runs are moved or
    /// evicted.
    DrainVolume(String),
    /// Gives up an absent directory and its pages.
    ForgetVolume(String),
}

impl StoreCore {
    /// Changes capacity or directories. Returns when the change is complete, or `Retry` after
    /// `timeout`; the change then continues in the background.
    ///
    /// # Errors
    /// `Invalid` if the capacity is below two segments, or below the leased, retained and reserved
    /// bytes; if the directory is already in use, unknown, another store's, or the store's last
    /// directory.
    pub fn change_capacity(&self, change: &CapacityChange, timeout: Duration) -> Result<()> {
        self.check_writable()?;
        let deadline = Instant::now() + timeout;
        let (mut forgotten, mut marked) = (None, None);
        {
            let Some(_shape) = self.shape.try_lock_until(deadline) else {
                return Err(Error::retry("the store's space is being changed already"));
            };
            // A segment being created must be registered before shares change, or its file would be
            // orphaned.
            let Some(_growing) = self.growing.try_lock_until(deadline) else {
                return Err(Error::retry("a segment is being made"));
            };
            let mut manifest = Manifest::clone(&self.manifest());
            let mut candidate = None;
            match change {
                CapacityChange::Capacity(bytes) => manifest.capacity = *bytes,
                CapacityChange::AddVolume(dir) => {
                    let name = self.directory().volume_name(Path::new(dir))?;
                    match manifest.volumes.iter().position(|volume| volume.dir == name) {
                        Some(at) => marked = Some(self.mark_again(&mut manifest, at as u8)?),
                        None => candidate = Some(self.add_volume(&mut manifest, name)?),
                    }
                }
                CapacityChange::DrainVolume(dir) => self.evacuate_volume(&mut manifest, dir)?,
                CapacityChange::ForgetVolume(dir) => {
                    forgotten = Some(self.forget_volume(&mut manifest, dir)?)
                }
            }
            let budget = Budget::divide(manifest.capacity, manifest.segment_bytes)?;
            self.check_holds_what_stays(&budget)?;
            self.check_fits_into_memory(&manifest)?;
            self.write_manifest(&manifest)?;
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
                share_out(space, absence, &manifest, &budget);
            }
            *self.budget.write() = budget;
            *self.manifest.write() = Arc::new(manifest);
        }
        if let Some(number) = forgotten {
            // The change is durable in the manifest: a next owner drops the remaining runs.
            self.retire_absent_volume(number)?;
        }
        if let Some(number) = marked {
            self.reattach_absent()?;
            if let Some(why) = self.state.lock().absence.volumes.get(&number) {
                let said = "the directory is marked again, but still absent";
                return Err(Error::retry(said).with("why", why));
            }
        }
        self.await_maintenance(deadline)
    }

    /// Waits until segments, directories and the index have their target sizes.
    fn await_maintenance(&self, deadline: Instant) -> Result<()> {
        let mut seen = 0;
        // One wake-up suffices: the maintenance thread retries leased segments.
        self.maintenance.wake();
        loop {
            if self.is_space_as_wanted() {
                return Ok(());
            }
            self.check_writable()?;
            if self.options.background_threads {
                seen = self.maintenance.wait(seen, deadline);
            } else {
                self.maintain_space(&Control::default())?;
            }
            if Instant::now() >= deadline && !self.is_space_as_wanted() {
                let sealed = self.state.lock().space.sealed().len();
                return Err(Error::retry(
                    "segments are still being emptied, which continues in the background",
                )
                .with("segments_to_go", sealed));
            }
        }
    }

    /// Whether no capacity change is pending.
    fn is_space_as_wanted(&self) -> bool {
        let draining = self.is_draining_volumes();
        let fits = self.index.stats().disk_bytes <= self.budget().index_bytes;
        !draining && fits && self.state.lock().space.sealed().is_empty()
    }

    /// Whether a directory is being drained and not absent.
    pub(crate) fn is_draining_volumes(&self) -> bool {
        let manifest = self.manifest();
        let state = self.state.lock();
        (0..=u8::MAX).zip(&manifest.volumes).any(|(number, volume)| {
            volume.draining && !volume.is_retired() && !state.absence.volumes.contains_key(&number)
        })
    }

    pub(crate) fn directory(&self) -> Directory {
        self.directory.clone()
    }

    /// Checks that a smaller capacity holds all runs that cannot be evicted.
    fn check_holds_what_stays(&self, budget: &Budget) -> Result<()> {
        let segment_units = budget.segment_bytes / UNIT;
        let units = u64::from(budget.segments_max) * segment_units;
        if budget.capacity >= self.budget().capacity {
            return Ok(());
        }
        let state = self.state.lock();
        let leased: Vec<RunId> =
            state.leases.runs().filter(|run| !state.retention.is_retained(*run)).collect();
        let (retained, written) = (state.retention.units(), state.reservations.units());
        drop(state);
        let places = leased.into_iter().filter_map(|run| self.index.place(run));
        let leased: u64 = places.map(|place| place.units()).sum();
        if leased + retained + written <= units - units / 20 {
            return Ok(());
        }
        Err(Error::invalid(
            "the capacity is below the bytes that may not be evicted: give more, or wait until \
             leases and retentions end",
        )
        .with("capacity", budget.capacity)
        .with("retained", retained * UNIT)
        .with("leased", leased * UNIT)
        .with("being_written", written * UNIT))
    }

    /// Checks that a larger capacity fits into memory, for a store on tmpfs.
    fn check_fits_into_memory(&self, manifest: &Manifest) -> Result<()> {
        if manifest.capacity <= self.budget().capacity {
            return Ok(());
        }
        let more = manifest.capacity.saturating_sub(self.segments.allocated_bytes());
        self.directory().check_memory(manifest, more)
    }

    /// Marks the directory of a volume whose marker was lost. Returns the volume's number. Every
    /// segment that the index names must exist in the directory, because the pages of a missing
    /// segment would be lost. If the index names no segment, the directory must be empty, like a
    /// new directory.
    fn mark_again(&self, manifest: &mut Manifest, number: u8) -> Result<u8> {
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        let volume = &mut manifest.volumes[usize::from(number)];
        let (dir, directory) = (self.options.dir.join(&volume.dir), self.directory());
        let refused = |why: &str| Err(Error::invalid(why.to_owned()).with("dir", dir.display()));
        if directory.has_marker(&dir, marker) {
            return refused("the store has this directory already");
        }
        directory.check_owner(&dir)?;
        let names = self.medium.list(&dir)?;
        if let VolumeState::Foreign(why) = directory.find_volume(dir.clone(), marker, false) {
            return refused(&why);
        }
        let mut named = BTreeSet::new();
        self.index.for_each(&mut |_, view| {
            let segments = view.live_extents().into_iter().map(|extent| extent.segment);
            named.extend(segments.filter(|id| id.volume() == number));
        });
        if named.iter().any(|id| !names.contains(&Segments::file_name(*id).into())) {
            return refused("segments of the volume are not in this directory: mount its disk");
        }
        let is_strange = |name: &&OsString| {
            let is_volumes = Segments::is_segment(name) || name.as_os_str() == VolumeMarker::FILE;
            !is_volumes && self.is_strange(&dir, name)
        };
        if let Some(found) = names.iter().find(is_strange).filter(|_| named.is_empty()) {
            let found = found.to_string_lossy();
            return refused(&format!(
                "it holds {found}: mount the volume's disk, or remove that file"
            ));
        }
        directory.write_marker(&dir, marker)?;
        volume.marked = true;
        Ok(number)
    }

    fn add_volume(&self, manifest: &mut Manifest, name: String) -> Result<Candidate> {
        let directory = self.directory();
        if manifest.volumes.len() >= VOLUMES_MAX {
            return Err(Error::invalid(
                "a store has at most 256 directories, including removed ones: make a new store",
            ));
        }
        let path = self.options.dir.join(&name);
        let refused = |error| {
            Error::invalid("the directory cannot be used: name one that can be written to")
                .with("dir", path.display())
                .because(error)
        };
        self.medium.create_dir(&path).map_err(refused)?;
        directory.check_owner(&path)?;
        let there = manifest.volumes.iter().filter(|volume| !volume.is_retired());
        let new = directory.real(&name);
        if there.into_iter().any(|volume| directory.real(&volume.dir) == new) {
            return Err(Error::invalid("the store has this directory already, by another name")
                .with("dir", path.display()));
        }
        let names = self.medium.list(&path).map_err(refused)?;
        let number = manifest.volumes.len() as u8;
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        if let Some(found) = names.iter().find(|name| self.is_strange(&path, name)) {
            return Err(Error::invalid(
                "the directory is not empty: name an empty or new directory",
            )
            .with("dir", path.display())
            .with("found", found.to_string_lossy()));
        }
        // Removes the files of an owner that was killed while it added the directory.
        for name in names.iter().filter(|name| name.as_os_str() != LOST_AND_FOUND) {
            self.medium.remove(&path.join(name)).map_err(refused)?;
        }
        let candidate = self.segments.examine(&path)?;
        if !candidate.is_trusted() {
            return Err(Error::invalid(
                "this file system cannot be trusted to keep one owner's writes in order: name a \
                 directory on a local disk",
            )
            .with("dir", path.display())
            .with("file_system", candidate.file_system()));
        }
        self.segments.check_drivable(&candidate)?;
        directory.write_marker(&path, marker).map_err(refused)?;
        manifest.volumes.push(VolumeRecord { marked: true, ..VolumeRecord::new(name) });
        Ok(candidate)
    }

    /// Whether a file in `dir` belongs neither to the file system nor to an interrupted addition or
    /// marking of the directory.
    fn is_strange(&self, dir: &Path, name: &OsStr) -> bool {
        let is_own_marker =
            name == VolumeMarker::FILE && self.directory().is_marked_by(dir, self.manifest().uuid);
        let is_new_marker = name == format!("{}.new", VolumeMarker::FILE).as_str();
        !(name == LOST_AND_FOUND || Segments::is_left_over(name) || is_own_marker || is_new_marker)
    }

    /// Returns the number of the volume in the directory `dir`.
    fn volume_in(&self, manifest: &Manifest, dir: &str) -> Result<usize> {
        let directory = self.directory();
        let name = directory.volume_name(Path::new(dir))?;
        let real = directory.real(&name);
        let here = |volume: &VolumeRecord| !volume.is_retired();
        let found = manifest.volumes.iter().position(|volume| {
            here(volume) && (volume.dir == dir || directory.real(&volume.dir) == real)
        });
        found.ok_or_else(|| {
            let dirs: Vec<&str> =
                manifest.volumes.iter().filter(|v| here(v)).map(|v| v.dir.as_str()).collect();
            Error::invalid("the directory is not in the store")
                .with("given", dir)
                .with("has", dirs.join(", "))
        })
    }

    fn evacuate_volume(&self, manifest: &mut Manifest, dir: &str) -> Result<()> {
        let found = self.volume_in(manifest, dir)?;
        if self.state.lock().absence.volumes.contains_key(&(found as u8)) {
            return Err(Error::invalid(
                "this directory is absent: mount it, or give it up (`ritornello paths forget`)",
            )
            .with("dir", dir));
        }
        manifest.volumes[found].draining = true;
        check_not_last(manifest, dir)
    }

    /// Removes an absent volume from `manifest`. Returns its number.
    fn forget_volume(&self, manifest: &mut Manifest, dir: &str) -> Result<u8> {
        let found = self.volume_in(manifest, dir)?;
        let number = found as u8;
        if !self.state.lock().absence.volumes.contains_key(&number) {
            return Err(Error::invalid(
                "this directory and its pages are present: drain it instead (`ritornello paths \
                 drain`)",
            )
            .with("dir", dir));
        }
        manifest.volumes[found] = VolumeRecord::default();
        check_not_last(manifest, dir)?;
        Ok(number)
    }

    /// Removes the marker from the directory of a volume that is no longer used.
    pub(crate) fn remove_marker(&self, number: u8) {
        let marker = VolumeMarker { store: self.manifest().uuid, volume: number };
        if let Ok(dir) = self.segments.dir(number)
            && self.directory().has_marker(&dir, marker)
            && let Err(error) = self.directory().remove_marker(&dir)
        {
            tracing::warn!(%error, dir = %dir.display(), "the marker of a drained volume stays");
        }
    }
}

fn check_not_last(manifest: &Manifest, dir: &str) -> Result<()> {
    if manifest.volumes.iter().any(VolumeRecord::is_active) {
        return Ok(());
    }
    Err(Error::invalid(
        "this is the store's last directory: add another directory first (`ritornello paths add`)",
    )
    .with("dir", dir))
}

/// Divides the budget between the volumes. An absent volume keeps its segments and does not grow.
pub(crate) fn share_out(
    space: &mut Space,
    absence: &Absence,
    manifest: &Manifest,
    budget: &Budget,
) {
    let by_volume = space.segments_by_volume();
    let mut absent_total = 0;
    let mut existing: Vec<Option<u32>> = Vec::with_capacity(manifest.volumes.len());
    for (at, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
        let present = by_volume.get(usize::from(at)).copied().unwrap_or(0);
        let absent = absence.segments_of(at);
        absent_total += absent;
        existing.push(volume.is_active().then_some(present + absent));
        if absence.volumes.contains_key(&at) {
            space.stop_growth(at);
        }
    }
    space.set_shares(&budget.shares(&existing), budget.segments_max.saturating_sub(absent_total));
    for segment in absence.segments.keys() {
        // The file exists, so its number is in use.
        space.start_numbers_at(segment.volume(), segment.number() + 1);
    }
    for (at, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
        space.start_numbers_at(at, volume.first_segment);
    }
}

impl State {
    /// Releases quarantined space of sealed segments, which is not reused anyway.
    pub(crate) fn release_quarantined(&mut self) {
        let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.quarantine)
            .into_iter()
            .partition(|extent| self.space.is_sealed(extent.segment));
        self.quarantine = kept.into();
        self.quarantine_units -= gone.iter().map(|e| u64::from(e.units)).sum::<u64>();
        self.add_to_limbo(gone);
    }
}
