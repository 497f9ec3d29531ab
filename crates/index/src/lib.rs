//! # ritornello-index
//!
//! Which pages exist and where: `trait PrefixIndex` and its backends, `run` (default), `memory` (the
//! plain oracle) and, by cargo features, `lsm` (RocksDB, for catalogues larger than memory) and
//! `art` (to compare with). [`Backend`] opens each by its name. [`residency`] says on which workers and
//! tiers pages are: what a router asks.
//!
//! **Promises.** A probe holds no lock across I/O or work that grows with the index. After
//! [`PrefixIndex::sync`] everything inserted or removed before it survives power loss. Whoever
//! syncs with [`PrefixIndex::sync_after`] finds no run after a power loss whose data was not
//! durable. In chained scopes the index is closed: a page goes, and everything attached behind it
//! goes with it.
//!
//! **May not know** what a page's bytes are or how they are read; which pages deserve to stay.

#![forbid(unsafe_code)]

#[cfg(all(feature = "art", not(loom)))]
mod art;
mod backend;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod copy;
mod leftover;
#[cfg(all(feature = "lsm", not(loom)))]
pub mod lsm;
mod memory;
pub mod residency;
mod run;
mod sync;
pub mod synthetic;
pub mod tuning;
mod view;

#[cfg(all(feature = "art", not(loom)))]
pub use art::{ArtIndex, ArtOptions, ArtRecovered};
pub use backend::{Backend, OpenOptions};
pub use copy::{Copied, copy};
#[cfg(all(feature = "lsm", not(loom)))]
pub use lsm::{LsmIndex, LsmOptions};
pub use memory::MemoryIndex;
pub use run::{Recovered, RunIndex, RunOptions};
pub use tuning::Tuning;

use ritornello_format::{PageHash, PageHashes, Place, Result, ScopeSlot};

/// Makes durable what lies in the places of all runs that are in the index when it is called. May
/// be called from any thread that syncs, several times, and with no lock of the index held that a
/// writer or a probe takes.
pub type SyncData<'a> = &'a dyn Fn() -> Result<()>;

/// A run's name. Unique while the index is open and never reused in that time; it may change when
/// the index is opened again (what lasts is the generation of the run's place).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId(pub u64);

/// A run to insert: the consecutive pages of one put.
#[derive(Clone, Copy, Debug)]
pub struct NewRun<'a> {
    /// Its scope.
    pub scope: ScopeSlot,
    /// Whether the scope's keys are chained.
    pub chained: bool,
    /// The page before the first one, where the caller knows it and it is in the index.
    pub parent: Option<PageHash>,
    /// At least one, at most 65,535; none of them is in the index yet in this scope.
    pub pages: &'a [PageHash],
    /// Where it lies. `place.extents` may be empty (a metadata-only index).
    pub place: &'a Place,
    /// When it was last used, in ticks of the store's recency clock.
    pub recency: u64,
}

/// Pages that left the index, and the space that they held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// The run they were in.
    pub run: RunId,
    /// Its scope.
    pub scope: ScopeSlot,
    /// How many pages went.
    pub pages: u32,
    /// Whether nothing of the run is left.
    pub whole: bool,
    /// What is free now (once the removal is durable and no lease holds it).
    pub extents: Vec<ritornello_format::Extent>,
}

/// Consecutive pages of one run that a sequence of keys leads through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The run.
    pub run: RunId,
    /// First page, counted in the run.
    pub first: u32,
    /// Number of pages.
    pub pages: u32,
    /// Position of the first page in the keys asked for.
    pub at: u32,
}

/// A run as the index knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunView {
    /// Its scope.
    pub scope: ScopeSlot,
    /// Whether the scope's keys are chained.
    pub chained: bool,
    /// The page it is attached behind, if known: run and page number there.
    pub parent: Option<(RunId, u32)>,
    /// Hashes of its pages; [`PageHash::NONE`] where a page was removed from the middle.
    pub pages: Vec<PageHash>,
    /// Where it lies.
    pub place: Place,
    /// When it was last used.
    pub recency: u64,
    /// When its retention ends, in seconds of the store's clock; zero if it is not retained.
    pub retain_until: u64,
}

/// Sizes and write statistics of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Runs.
    pub runs: u64,
    /// Pages.
    pub pages: u64,
    /// Bytes of memory held.
    pub memory_bytes: u64,
    /// Bytes of memory it may have resident, and how much of what that allows it holds, in percent.
    /// Both zero: nobody said.
    pub memory_bytes_max: u64,
    /// See there.
    pub memory_percent: u32,
    /// Bytes of files now on disk.
    pub disk_bytes: u64,
    /// Bytes written to files since open.
    pub written_bytes: u64,
    /// Checkpoints written since open.
    pub checkpoints: u64,
    /// Bytes of changes that wait in memory for a sync. Whoever owns the index syncs before this
    /// grows large: an index refuses inserts (`Retry`) rather than write under its writers' lock.
    pub pending_bytes: u64,
    /// Files now on disk.
    pub files: u64,
}

