//! State that threads sleep on for long.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A lock, and the condition that what it guards has changed: the standard library's, whose whole
/// state is in the object. `parking_lot` keeps those who sleep in one table for the process; a forked
/// child inherits the table without the sleepers, and its own threads stumble over them. So where
/// a thread rests while nothing happens, which is when somebody forks, it rests here.
///
/// A thread that panicked with the lock held is no reason to stop: what is guarded is changed in
/// steps that are whole.
#[derive(Debug, Default)]
pub struct Parked<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> Parked<T> {
    /// With its first state.
    pub const fn new(state: T) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks the state.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until woken, for no reason too.
    pub fn wait<'a>(&self, state: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Likewise, but not longer than that.
    pub fn wait_for<'a>(&self, state: MutexGuard<'a, T>, long: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(state, long).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes one that sleeps.
    pub fn wake_one(&self) {
        self.changed.notify_one();
    }

    /// Wakes all.
    pub fn wake_all(&self) {
        self.changed.notify_all();
    }
}
