//! What can be chosen, what of it while the index is open, and how RocksDB is told.
//!
//! | | while open | RocksDB's own word |
//! |---|---|---|
//! | [`Tuning::size_ratio`] | yes | `max_bytes_for_level_multiplier` |
//! | [`Tuning::runs`] | yes | `level0_file_num_compaction_trigger` |
//! | [`Tuning::memtable_bytes`] | yes | `write_buffer_size` |
//! | [`LsmOptions::budget`] | yes | none: inserts are refused |
//! | [`LsmOptions::bloom_bits`] | at open, for files written from then on | `filter_policy` |
//! | [`LsmOptions::block_cache_bytes`] | at open | `block_cache` |
//! | [`LsmOptions::probe`], [`LsmOptions::verify`] | at open | none |
//!
//! `Tuning::runs` bounds the sorted runs of level 0 only; the levels below hold one each. More
//! there needs another compaction style, which RocksDB does not change while open.

use rocksdb::statistics::StatsLevel;
use rocksdb::{BlockBasedOptions, Cache, DBRecoveryMode, LogLevel, Options};

/// The shape of the tree: what [`super::LsmIndex::tune`] changes while the index is open. It acts
/// at the next flushes and compactions; nothing is rewritten for its sake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Each level is so many times as large as the one above it: T, at least 2.
    pub size_ratio: u32,
    /// Sorted runs of level 0 that start a compaction: K, at least 1.
    pub runs: u32,
    /// Bytes that are gathered in memory before they are written as one sorted run: of every family
    /// by itself, and at least 64 KiB. All families together are bounded by what the index was
    /// opened with.
    pub memtable_bytes: u64,
}

/// How a probe finds the longest prefix. Both find the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Probe {
    /// By bisection over lookups of single hashes, and one look at the run that was found last,
    /// which tells whether everything before it is there. Where that cannot be told (scopes that
    /// are not chained, runs whose parents are unknown) it goes on as [`Probe::Scan`] does.
    #[default]
    Bisect,
    /// Finds the run of the first page, reads its pages in order, then the next run.
    Scan,
}

impl Probe {
    /// Its name among [`crate::PrefixIndex::probe_methods`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bisect => "bisect",
            Self::Scan => "scan",
        }
    }
}

/// How to open an [`super::LsmIndex`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LsmOptions {
    /// The shape of the tree.
    pub tuning: Tuning,
    /// Bytes of files that the index may take, while it rewrites some of them too. Inserts that
    /// could exceed it are refused with `Retry`.
    pub budget: u64,
    /// Bits of Bloom filter a key, of the families that are asked for single keys.
    pub bloom_bits: u8,
    /// Bytes of blocks, filters and block indexes that are kept in memory.
    pub block_cache_bytes: u64,
    /// How a probe goes about it.
    pub probe: Probe,
    /// Whether everything is read once at open, so that damage is repaired then, and not met later
    /// by somebody who can only be told to open the index again.
    pub verify: bool,
}

impl Default for LsmOptions {
    fn default() -> Self {
        Self {
            tuning: Tuning { size_ratio: 10, runs: 4, memtable_bytes: 64 << 20 },
            budget: 1 << 40,
            bloom_bits: 10,
            block_cache_bytes: 64 << 20,
            probe: Probe::default(),
            verify: true,
        }
    }
}

/// RocksDB makes smaller ones larger.
const MEMTABLE_BYTES_MIN: u64 = 64 << 10;
/// Memory is not preallocated in files beyond this.
const PREALLOCATED_BYTES: usize = 64 << 10;

impl LsmOptions {
    /// What fits a budget: a memtable is a sixteenth of it and the cache an eighth, at most the
    /// defaults.
    #[must_use]
    pub fn within(budget: u64) -> Self {
        let default = Self::default();
        let memtable_bytes = default.tuning.memtable_bytes.min(budget / 16).max(MEMTABLE_BYTES_MIN);
        Self {
            tuning: Tuning { memtable_bytes, ..default.tuning },
            budget,
            block_cache_bytes: default.block_cache_bytes.min(budget / 8).max(1 << 20),
            ..default
        }
    }

    /// Options of the database as a whole.
    ///
    /// Nothing is compressed: hashes do not shrink, and a database written by a RocksDB that has
    /// a compressor is not readable by one that was built without.
    pub(super) fn database(&self) -> Options {
        let mut options = Options::default();
        // All families are written out together, so no log outlives the memtables of one of them,
        // and no file on disk is ahead of another family's log.
        options.set_atomic_flush(true);
        options.set_manual_wal_flush(true);
        options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
        let memtables = self.tuning.memtable_bytes.max(MEMTABLE_BYTES_MIN);
        options.set_db_write_buffer_size(memtables as usize);
        options.set_max_total_wal_size(2 * memtables);
        options.set_max_background_jobs(2);
        options.set_max_open_files(512);
        options.set_manifest_preallocation_size(PREALLOCATED_BYTES);
        options.set_max_manifest_file_size(256 << 10);
        options.set_log_level(LogLevel::Warn);
        options.set_keep_log_file_num(1);
        options.set_max_log_file_size(PREALLOCATED_BYTES);
        options.set_stats_dump_period_sec(0);
        options.set_stats_persist_period_sec(0);
        options.enable_statistics();
        options.set_statistics_level(StatsLevel::ExceptHistogramOrTimers);
        options
    }

    /// Options of one family. `filtered`: it is asked for single keys, which often are not there.
    pub(super) fn family(&self, cache: &Cache, filtered: bool) -> Options {
        let mut blocks = BlockBasedOptions::default();
        blocks.set_block_cache(cache);
        blocks.set_cache_index_and_filter_blocks(true);
        blocks.set_cache_index_and_filter_blocks_with_high_priority(true);
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(true);
        blocks.set_format_version(5);
        let mut options = Options::default();
        if filtered {
            blocks.set_bloom_filter(f64::from(self.bloom_bits), false);
            options.set_memtable_whole_key_filtering(true);
            options.set_memtable_prefix_bloom_ratio(0.05);
        }
        options.set_block_based_table_factory(&blocks);
        options.set_compression_type(rocksdb::DBCompressionType::None);
        let memtable = self.tuning.memtable_bytes.max(MEMTABLE_BYTES_MIN);
        options.set_write_buffer_size(memtable as usize);
        options.set_max_bytes_for_level_multiplier(f64::from(self.tuning.size_ratio.max(2)));
        options.set_level_zero_file_num_compaction_trigger(self.tuning.runs.max(1) as i32);
        options.set_target_file_size_base(memtable);
        options.set_max_bytes_for_level_base(4 * memtable);
        options
    }
}

impl Tuning {
    /// In RocksDB's own words, for an open database.
    pub(super) fn words(&self) -> [(&'static str, String); 3] {
        [
            ("max_bytes_for_level_multiplier", self.size_ratio.max(2).to_string()),
            ("level0_file_num_compaction_trigger", self.runs.max(1).to_string()),
            ("write_buffer_size", self.memtable_bytes.max(MEMTABLE_BYTES_MIN).to_string()),
        ]
    }
}
