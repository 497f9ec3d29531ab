//! Completion of many tickets through one eventfd.

use crate::error::OrRaise;
use crate::outcome::{Outcome, Ticket, check_process};
use parking_lot::Mutex;
use pyo3::prelude::*;
use ritornello_store::CompletionQueue;
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Signals the completion of many tickets through one eventfd.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Completions {
    queue: Arc<CompletionQueue>,
    /// The added tickets and their tags, each by the number that the ticket pushes into `queue`
    /// when it is done.
    pending: Mutex<Pending>,
    process: u32,
}

#[derive(Default)]
struct Pending {
    next: u64,
    tickets: HashMap<u64, (Py<Ticket>, Py<PyAny>)>,
}

#[pymethods]
impl Completions {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let queue = CompletionQueue::new().or_raise(py)?;
        Ok(Self { queue, pending: Mutex::default(), process: std::process::id() })
    }

    /// An eventfd, readable if a ticket has completed since the last read of the eventfd. The
    /// eventfd stays open as long as this object exists.
    fn fileno(&self) -> i32 {
        self.queue.fd().as_raw_fd()
    }

    /// Adds a ticket. Once it is done, `drain` returns `tag` with the ticket's outcome. A ticket
    /// must not be added to a second `Completions`: if the ticket is not done when it is added
    /// there, `drain` of the first `Completions` never returns it.
    fn add(&self, ticket: &Bound<'_, Ticket>, tag: Py<PyAny>) -> PyResult<()> {
        check_process(ticket.py(), self.process)?;
        let mut pending = self.pending.lock();
        let name = pending.next;
        pending.next += 1;
        pending.tickets.insert(name, (ticket.clone().unbind(), tag));
        drop(pending);
        ticket.get().ticket.notify(&self.queue, name);
        Ok(())
    }

    /// Returns the tag and the outcome of each ticket that has completed since the last call. Does
    /// not read the eventfd: the caller reads it first.
    fn drain(&self, py: Python<'_>) -> PyResult<Vec<(Py<PyAny>, Outcome)>> {
        check_process(py, self.process)?;
        let completed = self.queue.take();
        let mut pending = self.pending.lock();
        let done: Vec<_> =
            completed.iter().filter_map(|name| pending.tickets.remove(name)).collect();
        drop(pending);
        let outcome = |(ticket, tag): (Py<Ticket>, Py<PyAny>)| {
            ticket.get().outcome(py).map(|outcome| (tag, outcome))
        };
        Ok(done.into_iter().filter_map(outcome).collect())
    }

    /// Number of added tickets that `drain` has not returned yet.
    fn __len__(&self) -> usize {
        self.pending.lock().tickets.len()
    }
}
