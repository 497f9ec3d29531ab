//! The directories of a store's segments: examined, added, found again, retired.

use super::{IoChoice, IoMode, Segments, kind, selftest};
use ritornello_format::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A volume that is away is looked for at most this often by a process that wants to read from it.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(1);

/// A directory of segments.
#[derive(Clone, Debug, Default)]
pub(super) struct Volume {
    /// Empty if it is no more, or away.
    pub(super) dir: PathBuf,
    /// Whether its files are opened with `O_DIRECT`.
    pub(super) direct: bool,
    /// Whether its files are in memory, so that any process may have mapped them.
    pub(super) in_memory: bool,
    /// Whether [`MediumFile::drain`] waits for the writes of dead processes.
    pub(super) drains: bool,
}

impl Volume {
    pub(super) fn is_present(&self) -> bool {
        !self.dir.as_os_str().is_empty()
    }
}

/// Says which volumes there are now: see [`SegmentsConfig::dirs`].
pub type Discover = Box<dyn Fn() -> Result<Vec<PathBuf>> + Send + Sync>;

/// Says whether a directory holds the volume of this number now: see [`Segments::guard_with`].
pub type Guard = Box<dyn Fn(u8, &Path) -> bool + Send + Sync>;

/// A directory that can become a volume.
#[derive(Clone, Debug)]
pub struct Candidate {
    volume: Volume,
    file_system: String,
    trusted: bool,
}

impl Candidate {
    /// Whether its file system keeps its promises to several processes and across power loss.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        self.trusted
    }

    /// Whether its files are memory.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        self.volume.in_memory
    }

    /// Whether a killed process's writes can be waited for there, as `io_uring` demands.
    #[must_use]
    pub fn drains(&self) -> bool {
        self.volume.drains || !self.volume.direct
    }

    /// Name of its file system.
    #[must_use]
    pub fn file_system(&self) -> &str {
        &self.file_system
    }
}

impl Segments {
    /// Tells how to find out about volumes that came after this was opened.
    pub fn discover_with(&self, discover: Discover) {
        // The process that opens the segments does this once.
        let _ = self.discover.set(discover);
    }

    /// Tells how to find out whether a volume is in its directory. Another file system may be mounted
    /// there at any time, with the segments of another store: no file of it is opened, made or
    /// removed.
    pub fn guard_with(&self, guard: Guard) {
        let _ = self.guard.set(guard);
    }

    pub(super) fn check_volume(&self, volume: u8) -> io::Result<()> {
        let dir = self.dir(volume).map_err(io::Error::other)?;
        if self.guard.get().is_none_or(|guard| guard(volume, &dir)) {
            return Ok(());
        }
        Err(io::Error::other("the directory does not hold the volume: is its file system mounted?"))
    }

    /// Examines a directory that is to become a volume.
    ///
    /// # Errors
    /// `Invalid` if it cannot be written to.
    pub fn examine(&self, dir: &Path) -> Result<Candidate> {
        let found = selftest::examine(self.medium.as_ref(), dir)?;
        let direct = found.direct && self.io != IoChoice::Buffered;
        let (in_memory, drains) = (found.in_memory(), found.drains);
        Ok(Candidate {
            volume: Volume { dir: dir.to_owned(), direct, in_memory, drains },
            file_system: found.kind,
            trusted: !matches!(found.trust, kind::Trust::Foreign),
        })
    }

    /// Adds a volume, whose number is the next.
    pub fn add_volume(&self, candidate: Candidate) {
        self.push_volume(None, candidate);
    }

    /// Adds volume `at`, unless it is known by now.
    fn push_volume(&self, at: Option<usize>, candidate: Candidate) {
        let mut volumes = self.volumes.write();
        if at.is_some_and(|at| at != volumes.len()) {
            return;
        }
        let mut report = self.report.write();
        report.direct &= candidate.volume.direct;
        report.file_systems.push(candidate.file_system);
        volumes.push(candidate.volume);
    }

    /// Takes back a volume that was away when the segments were opened. One that is here already
    /// stays as it is.
    ///
    /// # Errors
    /// `Invalid` if the volume is unknown, or cannot be driven the way the others are.
    pub fn attach(&self, number: u8, candidate: Candidate) -> Result<()> {
        self.check_drivable(&candidate)?;
        let mut volumes = self.volumes.write();
        let Some(volume) = volumes.get_mut(usize::from(number)) else {
            return Err(Error::invalid("this store has no such volume").with("volume", number));
        };
        if !volume.is_present() {
            let mut report = self.report.write();
            report.direct &= candidate.volume.direct;
            report.file_systems.push(candidate.file_system);
            *volume = candidate.volume;
        }
        Ok(())
    }

    /// Refuses a directory that the way in which this store moves its bytes does not suit.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn check_drivable(&self, candidate: &Candidate) -> Result<()> {
        let refused = match self.report.read().mode {
            IoMode::Mapped if !candidate.is_in_memory() => {
                "this store is in memory, and a disk would slow it down to its own speed: name a \
                 directory in memory, or make a store on the disk"
            }
            IoMode::Uring if !candidate.drains() => {
                "this file system is not known to wait for a killed process's io_uring writes: \
                 name a directory on ext4 or XFS, or open the store with io=pool"
            }
            _ => return Ok(()),
        };
        let dir = candidate.volume.dir.display();
        Err(Error::invalid(refused).with("dir", dir).with("file_system", &candidate.file_system))
    }

    /// Forgets the directory of a volume whose segments are gone.
    pub fn retire_volume(&self, volume: u8) {
        if let Some(volume) = self.volumes.write().get_mut(usize::from(volume)) {
            volume.dir = PathBuf::new();
        }
    }

    /// Number of volumes, after a look for `wanted` if that one is unknown or away.
    pub(crate) fn volumes_up_to(&self, wanted: u8) -> usize {
        let (known, here) = {
            let volumes = self.volumes.read();
            (volumes.len(), volumes.get(usize::from(wanted)).map(Volume::is_present))
        };
        if here == Some(true) || (here == Some(false) && !self.is_discovery_due()) {
            return known;
        }
        let Some(discover) = self.discover.get() else { return known };
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
                    // A volume that cannot be used here holds its number all the same.
                    let examined = self.examine(&dir);
                    let drivable =
                        examined.and_then(|found| self.check_drivable(&found).map(|()| found));
                    let candidate = drivable.unwrap_or_else(|error| {
                        tracing::warn!(%error, "a directory of the store cannot be used here");
                        Candidate {
                            volume: Volume::default(),
                            file_system: String::new(),
                            trusted: false,
                        }
                    });
                    self.push_volume(Some(at), candidate);
                }
            }
            Err(error) => tracing::warn!(%error, "the store's directories could not be read anew"),
        }
        self.volumes.read().len()
    }

    /// Whether a volume that is away may be looked for now: seldom, because a volume that is no
    /// more looks the same.
    fn is_discovery_due(&self) -> bool {
        let mut last = self.last_discovery.lock();
        let due = last.is_none_or(|at| at.elapsed() >= DISCOVERY_INTERVAL);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}
