//! Which of a store's volumes are here, told by the marker in each volume's directory.
//!
//! A directory whose file system is not mounted looks like an empty volume. Nothing is concluded
//! from it and nothing is created in it: the volume is *away* until its marker can be read.

use crate::directory::Directory;
use ritornello_format::{Error, Manifest, Result, RunHeader, UNIT, VolumeMarker, VolumeRecord};
use ritornello_medium::{Access, Medium};
use ritornello_volume::segments::{IoChoice, Segments, SegmentsConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run header of the store is looked for in this much of a segment, and in so many segments.
const SEARCH_BYTES: usize = 8 << 20;
const SEARCH_SEGMENTS: usize = 8;

/// Where a volume of the manifest is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VolumeState {
    /// In this directory.
    Here(PathBuf),
    /// In this directory, whose marker is damaged or lost.
    Unmarked(PathBuf),
    /// It was drained or given up: its number is not used again.
    Gone,
    /// Its directory cannot be used now, for this reason.
    Away(String),
    /// Its directory holds a volume of another store, or another volume of this one.
    Foreign(String),
}

impl VolumeState {
    /// The directory to use; empty if there is none.
    pub(crate) fn dir(&self) -> PathBuf {
        match self {
            Self::Here(dir) | Self::Unmarked(dir) => dir.clone(),
            Self::Gone | Self::Away(_) | Self::Foreign(_) => PathBuf::new(),
        }
    }

    /// Why the volume cannot be used now, if it is not gone.
    pub(crate) fn absence(&self) -> Option<&str> {
        match self {
            Self::Here(_) | Self::Unmarked(_) | Self::Gone => None,
            Self::Away(why) | Self::Foreign(why) => Some(why),
        }
    }
}

impl Directory {
    /// Where each volume of `manifest` is, by number.
    pub(crate) fn volume_states(&self, manifest: &Manifest) -> Vec<VolumeState> {
        let each = (0..=u8::MAX).zip(&manifest.volumes);
        each.map(|(number, volume)| {
            if volume.is_gone() {
                return VolumeState::Gone;
            }
            let dir = self.path().join(&volume.dir);
            let marker = VolumeMarker { store: manifest.uuid, volume: number };
            self.find_volume(dir, marker, needs_marker(volume))
        })
        .collect()
    }

    /// Writes lost markers again, and notes in the manifest which volumes carry one. Only the owner
    /// may.
    pub(crate) fn repair_markers(&self, manifest: &mut Manifest, found: &[VolumeState]) {
        let store = manifest.uuid;
        for ((number, volume), at) in (0..=u8::MAX).zip(&mut manifest.volumes).zip(found) {
            let marked = match at {
                VolumeState::Here(_) => Ok(()),
                VolumeState::Unmarked(dir) => {
                    self.write_marker(dir, VolumeMarker { store, volume: number })
                }
                _ => continue,
            };
            match marked {
                Ok(()) => volume.marked = true,
                Err(error) => tracing::warn!(%error, dir = volume.dir, "a volume stays unmarked"),
            }
        }
    }

    /// Whether `dir` carries the marker of another store than that of `manifest`.
    #[must_use]
    pub fn is_foreign(&self, dir: &Path, manifest: &Manifest) -> bool {
        let found = self.marker_in(dir).ok().flatten();
        found.is_some_and(|found| found.is_ok_and(|found| found.store != manifest.uuid))
    }

    /// The directories of the volumes that are here.
    #[must_use]
    pub fn volumes_here(&self, manifest: &Manifest) -> Vec<PathBuf> {
        let dirs = self.volume_states(manifest).into_iter().map(|at| at.dir());
        dirs.filter(|dir| !dir.as_os_str().is_empty()).collect()
    }

    /// Whether the directory of volume `number` holds it now.
    pub(crate) fn is_volume_here(&self, manifest: &Manifest, number: u8) -> bool {
        let Some(volume) = manifest.volumes.get(usize::from(number)) else { return false };
        if volume.is_gone() {
            return false;
        }
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        let dir = self.path().join(&volume.dir);
        self.find_volume(dir, marker, needs_marker(volume)).absence().is_none()
    }

