//! The segment files of a store: opens, creates, syncs and removes them, and holds the engine that
//! moves their bytes.

mod choose;
mod files;
mod huge;
mod kind;
mod maps;
mod names;
mod report;
mod selftest;
mod speeds;
mod stalls;
mod volumes;

pub use report::{IoChoice, IoMode, IoReport};
pub(crate) use speeds::{Moved, Speeds};
pub(crate) use stalls::{LeftBehind, OpInFlight};
pub use volumes::{Candidate, Discover, Guard};

use stalls::Stalls;
use volumes::{Discovery, Volume};

use crate::io_engine::IoEngine;
use crate::map::Map;
use crate::run_on_threads;
use crate::staging::{Staging, StagingStats};
use crate::transfer::copy_threads_max;
use files::Files;
use maps::Maps;
use parking_lot::{Mutex, RwLock};
use ritornello_format::{Error, Place, Result, SegmentId, UNIT};
use ritornello_medium::{Access, Medium, MediumFile};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Maximum files that are synced at the same time.
const SYNCS_MAX: usize = 8;
/// Upper bound of [`Segments::op_bytes`], in bytes. Longer operations are not faster, and fewer of
/// them are in flight at the same time.
const OP_BYTES_MAX: usize = 4 << 20;
/// Lower bound of [`Segments::op_bytes`], in bytes: shorter operations cost too much CPU per byte.
const OP_BYTES_MIN: usize = 256 << 10;

/// Configuration of [`Segments::open`].
#[derive(Clone, Debug)]
pub struct SegmentsConfig {
    /// The volumes' directories; a volume's number is its position. The path of a retired or absent
    /// volume is empty.
    pub dirs: Vec<PathBuf>,
    /// Length of every segment file in bytes: a multiple of 4 KiB.
    pub segment_bytes: u64,
    /// The requested I/O mode.
    pub io: IoChoice,
    /// Bytes that one call keeps in flight on each volume; zero means
    /// [`SegmentsConfig::IN_FLIGHT_BYTES`].
    pub in_flight_bytes: usize,
}

impl SegmentsConfig {
    /// The default of [`SegmentsConfig::in_flight_bytes`]. Half of these bytes keep the disks of an
    /// idle machine busy; the other half keep the disks busy while the scheduler delays the calling
    /// thread.
    pub const IN_FLIGHT_BYTES: usize = 32 << 20;
}

/// Minimum bytes of staging, which all calls share, for encoded pages among others. A page longer
/// than half of staging is written unencoded.
const STAGING_BYTES_MIN: usize = 64 << 20;

/// Open handles of segment files `<dir>/seg-<number>`. Allocation of space inside the files is the
/// task of [`Space`](crate::space::Space).
///
/// A file is opened when it is first used, because the owner of a store may create segments after a
/// client opened it. Volumes may be added, too: see [`Segments::discover_with`]. The number of a
/// removed segment is never reused, so an open handle never belongs to a newer segment. All methods
/// may be called from any thread.
pub struct Segments {
    medium: Arc<dyn Medium>,
    io: IoChoice,
    volumes: RwLock<Vec<Volume>>,
    discovery: Discovery,
    segment_bytes: u64,
    /// Bytes that one call keeps in flight on each volume.
    pub(crate) in_flight_bytes: usize,
    pub(crate) speeds: Speeds,
    pub(crate) stalls: Arc<Stalls>,
    pub(crate) engine: Box<dyn IoEngine>,
    pub(crate) staging: Arc<Staging>,
    files: Files,
    /// The maps of segments; `None` unless the I/O mode is `Mapped`.
    maps: Option<Maps>,
    report: RwLock<IoReport>,
    /// Volumes whose directories could not be used when the segments were opened, with the reasons.
    unusable_dirs: Vec<(u8, String)>,
    /// The process that opened the segments: rings and threads do not survive a fork.
    process: u32,
}

