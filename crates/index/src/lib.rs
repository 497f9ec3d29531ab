//! # ritornello-index
//!
//! The index of pages: `trait PrefixIndex` and its backends, `run` (default), `memory` (hash maps,
//! with which tests compare the other backends) and, by cargo features, `lsm` (RocksDB, for indexes
//! larger than memory) and `art` (Holt, for comparison). [`Backend`] opens each
//! backend by its name. [`residency`] tells routers the workers and tiers on which pages are
//! present.
//!
//! **Promises.** A probe holds no lock across I/O, or across work that grows with the index. After
//! [`PrefixIndex::sync`] all earlier changes survive power loss, except in `memory`, which has no
//! files. With [`PrefixIndex::sync_after`], the backend `run` finds after a power loss only runs
//! with durable data; `lsm` and `art` may also find runs without durable data. The pages of such a
//! run are misses, because their checksums are wrong. In chained scopes the index is closed:
//! removing a page removes all its descendants.
//!
//! **Must not know** the bytes of pages, how they are read, and which pages are worth keeping.

#![forbid(unsafe_code)]

#[cfg(feature = "art")]
mod art;
mod backend;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod copy;
mod leftover;
mod live_extents;
#[cfg(feature = "lsm")]
pub mod lsm;
mod memory;
pub mod residency;
mod run;
mod sync;
pub mod synthetic;
pub mod tuning;

#[cfg(feature = "art")]
pub use art::{ArtIndex, ArtOptions, ArtRecovered};
pub use backend::{Backend, OpenOptions};
pub use copy::{Copied, copy};
#[cfg(feature = "lsm")]
pub use lsm::{LsmIndex, LsmOptions};
pub use memory::MemoryIndex;
pub use run::{Recovered, RunIndex, RunOptions, StoredIndex};
pub use tuning::Tuning;

use ritornello_format::{PageHash, PageHashes, Place, Result, ScopeSlot};

/// Makes durable the data of all runs that are in the index when the function is called. An index
/// calls the function before it syncs its own records. In the backend `run` no durable record
/// therefore names data that a power loss can destroy. The index may call the function several
/// times, from any thread that syncs. During the call the index holds no lock that a writer or a
/// probe needs.
pub type SyncData<'a> = &'a dyn Fn() -> Result<()>;

/// The name of a run. Unique while the index is open, and not reused in that time. The name may
/// change when the index is opened again; the generation of the run's place stays the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId(pub u64);

/// A run to insert: the consecutive pages of one put.
#[derive(Clone, Copy, Debug)]
pub struct NewRun<'a> {
    /// Scope of the run.
    pub scope: ScopeSlot,
    /// Whether the scope's keys are chained.
    pub chained: bool,
    /// The page before the first page, if the caller knows this page and the index has it.
    pub parent: Option<PageHash>,
    /// The run's 1 to 65,535 pages. The index has none of them in this scope yet.
    pub pages: &'a [PageHash],
    /// Place of the run. `place.extents` may be empty (in measurements without page data).
    pub place: &'a Place,
    /// Last use of the run, in ticks of the store's recency clock.
    pub recency: u64,
}

/// Pages that were removed from the index, and their space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// The run of the pages.
    pub run: RunId,
    /// Scope of the run.
    pub scope: ScopeSlot,
    /// Number of pages removed.
    pub pages: u32,
    /// Hashes of the removed pages, and [`PageHash::NONE`] for pages that were removed before.
    /// Empty for a dropped scope, whose pages may be too many, and for a moved run.
    pub hashes: Vec<PageHash>,
    /// Whether the whole run is removed.
    pub whole: bool,
    /// The extents that become free, once the removal is durable and no lease holds them.
    pub extents: Vec<ritornello_format::Extent>,
}

impl Removed {
    /// The removed pages, without their hashes.
    fn without_hashes(self) -> Self {
        Self { hashes: Vec::new(), ..self }
    }
}

