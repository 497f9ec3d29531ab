//! The `lsm` backend: RocksDB, for indexes larger than memory.
//!
//! | module | contents |
//! |---|---|
//! | `keys` | column families, keys and their order |
//! | `record` | the stored records |
//! | `families` | the database, and typed reads of its column families |
//! | `index` | changes and lookups: the implementation of [`crate::PrefixIndex`] |
//! | `probe` | the two methods that find the longest prefix |
//! | `write` | changes, as atomic batches |
//! | `options` | options, at open and while open |
//! | `cost` | the cost of operations with a setting: a size ratio, and sorted runs per level |
//! | `controller` | selects the setting that suits the operations |
//! | `meter` | prices: the time that an operation's steps take, measured in the running index |
//! | `shape` | maps a setting to RocksDB's options |
//! | `tuner` | applies `cost`, `controller`, `meter` and `shape` to the open database |
//! | `gauges` | sizes and write statistics |
//! | `recovery` | opens and repairs the database, or replaces it by an empty database |
//! | `claim` | refuses a second open of one database in one process |
//! | `wal_corruption` | finds records that RocksDB would read in an endless loop |
//! | `seal` | the recorded length of RocksDB's manifest |
//!
//! **Column families.** `path` holds `scope | run | page → hash`, so that the order of keys is the
//! order of prefixes; `page` holds `scope | hash → run, page`; `run` holds the record of a run,
//! `use` its recency and the end of its retention, `child` the runs attached to a page.
//!
//! **Durable form.** Changes become durable in RocksDB's write-ahead log. A method returns when its
//! batch is in the log's buffer. [`crate::PrefixIndex::sync_after`] first makes the data of the
//! runs durable, then syncs the log; concurrent calls share one sync. A [`crate::RunId`] stays
//! valid across opens, until a repair renumbers the runs.
//!
//! **Records that become durable early.** A batch is appended to the log immediately, and may
//! become durable before the data that it names. A batch becomes durable early if RocksDB flushes
//! full memtables, if the kernel writes the log, or if an index that was not synced is opened
//! again. A batch that is appended during a sync or a call of
//! [`crate::PrefixIndex::maintain_after`] may also become durable early, if `sync_data` was called
//! before the batch was appended. After a power loss the run of an early batch may exist without
//! the bytes of its pages. A read of these pages finds wrong checksums, and is a miss. The backend
//! `run` withholds records until their data is durable. All other batches become durable after
//! their data: a sync and
//! [`crate::PrefixIndex::maintain_after`] first call `sync_data`, and closing writes the batches to
//! tables only if all of them were synced.
//!
//! **After a failed sync** reads may return bytes that are not on the disk, because the kernel has
//! marked the pages of these bytes in the page cache as clean ([`crate::RunOptions::clean`]). Every
//! open rewrites all data that may have been lost, so the failure does not have to be recorded:
//!
//! * The log: its records are read into memtables, and flushed to new, synced tables before the
//!   open returns (`avoid_flush_during_recovery` is off). No record is appended to the old log.
//! * The manifest: the first change after an open, which the open itself makes, writes the whole
//!   manifest to a new file, syncs it, and only then lets `CURRENT` name it
//!   (`reuse_manifest_on_open` is off). Old files are removed after that.
//! * Tables: the manifest names a table only after the table was synced. If that sync fails, the
//!   log is kept, and the next open deletes the table.
//!
//! A process does not write or sync a file again after a failure; the index is poisoned.
//!
//! **Locks.** A reader takes no lock that is held across I/O; at most one lookup in 256 takes the
//! meter's lock to record its time. The writer's lock makes read-modify-write atomic; RocksDB may
//! delay the lock's holder while it flushes memtables.
//!
//! **Limits.**
//! * The index reads and writes with RocksDB's own I/O, not through the medium: it does not work on
//!   a simulated disk, and faults cannot be injected.
//! * A store keeps a record of every run for eviction, with any index, so memory limits the number
//!   of runs, but not of pages.
//! * The budget counts tables twice, because compaction writes new tables before it deletes the old
//!   tables; so about half of the budget is usable.
//! * The index cannot be opened in a forked child of a process that has opened an index `lsm` or a
//!   residency index `lsm`.
//! * A full disk poisons the index: open the store again once there is room.
//! * After damage, the next open copies the recoverable runs into a new database. Until the copy is
//!   complete, the damaged and the new database take space.

mod claim;
mod controller;
mod cost;
mod families;
mod gauges;
mod index;
mod keys;
mod meter;
mod options;
mod probe;
mod record;
pub(crate) mod recovery;
mod seal;
mod shape;
mod tuner;
pub(crate) mod wal_corruption;
mod write;

