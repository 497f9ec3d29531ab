//! The `art` backend: Holt, a persistent adaptive radix tree, with path-ordered keys.
//!
//! **Off by default.** The cargo feature `art` compiles it, and `ritornello bench index --backends
//! art` opens it, for comparison. A store cannot have it as its index.
//!
//! | module | noun |
//! |---|---|
//! | `key` | keys and their order |
//! | `record` | values, and their checksums |
//! | `tree` | the calls of Holt that are used |
//! | `read` | reads of the tree |
//! | `write` | changes of the tree |
//! | `recovery` | opens and verifies the index |
//!
//! **Atomic changes.** A batch of Holt is one record of its log. A run exists once its record (`r`)
//! does, which is written last; the chunks of a run that is too long for one batch are written
//! before. The next open removes chunks without a record, which a crash can leave of a long run. If
//! Holt fails in the middle of a batch, it may have applied a part: an insert then removes all its
//! keys again before it returns the error. If that fails as well, or if a removal fails, the index
//! is poisoned.
//!
//! **Limits of Holt 0.9.2**, and how the backend handles them:
//!
//! * *No sync without a checkpoint.* Either every batch waits for an `fdatasync` of the log
//!   ([`ArtOptions::durable`]), or the only barrier is a checkpoint, which writes every dirty frame
//!   of 512 KiB. [`PrefixIndex::sync`] writes a checkpoint, which is durable, but expensive.
//! * *Records cannot be held back until their data is durable.* The log gets an inserted run
//!   immediately, so the run may exist without its pages after a power loss; their checksums make
//!   them misses. The backend `run` withholds records until their data is durable.
//! * *Damage is not detected.* Holt's frames have no checksums. So every value carries a checksum,
//!   seeded with its key, and a damaged value is a miss. The open checks and counts all values.
//!   Damage that only makes Holt miss a key shows in the count.
//! * *No recovery from damage.* If Holt refuses its files, its log is dropped; if it still refuses,
//!   all files are dropped. The losses are logged and reported by [`ArtIndex::recovered`].
//! * *A kill loses changes that were not synced.* Up to 64 KiB of the log are in the memory of the
//!   process. Synced changes are safe.
//! * *A failed sync is not repaired.* Holt reads its log and its list of frames from the page
//!   cache, and appends to the same files. Records of the log reach the frames with the next
//!   checkpoint; entries that the list has lost are not written again. After a failed sync the
//!   index is safe until the next power loss: remove it, or convert it.
//!   [`crate::OpenOptions::clean`] has no effect.
//! * *Writes are not reported.* [`IndexStats::written_bytes`] counts keys and values, once.
//! * *Holt uses the host's file system.* Its I/O does not go through the `Medium`.
//! * *Keys and values are at most 64 KiB.* A run whose place has more than about 5,400 extents is
//!   refused (`Invalid`).

mod key;
mod read;
mod record;
mod recovery;
#[cfg(test)]
mod tests;
mod tree;
mod write;

use crate::{IndexStats, MatchedRun, NewRun, PrefixIndex, Removed, RunId, RunView, SyncData};
use parking_lot::Mutex;
use ritornello_format::{PageHash, PageHashes, Place, Result, ScopeSlot};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tree::Holt;
use write::Numbers;

/// Options of an [`ArtIndex`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtOptions {
    /// Bytes of memory that cache frames which are not dirty.
    pub cache_bytes: u64,
    /// Every change is durable when the call returns. [`PrefixIndex::sync`] then writes only the
    /// recency from [`PrefixIndex::touch`].
    pub durable: bool,
    /// Check every run at open. Otherwise a damaged run is found when it is used, and its
    /// descendants stay.
    pub verify: bool,
}

impl Default for ArtOptions {
    fn default() -> Self {
        Self { cache_bytes: 128 << 20, durable: false, verify: true }
    }
}

/// See the [module](self) and `trait` [`PrefixIndex`].
#[derive(Debug)]
pub struct ArtIndex {
    tree: Holt,
    dir: PathBuf,
    options: ArtOptions,
    /// Serialises writers.
    numbers: Mutex<Numbers>,
    /// Recency that is not in the tree yet.
    touched: Mutex<HashMap<RunId, u64>>,
    retained: Mutex<Retained>,
    gauges: Gauges,
    recovered: ArtRecovered,
}

/// Retentions by run; few runs are retained.
#[derive(Debug, Default)]
struct Retained {
    runs: BTreeMap<RunId, u64>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Gauges {
    poisoned: AtomicBool,
    /// Whether damage has been logged.
    damage_logged: AtomicBool,
    runs: AtomicU64,
    pages: AtomicU64,
    /// Bytes of keys and values written since the last sync.
    pending: AtomicU64,
    written: AtomicU64,
    checkpoints: AtomicU64,
}

/// Files, runs and keys that [`ArtIndex::open`] dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArtRecovered {
    /// Holt refused its log, which was dropped.
    pub log_dropped: bool,
    /// Holt refused all of its files, which were dropped.
    pub all_dropped: bool,
    /// Whether the numbers of runs and pages differ from the stored numbers.
    pub lost: bool,
    /// Runs dropped as inconsistent, including their descendants.
    pub dropped_runs: u64,
    /// Keys of runs that were being written or removed when the process died.
    pub leftover_keys: u64,
}

