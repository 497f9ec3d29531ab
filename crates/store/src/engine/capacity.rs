//! Changing the capacity and the directories of a store that is in use.
//!
//! The manifest says what is wanted, durably, before any of it is acted on. A larger capacity is
//! then there at once. For a smaller one, or a directory that is drained, the segments beyond the
//! shares are closed; the caretaker empties and removes them. An owner that ends half-way leaves a
//! manifest that says the same to the next one.

use super::{Engine, State};
use crate::budget::Budget;
use crate::directory::{Directory, VOLUMES_MAX};
use ritornello_format::{Error, Manifest, Result, UNIT, VolumeRecord};
use ritornello_index::RunId;
use ritornello_volume::segments::{Candidate, IoMode, Segments};
use ritornello_volume::space::Space;
use ritornello_volume::transfer::Control;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What to change about the space of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reshape {
    /// The budget, in bytes.
    Capacity(u64),
    /// One more directory for segments.
    AddPath(String),
    /// One less: nothing new is placed there, and what is there moves or is evicted.
    DrainPath(String),
}

impl Engine {
    /// Changes capacity or directories. Returns when it is done, or, with `Retry`, when `patience`
    /// is over: the rest is done in the background then.
    ///
    /// # Errors
    /// `Invalid` for a capacity below two segments, or below what is leased, retained and being
    /// written; for a directory that is known, unknown, somebody else's, or the last one.
    pub fn reshape(&self, change: &Reshape, patience: Duration) -> Result<()> {
        self.check_writable()?;
        let deadline = Instant::now() + patience;
        {
            let Some(_turn) = self.shape.try_lock_until(deadline) else {
                return Err(Error::retry("the store's space is being changed already"));
            };
            // A segment that is being made is known before shares change, or its file is orphaned.
            let Some(_growing) = self.growing.try_lock_until(deadline) else {
                return Err(Error::retry("a segment is being made"));
            };
            let mut manifest = Manifest::clone(&self.manifest());
            let mut candidate = None;
            match change {
                Reshape::Capacity(bytes) => manifest.capacity = *bytes,
                Reshape::AddPath(dir) => candidate = Some(self.add_volume(&mut manifest, dir)?),
                Reshape::DrainPath(dir) => self.drain_volume(&mut manifest, dir)?,
            }
            let budget = Budget::divide(manifest.capacity, manifest.segment_bytes)?;
            self.check_holds_what_stays(&budget)?;
            self.check_fits_into_memory(&manifest)?;
            self.directory().write_manifest(&manifest)?;
            if let Some(candidate) = candidate {
                self.segments.add_volume(candidate);
            }
            self.index.set_budget(budget.index_bytes);
            share_out(&mut self.state.lock().space, &manifest, &budget);
            *self.budget.write() = budget;
            *self.manifest.write() = Arc::new(manifest);
        }
        self.settle_shape(deadline)
    }

    /// Waits until the store is in its shape.
    fn settle_shape(&self, deadline: Instant) -> Result<()> {
        let mut seen = 0;
        // Once: the caretaker knows when to look again at what a lease holds.
        self.caretaker.ring();
        loop {
            if self.is_in_shape() {
                return Ok(());
            }
            self.check_writable()?;
            if self.options.upkeep {
                seen = self.caretaker.wait(seen, deadline);
            } else {
                self.tend_shape(&Control::default())?;
            }
            if Instant::now() >= deadline && !self.is_in_shape() {
                let closed = self.state.lock().space.closed().len();
                return Err(Error::retry(
                    "the store is still being emptied, and goes on with it in the background",
                )
                .with("segments_to_go", closed));
            }
        }
    }

    /// Whether nothing is left to be done about a change of the space.
    fn is_in_shape(&self) -> bool {
        let draining = self.manifest().volumes.iter().any(|v| v.draining && !v.is_gone());
        let fits = self.index.stats().disk_bytes <= self.budget().index_bytes;
        !draining && fits && self.state.lock().space.closed().is_empty()
    }

    pub(super) fn directory(&self) -> Directory {
        Directory::new(Arc::clone(&self.medium), &self.options.dir)
    }

    /// A smaller capacity must hold what cannot be evicted.
    fn check_holds_what_stays(&self, budget: &Budget) -> Result<()> {
        let segment_units = budget.segment_bytes / UNIT;
        let units = u64::from(budget.segments_max) * segment_units;
        if budget.capacity >= self.budget().capacity {
            return Ok(());
        }
        let state = self.state.lock();
        let leased: Vec<RunId> =
            state.leases.runs().filter(|run| !state.retention.holds(*run)).collect();
        let (retained, written) = (state.retention.units(), state.reservations.units());
        drop(state);
        let places = leased.into_iter().filter_map(|run| self.index.place(run));
        let leased: u64 = places.map(|place| place.units()).sum();
        if leased + retained + written <= units - units / 20 {
            return Ok(());
        }
        Err(Error::invalid(
            "the capacity is below what may not be evicted: give more, or wait until leases and \
             retentions end",
        )
        .with("capacity", budget.capacity)
        .with("retained", retained * UNIT)
        .with("leased", leased * UNIT)
        .with("being_written", written * UNIT))
    }

