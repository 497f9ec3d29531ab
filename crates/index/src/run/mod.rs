//! The `run` backend: memory-resident, with a journal and two checkpoints.
//!
//! | module | noun |
//! |---|---|
//! | `slots` | the slot table: page → run and number, 8 bytes per page |
//! | `record` | the record of one run |
//! | `runs` | the table of records, and their tree |
//! | `tables` | both together, and the probe |
//! | `write` | changes: insert, link, cut, punch, relocate |
//! | `pending` | journal records that are not written yet |
//! | `journal` | the journal files, and group commit |
//! | `checkpoint` | copies all runs while the index changes |
//! | `frames` | reads files of checksummed frames in bounded memory |
//! | `recovery` | selects the checkpoint and the journals to recover from |
//! | `replay` | builds the tables from them |
//!
//! **Locks**, in the order in which they may be taken: `checkpoints` and `journal` are held across
//! I/O (`checkpoints` across a [`SyncData`] too, `journal` not), and only `sync` and `checkpoint`
//! take them; `pending` serialises writers; `tables` is the only lock that a probe takes. No lock
//! that a probe or a writer takes is held across I/O.

mod checkpoint;
pub(crate) mod frames;
mod journal;
mod options;
mod pending;
mod record;
mod recovery;
mod replay;
mod runs;
pub(crate) mod slots;
mod tables;
mod write;

pub use options::RunOptions;
#[cfg(all(any(feature = "art", feature = "lsm"), not(loom)))]
pub(crate) use write::{check, check_place};

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};
use crate::{IndexStats, MatchedRun, NewRun, PrefixIndex, Removed, RunId, RunView, SyncData};
use checkpoint::Checkpoints;
use journal::Journal;
use pending::Pending;
use ritornello_format::{PageHash, PageHashes, Place, Result, ScopeSlot};
use ritornello_medium::Medium;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tables::Tables;

/// See the [module](self) and `trait` [`PrefixIndex`].
#[derive(Debug)]
pub struct RunIndex {
    medium: Arc<dyn Medium>,
    dir: PathBuf,
    options: RunOptions,
    checkpoints: Mutex<Checkpoints>,
    journal: Mutex<Journal>,
    pending: Mutex<Pending>,
    tables: RwLock<Tables>,
    /// Runs touched since the last sync, each once (see [`record::Hot::touched`]).
    touched: Mutex<Vec<slots::Number>>,
    gauges: Gauges,
    recovered: Recovered,
}

/// Figures that can be read without a lock.
#[derive(Debug)]
struct Gauges {
    poisoned: AtomicBool,
    /// The current [`RunOptions::metadata_bytes_max`].
    budget: AtomicU64,
    /// Bytes of journal records in memory.
    pending: AtomicU64,
    /// Bytes of all journal files.
    journals: AtomicU64,
    /// Bytes of the current journal file.
    journal: AtomicU64,
    /// Number of journal files.
    journal_files: AtomicU64,
    /// Bytes of the two checkpoint files.
    checkpoints: [AtomicU64; 2],
    written: AtomicU64,
    made: AtomicU64,
}

/// Numbers of records and runs that [`RunIndex::open`] recovered and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Journal records that were replayed.
    pub replayed: u64,
    /// Bytes of journal after a torn or damaged frame. A crash tears the last frame.
    pub torn_bytes: u64,
    /// Whether a checkpoint was damaged, or a journal before its end. A torn tail is not damage.
    pub damaged: bool,
    /// Runs dropped as inconsistent, including their descendants.
    pub dropped_runs: u64,
}

impl RunIndex {
    /// Opens the index in `dir`, or creates an index. Damage is not an error: records that fail
    /// verification are dropped, logged, and counted in [`RunIndex::recovered`].
    ///
    /// # Errors
    /// `Invalid` if a file has an unknown format version; `Fatal` if a file cannot be read or
    /// written.
    pub fn open(medium: Arc<dyn Medium>, dir: &Path, options: RunOptions) -> Result<Self> {
        recovery::open(medium, dir, options)
    }

    /// Numbers of records and runs that the open recovered and dropped.
    #[must_use]
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    fn budget(&self) -> u64 {
        self.gauges.budget.load(Ordering::Relaxed)
    }

    fn is_poisoned(&self) -> bool {
        self.gauges.poisoned.load(Ordering::Acquire)
    }
}

