//! Measures the cost of operations on this machine, in the running index.
//!
//! A sample of lookups and seeks is timed with RocksDB's counters, which report the time spent in
//! tables and the number of Bloom filters checked. The cost of checking one filter is the slope of
//! the time of a lookup over its number of filters. The cost of a rewrite is the processor time of
//! compactions, divided by the number of rewrites that the model predicts for the entries flushed
//! in the same time. The predicted cost of the current setting is therefore right on average, even
//! if RocksDB moves tables whose entries the model counts as rewritten. The prices of a filter and
//! of a seek are multiplied by the real number of sorted runs and divided by the predicted number,
//! because the model multiplies them by the predicted number.

use super::options::LsmOptions;
use crate::sync::{AtomicU64, Mutex, Ordering::Relaxed};
use crate::tuning::{Prices, Setting, TreeSize};
use rocksdb::perf::{PerfContext, PerfMetric, PerfStatsLevel, set_perf_stats};
use rocksdb::statistics::Ticker;

/// One of `EVERY` lookups is timed, because timing takes about the time of checking a filter.
const EVERY: u64 = 256;
/// One of `EVERY_SEEK` seeks is timed.
const EVERY_SEEK: u64 = 32;
/// Weight of a new sample in a running mean of times.
const WEIGHT: f64 = 1.0 / 32.0;
/// A measured time counts as at most this multiple of the mean time. A longer time includes other
/// work, for example of a preempting process.
const OUTLIER: f64 = 8.0;
/// Minimum variance of the number of filters that lookups check, for which a slope is computed.
const SPREAD: f64 = 0.5;
/// Prices before the first measurement.
const GUESS: Prices =
    Prices { rewrite: 500.0, filter: 100.0, block: 1500.0, seek: 700.0, false_positive: 0.01 };
/// Weight of the initial price of a rewrite, as a number of rewrites.
const GUESSED: f64 = 100_000.0;
/// Weight, as a number of sorted runs, of the initial assumption that the model predicts the number
/// of sorted runs exactly.
const RUNS_GUESSED: u32 = 8;

/// See the module [`super::meter`].
#[derive(Debug)]
pub(super) struct Meter {
    lookups: AtomicU64,
    seeks: AtomicU64,
    filter: Mutex<Slope>,
    block: Mean,
    seek: Mean,
    false_positive: f64,
    written: Mutex<Written>,
}

/// Totals of all flushes of memtables, and the totals that the cost model ([`TreeSize::rewrites`],
/// [`TreeSize::runs`]) predicted.
#[derive(Debug, Default)]
struct Written {
    /// Number of the oldest log that RocksDB needed when [`Meter::flushes`] was last called. Each
    /// flush covers all families, and increases the number.
    log: Option<u64>,
    /// Bytes that flushes wrote.
    bytes: u64,
    /// Entries that were written to the index before the last flush.
    entries: u64,
    flushes: u64,
    /// Rewrites that the model predicted for the flushed entries.
    foreseen: f64,
    /// Sums, over all flushes, of the number of sorted runs after the flush, and of the predicted
    /// number.
    runs: f64,
    runs_foreseen: f64,
}

/// A running mean, stored as the bits of an `f64`. One of two concurrent additions may be lost.
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

/// Fits a line to pairs of a number (of filters) and a time. The slope of the line is the time per
/// unit, without the constant part of the time. The fields after `samples` are weighted means with
/// decay.
#[derive(Debug, Default)]
struct Slope {
    samples: u64,
    number: f64,
    time: f64,
    number_squared: f64,
    product: f64,
}

impl Slope {
    fn add(&mut self, number: f64, time: f64) {
        let time = if self.samples == 0 { time } else { time.min(OUTLIER * self.time) };
        self.samples += 1;
        // The first 1,024 samples have equal weight; after them, old samples decay.
        let weight = (1.0 / self.samples as f64).max(WEIGHT / 32.0);
        let blend = |mean: &mut f64, value: f64| *mean += weight * (value - *mean);
        blend(&mut self.number, number);
        blend(&mut self.time, time);
        blend(&mut self.number_squared, number * number);
        blend(&mut self.product, number * time);
    }

    /// The slope, at least an eighth of the mean time per unit and at most this mean. If the number
    /// hardly varied between samples, the mean time per unit. `None` without samples.
    fn get(&self) -> Option<f64> {
        if self.samples == 0 {
            return None;
        }
        let share = self.time / self.number;
        let variance = self.number_squared - self.number * self.number;
        if variance < SPREAD {
            return Some(share);
        }
        Some(((self.product - self.number * self.time) / variance).clamp(share / 8.0, share))
    }
}

impl Meter {
    pub(super) fn new(options: &LsmOptions) -> Self {
        Self {
            lookups: AtomicU64::new(0),
            seeks: AtomicU64::new(0),
            filter: Mutex::new(Slope::default()),
            block: Mean::new(GUESS.block),
            seek: Mean::new(GUESS.seek),
            // Source: Bloom, "Space/time trade-offs in hash coding with allowable errors", 1970,
            // with the optimal number of probes.
            false_positive: 0.6185_f64.powi(options.bloom_bits.into()),
            written: Mutex::new(Written::default()),
        }
    }

