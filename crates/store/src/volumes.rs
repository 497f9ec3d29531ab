//! Determines which volumes of a store are present, by the marker in each volume's directory.
//!
//! A directory whose file system is not mounted looks like an empty volume. The store draws no
//! conclusion from such a directory and creates no file in it: the volume is *absent* until its
//! marker can be read, or, if the marker is damaged or not needed, a run header in its segments
//! names the store.

use crate::directory::Directory;
use ritornello_format::{
    Error, ErrorKind, Manifest, Result, RunHeader, UNIT, VolumeMarker, VolumeRecord,
};
use ritornello_medium::{Access, Medium};
use ritornello_volume::segments::{IoChoice, Segments, SegmentsConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The search for a run header, which names the store of a volume without an intact marker, reads
/// the first `SEARCH_BYTES` of each of at most [`SEARCH_SEGMENTS`] segments.
const SEARCH_BYTES: usize = 8 << 20;
const SEARCH_SEGMENTS: usize = 8;

/// State of a volume of the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VolumeState {
    /// Present in this directory.
    Present(PathBuf),
    /// Present in this directory, whose marker is damaged or missing.
    Unmarked(PathBuf),
    /// The volume was drained or given up. Its number is not reused.
    Retired,
    /// The volume's directory cannot be used, for this reason.
    Absent(String),
    /// The volume's directory holds a volume of another store, a different volume of this store, or
    /// a volume of another format version.
    Foreign(String),
}

impl VolumeState {
    /// The directory to use; empty if the volume has no usable directory.
    pub(crate) fn dir(&self) -> PathBuf {
        match self {
            Self::Present(dir) | Self::Unmarked(dir) => dir.clone(),
            Self::Retired | Self::Absent(_) | Self::Foreign(_) => PathBuf::new(),
        }
    }

    /// Reason why the volume is absent; `None` if it is present or retired.
    pub(crate) fn absence(&self) -> Option<&str> {
        match self {
            Self::Present(_) | Self::Unmarked(_) | Self::Retired => None,
            Self::Absent(why) | Self::Foreign(why) => Some(why),
        }
    }
}

impl Directory {
    /// The state of each volume of `manifest`, by number.
    pub(crate) fn volume_states(&self, manifest: &Manifest) -> Vec<VolumeState> {
        let numbers = (0..=u8::MAX).zip(&manifest.volumes).map(|(number, _)| number);
        numbers.map(|number| self.volume_state(manifest, number)).collect()
    }

    /// The state of volume `number` of `manifest`. A volume that a restore left out is absent until
    /// `fsck --salvage` has searched its segments. Revokes the access of other users to the
    /// directory of a present volume.
    pub(crate) fn volume_state(&self, manifest: &Manifest, number: u8) -> VolumeState {
        self.close_volume(self.stored_volume_state(manifest, number))
    }

    /// Like [`Directory::volume_state`], but leaves the access of other users unchanged.
    pub(crate) fn stored_volume_state(&self, manifest: &Manifest, number: u8) -> VolumeState {
        let at = self.examine_volume(manifest, number);
        let unsearched = manifest.volumes.get(usize::from(number)).is_some_and(|v| v.unsearched);
        if unsearched && at.absence().is_none() {
            return VolumeState::Absent(
                "a restore of the store left this directory out: `ritornello fsck --salvage`, with \
                 the store's directory, finds the pages in this directory and uses it again"
                    .to_owned(),
            );
        }
        at
    }

    /// Like [`Directory::volume_state`], but a volume that a restore left out is not absent for
    /// that reason.
    pub(crate) fn volume_now(&self, manifest: &Manifest, number: u8) -> VolumeState {
        self.close_volume(self.examine_volume(manifest, number))
    }

    /// Like [`Directory::volume_now`], but leaves the access of other users unchanged.
    fn examine_volume(&self, manifest: &Manifest, number: u8) -> VolumeState {
        let volume = manifest.volumes.get(usize::from(number));
        let Some(volume) = volume.filter(|volume| !volume.is_retired()) else {
            return VolumeState::Retired;
        };
        let dir = self.path().join(&volume.dir);
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        self.examine_dir(dir, marker, needs_marker(volume))
    }

    /// Revokes other users' access to the directory of a volume that is present. A directory that
    /// cannot be closed to other users is absent.
    fn close_volume(&self, at: VolumeState) -> VolumeState {
        let (VolumeState::Present(dir) | VolumeState::Unmarked(dir)) = &at else { return at };
        match self.close_to_others(dir) {
            Ok(()) => at,
            Err(error) => VolumeState::Absent(format!(
                "the directory cannot be closed to other users: {error}"
            )),
        }
    }

