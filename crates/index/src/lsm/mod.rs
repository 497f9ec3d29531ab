//! The `lsm` backend: RocksDB, for catalogues larger than memory.
//!
//! | module | noun |
//! |---|---|
//! | `keys` | the order of bytes |
//! | `record` | what is stored of one run |
//! | `families` | the database: column families, and typed reads |
//! | `probe` | the two ways to the longest prefix |
//! | `write` | what changes the index, in atomic batches |
//! | `options` | what can be chosen, and what of it while open |
//! | `cost` | what operations cost with a size ratio and so many runs a level |
//! | `controller` | which of them suit what the index is asked to do |
//! | `meter` | prices, taken from the running index |
//! | `shape` | a setting in RocksDB's words |
//! | `tuner` | the four above, put to work |
//! | `gauges` | sizes and write statistics |
//! | `recovery` | opening, repairing, starting over |
//! | `wal_corruption` | damage that RocksDB would read for ever |
//! | `seal` | how long RocksDB's list of files has been |
//!
//! **What is where.** `path` holds `scope | run | page → hash`, so that the order of keys is the
//! order of prefixes; `page` holds `scope | hash → run, page`; `run` what is known of a run, `use`
//! when it was used and until when it is kept, `child` what is attached behind a page.
//!
//! **Durable form.** RocksDB's log. A batch is in the log's buffer when a method returns, and on
//! the disk after [`PrefixIndex::sync_after`], which others that wait share, and whose data was
//! settled before. Names of runs last until the index is repaired.
//!
//! **What is not held back.** A batch is in the log as it is made. It may become durable before the
//! data that it names is: when memtables that are full are written out, when the kernel writes the
//! log out, when an index that was not synced is opened again, and when it is made while a sync that
//! has settled already is still writing. After a power loss such a run may be there without its
//! pages; their checksums make them misses. `run` holds such records back. Of its own accord nothing
//! is made durable unsettled: neither by a sync, nor by [`PrefixIndex::maintain_after`], nor as it is
//! closed.
//!
//! **After a failed sync** the pages that it dropped still read back, and are not on the disk
//! ([`crate::RunOptions::clean`]). Every open rewrites what may be such, so it need not be applied_options:
//!
//! * The log: its records go into memtables and from there into new, synced tables before the open
//!   returns (`avoid_flush_during_recovery` is off), and the old log is not appended to.
//! * The list of files: the first change after an open, which the open itself makes, writes the whole
//!   list into a new file, syncs it, and only then lets `CURRENT` name it (`reuse_manifest_on_open` is
//!   off). Old files go after that.
//! * Tables: one is named in the list after it was synced. If its sync fails, the log is kept, and the
//!   table is deleted at the next open.
//!
//! A file that failed once is not written or synced again by the same process; the index is poisoned.
//!
//! **Locks.** Readers take none. The writer's lock makes read-modify-write whole; RocksDB may hold
//! a writer up under it while it writes memtables out.
//!
//! **Limits.**
//! * It reads and writes with RocksDB's own I/O, not through the medium: it cannot lie on a
//!   simulated disk, and faults cannot be injected.
//! * A store keeps a record of every run for eviction whatever its index is, so memory bounds the
//!   number of runs, though not of pages.
//! * The budget counts tables twice, since compaction writes them anew before the old ones go; so
//!   about half of it can be used.
//! * It cannot be opened in a forked child of a process that has used it.
//! * A disk that is full poisons it: open the store again once there is room.
//! * What damage leaves is copied at the next open, which takes as much space again for a while.

mod controller;
mod cost;
mod families;
mod gauges;
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
pub use options::{LsmOptions, Probe};
pub use recovery::LsmRecovered;

use crate::sync::{Mutex, Ordering};
use crate::{IndexStats, NewRun, PrefixIndex, Removed, RunId, RunView, Step, SyncData, Tuning};
use families::{Families, Family};
use gauges::Gauges;
use record::{Record, Use};
use ritornello_format::{Error, PageHash, PageHashes, Place, Result, ScopeSlot};
use rocksdb::FlushOptions;
use std::collections::HashMap;
use std::path::Path;

