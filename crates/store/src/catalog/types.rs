//! The contents of requests and responses.

use ritornello_format::{Place, Scope, ScopeId, ScopeSlot};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A reference to a registered scope, with the properties that every call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeRef {
    /// Digest of the scope's identity.
    pub id: ScopeId,
    /// Slot of the scope; stale after the scope is dropped.
    pub slot: ScopeSlot,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Whether keys commit to all keys before them.
    pub chained: bool,
    /// Number of the codec with which puts encode pages (`ritornello_codec::Codec::number`).
    pub codec: u8,
}

/// Number of a lease, valid at the owner that granted it. Zero is the null lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct LeaseNumber(pub u64);

/// Maximum number of keys times scopes in a lease call for several scopes. The limit exists because
/// such a call holds the lock of the core's state, for which most other calls wait.
pub const LEASE_PAGES_MAX: usize = 1 << 22;

/// Maximum pages of one reservation: of a put, or of each part of a put that is written in parts.
pub(crate) const PUT_PAGES_MAX: usize = 65_535;

/// The result of a lease call: the leading pages that stay readable until the lease is released or
/// expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leased {
    /// Number of leading pages that are present and leased.
    pub pages: usize,
    /// Lease on these pages (for a single unchained scope, on all pages present); the null lease if
    /// no page is leased.
    pub lease: LeaseNumber,
}

/// Consecutive pages of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocatedRun {
    /// Place of the run.
    pub place: Place,
    /// First page, as an index into the run.
    pub first: u32,
    /// Number of pages.
    pub pages: u32,
    /// Position of the first page in the requested keys.
    pub at: u32,
}

/// The places of the leading pages of the requested keys (in an unchained scope, of all pages
/// present), and a lease on these pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// Lease on the runs; the caller releases it after the read.
    pub lease: LeaseNumber,
    /// Runs in key order; in a chained scope without gaps, starting at the first key.
    pub runs: Vec<LocatedRun>,
}

/// A registered scope and its contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeListing {
    /// Slot of the scope; slots are assigned in order of registration.
    pub slot: ScopeSlot,
    /// Description of the scope.
    pub scope: Scope,
    /// Number of pages.
    pub pages: u64,
    /// Bytes on disk, including headers and padding.
    pub bytes: u64,
}

/// Keys of some pages of a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyListing {
    /// The keys, run by run, oldest run first.
    pub keys: Vec<Vec<u8>>,
    /// Generation of the last run examined: the parameter `after` of the next call of
    /// [`Catalog::keys`](super::Catalog::keys). Zero if no run follows.
    pub last: u64,
}

/// One run of a reservation: the caller writes it, header and pages, and commits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedRun {
    /// Place to write to. Its `header_checksum` is zero, and the caller computes it.
    pub place: Place,
    /// Position of the run's first page in the given keys.
    pub at: u32,
    /// Number of pages.
    pub pages: u32,
}

/// The parameters of a reservation besides its scope, keys and parent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReserveRequest {
    /// Units of each page on disk, one entry per key; empty for unencoded pages. All pages of a run
    /// take the units of its longest page.
    pub page_units: Vec<u32>,
    /// Number of slices of each page; zero means one.
    pub slices_per_page: u16,
    /// Seconds since 1970 until which eviction skips the pages, including pages already stored: see
    /// [`crate::PutOptions::retain_until`]. Zero for no retention.
    pub retain_until: u64,
    /// Maximum time that the owner waits for space.
    pub timeout: Duration,
    /// Whether the caller flushes after all parts of its put are committed, so that the commit of a
    /// single part does not have to be durable.
    pub flushed_later: bool,
}

/// Space for the pages of a put that are not stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// Number of the reservation, to commit or abort; zero if `runs` is empty.
    pub id: u64,
    /// The store's identity, for the run headers.
    pub store: [u8; 16],
    /// Runs in key order. A key that is in no run is stored already, or is refused, or follows a
    /// refused key.
    pub runs: Vec<ReservedRun>,
    /// Number of leading pages that were stored already when the space was reserved.
    pub present: usize,
    /// Why some pages got no space; `None` if no page was refused.
    pub refused: Option<Refusal>,
    /// Whether this store acknowledges a put only when it is durable.
    pub durable: bool,
}

/// The result of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Number of leading pages of the put that are stored after the commit.
    pub stored: usize,
    /// The reason why the index refused written runs. `None` if the index took all of them, or if
    /// runs are invisible for another reason: for example, another put has stored one of their
    /// pages, or the pages that they follow were removed.
    pub refused: Option<Refusal>,
}

/// Why a page was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// The store cannot grow, and eviction cannot free enough, because runs are protected or being
    /// written, or because the sync that makes freed space reusable failed; or the put exceeds the
    /// client's share of the space.
    NoSpace,
    /// The deadline passed while the put waited for space.
    Deadline,
    /// The index cannot take a run now: its files have reached their share of the capacity, too
    /// many of its records are unsynced, it holds as many runs as it can, or, at the commit, it has
    /// reached its memory ceiling.
    Metadata,
    /// The put is longer than the scope's quota, or the quota is used up by pages that may not be
    /// evicted.
    Quota,
    /// Admission requires a second put soon after a refusal, and this page, or an earlier page of
    /// the put, was not refused recently.
    Admission,
    /// The write budget is used up.
    WriteBudget,
    /// The index had reached its memory ceiling before the put wrote.
    IndexMemory,
    /// The first refused page is stored in an absent volume or segment, or follows such a page in a
    /// chained scope.
    Absent,
}

impl Refusal {
    /// The reason in one word, as in metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::NoSpace => "no_space",
            Self::Deadline => "deadline",
            Self::Metadata => "metadata",
            Self::Quota => "quota",
            Self::Admission => "admission",
            Self::WriteBudget => "write_budget",
            Self::IndexMemory => "index_memory",
            Self::Absent => "absent_space",
        }
    }
}
