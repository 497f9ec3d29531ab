//! Many tickets, one eventfd.

use crate::error::OrRaise;
use crate::outcome::{Outcome, Ticket, check_process};
use parking_lot::Mutex;
use pyo3::prelude::*;
use ritornello_store::CompletionQueue;
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// Where many tickets come together: one eventfd for all of them.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Completions {
    queue: Arc<CompletionQueue>,
    /// By the number that they push into `queue`.
    awaited: Mutex<Awaited>,
    process: u32,
}

#[derive(Default)]
struct Awaited {
    next: u64,
    tickets: HashMap<u64, (Py<Ticket>, Py<PyAny>)>,
}

#[pymethods]
impl Completions {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let queue = CompletionQueue::new().or_raise(py)?;
        Ok(Self { queue, awaited: Mutex::default(), process: std::process::id() })
    }

    /// An eventfd, readable when a ticket was done since it was last read. It closes with this.
    fn fileno(&self) -> i32 {
        self.queue.fd().as_raw_fd()
    }

    /// Waits for a ticket, which `drain` then returns with `tag`. A ticket belongs to one at most.
    fn add(&self, ticket: &Bound<'_, Ticket>, tag: Py<PyAny>) -> PyResult<()> {
        check_process(ticket.py(), self.process)?;
        let mut awaited = self.awaited.lock();
        let name = awaited.next;
        awaited.next += 1;
        awaited.tickets.insert(name, (ticket.clone().unbind(), tag));
        drop(awaited);
        ticket.get().ticket.notify(&self.queue, name);
        Ok(())
    }

    /// The tickets that were done since, each once: its tag and its outcome. It does not read the
    /// eventfd: whoever waits for that reads it before.
    fn drain(&self, py: Python<'_>) -> PyResult<Vec<(Py<PyAny>, Outcome)>> {
        check_process(py, self.process)?;
        let completed = self.queue.take();
        let mut awaited = self.awaited.lock();
        let done: Vec<_> =
            completed.iter().filter_map(|name| awaited.tickets.remove(name)).collect();
        drop(awaited);
        let outcome = |(ticket, tag): (Py<Ticket>, Py<PyAny>)| {
            ticket.get().outcome(py).map(|outcome| (tag, outcome))
        };
        Ok(done.into_iter().filter_map(outcome).collect())
    }

    /// Tickets that were not drained yet.
    fn __len__(&self) -> usize {
        self.awaited.lock().tickets.len()
    }
}
