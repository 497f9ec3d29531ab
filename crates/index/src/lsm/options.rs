//! Options of the index `lsm`, with the time at which they can be changed, and their RocksDB names.
//!
//! | option | can be changed | option of RocksDB |
//! |---|---|---|
//! | [`LsmOptions::mode`] | while open | see `shape.rs` |
//! | [`LsmOptions::budget`] | while open | not an option of RocksDB: the index refuses inserts |
//! | [`LsmOptions::memtable_bytes`] | at open: fixed by RocksDB | `db_write_buffer_size` |
//! | [`LsmOptions::bloom_bits`] | at open, for files written later | `filter_policy` |
//! | [`LsmOptions::block_cache_bytes`] | at open | `block_cache` |
//! | [`LsmOptions::probe`], [`LsmOptions::verify`] | at open | not options of RocksDB |

use super::controller::Mode;
use super::shape::TreeShape;
use crate::tuning::TreeSize;
use rocksdb::statistics::StatsLevel;
use rocksdb::{BlockBasedOptions, Cache, DBCompactionStyle, DBRecoveryMode, LogLevel, Options};

/// The method by which a probe finds the longest prefix. Both methods have the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ProbeMethod {
    /// Bisects over lookups of single hashes. The recorded depth of the last run found (the number
    /// of pages before it in its chain) proves that all pages before this run are present. The
    /// depth proves nothing in scopes that are not chained. A recorded depth is too low, and proves
    /// nothing, if an earlier run of the chain is unknown, or was linked to its own parent only
    /// after the following run was attached. Without this proof the probe uses
    /// [`ProbeMethod::Scan`] from the first page.
    #[default]
    Bisect,
    /// Finds the run of the first page and reads its page hashes in order, as long as they match
    /// the keys; then does the same from the first page that does not match.
    Scan,
}

impl ProbeMethod {
    /// The name in [`crate::PrefixIndex::probe_methods`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bisect => "bisect",
            Self::Scan => "scan",
        }
    }
}

/// Options of an [`super::LsmIndex`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LsmOptions {
    /// Whether the LSM-tree's size ratio and number of sorted runs per level are tuned to the mix
    /// of operations while the index is open, or are fixed.
    pub mode: Mode,
    /// Bytes of changes, of all column families together, that are gathered in memory before they
    /// are written as sorted runs; at least 64 KiB.
    pub memtable_bytes: u64,
    /// Maximum bytes of files, including files of compactions in progress. Inserts that could
    /// exceed the limit are refused with `Retry`.
    pub budget: u64,
    /// Bits per key of the Bloom filters, in column families that are searched for single keys.
    pub bloom_bits: u8,
    /// Bytes of blocks, filters and block indexes that are cached in memory.
    pub block_cache_bytes: u64,
    /// The method by which probes find the longest prefix.
    pub probe: ProbeMethod,
    /// Whether the open reads the whole database, so that it repairs damage. Damage found later
    /// poisons the index until it is opened again.
    pub verify: bool,
}

impl Default for LsmOptions {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            memtable_bytes: 64 << 20,
            budget: 1 << 40,
            bloom_bits: 10,
            block_cache_bytes: 64 << 20,
            probe: ProbeMethod::default(),
            verify: true,
        }
    }
}

/// Minimum bytes of a memtable: RocksDB raises smaller values to this minimum.
const MEMTABLE_BYTES_MIN: u64 = 64 << 10;
/// Bytes that RocksDB preallocates for its manifest; also the maximum bytes of a file of RocksDB's
/// own messages.
const PREALLOCATED_BYTES: usize = 64 << 10;

impl LsmOptions {
    /// Returns options for a budget in bytes: a memtable of a sixteenth of the budget, 64 KiB to
    /// 64 MiB, and a block cache of an eighth, 1 MiB to 64 MiB.
    #[must_use]
    pub fn within(budget: u64) -> Self {
        let default = Self::default();
        let memtable_bytes = default.memtable_bytes.min(budget / 16).max(MEMTABLE_BYTES_MIN);
        Self {
            memtable_bytes,
            budget,
            block_cache_bytes: default.block_cache_bytes.min(budget / 8).max(1 << 20),
            ..default
        }
    }

    /// Options of the whole database.
    ///
    /// Data is not compressed: hashes do not compress, and a database with compression is not
    /// readable by a RocksDB that was built without the compressor.
    pub(super) fn database(&self) -> Options {
        let mut options = Options::default();
        // Flush all families together, so that no log is kept for the memtable of a single family,
        // and no table on disk has newer changes than the tables of another family.
        options.set_atomic_flush(true);
        options.set_manual_wal_flush(true);
        options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
        let memtables = self.memtable_bytes.max(MEMTABLE_BYTES_MIN);
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

    /// Returns the options of one family. `filtered` says that the family is searched for single
    /// keys, which often do not exist.
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
        let memtable = self.memtable_bytes.max(MEMTABLE_BYTES_MIN);
        options.set_write_buffer_size(memtable as usize);
        // Every family allocates at least one arena block. These blocks must not fill the memory
        // for memtables, which may be small.
        options.set_arena_block_size(((memtable / 64) as usize).next_multiple_of(4096));
        options.set_compaction_style(DBCompactionStyle::Universal);
        let empty = TreeSize { bytes: 0.0, memtable: memtable as f64 };
        TreeShape::new(self.mode.start(), &empty).open_with(&mut options);
        options.set_target_file_size_base(memtable);
        options
    }
}
