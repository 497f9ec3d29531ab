//! The catalog of a process that has the store open. Calls go to the core while this process owns
//! the store, otherwise to the owning process. The catalog fails over when the owner dies.

use crate::current_membership::{CALL_TIMEOUT, CurrentMembership};
use crate::lock::closed;
use crate::membership::Membership;
use crate::open_context::OpenContext;
use crate::owner_lost::is_owner_lost;
use crate::process::Process;
use crate::protocol::{OwnerEpoch, RESERVE_TIMEOUT_MAX};
use crate::reports::Reports;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};
use ritornello_store::rule::{CallRule, CallWait, Effect, Reservation, Unanswered};
use ritornello_store::{Catalog, OwnerSilent, Request, Response, StoreReopening};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time that a client's call waits for an owner that may wait for a disk, as for a commit,
/// `flush` or `clear`. As with [`CALL_TIMEOUT`], this includes the wait for the next owner if the
/// owner dies, but not the recovery of the store if this process becomes the owner.
const DISK_CALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum time to wait for writes and calls in progress when closing.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(90);
/// Number of retries of one call that are made without a pause after its owner was lost; each
/// further retry first waits for [`RETRY_PAUSE`].
const QUICK_RETRIES: u32 = 3;
/// The pause before each retry after the first [`QUICK_RETRIES`].
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// See the module documentation.
pub(crate) struct FailoverCatalog {
    process: Process,
    pub(crate) membership: CurrentMembership,
    pub(crate) reservations: PendingReservations,
    unflushed: Unflushed,
    pub(crate) reports: Reports,
}

impl FailoverCatalog {
    /// Becomes owner or client.
    ///
    /// # Errors
    /// Any error of [`CurrentMembership::open`].
    pub(crate) fn open(opening: OpenContext, until: Instant) -> Result<Self> {
        Ok(Self {
            process: Process::current(),
            membership: CurrentMembership::open(opening, until)?,
            reservations: PendingReservations::default(),
            unflushed: Unflushed::default(),
            reports: Reports::default(),
        })
    }

    /// Waits for writes and calls in progress, ends the membership and closes the lock file.
    ///
    /// # Errors
    /// `Retry` if a write or call is still in progress, or a disk does not answer. The lock is then
    /// kept, because the next owner would reuse the space of the writes in progress. After any
    /// other error the store is closed, and its last changes may be lost.
    pub(crate) fn close(&self) -> Result<()> {
        let until = Instant::now() + CLOSE_TIMEOUT;
        let opening = &self.membership.opening;
        let busy = || {
            Error::retry("calls are still in progress: close again later")
                .with("dir", opening.directory.path().display())
        };
        opening.closing.store(true, Ordering::Release);
        opening.heal_signal.stop();
        if !self.reservations.close(until) {
            return Err(busy());
        }
        self.report_to_owner();
        let guard = self.membership.begin_change(until).ok_or_else(busy)?;
        guard.try_close(until).ok_or_else(busy)??
    }

    /// Sends a request to the core of this process. Returns `None` unless this process owns the
    /// store and is not leaving it. The probes and gets of the owner's process take this path.
    /// Only [`Self::call_owner`] also returns the membership that answered.
    fn ask_own_core(&self, request: &Request<'_>) -> Option<Result<Response>> {
        if self.membership.is_leaving() {
            return None;
        }
        // The read guard is held during the call, so that closing waits for the call.
        match &**self.membership.read() {
            Membership::Owner(owner) => Some(owner.catalog.call(request)),
            _ => None,
        }
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
            if self.membership.is_leaving() {
                let held = self.membership.try_get();
                return held.and_then(|held| last_figures(rule, &held)).ok_or_else(closed);
            }
            let held = self.membership.read();
            // Hold the guard during a call of the local core, so that closing waits for the call.
            if let Membership::Owner(owner) = &**held {
                return owner.catalog.call(request).map(|response| (response, Arc::clone(&held)));
            }
            let membership = Arc::clone(&held);
            drop(held);
            let client = match &*membership {
                Membership::Client(client) => client,
                Membership::Reopening(reopening) => {
                    return last_figures(rule, &membership).ok_or_else(|| reopening.error());
                }
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
            self.membership.fail_over(&membership, until)?;
        }
    }

    /// Sends the reports since the last call: see [`Reports::send`]. Does not fail over: a process
    /// that makes no calls does not become the owner.
    pub(crate) fn report_to_owner(&self) {
        if let Some(membership) = self.membership.try_get() {
            self.reports.send(&membership);
        }
    }

