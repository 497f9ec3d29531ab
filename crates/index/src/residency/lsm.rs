//! The residency backend `lsm`: RocksDB, for more pages than memory holds.
//!
//! **Column families.** `page` holds `scope | hash` → holders; `default` holds the format version,
//! and the *epoch* of each worker: the number of times that the worker was cleared. A stored holder
//! is ignored unless its epoch equals the current epoch of its worker. Clearing a worker is thus
//! one small write, and a compaction drops the pages that have no holders left. Clearing a scope is
//! one range deletion.
//!
//! **Durable form.** A change is in the buffer of RocksDB's log when its method returns, and on the
//! disk after a sync. Every block has a checksum that is verified when the block is read. A page
//! whose entry cannot be read is reported as a page without holders. A database that is too damaged
//! to open is replaced by an empty database.
//!
//! **Locks.** A reader takes the lock of the epochs for reading, and no other lock. No thread holds
//! this lock exclusively across I/O. The writer's lock makes read-modify-write atomic.

use super::prefix::Prefixes;
use super::{Holder, Prefix, Residency, ResidencyStats, Tier, Tiers, Worker, check};
use crate::lsm::{recovery, wal_corruption};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};
use ritornello_format::{Error, FORMAT_VERSION, PageHash, PageHashes, Result, ScopeSlot};
use rocksdb::compaction_filter::Decision;
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType,
    DBPinnableSlice, DBRecoveryMode, Options, WriteBatch,
};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

/// Options of an [`LsmResidency`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LsmResidencyOptions {
    /// Bytes of tables on disk and of memtables, together, from which on puts are refused with
    /// `Retry`.
    pub budget: u64,
    /// Bytes of changes that are gathered in memory before they are written as a table.
    pub memtable_bytes: u64,
    /// Bytes of blocks, filters and block indexes that are cached in memory.
    pub block_cache_bytes: u64,
}

impl Default for LsmResidencyOptions {
    fn default() -> Self {
        Self { budget: 1 << 40, memtable_bytes: 64 << 20, block_cache_bytes: 64 << 20 }
    }
}

const PAGES: &str = "page";
/// The key of the format version in the family `default`.
const VERSION: &[u8] = b"version";
/// The first byte of the key of a worker's epoch.
const WORKER: u8 = b'w';
/// Maximum pages that a lookup of prefixes reads with one call of RocksDB.
const AT_ONCE: usize = 32;

/// The epoch of every worker that was cleared.
type Epochs = HashMap<Worker, u32>;

/// See the [module](self) and `trait` [`Residency`].
pub struct LsmResidency {
    db: DB,
    cache: Cache,
    options: LsmResidencyOptions,
    epochs: Arc<RwLock<Epochs>>,
    writer: Mutex<()>,
    refused: AtomicU64,
    /// Bytes written since the last sync.
    pending: AtomicU64,
    /// Whether a write or a sync failed. Every later sync then fails.
    failed: AtomicBool,
    damaged: bool,
}

impl std::fmt::Debug for LsmResidency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LsmResidency").field("path", &self.db.path()).finish_non_exhaustive()
    }
}

/// The key of a page. The scope comes first, so that the pages of a scope are adjacent.
fn page_key(scope: ScopeSlot, page: PageHash) -> [u8; 20] {
    let mut key = [0; 20];
    key[..4].copy_from_slice(&scope.0.to_be_bytes());
    key[4..].copy_from_slice(&page.0);
    key
}

fn worker_key(worker: Worker) -> [u8; 5] {
    let mut key = [WORKER; 5];
    key[1..].copy_from_slice(&worker.0.to_be_bytes());
    key
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_be_bytes)
}

/// The holders written in their worker's current epoch, ordered by worker; empty for a malformed
/// value.
fn decode(value: &[u8], epochs: &Epochs) -> Vec<Holder> {
    let (entries, rest) = value.as_chunks::<9>();
    let entries = if rest.is_empty() { entries } else { &[] };
    let counts = |entry: &[u8; 9]| {
        let worker = Worker(number(&entry[..4])?);
        let epoch = number(&entry[4..8])?;
        let tiers = Tiers::from_bits(entry[8])?;
        let counts = epoch == epochs.get(&worker).copied().unwrap_or(0);
        counts.then_some(Holder { worker, tiers })
    };
    entries.iter().filter_map(counts).collect()
}

fn encode(holders: &[Holder], epochs: &Epochs) -> Vec<u8> {
    let mut value = Vec::with_capacity(9 * holders.len());
    for holder in holders {
        let epoch = epochs.get(&holder.worker).copied().unwrap_or(0);
        value.extend_from_slice(&holder.worker.0.to_be_bytes());
        value.extend_from_slice(&epoch.to_be_bytes());
        value.push(holder.tiers.bits());
    }
    value
}

