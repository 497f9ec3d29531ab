//! The catalog of a process that has the store open. Calls go to the core while this process owns
//! the store, otherwise to the owning process. The catalog fails over when the owner dies.

use crate::membership::{Membership, closed};
use crate::open_context::OpenContext;
use crate::owner_epoch::{FlushMark, Unflushed};
use crate::owner_lost::is_owner_lost;
use crate::pending_reservations::PendingReservations;
use crate::process::Process;
use crate::protocol::RESERVE_TIMEOUT_MAX;
use parking_lot::{Mutex, RwLock};
use ritornello_format::{Error, Result};
use ritornello_store::rule::{CallRule, CallWait, Effect, Reservation, Unanswered};
use ritornello_store::{Catalog, OwnerSilent, Request, Response, StoreReopening};
use ritornello_volume::Segments;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Maximum duration of a call through a client, including a takeover.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum duration of a call that waits for a disk: a commit in `durable` mode, `flush`, `clear`.
const DISK_CALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum time to wait for writes in progress when closing.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum time that opening waits for an owner that reopens the store.
const REOPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// Retries without a pause; an owner that closes the connection more often is retried after
/// [`RETRY_PAUSE`].
const QUICK_RETRIES: u32 = 3;
/// The pause before each further retry.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Shortest pause after a search that found no owner; calls during the pause fail immediately.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after a search that found no owner.
const SEARCH_PAUSE_MAX: Duration = Duration::from_secs(5);

/// See the module documentation.
pub(crate) struct FailoverCatalog {
    process: Process,
    pub(crate) opening: OpenContext,
    pub(crate) store: [u8; 16],
    pub(crate) membership: RwLock<Arc<Membership>>,
    /// Held by the call that searches for a new owner. Other calls wait for it and use its result,
    /// unless the last search failed.
    pub(crate) changing: Mutex<Option<FailedSearch>>,
    /// The last search failed, because the owner reopens the store or the store cannot be opened.
    is_reopening: AtomicBool,
    pub(crate) reservations: PendingReservations<Arc<Membership>>,
    unflushed: Unflushed,
    /// The segments that calls of this process read and write.
    pub(crate) segments: OnceLock<Weak<Segments>>,
    /// Number of times that this process has reopened the store.
    pub(crate) reopenings: AtomicU64,
    /// Whether calls fail with `Closed` because the store's path no longer leads to it.
    pub(crate) leaving: AtomicBool,
    /// Whether another store has replaced this store at the path, and this store is closed.
    pub(crate) replaced: AtomicBool,
}

/// A search for an owner that failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedSearch {
    at: Instant,
    /// Time until the next search.
    pause: Duration,
    /// Whether the owner reopens the store; otherwise it is silent.
    reopening: bool,
}

impl FailoverCatalog {
    /// Becomes owner or client.
    ///
    /// # Errors
    /// Any error of [`Membership::join`].
    pub(crate) fn open(mut opening: OpenContext, until: Instant) -> Result<Self> {
        let membership = Membership::join(&opening, until, REOPENING_TIMEOUT, false)
            .inspect_err(|_| opening.directory.lock.close())?;
        // A later takeover opens the store with its settings at that time: it may have been
        // resized.
        opening.options.capacity = None;
        opening.options.paths.clear();
        opening.options.index = None;
        Ok(Self {
            process: Process::current(),
            opening,
            store: membership.epoch().map(|epoch| epoch.store).unwrap_or_default(),
            membership: RwLock::new(Arc::new(membership)),
            changing: Mutex::new(None),
            is_reopening: AtomicBool::new(false),
            reservations: PendingReservations::new(),
            unflushed: Unflushed::default(),
            segments: OnceLock::new(),
            reopenings: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            replaced: AtomicBool::new(false),
        })
    }

    /// Returns the current membership of this process.
    pub(crate) fn membership(&self) -> Arc<Membership> {
        Arc::clone(&self.membership.read())
    }

    /// Returns whether this process owns the store and no thread waits to change that: a call then
    /// waits for no process and no lock of the membership. Never waits.
    pub(crate) fn answers_at_once(&self) -> bool {
        // A waiting writer blocks new readers until the calls in progress end.
        let membership = self.membership.try_read();
        membership.is_some_and(|membership| matches!(&**membership, Membership::Owner(_)))
    }