impl Segments {
    /// Tests the directories, and chooses the I/O mode ([`IoMode`]). If a directory fails the test
    /// and another passes, the volume of the first counts as absent ([`Segments::unusable_dirs`]).
    ///
    /// # Errors
    /// `Invalid` if all named directories fail the self-test, if there are no volumes or more than
    /// 256, if `segment_bytes` is not a positive multiple of 4 KiB or is too large, or if the
    /// requested I/O mode does not work here. `Retry` if staging memory cannot be reserved.
    pub fn open(medium: Arc<dyn Medium>, config: SegmentsConfig) -> Result<Self> {
        let SegmentsConfig { dirs, segment_bytes, io, in_flight_bytes } = config;
        let live: Vec<PathBuf> =
            dirs.iter().filter(|dir| !dir.as_os_str().is_empty()).cloned().collect();
        if dirs.is_empty() || dirs.len() > 256 {
            return Err(Error::invalid("a store has 1 to 256 directories").with("dirs", dirs.len()));
        }
        let units_fit = segment_bytes / UNIT <= u64::from(u32::MAX);
        if segment_bytes == 0 || !segment_bytes.is_multiple_of(UNIT) || !units_fit {
            return Err(Error::invalid(
                "the length of a segment must be a positive multiple of 4 KiB below 16 TiB",
            )
            .with("segment_bytes", segment_bytes));
        }
        let in_flight_bytes = match in_flight_bytes {
            0 => SegmentsConfig::IN_FLIGHT_BYTES,
            bytes => bytes.max(UNIT as usize),
        };
        let staging = Staging::new((8 * in_flight_bytes).max(STAGING_BYTES_MIN))?;
        let choice = choose::choose(medium.as_ref(), &live, io, staging.stats().backing)?;
        let mut found = choice.volumes.into_iter();
        let (mut volumes, mut unusable_dirs) = (Vec::new(), Vec::new());
        for (number, dir) in (0..=u8::MAX).zip(dirs) {
            let is_named = !dir.as_os_str().is_empty();
            let volume = match is_named.then(|| found.next()).flatten() {
                Some(Ok(volume)) => volume,
                Some(Err(error)) => {
                    tracing::warn!(%error, dir = %dir.display(), "a volume cannot be used");
                    unusable_dirs.push((number, error.to_string()));
                    Volume::default()
                }
                None => Volume::default(),
            };
            volumes.push(volume);
        }
        Ok(Self {
            medium,
            io,
            volumes: RwLock::new(volumes),
            discovery: Discovery::default(),
            segment_bytes,
            in_flight_bytes,
            speeds: Speeds::new(copy_threads_max()),
            stalls: Stalls::new(),
            engine: choice.engine,
            staging,
            files: Files::default(),
            maps: (choice.report.mode == IoMode::Mapped).then(Maps::new),
            report: RwLock::new(choice.report),
            unusable_dirs,
            process: std::process::id(),
        })
    }

    /// Creates a segment and allocates its blocks. The segment's name is durable when the call
    /// returns.
    ///
    /// # Errors
    /// `Retry` if the file system is full or fails, or if the directory does not hold the volume;
    /// a file that was created is then removed if possible. `Fatal` if a file of that name existed:
    /// it may hold pages, so it is left unchanged, and the caller must take another number.
    /// `Invalid` if the volume is unknown, retired, or absent.
    pub fn create(&self, id: SegmentId) -> Result<()> {
        let path = self.path(id)?;
        self.check_volume(id.volume())?;
        let existing = self.medium.open(&path, Access::default());
        match existing {
            Ok(_) => {
                return Err(Error::fatal("a new segment's file already exists")
                    .with("path", path.display()));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::from(error).with("path", path.display())),
        }
        let access = Access { write: true, create: true, direct: self.volume(id).direct };
        let filled = self.medium.open(&path, access).and_then(|file| {
            if self.maps.is_some() {
                // Request huge pages first, because `fallocate` allocates small pages on most
                // mounts.
                file.set_len(self.segment_bytes)?;
                self.allocate_huge(id, &file);
            }
            file.allocate(self.segment_bytes)?;
            Ok(file)
        });
        // Sync the name now: by the next flush, a different file system may be mounted at the path.
        let made = filled.and_then(|file| self.sync_names(id.volume()).map(|()| file));
        match made {
            Ok(file) => {
                // Close the handle of an earlier file of this name, which another thread may have
                // opened.
                self.close(id);
                self.cache_file(id, file);
                Ok(())
            }
            Err(error) => {
                self.close(id);
                // A partly allocated segment would count against the capacity: remove it, unless a
                // different volume is mounted at the path now.
                if self.check_volume(id.volume()).is_ok() {
                    let _ = self.medium.remove(&path);
                }
                Err(Error::retry(
                    "a segment cannot be created: free space on this file system, or fix the cause",
                )
                .with("path", path.display())
                .with("bytes", self.segment_bytes)
                .because(error))
            }
        }
    }

