//! Figures of a store, as `stat` and the metrics show them.

use crate::eviction::EvictionStats;
use ritornello_index::Tuning;
use ritornello_index::tuning::Decision;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The owner's figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CatalogStats {
    /// Identity of the store, as hexadecimal digits.
    pub uuid: String,
    /// Number of this owner since the store was made.
    pub epoch: u32,
    /// Process id of the owner.
    pub owner_pid: u32,
    /// `cache` or `durable`.
    pub durability: String,
    /// Backend of the index.
    pub index: String,
    /// Budget in bytes: segments and metadata.
    pub capacity_bytes: u64,
    /// Blocks allocated to all files of the store now.
    pub allocated_bytes: u64,
    /// Bytes a segment file.
    pub segment_bytes: u64,
    /// Segment files that exist.
    pub segments: u64,
    /// Segment files that the budget allows.
    pub segments_max: u64,
    /// All files of the store.
    pub files: u64,
    /// Bytes held by runs (headers and padding too).
    pub used_bytes: u64,
    /// Free bytes in existing segments, ready for use.
    pub free_bytes: u64,
    /// Bytes freed but not yet durably so.
    pub limbo_bytes: u64,
    /// Bytes removed while leased.
    pub deferred_bytes: u64,
    /// Bytes in reservations, those of lost clients included.
    pub reserved_bytes: u64,
    /// Bytes withheld because the bytes there could not be believed.
    pub quarantined_bytes: u64,
    /// Free extents by size class: lower bound in bytes, number.
    pub free_extents: BTreeMap<u64, u64>,
    /// Mean extents of a run placed since open.
    pub extents_per_run: f64,
    /// Who goes when space is wanted, and how well that would have been chosen otherwise.
    pub eviction: EvictionStats,
    /// How the allocator does.
    pub health: SpaceHealth,
    /// The directories of the segments.
    pub paths: Vec<PathStats>,
    /// Live scopes.
    pub scopes: u64,
    /// The scopes that hold most, largest first, [`SCOPES_SHOWN`] at most.
    pub largest_scopes: Vec<ScopeUsage>,
    /// Bytes that are retained.
    pub retained_bytes: u64,
    /// Which pages are written.
    pub admission: AdmissionStats,
    /// Runs in the index.
    pub runs: u64,
    /// Pages in the index.
    pub pages: u64,
    /// Memory of the index.
    pub index_memory_bytes: u64,
    /// The ceiling of that, and how much of what it allows is held, in percent: puts are skipped at
    /// 100. Zero: it has none.
    pub index_memory_max_bytes: u64,
    /// See there.
    pub index_memory_percent: u32,
    /// What the index `lsm` would take instead; `None` if it is that.
    pub index_as_lsm: Option<LsmEstimate>,
    /// Files of the index.
    pub index_disk_bytes: u64,
    /// Bytes the index wrote since open.
    pub index_written_bytes: u64,
    /// How the index is shaped and why, where it shapes itself: `lsm`.
    pub index_tuning: Option<IndexTuning>,
    /// Leases held.
    pub leases: u64,
    /// Connected client processes.
    pub clients: u64,
    /// Connected-to reservations outstanding.
    pub reservations: u64,
    /// How bytes move, and why that way.
    pub io: IoStats,
    /// Whether the store refuses to go on, and why.
    pub poisoned: Option<String>,
    /// Space that cannot be used now: the store is degraded if there is any.
    pub unavailable: Unavailable,
    /// Counted since open, by name.
    pub counters: BTreeMap<String, u64>,
    /// Milliseconds that opening took.
    pub open_ms: f64,
    /// What recovery dropped, by reason.
    pub dropped_at_open: BTreeMap<String, u64>,
}

/// Volumes and segments that are away, and what lies there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// One sentence each, the first 64: directory, and why it cannot be used.
    pub reasons: Vec<String>,
    /// Runs whose pages are misses until their space is back.
    pub runs: u64,
}

/// What an index of so many runs and pages would take as `lsm`: see [`LsmEstimate::of`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LsmEstimate {
    /// Bytes of memory at most, however large it is.
    pub memory_bytes: u64,
    /// Bytes of files, log included. While it rewrites its tables they are there twice.
    pub disk_bytes: u64,
}

/// The shape of an LSM-tree, and the decisions that led to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IndexTuning {
    /// Whether it follows what the index is asked to do.
    pub adaptive: bool,
    /// Operations on entries of the tree that were counted since open.
    pub operations: u64,
    /// Size ratio (T) in force.
    pub ratio: u32,
    /// Most sorted runs a level (K) in force.
    pub runs: u32,
    /// Size ratio that it moves to, a step with each flush.
    pub target_ratio: u32,
    /// Runs a level that it moves to.
    pub target_runs: u32,
    /// Levels; none while everything fits the memtable.
    pub levels: u32,
    /// Sorted runs that there are now.
    pub sorted_runs: u64,
    /// Bytes that compactions wrote over bytes that flushes wrote, since open.
    pub rewrites: f64,
    /// The latest decisions, oldest first.
    pub decisions: Vec<IndexDecision>,
}

