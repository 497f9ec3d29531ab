//! Sizes and write statistics, most of them RocksDB's own.

use super::families::Families;
use super::record::Counts;
use crate::IndexStats;
use crate::sync::{AtomicU64, Mutex, Ordering};
use rocksdb::statistics::Ticker;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Maximum age of a snapshot of the sizes of the files.
const SNAPSHOT_MAX_AGE: Duration = Duration::from_millis(50);

/// The files of the database: their bytes, the bytes of tables among them, and their number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Files {
    pub(super) bytes: u64,
    pub(super) tables: u64,
    pub(super) count: u64,
}

#[derive(Debug)]
struct Snapshot {
    at: Instant,
    files: Files,
    /// [`Gauges::appended`] at the time of the snapshot.
    appended: u64,
}

#[derive(Debug)]
pub(super) struct Gauges {
    pub(super) budget: AtomicU64,
    /// Bytes of batches written since the index was opened.
    pub(super) appended: AtomicU64,
    /// The value of `appended` up to which all batches are durable.
    pub(super) synced: AtomicU64,
    pub(super) runs: AtomicU64,
    pub(super) pages: AtomicU64,
    pub(super) clock: AtomicU64,
    /// Compactions of the whole database since the index was opened.
    pub(super) compactions: AtomicU64,
    snapshot: Mutex<Option<Snapshot>>,
}

impl Gauges {
    pub(super) fn new(budget: u64, counts: &Counts) -> Self {
        Self {
            budget: AtomicU64::new(budget),
            appended: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            runs: AtomicU64::new(counts.runs),
            pages: AtomicU64::new(counts.pages),
            clock: AtomicU64::new(counts.clock),
            compactions: AtomicU64::new(0),
            snapshot: Mutex::new(None),
        }
    }

    /// Updates the gauges after a batch of `bytes` bytes was written.
    pub(super) fn record(&self, counts: &Counts, bytes: u64) {
        self.runs.store(counts.runs, Ordering::Relaxed);
        self.pages.store(counts.pages, Ordering::Relaxed);
        self.clock.store(counts.clock, Ordering::Relaxed);
        self.appended.fetch_add(bytes, Ordering::Release);
    }

    pub(super) fn pending(&self) -> u64 {
        let synced = self.synced.load(Ordering::Relaxed);
        self.appended.load(Ordering::Relaxed).saturating_sub(synced)
    }

    /// Discards the snapshot of the directory.
    pub(super) fn invalidate(&self) {
        *self.snapshot.lock() = None;
    }

    /// The files in the latest snapshot of the directory, and the bytes of batches written since
    /// that snapshot.
    pub(super) fn files(&self, db: &Families) -> (Files, u64) {
        let mut snapshot = self.snapshot.lock();
        let appended = self.appended.load(Ordering::Acquire);
        if let Some(snapshot) =
            snapshot.as_ref().filter(|snapshot| snapshot.at.elapsed() < SNAPSHOT_MAX_AGE)
        {
            return (snapshot.files, appended - snapshot.appended);
        }
        let files = count(db);
        *snapshot = Some(Snapshot { at: Instant::now(), files, appended });
        (files, 0)
    }

    /// Returns the maximum bytes that the files may take without further inserts. Tables count
    /// twice, because a compaction writes new tables before it deletes the old tables. Bytes
    /// written since the snapshot count three times: once in the log, twice in tables.
    pub(super) fn worst_bytes(&self, db: &Families) -> u64 {
        let (files, since) = self.files(db);
        files.bytes + files.tables + 3 * since
    }

    pub(super) fn stats(&self, db: &Families) -> IndexStats {
        let get = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let (files, _) = self.files(db);
        let ticker = |ticker| db.options.get_ticker_count(ticker);
        let memory = rocksdb::perf::get_memory_usage_stats(Some(&[&db.db]), Some(&[&db.cache]));
        let memory = memory.map_or(0, |memory| {
            memory.mem_table_total + memory.mem_table_readers_total + memory.cache_total
        });
        IndexStats {
            runs: get(&self.runs),
            pages: get(&self.pages),
            memory_bytes: memory,
            memory_bytes_max: 0,
            memory_percent: 0,
            disk_bytes: files.bytes,
            written_bytes: ticker(Ticker::WalFileBytes)
                + ticker(Ticker::FlushWriteBytes)
                + ticker(Ticker::CompactWriteBytes),
            checkpoints: get(&self.compactions),
            pending_bytes: self.pending(),
            files: files.count,
        }
    }
}

/// Sums up the files of the database's directory. A file counts with its allocated blocks if these
/// are more than its length, as with a preallocated file.
fn count(db: &Families) -> Files {
    let mut files = Files::default();
    let Ok(entries) = std::fs::read_dir(db.db.path()) else { return files };
    for entry in entries.flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        let bytes = metadata.len().max(metadata.blocks() * 512);
        files.bytes += bytes;
        files.count += 1;
        if entry.file_name().to_string_lossy().ends_with(".sst") {
            files.tables += bytes;
        }
    }
    files
}
