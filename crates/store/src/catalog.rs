//! The questions the owner of a store answers. Payload never passes through here.

use crate::core::CapacityChange;
use crate::stats::CatalogStats;
use ritornello_format::{Place, Result, Scope, ScopeId, ScopeSettings, ScopeSlot};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A registered scope, as short as every call needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeRef {
    /// Digest of its identity.
    pub id: ScopeId,
    /// Its slot: goes stale when the scope is dropped.
    pub slot: ScopeSlot,
    /// Bytes a page.
    pub page_bytes: u64,
    /// Whether keys commit to all keys before them.
    pub chained: bool,
    /// How pages that are put are encoded: the number that a slice records.
    pub codec: u8,
}

/// A lease's name, in this owner's lifetime. Zero is no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct LeaseNumber(pub u64);

/// Pages that are leased with one call at most, each scope's counted: nobody else is answered
/// meanwhile.
pub const LEASE_PAGES_MAX: usize = 1 << 22;

/// The longest reusable prefix, readable until its lease is released or runs out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leased {
    /// Leading pages that are there, as far as they are leased.
    pub pages: usize,
    /// Keeps them readable; zero if there are none.
    pub lease: LeaseNumber,
}

/// Consecutive pages of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocatedRun {
    /// Where the run lies.
    pub place: Place,
    /// First page, counted in the run.
    pub first: u32,
    /// Number of pages.
    pub pages: u32,
    /// Position of the first page in the keys asked for.
    pub at: u32,
}

/// Where the leading pages of some keys lie, under a lease of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// To be released when the bytes have been read.
    pub lease: LeaseNumber,
    /// In key order; in a chained scope without gaps from the first key on.
    pub runs: Vec<LocatedRun>,
}

/// A scope that the store knows, and what it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldScope {
    /// Its slot: slots are given in the order in which scopes are registered.
    pub slot: ScopeSlot,
    /// Its description.
    pub scope: Scope,
    /// Pages.
    pub pages: u64,
    /// Bytes on disk, headers and padding too.
    pub bytes: u64,
}

/// Keys of some pages of a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldKeys {
    /// The keys, run by run, oldest run first.
    pub keys: Vec<Vec<u8>>,
    /// Generation of the last run that was looked at; zero if there is none behind it.
    pub last: u64,
}

/// One run of a reservation: the caller writes it, header and pages, and commits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedRun {
    /// Where to write; `header_checksum` is the caller's to find out.
    pub place: Place,
    /// Position of its first page in the keys given.
    pub at: u32,
    /// Number of pages.
    pub pages: u32,
}

/// What a put asks for its pages besides their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReserveRequest {
    /// Units that each page takes on disk, one a key; empty: as many as the scope's pages are long.
    /// A run's pages all take as many as its longest.
    pub page_units: Vec<u32>,
    /// Slices a page; zero is one.
    pub slices_per_page: u16,
    /// Seconds since 1970 until which the pages, those that are there already included, are not to
    /// be evicted: see [`crate::PutOptions::retain_until`]. Zero: they are ordinary.
    pub retain_until: u64,
    /// How long the owner may wait for space to be reclaimed.
    pub timeout: Duration,
    /// Whether the caller flushes when all parts of its put are committed, so that no part need be
    /// durable by itself.
    pub flushed_later: bool,
}

/// Space for the pages of a put that are not there yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// The reservation's name, to commit or abort; zero if `runs` is empty.
    pub id: u64,
    /// The store's identity, for the run headers.
    pub store: [u8; 16],
    /// In key order. Keys in no run are in the store already, or behind `refused`.
    pub runs: Vec<ReservedRun>,
    /// Leading pages in the store at the time of the call.
    pub present: usize,
    /// Why some pages got no space, if so.
    pub refused: Option<Refusal>,
    /// Whether a put is not done in this store before it is durable.
    pub durable: bool,
}

/// What a put came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Leading pages of it that are now stored.
    pub stored: usize,
    /// Why runs that were written are not visible, if the index is to blame. (Otherwise somebody
    /// stored their pages meanwhile, or what they hang behind is gone.)
    pub refused: Option<Refusal>,
}