/// Consecutive pages of one run that match a sequence of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatchedRun {
    /// The run.
    pub run: RunId,
    /// Number of the first matching page in the run, counted from zero.
    pub first: u32,
    /// Number of matching pages.
    pub pages: u32,
    /// Position of the first matching page in the sequence of keys.
    pub at: u32,
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunView {
    /// Scope of the run.
    pub scope: ScopeSlot,
    /// Whether the scope's keys are chained.
    pub chained: bool,
    /// The parent run and page to which the run is attached, if known.
    pub parent: Option<(RunId, u32)>,
    /// Hashes of the run's pages; [`PageHash::NONE`] where a page was removed alone.
    pub pages: Vec<PageHash>,
    /// Place of the run.
    pub place: Place,
    /// Last use of the run, in ticks of the store's recency clock.
    pub recency: u64,
    /// End of the run's retention, in seconds of the store's clock; zero if the run is not
    /// retained.
    pub retain_until: u64,
}

/// Sizes and write statistics of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Number of runs.
    pub runs: u64,
    /// Number of pages, without pages that were removed alone.
    pub pages: u64,
    /// Bytes of memory held; in `art`, the limit of its cache.
    pub memory_bytes: u64,
    /// Maximum bytes of memory that the index may hold, its ceiling; zero without a ceiling.
    pub memory_bytes_max: u64,
    /// Share of the memory for tables that is in use, in percent; zero without a ceiling. The
    /// rest of `memory_bytes_max` is kept for records that are not written yet, and for
    /// fragmentation.
    pub memory_percent: u32,
    /// Bytes that the index's files take on disk now.
    pub disk_bytes: u64,
    /// Bytes written to files since the index was opened.
    pub written_bytes: u64,
    /// Checkpoints written since the index was opened; in `lsm`, compactions of the whole database.
    pub checkpoints: u64,
    /// Bytes of changes in memory that are not synced. The owner of the index must sync before
    /// these bytes reach a limit, above which the backend `run` refuses inserts (`Retry`).
    pub pending_bytes: u64,
    /// Number of the index's files on disk now.
    pub files: u64,
}

/// An index of pages. Readers and one writer run in parallel, except in the backend `memory`.
pub trait PrefixIndex: Send + Sync + std::fmt::Debug {
    /// Inserts a run. In a chained scope, a run with a `parent` is attached to that page.
    ///
    /// # Errors
    /// `Invalid` if a page exists already, if the given `parent` does not exist, or if the run is
    /// malformed; `Retry` at a limit (call [`PrefixIndex::sync`], or remove pages); `Fatal` if the
    /// index is poisoned. In each case nothing is changed.
    fn insert(&self, run: &NewRun<'_>) -> Result<RunId>;

    /// Records in a chained scope that page `child` follows page `parent`. Does nothing if either
    /// page does not exist, or if `child` is not the first page of a run, is in the run of
    /// `parent`, or is attached already.
    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash);

    /// Cuts run `run` after `keep` pages. In chained scopes all descendants of the removed pages
    /// are removed too. If no live page is left before the cut, the whole run is removed. Returns
    /// one `Removed` for each run that loses pages; none if the run does not exist, or if the cut
    /// is at or after the run's end.
    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed>;

    /// Removes single pages. In chained scopes each page's run is cut before the page. In other
    /// scopes a removed page leaves a hole, and the page's extents are returned; when the last
    /// remaining page of a run is removed, the extents of the header are returned too.
    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed>;

    /// Removes every run of a scope.
    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed>;

    /// Moves a run to a new place. Pages, holes and name stay the same. Returns the extents of the
    /// old place, with zero pages; `None`, without a change, if the run does not exist or the place
    /// does not hold the run's pages.
    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed>;

    /// Number of leading pages of `pages` that are in the index.
    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize;

    /// Whether lookups may read files, and then wait for a disk.
    fn reads_files(&self) -> bool {
        false
    }