    /// Rewrites lost markers, and records in the manifest which volumes carry one. Only the owner
    /// may call this.
    pub(crate) fn repair_markers(&self, manifest: &mut Manifest, found: &[VolumeState]) {
        let store = manifest.uuid;
        for ((number, volume), at) in (0..=u8::MAX).zip(&mut manifest.volumes).zip(found) {
            let marked = match at {
                VolumeState::Present(_) => Ok(()),
                VolumeState::Unmarked(dir) => {
                    self.write_marker(dir, VolumeMarker { store, volume: number })
                }
                _ => continue,
            };
            match marked {
                Ok(()) => volume.marked = true,
                Err(error) => {
                    tracing::warn!(%error, dir = volume.dir, "the marker of a volume could not be written")
                }
            }
        }
    }

    /// Whether `dir` carries the marker of a store different from `manifest`'s, or a marker of
    /// another format version.
    #[must_use]
    pub fn is_foreign(&self, dir: &Path, manifest: &Manifest) -> bool {
        match self.marker_in(dir).ok().flatten() {
            Some(Ok(found)) => found.store != manifest.uuid,
            Some(Err(error)) => error.kind() == ErrorKind::Invalid,
            None => false,
        }
    }

    /// The directories of the volumes that are present.
    #[must_use]
    pub fn present_volumes(&self, manifest: &Manifest) -> Vec<PathBuf> {
        let numbers = (0..=u8::MAX).zip(&manifest.volumes).map(|(number, _)| number);
        let dirs = numbers.map(|number| self.volume_now(manifest, number).dir());
        dirs.filter(|dir| !dir.as_os_str().is_empty()).collect()
    }

    /// Whether the directory of volume `number` holds the volume.
    pub(crate) fn is_volume_present(&self, manifest: &Manifest, number: u8) -> bool {
        let at = self.volume_now(manifest, number);
        at != VolumeState::Retired && at.absence().is_none()
    }

    /// Returns the state of the `expected` volume, given the contents of `dir`. If `dir` has no
    /// marker and `needs_marker` is set, the volume is absent. If `dir` has no marker and
    /// `needs_marker` is unset, or if the marker is damaged, the volume is in `dir` if a run header
    /// in the segments names its store.
    pub(crate) fn find_volume(
        &self,
        dir: PathBuf,
        expected: VolumeMarker,
        needs_marker: bool,
    ) -> VolumeState {
        self.close_volume(self.examine_dir(dir, expected, needs_marker))
    }

    /// Like [`Directory::find_volume`], but leaves the access of other users unchanged.
    fn examine_dir(&self, dir: PathBuf, expected: VolumeMarker, needs_marker: bool) -> VolumeState {
        let found = match self.marker_in(&dir) {
            Ok(found) => found,
            Err(error) => return VolumeState::Absent(error.to_string()),
        };
        match found {
            Some(Ok(found)) if found == expected => VolumeState::Present(dir),
            Some(Ok(found)) if found.store == expected.store => {
                VolumeState::Foreign(format!("the directory holds volume {}", found.volume))
            }
            Some(Ok(_)) => {
                VolumeState::Foreign("the directory holds another store's volume".to_owned())
            }
            Some(Err(error)) if error.kind() == ErrorKind::Invalid => {
                VolumeState::Foreign(error.to_string())
            }
            None if needs_marker => VolumeState::Absent(
                "the directory has no marker: mount its file system, or, if the marker was lost, \
                 name the directory to `ritornello paths add`"
                    .to_owned(),
            ),
            // The marker is damaged, or is missing and not needed: the run headers in the segments
            // name the store.
            _ => match self.store_of_segments(&dir) {
                Ok(Some(store)) if store == expected.store => VolumeState::Unmarked(dir),
                Ok(Some(_)) => {
                    VolumeState::Foreign("the directory holds another store's segments".to_owned())
                }
                Ok(None) => VolumeState::Absent(
                    "the directory has no intact marker: mount its file system".to_owned(),
                ),
                Err(error) => VolumeState::Absent(error.to_string()),
            },
        }
    }

    /// Returns the store whose runs are in the segments of `dir`, according to the first run header
    /// found near the beginning of a segment. Without such a header, returns `None`, or the error
    /// of a segment that could not be read.
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

