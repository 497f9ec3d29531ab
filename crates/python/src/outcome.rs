//! The results of calls: tickets, outcomes, lists, and statistics.

use crate::arguments::deadline;
use crate::batch::BatchMemory;
use crate::error::{OrRaise, raise};
use crate::fence::Fence;
use crate::scope::Scope;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use ritornello_format::{Error, ErrorKind};
use ritornello_store::{KeyListing, ScopeListing};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of signal checks while waiting for a section.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// Result of a ticket. `pages`: leading pages stored (put) or filled and verified (get). `bytes`:
/// payload moved. `seconds`: from submission to the end. `reason`: "" if all pages succeeded, else
/// why a page failed; of a get, "not_found" only if no page failed that was found. `ok[i]`: whether
/// page `i` was stored, or filled and verified.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Outcome(Arc<ritornello_store::Outcome>);

#[pymethods]
impl Outcome {
    #[getter]
    fn pages(&self) -> usize {
        self.0.pages
    }
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }
    #[getter]
    fn reason(&self) -> &'static str {
        self.0.reason
    }
    #[getter]
    fn ok(&self) -> Vec<bool> {
        self.0.ok.clone()
    }
    fn __repr__(&self) -> String {
        let Self(outcome) = self;
        format!(
            "Outcome(pages={} of {}, bytes={}, seconds={:.6}, reason={:?})",
            outcome.pages,
            outcome.ok.len(),
            outcome.bytes,
            outcome.seconds,
            outcome.reason
        )
    }
}

/// Refuses calls in the child of a fork, which lacks the threads that complete tickets.
pub(crate) fn check_process(py: Python<'_>, process: u32) -> PyResult<()> {
    if std::process::id() == process {
        return Ok(());
    }
    let message = "this ticket does not complete in a forked child: wait for it in the parent";
    Err(raise(py, &Error::new(ErrorKind::Closed, message)))
}

/// A submitted put or get. It owns its buffers until it is done and its outcome was taken, or until
/// it is dropped.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Ticket {
    pub(crate) ticket: ritornello_store::Ticket,
    /// Memory of the operation; `None` if the bytes were copied at submission, or are on a device.
    batch: Option<BatchMemory>,
    /// Lets later writes to the device blocks of a put wait until the put has read them; `None` for
    /// other tickets.
    fence: Option<Fence>,
    process: u32,
}

impl Ticket {
    pub(crate) fn new(ticket: ritornello_store::Ticket, batch: Option<BatchMemory>) -> Self {
        Self { ticket, batch, fence: None, process: std::process::id() }
    }

    /// Returns the ticket of a put from a device.
    pub(crate) fn of_save(ticket: ritornello_store::Ticket, fence: Fence) -> Self {
        Self { fence: Some(fence), ..Self::new(ticket, None) }
    }

    /// Returns the outcome if the ticket is done, and releases its buffers.
    pub(crate) fn outcome(&self, py: Python<'_>) -> Option<Outcome> {
        let outcome = self.ticket.wait(Some(Duration::ZERO))?;
        if let Some(batch) = &self.batch {
            batch.release(py);
        }
        Some(Outcome(outcome))
    }
}

#[pymethods]
impl Ticket {
    /// An eventfd, readable once the ticket is done. The eventfd stays open as long as the ticket
    /// exists.
    fn fileno(&self) -> i32 {
        self.ticket.fd().as_raw_fd()
    }

    /// Whether the ticket is done.
    fn done(&self, py: Python<'_>) -> bool {
        self.outcome(py).is_some()
    }

    /// Requests cancellation. The ticket is done when its I/O in flight has completed.
    fn cancel(&self) {
        self.ticket.cancel();
    }

    /// Returns the outcome, or None after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Outcome>> {
        check_process(py, self.process)?;
        let deadline = deadline(py, timeout)?;
        loop {
            if let Some(outcome) = self.outcome(py) {
                return Ok(Some(outcome));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            // Wait on the eventfd instead of in the core, so that a signal ends the wait.
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let ready = py.detach(|| {
                poll(&mut [PollFd::new(&self.ticket.fd(), PollFlags::IN)], left.as_ref())
            });
            match ready {
                Err(rustix::io::Errno::INTR) => py.check_signals()?,
                Err(error) => return Err(std::io::Error::from(error).into()),
                Ok(_) => {}
            }
        }
    }

    /// Waits until section `number`, counted from zero, and all earlier sections of all pages are
    /// complete, or the ticket is done.
    /// Returns False after `timeout` seconds.
    #[pyo3(signature = (number, timeout=None))]
    fn wait_section(&self, py: Python<'_>, number: usize, timeout: Option<f64>) -> PyResult<bool> {
        check_process(py, self.process)?;
        let deadline = deadline(py, timeout)?;
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let now = left.map_or(SIGNAL_CHECK, |left| left.min(SIGNAL_CHECK));
            if py.detach(|| self.ticket.wait_section(number, Some(now))) {
                return Ok(true);
            }
            if left == Some(now) {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Makes later work of `stream` wait until the put has read its blocks on a device; if `stream`
    /// is None, the call waits. Returns False if that was not possible within `timeout` seconds:
    /// the stream may then not wait for all blocks. Returns True immediately for tickets that are
    /// not puts from a device.
    #[pyo3(signature = (stream, timeout=30.0))]
    fn order(&self, py: Python<'_>, stream: Option<u64>, timeout: f64) -> PyResult<bool> {
        check_process(py, self.process)?;
        let Some(fence) = &self.fence else { return Ok(true) };
        let deadline = deadline(py, Some(timeout))?;
        py.detach(|| fence.order(stream, deadline)).or_raise(py)
    }

    fn __repr__(&self) -> &'static str {
        if self.ticket.done() { "Ticket(done)" } else { "Ticket(not done)" }
    }
}

/// Converts a list of scopes, each with the number of its pages and their bytes on disk.
pub(crate) fn listed_scopes(
    py: Python<'_>,
    scopes: Vec<ScopeListing>,
) -> PyResult<Vec<(Scope, u64, u64)>> {
    let each = scopes.into_iter();
    each.map(|listed| Ok((Scope::of(py, listed.scope)?, listed.pages, listed.bytes))).collect()
}

/// Converts a list of keys. Returns the keys, and the value for the argument `after` of the next
/// call of `Store.keys` or `Cache.keys`.
pub(crate) fn listed_keys<'py>(
    py: Python<'py>,
    listed: &KeyListing,
) -> (Vec<Bound<'py, PyBytes>>, u64) {
    (listed.keys.iter().map(|key| PyBytes::new(py, key)).collect(), listed.last)
}

/// Converts statistics to a dictionary.
pub(crate) fn stats_of<'py>(
    py: Python<'py>,
    stats: &impl serde::Serialize,
) -> PyResult<Bound<'py, PyDict>> {
    let text = serde_json::to_string(stats)
        .map_err(|error| {
            Error::fatal("the statistics cannot be written as JSON: report this").because(error)
        })
        .or_raise(py)?;
    Ok(py.import("json")?.call_method1("loads", (text,))?.cast_into()?)
}