    /// Names of the methods that can answer [`PrefixIndex::probe`]; the first method is in use.
    fn probe_methods(&self) -> &'static [&'static str] {
        &["walk"]
    }

    /// [`PrefixIndex::probe`] by one of [`PrefixIndex::probe_methods`], for measurements.
    fn probe_by(&self, method: &str, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let _ = method;
        self.probe(scope, pages)
    }

    /// The leading pages of `pages` that are in the index, by run.
    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun>;

    /// Whether each of the pages is in the index. Pages are looked up independently of each other.
    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool>;

    /// The run of one page, and the page's number in it.
    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)>;

    /// The place of a run.
    fn place(&self, run: RunId) -> Option<Place>;

    /// The hash of page `at` of a run; `None` if the run or the page does not exist.
    fn page(&self, run: RunId, at: u32) -> Option<PageHash>;

    /// The state of a run.
    fn run(&self, run: RunId) -> Option<RunView>;

    /// The run to which `run` is attached.
    fn parent(&self, run: RunId) -> Option<RunId>;

    /// Whether runs are attached to `run`.
    fn has_children(&self, run: RunId) -> bool;

    /// Records the use of a run at `recency`. Ignored if the run has a later recency. Durable with
    /// the next checkpoint or sync.
    fn touch(&self, run: RunId, recency: u64);

    /// Records the time at which each run's retention ends, in seconds of the store's clock, whose
    /// current value is `clock`. Zero ends a retention. Unknown runs are skipped. Durable with the
    /// next sync.
    fn retain(&self, runs: &[(RunId, u64)], clock: u64);

    /// The latest `clock` of all calls of [`PrefixIndex::retain`].
    fn clock(&self) -> u64;

    /// Whether the open found damage that may have cost runs.
    fn was_damaged(&self) -> bool {
        false
    }

    /// Visits all runs, in an unspecified order. Delays a writer at most for the time that reading
    /// one run takes; in `memory`, for the time that copying the ids of all runs takes.
    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView));

    /// Makes all changes before the call durable. A run that is inserted after `sync_data` was
    /// called becomes durable with the next sync; in `lsm` and `art` it may become durable earlier.
    ///
    /// # Errors
    /// `Fatal` if a write or sync failed: the index is then poisoned, and every later sync fails
    /// too. Errors of `sync_data`: the backend `run` then writes no record whose data may not be
    /// durable. In the backend `run`, `Retry` if the file system has no room: a later sync writes
    /// the records.
    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()>;

    /// Reduces the size of the files, if necessary; does nothing in `memory` and `art`. Does I/O
    /// and takes long, but does not delay other calls for long: meant for a background thread. If
    /// this method is never called, the backend `run` does the work in
    /// [`PrefixIndex::sync_after`], once the work cannot be postponed.
    ///
    /// # Errors
    /// Errors of [`PrefixIndex::sync_after`].
    fn maintain_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        let _ = sync_data;
        Ok(())
    }

    /// [`PrefixIndex::sync_after`] for runs whose data is durable, or that have no data.
    ///
    /// # Errors
    /// Errors of [`PrefixIndex::sync_after`].
    fn sync(&self) -> Result<()> {
        self.sync_after(&|| Ok(()))
    }

    /// [`PrefixIndex::maintain_after`] for runs whose data is durable, or that have no data.
    ///
    /// # Errors
    /// Errors of [`PrefixIndex::sync_after`].
    fn maintain(&self) -> Result<()> {
        self.maintain_after(&|| Ok(()))
    }

    /// Whether a run of these pages, with one extent, fits the memory ceiling; true without a
    /// ceiling.
    fn has_memory_for(&self, pages: &[PageHash]) -> bool {
        let _ = pages;
        true
    }

    /// Sets the maximum bytes that the index's files may take, copies written by checkpoints or
    /// compactions included. If the files exceed this maximum already, inserts are refused until
    /// [`PrefixIndex::maintain_after`], after removals of pages if necessary, has reduced the
    /// files. `memory` and `art` ignore the maximum.
    fn set_budget(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Sizes and write statistics.
    fn stats(&self) -> IndexStats;

    /// The tuning of an index that adapts its structure; `None` for other indexes.
    fn tuning(&self) -> Option<Tuning> {
        None
    }
}
