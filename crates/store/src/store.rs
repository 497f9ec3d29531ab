//! Everybody's half of a store: payload moves here, questions go to the catalog.

use crate::catalog::{Catalog, LeaseNumber, Leased, ScopeRef};
use crate::engine::Reshape;
use crate::outcome::Outcome;
use crate::stats::{CatalogStats, Counter};
use crate::ticket::{Closing, Lane, Ticket, Workers};
use parking_lot::RwLock;
use ritornello_format::{Error, ErrorKind, Result, Scope, ScopeSettings, check_keys};
use ritornello_volume::memory::{PageSource, PageTarget};
use ritornello_volume::process_id;
use ritornello_volume::segments::Segments;
use ritornello_volume::staging::Staging;
use ritornello_volume::transfer::Control;
use serde::Serialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Blocking calls give up after this long if the caller sets no deadline.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Times that a call is tried when it could not be answered for now.
const ATTEMPTS: u32 = 3;
/// A call is not tried again when this long has passed since it was first refused.
const RETRY_FOR: Duration = Duration::from_secs(10);
/// Resolved scopes that are remembered.
const SCOPES_KNOWN: usize = 16;

/// What a put says of its pages besides their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Key of the page before the first, where it is known.
    pub parent: Option<Box<[u8]>>,
    /// Seconds since 1970 until which the pages, and all before them that are known, are not to be
    /// evicted; zero: they are ordinary. It is a year at most, and holds for whole runs. Within a
    /// scope (`retained_bytes`, by default a quarter of its quota or of the store) and within half of
    /// the store in all, what ends first gives way and is ordinary again. An end that is earlier
    /// than the one already known changes nothing. Deleting and dropping are not held up.
    pub retain_until: u64,
}

impl Terms {
    /// Ordinary pages that follow `parent`.
    #[must_use]
    pub fn behind(parent: Option<&[u8]>) -> Self {
        Self { parent: parent.map(Into::into), retain_until: 0 }
    }
}

/// A store, as callers see it: the same for the owner and for its clients.
pub struct Store {
    pub(crate) catalog: Arc<dyn Catalog>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) moved: Moved,
    /// Resolved lately, newest last. Found by comparing descriptions, which is cheaper than their
    /// digest, and an equal description needs no further check.
    scopes: RwLock<Vec<(ScopeRef, Scope)>>,
    workers: Workers,
    process: u32,
    closed: AtomicBool,
}

/// What this process moved.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub(crate) puts: Counter,
    pub(crate) put_bytes: Counter,
    pub(crate) put_stored_bytes: Counter,
    pub(crate) put_micros: Counter,
    pub(crate) gets: Counter,
    pub(crate) get_bytes: Counter,
    pub(crate) get_micros: Counter,
    pub(crate) pages_read: Counter,
    pub(crate) pages_missed: Counter,
    pub(crate) staging_refusals: Counter,
}

/// The catalog's figures, and what this process moved.
#[derive(Clone, Debug, Serialize)]
pub struct StoreStats {
    /// The owner's.
    #[serde(flatten)]
    pub catalog: CatalogStats,
    /// This process's.
    pub transfer: TransferStats,
}

/// What this process moved.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TransferStats {
    /// Puts finished.
    pub puts: u64,
    /// Payload bytes written.
    pub put_bytes: u64,
    /// Bytes that this payload takes on disk: encoded, with headers and padding.
    pub put_stored_bytes: u64,
    /// Seconds spent in puts, all threads together.
    pub put_seconds: f64,
    /// Gets finished.
    pub gets: u64,
    /// Payload bytes read and verified.
    pub get_bytes: u64,
    /// Seconds spent in gets, all threads together.
    pub get_seconds: f64,
    /// Pages read and verified.
    pub pages_read: u64,
    /// Pages that were located but could not be had.
    pub pages_missed: u64,
    /// Pages not taken because staging was full.
    pub staging_refusals: u64,
    /// Staging memory in use now, in bytes.
    pub staging_bytes: u64,
}

impl Store {
    /// A store over a catalog. `staging` bounds the memory that copies and unaligned reads take.
    #[must_use]
    pub fn new(
        catalog: Arc<dyn Catalog>,
        segments: Arc<Segments>,
        staging: Arc<Staging>,
    ) -> Arc<Self> {
        Arc::new(Self {
            catalog,
            segments,
            staging,
            moved: Moved::default(),
            scopes: RwLock::default(),
            workers: Workers::new(),
            process: process_id(),
            closed: AtomicBool::new(false),
        })
    }