/// One decision about the shape. Where the setting stays, another one promised too little.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IndexDecision {
    /// Operations counted before it.
    pub at: u64,
    /// `first`, `shift` (of the mix) or `growth` (of the tree).
    pub reason: String,
    /// Share of writes among the operations of the window.
    pub writes: f64,
    /// Of point lookups that found their key.
    pub hits: f64,
    /// Of range reads.
    pub ranges: f64,
    /// Of point lookups that found nothing.
    pub empty: f64,
    /// Bytes of the tree.
    pub tree_bytes: u64,
    /// Bytes that a flush writes.
    pub flush_bytes: u64,
    /// Size ratio aimed at before.
    pub ratio_from: u32,
    /// Runs a level aimed at before.
    pub runs_from: u32,
    /// Size ratio aimed at since.
    pub ratio: u32,
    /// Runs a level aimed at since.
    pub runs: u32,
    /// Nanoseconds an operation that the former were predicted to cost.
    pub cost_from_ns: f64,
    /// And the latter.
    pub cost_ns: f64,
}

impl From<Tuning> for IndexTuning {
    fn from(tuning: Tuning) -> Self {
        Self {
            adaptive: tuning.adaptive,
            operations: tuning.operations,
            ratio: tuning.applied.ratio,
            runs: tuning.applied.runs,
            target_ratio: tuning.target.ratio,
            target_runs: tuning.target.runs,
            levels: tuning.levels,
            sorted_runs: tuning.sorted_runs,
            rewrites: tuning.rewrites,
            decisions: tuning.decisions.into_iter().map(IndexDecision::from).collect(),
        }
    }
}

impl From<Decision> for IndexDecision {
    fn from(made: Decision) -> Self {
        Self {
            at: made.at,
            reason: made.reason.word().to_owned(),
            writes: made.mix.writes,
            hits: made.mix.hits,
            ranges: made.mix.ranges,
            empty: made.mix.empty,
            tree_bytes: made.tree.bytes as u64,
            flush_bytes: made.tree.memtable as u64,
            ratio_from: made.from.ratio,
            runs_from: made.from.runs,
            ratio: made.to.ratio,
            runs: made.to.runs,
            cost_from_ns: made.cost_from,
            cost_ns: made.cost_to,
        }
    }
}

/// How the allocator does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpaceHealth {
    /// Bytes that are kept free, so that there is something to choose from.
    pub reserve_bytes: u64,
    /// Bytes between the ends of pages and the 4 KiB that they are padded to; those of encoded
    /// pages, less than a unit beyond the longest of its run, are not known here.
    pub padding_bytes: u64,
    /// Bytes of run headers.
    pub header_bytes: u64,
    /// Mean extents of the runs that are there; one if there are none.
    pub extents_per_run: f64,
    /// Pieces that pages up to 256 KiB lie in.
    pub small_pages: Pieces,
    /// Pieces that longer pages lie in.
    pub large_pages: Pieces,
    /// Bytes written to segments since open: pages, headers, padding, and runs that were moved.
    pub written_bytes: u64,
    /// Bytes of pages admitted since open.
    pub admitted_bytes: u64,
    /// The one by the other. What the index writes is in `index_written_bytes`.
    pub write_amplification: f64,
    /// Bytes of segments that are to go and do not yet.
    pub closed_bytes: u64,
}

/// Pieces a page; zero where there are no pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pieces {
    /// Of half of the pages at most.
    pub p50: u32,
    /// Of 99 of 100 at most.
    pub p99: u32,
    /// Of any, 64 standing for more as well.
    pub max: u32,
}

/// A directory of segments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathStats {
    /// The directory, relative to the store's or absolute.
    pub dir: String,
    /// Whether nothing new is placed there, and what is there is on its way out.
    pub draining: bool,
    /// Segment files.
    pub segments: u64,
    /// Bytes of them that are in use.
    pub used_bytes: u64,
    /// Why the directory cannot be used now; `None` if it can.
    pub away: Option<String>,
}

/// Scopes in [`CatalogStats::largest_scopes`] at most.
pub const SCOPES_SHOWN: usize = 16;

/// What one scope holds, and may hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScopeUsage {
    /// Digest of its identity, as hexadecimal digits.
    pub id: String,
    /// The model it names.
    pub model: String,
    /// How pages that are put are encoded.
    pub codec: String,
    /// Pages.
    pub pages: u64,
    /// Bytes on disk, headers and padding too.
    pub bytes: u64,
    /// Bytes on disk that it may hold, if it has a quota.
    pub quota_bytes: Option<u64>,
    /// Bytes of it that are retained.
    pub retained_bytes: u64,
    /// Bytes of it that may be retained.
    pub retained_bytes_max: u64,
}

