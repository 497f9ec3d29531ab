//! The owner's half of a store: which pages exist and where they are stored, which puts get space,
//! which pages are evicted.
//!
//! [`StoreCore`] holds the components. Components that must change together are in
//! [`state::State`], under one lock; each other component synchronises itself. A put passes through
//! the modules `reserve` and `commit`, a get through `lookup`.

mod absence;
mod commit;
mod copies;
mod decisions;
mod disk_call;
mod durability;
mod eviction;
mod eviction_cause;
mod explain;
mod explain_request;
mod lifecycle;
mod limits;
mod listing;
mod local_catalog;
mod lookup;
mod maintenance;
mod miss_causes;
mod recovery;
mod removal;
mod reservations;
mod reserve;
mod residents;
mod scopes;
mod shape;
mod space;
mod state;
mod stats;
mod step;
mod waiting_children;

pub use local_catalog::LocalCatalog;
pub use maintenance::verify::{DamagedPage, Verification};
pub use miss_causes::remembered_answers;
pub use space::capacity::CapacityChange;

use crate::options::Options;
use crate::queue_lengths::ReportedQueues;
use crate::stats::Counters;
use crate::transfer_counts::TransferTotals;
use absence::hidden::Hidden;
use copies::Copies;
use decisions::Decisions;
use disk_call::DiskCalls;
use lifecycle::Lifecycle;
use limits::admission::PutAdmission;
use limits::quota::QuotaBuilds;
use maintenance::Maintenance;
use miss_causes::MissCauses;
use parking_lot::Mutex;
use reservations::ReservationLog;
use ritornello_format::Manifest;
use ritornello_index::PrefixIndex;
use ritornello_volume::segments::Segments;
use scopes::Scopes;
use shape::Shape;
use state::StateLock;
use std::sync::{Arc, Weak};

/// Returns whether the client process whose lock file has the given name may still be writing.
pub type ClientAlive = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The core of a store. The caller holds the lock of the store's directory for as long as the core
/// lives.
pub struct StoreCore {
    /// This field must be dropped before `shape`, which holds the medium: RocksDB uses the path of
    /// [`Medium::host_path`](ritornello_medium::Medium::host_path) until it is closed.
    index: Arc<dyn PrefixIndex>,
    segments: Arc<Segments>,
    /// This core, for threads that outlive the call that starts them.
    this: Weak<Self>,
    options: Options,
    shape: Shape,
    scopes: Scopes,
    admission: PutAdmission,
    quota_builds: QuotaBuilds,
    state: StateLock,
    reservation_log: Mutex<ReservationLog>,
    hidden: Hidden,
    lifecycle: Lifecycle,
    maintenance: Maintenance,
    copies: Copies,
    disk_calls: DiskCalls,
    counters: Counters,
    /// Counts that all processes report: of puts, gets, avoided prefill and caches.
    transfers: TransferTotals,
    /// Lengths of the queues of all processes.
    queues: ReportedQueues,
    miss_causes: MissCauses,
    decisions: Decisions,
}

impl StoreCore {
    /// The segment files.
    #[must_use]
    pub fn segments(&self) -> Arc<Segments> {
        Arc::clone(&self.segments)
    }

    /// Whether lookups may read files of the index, and then wait for a disk.
    #[must_use]
    pub fn index_reads_files(&self) -> bool {
        self.index.reads_files()
    }

    /// The current manifest.
    #[must_use]
    pub fn manifest(&self) -> Arc<Manifest> {
        self.shape.manifest()
    }
}

impl std::fmt::Debug for StoreCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreCore").field("dir", &self.options.dir).finish_non_exhaustive()
    }
}