    /// Whether `dir` holds the volume that `expected` names. One that `needs_marker` is not told by its
    /// segments.
    pub(crate) fn find_volume(
        &self,
        dir: PathBuf,
        expected: VolumeMarker,
        needs_marker: bool,
    ) -> VolumeState {
        let found = match self.marker_in(&dir) {
            Ok(found) => found,
            Err(error) => return VolumeState::Away(error.to_string()),
        };
        let at = match found {
            Some(Ok(found)) if found == expected => VolumeState::Here(dir),
            Some(Ok(found)) if found.store == expected.store => {
                VolumeState::Foreign(format!("its directory holds volume {}", found.volume))
            }
            Some(Ok(_)) => {
                VolumeState::Foreign("its directory holds another store's volume".to_owned())
            }
            None if needs_marker => VolumeState::Away(
                "its directory has no marker: mount its file system, or, if the marker was lost, \
                 name the directory to `ritornello paths add`"
                    .to_owned(),
            ),
            // The marker is damaged, or this is a store of an earlier build.
            _ => match self.store_of_segments(&dir) {
                Ok(Some(store)) if store == expected.store => VolumeState::Unmarked(dir),
                Ok(Some(_)) => {
                    VolumeState::Foreign("its directory holds another store's segments".to_owned())
                }
                Ok(None) => VolumeState::Away(
                    "its directory has no marker: is its file system mounted?".to_owned(),
                ),
                Err(error) => VolumeState::Away(error.to_string()),
            },
        };
        match &at {
            VolumeState::Here(dir) | VolumeState::Unmarked(dir) => {
                self.close_to_others(dir).map_or_else(
                    |error| VolumeState::Away(format!("cannot be closed to other users: {error}")),
                    |()| at.clone(),
                )
            }
            _ => at,
        }
    }

    /// The store whose runs lie in the segments of `dir`, told by the first run header that is found
    /// near the beginning of one; `None` if there is none.
    fn store_of_segments(&self, dir: &Path) -> io::Result<Option<[u8; 16]>> {
        let mut buffer = vec![0; SEARCH_BYTES];
        let names = self.medium.list(dir)?;
        let mut failed = None;
        for name in names.iter().filter(|name| Segments::is_segment(name)).take(SEARCH_SEGMENTS) {
            let opened = self.medium.open(&dir.join(name), Access::default());
            let read = match opened.and_then(|file| file.read_at(&mut buffer, 0)) {
                Ok(read) => read,
                Err(error) => {
                    failed = Some(error);
                    continue;
                }
            };
            for unit in buffer[..read].chunks(UNIT as usize) {
                if let Some(store) = RunHeader::store_of(unit) {
                    return Ok(Some(store));
                }
            }
        }
        failed.map_or(Ok(None), Err)
    }

    /// Makes and marks the directories of a store that is being made, or that were removed from inside
    /// the main directory. The caller writes the manifest afterwards.
    ///
    /// # Errors
    /// `Invalid` if a directory holds another volume; those of the file system.
    pub(crate) fn mark_volumes(&self, manifest: &mut Manifest) -> Result<()> {
        let (store, being_made) = (manifest.uuid, manifest.epoch == 0);
        let path = self.path().to_owned();
        for (number, volume) in (0..=u8::MAX).zip(&mut manifest.volumes) {
            if volume.is_gone() {
                continue;
            }
            let dir = path.join(&volume.dir);
            // A mount point, and a link to one, exists. A directory inside the main one that does not
            // was removed.
            let named = self.medium.list(&path).is_ok_and(|names| {
                names.iter().any(|name| name.as_os_str() == volume.dir.as_str())
            });
            let removed = Path::new(&volume.dir).is_relative()
                && !named
                && self.medium.list(&dir).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
            if !removed && !being_made {
                continue;
            }
            let marker = VolumeMarker { store, volume: number };
            let own = being_made && self.is_marked_by(&dir, store);
            if let VolumeState::Foreign(why) =
                self.find_volume(dir.clone(), marker, needs_marker(volume))
                && !own
            {
                return Err(Error::invalid(
                    "the directory holds a volume of another store: name an empty or new one",
                )
                .with("dir", dir.display())
                .with("why", why));
            }
            self.medium.create_dir(&dir).map_err(|error| self.refused(error))?;
            self.check_owner(&dir)?;
            match self.write_marker(&dir, marker) {
                Ok(()) => volume.marked = true,
                Err(error) => return Err(self.refused(error).with("path", dir.display())),
            }
        }
        Ok(())
    }