impl ArtIndex {
    /// Opens the index in its own directory `dir`, or creates an index. Damage is not an error:
    /// entries that fail verification are dropped, logged, and reported by [`ArtIndex::recovered`].
    ///
    /// # Errors
    /// `Fatal` if the file system refuses, or another process has the index open.
    pub fn open(dir: &Path, options: ArtOptions) -> Result<Self> {
        recovery::open(dir, options)
    }

    /// Returns the files, runs and keys that the open dropped.
    #[must_use]
    pub fn recovered(&self) -> ArtRecovered {
        self.recovered
    }

    /// Logs the first damage. The caller treats damage as a miss.
    fn log_damage(&self, run: RunId) {
        if !self.gauges.damage_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(dir = %self.dir.display(), run = run.0, "a run in the index is damaged and is a miss; opening it again drops it");
        }
    }

    /// Turns an error of a read into nothing, which is a miss.
    fn or_miss<T>(&self, result: Result<T>) -> Option<T> {
        result
            .inspect_err(|error| {
                if !self.gauges.damage_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(dir = %self.dir.display(), %error, "the index could not be read: a miss");
                }
            })
            .ok()
    }
}

impl PrefixIndex for ArtIndex {
    fn insert(&self, run: &NewRun<'_>) -> Result<RunId> {
        self.insert_run(run)
    }

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        self.link_run(scope, parent, child);
    }

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let _writer = self.numbers.lock();
        self.cut(run, keep)
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        let _writer = self.numbers.lock();
        (0..pages.len()).flat_map(|at| self.remove_page(scope, pages.at(at))).collect()
    }

    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        self.remove_runs_of(scope)
    }

    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed> {
        self.move_run(run, place)
    }

    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.along(scope, pages, true, |_, _| ())
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun> {
        let mut matched = Vec::new();
        self.along(scope, pages, true, |(run, page, count), at| {
            matched.push(MatchedRun {
                run,
                first: u32::from(page),
                pages: count as u32,
                at: at as u32,
            });
        });
        matched
    }

    fn probe_methods(&self) -> &'static [&'static str] {
        &["walk", "range"]
    }

    fn probe_by(&self, method: &str, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.along(scope, pages, method != "range", |_, _| ())
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        (0..pages.len()).map(|at| self.locate(scope, pages.at(at)).is_some()).collect()
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        let (run, page, _) = self.or_miss(self.find(scope, page)).flatten()?;
        Some((run, u32::from(page)))
    }

    fn place(&self, run: RunId) -> Option<Place> {
        self.or_miss(self.record(run)).flatten().map(|record| record.place)
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let record = self.or_miss(self.record(run)).flatten()?;
        let at = usize::try_from(at).ok().filter(|at| *at < usize::from(record.pages))?;
        let chunk = self.or_miss(self.chunk(record.scope, run, at))?;
        chunk.get(at % key::CHUNK).copied().filter(|page| *page != PageHash::NONE)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        self.or_miss(self.view(run)).flatten()
    }

    fn has_children(&self, run: RunId) -> bool {
        self.or_miss(self.tree.any(&key::children(run))).unwrap_or_default()
    }

    fn touch(&self, run: RunId, recency: u64) {
        let record = self.or_miss(self.record(run)).flatten();
        if record.is_some_and(|record| record.recency < recency) {
            self.touched.lock().insert(run, recency);
        }
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        self.retain_runs(runs, clock);
    }

    fn clock(&self) -> u64 {
        self.retained.lock().clock
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        let mut from = 0;
        loop {
            let batch = self.or_miss(self.runs_from(from)).unwrap_or_default();
            let Some(last) = batch.last() else { return };
            from = last.0;
            for run in batch {
                if let Some(view) = self.run(run) {
                    visit(run, view);
                }
            }
        }
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        sync_data()?;
        self.sync_all()
    }

    fn stats(&self) -> IndexStats {
        let get = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let (mut disk_bytes, mut files) = (0, 0);
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            use std::os::unix::fs::MetadataExt;
            if let Ok(metadata) = entry.metadata() {
                disk_bytes += metadata.blocks() * 512;
                files += 1;
            }
        }
        IndexStats {
            runs: get(&self.gauges.runs),
            pages: get(&self.gauges.pages),
            memory_bytes: self.options.cache_bytes,
            memory_bytes_max: 0,
            memory_percent: 0,
            disk_bytes,
            written_bytes: get(&self.gauges.written),
            checkpoints: get(&self.gauges.checkpoints),
            pending_bytes: get(&self.gauges.pending),
            files,
        }
    }
}
