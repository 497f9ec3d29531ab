//! Adds directories to a store, writes lost markers of directories again, drains directories, and
//! gives up absent directories.

use crate::core::StoreCore;
use crate::core::durability::BACKGROUND_SYNC_TIMEOUT;
use crate::directory::{LOST_AND_FOUND, VOLUMES_MAX};
use crate::volumes::VolumeState;
use ritornello_format::{Error, Manifest, Result, VolumeMarker, VolumeRecord};
use ritornello_volume::segments::{Candidate, Segments};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Instant;

impl StoreCore {
    /// Whether any directory is being drained and is not absent.
    pub(super) fn is_draining_volumes(&self) -> bool {
        let manifest = self.shape.manifest();
        let state = self.state.lock();
        (0..=u8::MAX).zip(&manifest.volumes).any(|(number, volume)| {
            volume.draining && !volume.is_retired() && state.absence.why(number).is_none()
        })
    }

    /// Marks the directory of a volume whose marker was lost. Returns the volume's number. Every
    /// segment that the index names must exist in the directory, because the pages of a missing
    /// segment would be lost. If the index names no segment, the directory may hold only segments,
    /// the marker, the store's copies, and files that the file system or an interrupted marking
    /// made.
    pub(super) fn mark_again(&self, manifest: &mut Manifest, number: u8) -> Result<u8> {
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        let volume = &mut manifest.volumes[usize::from(number)];
        let (dir, directory) = (self.options.dir.join(&volume.dir), self.shape.directory());
        let refused = |why: &str| Err(Error::invalid(why.to_owned()).with("dir", dir.display()));
        if directory.has_marker(&dir, marker) {
            return refused("the store has this directory already");
        }
        directory.check_owner(&dir)?;
        let names = directory.medium.list(&dir)?;
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
        let is_foreign_file = |name: &&OsString| {
            let is_volumes = Segments::is_segment(name) || name.as_os_str() == VolumeMarker::FILE;
            !is_volumes && self.is_foreign_file(&dir, name)
        };
        if let Some(found) = names.iter().find(is_foreign_file).filter(|_| named.is_empty()) {
            let found = found.to_string_lossy();
            return refused(&format!(
                "the directory holds {found}: mount the volume's disk, or remove that file"
            ));
        }
        directory.write_marker(&dir, marker)?;
        volume.marked = true;
        Ok(number)
    }

    pub(super) fn add_volume(&self, manifest: &mut Manifest, name: String) -> Result<Candidate> {
        let directory = self.shape.directory();
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
        directory.medium.create_dir(&path).map_err(refused)?;
        directory.check_owner(&path)?;
        let there = manifest.volumes.iter().filter(|volume| !volume.is_retired());
        let new = directory.real(&name);
        if there.into_iter().any(|volume| directory.real(&volume.dir) == new) {
            return Err(Error::invalid("the store has this directory already, by another name")
                .with("dir", path.display()));
        }
        let names = directory.medium.list(&path).map_err(refused)?;
        let number = manifest.volumes.len() as u8;
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        if let Some(found) = names.iter().find(|name| self.is_foreign_file(&path, name)) {
            return Err(Error::invalid(
                "the directory is not empty: name an empty or new directory",
            )
            .with("dir", path.display())
            .with("found", found.to_string_lossy()));
        }
        // Remove the files that an owner left when it was killed while adding the directory.
        for name in names.iter().filter(|name| name.as_os_str() != LOST_AND_FOUND) {
            directory.medium.remove(&path.join(name)).map_err(refused)?;
        }
        let candidate = self.segments.examine(&path)?;
        if !candidate.is_trusted() {
            return Err(Error::invalid(
                "another machine or process serves this file system, so locks and durability are \
                 not certain: name a directory on a local disk",
            )
            .with("dir", path.display())
            .with("file_system", candidate.file_system()));
        }
        self.segments.check_drivable(&candidate)?;
        directory.write_marker(&path, marker).map_err(refused)?;
        manifest.volumes.push(VolumeRecord { marked: true, ..VolumeRecord::new(name) });
        Ok(candidate)
    }

    /// Whether a file in `dir` belongs neither to the file system nor to an interrupted addition,
    /// marking or removal of the directory.
    fn is_foreign_file(&self, dir: &Path, name: &OsStr) -> bool {
        let (directory, store) = (self.shape.directory(), self.shape.manifest().uuid);
        let is_own_marker = name == VolumeMarker::FILE && directory.is_marked_by(dir, store);
        let is_new_marker = name == format!("{}.new", VolumeMarker::FILE).as_str();
        !(name == LOST_AND_FOUND
            || Segments::is_left_over(name)
            || is_own_marker
            || is_new_marker
            || directory.is_own_copy(dir, name, store))
    }

    /// Returns the number of the volume in the directory `dir`.
    fn volume_in(&self, manifest: &Manifest, dir: &str) -> Result<usize> {
        let directory = self.shape.directory();
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

    /// Marks a volume in `manifest` as being drained. Returns its number.
    pub(super) fn evacuate_volume(&self, manifest: &mut Manifest, dir: &str) -> Result<u8> {
        let found = self.volume_in(manifest, dir)?;
        if self.state.lock().absence.why(found as u8).is_some() {
            return Err(Error::invalid(
                "this directory is absent: mount it, or give it up (`ritornello paths forget`)",
            )
            .with("dir", dir));
        }
        manifest.volumes[found].draining = true;
        check_not_last(manifest, dir)?;
        Ok(found as u8)
    }

    /// Removes an absent volume from `manifest`. Returns its number.
    pub(super) fn forget_volume(&self, manifest: &mut Manifest, dir: &str) -> Result<u8> {
        let found = self.volume_in(manifest, dir)?;
        let number = found as u8;
        if self.state.lock().absence.why(number).is_none() {
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

    /// Removes the copies and the marker from the directory of a volume that is no longer used.
    fn remove_marker(&self, number: u8) {
        let marker = VolumeMarker { store: self.shape.manifest().uuid, volume: number };
        let directory = self.shape.directory().clone();
        let unmark = move |segments: &Segments| {
            let dir = segments.dir(number)?;
            if directory.has_marker(&dir, marker) {
                directory.unmark(&dir)?;
            }
            Ok(())
        };
        if let Err(error) = self.on_volume(number, unmark) {
            tracing::warn!(%error, volume = number, "the marker of a drained volume could not be removed");
        }
    }

    /// Removes from the manifest the drained directories that hold no segment any longer, and
    /// deletes the copies and the markers in these directories.
    pub(super) fn retire_volumes(&self) -> Result<()> {
        let Some(change) = self.shape.change_by(Instant::now() + BACKGROUND_SYNC_TIMEOUT) else {
            return Ok(());
        };
        let (there, absent) = {
            let state = self.state.lock();
            let mut absent = state.absence.volumes();
            absent.extend(state.absence.segments().map(|id| id.volume()));
            (state.space.allocator.segments_by_volume(), absent)
        };
        let mut manifest = Manifest::clone(&self.shape.manifest());
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
        change.write(&manifest)?;
        change.publish(manifest);
        for number in gone {
            self.remove_marker(number);
            self.segments.retire_volume(number);
        }
        Ok(())
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