    /// Marks `dir`, durably, and closes it to other users.
    pub(crate) fn write_marker(&self, dir: &Path, marker: VolumeMarker) -> io::Result<()> {
        self.close_to_others(dir)?;
        self.replace_in(dir, VolumeMarker::FILE, &marker.encode())
    }

    /// Whether `dir` carries a marker of this store. In a directory that the manifest does not name, an
    /// owner that added or removed the directory did not come to the end of it.
    pub(crate) fn is_marked_by(&self, dir: &Path, store: [u8; 16]) -> bool {
        let found = self.marker_in(dir).ok().flatten();
        found.is_some_and(|found| found.is_ok_and(|found| found.store == store))
    }

    /// Whether `dir` carries `marker`.
    pub(crate) fn has_marker(&self, dir: &Path, marker: VolumeMarker) -> bool {
        let found = self.marker_in(dir).ok().flatten();
        found.is_some_and(|found| found.is_ok_and(|found| found == marker))
    }

    /// Takes the marker of a volume that is no more out of `dir`.
    pub(crate) fn remove_marker(&self, dir: &Path) -> io::Result<()> {
        match self.medium.remove(&dir.join(VolumeMarker::FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.medium.sync_dir(dir),
        }
    }

    /// Refuses a directory that is not the main directory of the volumes that it names: none of them
    /// is its own, and some are other volumes.
    pub(crate) fn check_expected(&self, manifest: &Manifest, found: &[VolumeState]) -> Result<()> {
        let foreign = |at: &VolumeState| matches!(at, VolumeState::Foreign(_));
        let ours = |at: &VolumeState| matches!(at, VolumeState::Here(_) | VolumeState::Unmarked(_));
        if !found.iter().any(foreign) || found.iter().any(ours) {
            return Ok(());
        }
        let dirs: Vec<&str> = manifest.volumes.iter().map(|volume| volume.dir.as_str()).collect();
        Err(Error::invalid(
            "no directory of this store holds the volume that it should, and some hold other \
             volumes: mount them where they were, or name the directory that they were made with",
        )
        .with("dir", self.path().display())
        .with("volumes", dirs.join(", ")))
    }

    /// The segment files of the store that `manifest` describes, in the volumes that are here.
    /// Volumes that come later are found when a segment of theirs is asked for.
    ///
    /// # Errors
    /// Those of [`Segments::open`].
    pub(crate) fn open_segments(
        &self,
        manifest: &Manifest,
        found: &[VolumeState],
        io: IoChoice,
    ) -> Result<Arc<Segments>> {
        let config = SegmentsConfig {
            dirs: found.iter().map(VolumeState::dir).collect(),
            segment_bytes: manifest.segment_bytes,
            io,
            in_flight_bytes: SegmentsConfig::IN_FLIGHT_BYTES,
        };
        let segments = Segments::open(Arc::clone(&self.medium), config)?;
        let most = manifest.capacity / manifest.segment_bytes.max(1);
        segments.reserve_files(usize::try_from(most).unwrap_or(usize::MAX));
        let this = self.clone();
        let (guard, store) = (self.clone(), manifest.uuid);
        segments.guard_with(Box::new(move |volume, dir| {
            guard.has_marker(dir, VolumeMarker { store, volume })
        }));
        segments.discover_with(Box::new(move || {
            let Some(manifest) = this.manifest()? else { return Ok(Vec::new()) };
            Ok(this.volume_states(&manifest).iter().map(VolumeState::dir).collect())
        }));
        Ok(Arc::new(segments))
    }
}

/// Whether a volume that is known to carry a marker is only told by it: a build that knew no markers
/// may have written segments below the mount point. A directory inside the main one is none.
fn needs_marker(volume: &VolumeRecord) -> bool {
    volume.marked && Path::new(&volume.dir).is_absolute()
}

/// Opens the manifest and the segment files of a store that another process owns.
///
/// # Errors
/// `Retry` where there is no store; those of [`Segments::open`].
pub fn open_segments(
    medium: Arc<dyn Medium>,
    dir: &Path,
    io: IoChoice,
) -> Result<(Manifest, Arc<Segments>)> {
    let directory = Directory::new(medium, dir);
    let manifest = directory
        .manifest()?
        .ok_or_else(|| Error::retry("there is no store here yet").with("dir", dir.display()))?;
    let segments = directory.open_segments(&manifest, &directory.volume_states(&manifest), io)?;
    Ok((manifest, segments))
}
