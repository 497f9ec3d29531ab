//! What operations cost on this machine, taken from the running index itself.
//!
//! One lookup and one seek of many are timed with RocksDB's own clock, which tells how long tables
//! were looked at and how many filters were asked. A rewrite is what compactions took of the
//! processor, over the rewrites that the model foresaw for what was flushed meanwhile: so the model
//! is right in the mean about the setting that is in force, and what it gets wrong about
//! compactions (entries that are moved and not written again, runs that do not fill) is in the
//! price.

use super::options::LsmOptions;
use crate::sync::{AtomicU64, Mutex, Ordering::Relaxed};
use crate::tuning::{Prices, Setting, Tree};
use rocksdb::perf::{PerfContext, PerfMetric, PerfStatsLevel, set_perf_stats};
use rocksdb::statistics::Ticker;

/// Of so many lookups one is timed. Timing takes about as long as a filter.
const EVERY: u64 = 256;
/// Of so many seeks.
const EVERY_SEEK: u64 = 32;
/// What a new time counts for.
const WEIGHT: f64 = 1.0 / 32.0;
/// A time so many times as long as usual is somebody else's, and counts as that many.
const OUTLIER: f64 = 8.0;
/// Before anything was timed.
const GUESS: Prices =
    Prices { rewrite: 500.0, filter: 100.0, block: 1500.0, seek: 700.0, false_positive: 0.01 };
/// Rewrites that the guess counts for.
const GUESSED: f64 = 100_000.0;

/// See the module.
#[derive(Debug)]
pub(super) struct Meter {
    turn: AtomicU64,
    seeks: AtomicU64,
    filter: Mean,
    block: Mean,
    seek: Mean,
    false_positive: f64,
    written: Mutex<Written>,
}

/// What was flushed so far.
#[derive(Debug, Default)]
struct Written {
    /// The first log that was still needed when it was last looked at: each flush, which is one of
    /// all families, moves it.
    log: Option<u64>,
    bytes: u64,
    entries: u64,
    flushes: u64,
    /// Rewrites that were foreseen.
    foreseen: f64,
}

/// A running mean, as bits. Of two who add at once one may be lost.
#[derive(Debug)]
struct Mean(AtomicU64);

impl Mean {
    fn new(guess: f64) -> Self {
        Self(AtomicU64::new(guess.to_bits()))
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }

    fn add(&self, value: f64) {
        let mean = self.get();
        let value = value.clamp(1.0, OUTLIER * mean);
        self.0.store((mean + WEIGHT * (value - mean)).to_bits(), Relaxed);
    }
}

impl Meter {
    pub(super) fn new(options: &LsmOptions) -> Self {
        Self {
            turn: AtomicU64::new(0),
            seeks: AtomicU64::new(0),
            filter: Mean::new(GUESS.filter),
            block: Mean::new(GUESS.block),
            seek: Mean::new(GUESS.seek),
            // Bloom, "Space/time trade-offs in hash coding with allowable errors", 1970, with the
            // best number of probes.
            false_positive: 0.6185_f64.powi(options.bloom_bits.into()),
            written: Mutex::new(Written::default()),
        }
    }

    /// Does a lookup of one hash, and times it if it is its turn. `found`: whether it found it.
    pub(super) fn lookup<T>(&self, lookup: impl FnOnce() -> T, found: impl Fn(&T) -> bool) -> T {
        if !self.turn.fetch_add(1, Relaxed).is_multiple_of(EVERY) {
            return lookup();
        }
        let (perf, result) = timed(lookup);
        let nanos = perf.metric(PerfMetric::GetFromOutputFilesTime) as f64;
        let yes = perf.metric(PerfMetric::BloomSstHitCount) as f64;
        let asked = perf.metric(PerfMetric::BloomSstMissCount) as f64 + yes;
        if asked > 0.0 && yes == 0.0 {
            self.filter.add(nanos / asked);
        } else if yes == 1.0 && found(&result) {
            self.block.add(nanos - asked * self.filter.get());
        }
        result
    }

    /// Does a seek, and times it if it is its turn.
    pub(super) fn seek<T>(&self, seek: impl FnOnce() -> T) -> T {
        if !self.seeks.fetch_add(1, Relaxed).is_multiple_of(EVERY_SEEK) {
            return seek();
        }
        let (perf, result) = timed(seek);
        let runs = perf.metric(PerfMetric::SeekChildSeekCount);
        if runs > 0 {
            self.seek.add(perf.metric(PerfMetric::SeekChildSeekTime) as f64 / runs as f64);
        }
        result
    }

    /// Returns how many flushes there were so far: those that came since the last look count as
    /// one. `log` is the first one that is still needed, `entries` were written so far.
    pub(super) fn flushes(
        &self,
        options: &rocksdb::Options,
        log: u64,
        entries: u64,
        tree: impl FnOnce(f64) -> Tree,
        setting: Setting,
    ) -> u64 {
        let mut written = self.written.lock();
        let before = written.log.replace(log);
        if before.is_some_and(|before| before != log) {
            written.flushes += 1;
            written.bytes = options.get_ticker_count(Ticker::FlushWriteBytes);
            let tree = tree(written.bytes as f64 / written.flushes as f64);
            let since = entries.saturating_sub(written.entries);
            written.foreseen += since as f64 * tree.rewrites(setting);
            written.entries = entries;
        }
        written.flushes
    }

    /// Bytes that a flush writes, in the mean.
    pub(super) fn flush_bytes(&self) -> Option<f64> {
        let written = self.written.lock();
        (written.flushes > 0).then(|| written.bytes as f64 / written.flushes as f64)
    }

    /// What things cost.
    pub(super) fn prices(&self, options: &rocksdb::Options) -> Prices {
        let spent = options.get_ticker_count(Ticker::CompactionCpuTotalTime) as f64 * 1e3;
        let foreseen = self.written.lock().foreseen;
        Prices {
            rewrite: (spent + GUESSED * GUESS.rewrite) / (foreseen + GUESSED),
            filter: self.filter.get(),
            block: self.block.get(),
            seek: self.seek.get(),
            false_positive: self.false_positive,
        }
    }
}

/// What RocksDB says of one call on this thread.
fn timed<T>(call: impl FnOnce() -> T) -> (PerfContext, T) {
    let mut perf = PerfContext::default();
    perf.reset();
    set_perf_stats(PerfStatsLevel::EnableTimeExceptForMutex);
    let result = call();
    // RocksDB's default.
    set_perf_stats(PerfStatsLevel::EnableCount);
    (perf, result)
}
