//! Commits the parts of a put in order, although two parts are written at the same time.

use crate::outcome::PutProgress;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Error, Result};

/// Commits the parts of a put in order, because the first page of a part follows the last page of
/// the previous part.
pub(crate) struct CommitOrder {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Number of the next part to commit.
    next: usize,
    /// Parts numbered `end` and above are not committed.
    end: usize,
    all: PutProgress,
    error: Option<Error>,
}

/// Lets one part commit after all earlier parts. If a `CommitTurn` is dropped before its commit,
/// neither its part nor a later part is committed.
pub(crate) struct CommitTurn<'a> {
    order: &'a CommitOrder,
    number: usize,
}

impl CommitOrder {
    pub(crate) fn new() -> Self {
        let state = State { next: 0, end: usize::MAX, all: PutProgress::default(), error: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Returns the [`CommitTurn`] of part `number`. Called once for each part.
    pub(crate) fn turn(&self, number: usize) -> CommitTurn<'_> {
        CommitTurn { order: self, number }
    }

    /// The sum of the results of all parts.
    ///
    /// # Errors
    /// Returns the error of the first part that failed.
    pub(crate) fn into_written(self) -> Result<PutProgress> {
        let State { all, error, .. } = self.state.into_inner();
        error.map_or(Ok(all), Err)
    }
}

impl CommitTurn<'_> {
    /// Waits until all earlier parts are committed, then commits this part of `count` pages. Skips
    /// the commit if an earlier part was not stored completely. Returns whether all pages of this
    /// part were stored.
    pub(crate) fn commit(self, count: usize, commit: impl FnOnce() -> Result<PutProgress>) -> bool {
        let mut state = self.order.state.lock();
        while state.next < self.number && self.number < state.end {
            self.order.changed.wait(&mut state);
        }
        if self.number >= state.end {
            return false;
        }
        let is_whole = match commit() {
            Ok(part) => {
                state.all.add(&part);
                part.stored == count
            }
            Err(error) => {
                state.error = Some(error);
                false
            }
        };
        if is_whole {
            state.next += 1;
        }
        is_whole
    }
}

impl Drop for CommitTurn<'_> {
    fn drop(&mut self) {
        let mut state = self.order.state.lock();
        if state.next <= self.number {
            state.end = state.end.min(self.number);
        }
        self.order.changed.notify_all();
    }
}
