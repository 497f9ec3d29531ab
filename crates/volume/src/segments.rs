//! The segment files of a store: opened, created, synced, and the engine that moves their bytes.

mod choose;
mod huge;
mod kind;
mod maps;
mod report;
mod selftest;

pub use report::{IoChoice, IoMode, IoReport};

use crate::engine::Engine;
use crate::map::Map;
use crate::staging::{Staging, StagingStats};
use maps::Maps;
use parking_lot::{Mutex, RwLock};
use ritornello_format::{Error, PAGE_BYTES_MAX, Result, SegmentId, UNIT};
use ritornello_medium::{Access, Medium, MediumFile};
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The most files that are synced at once.
const SYNCS: usize = 8;
/// The longest operation. Longer ones are no faster, and leave less to overlap.
const OP_BYTES_MAX: usize = 4 << 20;
/// The longest operation where little is kept in flight: shorter ones cost a lot of CPU each.
const OP_BYTES_MIN: usize = 256 << 10;
/// What file names of segments start with; six decimal digits follow.
const PREFIX: &str = "seg-";

/// What [`Segments::open`] needs to know.
#[derive(Clone, Debug)]
pub struct SegmentsConfig {
    /// The volumes: a volume's number is its position. An empty path is a volume that is no more.
    pub dirs: Vec<PathBuf>,
    /// Length of every segment file: whole units.
    pub segment_bytes: u64,
    /// How to move bytes.
    pub io: IoChoice,
    /// Bytes that one call keeps in flight; zero takes [`SegmentsConfig::IN_FLIGHT_BYTES`].
    pub in_flight_bytes: usize,
}

impl SegmentsConfig {
    /// The default of [`SegmentsConfig::in_flight_bytes`]. Half of it saturates a quiet machine; the
    /// rest hides the moments in which a busy one does not run us.
    pub const IN_FLIGHT_BYTES: usize = 32 << 20;
}

/// Open handles of segment files `<dir>/seg-<number>`; knows nothing of what is allocated in them.
///
/// Files are opened when first used: the owner of a store may create them after a client opened
/// it. Volumes may come, too: see [`Segments::discover_with`]. A file that was removed never comes
/// back under its number, so what is open is always the file that is meant. All methods may be
/// called from any number of threads.
pub struct Segments {
    medium: Arc<dyn Medium>,
    io: IoChoice,
    volumes: RwLock<Vec<Volume>>,
    discover: OnceLock<Discover>,
    segment_bytes: u64,
    in_flight_bytes: usize,
    engine: Box<dyn Engine>,
    staging: Arc<Staging>,
    files: RwLock<HashMap<SegmentId, Arc<dyn MediumFile>>>,
    /// Where segments are mapped.
    maps: Option<Maps>,
    /// Volumes whose directory has entries that may not survive a power loss.
    unsynced_dirs: Mutex<BTreeSet<u8>>,
    report: RwLock<IoReport>,
    /// The process that opened them: rings and threads do not come along into a forked child.
    process: u32,
}

/// A directory of segments.
#[derive(Clone, Debug, Default)]
struct Volume {
    /// Empty if it is no more.
    dir: PathBuf,
    /// Whether its files are opened with `O_DIRECT`.
    direct: bool,
    /// Whether its files are in memory and can be mapped.
    in_memory: bool,
}

/// Says which volumes there are now: see [`SegmentsConfig::dirs`].
pub type Discover = Box<dyn Fn() -> Result<Vec<PathBuf>> + Send + Sync>;

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

    /// Name of its file system.
    #[must_use]
    pub fn file_system(&self) -> &str {
        &self.file_system
    }
}