/// Which pages are written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdmissionStats {
    /// As configured.
    pub mode: String,
    /// What is in force now.
    pub policy: String,
    /// Bytes that may be written a day, if there is a budget.
    pub budget_bytes_per_day: Option<u64>,
    /// Bytes that may be written at once now, if there is a budget.
    pub available_bytes: Option<u64>,
    /// Pages remembered that were not written.
    pub ghost_pages: u64,
}

/// How bytes move in this process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IoStats {
    /// `uring`, `pool`, `buffered` or `mapped`.
    pub mode: String,
    /// Past the page cache.
    pub direct: bool,
    /// Staging memory is in huge pages.
    pub huge_pages: bool,
    /// The file system.
    pub file_system: String,
    /// What a user should know.
    pub warnings: Vec<String>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Monotone counters since open.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter,)* }

        impl Counters {
            /// All of them by name.
            #[must_use]
            pub fn snapshot(&self) -> BTreeMap<String, u64> {
                BTreeMap::from([$((stringify!($name).to_owned(), self.$name.get()),)*])
            }
        }
    };
}

counters! {
    /// Calls of `probe` and `lease`.
    probes,
    /// Pages asked for by them.
    pages_probed,
    /// Pages found by them.
    pages_hit,
    /// Pages committed.
    pages_stored,
    /// Pages of a put that were there already.
    pages_present,
    /// Pages refused, for whatever reason.
    pages_refused,
    /// Of those: because everything is leased or being written, or because the deadline passed.
    refused_space,
    /// Of those: because the index has reached its share.
    refused_metadata,
    /// Of those: because of the scope's quota.
    refused_quota,
    /// Of those: because they were put for the first time.
    refused_admission,
    /// Of those: because the write budget is used up.
    refused_write_budget,
    /// Of those: because the index has reached its memory ceiling.
    refused_index_memory,
    /// Pages that are stored in space which is away.
    refused_unavailable,
    /// New scopes that were refused, because the registry is full and its scopes hold pages.
    refused_scopes,
    /// Empty scopes that a full registry dropped.
    scopes_dropped,
    /// Releases of leases by clients that do not hold them, which have no effect.
    foreign_releases,
    /// Runs that were to be retained and are, or for longer than before.
    runs_retained,
    /// Runs that were to be retained and are not, or not any more: their quota went to runs that
    /// are to be kept for longer.
    retentions_displaced,
    /// Runs whose retention ended with its time.
    retentions_lapsed,
    /// Pages evicted.
    pages_evicted,
    /// Pages deleted, dropped scopes included.
    pages_deleted,
    /// Pages removed because their bytes could not be believed.
    pages_distrusted,
    /// Runs given up at commit: aborted, orphaned, or stored by somebody else meanwhile.
    runs_abandoned,
    /// Times data and index were made durable.
    syncs,
    /// Microseconds spent in that.
    sync_micros,
    /// Bytes of pages that were committed.
    bytes_admitted,
    /// Bytes written to segments for them, headers, padding and what was given up included.
    bytes_written,
    /// Runs moved to another place.
    runs_moved,
    /// Bytes written by that.
    bytes_moved,
    /// Segment files removed.
    segments_removed,
    /// Runs read by the scrubber.
    scrubbed_runs,
    /// Bytes read by it.
    scrubbed_bytes,
    /// Damaged pages that it found.
    scrub_damaged_pages,
    /// Times a put had to wait for space to be reclaimed.
    reclaim_waits,
    /// Leases that ran out before they were released.
    leases_expired,
    /// Leases on fewer pages than are stored, because more would exceed the client's share.
    leases_shortened,
    /// Times that this process has reopened the store after a failed write or sync.
    reopenings,
}

/// One monotone counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
    /// The value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl LsmEstimate {
    /// Bytes on disk of a page and of a run, in tables that are compacted: keys, values, filters.
    const PAGE: u64 = 72;
    const RUN: u64 = 150;

    /// By the lengths of what is stored, and a log as long as the memtables. `ritornello bench index
    /// --backends lsm --entries 100000,1000000` measured 90 and 86 percent of it.
    #[must_use]
    pub fn of(runs: u64, pages: u64, index_bytes: u64) -> Self {
        let memtables = (index_bytes / 16).clamp(64 << 10, 64 << 20);
        let cache = (index_bytes / 8).clamp(1 << 20, 64 << 20);
        Self {
            memory_bytes: memtables + cache,
            disk_bytes: Self::PAGE * pages + Self::RUN * runs + memtables,
        }
    }
}
