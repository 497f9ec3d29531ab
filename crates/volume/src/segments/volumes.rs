//! Tests, adds, reattaches and retires the volumes of a store.

use super::{IoChoice, IoMode, Segments, kind, selftest};
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Minimum interval between two searches for absent volumes.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(1);

/// A volume.
#[derive(Clone, Debug, Default)]
pub(super) struct Volume {
    /// The volume's directory; empty if the volume is retired or absent.
    pub(super) dir: PathBuf,
    /// Whether the volume's files are opened with `O_DIRECT`.
    pub(super) direct: bool,
    /// Whether the volume's files are in memory, so that any process may have mapped them.
    pub(super) in_memory: bool,
    /// Whether `MediumFile::drain` waits for the writes of dead processes on the volume's file
    /// system.
    pub(super) drains: bool,
    /// Name of the directory's file system.
    pub(super) file_system: String,
}

impl Volume {
    pub(super) fn is_present(&self) -> bool {
        !self.dir.as_os_str().is_empty()
    }
}

/// Returns the current directories of the volumes: see
/// [`SegmentsConfig::dirs`](super::SegmentsConfig::dirs).
pub type Discover = Box<dyn Fn() -> Result<Vec<PathBuf>> + Send + Sync>;

/// Returns whether a directory holds the volume of this number now: see [`Segments::guard_with`].
pub type Guard = Box<dyn Fn(u8, &Path) -> bool + Send + Sync>;

/// How volumes are found and recognised.
#[derive(Default)]
pub(super) struct Discovery {
    discover: OnceLock<Discover>,
    guard: OnceLock<Guard>,
    /// When `discover` was last called for an absent volume.
    last: Mutex<Option<Instant>>,
}

/// A tested directory that can become a volume.
#[derive(Clone, Debug)]
pub struct Candidate {
    volume: Volume,
    trusted: bool,
}

impl Candidate {
    /// Whether the directory's file system is trusted: see
    /// [`IoReport::trusted`](super::IoReport::trusted).
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        self.trusted
    }

    /// Whether files in the directory are in memory.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.volume.in_memory
    }

    /// Whether the directory may be used with `io_uring`: writes of a killed process can be waited
    /// for, or files are not opened with `O_DIRECT`.
    #[must_use]
    pub fn drains(&self) -> bool {
        self.volume.drains || !self.volume.direct
    }

    /// Name of the directory's file system.
    #[must_use]
    pub fn file_system(&self) -> &str {
        &self.volume.file_system
    }
}

impl Segments {
    /// Sets the function that finds volumes that were added, or returned, after the segments were
    /// opened.
    pub fn discover_with(&self, discover: Discover) {
        // Later calls are ignored: the opening process calls this once.
        let _ = self.discovery.discover.set(discover);
    }

    /// Sets the function that checks whether a directory holds its volume. A different file system,
    /// with segments of another store, may be mounted on the directory at any time, and no file of
    /// the other store may be opened, created or removed.
    pub fn guard_with(&self, guard: Guard) {
        let _ = self.discovery.guard.set(guard);
    }

    pub(super) fn check_volume(&self, volume: u8) -> io::Result<()> {
        let dir = self.dir(volume).map_err(io::Error::other)?;
        if self.discovery.guard.get().is_none_or(|guard| guard(volume, &dir)) {
            return Ok(());
        }
        Err(io::Error::other("the directory does not hold the volume: is its file system mounted?"))
    }

    /// Tests a directory before it becomes a volume.
    ///
    /// # Errors
    /// `Invalid` if the directory does not exist, is not writable, or fails the self-test.
    pub fn examine(&self, dir: &Path) -> Result<Candidate> {
        let found = selftest::examine(self.medium.as_ref(), dir)?;
        let direct = found.direct && self.io != IoChoice::Buffered;
        let (in_memory, drains) = (found.in_memory(), found.drains);
        let (dir, file_system) = (dir.to_owned(), found.kind);
        Ok(Candidate {
            volume: Volume { dir, direct, in_memory, drains, file_system },
            trusted: !matches!(found.trust, kind::Trust::Foreign),
        })
    }

    /// Adds a volume with the next number.
    pub fn add_volume(&self, candidate: Candidate) {
        self.push_volume(None, candidate);
    }

    /// Appends volume `at`, or the next volume if `at` is `None`. Does nothing if another thread
    /// has added volume `at`.
    fn push_volume(&self, at: Option<usize>, candidate: Candidate) {
        let mut volumes = self.volumes.write();
        if at.is_some_and(|at| at != volumes.len()) {
            return;
        }
        self.report.write().direct &= candidate.volume.direct;
        volumes.push(candidate.volume);
    }