/// Which pages exist and where. All methods take `&self`; readers and one writer run in parallel.
pub trait PrefixIndex: Send + Sync + std::fmt::Debug {
    /// Inserts a run. In a chained scope a run whose `parent` is given is attached behind it.
    ///
    /// # Errors
    /// `Invalid` if a page is there already, `parent` is given and is not there, or the run is
    /// malformed; `Retry` if the index has reached a limit (call [`PrefixIndex::sync`], or remove
    /// pages); `Fatal` if it is poisoned. In each case nothing is changed.
    fn insert(&self, run: &NewRun<'_>) -> Result<RunId>;

    /// Records that, in a chained scope, page `child` (first of a run without a known parent)
    /// follows page `parent`. Does nothing if either is gone or `child` is attached already.
    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash);

    /// Cuts run `run` after `keep` pages. In chained scopes everything attached at or behind the
    /// cut goes too (each whole run or tail is one `Removed`). A run without any page left in front
    /// of the cut goes whole. Unknown runs, and cuts at or behind the end: nothing.
    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed>;

    /// Removes single pages. In chained scopes that is a truncation at each of them. In others a
    /// page leaves a hole: its own extents come back, and the header's with the last page.
    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed>;

    /// Removes every run of a scope.
    fn remove_scope(&self, scope: ScopeSlot) -> Vec<Removed>;

    /// Moves a run: same pages (holes included), same name, another place. Returns what the old
    /// place held, with no pages gone; or `None`, and nothing is changed, if there is no such run
    /// or the place does not hold that many pages.
    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed>;

    /// Number of leading pages that are in the index.
    fn longest_prefix(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize;

    /// The ways in which it can answer [`PrefixIndex::longest_prefix`], by name; the first is the
    /// one that it uses.
    fn probe_methods(&self) -> &'static [&'static str] {
        &["walk"]
    }

    /// [`PrefixIndex::longest_prefix`] by one of [`PrefixIndex::probe_methods`], for measurements.
    fn longest_prefix_by(&self, method: &str, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let _ = method;
        self.longest_prefix(scope, pages)
    }

    /// The leading pages that are in the index, run by run.
    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Step>;

    /// Which of the pages are in the index, each looked up by itself.
    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool>;

    /// Where one page is: its run and its number there.
    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)>;

    /// Where a run lies.
    fn place(&self, run: RunId) -> Option<Place>;

    /// The hash of page `at` of a run; `None` if there is no such page (any more).
    fn page(&self, run: RunId, at: u32) -> Option<PageHash>;

    /// Everything known of a run.
    fn run(&self, run: RunId) -> Option<RunView>;

    /// Whether runs are attached behind `run`.
    fn has_children(&self, run: RunId) -> bool;

    /// Notes that a run was used at `recency`; an earlier one than is known is ignored. Durable with
    /// the next checkpoint or sync.
    fn touch(&self, run: RunId, recency: u64);

    /// Notes until when runs are to be kept, in seconds of the store's clock, which now stands at
    /// `clock`; zero ends a retention. Unknown runs are skipped. Durable with the next sync.
    fn retain(&self, runs: &[(RunId, u64)], clock: u64);

    /// The latest `clock` that [`PrefixIndex::retain`] was ever told.
    fn clock(&self) -> u64;

    /// All runs, in no order, without holding up writers for longer than one run at a time.
    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView));

    /// Makes everything inserted, removed and linked before the call durable, and no run before
    /// `sync_data` was called with it in the index. What changes meanwhile waits for the next sync.
    ///
    /// # Errors
    /// `Fatal` if the medium refused: the index is then poisoned and every later sync fails too.
    /// What `sync_data` returned, and nothing is written that waits for it.
    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()>;

    /// Work that makes the files smaller, if any is due. It does I/O and takes a while, but holds
    /// up nobody: for a thread that has nothing else to do. Without it [`PrefixIndex::sync_after`]
    /// does the same when it cannot be put off.
    ///
    /// # Errors
    /// As of [`PrefixIndex::sync_after`].
    fn maintain_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        let _ = sync_data;
        Ok(())
    }

    /// [`PrefixIndex::sync_after`] for runs whose data is durable, or that have none.
    ///
    /// # Errors
    /// As there.
    fn sync(&self) -> Result<()> {
        self.sync_after(&|| Ok(()))
    }

    /// [`PrefixIndex::maintain_after`], likewise.
    ///
    /// # Errors
    /// As there.
    fn maintain(&self) -> Result<()> {
        self.maintain_after(&|| Ok(()))
    }

    /// Whether a run of these pages, in one piece, is not too much for the memory it may hold.
    fn has_memory_for(&self, pages: &[PageHash]) -> bool {
        let _ = pages;
        true
    }

    /// Sets how many bytes of files it may take, in the worst case. Where it takes more already,
    /// inserts are refused until pages were removed and [`PrefixIndex::maintain_after`] was called.
    fn set_budget(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Sizes and write statistics.
    fn stats(&self) -> IndexStats;

    /// How it is shaped and why, where it shapes itself.
    fn tuning(&self) -> Option<Tuning> {
        None
    }
}