    /// Creates and marks the directories of a new store. For any other store, does so with
    /// directories that were removed from inside the main directory (the store's own directory).
    /// The caller writes the manifest afterwards.
    ///
    /// # Errors
    /// `Invalid` if a directory holds a different volume, or belongs to another user; file-system
    /// errors.
    pub(crate) fn mark_volumes(&self, manifest: &mut Manifest) -> Result<()> {
        let store = manifest.uuid;
        let being_made = manifest.owner_epoch == 0 && !manifest.is_being_restored();
        let path = self.path().to_owned();
        for (number, volume) in (0..=u8::MAX).zip(&mut manifest.volumes) {
            if volume.is_retired() {
                continue;
            }
            let dir = path.join(&volume.dir);
            // A mount point, or a link to a mount point, exists even if no file system is mounted.
            // A missing directory inside the main directory was therefore removed, and can be
            // created again.
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
                    "the directory holds a volume of another store: name an empty or new directory",
                )
                .with("dir", dir.display())
                .with("why", why));
            }
            let created = self.medium.create_dir(&dir);
            created.map_err(|error| self.refused(error).with("path", dir.display()))?;
            self.check_owner(&dir)?;
            match self.write_marker(&dir, marker) {
                Ok(()) => volume.marked = true,
                Err(error) => return Err(self.refused(error).with("path", dir.display())),
            }
        }
        Ok(())
    }

    /// Marks `dir`, durably, and revokes other users' access.
    pub(crate) fn write_marker(&self, dir: &Path, marker: VolumeMarker) -> io::Result<()> {
        self.close_to_others(dir)?;
        self.replace_in(dir, VolumeMarker::FILE, &marker.encode())
    }

    /// Whether `dir` carries a marker of this store. If the directory carries the marker and the
    /// manifest does not name it, an addition or removal of the directory was interrupted.
    pub(crate) fn is_marked_by(&self, dir: &Path, store: [u8; 16]) -> bool {
        let found = self.marker_in(dir).ok().flatten();
        found.is_some_and(|found| found.is_ok_and(|found| found.store == store))
    }

    pub(crate) fn has_marker(&self, dir: &Path, marker: VolumeMarker) -> bool {
        let found = self.marker_in(dir).ok().flatten();
        found.is_some_and(|found| found.is_ok_and(|found| found == marker))
    }

    /// Removes from `dir` the marker, and the copies of manifest and scopes, of a volume that the
    /// store no longer uses.
    pub(crate) fn unmark(&self, dir: &Path) -> io::Result<()> {
        self.remove_copies(dir)?;
        match self.medium.remove(&dir.join(VolumeMarker::FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.medium.sync_dir(dir),
        }
    }

    /// Refuses a main directory whose manifest belongs to other volumes: no volume that the
    /// manifest names is present, and some of the named directories hold other volumes.
    pub(crate) fn check_expected(&self, manifest: &Manifest, found: &[VolumeState]) -> Result<()> {
        let foreign = |at: &VolumeState| matches!(at, VolumeState::Foreign(_));
        let ours =
            |at: &VolumeState| matches!(at, VolumeState::Present(_) | VolumeState::Unmarked(_));
        if !found.iter().any(foreign) || found.iter().any(ours) {
            return Ok(());
        }
        let dirs: Vec<&str> = manifest.volumes.iter().map(|volume| volume.dir.as_str()).collect();
        Err(Error::invalid(
            "no directory of this store holds its volume, and some hold other volumes: mount each \
             disk where it was, or name the main directory of the volumes that are mounted",
        )
        .with("dir", self.path().display())
        .with("volumes", dirs.join(", ")))
    }

    /// Opens the segment files of the store that `manifest` describes, in the volumes present. The
    /// directory of a volume that returns later is looked up when one of the volume's segments is
    /// opened.
    ///
    /// # Errors
    /// Errors of [`Segments::open`].
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

/// Returns whether a volume is absent if its directory has no marker, whatever segments are in it:
/// true for volumes that carried a marker and have an absolute path, because a build without
/// markers may have written segments into the mount point while no disk was mounted. A directory
/// with a relative path is inside the main directory, and is not a mount point.
fn needs_marker(volume: &VolumeRecord) -> bool {
    volume.marked && Path::new(&volume.dir).is_absolute()
}

/// Opens the manifest and the segment files of a store that another process owns.
///
/// # Errors
/// `Retry` if the directory has no store; errors of [`Directory::manifest`] and of
/// [`Segments::open`].
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