/// Why a page was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// Everything is leased or being written, and the budget or the floor is reached.
    NoSpace,
    /// The deadline passed while space was being reclaimed.
    Deadline,
    /// The index has reached its share of the budget.
    Metadata,
    /// The scope's quota is used up, and what is there may not be evicted.
    Quota,
    /// They were put for the first time, and admission waits for the second.
    Admission,
    /// The write budget is used up.
    WriteBudget,
    /// The index has reached its memory ceiling.
    IndexMemory,
    /// They are stored in a volume or segment that is away.
    Unavailable,
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
            Self::Unavailable => "unavailable",
        }
    }
}

/// What the owner of a store answers, to its own process or, through a socket, to others.
///
/// Keys are the engine's block hashes in sequence order. A stale [`ScopeRef`] is answered with
/// `Retry`: resolve the scope again.
pub trait Catalog: Send + Sync {
    /// The scope's reference; `None` if it is unknown and `create` is false.
    ///
    /// # Errors
    /// `Fatal` if a stored scope has the same digest and is another one; `Miss` if it is to be made,
    /// and the registry is full of scopes that hold pages.
    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>>;
    /// Sets what is to hold for a scope, durably: what is not named goes back to the default. A
    /// quota below what the scope holds evicts from it at once. References go stale if the codec
    /// changes.
    ///
    /// # Errors
    /// `Invalid` for a codec that the scope's numbers do not suit, or more to retain than the quota.
    fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()>;
    /// Number of leading pages that are there.
    fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize>;
    /// Like `probe`, with a lease for `ttl`; counts as a use of the pages. Of several scopes: the
    /// leading pages that all of them have. In one scope whose keys do not chain the lease keeps
    /// every page that is there. Pages that exceed the client's share of the store are left out, from
    /// the first such page on.
    ///
    /// # Errors
    /// `Retry` if the first page exceeds it, or there are too many leases. `Invalid` for more than [`LEASE_PAGES_MAX`] pages, counted in every scope.
    fn lease(&self, scopes: &[ScopeRef], keys: &[&[u8]], ttl: Duration) -> Result<Leased>;
    /// Ends a lease; an unknown one (timed out, another owner's) is ended already.
    fn release(&self, lease: LeaseNumber) -> Result<()>;
    /// Where the leading pages lie, under a short lease that does not count for the client's share;
    /// in a scope whose keys do not chain, where
    /// any of them lie.
    fn locate(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Located>;
    /// Which pages are there, each by itself.
    fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>>;
    /// Space for the pages that are missing.
    ///
    /// # Errors
    /// `Invalid` for malformed or duplicate keys.
    fn reserve(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        request: &ReserveRequest,
    ) -> Result<Reserved>;
    /// Makes runs visible: one entry a reserved run, its header checksum, or `None` if it could
    /// not be written.
    fn commit(&self, reservation: u64, written: &[Option<u64>]) -> Result<Committed>;
    /// Gives a reservation back unwritten; an unknown one is gone already.
    fn abort(&self, reservation: u64) -> Result<()>;
    /// Says that page `key` of the run of `generation` could not be believed: it is removed and
    /// its space quarantined.
    fn report_corruption(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()>;
    /// Counts as a use of the leading pages; returns their number.
    fn touch(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize>;
    /// Removes pages (in chained scopes with all behind them); returns how many of `keys` were
    /// there.
    fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize>;
    /// Forgets a scope and its pages, durably at once. The bytes stay until overwritten.
    fn drop_scope(&self, scope: ScopeRef) -> Result<()>;
    /// Scopes from this slot on, in slot order, as many as make one answer; none: there are no more.
    fn scopes(&self, from: ScopeSlot) -> Result<Vec<HeldScope>>;
    /// Keys of whole runs whose generation is greater than `after`, until there are `limit` keys.
    /// It reads run headers: what cannot be read is left out.
    fn keys(&self, scope: ScopeRef, after: u64, limit: u32) -> Result<HeldKeys>;
    /// Changes capacity or directories; see [`StoreCore::change_capacity`](crate::StoreCore::change_capacity).
    fn change_capacity(&self, change: &CapacityChange) -> Result<()>;
    /// Drops every scope.
    fn clear(&self) -> Result<()>;
    /// Everything committed before survives power loss.
    fn flush(&self) -> Result<()>;
    /// Figures.
    fn stats(&self) -> Result<CatalogStats>;
}