    /// Identity of the store.
    pub(crate) fn store(&self) -> [u8; 16] {
        self.store
    }

    /// Waits for writes and calls in progress, ends the membership and closes the lock file.
    ///
    /// # Errors
    /// `Retry` if a write or call is still in progress: the lock is kept, because the next owner
    /// would reuse the space of those writes. Otherwise the error of the last sync, and the store
    /// is closed.
    pub(crate) fn close(&self) -> Result<()> {
        let until = Instant::now() + CLOSE_TIMEOUT;
        let directory = &self.opening.directory;
        let busy = || {
            Error::retry("calls are still in progress: close again later")
                .with("dir", directory.path().display())
        };
        self.opening.closing.store(true, Ordering::Release);
        self.opening.heal_signal.stop();
        if !self.reservations.close(until) {
            return Err(busy());
        }
        let _turn = self.changing.try_lock_until(until).ok_or_else(&busy)?;
        let mut membership = self.membership.try_write_until(until).ok_or_else(&busy)?;
        let closed = membership.close()?;
        *membership = Arc::new(Membership::Closed);
        directory.lock.close();
        closed
    }

    /// Sends `request` to the owner, and to the next owner if the owner dies. Returns the response
    /// and the membership that answered.
    fn call_owner(
        &self,
        request: &Request<'_>,
        rule: &CallRule,
    ) -> Result<(Response, Arc<Membership>)> {
        let mut until = None;
        let mut losses = 0;
        loop {
            if self.is_leaving() {
                return Err(closed());
            }
            let held = self.membership.read();
            // The guard is held during a call of the local core, so that closing waits for the
            // call.
            if let Membership::Owner(owner) = &**held {
                return owner.catalog().call(request).map(|response| (response, Arc::clone(&held)));
            }
            let membership = Arc::clone(&held);
            drop(held);
            let client = match &*membership {
                Membership::Client(client) => client,
                Membership::Reopening(reopening) if rule.unanswered == Unanswered::LastFigures => {
                    let stats = Response::Stats(Box::new(reopening.stats()));
                    return Ok((stats, membership));
                }
                Membership::Reopening(reopening) => return Err(reopening.error()),
                Membership::Owner(_) | Membership::Leaving(_) | Membership::Closed => {
                    return Err(closed());
                }
            };
            let until = *until.get_or_insert_with(|| Instant::now() + timeout_of(rule));
            let error = match client.call(request, until) {
                Ok(response) => return Ok((response, membership)),
                Err(error) => error,
            };
            if !is_owner_lost(&error) || Instant::now() >= until {
                return Err(error);
            }
            losses += 1;
            if losses > QUICK_RETRIES {
                std::thread::sleep(RETRY_PAUSE);
            }
            self.change(&membership, until)?;
        }
    }

    /// Takes over from an owner that died, as any call would.
    ///
    /// # Errors
    /// [`OwnerSilent`] if the owner does not respond; `Closed` if the store is closed or being
    /// left; any error of [`Membership::join`].
    pub(crate) fn ensure_owner(&self) -> Result<()> {
        self.process.check()?;
        if self.is_leaving() {
            return Err(closed());
        }
        let membership = self.membership();
        let client = match &*membership {
            Membership::Owner(_) | Membership::Reopening(_) => return Ok(()),
            Membership::Client(client) => client,
            Membership::Leaving(_) | Membership::Closed => return Err(closed()),
        };
        match client.check_responsive() {
            Err(error) if is_owner_lost(&error) => {
                self.change(&membership, Instant::now() + CALL_TIMEOUT)
            }
            responsive => responsive,
        }
    }

    /// Returns why no space can be reserved now: the store is closed, or about to be reopened.
    fn refusal(&self) -> Error {
        let is_open = !self.opening.closing.load(Ordering::Acquire) && !self.is_leaving();
        match &*self.membership() {
            Membership::Reopening(reopening) => reopening.error(),
            Membership::Owner(owner) if is_open => {
                StoreReopening::error(&owner.core().poisoned().unwrap_or_default())
            }
            _ => closed(),
        }
    }

