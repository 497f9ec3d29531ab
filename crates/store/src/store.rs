//! The payload half of a store, present in every process: it moves bytes to and from the places
//! that a catalog returns.

use crate::catalog::{Catalog, KeyListing, LeaseNumber, Leased, ScopeListing, ScopeRef};
use crate::core::CapacityChange;
use crate::io_threads::IoThreads;
use crate::lookup_sample::LookupSample;
use crate::owner_silent;
use crate::queue_lengths::QueueLengths;
use crate::resolved::Resolved;
use crate::transfer_counts::{TransferCounts, UNANSWERED};
use crate::transfer_stats::{StoreStats, TransferCounters};
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result, Scope, ScopeSettings, ScopeSlot, check_keys};
use ritornello_volume::process_id;
use ritornello_volume::segments::Segments;
use ritornello_volume::staging::Staging;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time that a put without a deadline waits for space.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum attempts of a call that fails with `Retry`.
const ATTEMPTS: u32 = 3;
/// A call that fails later than this time after its first failure is not retried.
const RETRY_FOR: Duration = Duration::from_secs(10);

/// Options of a put.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// Key of the page before the first page of the put, if known.
    pub parent: Option<Box<[u8]>>,
    /// Seconds since 1970 until which eviction skips the pages and all known pages before them;
    /// zero for no retention. Retention lasts at most 366 days, and applies to whole runs. If the
    /// scope retains more than its limit ([`ScopeSettings::retained_bytes`], by default a quarter
    /// of its quota or of the store), or all scopes retain more than half of the store, the
    /// retention that ends first is released. An end before the current end changes nothing.
    /// Deleting pages and dropping scopes end retention.
    pub retain_until: u64,
}

impl PutOptions {
    /// Options without retention, for pages that follow `parent`.
    #[must_use]
    pub fn after(parent: Option<&[u8]>) -> Self {
        Self { parent: parent.map(Into::into), retain_until: 0 }
    }
}

/// A store as callers see it, the same for the owner and its clients.
///
/// *Connection errors* of the methods include the errors of an owner that is silent or reopens the
/// store ([`OwnerSilent`](crate::OwnerSilent), [`StoreReopening`](crate::StoreReopening)). `probe`,
/// `exists`, `touch`, leases, gets and puts report misses instead of these errors.
pub struct Store {
    pub(crate) catalog: Arc<dyn Catalog>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) transfers: TransferCounters,
    /// Held while a get reports pages to the owner, which reads each of them.
    pub(crate) reports: Mutex<()>,
    resolved: Resolved,
    pub(crate) io_threads: IoThreads,
    /// Decides which lookups are timed: see [`Store::timed`].
    lookups: LookupSample,
    process: u32,
    closed: AtomicBool,
}

impl Store {
    /// Creates a store over a catalog. `staging` is the bounded memory for the copies of pages that
    /// [`Store::submit_put_copy`] writes, and that [`Store::submit_put_or`] passes to its caller if
    /// the pages were not stored. Transfers use the staging of `segments`.
    #[must_use]
    pub fn new(
        catalog: Arc<dyn Catalog>,
        segments: Arc<Segments>,
        staging: Arc<Staging>,
    ) -> Arc<Self> {
        Arc::new(Self {
            catalog,
            io_threads: IoThreads::new(Arc::clone(&segments)),
            segments,
            staging,
            transfers: TransferCounters::default(),
            reports: Mutex::new(()),
            resolved: Resolved::default(),
            lookups: LookupSample::new(),
            process: process_id(),
            closed: AtomicBool::new(false),
        })
    }

    /// Lists the scopes in order of registration, with their contents.
    ///
    /// # Errors
    /// `Closed`; connection errors.
    pub fn scopes(&self) -> Result<Vec<ScopeListing>> {
        self.check_process()?;
        let mut scopes: Vec<ScopeListing> = Vec::new();
        loop {
            let from = scopes.last().map_or(0, |last| last.slot.0 + 1);
            let more = self.catalog.scopes(ScopeSlot(from))?;
            if more.is_empty() {
                return Ok(scopes);
            }
            scopes.extend(more);
        }
    }

    /// Returns the first scope in order of registration for which `is_wanted` returns true. Keeps
    /// one batch of scopes in memory at a time, unlike [`Store::scopes`].
    ///
    /// # Errors
    /// `Closed`; connection errors.
    pub fn find_scope(&self, is_wanted: impl Fn(&Scope) -> bool) -> Result<Option<Scope>> {
        self.check_process()?;
        let mut from = ScopeSlot(0);
        loop {
            let listed = self.catalog.scopes(from)?;
            let Some(last) = listed.last() else { return Ok(None) };
            from = ScopeSlot(last.slot.0 + 1);
            if let Some(found) = listed.into_iter().find(|listing| is_wanted(&listing.scope)) {
                return Ok(Some(found.scope));
            }
        }
    }