/// See the [module](self) and `trait` [`PrefixIndex`].
#[derive(Debug)]
pub struct LsmIndex {
    db: Families,
    probe: Probe,
    writer: Mutex<write::Writer>,
    /// Runs used since that was last written, and when.
    touched: Mutex<HashMap<RunId, u64>>,
    /// Held by whoever syncs.
    syncing: Mutex<()>,
    /// Held by whoever compacts everything: [`Gauges::appended`] when that was last done.
    compacting: Mutex<u64>,
    gauges: Gauges,
    recovered: LsmRecovered,
}

impl LsmIndex {
    /// Opens the index in `dir`, or makes one. Damage is never an error: what cannot be believed is
    /// dropped, logged, and counted in [`LsmIndex::recovered`].
    ///
    /// # Errors
    /// `Invalid` for files of another format version; `Retry` if it is open already; `Fatal` if the
    /// file system refuses.
    pub fn open(dir: &Path, options: &LsmOptions) -> Result<Self> {
        recovery::open(dir, options)
    }

    /// What opening found.
    #[must_use]
    pub fn recovered(&self) -> LsmRecovered {
        self.recovered
    }

    /// Lets the shape of the tree follow what the index is asked to do from now on, or moves to a
    /// setting and stays there. It acts step by step, with flushes, as [`PrefixIndex::maintain`] is
    /// called; nothing is rewritten for its sake.
    pub fn set_mode(&self, mode: Mode) {
        self.db.set_mode(mode);
    }

    fn probe_by(&self, probe: Probe, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let bisected = match probe {
            Probe::Bisect => probe::bisect(&self.db, scope, pages),
            Probe::Scan => None,
        };
        bisected.unwrap_or_else(|| probe::scan(&self.db, scope, pages, |_| ()))
    }

    /// [`PrefixIndex::walk`] by either method.
    pub fn walk_by(&self, probe: Probe, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Step> {
        let climbed = match probe {
            Probe::Bisect => probe::walk_back(&self.db, scope, pages),
            Probe::Scan => None,
        };
        climbed.unwrap_or_else(|| {
            let mut steps = Vec::new();
            probe::scan(&self.db, scope, pages, |step| steps.push(step));
            steps
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

    /// Writes all memtables out, so that nothing is left in the log.
    fn flush(&self) -> Result<()> {
        let handles = self.db.handles()?;
        self.db.db.flush_cfs_opt(&handles, &FlushOptions::default()).map_err(|error| {
            self.db.poison(&error);
            Error::fatal("the index could not be written: open the store again").because(error)
        })
    }
}

impl Drop for LsmIndex {
    /// The next open has nothing to replay, if everything was synced. What was not stays in the
    /// log: its data may not be durable.
    fn drop(&mut self) {
        if self.db.is_poisoned() {
            return;
        }
        let synced = self.gauges.pending() == 0;
        self.write_touches();
        if let Err(error) = if synced { self.flush() } else { Ok(()) } {
            // The end of the list of files may not be on the disk: its length is no promise.
            tracing::error!(%error, "the index could not be written out as it was closed");
            return;
        }
        self.db.seal();
    }
}

impl PrefixIndex for LsmIndex {
    fn insert(&self, run: &NewRun<'_>) -> Result<RunId> {
        self.insert_run(run)
    }

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        self.link_run(scope, parent, child);
    }

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        self.truncate_run(run, keep)
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        self.remove_pages(scope, pages)
    }

    fn remove_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        self.remove_runs_of(scope)
    }

    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed> {
        self.move_run(run, place)
    }

    fn longest_prefix(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.probe_by(self.probe, scope, pages)
    }

    fn probe_methods(&self) -> &'static [&'static str] {
        match self.probe {
            Probe::Bisect => const { &[Probe::Bisect.name(), Probe::Scan.name()] },
            Probe::Scan => const { &[Probe::Scan.name(), Probe::Bisect.name()] },
        }
    }

