//! Figures of a store, as `stat` and the metrics show them.

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
    /// Live scopes.
    pub scopes: u64,
    /// Runs in the index.
    pub runs: u64,
    /// Pages in the index.
    pub pages: u64,
    /// Memory of the index.
    pub index_memory_bytes: u64,
    /// Files of the index.
    pub index_disk_bytes: u64,
    /// Bytes the index wrote since open.
    pub index_written_bytes: u64,
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
    /// Counted since open, by name.
    pub counters: BTreeMap<String, u64>,
    /// Milliseconds that opening took.
    pub open_ms: f64,
    /// What recovery dropped, by reason.
    pub dropped_at_open: BTreeMap<String, u64>,
}

/// How bytes move in this process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IoStats {
    /// `uring`, `pool` or `buffered`.
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
    /// Pages refused for want of space.
    pages_refused,
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
    /// Times a put had to wait for space to be reclaimed.
    reclaim_waits,
    /// Leases that ran out before they were released.
    leases_expired,
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
