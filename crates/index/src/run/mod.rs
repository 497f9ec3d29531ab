//! The `run` backend: memory-resident, with a journal and two checkpoints.
//!
//! | module | contents |
//! |---|---|
//! | `slots` | the slot table: from a page's hash to its run and its position in the run, 8 bytes per page |
//! | `record` | the record of one run |
//! | `runs` | the table of records, and the tree that links each run to its parent |
//! | `tables` | slots and records together, and lookups in them |
//! | `index` | changes and lookups: the implementation of [`crate::PrefixIndex`] |
//! | `check` | whether a run can be inserted |
//! | `pending` | journal records that are not written yet |
//! | `options` | options, and the lengths of files that follow from them |
//! | `journal` | the journal files, and group commit |
//! | `checkpoint` | copies all runs while the index changes |
//! | `frames` | reads files of checksummed frames in bounded memory |
//! | `recovery` | selects the checkpoint and the journals to recover from |
//! | `replay` | builds the tables from a checkpoint and journals |
//! | `stored` | counts the runs and pages of an index that is not open |
//!
//! **Locks**, in the order in which they may be taken: `checkpoints` and `journal` are held across
//! I/O, and only syncs, checkpoints and maintenance take them; `checkpoints` is also held during
//! calls of a [`crate::SyncData`]. `pending` serialises writers. A probe takes only `tables`.
//! `touched` lists used runs, and is taken under `tables` or alone. No lock that a probe or a
//! writer takes is held across I/O.

mod check;
mod checkpoint;
pub(crate) mod frames;
mod index;
mod journal;
mod options;
mod pending;
mod record;
mod recovery;
mod replay;
mod runs;
pub(crate) mod slots;
mod stored;
mod tables;

#[cfg(any(feature = "art", feature = "lsm"))]
pub(crate) use check::{check, check_place};
pub use options::RunOptions;
pub use stored::StoredIndex;

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};
use checkpoint::Checkpoints;
use journal::Journal;
use pending::Pending;
use ritornello_format::Result;
use ritornello_medium::Medium;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tables::Tables;

/// See the [module](self) and `trait` [`crate::PrefixIndex`].
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

/// Sizes and counts that can be read without a lock.
#[derive(Debug)]
struct Gauges {
    poisoned: AtomicBool,
    /// The current [`RunOptions::metadata_bytes_max`].
    budget: AtomicU64,
    /// Bytes of journal records that wait to be written.
    pending: AtomicU64,
    /// Bytes of all journal files.
    journals: AtomicU64,
    /// Bytes of the current journal file.
    journal: AtomicU64,
    journal_files: AtomicU64,
    /// Bytes of the two checkpoint files.
    checkpoints: [AtomicU64; 2],
    /// Bytes written to all files since the open.
    written: AtomicU64,
    /// Number of checkpoints written since the open.
    made: AtomicU64,
}

/// Numbers of records and runs that [`RunIndex::open`] recovered and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Journal records that were replayed.
    pub replayed: u64,
    /// Bytes at the end of a journal file, from a torn or damaged frame or header onwards, that
    /// were not replayed. A crash may tear the last frame.
    pub torn_bytes: u64,
    /// Whether durable records may be lost. Each of these states counts:
    /// * No checkpoint could be used, and the journal files lack the first record.
    /// * The newest intact checkpoint shows changes whose records the journal lacks.
    /// * The journal is damaged, or lacks a file, before its end, or the disk cannot read a part of
    ///   it.
    ///
    /// A damaged checkpoint does not count if the other checkpoint, or the journal alone, restores
    /// everything. A torn frame at the end of the journal does not count.
    pub damaged: bool,
    /// Runs dropped as inconsistent, including their descendants.
    pub dropped_runs: u64,
}

impl RunIndex {
    /// Opens the index in `dir`, or creates an index. Damage is not an error: records that fail
    /// verification are dropped, logged, and counted in [`RunIndex::recovered`].
    ///
    /// # Errors
    /// `Invalid` if a file has an unknown format version; `Retry` if a file cannot be opened or
    /// created, or cannot be read for lack of resources, or if the file system has no room to
    /// rewrite the index; `Fatal` if rewriting the index fails for another reason. A part of a file
    /// that the disk cannot read (`EIO`) counts as damage.
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