    /// Reattaches an absent volume. A present volume is not changed.
    ///
    /// # Errors
    /// `Invalid` if the volume is unknown, or this store's I/O mode does not suit the candidate.
    pub fn attach(&self, number: u8, candidate: Candidate) -> Result<()> {
        self.check_drivable(&candidate)?;
        let mut volumes = self.volumes.write();
        let Some(volume) = volumes.get_mut(usize::from(number)) else {
            return Err(
                Error::invalid("this store has no volume with this number").with("volume", number)
            );
        };
        if !volume.is_present() {
            self.report.write().direct &= candidate.volume.direct;
            *volume = candidate.volume;
        }
        Ok(())
    }

    /// Checks that this store's I/O mode suits a directory.
    ///
    /// # Errors
    /// `Invalid` if the store's segments are mapped and the directory is not in memory, or if the
    /// store uses `io_uring` and writes of a killed process cannot be waited for in the directory.
    pub fn check_drivable(&self, candidate: &Candidate) -> Result<()> {
        let refused = match self.report.read().mode {
            IoMode::Mapped if !candidate.is_in_memory() => {
                "this store is in memory, and a disk would slow it down to the disk's speed: name \
                 a directory in memory, or make a store on the disk"
            }
            IoMode::Uring if !candidate.drains() => {
                "this file system is not known to wait for a killed process's io_uring writes: \
                 name a directory on ext4 or XFS, or open the store with io=pool"
            }
            _ => return Ok(()),
        };
        let dir = candidate.volume.dir.display();
        Err(Error::invalid(refused).with("dir", dir).with("file_system", candidate.file_system()))
    }

    /// Retires a volume whose segments are all removed.
    pub fn retire_volume(&self, volume: u8) {
        if let Some(volume) = self.volumes.write().get_mut(usize::from(volume)) {
            volume.dir = PathBuf::new();
        }
    }

    /// Detaches a present volume that cannot be used any longer. The volume then counts as absent.
    pub fn detach(&self, volume: u8) {
        self.retire_volume(volume);
        self.files.close_volume(volume);
    }

    /// Number of volumes. Searches for volume number `volume` first if it is unknown, or if it is
    /// absent and the last search for an absent volume was at least a second ago.
    pub(crate) fn volumes_up_to(&self, volume: u8) -> usize {
        let (known, present) = {
            let volumes = self.volumes.read();
            (volumes.len(), volumes.get(usize::from(volume)).map(Volume::is_present))
        };
        if present == Some(true) || (present == Some(false) && !self.is_discovery_due()) {
            return known;
        }
        let Some(discover) = self.discovery.discover.get() else { return known };
        match discover() {
            Ok(dirs) => {
                for (number, dir) in (0..=u8::MAX).zip(&dirs).take(known) {
                    if dir.as_os_str().is_empty() || self.dir(number).is_ok() {
                        continue;
                    }
                    let attached = self.examine(dir).and_then(|found| self.attach(number, found));
                    if let Err(error) = attached {
                        tracing::warn!(%error, "a volume of the store cannot be used here");
                    }
                }
                for (at, dir) in dirs.into_iter().enumerate().skip(known) {
                    // Add an unusable volume as an absent one, so that later volumes get the right
                    // numbers.
                    let examined = self.examine(&dir);
                    let drivable =
                        examined.and_then(|found| self.check_drivable(&found).map(|()| found));
                    let candidate = drivable.unwrap_or_else(|error| {
                        tracing::warn!(%error, "a directory of the store cannot be used here");
                        Candidate { volume: Volume::default(), trusted: false }
                    });
                    self.push_volume(Some(at), candidate);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the list of the store's directories could not be read")
            }
        }
        self.volumes.read().len()
    }

    /// Whether a search for absent volumes is due. A retired volume looks like an absent volume and
    /// is never found, so an interval limits the rate of unsuccessful searches.
    fn is_discovery_due(&self) -> bool {
        let mut last = self.discovery.last.lock();
        let due = last.is_none_or(|at| at.elapsed() >= DISCOVERY_INTERVAL);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::{IoChoice, SegmentsConfig};
    use ritornello_medium::Host;
    use std::sync::Arc;

    #[test]
    fn file_system_of_a_returning_volume_is_listed_once() {
        let dirs = [(), ()].map(|()| tempfile::tempdir().unwrap());
        let config = SegmentsConfig {
            dirs: dirs.iter().map(|dir| dir.path().to_owned()).collect(),
            segment_bytes: 1 << 20,
            io: IoChoice::Pool,
            in_flight_bytes: 0,
        };
        let segments = Segments::open(Arc::new(Host), config).unwrap();
        let listed = || segments.report().file_systems;
        let names = listed();
        assert_eq!(names.len(), 2, "{names:?}");
        for _ in 0..2 {
            segments.detach(1);
            assert_eq!(listed(), names[..1]);
            let candidate = segments.examine(dirs[1].path()).unwrap();
            assert_eq!(candidate.file_system(), names[1]);
            segments.attach(1, candidate).unwrap();
            assert_eq!(listed(), names);
        }
        segments.retire_volume(0);
        assert_eq!(listed(), names[1..]);
    }
}
