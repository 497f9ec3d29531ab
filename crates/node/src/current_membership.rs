//! The current [`Membership`] of this process in an open store (owner, client, reopening, leaving
//! or closed), and the only way to change it.

use crate::lock::closed;
use crate::membership::Membership;
use crate::open_context::OpenContext;
use crate::owner_lost::is_owner_lost;
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use ritornello_format::{Error, Result};
use ritornello_store::{OwnerSilent, StoreReopening};
use ritornello_volume::Segments;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Maximum time that a client's call waits for its owner and, if the owner dies, for the next
/// owner. Applies to calls that need no space, and for which the owner rarely waits for a disk
/// (`CallWait::Nothing` in `crates/store/src/catalog/rule.rs`). If this process becomes the owner
/// during the call, the call also waits for the recovery of the store, without a limit.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time that opening waits for an owner that reopens the store.
const REOPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// Shortest pause after a failed search for an owner; calls during the pause fail immediately.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after a failed search for an owner.
const SEARCH_PAUSE_MAX: Duration = Duration::from_secs(5);

/// See the module documentation.
pub(crate) struct CurrentMembership {
    pub(crate) opening: OpenContext,
    /// Identity of the store.
    pub(crate) store: [u8; 16],
    /// Held for reading during a call of the local core.
    membership: RwLock<Arc<Membership>>,
    /// The last search for an owner, if it failed. Locked by a [`ChangeGuard`], and always before
    /// `membership`.
    changing: Mutex<Option<FailedSearch>>,
    /// Whether calls fail instead of waiting for a search for an owner that is in progress. True if
    /// the last search failed because the owner reopens the store, or because this process took the
    /// lock and could not open the store, and once a call has waited for the search in progress
    /// until its timeout. Each search stores its own result at its end.
    fails_during_search: AtomicBool,
    /// The segments of this process, whose files are closed whenever the owner changes.
    segments: OnceLock<Weak<Segments>>,
    /// Whether calls fail with `Closed` because the store's path no longer leads to it.
    leaving: AtomicBool,
    /// Whether this store is closed because the path no longer leads to it.
    replaced: AtomicBool,
}

/// A failed search for an owner.
#[derive(Clone, Copy, Debug)]
struct FailedSearch {
    at: Instant,
    /// Time after `at` during which calls fail without another search.
    pause: Duration,
    /// Whether the search failed because the owner reopens the store, or because this process could
    /// not open the store; `false` if the search failed because the owner is silent.
    reopening: bool,
}

/// The right to change the membership, which one thread at a time has. A call that searches for a
/// new owner holds the guard during the search. Other calls wait for the guard, and then use the
/// new owner. If the search found a silent owner or a store that is being reopened, they fail
/// without another search during a pause. If the last search found a store that is being reopened,
/// or a call has waited for the guard until its timeout, other calls do not wait for the guard: they
/// fail immediately while a thread holds it.
pub(crate) struct ChangeGuard<'a> {
    current: &'a CurrentMembership,
    failed_search: MutexGuard<'a, Option<FailedSearch>>,
}

impl CurrentMembership {
    /// Becomes owner or client.
    ///
    /// # Errors
    /// Any error of [`Membership::join`].
    pub(crate) fn open(mut opening: OpenContext, until: Instant) -> Result<Self> {
        let membership = Membership::join(&opening, until, REOPENING_TIMEOUT, false)
            .inspect_err(|_| opening.directory.lock.close())?;
        // The store may be resized or converted before this process takes it over. The takeover
        // must keep the settings that the store has then.
        opening.options.capacity = None;
        opening.options.paths.clear();
        opening.options.further_dirs = None;
        opening.options.index = None;
        Ok(Self {
            opening,
            store: membership.epoch().map(|epoch| epoch.store).unwrap_or_default(),
            membership: RwLock::new(Arc::new(membership)),
            changing: Mutex::new(None),
            fails_during_search: AtomicBool::new(false),
            segments: OnceLock::new(),
            leaving: AtomicBool::new(false),
            replaced: AtomicBool::new(false),
        })
    }

    pub(crate) fn get(&self) -> Arc<Membership> {
        Arc::clone(&self.read())
    }

    /// Returns the current membership, or `None` while it is being changed. Never waits.
    pub(crate) fn try_get(&self) -> Option<Arc<Membership>> {
        self.membership.try_read().map(|membership| Arc::clone(&membership))
    }