    /// Returns the problem that prevents full use of the store, if any: a write or sync of the
    /// owner failed and the store is not reopened yet, the owner does not answer, or this process
    /// leaves or has closed the store.
    pub(crate) fn problem(&self) -> Option<String> {
        match &*self.membership.get() {
            Membership::Owner(_) | Membership::Reopening(_) => self.membership.failure(),
            Membership::Client(_) => match self.stats() {
                Ok(stats) => stats.poisoned,
                Err(error) => Some(error.to_string()),
            },
            Membership::Leaving(_) | Membership::Closed => Some(closed().to_string()),
        }
    }
}

impl Catalog for FailoverCatalog {
    fn call(&self, request: &Request<'_>) -> Result<Response> {
        self.process.check()?;
        // Keep a report: the thread of `crate::heal` sends it later, so that this call costs no
        // message.
        if self.reports.keep(request) {
            return Ok(Response::Done);
        }
        if let Request::Stats | Request::Decisions { .. } | Request::ExplainRequest { .. } = request
        {
            self.report_to_owner();
        }
        let rule = &request.rule();
        if rule.is_question()
            && let Some(answer) = self.ask_own_core(request)
        {
            return answer;
        }
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
                if let Membership::Client(client) = &*self.membership.get() {
                    client.call_later(call);
                }
                return Ok(Response::Done);
            }
            // A release or an abort needs no repetition: leases and reservations end with the core
            // that granted them.
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

/// Returns the maximum time that a client's call to which `rule` applies waits for owners; see
/// [`CALL_TIMEOUT`].
fn timeout_of(rule: &CallRule) -> Duration {
    match rule.wait {
        CallWait::Nothing => CALL_TIMEOUT,
        CallWait::Disk => DISK_CALL_TIMEOUT,
        CallWait::Space(timeout) => CALL_TIMEOUT + timeout.min(RESERVE_TIMEOUT_MAX),
    }
}

/// Returns the last statistics of the failed core that this process reopens or leaves, if the
/// request asks for statistics.
fn last_figures(
    rule: &CallRule,
    membership: &Arc<Membership>,
) -> Option<(Response, Arc<Membership>)> {
    if rule.unanswered != Unanswered::LastFigures {
        return None;
    }
    let stats = Response::Stats(Box::new(membership.last_figures()?));
    Some((stats, Arc::clone(membership)))
}

/// Whether `response`, to a request with the effect [`Effect::Acknowledges`], acknowledges any put
/// or delete.
fn acknowledges(response: &Response) -> bool {
    match response {
        // If runs were granted, their commit acknowledges the put. Otherwise no commit follows, and
        // this response acknowledges the pages that the owner reports as present; another client
        // may have put them, and they may not be durable.
        Response::Reserved(reserved) => reserved.runs.is_empty() && reserved.present > 0,
        Response::Count(pages) => *pages > 0,
        _ => true,
    }
}

/// Requests that also change this process's records of reservations and acknowledgements.
impl FailoverCatalog {
    fn reserve_space(
        &self,
        request: &Request<'_>,
        rule: &CallRule,
    ) -> Result<(Response, Arc<Membership>)> {
        if !self.reservations.begin() {
            return Err(self.membership.refusal());
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

    /// Sends a commit to the owner that issued the reservation, without retrying: the next owner
    /// does not know the reservation.
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
            Membership::Owner(owner) => owner.catalog.call(request),
            Membership::Client(client) => client.call(request, Instant::now() + timeout_of(rule)),
            Membership::Reopening(reopening) => Err(reopening.error()),
            Membership::Leaving(_) | Membership::Closed => Err(closed()),
        }?;
        self.reservations.remove(reservation);
        Ok((committed, issuer))
    }

    /// Ends a flush that began at `mark` and was answered through the membership `flushed`. Fails
    /// with `Miss`, once, if puts or deletes that an earlier owner acknowledged to this process may
    /// be lost. They may be lost if the owner died, or its core failed and was reopened, before a
    /// flush covered them (see [`Unflushed`]). A put also acknowledges pages that this process
    /// found present and did not write.
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

/// Reservations to whose space this process may be writing, by number, each with the owner that
/// issued it.
///
/// After a failover, this process's client of the former owner is kept as long as one of its
/// reservations is pending: the client's name stays locked, so that the new owner withholds the
/// reserved space.
#[derive(Default)]
pub(crate) struct PendingReservations {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    open: HashMap<u64, Arc<Membership>>,
    /// Number of requests for space ([`Reservation::Begins`]) that have no response yet.
    in_flight: usize,
    closed: bool,
}

impl PendingReservations {
    /// Begins a request for space. Returns `false` if reservations are closed.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.in_flight += usize::from(!state.closed);
        !state.closed
    }