impl Segments {
    /// Examines the directories, which must exist, and chooses how to move bytes.
    ///
    /// # Errors
    /// `Invalid` if a directory cannot be written to, if there are none or more than 256, or if the
    /// chosen way does not work here.
    pub fn open(medium: Arc<dyn Medium>, config: SegmentsConfig) -> Result<Self> {
        let SegmentsConfig { dirs, segment_bytes, io, in_flight_bytes } = config;
        let live: Vec<PathBuf> =
            dirs.iter().filter(|dir| !dir.as_os_str().is_empty()).cloned().collect();
        if live.is_empty() || dirs.len() > 256 {
            return Err(Error::invalid("a store has 1 to 256 directories").with("dirs", dirs.len()));
        }
        let units_fit = segment_bytes / UNIT <= u64::from(u32::MAX);
        if segment_bytes == 0 || !segment_bytes.is_multiple_of(UNIT) || !units_fit {
            return Err(Error::invalid("a segment is whole units of 4 KiB")
                .with("segment_bytes", segment_bytes));
        }
        let in_flight_bytes = match in_flight_bytes {
            0 => SegmentsConfig::IN_FLIGHT_BYTES,
            bytes => bytes.max(UNIT as usize),
        };
        // Enough for a few calls that need staging at once, and for any single page.
        let staging = Staging::new((4 * in_flight_bytes).max(PAGE_BYTES_MAX as usize))?;
        let choice = choose::choose(medium.as_ref(), &live, io, staging.stats().backing)?;
        let mut direct = choice.direct.into_iter();
        let in_memory = choice.report.mode == IoMode::Mapped;
        let volume = |dir: PathBuf| {
            let direct = !dir.as_os_str().is_empty() && direct.next().unwrap_or(false);
            Volume { dir, direct, in_memory }
        };
        let volumes: Vec<Volume> = dirs.into_iter().map(volume).collect();
        let there = (0..=u8::MAX).zip(&volumes).filter(|(_, v)| !v.dir.as_os_str().is_empty());
        let unsynced = there.map(|(at, _)| at).collect();
        Ok(Self {
            medium,
            io,
            volumes: RwLock::new(volumes),
            discover: OnceLock::new(),
            segment_bytes,
            in_flight_bytes,
            engine: choice.engine,
            staging,
            files: RwLock::default(),
            maps: (choice.report.mode == IoMode::Mapped).then(Maps::new),
            // A former owner may have died between making a segment and syncing its directory.
            unsynced_dirs: Mutex::new(unsynced),
            report: RwLock::new(choice.report),
            process: std::process::id(),
        })
    }

    /// Creates a segment and allocates its blocks. Its name is durable after the next
    /// [`Segments::sync`] of it.
    ///
    /// # Errors
    /// `Retry` if the file system is full or refuses; nothing is left behind then. `Fatal` if there
    /// already is a file of that name: an allocator that does not know it must not write to it.
    pub fn create(&self, id: SegmentId) -> Result<()> {
        let path = self.path(id)?;
        let there = self.medium.open(&path, Access::default());
        match there {
            Ok(_) => {
                return Err(Error::fatal("a segment that is to be created already exists")
                    .with("path", path.display()));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::from(error).with("path", path.display())),
        }
        let access = Access { write: true, create: true, direct: self.is_direct(id) };
        let made = self.medium.open(&path, access).and_then(|file| {
            if self.maps.is_some() && huge::are_given(&path) {
                // Those that are allocated without a map are small.
                file.set_len(self.segment_bytes)?;
                if let Some(map) = Map::new(&file, self.segment_bytes)? {
                    // Where there is no room for it there is none below.
                    let _ = map.ready(0..self.segment_bytes);
                }
            }
            file.allocate(self.segment_bytes)?;
            Ok(file)
        });
        match made {
            Ok(file) => {
                self.unsynced_dirs.lock().insert(id.volume());
                self.files.write().insert(id, file);
                Ok(())
            }
            Err(error) => {
                // Half a segment would count against the budget.
                let _ = self.medium.remove(&path);
                Err(Error::retry("no room for another segment: free space on this file system")
                    .with("path", path.display())
                    .with("bytes", self.segment_bytes)
                    .because(error))
            }
        }
    }

    /// Gives a segment that was cut short its length back. What was lost reads as zeroes, so as
    /// misses; space at its end can be written again. Returns whether it was short.
    ///
    /// # Errors
    /// `Retry` if the file system refuses.
    pub fn mend(&self, id: SegmentId) -> Result<bool> {
        let file = self.file(id)?;
        if file.length()? >= self.segment_bytes {
            return Ok(false);
        }
        file.allocate(self.segment_bytes)?;
        Ok(true)
    }

    /// The segments that are there, in order.
    ///
    /// # Errors
    /// `Retry` if a directory cannot be listed.
    pub fn existing(&self) -> Result<Vec<SegmentId>> {
        let mut found = Vec::new();
        for (volume, dir) in self.dirs() {
            let names = self.medium.list(&dir).map_err(|error| {
                Error::retry("a volume's directory cannot be listed")
                    .with("dir", dir.display())
                    .because(error)
            })?;
            let numbers = names.iter().filter_map(|name| number_of(name.to_str()?));
            found.extend(numbers.map(|number| SegmentId::new(volume, number)));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Removes a segment, durably; one that is not there is gone already. Its blocks are free at
    /// once, also if another process has it open; those of one that is mapped, when the last process
    /// that maps it has noticed. Cutting it would kill who reads it.
    ///
    /// # Errors
    /// `Retry` if the file system refuses.
    pub fn remove(&self, id: SegmentId) -> Result<()> {
        let path = self.path(id)?;
        let refused = |error: io::Error| Error::from(error).with("path", path.display());
        match self.file(id) {
            Ok(file) if self.maps.is_none() => file.set_len(0).map_err(refused)?,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(error)),
        }
        self.let_go(id);
        match self.medium.remove(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refused(error)),
        }
        let dir = self.dir(id.volume())?;
        self.medium.sync_dir(&dir).map_err(refused)
    }