pub use controller::Mode;
pub use options::{LsmOptions, ProbeMethod};
pub use recovery::LsmRecovered;

use crate::sync::Mutex;
use crate::{MatchedRun, RunId, RunView};
use families::Families;
use gauges::Gauges;
use record::{Record, Use};
use ritornello_format::{Error, PageHash, PageHashes, Result, ScopeSlot};
use rocksdb::FlushOptions;
use std::collections::HashMap;
use std::path::Path;
use tuner::Tuner;

/// See the [module](self) and `trait` [`crate::PrefixIndex`].
#[derive(Debug)]
pub struct LsmIndex {
    db: Families,
    tuner: Tuner,
    probe: ProbeMethod,
    writer: Mutex<write::Writer>,
    /// Runs used since their recency was last written, and their new recency.
    touched: Mutex<HashMap<RunId, u64>>,
    /// Held by the sync in progress. A call that waited for this lock returns without a sync if the
    /// sync in progress covered its changes.
    syncing: Mutex<()>,
    /// [`Gauges::appended`] at the last compaction of the whole database. A compaction holds this
    /// lock.
    compacting: Mutex<u64>,
    gauges: Gauges,
    recovered: LsmRecovered,
    /// Declared last, so that it is dropped after the database is closed.
    claim: Option<claim::Claim>,
}

impl LsmIndex {
    /// Opens the index in `dir`, or creates an index. Damage that the open finds is not an error:
    /// the consistent runs are copied into a new database. [`LsmIndex::recovered`] counts these
    /// runs, and the runs dropped as inconsistent.
    ///
    /// # Errors
    /// `Invalid` if the database has an unknown format; `Retry` if the index is open already;
    /// `Fatal` for file-system errors, and in a forked child of a process that has used RocksDB.
    pub fn open(dir: &Path, options: &LsmOptions) -> Result<Self> {
        recovery::open(dir, options)
    }

    /// Whether the open found damage, and the numbers of runs that it recovered and dropped.
    #[must_use]
    pub fn recovered(&self) -> LsmRecovered {
        self.recovered
    }

    /// Sets whether the structure of the tree follows the operations or approaches a fixed setting.
    /// Takes effect step by step, with flushes, when [`crate::PrefixIndex::maintain`] is called,
    /// without additional rewrites.
    pub fn set_mode(&self, mode: Mode) {
        self.db.controller.set_mode(mode);
    }

    fn probe_with(&self, method: ProbeMethod, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let bisected = match method {
            ProbeMethod::Bisect => probe::bisect(&self.db, scope, pages),
            ProbeMethod::Scan => None,
        };
        bisected.unwrap_or_else(|| probe::scan(&self.db, scope, pages, |_| ()))
    }

    /// [`crate::PrefixIndex::walk`] by the given method.
    pub fn walk_with(
        &self,
        method: ProbeMethod,
        scope: ScopeSlot,
        pages: &dyn PageHashes,
    ) -> Vec<MatchedRun> {
        let climbed = match method {
            ProbeMethod::Bisect => probe::walk_back(&self.db, scope, pages),
            ProbeMethod::Scan => None,
        };
        climbed.unwrap_or_else(|| {
            let mut matched = Vec::new();
            probe::scan(&self.db, scope, pages, |run| matched.push(run));
            matched
        })
    }

    fn view(&self, run: RunId, record: Record, pages: Vec<PageHash>, used: Use) -> RunView {
        let touched = self.touched.lock().get(&run).copied().unwrap_or(0);
        RunView {
            scope: record.scope,
            chained: record.chained,
            parent: record.parent.map(|(parent, page)| (parent, page.into())),
            pages,
            place: record.place,
            recency: used.recency.max(touched),
            retain_until: used.retain_until,
        }
    }

    /// Flushes all memtables, so that the log has no records.
    fn flush(&self) -> Result<()> {
        let handles = self.db.handles()?;
        self.db.db.flush_cfs_opt(&handles, &FlushOptions::default()).map_err(|error| {
            self.db.poison(&error);
            Error::fatal("the index could not be written: open the store again").because(error)
        })
    }
}

impl Drop for LsmIndex {
    /// Flushes if all changes were synced, so that the next open has no records to replay.
    /// Otherwise the records stay in the log, because their data may not be durable.
    fn drop(&mut self) {
        if self.db.is_poisoned() {
            return;
        }
        let synced = self.gauges.pending() == 0;
        self.write_touches();
        if let Err(error) = if synced { self.flush() } else { Ok(()) } {
            // Do not seal the manifest: its end may be missing on the disk.
            tracing::error!(
                %error,
                "the index could not be flushed when it was closed: the next open replays its log"
            );
            return;
        }
        self.db.seal();
    }
}