    /// A larger capacity must fit into memory where the store is there.
    fn check_fits_into_memory(&self, manifest: &Manifest) -> Result<()> {
        if manifest.capacity <= self.budget().capacity {
            return Ok(());
        }
        let more = manifest.capacity.saturating_sub(self.segments.allocated_bytes()?);
        self.directory().check_memory(manifest, more)
    }

    fn add_volume(&self, manifest: &mut Manifest, dir: &str) -> Result<Candidate> {
        let directory = self.directory();
        let name = directory.volume_name(Path::new(dir))?;
        if manifest.volumes.iter().any(|volume| volume.dir == name) {
            return Err(Error::invalid("the store has this directory already").with("dir", name));
        }
        if manifest.volumes.len() >= VOLUMES_MAX {
            return Err(Error::invalid(
                "a store has had 256 directories at most, those that went included: make a new one",
            ));
        }
        let path = self.options.dir.join(&name);
        let refused = |error| {
            Error::invalid("the directory cannot be used: name one that can be written to")
                .with("dir", path.display())
                .because(error)
        };
        self.medium.create_dir(&path).map_err(refused)?;
        let names = self.medium.list(&path).map_err(refused)?;
        let (left_over, others): (Vec<_>, Vec<_>) =
            names.into_iter().partition(|name| Segments::is_left_over(name));
        if let Some(found) = others.first() {
            return Err(Error::invalid("the directory holds something: name an empty or new one")
                .with("dir", path.display())
                .with("found", found.to_string_lossy()));
        }
        let there = manifest.volumes.iter().filter(|volume| !volume.is_gone());
        let new = directory.real(&name);
        if there.into_iter().any(|volume| directory.real(&volume.dir) == new) {
            return Err(Error::invalid("the store has this directory already, by another name")
                .with("dir", path.display()));
        }
        // Somebody was killed while he added it.
        for name in left_over {
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
        if self.segments.report().mode == IoMode::Mapped && !candidate.is_in_memory() {
            return Err(Error::invalid(
                "this store is in memory, and a disk would slow it down to its own speed: name a \
                 directory in memory, or make a store on the disk",
            )
            .with("dir", path.display()));
        }
        manifest.volumes.push(VolumeRecord::new(name));
        Ok(candidate)
    }

    fn drain_volume(&self, manifest: &mut Manifest, dir: &str) -> Result<()> {
        let name = self.directory().volume_name(Path::new(dir))?;
        let there = |volume: &VolumeRecord| !volume.is_gone();
        let directory = self.directory();
        let real = directory.real(&name);
        let found = manifest.volumes.iter().position(|volume| {
            there(volume) && (volume.dir == dir || directory.real(&volume.dir) == real)
        });
        let Some(found) = found else {
            let dirs: Vec<&str> =
                manifest.volumes.iter().filter(|v| there(v)).map(|v| v.dir.as_str()).collect();
            return Err(Error::invalid("the store has no such directory")
                .with("given", dir)
                .with("has", dirs.join(", ")));
        };
        manifest.volumes[found].draining = true;
        if manifest.volumes.iter().any(VolumeRecord::is_active) {
            return Ok(());
        }
        Err(Error::invalid("this is the store's last directory: add another one first")
            .with("dir", name))
    }
}

/// Gives every volume its share.
pub(super) fn share_out(space: &mut Space, manifest: &Manifest, budget: &Budget) {
    let there = space.segments_by_volume();
    let existing: Vec<Option<u32>> = manifest
        .volumes
        .iter()
        .enumerate()
        .map(|(at, volume)| volume.is_active().then(|| there.get(at).copied().unwrap_or(0)))
        .collect();
    space.set_shares(&budget.shares(&existing), budget.segments_max);
    for (at, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
        space.start_numbers_at(at, volume.first_segment);
    }
}

impl State {
    /// Quarantined space of segments that go need not be kept from anybody.
    pub(super) fn release_quarantined(&mut self) {
        let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.quarantine)
            .into_iter()
            .partition(|extent| self.space.is_closed(extent.segment));
        self.quarantine = kept.into();
        self.quarantine_units -= gone.iter().map(|e| u64::from(e.units)).sum::<u64>();
        self.release_later(gone);
    }
}
