//! Group commit: callers that need durability share sync rounds, which run one at a time.
//!
//! A caller is served by any round that began after its request. A caller that finds a round
//! running waits for the next round, which one of the waiting callers runs for all. If a round
//! fails with any error but `Retry`, all later rounds are refused: after a failed sync the kernel
//! may report success for pages that it dropped (Rebello et al., "Can Applications Recover from
//! fsync Failures?", ATC '20). `tests/loom_rounds.rs` checks every interleaving with at most three
//! preemptions.

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};
use ritornello_format::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::OnceLock;
use std::time::Instant;

/// A callback that reports that the store is poisoned. The thread whose write or sync failed runs
/// the callback, with locks held. If the store is poisoned already, the thread that sets the
/// callback runs it. The callback must not block.
pub type OnPoison = Box<dyn Fn() + Send + Sync>;

/// The sync rounds of a store.
#[derive(Default)]
pub struct Rounds {
    requested: AtomicU64,
    /// Locked while a round runs, so that at most one runs at a time.
    progress: Mutex<Progress>,
    poison: OnceLock<String>,
    on_poison: OnceLock<OnPoison>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Number of the last request that was made before the last successful round began.
    covered: u64,
    /// Whether [`Rounds::end`] was called: no further round begins.
    ended: bool,
}

/// Prevents sync rounds while held.
#[derive(Debug)]
pub struct RoundsPaused<'a>(
    #[expect(dead_code, reason = "held to exclude rounds")] MutexGuard<'a, Progress>,
);

impl Rounds {
    /// Returns once a `round` that began after this call has succeeded, in this caller's thread or
    /// another's.
    ///
    /// # Errors
    /// `Retry` if earlier rounds have not ended by `deadline`; `Fatal` if the store is poisoned;
    /// `Closed` after [`Rounds::end`]. Errors of `round`, which poison the store unless they are
    /// `Retry`.
    pub fn join(&self, deadline: Instant, round: impl FnOnce() -> Result<()>) -> Result<()> {
        let request = self.requested.fetch_add(1, Ordering::AcqRel) + 1;
        let mut progress = self.progress.try_lock_until(deadline).ok_or_else(busy)?;
        if progress.covered >= request {
            return Ok(());
        }
        self.check()?;
        if progress.ended {
            return Err(Error::new(ErrorKind::Closed, "the store is closed: open it again"));
        }
        // This round serves the requests made so far. The changes of a later request may be written
        // too late for this round.
        let covers = self.requested.load(Ordering::Acquire);
        round().inspect_err(|error| self.poison(error))?;
        progress.covered = covers;
        Ok(())
    }

    /// Waits until no round runs, and prevents further rounds while the returned guard is held.
    ///
    /// # Errors
    /// `Retry` if the running round has not ended by `deadline`.
    pub fn between(&self, deadline: Instant) -> Result<RoundsPaused<'_>> {
        self.progress.try_lock_until(deadline).map(RoundsPaused).ok_or_else(busy)
    }

    /// Waits until no round runs, and prevents all further rounds permanently.
    ///
    /// # Errors
    /// `Retry` if the running round has not ended by `deadline`; `Fatal` if the store is poisoned.
    pub fn end(&self, deadline: Instant) -> Result<()> {
        let mut progress = self.progress.try_lock_until(deadline).ok_or_else(busy)?;
        self.check()?;
        progress.ended = true;
        Ok(())
    }

    /// Records a sync that failed with `error`. Unless the error is `Retry`, no round runs
    /// afterwards.
    pub fn poison(&self, error: &Error) {
        if error.kind() != ErrorKind::Retry && self.poison.set(error.to_string()).is_ok() {
            match self.on_poison.get() {
                Some(callback) => callback(),
                None => tracing::error!(%error, "the store is poisoned and refuses writes"),
            }
        }
    }

    /// Sets the callback that reports poisoning instead of a log line. Calls it immediately if the
    /// store is already poisoned. Only the first call has an effect.
    pub fn on_poison(&self, callback: OnPoison) {
        if self.on_poison.set(callback).is_ok()
            && self.cause().is_some()
            && let Some(callback) = self.on_poison.get()
        {
            callback();
        }
    }

    /// Records the failure of a change, if it is `Fatal`: the state of the disk is then unknown.
    pub fn poison_if_fatal(&self, error: &Error) {
        if error.kind() == ErrorKind::Fatal {
            self.poison(error);
        }
    }

    /// The failure that poisoned the store.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        self.poison.get().map(String::as_str)
    }

    /// Checks that the store is not poisoned.
    ///
    /// # Errors
    /// `Fatal` if the store is poisoned.
    pub fn check(&self) -> Result<()> {
        self.cause().map_or(Ok(()), |cause| {
            Err(Error::fatal("a write or sync failed, so the store is poisoned: reopen it")
                .with("cause", cause))
        })
    }
}

impl fmt::Debug for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds").field("poison", &self.poison).finish_non_exhaustive()
    }
}

fn busy() -> Error {
    Error::retry("the disk is still busy with an earlier sync: check the disks")
}