impl PrefixIndex for RunIndex {
    fn insert(&self, run: &NewRun<'_>) -> Result<RunId> {
        self.insert_run(run)
    }

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        self.link_run(scope, parent, child);
    }

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let mut pending = self.pending.lock();
        let number = self.tables.read().runs.number(run);
        number.map_or_else(Vec::new, |number| self.cut(&mut pending, number, keep))
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        self.remove_pages(scope, pages)
    }

    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        self.remove_runs_of(scope)
    }

    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed> {
        self.move_run(run, place)
    }

    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.tables.read().walk(scope, pages, |_, _, _, _| ())
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun> {
        let mut matched = Vec::new();
        let tables = self.tables.read();
        tables.walk(scope, pages, |run, page, count, at| {
            matched.push(MatchedRun {
                run: tables.runs.id(run),
                first: u32::from(page),
                pages: count as u32,
                at: at as u32,
            });
        });
        matched
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        let mut found = Vec::with_capacity(pages.len());
        // In batches: a request for many pages must not delay a writer for long.
        while found.len() < pages.len() {
            let tables = self.tables.read();
            let end = pages.len().min(found.len() + tables::LOCK_BATCH);
            for at in found.len()..end {
                found.push(tables.find(scope, pages.at(at)).is_some());
            }
        }
        found
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        let tables = self.tables.read();
        let (run, page) = tables.find(scope, page)?;
        Some((tables.runs.id(run), u32::from(page)))
    }

    fn place(&self, run: RunId) -> Option<Place> {
        let tables = self.tables.read();
        tables.runs.number(run).map(|run| tables.runs.place(run))
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let tables = self.tables.read();
        let run = tables.runs.number(run)?;
        let page = *tables.runs.hot(run).pages().get(at as usize)?;
        (page != PageHash::NONE).then_some(page)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        let tables = self.tables.read();
        tables.runs.number(run).map(|run| tables.runs.view(run))
    }

    fn has_children(&self, run: RunId) -> bool {
        let tables = self.tables.read();
        tables.runs.number(run).is_some_and(|run| tables.runs.cold(run).child != runs::NO_RUN)
    }

    fn touch(&self, run: RunId, recency: u64) {
        let tables = self.tables.read();
        let Some(number) = tables.runs.number(run) else { return };
        tables.runs.cold(number).recency.fetch_max(recency, Ordering::Relaxed);
        if !tables.runs.hot(number).touched.swap(true, Ordering::AcqRel) {
            self.touched.lock().push(number);
        }
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        self.retain_runs(runs, clock);
    }

    fn clock(&self) -> u64 {
        self.tables.read().runs.clock
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        let mut number = runs::NO_RUN;
        loop {
            number += 1;
            let view = {
                let tables = self.tables.read();
                if number >= tables.runs.end() {
                    return;
                }
                tables
                    .runs
                    .is_live(number)
                    .then(|| (tables.runs.id(number), tables.runs.view(number)))
            };
            if let Some((run, view)) = view {
                visit(run, view);
            }
        }
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        self.append_touches();
        let last = self.pending.lock().seal();
        self.commit(last, sync_data)?;
        if self.must_checkpoint() { self.checkpoint_after(sync_data) } else { Ok(()) }
    }

    fn maintain_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        if self.is_checkpoint_due() { self.checkpoint_after(sync_data) } else { Ok(()) }
    }

    fn has_memory_for(&self, pages: &[PageHash]) -> bool {
        self.check_memory(pages, 1).is_ok()
    }

    fn set_budget(&self, bytes: u64) {
        self.gauges.budget.store(bytes, Ordering::Relaxed);
    }

    fn stats(&self) -> IndexStats {
        let get = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let (runs, pages, memory) = {
            let tables = self.tables.read();
            (tables.runs.live, tables.runs.pages, tables.bytes() as u64)
        };
        let checkpoints = self.gauges.checkpoints.each_ref().map(get);
        let bounded = self.options.memory_bytes_max < u64::MAX;
        let pending_bytes = get(&self.gauges.pending);
        IndexStats {
            runs,
            pages,
            memory_bytes: memory + pending_bytes,
            memory_bytes_max: if bounded { self.options.memory_bytes_max } else { 0 },
            memory_percent: if bounded {
                (memory * 100 / self.options.tables_max()) as u32
            } else {
                0
            },
            disk_bytes: get(&self.gauges.journals) + checkpoints.iter().sum::<u64>(),
            written_bytes: get(&self.gauges.written),
            checkpoints: get(&self.gauges.made),
            pending_bytes,
            files: get(&self.gauges.journal_files)
                + checkpoints.iter().filter(|bytes| **bytes > 0).count() as u64,
        }
    }
}