    /// Returns the current membership, which does not change before the guard is dropped.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Arc<Membership>> {
        self.membership.read()
    }

    /// Returns whether this process owns the store, its index is in memory, and no thread waits to
    /// change the membership. While all are true, a lookup waits neither for another process nor
    /// for a disk nor for the membership's lock. Never waits.
    pub(crate) fn answers_at_once(&self) -> bool {
        // `try_read` fails while a writer waits, because a waiting writer blocks new readers.
        let membership = self.membership.try_read();
        membership.is_some_and(|held| held.core().is_some_and(|core| !core.index_reads_files()))
    }

    /// Returns the failure of a write or sync that poisoned the core of this process, until the
    /// store is reopened. `None` if the core works, or this process does not own the store.
    pub(crate) fn failure(&self) -> Option<String> {
        match &*self.get() {
            Membership::Owner(owner) => owner.core.poisoned(),
            Membership::Reopening(reopening) => Some(reopening.cause().to_owned()),
            Membership::Client(_) | Membership::Leaving(_) | Membership::Closed => None,
        }
    }

    /// Returns the error of a refused reservation: the store is closed or left, or its core failed.
    pub(crate) fn refusal(&self) -> Error {
        let is_open = !self.opening.closing.load(Ordering::Acquire) && !self.is_leaving();
        match &*self.get() {
            Membership::Reopening(reopening) => reopening.error(),
            Membership::Owner(owner) if is_open => {
                StoreReopening::error(&owner.core.poisoned().unwrap_or_default())
            }
            _ => closed(),
        }
    }

    /// Refuses all later calls with `Closed`; the last statistics of a failed core stay available
    /// until the store is closed.
    pub(crate) fn begin_leaving(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// Returns whether calls are refused because the store's path no longer leads to it.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Returns whether this store is closed because its path no longer leads to it. Never waits.
    pub(crate) fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Acquire)
    }

    /// Registers the segments whose files are closed whenever the owner changes.
    pub(crate) fn set_segments(&self, segments: &Arc<Segments>) {
        let _ = self.segments.set(Arc::downgrade(segments));
    }

    /// Waits for the right to change the membership. Returns `None` on timeout.
    pub(crate) fn begin_change(&self, until: Instant) -> Option<ChangeGuard<'_>> {
        let failed_search = self.changing.try_lock_until(until)?;
        Some(ChangeGuard { current: self, failed_search })
    }

    /// If the owner died, connects to the next owner or becomes the owner, as any call does.
    ///
    /// # Errors
    /// [`OwnerSilent`] if the owner does not respond; `Closed` if the store is closed, or its path
    /// no longer leads to it; errors of [`CurrentMembership::fail_over`].
    pub(crate) fn ensure_owner(&self) -> Result<()> {
        if self.is_leaving() {
            return Err(closed());
        }
        let membership = self.get();
        let client = match &*membership {
            Membership::Owner(_) | Membership::Reopening(_) => return Ok(()),
            Membership::Client(client) => client,
            Membership::Leaving(_) | Membership::Closed => return Err(closed()),
        };
        match client.check_responsive() {
            Err(error) if is_owner_lost(&error) => {
                self.fail_over(&membership, Instant::now() + CALL_TIMEOUT)
            }
            responsive => responsive,
        }
    }

    /// Finds the next owner, or becomes it, and replaces the membership `lost`, unless another call
    /// has replaced it.
    ///
    /// # Errors
    /// [`OwnerSilent`] if a process holds the lock and does not listen; the first call fails after
    /// the full timeout, later calls fail immediately. [`StoreReopening`] if the owner reopens the
    /// store, if this process takes the lock and cannot open the store, or if another call's search
    /// or recovery outlasts this call; later calls then fail immediately until it ends. `Fatal` if
    /// another store has taken this store's place; any other error of [`Membership::join`].
    pub(crate) fn fail_over(&self, lost: &Arc<Membership>, until: Instant) -> Result<()> {
        let directory = &self.opening.directory;
        let silent =
            || OwnerSilent::error(directory.lock.holder().ok().flatten().map_or(0, |h| h.0));
        let refused = || StoreReopening::error("see the log of the store's owner");
        let mut guard = self.begin_search(until)?;
        if !Arc::ptr_eq(&self.read(), lost) {
            self.fails_during_search.store(false, Ordering::Release);
            return Ok(());
        }
        let until = match *guard.failed_search {
            Some(FailedSearch { at, pause, reopening }) if at.elapsed() < pause => {
                self.fails_during_search.store(reopening, Ordering::Release);
                return Err(if reopening { refused() } else { silent() });
            }
            Some(_) => Instant::now(),
            None => until,
        };
        let began = Instant::now();
        let taken = Membership::join(&self.opening, until, Duration::ZERO, true);
        let reopening = taken.as_ref().is_err_and(StoreReopening::caused);
        let failed = reopening || taken.as_ref().is_err_and(OwnerSilent::caused);
        // After a search that failed because the owner reopens the store, or because this process
        // could not open it, calls fail for four times the duration of the search, 1 to 5 seconds,
        // so that slow searches delay few calls. After a search that found a silent owner, calls
        // fail for one second.
        let longest = if reopening { SEARCH_PAUSE_MAX } else { SEARCH_PAUSE };
        let pause = began.elapsed().saturating_mul(4).clamp(SEARCH_PAUSE, longest);
        *guard.failed_search =
            failed.then(|| FailedSearch { at: Instant::now(), pause, reopening });
        self.fails_during_search.store(reopening, Ordering::Release);
        let membership = taken?;
        if membership.epoch().map(|epoch| epoch.store) != Some(self.store) {
            let _ = membership.close();
            return Err(guard.close_as_replaced());
        }
        let (role, dir) = (membership.role().word(), directory.path().display());
        tracing::info!(role, %dir, "the previous owner ended; `role` is this process's role now");
        guard.use_owner(membership);
        // Notify the thread of `crate::heal` again: the new core may be poisoned already, and the
        // thread could not see this core before.
        self.opening.heal_signal.notify();
        Ok(())
    }

    /// Waits for the right to search for an owner. If a wait times out, later calls do not wait: a
    /// recovery of the store in this process has no time limit, and would otherwise delay each call
    /// by the call's whole timeout.
    fn begin_search(&self, until: Instant) -> Result<ChangeGuard<'_>> {
        if !self.fails_during_search.load(Ordering::Acquire) {
            if let Some(guard) = self.begin_change(until) {
                return Ok(guard);
            }
            self.fails_during_search.store(true, Ordering::Release);
        }
        // If the search has ended since the wait, this call must search: no other call would store
        // a result.
        self.begin_change(Instant::now()).ok_or_else(|| {
            StoreReopening::error(
                "another call of this process searches for an owner or opens the store",
            )
        })
    }
}