    /// Ends a request for space, and adds its reservation, if any.
    fn complete(&self, reserved: Option<(u64, Arc<Membership>)>) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        state.open.extend(reserved);
        drop(state);
        self.changed.notify_all();
    }

    fn issuer(&self, reservation: u64) -> Option<Arc<Membership>> {
        self.state.lock().open.get(&reservation).cloned()
    }

    /// Removes a reservation whose writes have ended. Returns the owner that issued it.
    fn remove(&self, reservation: u64) -> Option<Arc<Membership>> {
        let issuer = self.state.lock().open.remove(&reservation);
        self.changed.notify_all();
        issuer
    }

    /// Accepts reservations again, unless `closing` is set.
    pub(crate) fn reopen(&self, closing: &AtomicBool) {
        let mut state = self.state.lock();
        state.closed = closing.load(Ordering::Acquire);
    }

    /// Refuses new reservations and waits until no reservation is pending. Returns `false` on
    /// timeout.
    pub(crate) fn close(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        while state.in_flight > 0 || !state.open.is_empty() {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return state.in_flight == 0 && state.open.is_empty();
            }
        }
        true
    }
}

/// Whether an owner has acknowledged puts or deletes that no flush has covered. A flush covers the
/// acknowledgements before its begin if it succeeds and no other acknowledgement arrives during the
/// flush. If the owner dies before such a flush, its changes since its last sync may be lost, and a
/// flush in the next epoch must report this.
#[derive(Debug, Default)]
struct Unflushed(Mutex<FlushMark>);

/// The acknowledgements that a flush covers if it succeeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FlushMark {
    /// Number of the earliest owner epoch with an acknowledgement that no flush has covered.
    owner: Option<u32>,
    /// Number of acknowledgements so far that were not durable. If the number grew during a flush,
    /// all acknowledgements count as not covered by the flush.
    changes: u64,
}

impl Unflushed {
    /// Records an acknowledged put or delete, unless it was durable when it was acknowledged.
    fn note(&self, epoch: &OwnerEpoch) {
        if !epoch.durable {
            let mut mark = self.0.lock();
            mark.changes += 1;
            mark.owner = Some(mark.owner.map_or(epoch.owner, |owner| owner.min(epoch.owner)));
        }
    }

    /// Returns the acknowledgements that a flush covers if it begins now.
    fn mark(&self) -> FlushMark {
        *self.0.lock()
    }

    /// Records that a flush which began at `mark` has succeeded. The flush covers all
    /// acknowledgements, or none of them if one was added after `mark` was taken.
    fn complete_flush(&self, mark: FlushMark) {
        let mut now = self.0.lock();
        if *now == mark {
            now.owner = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_waits_for_pending_reservations() {
        let reservations = PendingReservations::default();
        let owner = Arc::new(Membership::Closed);
        let is_owner = |issuer: Option<Arc<Membership>>| {
            issuer.is_some_and(|found| Arc::ptr_eq(&found, &owner))
        };
        let soon = || Instant::now() + Duration::from_millis(20);
        assert!(reservations.begin() && reservations.begin());
        assert!(!reservations.close(soon()));
        assert!(!reservations.begin(), "reservations are closed");
        reservations.complete(None);
        reservations.complete(Some((7, Arc::clone(&owner))));
        assert!(!reservations.close(soon()));
        assert!(is_owner(reservations.issuer(7)));
        std::thread::scope(|scope| {
            let closing =
                scope.spawn(|| reservations.close(Instant::now() + Duration::from_secs(30)));
            assert!(is_owner(reservations.remove(7)));
            assert!(closing.join().unwrap());
        });
        assert!(reservations.remove(7).is_none());
        reservations.reopen(&AtomicBool::new(true));
        assert!(!reservations.begin(), "the store is being closed");
        reservations.reopen(&AtomicBool::new(false));
        assert!(reservations.begin());
    }

    #[test]
    fn flush_covers_earlier_acknowledgements() {
        let epoch = |owner, durable| OwnerEpoch { store: [0; 16], owner, clean: true, durable };
        let unflushed = Unflushed::default();
        assert_eq!(unflushed.mark().owner, None);
        unflushed.note(&epoch(1, true));
        assert_eq!(unflushed.mark().owner, None);
        unflushed.note(&epoch(2, false));
        unflushed.note(&epoch(3, false));
        let early = unflushed.mark();
        assert_eq!(early.owner, Some(2));
        unflushed.note(&epoch(3, false));
        unflushed.complete_flush(early);
        assert_eq!(unflushed.mark().owner, Some(2), "a flush must not cover puts after its mark");
        unflushed.complete_flush(unflushed.mark());
        assert_eq!(unflushed.mark().owner, None);
    }
}