    /// Returns a batch of a scope's keys: whole runs, oldest first, until the batch has at least
    /// `limit` or 16,384 keys, whichever is less, or the scope has no further run. `after` is zero
    /// for the first batch, then `last` of the previous batch. Pages added or removed concurrently
    /// may or may not be included.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn keys(&self, scope: &Scope, after: u64, limit: u32) -> Result<KeyListing> {
        self.with_scope(scope, KeyListing::default(), |s| self.catalog.keys(s, after, limit))
    }

    /// Changes capacity or directories of a store in use. Returns when the change is complete.
    /// After adding a directory, returns without waiting for segments to be emptied.
    ///
    /// # Errors
    /// `Retry` if the change takes longer than four minutes: it then continues in the background.
    /// `Retry` while the store is poisoned or reopened, or its owner is silent; `Invalid` if the
    /// change is impossible, or the policy denies it to clients; `Closed`; connection errors.
    pub fn change_capacity(&self, change: &CapacityChange) -> Result<()> {
        self.check_process()?;
        self.catalog.change_capacity(change)
    }

    /// Sets the capacity in bytes: see [`Store::change_capacity`].
    ///
    /// # Errors
    /// Like `change_capacity`.
    pub fn resize(&self, capacity: u64) -> Result<()> {
        self.change_capacity(&CapacityChange::Capacity(capacity))
    }

    /// Changes the settings of a scope, durably. Registers the scope if it is new. Fields not given
    /// in `settings` return to the default. Stored pages keep their encoding. If the quota is below
    /// the scope's size, pages are evicted immediately.
    ///
    /// # Errors
    /// `Invalid` if the codec cannot encode the scope's dtype or layout, if `retained_bytes`
    /// exceeds `quota_bytes`, or if the policy denies the call to clients; `Miss` if the registry
    /// has no room for a new scope, also after empty scopes are dropped; `Retry` while the store is
    /// poisoned or reopened, or its owner is silent; `Closed`; connection errors.
    pub fn configure(&self, scope: &Scope, settings: &ScopeSettings) -> Result<()> {
        self.retry_stale(&[scope], || self.catalog.configure(self.registered(scope)?, settings))?;
        self.resolved.invalidate(&[scope]);
        Ok(())
    }

    /// Returns the number of leading pages present.
    ///
    /// # Errors
    /// `Invalid` for malformed keys; `Closed` if the store is closed, or was opened before a fork;
    /// connection errors; `Retry` if each attempt fails with `Retry`.
    pub fn probe(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        check_keys(keys)?;
        let answer = self.timed(|| {
            let found = self.retry_stale(&[scope], || {
                let known = self.resolve(scope, false)?;
                known.map(|scope| self.catalog.probe(scope, keys)).transpose()
            })?;
            Ok(found.unwrap_or_else(|| self.count_unregistered(keys, 0)))
        });
        self.or_miss(answer, |_| 0)
    }

    /// Like `probe`, with a lease that keeps the pages readable for `ttl`, at most one hour
    /// ([`crate::lease::LEASE_TTL_MAX`]), or until released. In an unchained scope the lease covers
    /// every page present.
    ///
    /// The space under a client's leases is limited to the size of the space that no client has
    /// leased: half of the store if no other client has leases. If the prefix is longer, the lease
    /// covers its leading pages that fit, and the result counts the leased pages; `probe` counts
    /// all pages. The limit does not apply to reads.
    ///
    /// # Errors
    /// Like `probe`; `Retry` if the client has too many leases, or the run of the first page
    /// exceeds what is left of the client's share of the store: release unneeded leases.
    pub fn lease(&self, scope: &Scope, keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        self.lease_all(&[scope], keys, ttl)
    }

    /// Leases the leading pages present in all of `scopes`, with one lease and one call, for pages
    /// that are stored as several objects.
    ///
    /// # Errors
    /// Like `lease`; `Invalid` for several scopes and more than [`crate::LEASE_PAGES_MAX`] pages,
    /// counted in every scope.
    pub fn lease_all(&self, scopes: &[&Scope], keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        check_keys(keys)?;
        let none = Leased { pages: 0, lease: LeaseNumber::default() };
        let answer = self.timed(|| {
            let found = self.retry_stale(scopes, || {
                let known = self.resolve_all(scopes)?;
                known.map(|known| self.catalog.lease(&known, keys, ttl)).transpose()
            })?;
            Ok(found.unwrap_or_else(|| self.count_unregistered(keys, none)))
        });
        self.or_miss(answer, |_| none)
    }

    /// Counts a lookup of `keys` in a scope that is not registered, and returns its `answer`.
    fn count_unregistered<T>(&self, keys: &[&[u8]], answer: T) -> T {
        self.count(&TransferCounts::unregistered_lookup(keys.len()));
        answer
    }

    /// Calls `lookup`. Times and counts one of 16 calls, if it succeeds.
    fn timed<T>(&self, lookup: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.lookups.next_is_timed() {
            return lookup();
        }
        let started = Instant::now();
        let answer = lookup()?;
        self.count(&TransferCounts::lookup(started.elapsed()));
        Ok(answer)
    }

    /// The submitted gets and puts that wait for a thread.
    #[must_use]
    pub fn queues(&self) -> QueueLengths {
        let (gets, puts) = self.io_threads.waiting();
        QueueLengths::of_store(gets, puts)
    }

    /// Ends a lease of this process. Leases of other processes are not affected.
    ///
    /// # Errors
    /// `Closed`; connection errors.
    pub fn release(&self, lease: LeaseNumber) -> Result<()> {
        self.check_process()?;
        if lease == LeaseNumber::default() { Ok(()) } else { self.catalog.release(lease) }
    }

    /// Returns for each page whether it is present.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn exists(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Vec<bool>> {
        check_keys(keys)?;
        let none = || vec![false; keys.len()];
        let answer = self.with_scope(scope, none(), |s| self.catalog.exists(s, keys));
        self.or_miss(answer, |_| none())
    }

    /// Returns the number of leading pages present. Unlike `probe`, counts no lookup: for calls
    /// that do not serve a request of an engine.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn present_prefix(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        Ok(self.exists(scope, keys)?.into_iter().take_while(|present| *present).count())
    }

    /// Records a use of the leading pages (in an unchained scope, of all pages present). Returns
    /// the number of leading pages.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn touch(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        check_keys(keys)?;
        let answer = self.with_scope(scope, 0, |scope| self.catalog.touch(scope, keys));
        self.or_miss(answer, |_| 0)
    }

    /// Removes pages; in chained scopes with all pages after them. Returns how many of `keys` were
    /// present.
    ///
    /// # Errors
    /// Like `probe`; `Retry` while the store is poisoned or reopened, or its owner is silent.
    pub fn delete(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        check_keys(keys)?;
        self.with_scope(scope, 0, |scope| self.catalog.delete(scope, keys))
    }

    /// Drops a scope and its pages; the drop is durable when the call returns. The bytes stay on
    /// disk until overwritten.
    ///
    /// # Errors
    /// Like `probe`; `Retry` while the store is poisoned or reopened, or its owner is silent;
    /// `Invalid` if the policy denies the call to clients.
    pub fn drop_scope(&self, scope: &Scope) -> Result<()> {
        self.with_scope(scope, (), |scope| self.catalog.drop_scope(scope))?;
        self.resolved.invalidate(&[scope]);
        Ok(())
    }

    /// Drops all scopes.
    ///
    /// # Errors
    /// `Retry` while the store is poisoned or reopened, or its owner is silent; `Invalid` if the
    /// policy denies the call to clients; `Closed`; connection errors.
    pub fn clear(&self) -> Result<()> {
        self.check_process()?;
        self.resolved.clear();
        self.catalog.clear()
    }

    /// Makes all puts and deletes that ended before the call durable.
    ///
    /// # Errors
    /// `Retry` while the store is poisoned or reopened, or its owner is silent; `Miss` if puts
    /// since the last flush may be lost, which is reported once; `Closed`; connection errors.
    pub fn flush(&self) -> Result<()> {
        self.check_process()?;
        self.catalog.flush()
    }

    /// Returns statistics.
    ///
    /// # Errors
    /// `Closed`; connection errors.
    pub fn stats(&self) -> Result<StoreStats> {
        self.check_process()?;
        let transfer = self.transfers.stats(self.staging.stats().in_use as u64);
        Ok(StoreStats { catalog: self.catalog.stats()?, transfer })
    }

    /// The bounded memory for copies of pages: see [`Store::new`].
    #[must_use]
    pub fn staging(&self) -> &Arc<Staging> {
        &self.staging
    }

    /// Waits for running tickets, ends queued tickets with the reason `closed`, and refuses later
    /// calls.
    pub fn close(&self) {
        if process_id() == self.process && !self.closed.swap(true, Ordering::AcqRel) {
            self.io_threads.close();
        }
    }

    /// Refuses a closed handle, and a handle opened before a fork: the child has neither the
    /// threads nor the file locks that the handle relies on.
    fn check_process(&self) -> Result<()> {
        if process_id() != self.process {
            return Err(Error::new(
                ErrorKind::Closed,
                "this store was opened before a fork: open it again in the child",
            ));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed: open it again"));
        }
        Ok(())
    }

    pub(crate) fn check_batch(&self, keys: &[&[u8]], pages: usize) -> Result<()> {
        self.check_process()?;
        check_keys(keys)?;
        if keys.len() == pages {
            return Ok(());
        }
        Err(Error::invalid("there must be one page per key: pass as many pages as keys")
            .with("keys", keys.len())
            .with("pages", pages))
    }

    /// If `answer` is the error of an owner that does not respond or reopens the store, counts it,
    /// and returns the result of `miss` for the error's reason instead.
    pub(crate) fn or_miss<T>(
        &self,
        answer: Result<T>,
        miss: impl FnOnce(&'static str) -> T,
    ) -> Result<T> {
        match answer.as_ref().err().and_then(owner_silent::reason) {
            None => answer,
            Some(reason) => {
                self.count(&TransferCounts::one(UNANSWERED, 1));
                Ok(miss(reason))
            }
        }
    }

    /// Adds counts of a call to this process's counts, and reports them to the owner.
    pub(crate) fn count(&self, counts: &TransferCounts) {
        self.transfers.totals.add(counts.as_slice());
        // A report that fails is missing in the owner's counts only.
        let _ = self.catalog.report_transfers(counts.as_slice());
    }

    pub(crate) fn with_scope<T>(
        &self,
        scope: &Scope,
        unknown: T,
        ask: impl Fn(ScopeRef) -> Result<T>,
    ) -> Result<T> {
        let known =
            self.retry_stale(&[scope], || self.resolve(scope, false)?.map(&ask).transpose())?;
        Ok(known.unwrap_or(unknown))
    }

    /// Calls `ask`, which resolves scopes and makes a call. If `ask` fails with `Retry` although
    /// the owner responds, another process may have dropped a scope, or the owner may have changed
    /// during a put. The scopes' references are then invalidated, and `ask` is called again: at
    /// most [`ATTEMPTS`] times in all, within [`RETRY_FOR`].
    pub(crate) fn retry_stale<T>(
        &self,
        scopes: &[&Scope],
        mut ask: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        self.check_process()?;
        // Read the clock at the first failure only, because reading it costs as much as a probe.
        let (mut refused, mut attempts) = (None, 0);
        loop {
            match ask() {
                Err(error)
                    if error.kind() == ErrorKind::Retry
                        && owner_silent::reason(&error).is_none() =>
                {
                    attempts += 1;
                    let late = refused.get_or_insert_with(Instant::now).elapsed() > RETRY_FOR;
                    if late || attempts == ATTEMPTS {
                        return Err(error);
                    }
                    self.resolved.invalidate(scopes);
                }
                answer => return answer,
            }
        }
    }

    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        let mut found = None;
        self.resolved.find(&[scope], |known| found = known);
        if found.is_none() {
            found = self.catalog.resolve(scope, create)?;
            found.into_iter().for_each(|reference| self.resolved.note(reference, scope));
        }
        Ok(found)
    }

    pub(crate) fn registered(&self, scope: &Scope) -> Result<ScopeRef> {
        let dropped = || Error::retry("the scope was dropped during the call: try again");
        self.resolve(scope, true)?.ok_or_else(dropped)
    }

    /// Returns the references of all `scopes`, or `None` if one of them is unknown.
    fn resolve_all(&self, scopes: &[&Scope]) -> Result<Option<Vec<ScopeRef>>> {
        let mut known = Vec::with_capacity(scopes.len());
        self.resolved.find(scopes, |found| known.push(found));
        let each = known.into_iter().zip(scopes);
        each.map(|(found, scope)| found.map_or_else(|| self.resolve(scope, false), |r| Ok(Some(r))))
            .collect()
    }
}

/// Checks that the sections of `control` make up a page of `scope`, and that none of them has
/// arrived: a get fills new sections.
///
/// # Errors
/// `Invalid` if the sections do not make up a page, or one has arrived; errors of
/// [`Scope::resolved_page_bytes`].
pub fn check_sections(scope: &Scope, control: &Control) -> Result<()> {
    let (page, Some(sections)) = (scope.resolved_page_bytes()?, &control.sections) else {
        return Ok(());
    };
    if sections.page_bytes() == page && sections.arrived() == 0 {
        return Ok(());
    }
    Err(Error::invalid("the sections were used by another get, or do not end at the end of a page: pass new sections")
        .with("page_bytes", page)
        .with("sections_end", sections.page_bytes()))
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}