    /// Returns the problem that prevents full use of the store, if any: the owner's last write or
    /// sync failed and the store is not reopened yet, or the owner does not answer.
    pub(crate) fn problem(&self) -> Option<String> {
        match &*self.membership() {
            Membership::Owner(_) | Membership::Reopening(_) => self.failure(),
            Membership::Client(_) => match self.stats() {
                Ok(stats) => stats.poisoned,
                Err(error) => Some(error.to_string()),
            },
            Membership::Leaving(_) | Membership::Closed => Some(closed().to_string()),
        }
    }

    /// Returns the failure in this process while it owns the store and has not reopened it.
    pub(crate) fn failure(&self) -> Option<String> {
        match &*self.membership() {
            Membership::Owner(owner) => owner.core().poisoned(),
            Membership::Reopening(reopening) => Some(reopening.cause().to_owned()),
            Membership::Client(_) | Membership::Leaving(_) | Membership::Closed => None,
        }
    }

    /// Closes the membership and the lock permanently, so that the process can open the store that
    /// is now in the directory while old handles still exist. Returns the error for calls on the
    /// replaced store. The caller holds `changing`.
    pub(crate) fn close_as_replaced(&self) -> Error {
        *self.membership.write() = Arc::new(Membership::Closed);
        self.opening.directory.lock.close();
        self.replaced.store(true, Ordering::Release);
        Error::fatal("another store has replaced this store: open it again")
            .with("dir", self.opening.directory.path().display())
    }

    /// Closes this process's segment files before a new owner is used. The former owner may have
    /// removed segments, or failed to create them, whose numbers the new owner reuses; and a fault
    /// may have ended in a new mount. Earlier reservations can no longer be committed.
    pub(crate) fn close_segments(&self) {
        if let Some(segments) = self.segments.get().and_then(Weak::upgrade) {
            segments.close_all();
        }
    }

    /// Returns whether calls are refused because the store's path no longer leads to it.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Returns whether another store has replaced this store. Never waits.
    pub(crate) fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Acquire)
    }

    /// Replaces the membership `lost`, unless another call has replaced it.
    ///
    /// # Errors
    /// [`OwnerSilent`] if a process holds the lock and does not listen: after the full timeout the
    /// first time, then immediately. [`StoreReopening`], immediately, if the owner reopens the
    /// store.
    fn change(&self, lost: &Arc<Membership>, until: Instant) -> Result<()> {
        let silent = || {
            OwnerSilent::error(
                self.opening.directory.lock.holder().ok().flatten().map_or(0, |h| h.0),
            )
        };
        let refused = || StoreReopening::error("its owner's log says more");
        let mut failed_search = if self.is_reopening.load(Ordering::Acquire) {
            self.changing.try_lock().ok_or_else(refused)?
        } else {
            self.changing.try_lock_until(until).ok_or_else(silent)?
        };
        if !Arc::ptr_eq(&self.membership.read(), lost) {
            return Ok(());
        }
        let until = match *failed_search {
            Some(FailedSearch { at, pause, reopening }) if at.elapsed() < pause => {
                return Err(if reopening { refused() } else { silent() });
            }
            Some(_) => Instant::now(),
            None => until,
        };
        let began = Instant::now();
        let taken = Membership::join(&self.opening, until, Duration::ZERO, true);
        let reopening = taken.as_ref().is_err_and(StoreReopening::caused);
        let failed = reopening || taken.as_ref().is_err_and(OwnerSilent::caused);
        // A store that takes long to fail to open is tried less often, so that it delays few calls.
        let longest = if reopening { SEARCH_PAUSE_MAX } else { SEARCH_PAUSE };
        let pause = began.elapsed().saturating_mul(4).clamp(SEARCH_PAUSE, longest);
        *failed_search = failed.then(|| FailedSearch { at: Instant::now(), pause, reopening });
        self.is_reopening.store(reopening, Ordering::Release);
        let membership = taken?;
        if membership.epoch().map(|epoch| epoch.store) != Some(self.store) {
            let _ = membership.close();
            return Err(self.close_as_replaced());
        }
        let role = membership.role().word();
        let dir = self.opening.directory.path().display();
        tracing::info!(role, %dir, "the store's owner has ended");
        self.close_segments();
        let old = std::mem::replace(&mut *self.membership.write(), Arc::new(membership));
        drop(old);
        // The core may have been poisoned before this membership was visible to the heal thread.
        self.opening.heal_signal.notify();
        Ok(())
    }
}