impl LsmResidency {
    /// Opens the index in its own directory `dir`, or creates an index. A database that is too
    /// damaged to open is replaced by an empty database, and [`LsmResidency::was_damaged`] returns
    /// `true`.
    ///
    /// # Errors
    /// `Invalid` if the database has an unknown format version; `Retry` if the database is open
    /// already, in this process or another; `Fatal` for file-system errors, and in a forked child
    /// of a process that has used RocksDB.
    pub fn open(dir: &Path, options: &LsmResidencyOptions) -> Result<Self> {
        let path = dir.join("lsm");
        recovery::refuse_in_forked_child(dir)?;
        fs::create_dir_all(dir).map_err(|error| refused(dir, error))?;
        let logs = wal_corruption::find_in_logs(&path).map_err(|error| refused(dir, error))?;
        if !logs.is_empty() || wal_corruption::is_in_manifest(&path) {
            return Self::recreate(dir, options, "its list of files or its log is damaged");
        }
        match Self::try_open(&path, options, false) {
            Ok(index) => index,
            Err(error) if recovery::is_open_already(&error) => Err(Error::retry(
                "the residency index is open already, here or in another process: close it first",
            )
            .with("dir", dir.display())
            .because(error)),
            Err(error)
                if error.kind() == rocksdb::ErrorKind::IOError && !is_missing_file(&error) =>
            {
                Err(refused(dir, error))
            }
            Err(error) => Self::recreate(dir, options, error.as_ref()),
        }
    }

    fn recreate(dir: &Path, options: &LsmResidencyOptions, why: &str) -> Result<Self> {
        tracing::warn!(
            why,
            dir = %dir.display(),
            "the residency index is damaged: its database is removed and created again"
        );
        let path = dir.join("lsm");
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(refused(dir, error)),
            _ => Self::try_open(&path, options, true)
                .unwrap_or_else(|error| Err(refused(dir, error))),
        }
    }

    /// Opens the database at `path`, or creates it. The outer error is RocksDB's; the inner error
    /// reports an unknown format version. `damaged`: whether this database replaces a damaged one.
    fn try_open(
        path: &Path,
        choices: &LsmResidencyOptions,
        damaged: bool,
    ) -> std::result::Result<Result<Self>, rocksdb::Error> {
        let epochs = Arc::new(RwLock::new(Epochs::new()));
        let loaded = Arc::new(AtomicBool::new(false));
        let cache = Cache::new_lru_cache(choices.block_cache_bytes as usize);
        let pages = ColumnFamilyDescriptor::new(PAGES, family(choices, &cache, &epochs, &loaded));
        let plain = ColumnFamilyDescriptor::new("default", Options::default());
        let mut options = database();
        // Create families only in a new database: an existing database without a family is damaged.
        options.create_missing_column_families(!path.join("CURRENT").exists());
        let db = DB::open_cf_descriptors(&options, path, [pages, plain])?;
        match db.get(VERSION)?.as_deref().map(number) {
            None => db.put(VERSION, FORMAT_VERSION.to_be_bytes())?,
            Some(Some(FORMAT_VERSION)) => {}
            Some(found) => {
                return Ok(Err(Error::invalid(format!(
                    "this residency index has an unknown format, and this Ritornello reads format \
                     {FORMAT_VERSION}: use the version that wrote it, or a new directory"
                ))
                .with("version", found.unwrap_or(u32::MAX))));
            }
        }
        let mut iterator = db.raw_iterator();
        iterator.seek([WORKER]);
        while let Some((key, value)) = iterator.item() {
            if let (Some(worker), Some(epoch)) = (number(&key[1..]), number(value)) {
                epochs.write().insert(Worker(worker), epoch);
            }
            iterator.next();
        }
        iterator.status()?;
        drop(iterator);
        loaded.store(true, Ordering::Release);
        Ok(Ok(Self {
            db,
            cache,
            options: choices.clone(),
            epochs,
            writer: Mutex::new(()),
            refused: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            damaged,
        }))
    }

    /// Whether the opening found a damaged database, and replaced it by an empty database.
    #[must_use]
    pub fn was_damaged(&self) -> bool {
        self.damaged
    }

    /// The handle of the family `page`.
    ///
    /// # Errors
    /// Never, because the family was opened with the database; the type cannot express this.
    fn pages(&self) -> Result<&ColumnFamily> {
        self.db.cf_handle(PAGES).ok_or_else(|| {
            Error::fatal("the residency index lacks its column family `page`: open it again")
        })
    }

    /// The values of keys; `None` for a key that does not exist or cannot be read.
    fn get(&self, keys: &[[u8; 20]]) -> Vec<Option<DBPinnableSlice<'_>>> {
        let Ok(pages) = self.pages() else { return Vec::new() };
        let values = self.db.batched_multi_get_cf(pages, keys, false);
        let readable = |value: std::result::Result<_, rocksdb::Error>| match value {
            Ok(value) => value,
            Err(error) => {
                tracing::warn!(
                    %error,
                    "an entry of the residency index cannot be read: its page counts as a page \
                     without holders"
                );
                None
            }
        };
        values.into_iter().map(readable).collect()
    }

    fn write(&self, batch: WriteBatch) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        self.pending.fetch_add(batch.size_in_bytes() as u64, Ordering::Relaxed);
        self.db.write(batch).map_err(|error| {
            self.failed.store(true, Ordering::Release);
            tracing::error!(
                %error,
                "the residency index could not be written: a change is lost, and every later sync \
                 fails"
            );
            Error::fatal("the residency index could not be written: open it again").because(error)
        })
    }

    /// Changes the holders of pages, in one batch.
    fn change(
        &self,
        scope: ScopeSlot,
        pages: &[PageHash],
        mut change: impl FnMut(&mut Vec<Holder>),
    ) -> Result<()> {
        let family = self.pages()?;
        let epochs = self.epochs.read();
        let mut batch = WriteBatch::default();
        let keys: Vec<_> = pages.iter().map(|page| page_key(scope, *page)).collect();
        for (key, old) in keys.iter().zip(self.get(&keys)) {
            let mut holders = old.as_ref().map_or_else(Vec::new, |old| decode(old, &epochs));
            change(&mut holders);
            let new = encode(&holders, &epochs);
            match old {
                Some(old) if *old == new[..] => {}
                None if new.is_empty() => {}
                _ if new.is_empty() => batch.delete_cf(family, key),
                _ => batch.put_cf(family, key, new),
            }
        }
        self.write(batch)
    }

    fn property(&self, name: &str) -> u64 {
        let value = self
            .pages()
            .ok()
            .and_then(|pages| self.db.property_int_value_cf(pages, name).ok().flatten());
        value.unwrap_or(0)
    }

    fn is_full(&self) -> bool {
        let tables = self.property("rocksdb.live-sst-files-size");
        tables + self.property("rocksdb.cur-size-all-mem-tables") >= self.options.budget
    }

    fn log(result: Result<()>) {
        if let Err(error) = result {
            tracing::error!(%error, "a change of the residency index failed");
        }
    }
}

