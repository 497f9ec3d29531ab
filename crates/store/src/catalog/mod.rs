//! The calls that the owner of a store answers. The bytes of pages never pass through a catalog.
//!
//! A catalog has one call with many requests, so that sockets and the failover to another owner
//! carry a new request without a change. A new request is a variant of [`Request`] with its
//! [rule](rule::CallRule), a method of [`Catalog`] that sends it, a method of
//! [`StoreCore`](crate::StoreCore) that answers it, and a match arm in `call` of
//! [`LocalCatalog`](crate::LocalCatalog) that calls this method.

pub(crate) mod bounded;
mod keys;
mod message;
pub mod rule;
mod types;

pub use keys::{Keys, PackedKeys};
pub use message::{Request, Response, WireError};
pub(crate) use types::PUT_PAGES_MAX;
pub use types::{
    Committed, KeyListing, LEASE_PAGES_MAX, LeaseNumber, Leased, Located, LocatedRun, Refusal,
    ReserveRequest, Reserved, ReservedRun, ScopeListing, ScopeRef,
};

use crate::core::CapacityChange;
use crate::decision::{Decision, DecisionListing, RequestExplanation};
use crate::explanation::Explanation;
use crate::queue_lengths::QueueLengths;
use crate::stats::CatalogStats;
use ritornello_format::{Error, Result, Scope, ScopeId, ScopeSettings, ScopeSlot};
use std::borrow::Cow;
use std::time::Duration;

/// Extracts the answer from a response, or fails if the response is of a kind that does not fit the
/// request.
macro_rules! expect {
    ($response:expr, $pattern:pat => $answer:expr) => {
        match $response? {
            $pattern => Ok($answer),
            _ => Err(out_of_place()),
        }
    };
}

fn out_of_place() -> Error {
    Error::fatal("the store's owner answered another request: report this")
}

/// The owner's calls, made in its own process or through a socket.
///
/// Keys are the inference engine's block hashes in sequence order. A stale [`ScopeRef`] fails with
/// `Retry`: resolve the scope again. The methods do not list the errors that most calls can have:
/// `Invalid` for malformed keys, and errors of a closed, poisoned or reopening store, and of an
/// owner that cannot be reached.
pub trait Catalog: Send + Sync {
    /// Answers `request`, with the response that [`Response`] names for it.
    ///
    /// # Errors
    /// Every error of the method with the request's name.
    fn call(&self, request: &Request<'_>) -> Result<Response>;

    /// Returns the scope's reference, or `None` if the scope is unknown and `create` is false.
    ///
    /// # Errors
    /// `Fatal` if another scope with the same digest is stored; `Miss` if the scope is new, and the
    /// registry has no room for it, also after empty scopes are dropped, or all scope numbers are
    /// used up; `Invalid` if the length of a new scope's pages is unknown, or too large for the
    /// store; file-system errors.
    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        let request = Request::Resolve { scope: Cow::Borrowed(scope), create };
        expect!(self.call(&request), Response::Scope(scope) => scope)
    }

    /// Changes the settings of a scope, durably; a setting that is `None` returns to the store's
    /// default. If the quota is below the scope's size, pages are evicted immediately. References
    /// to the scope go stale if its codec changes.
    ///
    /// # Errors
    /// `Invalid` if the owner does not know the codec, if the codec cannot encode the scope's dtype
    /// or layout, or if `retained_bytes` exceeds `quota_bytes`; file-system errors.
    fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()> {
        let request = Request::Configure { scope, settings: *settings };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Returns the number of leading pages present.
    fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let request = Request::Probe { scope, keys: Keys::Listed(keys) };
        expect!(self.call(&request), Response::Count(pages) => pages)
    }

    /// Like `probe`, with a lease for `ttl` on the pages. The call counts as a use of the pages.
    /// With several scopes, the call leases the leading pages that are present in all of them. In a
    /// single unchained scope the lease covers every page present. If the client's leases would
    /// exceed its share of the store, the lease covers only the leading runs that fit the share.
    ///
    /// # Errors
    /// `Retry` if the run of the first page exceeds what is left of the client's share, or if the
    /// client has too many leases or leased runs. `Invalid` for several scopes if the number of
    /// keys times scopes exceeds [`LEASE_PAGES_MAX`].
    fn lease(&self, scopes: &[ScopeRef], keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        let (scopes, keys) = (Cow::Borrowed(scopes), Keys::Listed(keys));
        let request = Request::Lease { scopes, keys, ttl };
        expect!(self.call(&request), Response::Leased(leased) => leased)
    }