    fn longest_prefix_by(&self, method: &str, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let named = [Probe::Bisect, Probe::Scan].into_iter().find(|probe| probe.name() == method);
        self.probe_by(named.unwrap_or(self.probe), scope, pages)
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Step> {
        self.walk_by(self.probe, scope, pages)
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        (0..pages.len()).map(|at| self.db.find(scope, pages.at(at)).is_some()).collect()
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        self.db.find(scope, page).map(|(run, page)| (run, page.into()))
    }

    fn place(&self, run: RunId) -> Option<Place> {
        self.db.record(run).map(|record| record.place)
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let at = u16::try_from(at).ok()?;
        let record = self.db.record(run)?;
        keys::read_hash(&self.db.get(Family::Path, &keys::path(record.scope, run, at))?)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        loop {
            let record = self.db.record(run)?;
            let pages = self.db.hashes(run, &record, 0);
            let used = self.db.used(run)?;
            // Whatever takes pages changes the record with them, and never back.
            if self.db.record(run)? == record {
                return Some(self.view(run, record, pages, used));
            }
        }
    }

    fn has_children(&self, run: RunId) -> bool {
        let mut found = false;
        self.db.scan(Family::Child, &keys::page_position(run, 0), |key, _| {
            found = keys::read_child(key).is_some_and(|(parent, _)| parent == run);
            false
        });
        found
    }

    fn touch(&self, run: RunId, recency: u64) {
        self.touch_run(run, recency);
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        self.retain_runs(runs, clock);
    }

    fn clock(&self) -> u64 {
        self.gauges.clock.load(Ordering::Relaxed)
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        // The names of a scan, and each run as it is when its turn comes.
        self.db.scan(Family::Run, &[], |key, _| {
            if let Some(run) = keys::read_run(key)
                && let Some(view) = self.run(run)
            {
                visit(run, view);
            }
            true
        });
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        self.write_touches();
        let wanted = self.gauges.appended.load(Ordering::Acquire);
        let _turn = self.syncing.lock();
        self.db.check()?;
        if self.gauges.synced.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        // What those who share this sync have appended is settled with it.
        let reached = self.gauges.appended.load(Ordering::Acquire);
        sync_data()?;
        self.db.db.flush_wal(true).map_err(|error| {
            self.db.poison(&error);
            Error::fatal("the index could not be made durable: open the store again").because(error)
        })?;
        self.gauges.synced.store(reached, Ordering::Release);
        Ok(())
    }

    /// Tidies, and steers the shape of the tree: whoever never calls it has the tree that the index
    /// was opened with.
    fn maintain_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        if !self.db.is_poisoned() {
            self.db.tune()?;
        }
        let Some(mut last) = self.compacting.try_lock() else { return Ok(()) };
        let budget = self.gauges.budget.load(Ordering::Relaxed);
        let appended = self.gauges.appended.load(Ordering::Acquire);
        let over = self.gauges.files(&self.db).0.bytes > budget;
        if !over && (self.gauges.worst_bytes(&self.db) <= budget || appended == *last) {
            return Ok(());
        }
        self.db.check()?;
        sync_data()?;
        self.flush()?;
        for family in Family::ALL {
            self.db.db.compact_range_cf::<&[u8], &[u8]>(self.db.handle(family)?, None, None);
        }
        *last = appended;
        self.gauges.compactions.fetch_add(1, Ordering::Relaxed);
        self.gauges.invalidate();
        Ok(())
    }

    fn set_budget(&self, bytes: u64) {
        self.gauges.budget.store(bytes, Ordering::Relaxed);
        self.gauges.invalidate();
    }

    fn stats(&self) -> IndexStats {
        self.gauges.stats(&self.db)
    }

    fn tuning(&self) -> Option<Tuning> {
        Some(self.db.tuning())
    }
}