fn is_missing_file(error: &rocksdb::Error) -> bool {
    error.to_string().contains("No such file")
}

fn refused(dir: &Path, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::fatal("the residency index cannot be opened: check its directory and its disk")
        .with("dir", dir.display())
        .because(error)
}

fn database() -> Options {
    let mut options = Options::default();
    options.create_if_missing(true);
    // Flush both families together, so that no page on disk is ahead of its worker's epoch.
    options.set_atomic_flush(true);
    options.set_manual_wal_flush(true);
    options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
    options.set_max_background_jobs(2);
    options.set_max_open_files(512);
    options.set_keep_log_file_num(1);
    options.set_stats_dump_period_sec(0);
    options
}

/// Options of the family `page`. Until `loaded` is set, the epochs are incomplete, and compactions
/// remove no page.
fn family(
    choices: &LsmResidencyOptions,
    cache: &Cache,
    epochs: &Arc<RwLock<Epochs>>,
    loaded: &Arc<AtomicBool>,
) -> Options {
    let mut blocks = BlockBasedOptions::default();
    blocks.set_block_cache(cache);
    blocks.set_cache_index_and_filter_blocks(true);
    blocks.set_bloom_filter(10.0, false);
    blocks.set_format_version(5);
    let mut options = Options::default();
    options.set_block_based_table_factory(&blocks);
    options.set_compression_type(DBCompressionType::None);
    options.set_write_buffer_size(choices.memtable_bytes as usize);
    options.set_memtable_whole_key_filtering(true);
    options.set_memtable_prefix_bloom_ratio(0.05);
    let (epochs, loaded) = (Arc::clone(epochs), Arc::clone(loaded));
    options.set_compaction_filter("held", move |_, _, value| {
        let known = loaded.load(Ordering::Acquire);
        let held = !known || !decode(value, &epochs.read()).is_empty();
        if held { Decision::Keep } else { Decision::Remove }
    });
    options
}