    /// Changes capacity or directories, of a store that is in use. Returns when it is done.
    ///
    /// # Errors
    /// `Retry` if that takes longer than some minutes: it is done in the background then. `Invalid`
    /// for what cannot be.
    pub fn reshape(&self, change: &Reshape) -> Result<()> {
        self.check_process()?;
        self.catalog.reshape(change)
    }

    /// Sets the capacity, in bytes: see [`Store::reshape`].
    ///
    /// # Errors
    /// As there.
    pub fn resize(&self, capacity: u64) -> Result<()> {
        self.reshape(&Reshape::Capacity(capacity))
    }

    /// Sets what is to hold for a scope, durably, and registers the scope if it is new: what is not
    /// named in `settings` goes back to the default. Pages that are there keep their encoding; a
    /// quota below what the scope holds evicts from it at once.
    ///
    /// # Errors
    /// `Invalid` for a codec that the scope's numbers do not suit, more to retain than the quota, or
    /// a scope stored with another description.
    pub fn configure(&self, scope: &Scope, settings: &ScopeSettings) -> Result<()> {
        self.retry_stale(scope, true, |found| match found {
            Some(reference) => self.catalog.configure(reference, settings),
            None => Err(Error::retry("the scope was dropped meanwhile")),
        })?;
        self.forget(scope);
        Ok(())
    }

    /// Number of leading pages that can be had.
    ///
    /// # Errors
    /// `Invalid` for malformed keys or a scope stored with another description.
    pub fn probe(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        check_keys(keys)?;
        self.with_scope(scope, 0, |scope| self.catalog.probe(scope, keys))
    }

    /// Like `probe`, with a lease that keeps the pages readable for `ttl` or until released.
    ///
    /// # Errors
    /// Like `probe`; `Retry` if there are too many leases.
    pub fn lease(&self, scope: &Scope, keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        check_keys(keys)?;
        let none = Leased { pages: 0, lease: LeaseNumber::default() };
        self.with_scope(scope, none, |scope| self.catalog.lease(scope, keys, ttl))
    }