    /// Allocates the memory of a new segment in huge pages, as far as the kernel provides them; the
    /// caller allocates the remaining memory. After the kernel had no huge page free, or took long,
    /// requests no huge pages for ten seconds.
    fn allocate_huge(&self, id: SegmentId, file: &Arc<dyn MediumFile>) {
        let Some(maps) = self.maps.as_ref().filter(|maps| !maps.is_huge_paused()) else { return };
        let Ok(Some(map)) = Map::new(file, self.segment_bytes) else { return };
        if let Err(error) = map.allocate_huge() {
            tracing::debug!(%error, segment = id.number(), "a segment is partly in small pages");
            if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::OutOfMemory) {
                maps.pause_huge();
            }
        }
    }

    /// Restores the length of a segment that was truncated. The lost bytes read as zeroes, so pages
    /// in them miss, and the space can be written again. Returns whether the segment was short or,
    /// in memory, not fully allocated.
    ///
    /// # Errors
    /// `Retry` if the file system refuses.
    pub fn restore_length(&self, id: SegmentId) -> Result<bool> {
        let restored = self.file(id).and_then(|file| {
            // A segment in memory whose creation was interrupted may have its length without its
            // memory.
            if file.length()? >= self.segment_bytes
                && (!self.volume(id).in_memory || file.allocated()? >= self.segment_bytes)
            {
                return Ok(false);
            }
            file.allocate(self.segment_bytes)?;
            Ok(true)
        });
        // A handle of a device that failed keeps failing: close it, so that the next attempt opens
        // the file again.
        Ok(restored.inspect_err(|_| self.close(id))?)
    }

    /// Removes a segment, durably. Succeeds if the segment does not exist. On a disk the segment's
    /// blocks are free immediately, even if another process has the file open; in memory they are
    /// free once every process has closed the file. A segment in memory is never truncated, in any
    /// I/O mode of this process: truncation would raise SIGBUS in every process that reads the
    /// segment through a map.
    ///
    /// # Errors
    /// `Retry` if the file system refuses, or if the directory does not hold the volume now.
    /// `Invalid` if the volume is unknown, retired, or absent.
    pub fn remove(&self, id: SegmentId) -> Result<()> {
        let path = self.path(id)?;
        self.check_volume(id.volume())?;
        let refused = |error: io::Error| Error::from(error).with("path", path.display());
        match self.file(id) {
            Ok(file) if !self.volume(id).in_memory => file.set_len(0).map_err(refused)?,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(error)),
        }
        self.close(id);
        match self.medium.remove(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(error)),
        }
        let dir = self.dir(id.volume())?;
        self.medium.sync_dir(&dir).map_err(refused)
    }

    /// Waits until all writes to segment `id` that a dead process submitted have completed. The
    /// caller ensures that no living process writes to the space that the dead process was writing
    /// to. Blocks for as long as the disk takes.
    ///
    /// # Errors
    /// `Retry` if the file system refuses: the writes may still be in flight.
    pub fn drain(&self, id: SegmentId) -> Result<()> {
        let simulated = self.report.read().mode == IoMode::Simulated;
        // On a file system that cannot be drained, no write of a dead process is in flight: only
        // threads make direct writes there, and a thread's write ends before its process.
        if !self.volume(id).drains && !simulated {
            return Ok(());
        }
        let drained = self.file(id).and_then(|file| file.drain());
        drained.map_err(|error| Error::from(error).with("segment", Segments::file_name(id)))
    }

    /// Makes durable all writes to these segments by any process.
    ///
    /// # Errors
    /// `Fatal` if a sync fails: the contents of the disk are then unknown. `Retry` if a file cannot
    /// be opened, for example because too many are open; then no file was synced.
    pub fn sync(&self, ids: &[SegmentId]) -> Result<()> {
        for &id in ids {
            self.file(id)?;
        }
        let next = Mutex::new(ids.iter());
        let work = || -> Result<()> {
            loop {
                let Some(&id) = next.lock().next() else { return Ok(()) };
                let name = || Segments::file_name(id);
                let file = self.file(id).map_err(|error| failed_sync(name(), error))?;
                file.sync_data().map_err(|error| failed_sync(name(), error))?;
            }
        };
        // Sync simulated files in order, so that a test is repeatable.
        let mode = self.report.read().mode;
        // Mapped segments are in memory, where a sync writes nothing: further threads save no time.
        let one = matches!(mode, IoMode::Simulated | IoMode::Mapped);
        let threads = if one { 1 } else { SYNCS_MAX };
        let synced = run_on_threads(ids.len().min(threads), "ritornello-sync", work);
        let panicked = || Err(Error::fatal("a sync of segments panicked: reopen the store"));
        synced.into_iter().try_for_each(|part| part.unwrap_or_else(|_| panicked()))
    }

    /// Checks that files of a volume can be synced: syncs the segment with the highest number, if
    /// the volume has segments. A sync of the self-test's file may succeed although syncs of
    /// segments fail.
    ///
    /// # Errors
    /// `Fatal` if the sync fails. Returns no error if the directory cannot be listed, or the file
    /// cannot be opened.
    pub fn check_syncs(&self, volume: u8) -> Result<()> {
        let newest = self.list(volume).ok().and_then(|listed| listed.last().copied());
        let Some(id) = newest.filter(|id| self.file(*id).is_ok()) else { return Ok(()) };
        self.sync(&[id])
    }

    /// Total bytes of the blocks allocated to segments. Segments whose files cannot be read now
    /// count as zero.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        let allocated = |id| self.file(id).and_then(|file| file.allocated()).unwrap_or(0);
        self.listable().into_iter().map(allocated).sum()
    }

    /// Volumes whose directories could not be used when the segments were opened, with the reasons.
    /// These volumes count as absent.
    #[must_use]
    pub fn unusable_dirs(&self) -> Vec<(u8, String)> {
        self.unusable_dirs.clone()
    }

    /// The I/O mode, and why it was chosen.
    #[must_use]
    pub fn report(&self) -> IoReport {
        let volumes = self.volumes.read();
        let present = volumes.iter().filter(|volume| volume.is_present());
        let file_systems = present.map(|volume| volume.file_system.clone()).collect();
        IoReport { file_systems, ..self.report.read().clone() }
    }

    /// Usage of the staging memory.
    #[must_use]
    pub fn staging(&self) -> StagingStats {
        self.staging.stats()
    }

    /// The measured speed of each volume in KiB/s, by volume number; zero for a volume that this
    /// process has not measured. The speeds are of reads, unless a volume has a measurement of
    /// writes only: then all speeds are of writes. `None` if nothing was measured since the last
    /// call.
    #[must_use]
    pub fn new_speeds(&self) -> Option<Vec<u32>> {
        self.speeds.take_new()
    }

    /// The speed of the slowest measured volume in bytes per second, for writes if `written`, else
    /// for reads; `None` if no volume was measured.
    #[must_use]
    pub fn slowest(&self, written: bool) -> Option<u64> {
        self.speeds.slowest(if written { Moved::Written } else { Moved::Read })
    }

    /// Time after which a volume with operations in flight and no completion counts as stalled.
    pub const STALLED_AFTER: Duration = stalls::STALLED_AFTER;

    /// For how long a volume has completed no operation of this process, although some are in
    /// flight: the longest such time of all volumes.
    #[must_use]
    pub fn longest_silence(&self) -> Duration {
        self.stalls.longest_silence()
    }

    /// Whether a volume of `place` has completed no operation of this process for two seconds,
    /// although some are in flight. Pages on such a volume miss, and writes to it fail, except a
    /// single operation every 30 seconds, which tests the volume.
    #[must_use]
    pub fn is_stalled(&self, place: &Place) -> bool {
        place.extents.iter().any(|extent| self.stalls.is_stalled(extent.segment.volume()))
    }

    /// The volumes that have stalled: see [`Segments::is_stalled`].
    #[must_use]
    pub fn stalled_volumes(&self) -> Vec<u8> {
        self.stalls.stalled()
    }

    /// Length of a segment in bytes.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Whether this process is a forked child, which must not use the segments.
    pub(crate) fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }
    /// Length of the longest operation in bytes: a quarter of [`SegmentsConfig::in_flight_bytes`],
    /// but at least [`OP_BYTES_MIN`] and at most [`OP_BYTES_MAX`].
    pub(crate) fn op_bytes(&self) -> u64 {
        (self.in_flight_bytes / 4 / UNIT as usize * UNIT as usize).clamp(OP_BYTES_MIN, OP_BYTES_MAX)
            as u64
    }
    fn volume(&self, id: SegmentId) -> Volume {
        self.volumes.read().get(usize::from(id.volume())).cloned().unwrap_or_default()
    }
    /// Whether files of any volume need aligned memory, because they are opened with `O_DIRECT`.
    pub(crate) fn needs_alignment(&self) -> bool {
        self.volumes.read().iter().any(|volume| volume.direct)
    }

    /// The directories of all present volumes, with the volumes' numbers.
    fn dirs(&self) -> Vec<(u8, PathBuf)> {
        let volumes = self.volumes.read();
        let present = (0..=u8::MAX).zip(volumes.iter()).filter(|(_, volume)| volume.is_present());
        present.map(|(at, volume)| (at, volume.dir.clone())).collect()
    }

    /// The directory of a volume.
    ///
    /// # Errors
    /// `Invalid` if the volume is unknown, retired, or absent.
    pub fn dir(&self, volume: u8) -> Result<PathBuf> {
        let volumes = self.volumes.read();
        match volumes.get(usize::from(volume)) {
            Some(found) if found.is_present() => Ok(found.dir.clone()),
            _ => Err(Error::invalid("the volume of a segment is absent, retired, or unknown here")
                .with("volume", volume)),
        }
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("volumes", &self.volumes.read())
            .field("segment_bytes", &self.segment_bytes)
            .field("engine", &self.engine.name())
            .finish_non_exhaustive()
    }
}

fn failed_sync(what: impl fmt::Display, error: io::Error) -> Error {
    Error::fatal("a sync failed: bytes written since the last sync may be lost; reopen the store")
        .with("what", what)
        .because(error)
}