    /// Runs a lookup of one hash, and times it if it is sampled. `found` returns whether the lookup
    /// found the hash.
    pub(super) fn lookup<T>(&self, lookup: impl FnOnce() -> T, found: impl Fn(&T) -> bool) -> T {
        if !self.lookups.fetch_add(1, Relaxed).is_multiple_of(EVERY) {
            return lookup();
        }
        let (perf, result) = timed(lookup);
        let nanos = perf.metric(PerfMetric::GetFromOutputFilesTime) as f64;
        let yes = perf.metric(PerfMetric::BloomSstHitCount) as f64;
        let checked = perf.metric(PerfMetric::BloomSstMissCount) as f64 + yes;
        if checked > 0.0 && yes == 0.0 {
            self.filter.lock().add(checked, nanos);
        } else if yes == 1.0 && found(&result) {
            let filters = checked * self.filter.lock().get().unwrap_or(GUESS.filter);
            self.block.add(nanos - filters);
        }
        result
    }

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

    /// Returns the number of flushes so far; several flushes since the last call count once. `log`
    /// is the number of the oldest log that RocksDB needs, `entries` the number of entries written
    /// so far. `tree` gets the mean number of bytes that a flush writes, and returns the size of
    /// the tree and its number of sorted runs.
    pub(super) fn flushes(
        &self,
        options: &rocksdb::Options,
        log: u64,
        entries: u64,
        tree: impl FnOnce(f64) -> (TreeSize, u64),
        setting: Setting,
    ) -> u64 {
        let mut written = self.written.lock();
        let before = written.log.replace(log);
        if before.is_some_and(|before| before != log) {
            written.flushes += 1;
            written.bytes = options.get_ticker_count(Ticker::FlushWriteBytes);
            let (tree, runs) = tree(written.bytes as f64 / written.flushes as f64);
            written.runs += runs as f64;
            written.runs_foreseen += tree.runs(setting);
            let since = entries.saturating_sub(written.entries);
            written.foreseen += since as f64 * tree.rewrites(setting);
            written.entries = entries;
        }
        written.flushes
    }

    pub(super) fn flush_bytes(&self) -> Option<f64> {
        let written = self.written.lock();
        (written.flushes > 0).then(|| written.bytes as f64 / written.flushes as f64)
    }

    /// Bytes written by compactions, divided by bytes written by flushes.
    pub(super) fn rewrites(&self, options: &rocksdb::Options) -> f64 {
        let flushed = options.get_ticker_count(Ticker::FlushWriteBytes);
        options.get_ticker_count(Ticker::CompactWriteBytes) as f64 / flushed.max(1) as f64
    }

    pub(super) fn prices(&self, options: &rocksdb::Options) -> Prices {
        let spent = options.get_ticker_count(Ticker::CompactionCpuTotalTime) as f64 * 1e3;
        let written = self.written.lock();
        let foreseen = written.foreseen;
        let guess = f64::from(RUNS_GUESSED);
        let filled = (written.runs + guess) / (written.runs_foreseen + guess);
        drop(written);
        Prices {
            rewrite: (spent + GUESSED * GUESS.rewrite) / (foreseen + GUESSED),
            filter: filled * self.filter.lock().get().unwrap_or(GUESS.filter),
            block: self.block.get(),
            seek: filled * self.seek.get(),
            false_positive: self.false_positive,
        }
    }
}

/// Runs `call`. Returns what RocksDB counted for it in this thread, and its result.
fn timed<T>(call: impl FnOnce() -> T) -> (PerfContext, T) {
    let mut perf = PerfContext::default();
    perf.reset();
    // The crate `rocksdb` lacks RocksDB's level `kEnableWait`, so the numbers of higher levels are
    // one too low: with this name RocksDB gets `kEnableTimeExceptForMutex`.
    set_perf_stats(PerfStatsLevel::EnableTimeAndCPUTimeExceptForMutex);
    let result = call();
    // Restore RocksDB's default level.
    set_perf_stats(PerfStatsLevel::EnableCount);
    (perf, result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slope_excludes_constant_time_only_if_numbers_vary() {
        let mut slope = Slope::default();
        assert_eq!(slope.get(), None);
        (0..100).for_each(|_| slope.add(4.0, 900.0));
        assert!((slope.get().unwrap() - 225.0).abs() < 1e-6);
        for round in 0..4000 {
            let number = f64::from(round % 9 + 1);
            slope.add(number, 500.0 + 100.0 * number);
        }
        assert!((slope.get().unwrap() - 100.0).abs() < 10.0, "{:?}", slope.get());
    }

    #[test]
    fn outlier_hardly_changes_the_mean() {
        let mean = Mean::new(100.0);
        mean.add(1e9);
        assert!(mean.get() < 130.0);
        (0..200).for_each(|_| mean.add(50.0));
        assert!((mean.get() - 50.0).abs() < 2.0);
    }
}