    /// Tells how to find out about volumes that came after this was opened.
    pub fn discover_with(&self, discover: Discover) {
        // Whoever opens it does this once.
        let _ = self.discover.set(discover);
    }

    /// Whether a file is what an examination leaves behind that is cut off.
    #[must_use]
    pub fn is_left_over(name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| name.starts_with(selftest::PREFIX))
    }

    /// Whether a file's name is that of a segment.
    #[must_use]
    pub fn is_segment(name: &OsStr) -> bool {
        name.to_str().and_then(number_of).is_some()
    }

    /// Examines a directory that is to become a volume.
    ///
    /// # Errors
    /// `Invalid` if it cannot be written to.
    pub fn examine(&self, dir: &Path) -> Result<Candidate> {
        let found = selftest::examine(self.medium.as_ref(), dir)?;
        let direct = found.direct && self.io != IoChoice::Buffered;
        Ok(Candidate {
            volume: Volume { dir: dir.to_owned(), direct, in_memory: found.in_memory() },
            file_system: found.kind,
            trusted: !matches!(found.trust, kind::Trust::Foreign),
        })
    }

    /// Adds a volume, whose number is the next.
    pub fn add_volume(&self, candidate: Candidate) {
        self.adopt(None, candidate);
    }

    /// Adds volume `at`, unless it is known by now.
    fn adopt(&self, at: Option<usize>, candidate: Candidate) {
        let mut volumes = self.volumes.write();
        if at.is_some_and(|at| at != volumes.len()) {
            return;
        }
        let mut report = self.report.write();
        report.direct &= candidate.volume.direct;
        report.file_systems.push(candidate.file_system);
        volumes.push(candidate.volume);
    }

    /// Forgets the directory of a volume whose segments are gone.
    pub fn retire_volume(&self, volume: u8) {
        self.unsynced_dirs.lock().remove(&volume);
        if let Some(volume) = self.volumes.write().get_mut(usize::from(volume)) {
            volume.dir = PathBuf::new();
        }
    }

    /// Number of volumes, after a look for new ones if `wanted` is none of them.
    pub(crate) fn volumes_up_to(&self, wanted: u8) -> usize {
        let known = self.volumes.read().len();
        if usize::from(wanted) < known {
            return known;
        }
        let Some(discover) = self.discover.get() else { return known };
        match discover() {
            Ok(dirs) => {
                for (at, dir) in dirs.into_iter().enumerate().skip(known) {
                    // A volume that cannot be used here holds its number all the same.
                    let candidate = self.examine(&dir).unwrap_or_else(|error| {
                        tracing::warn!(%error, "a directory of the store cannot be used here");
                        Candidate {
                            volume: Volume::default(),
                            file_system: String::new(),
                            trusted: false,
                        }
                    });
                    self.adopt(Some(at), candidate);
                }
            }
            Err(error) => tracing::warn!(%error, "the store's directories could not be read anew"),
        }
        self.volumes.read().len()
    }

    /// Makes everything durable that was written to these segments, by any process, and the names
    /// of those that this value created.
    ///
    /// # Errors
    /// `Fatal`: after a failed sync nobody knows what is on the disk. `Retry` if a file could not be
    /// opened (too many are); then nothing was begun.
    pub fn sync(&self, ids: &[SegmentId]) -> Result<()> {
        for &id in ids {
            self.file(id)?;
        }
        let dirs = std::mem::take(&mut *self.unsynced_dirs.lock());
        for &volume in &dirs {
            let Ok(dir) = self.dir(volume) else { continue };
            self.medium.sync_dir(&dir).map_err(|error| failed_sync(dir.display(), error))?;
        }
        let next = Mutex::new(ids.iter());
        let work = || -> Result<()> {
            loop {
                let Some(&id) = next.lock().next() else { return Ok(()) };
                let name = || name_of(id);
                let file = self.file(id).map_err(|error| failed_sync(name(), error))?;
                file.sync_data().map_err(|error| failed_sync(name(), error))?;
            }
        };
        std::thread::scope(|scope| {
            // Simulated files are synced in order, so that a test repeats itself.
            let mode = self.report.read().mode;
            // And memory has nothing to sync.
            let one = matches!(mode, IoMode::Simulated | IoMode::Mapped);
            let hands = if one { 1 } else { SYNCS };
            let helpers: Vec<_> = (1..ids.len().min(hands))
                .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok())
                .collect();
            let mine = work();
            helpers.into_iter().fold(mine, |sum, helper| {
                let theirs = helper.join().unwrap_or_else(|_| {
                    Err(Error::fatal("a thread that synced segments came to an end"))
                });
                sum.and(theirs)
            })
        })
    }

    /// Bytes of the blocks that all segments take.
    ///
    /// # Errors
    /// `Retry` if the file system refuses.
    pub fn allocated_bytes(&self) -> Result<u64> {
        let allocated = |id| match self.file(id).and_then(|file| file.allocated()) {
            // Removed since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            allocated => allocated,
        };
        self.existing()?.into_iter().map(allocated).sum::<io::Result<u64>>().map_err(Error::from)
    }

    /// How bytes are moved, and why.
    #[must_use]
    pub fn report(&self) -> IoReport {
        self.report.read().clone()
    }

    /// Figures of the staging memory that unaligned reads and writes go through.
    #[must_use]
    pub fn staging(&self) -> StagingStats {
        self.staging.stats()
    }

    /// Length of a segment.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Whether this is a forked child's copy, which must not be used.
    pub(crate) fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }
    pub(crate) fn arena(&self) -> &Arc<Staging> {
        &self.staging
    }
    pub(crate) fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }
    pub(crate) fn in_flight_bytes(&self) -> usize {
        self.in_flight_bytes
    }
    /// The longest operation: a few make up what is in flight.
    pub(crate) fn op_bytes(&self) -> u64 {
        (self.in_flight_bytes / 4 / UNIT as usize * UNIT as usize).clamp(OP_BYTES_MIN, OP_BYTES_MAX)
            as u64
    }
    fn is_direct(&self, id: SegmentId) -> bool {
        self.volumes.read().get(usize::from(id.volume())).is_some_and(|volume| volume.direct)
    }
    /// Whether any volume needs aligned memory.
    pub(crate) fn needs_alignment(&self) -> bool {
        self.volumes.read().iter().any(|volume| volume.direct)
    }

    /// The directories there are, by volume.
    fn dirs(&self) -> Vec<(u8, PathBuf)> {
        let volumes = self.volumes.read();
        let there =
            (0..=u8::MAX).zip(volumes.iter()).filter(|(_, v)| !v.dir.as_os_str().is_empty());
        there.map(|(at, volume)| (at, volume.dir.clone())).collect()
    }

    fn dir(&self, volume: u8) -> Result<PathBuf> {
        let volumes = self.volumes.read();
        match volumes.get(usize::from(volume)) {
            Some(found) if !found.dir.as_os_str().is_empty() => Ok(found.dir.clone()),
            _ => Err(Error::invalid("a segment of a volume that this store does not have")
                .with("volume", volume)),
        }
    }

    /// The open file of a segment.
    pub(crate) fn file(&self, id: SegmentId) -> io::Result<Arc<dyn MediumFile>> {
        if let Some(file) = self.files.read().get(&id) {
            return Ok(Arc::clone(file));
        }
        let path = self.path(id).map_err(io::Error::other)?;
        let access = Access { write: true, create: false, direct: self.is_direct(id) };
        let file = self.medium.open(&path, access)?;
        Ok(Arc::clone(self.files.write().entry(id).or_insert(file)))
    }

    fn path(&self, id: SegmentId) -> Result<PathBuf> {
        Ok(self.dir(id.volume())?.join(name_of(id)))
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
    Error::fatal("a sync failed: what was written since the last one may be lost; reopen the store")
        .with("what", what)
        .because(error)
}

fn name_of(id: SegmentId) -> String {
    format!("{PREFIX}{:06}", id.number())
}

fn number_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix(PREFIX)?;
    let number = digits.parse().ok()?;
    // Only names we would give: "seg-7" or "seg-+00007" are somebody else's.
    (name == name_of(SegmentId::new(0, number))).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_segments() {
        assert_eq!(number_of("seg-000007"), Some(7));
        assert_eq!(number_of("seg-1234567"), Some(1_234_567));
        for other in ["seg-7", "seg-+00007", "seg-000007.tmp", "seg-99999999", "LOCK", "seg-"] {
            assert_eq!(number_of(other), None, "{other}");
        }
    }
}
