//! # ritornello-index
//!
//! Which pages exist and where: `trait PrefixIndex` and its backends, `run` (default) and
//! `memory` (the plain oracle).
//!
//! **Promises.** A probe holds no lock across I/O or work that grows with the index. After
//! [`PrefixIndex::sync`] everything inserted or removed before it survives power loss. In chained
//! scopes the index is closed: a page goes, and everything attached behind it goes with it.
//!
//! **May not know** what a page's bytes are or how they are read; which pages deserve to stay.

#![forbid(unsafe_code)]

use ritornello_format::{PageHash, PageHashes, Place, Result, ScopeSlot};

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
    /// The page it is attached behind, if known: run and page number there.
    pub parent: Option<(RunId, u32)>,
    /// Hashes of its pages; [`PageHash::NONE`] where a page was removed from the middle.
    pub pages: Vec<PageHash>,
    /// Where it lies.
    pub place: Place,
    /// When it was last used.
    pub recency: u64,
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
    /// Bytes of files now on disk.
    pub disk_bytes: u64,
    /// Bytes written to files since open.
    pub written_bytes: u64,
    /// Checkpoints written since open.
    pub checkpoints: u64,
}

/// Which pages exist and where. All methods take `&self`; readers and one writer run in parallel.
pub trait PrefixIndex: Send + Sync + std::fmt::Debug {
    /// Inserts a run. In a chained scope a run whose `parent` is given is attached behind it.
    ///
    /// # Errors
    /// `Invalid` if a page is there already, `parent` is given and is not there, or the run is
    /// malformed; nothing is changed.
    fn insert(&self, run: &NewRun<'_>) -> Result<RunId>;

    /// Records that, in a chained scope, page `child` (first of a run without a known parent)
    /// follows page `parent`. Does nothing if either is gone or `child` is attached already.
    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash);

    /// Cuts run `run` after `keep` pages. In chained scopes everything attached at or behind the
    /// cut goes too (each whole run or tail is one `Removed`). Unknown runs: nothing.
    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed>;

    /// Removes single pages. In chained scopes that is a truncation at each of them.
    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed>;

    /// Removes every run of a scope.
    fn remove_scope(&self, scope: ScopeSlot) -> Vec<Removed>;

    /// Moves a run: same pages, same name, another place. Returns what the old place held, or `None` if there is no such run.
    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed>;

    /// Number of leading pages that are in the index.
    fn longest_prefix(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize;

    /// The leading pages that are in the index, run by run.
    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Step>;

    /// Which of the pages are in the index, each looked up by itself.
    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool>;

    /// Where one page is: its run and its number there.
    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)>;

    /// Where a run lies.
    fn place(&self, run: RunId) -> Option<Place>;

    /// Everything known of a run.
    fn run(&self, run: RunId) -> Option<RunView>;

    /// Whether runs are attached behind `run`.
    fn has_children(&self, run: RunId) -> bool;

    /// Notes that a run was used at `recency`. Durable with the next checkpoint or sync.
    fn touch(&self, run: RunId, recency: u64);

    /// All runs, in no order, without holding up writers for longer than one run at a time.
    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView));

    /// Makes everything inserted, removed and linked before the call durable.
    ///
    /// # Errors
    /// `Fatal` if the medium refused: the index is then poisoned and every later sync fails too.
    fn sync(&self) -> Result<()>;

    /// Sizes and write statistics.
    fn stats(&self) -> IndexStats;
}
