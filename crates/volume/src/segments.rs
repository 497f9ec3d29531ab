//! The segment files of a store: opened, created, synced, and the engine that moves their bytes.

mod choose;
mod kind;
mod report;
mod selftest;

pub use report::{IoChoice, IoMode, IoReport};

use crate::engine::Engine;
use crate::staging::{Staging, StagingStats};
use parking_lot::{Mutex, RwLock};
use ritornello_format::{Error, PAGE_BYTES_MAX, Result, SegmentId, UNIT};
use ritornello_medium::{Access, Medium, MediumFile};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

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
    /// The volumes: a volume's number is its position.
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
/// it. All methods may be called from any number of threads.
pub struct Segments {
    medium: Arc<dyn Medium>,
    dirs: Vec<PathBuf>,
    segment_bytes: u64,
    in_flight_bytes: usize,
    /// Whether the files of a volume are opened with `O_DIRECT`.
    direct: Vec<bool>,
    engine: Box<dyn Engine>,
    staging: Arc<Staging>,
    files: RwLock<HashMap<SegmentId, Arc<dyn MediumFile>>>,
    /// Volumes whose directory has entries that may not survive a power loss.
    unsynced_dirs: Mutex<BTreeSet<u8>>,
    report: IoReport,
    /// The process that opened them: rings and threads do not come along into a forked child.
    process: u32,
}

impl Segments {
    /// Examines the directories, which must exist, and chooses how to move bytes.
    ///
    /// # Errors
    /// `Invalid` if a directory cannot be written to, if there are none or more than 256, or if the
    /// chosen way does not work here.
    pub fn open(medium: Arc<dyn Medium>, config: SegmentsConfig) -> Result<Self> {
        let SegmentsConfig { dirs, segment_bytes, io, in_flight_bytes } = config;
        if dirs.is_empty() || dirs.len() > 256 {
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
        let volumes = (0..dirs.len()).map(|volume| volume as u8).collect();
        let choice = choose::choose(medium.as_ref(), &dirs, io, staging.stats().backing)?;
        Ok(Self {
            medium,
            dirs,
            segment_bytes,
            in_flight_bytes,
            direct: choice.direct,
            engine: choice.engine,
            staging,
            files: RwLock::default(),
            // A former owner may have died between making a segment and syncing its directory.
            unsynced_dirs: Mutex::new(volumes),
            report: choice.report,
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
        for (volume, dir) in self.dirs.iter().enumerate() {
            let names = self.medium.list(dir).map_err(|error| {
                Error::retry("a volume's directory cannot be listed")
                    .with("dir", dir.display())
                    .because(error)
            })?;
            let numbers = names.iter().filter_map(|name| number_of(name.to_str()?));
            found.extend(numbers.map(|number| SegmentId::new(volume as u8, number)));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Removes a segment; one that is not there is gone already.
    ///
    /// # Errors
    /// `Retry` if the file system refuses.
    pub fn remove(&self, id: SegmentId) -> Result<()> {
        let path = self.path(id)?;
        self.files.write().remove(&id);
        match self.medium.remove(&path) {
            Ok(()) => {
                self.unsynced_dirs.lock().insert(id.volume());
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::from(error).with("path", path.display())),
        }
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
            let dir = &self.dirs[usize::from(volume)];
            self.medium.sync_dir(dir).map_err(|error| failed_sync(dir.display(), error))?;
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
            let helpers: Vec<_> = (1..ids.len().min(SYNCS))
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
        let sizes = self.existing()?.into_iter().map(|id| self.file(id)?.allocated());
        sizes.sum::<io::Result<u64>>().map_err(Error::from)
    }

    /// How bytes are moved, and why.
    #[must_use]
    pub fn report(&self) -> IoReport {
        self.report.clone()
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
    pub(crate) fn volumes(&self) -> usize {
        self.dirs.len()
    }
    pub(crate) fn is_direct(&self, id: SegmentId) -> bool {
        self.direct.get(usize::from(id.volume())).copied().unwrap_or(false)
    }
    /// Whether any volume needs aligned memory.
    pub(crate) fn needs_alignment(&self) -> bool {
        self.direct.contains(&true)
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
        let dir = self.dirs.get(usize::from(id.volume())).ok_or_else(|| {
            Error::invalid("a segment of a volume that this store does not have")
                .with("volume", id.volume())
        })?;
        Ok(dir.join(name_of(id)))
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments")
            .field("dirs", &self.dirs)
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