impl Catalog for FailoverCatalog {
    fn call(&self, request: &Request<'_>) -> Result<Response> {
        self.process.check()?;
        let rule = &request.rule();
        let mark = (rule.effect == Effect::Flushes).then(|| self.unflushed.mark());
        let called = match rule.reservation {
            Reservation::Unrelated => self.call_owner(request, rule),
            Reservation::Begins => self.reserve_space(request, rule),
            Reservation::Commits(number) => self.commit_once(request, rule, number),
            Reservation::Aborts(number) => match self.reservations.remove(number) {
                Some(_) => self.call_owner(request, rule),
                None => return Ok(Response::Done),
            },
        };
        let (response, issuer) = match (called, rule.unanswered) {
            (Err(error), Unanswered::Later(call)) if OwnerSilent::caused(&error) => {
                if let Membership::Client(client) = &*self.membership() {
                    client.call_later(call);
                }
                return Ok(Response::Done);
            }
            // Leases and reservations end with the core that granted them.
            (Err(error), Unanswered::Later(_)) if StoreReopening::caused(&error) => {
                return Ok(Response::Done);
            }
            (called, _) => called?,
        };
        if let Some(mark) = mark {
            self.complete_flush(mark, &issuer)?;
        }
        if rule.effect == Effect::Acknowledges
            && acknowledges(&response)
            && let Some(epoch) = issuer.epoch()
        {
            self.unflushed.note(epoch);
        }
        Ok(response)
    }
}

/// Maximum duration of the call, including a takeover.
fn timeout_of(rule: &CallRule) -> Duration {
    match rule.wait {
        CallWait::Nothing => CALL_TIMEOUT,
        CallWait::Disk => DISK_CALL_TIMEOUT,
        CallWait::Space(timeout) => CALL_TIMEOUT + timeout.min(RESERVE_TIMEOUT_MAX),
    }
}

/// Whether the response to a request that may acknowledge pages does so.
fn acknowledges(response: &Response) -> bool {
    match response {
        // The commit of granted runs acknowledges them. Without such runs no commit follows: the
        // put is acknowledged with the pages that this owner reports, which may belong to another
        // client and may not be durable.
        Response::Reserved(reserved) => reserved.runs.is_empty() && reserved.present > 0,
        Response::Count(pages) => *pages > 0,
        _ => true,
    }
}

/// Requests that need more than an answer.
impl FailoverCatalog {
    fn reserve_space(
        &self,
        request: &Request<'_>,
        rule: &CallRule,
    ) -> Result<(Response, Arc<Membership>)> {
        if !self.reservations.begin() {
            return Err(self.refusal());
        }
        let called = self.call_owner(request, rule);
        let granted = match &called {
            Ok((Response::Reserved(reserved), issuer)) if !reserved.runs.is_empty() => {
                Some((reserved.id, Arc::clone(issuer)))
            }
            _ => None,
        };
        self.reservations.complete(granted);
        called
    }

    /// Sends the request to the issuer of the reservation, once.
    fn commit_once(
        &self,
        request: &Request<'_>,
        rule: &CallRule,
        reservation: u64,
    ) -> Result<(Response, Arc<Membership>)> {
        let issuer = self.reservations.issuer(reservation).ok_or_else(|| {
            Error::invalid("this reservation was committed or aborted")
                .with("reservation", reservation)
        })?;
        let committed = match &*issuer {
            Membership::Owner(owner) => owner.catalog().call(request),
            Membership::Client(client) => client.call(request, Instant::now() + timeout_of(rule)),
            Membership::Reopening(reopening) => Err(reopening.error()),
            Membership::Leaving(_) | Membership::Closed => Err(closed()),
        }?;
        self.reservations.remove(reservation);
        Ok((committed, issuer))
    }

    /// Fails with `Miss`, once, if an owner died, or its core failed and was reopened, after it had
    /// acknowledged puts or deletes to this process that no flush has covered, whether the process
    /// wrote the pages or found them present.
    fn complete_flush(&self, mark: FlushMark, flushed: &Membership) -> Result<()> {
        let is_preserved = mark
            .owner
            .is_none_or(|owner| flushed.epoch().is_some_and(|epoch| epoch.preserves(owner)));
        self.unflushed.complete_flush(mark);
        if is_preserved {
            return Ok(());
        }
        Err(Error::miss(
            "the owner died or a write failed since the last flush; puts and deletes since then \
             may be lost: repeat them",
        ))
    }
}
