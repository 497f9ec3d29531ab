//! A lock and condition variable for threads that sleep for long, safe across a fork.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A value behind a mutex, and a condition variable that signals changes of the value.
///
/// Mutex and condition variable are the standard library's, whose whole state is in the object.
/// `parking_lot` keeps sleeping threads in one table per process. A forked child inherits the table
/// without the threads, and its threads then meet entries of threads that do not exist. Threads
/// that sleep while the process is idle therefore use this type, because callers usually fork at
/// such times.
///
/// A poisoned mutex can still be locked, because every change of a guarded value is complete before
/// code runs that can panic.
#[derive(Debug, Default)]
pub struct ForkSafeLock<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> ForkSafeLock<T> {
    /// A lock around `state`.
    pub const fn new(state: T) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks the value.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a wake-up. May return without one, so the caller checks the value again.
    pub fn wait<'a>(&self, state: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a wake-up, at most `long`. May return earlier without one.
    pub fn wait_for<'a>(&self, state: MutexGuard<'a, T>, long: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(state, long).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes one waiting thread.
    pub fn wake_one(&self) {
        self.changed.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn wake_all(&self) {
        self.changed.notify_all();
    }
}