impl Residency for LsmResidency {
    fn put(
        &self,
        scope: ScopeSlot,
        worker: Worker,
        tier: Tier,
        _parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> Result<()> {
        let put = || {
            check(pages)?;
            let _writer = self.writer.lock();
            if self.is_full() {
                return Err(Error::retry("the residency index is full: remove pages")
                    .with("budget", self.options.budget));
            }
            self.change(scope, pages, |holders| {
                match holders.binary_search_by_key(&worker, |holder| holder.worker) {
                    Ok(at) => holders[at].tiers = holders[at].tiers.with(tier.into()),
                    Err(at) => holders.insert(at, Holder { worker, tiers: tier.into() }),
                }
            })
        };
        put().inspect_err(|_| {
            self.refused.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn prefixes(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Prefix> {
        let epochs = self.epochs.read();
        let mut prefixes = Prefixes::default();
        let mut last = Vec::new();
        for start in (0..pages.len()).step_by(AT_ONCE) {
            let end = pages.len().min(start + AT_ONCE);
            let keys: Vec<_> = (start..end).map(|at| page_key(scope, pages.at(at))).collect();
            for value in self.get(&keys) {
                let value = value.as_deref().unwrap_or_default();
                let left = if !last.is_empty() && last == value {
                    prefixes.extend_same(1)
                } else {
                    last = value.to_vec();
                    prefixes.extend(&decode(value, &epochs), 1)
                };
                if !left {
                    return prefixes.finish();
                }
            }
        }
        prefixes.finish()
    }

    fn holders(&self, scope: ScopeSlot, page: PageHash) -> Vec<Holder> {
        let found = self.get(&[page_key(scope, page)]).pop().flatten();
        found.map_or_else(Vec::new, |value| decode(&value, &self.epochs.read()))
    }

    fn remove_blocks(&self, scope: ScopeSlot, worker: Worker, tiers: Tiers, pages: &[PageHash]) {
        if check(pages).is_err() {
            return;
        }
        let _writer = self.writer.lock();
        Self::log(self.change(scope, pages, |holders| {
            if let Ok(at) = holders.binary_search_by_key(&worker, |holder| holder.worker) {
                holders[at].tiers = holders[at].tiers.without(tiers);
                holders.retain(|holder| !holder.tiers.is_empty());
            }
        }));
    }

    fn clear_worker(&self, worker: Worker) {
        let _writer = self.writer.lock();
        let epoch = self.epochs.read().get(&worker).map_or(1, |epoch| epoch.wrapping_add(1));
        let mut batch = WriteBatch::default();
        batch.put(worker_key(worker), epoch.to_be_bytes());
        Self::log(self.write(batch));
        self.epochs.write().insert(worker, epoch);
    }

    fn clear_scope(&self, scope: ScopeSlot) {
        let _writer = self.writer.lock();
        let (first, mut end) = (page_key(scope, PageHash::NONE), [u8::MAX; 21]);
        end[..4].copy_from_slice(&scope.0.to_be_bytes());
        Self::log(self.pages().and_then(|pages| {
            let mut iterator = self.db.raw_iterator_cf(pages);
            iterator.seek(first);
            let mut batch = WriteBatch::default();
            // Write the range deletion only if the scope has entries, because a range deletion
            // makes every read a little slower until a compaction.
            if iterator.key().is_some_and(|key| key.starts_with(&end[..4])) {
                batch.delete_range_cf(pages, &first[..], &end[..]);
            }
            self.write(batch)
        }));
    }

    fn sync(&self) -> Result<()> {
        let pending = self.pending.load(Ordering::Acquire);
        let synced = self.db.flush_wal(true);
        synced.map_err(|error| {
            self.failed.store(true, Ordering::Release);
            Error::fatal("the residency index could not be made durable: open it again")
                .because(error)
        })?;
        self.pending.fetch_sub(pending, Ordering::Relaxed);
        if self.failed.load(Ordering::Acquire) {
            return Err(Error::fatal("the residency index lost a change: open it again"));
        }
        Ok(())
    }

    fn maintain(&self) -> Result<()> {
        if self.is_full() {
            let pages = self.pages()?;
            self.db.flush_cf(pages).map_err(|error| {
                Error::fatal("the residency index could not be written: open it again")
                    .because(error)
            })?;
            self.db.compact_range_cf::<&[u8], &[u8]>(pages, None, None);
        }
        Ok(())
    }

    fn stats(&self) -> ResidencyStats {
        let names = fs::read_dir(self.db.path()).into_iter().flatten().flatten();
        let lengths = names.filter_map(|name| name.metadata().ok()).map(|data| data.len());
        let memory = self.property("rocksdb.cur-size-all-mem-tables")
            + self.property("rocksdb.estimate-table-readers-mem");
        ResidencyStats {
            pages: self.property("rocksdb.estimate-num-keys"),
            sets: 0,
            memory_bytes: memory + self.cache.get_usage() as u64,
            disk_bytes: lengths.sum(),
            pending_bytes: self.pending.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}