impl ChangeGuard<'_> {
    /// Replaces the membership by one with a new owner.
    ///
    /// Closes this process's segment files first: the new owner may reuse the numbers of segments
    /// that the former owner failed to create, and after a fault the volume may have been mounted
    /// again. Reservations that the former owner issued can no longer be committed.
    pub(crate) fn use_owner(&self, membership: Membership) {
        if let Some(segments) = self.current.segments.get().and_then(Weak::upgrade) {
            segments.close_all();
        }
        self.replace(membership);
    }

    /// Waits until no call of the local core is in progress, then replaces the membership. New
    /// calls wait for the replacement. Returns `false` on timeout.
    pub(crate) fn try_replace(
        &self,
        timeout: Duration,
        next: impl FnOnce(&Arc<Membership>) -> Membership,
    ) -> bool {
        let Some(mut membership) = self.current.membership.try_write_for(timeout) else {
            return false;
        };
        *membership = Arc::new(next(&membership));
        true
    }

    /// Waits until no call of the local core is in progress, then closes the membership and, if
    /// that succeeds, the lock file. Returns `None` on timeout, otherwise the result of
    /// [`Membership::close`].
    pub(crate) fn try_close(&self, until: Instant) -> Option<Result<Result<()>>> {
        let mut membership = self.current.membership.try_write_until(until)?;
        let closed = membership.close();
        if closed.is_ok() {
            *membership = Arc::new(Membership::Closed);
            self.current.opening.directory.lock.close();
        }
        Some(closed)
    }

    /// Gives up the store permanently, so that the process can open the store that is now in the
    /// directory while old handles still exist.
    pub(crate) fn give_up(&self) {
        self.replace(Membership::Closed);
        self.current.opening.directory.lock.close();
        self.current.replaced.store(true, Ordering::Release);
    }

    /// Gives up the store. Returns the error for calls on the replaced store.
    pub(crate) fn close_as_replaced(&self) -> Error {
        self.give_up();
        Error::fatal("another store has replaced this store: open it again")
            .with("dir", self.current.opening.directory.path().display())
    }

    fn replace(&self, membership: Membership) {
        let old = std::mem::replace(&mut *self.current.membership.write(), Arc::new(membership));
        // Drop the old membership after the lock is released, because dropping it may take long.
        drop(old);
    }
}