    /// Ends a lease, of this process or another.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn release(&self, lease: LeaseNumber) -> Result<()> {
        self.check_process()?;
        if lease == LeaseNumber::default() { Ok(()) } else { self.catalog.release(lease) }
    }

    /// Which pages are there, each by itself.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn exists(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Vec<bool>> {
        check_keys(keys)?;
        self.with_scope(scope, vec![false; keys.len()], |s| self.catalog.exists(s, keys))
    }

    /// Stores pages; those that are there already are skipped. `source` has one page a key.
    ///
    /// # Errors
    /// `Invalid` for bad keys, sizes or scopes; what cannot be stored otherwise is in the outcome.
    pub fn put_batch(
        &self,
        scope: &Scope,
        keys: &[&[u8]],
        source: &dyn PageSource,
        terms: &Terms,
        control: &Control,
    ) -> Result<Outcome> {
        self.check_batch(keys, source.len())?;
        let started = Instant::now();
        let outcome = self.retry_stale(scope, true, |found| match found {
            Some(reference) => self.put(reference, scope, keys, source, terms, control),
            None => Err(Error::retry("the scope could not be registered")),
        })?;
        Ok(outcome.timed(started.elapsed()))
    }

    /// Reads the leading pages into `target`, one page a key. A page counts when it is verified.
    ///
    /// # Errors
    /// Like `put_batch`.
    pub fn get_batch(
        &self,
        scope: &Scope,
        keys: &[&[u8]],
        target: &dyn PageTarget,
        control: &Control,
    ) -> Result<Outcome> {
        self.check_batch(keys, target.len())?;
        let started = Instant::now();
        let outcome = self.retry_stale(scope, false, |found| match found {
            Some(scope) => self.get(scope, keys, target, control),
            None => Ok(Outcome::none(keys.len(), if keys.is_empty() { "" } else { "absent" })),
        })?;
        Ok(outcome.timed(started.elapsed()))
    }

    /// Starts a put. `source` must not change until the ticket is done.
    ///
    /// # Errors
    /// `Invalid` for bad keys or sizes; `Retry` if too many tickets wait.
    pub fn submit_put(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        source: Arc<dyn PageSource>,
        terms: Terms,
        control: Control,
    ) -> Result<Ticket> {
        let pages = source.len();
        self.submit(Lane::Put, keys, pages, control, move |store, keys, control| {
            store.put_batch(&scope, keys, source.as_ref(), &terms, control)
        })
    }

    /// Starts a put of bytes that are copied into staging before this returns. What finds no room
    /// there is skipped, from the first such page on.
    ///
    /// # Errors
    /// Like `submit_put`.
    pub fn submit_put_copy(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        mut keys: Vec<Box<[u8]>>,
        source: &dyn PageSource,
        terms: Terms,
        control: Control,
    ) -> Result<Ticket> {
        let asked = keys.len();
        {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            self.check_batch(&keys, source.len())?;
        }
        // Pages that are stored already need no copy, unless the put must say how long to keep them.
        let first = if terms.retain_until > 0 {
            0
        } else {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            self.probe(&scope, &keys)?
        };
        let staged = self.staging.copy_leading(source, first..asked);
        let taken = staged.len();
        self.moved.staging_refusals.add((asked - first - taken) as u64);
        let parent = first.checked_sub(1).map(|before| keys[before].clone()).or(terms.parent);
        let terms = Terms { parent, ..terms };
        keys.truncate(first + taken);
        let keys = keys.split_off(first);
        if taken == 0 {
            let ticket = Ticket::new()?;
            let mut outcome = Outcome::none(asked, if first < asked { "staging_full" } else { "" });
            outcome.pages = first;
            outcome.ok[..first].fill(true);
            ticket.finish(outcome);
            return Ok(ticket);
        }
        self.submit(Lane::Put, keys, taken, control, move |store, keys, control| {
            let mut outcome = store.put_batch(&scope, keys, &staged, &terms, control)?;
            if outcome.reason.is_empty() && first + taken < asked {
                outcome.reason = "staging_full";
            }
            outcome.pages += first;
            let mut ok = vec![true; first];
            ok.append(&mut outcome.ok);
            ok.resize(asked, false);
            outcome.ok = ok;
            Ok(outcome)
        })
    }

    /// Starts a get. `target` belongs to the store until the ticket is done.
    ///
    /// # Errors
    /// Like `submit_put`.
    pub fn submit_get(
        self: &Arc<Self>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        target: Arc<dyn PageTarget>,
        control: Control,
    ) -> Result<Ticket> {
        let pages = target.len();
        self.submit(Lane::Get, keys, pages, control, move |store, keys, control| {
            store.get_batch(&scope, keys, target.as_ref(), control)
        })
    }

    fn submit(
        self: &Arc<Self>,
        lane: Lane,
        keys: Vec<Box<[u8]>>,
        pages: usize,
        control: Control,
        work: impl FnOnce(&Self, &[&[u8]], &Control) -> Result<Outcome> + Send + 'static,
    ) -> Result<Ticket> {
        {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            self.check_batch(&keys, pages)?;
        }
        let ticket = Ticket::new()?;
        let (store, handle) = (Arc::clone(self), ticket.clone());
        let control = Control { cancelled: Some(ticket.cancelled()), ..control };
        let job = move |closing: Closing| {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            let outcome = match closing {
                Closing::Yes => Outcome::none(keys.len(), "closed"),
                Closing::No => attempt(keys.len(), || work(&store, &keys, &control)),
            };
            handle.finish(outcome);
        };
        self.workers.submit(lane, Box::new(job))?;
        Ok(ticket)
    }

    /// Counts as a use of the leading pages; returns their number.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn touch(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        check_keys(keys)?;
        self.with_scope(scope, 0, |scope| self.catalog.touch(scope, keys))
    }

    /// Removes pages; in chained scopes with all behind them. Returns how many of `keys` went.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn delete(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        check_keys(keys)?;
        self.with_scope(scope, 0, |scope| self.catalog.delete(scope, keys))
    }

    /// Forgets a scope and its pages, durably at once. The bytes stay until overwritten.
    ///
    /// # Errors
    /// Like `probe`.
    pub fn drop_scope(&self, scope: &Scope) -> Result<()> {
        self.with_scope(scope, (), |scope| self.catalog.drop_scope(scope))?;
        self.forget(scope);
        Ok(())
    }

    /// Drops every scope.
    ///
    /// # Errors
    /// `Fatal` if the store is poisoned.
    pub fn clear(&self) -> Result<()> {
        self.check_process()?;
        self.scopes.write().clear();
        self.catalog.clear()
    }

    /// Everything put before survives power loss.
    ///
    /// # Errors
    /// `Fatal` if the store is poisoned.
    pub fn flush(&self) -> Result<()> {
        self.check_process()?;
        self.catalog.flush()
    }

    /// Figures.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn stats(&self) -> Result<StoreStats> {
        self.check_process()?;
        let moved = &self.moved;
        Ok(StoreStats {
            catalog: self.catalog.stats()?,
            transfer: TransferStats {
                puts: moved.puts.get(),
                put_bytes: moved.put_bytes.get(),
                put_stored_bytes: moved.put_stored_bytes.get(),
                put_seconds: moved.put_micros.get() as f64 / 1e6,
                gets: moved.gets.get(),
                get_bytes: moved.get_bytes.get(),
                get_seconds: moved.get_micros.get() as f64 / 1e6,
                pages_read: moved.pages_read.get(),
                pages_missed: moved.pages_missed.get(),
                staging_refusals: moved.staging_refusals.get(),
                staging_bytes: self.staging.stats().in_use as u64,
            },
        })
    }

    /// Bounded memory for copies and unaligned transfers.
    #[must_use]
    pub fn staging(&self) -> &Arc<Staging> {
        &self.staging
    }

    /// Finishes the tickets that run, answers those that wait, and refuses what comes later.
    pub fn close(&self) {
        if process_id() == self.process && !self.closed.swap(true, Ordering::AcqRel) {
            self.workers.close();
        }
    }

    /// Refuses a closed handle, and one that was opened before a fork: the child has neither the
    /// threads nor the locks that the handle relies on.
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

    fn check_batch(&self, keys: &[&[u8]], pages: usize) -> Result<()> {
        self.check_process()?;
        check_keys(keys)?;
        if keys.len() == pages {
            return Ok(());
        }
        Err(Error::invalid("there must be one page a key")
            .with("keys", keys.len())
            .with("pages", pages))
    }

    fn with_scope<T>(
        &self,
        scope: &Scope,
        unknown: T,
        ask: impl Fn(ScopeRef) -> Result<T>,
    ) -> Result<T> {
        let mut unknown = Some(unknown);
        self.retry_stale(scope, false, |found| match (found, unknown.take()) {
            (Some(reference), kept) => {
                unknown = kept;
                ask(reference)
            }
            (None, Some(answer)) => Ok(answer),
            (None, None) => Err(Error::retry("the scope was dropped meanwhile")),
        })
    }

    /// Resolves the scope and asks. An answer of `Retry` may mean that another process dropped the
    /// scope, or that the owner changed in the middle of a put: resolves and asks anew, a few
    /// times and not for long.
    fn retry_stale<T>(
        &self,
        scope: &Scope,
        create: bool,
        mut ask: impl FnMut(Option<ScopeRef>) -> Result<T>,
    ) -> Result<T> {
        self.check_process()?;
        // Asked for at the first refusal only: a clock costs as much as a probe.
        let (mut refused, mut attempts) = (None, 0);
        loop {
            match ask(self.resolve(scope, create)?) {
                Err(error) if error.kind() == ErrorKind::Retry => {
                    attempts += 1;
                    let late = refused.get_or_insert_with(Instant::now).elapsed() > RETRY_FOR;
                    if late || attempts == ATTEMPTS {
                        return Err(error);
                    }
                    self.forget(scope);
                }
                answer => return answer,
            }
        }
    }

    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        if let Some((reference, _)) = self.scopes.read().iter().find(|(_, known)| known == scope) {
            return Ok(Some(*reference));
        }
        let found = self.catalog.resolve(scope, create)?;
        if let Some(reference) = found {
            let mut scopes = self.scopes.write();
            if scopes.len() >= SCOPES_KNOWN {
                scopes.remove(0);
            }
            scopes.push((reference, scope.clone()));
        }
        Ok(found)
    }

    fn forget(&self, scope: &Scope) {
        self.scopes.write().retain(|(_, known)| known != scope);
    }
}

/// Runs a ticket's work. Whatever becomes of it, the ticket is done: somebody waits for it.
fn attempt(pages: usize, work: impl FnOnce() -> Result<Outcome>) -> Outcome {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => {
            // Being closed is not a fault: the outcome says it.
            if error.kind() != ErrorKind::Closed {
                tracing::warn!(%error, "a ticket failed");
            }
            Outcome::none(pages, error.kind().word())
        }
        Err(_) => Outcome::none(pages, "panic"),
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}