    /// Ends a lease. Leases that are unknown (expired, or another owner's), or another client's,
    /// are ignored.
    fn release(&self, lease: LeaseNumber) -> Result<()> {
        expect!(self.call(&Request::Release { lease }), Response::Done => ())
    }

    /// Returns the places of the leading pages (in an unchained scope, of all pages present), under
    /// a lease of at most 2 minutes that does not count towards the client's share of the space
    /// that leases may keep from eviction.
    ///
    /// # Errors
    /// `Retry` if the client has too many leases or leased runs.
    fn begin_read(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Located> {
        let request = Request::BeginRead { scope, keys: Keys::Listed(keys) };
        expect!(self.call(&request), Response::Located(located) => located)
    }

    /// Returns for each page whether it is present.
    fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>> {
        let request = Request::Exists { scope, keys: Keys::Listed(keys) };
        match self.call(&request)? {
            Response::Exists(present) if present.len() == keys.len() => Ok(present),
            _ => Err(out_of_place()),
        }
    }

    /// Reserves space for the pages of `keys` that are not stored. `parent` is the key of the page
    /// before the first page, if it is known.
    ///
    /// # Errors
    /// `Invalid` for duplicate or too many keys, or impossible page lengths or slices; `Retry` if
    /// the client has too many leases or leased runs; file-system errors.
    fn reserve(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        request: &ReserveRequest,
    ) -> Result<Reserved> {
        let (keys, reserve_request) = (Keys::Listed(keys), Cow::Borrowed(request));
        let request = Request::Reserve { scope, keys, parent, reserve_request };
        expect!(self.call(&request), Response::Reserved(reserved) => reserved)
    }

    /// Makes the written runs of a reservation visible. `written` has one entry per reserved run:
    /// its header checksum, or `None` if it could not be written.
    ///
    /// # Errors
    /// `Retry` if the owner does not know the reservation; `Invalid` if it is another client's, or,
    /// from `node/src/failover_catalog.rs`, if it is no open reservation of this process;
    /// file-system errors.
    fn commit(&self, reservation: u64, written: &[Option<u64>]) -> Result<Committed> {
        let request = Request::Commit { reservation, written: Cow::Borrowed(written) };
        expect!(self.call(&request), Response::Committed(committed) => committed)
    }

    /// Frees the space of a reservation, and stores nothing. Unknown reservations are ignored.
    ///
    /// # Errors
    /// `Invalid` if the reservation is another client's.
    fn abort(&self, reservation: u64) -> Result<()> {
        expect!(self.call(&Request::Abort { reservation }), Response::Done => ())
    }

    /// Reports that page `key` of the run with this generation failed verification. The owner reads
    /// the page itself; if the page fails verification again, the owner removes it and quarantines
    /// its space. A page that the owner cannot read stays.
    fn report_damage(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()> {
        let request = Request::ReportDamage { scope, key, generation, reason };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Reports the speeds that this process has measured of the volumes, in KiB/s, by volume
    /// number; zero for a volume without a measurement. Puts place more runs on faster volumes.
    fn report_speeds(&self, speeds: &[u32]) -> Result<()> {
        let request = Request::ReportSpeeds { speeds: Cow::Borrowed(speeds) };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Reports, before the commit, the volumes on which writes of a reservation failed. If 8 runs
    /// in succession cannot be written to a volume, later puts avoid it while another can be used.
    fn report_failed_writes(&self, reservation: u64, volumes: &[u8]) -> Result<()> {
        let volumes = Cow::Borrowed(volumes);
        let request = Request::ReportFailedWrites { reservation, volumes };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Reports counts of this process: of puts, gets, lookups, avoided prefill and caches, in the
    /// order that `transfer_counts.rs` defines. A process collects the counts of its calls, and
    /// sends them to the owner about every two seconds.
    fn report_transfers(&self, counts: &[u64]) -> Result<()> {
        let request = Request::ReportTransfers { counts: Cow::Borrowed(counts) };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Reports how long the queues of this process are now, in the order that `queue_lengths.rs`
    /// defines. The report replaces the last report of the process.
    fn report_queues(&self, lengths: &QueueLengths) -> Result<()> {
        let request = Request::ReportQueues { lengths: Cow::Borrowed(lengths.as_slice()) };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Records a use of the leading pages (in an unchained scope, of all pages present). Returns
    /// the number of leading pages.
    ///
    /// # Errors
    /// `Retry` if the client has too many leases or leased runs.
    fn touch(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let request = Request::Touch { scope, keys: Keys::Listed(keys) };
        expect!(self.call(&request), Response::Count(pages) => pages)
    }

    /// Removes pages (in chained scopes with all pages after them). Returns how many of `keys` were
    /// present.
    fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let request = Request::Delete { scope, keys: Keys::Listed(keys) };
        expect!(self.call(&request), Response::Count(pages) => pages)
    }

    /// Drops a scope and its pages; the drop is durable when the call returns. The bytes stay on
    /// disk until overwritten.
    ///
    /// # Errors
    /// File-system errors of the scope registry.
    fn drop_scope(&self, scope: ScopeRef) -> Result<()> {
        expect!(self.call(&Request::DropScope { scope }), Response::Done => ())
    }

    /// Lists scopes in slot order, starting at the slot `from`, at most 256 per call; an empty list
    /// ends the listing.
    fn scopes(&self, from: ScopeSlot) -> Result<Vec<ScopeListing>> {
        expect!(self.call(&Request::Scopes { from }), Response::Scopes(scopes) => scopes)
    }

    /// Lists the keys of whole runs whose generation is above `after`, until the list has at least
    /// `limit` keys, or 16,384 if `limit` is higher. Reads run headers, and skips runs whose header
    /// cannot be read.
    fn keys(&self, scope: ScopeRef, after: u64, limit: u32) -> Result<KeyListing> {
        let request = Request::Keys { scope, after, limit };
        expect!(self.call(&request), Response::Keys(keys) => keys)
    }

    /// Explains for each key why the page is a hit or a miss in the scope `id`, at most
    /// [`EXPLAINED_KEYS_MAX`](crate::EXPLAINED_KEYS_MAX) keys. `scope` is the description of this
    /// scope, if the caller knows it: the owner compares it with other scopes that have the keys.
    ///
    /// # Errors
    /// `Invalid` for too many keys, or if `scope` is not the description of the scope `id`.
    fn explain(&self, id: ScopeId, scope: Option<&Scope>, keys: &[&[u8]]) -> Result<Explanation> {
        let (scope, keys) = (scope.map(Cow::Borrowed), Keys::Listed(keys));
        let request = Request::Explain { id, scope, keys };
        expect!(self.call(&request), Response::Explained(explanation) => explanation)
    }

    /// Reports decisions of this process, and `dropped`, the number of further decisions that did
    /// not fit its buffer. A process buffers its decisions, and sends them to the owner about every
    /// two seconds.
    fn report_decisions(&self, decisions: &[Decision], dropped: u64) -> Result<()> {
        let request = Request::ReportDecisions { decisions: Cow::Borrowed(decisions), dropped };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Returns the `limit` newest decisions that the owner remembers, at most
    /// [`LISTED_DECISIONS_MAX`](crate::LISTED_DECISIONS_MAX), without their keys.
    fn decisions(&self, limit: u32) -> Result<DecisionListing> {
        let request = Request::Decisions { limit };
        expect!(self.call(&request), Response::Decisions(listing) => listing)
    }

    /// Returns the newest decisions about the request that `request` names, at most
    /// [`EXPLAINED_DECISIONS_MAX`](crate::EXPLAINED_DECISIONS_MAX), and explains why the pages of
    /// the request are hits or misses now. `request` is the engine's own id of the request. If no
    /// remembered decision has exactly this id, `request` names each request whose id, with or
    /// without a number and `_` at its front, is `request` or begins with `request` and `-`:
    /// `cmpl-1` names `cmpl-1-0-5d41402a` and `2_cmpl-1-0-5d41402a`.
    ///
    /// # Errors
    /// `Invalid` if `request` is empty.
    fn explain_request(&self, request: &str) -> Result<RequestExplanation> {
        let request = Request::ExplainRequest { request };
        expect!(self.call(&request), Response::RequestExplained(explanation) => explanation)
    }

    /// Changes capacity or directories; see
    /// [`StoreCore::change_capacity`](crate::StoreCore::change_capacity).
    fn change_capacity(&self, change: &CapacityChange) -> Result<()> {
        let request = Request::ChangeCapacity { change: Cow::Borrowed(change) };
        expect!(self.call(&request), Response::Done => ())
    }

    /// Drops all scopes and their pages, durably.
    ///
    /// # Errors
    /// File-system errors of the scope registry; `Retry` if the sync failed or could not begin.
    fn clear(&self) -> Result<()> {
        expect!(self.call(&Request::Clear), Response::Done => ())
    }

    /// Makes all earlier commits and deletions durable.
    ///
    /// # Errors
    /// `Retry` if the sync failed or could not begin; `Miss` if changes that an earlier owner
    /// acknowledged to this process may be lost.
    fn flush(&self) -> Result<()> {
        expect!(self.call(&Request::Flush), Response::Done => ())
    }

    /// Returns the owner's statistics.
    fn stats(&self) -> Result<CatalogStats> {
        expect!(self.call(&Request::Stats), Response::Stats(stats) => *stats)
    }
}
