//! Group commit: callers who want durability share rounds, one at a time.
//!
//! A caller is served by any round that began after it asked. So one that finds a round running
//! waits for the next, which the first of those who wait leads for all of them. A round that failed
//! for good is the last: after a failed sync the kernel may report success for pages that it
//! dropped (Rebello et al., "Can Applications Recover from fsync Failures?", ATC '20).
//! `tests/loom_rounds.rs` tries every order.

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};
use ritornello_format::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::OnceLock;
use std::time::Instant;

/// Called by the thread that met the failure, under its locks: it must not wait.
pub type OnPoison = Box<dyn Fn() + Send + Sync>;

/// The rounds of a store.
#[derive(Default)]
pub struct Rounds {
    /// Number of requests.
    requested: AtomicU64,
    /// Held while a round runs.
    progress: Mutex<Progress>,
    poison: OnceLock<String>,
    on_poison: OnceLock<OnPoison>,
}

#[derive(Debug, Default)]
struct Progress {
    /// The last request that a finished round has covered.
    covered: u64,
    /// No further round begins.
    ended: bool,
}

/// No round runs while this is held.
#[derive(Debug)]
pub struct Turn<'a>(#[expect(dead_code, reason = "held, not looked at")] MutexGuard<'a, Progress>);

impl Rounds {
    /// Returns once a `round` that began after this call has succeeded, this caller's or another's.
    ///
    /// # Errors
    /// `Retry` if the rounds before it have not ended by `deadline`. Those of `round`: all but
    /// `Retry` poison. `Fatal` without a round if it is poisoned; `Closed` after [`Rounds::end`].
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
        // Whoever asks from here on may have written too late for this round.
        let covers = self.requested.load(Ordering::Acquire);
        round().inspect_err(|error| self.poison(error))?;
        progress.covered = covers;
        Ok(())
    }

    /// Waits for the round that runs, and keeps others from beginning.
    ///
    /// # Errors
    /// `Retry` if it has not ended by `deadline`.
    pub fn between(&self, deadline: Instant) -> Result<Turn<'_>> {
        self.progress.try_lock_until(deadline).map(Turn).ok_or_else(busy)
    }

    /// Returns once no round runs. None begins afterwards.
    ///
    /// # Errors
    /// `Retry` if the round that runs has not ended by `deadline`; `Fatal` if one has failed for good.
    pub fn end(&self, deadline: Instant) -> Result<()> {
        let mut progress = self.progress.try_lock_until(deadline).ok_or_else(busy)?;
        self.check()?;
        progress.ended = true;
        Ok(())
    }

    /// After a sync that failed with `error`: unless it may be tried again, nothing is synced ever
    /// after.
    pub fn poison(&self, error: &Error) {
        if error.kind() != ErrorKind::Retry && self.poison.set(error.to_string()).is_ok() {
            match self.on_poison.get() {
                Some(told) => told(),
                None => tracing::error!(%error, "the store is poisoned"),
            }
        }
    }

    /// Has `told` called, instead of a log line, when the store is poisoned; or now if it is. Set
    /// once.
    pub fn on_poison(&self, told: OnPoison) {
        if self.on_poison.set(told).is_ok()
            && self.cause().is_some()
            && let Some(told) = self.on_poison.get()
        {
            told();
        }
    }

    /// After a change that failed so that nobody knows what is on the disk.
    pub fn poison_if_fatal(&self, error: &Error) {
        if error.kind() == ErrorKind::Fatal {
            self.poison(error);
        }
    }

    /// What poisoned it.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        self.poison.get().map(String::as_str)
    }

    /// # Errors
    /// `Fatal` if it is poisoned.
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
    Error::retry("the disk is still busy with an earlier sync")
}
