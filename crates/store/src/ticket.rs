//! Tickets: puts and gets that run in the background.

use crate::outcome::Outcome;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_volume::{ForkSafeLock, Sections};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A submitted put or get. The caller's buffers stay in use until the put or get is done, even if
/// the ticket is dropped.
#[derive(Clone, Debug)]
pub struct Ticket {
    shared: Arc<TicketState>,
    event: Arc<OwnedFd>,
}

/// The end of a submitted put or get, for background work that follows it. Unlike a [`Ticket`] it
/// holds no file descriptor, so any number of completions may wait in queues.
#[derive(Clone, Debug)]
pub struct Completion {
    shared: Arc<TicketState>,
}

#[derive(Debug)]
struct TicketState {
    outcome: ForkSafeLock<Option<Arc<Outcome>>>,
    cancelled: Arc<AtomicBool>,
    listener: Mutex<Option<(Arc<CompletionQueue>, u64)>>,
    sections: Option<Arc<Sections>>,
}

/// Collects the completions of many tickets, and signals them on one eventfd.
#[derive(Debug)]
pub struct CompletionQueue {
    event: OwnedFd,
    completed: Mutex<Vec<u64>>,
}

impl CompletionQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// `Retry` if no file descriptor is left.
    pub fn new() -> Result<Arc<Self>> {
        Ok(Arc::new(Self { event: event()?, completed: Mutex::default() }))
    }

    /// An eventfd, readable when a completion was added after the eventfd was last read.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Adds a completion named `name`.
    pub fn push(&self, name: u64) {
        self.completed.lock().push(name);
        signal(&self.event);
    }

    /// Takes the completions since the last call. The caller must read the eventfd before this
    /// call, so that it does not miss a later completion.
    #[must_use]
    pub fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.completed.lock())
    }
}

fn event() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
        Error::retry("no eventfd for a ticket: raise the limit of open files (ulimit -n)")
            .because(std::io::Error::from(error))
    })
}

/// Adds one to the eventfd's counter. The write fails only if the counter is full, and the eventfd
/// is then readable already.
fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

impl TicketState {
    fn wait(&self, timeout: Option<Duration>) -> Option<Arc<Outcome>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let finished = &self.outcome;
        let mut outcome = finished.lock();
        while outcome.is_none() {
            outcome = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                None => finished.wait(outcome),
                Some(Duration::ZERO) => break,
                Some(left) => finished.wait_for(outcome, left),
            };
        }
        outcome.clone()
    }
}

impl Completion {
    /// The outcome, once the put or get is done.
    #[must_use]
    pub fn outcome(&self) -> Option<Arc<Outcome>> {
        self.shared.outcome.lock().clone()
    }

    /// Waits for the outcome, like [`Ticket::wait`].
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Arc<Outcome>> {
        self.shared.wait(timeout)
    }
}

impl Ticket {
    pub(crate) fn new(sections: Option<Arc<Sections>>) -> Result<Self> {
        Ok(Self {
            event: Arc::new(event()?),
            shared: Arc::new(TicketState {
                outcome: ForkSafeLock::new(None),
                cancelled: Arc::default(),
                listener: Mutex::default(),
                sections,
            }),
        })
    }

    /// An eventfd, readable once the ticket is done.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// The end of this put or get, without the eventfd.
    #[must_use]
    pub fn completion(&self) -> Completion {
        Completion { shared: Arc::clone(&self.shared) }
    }

    /// Whether the ticket is done.
    #[must_use]
    pub fn done(&self) -> bool {
        self.shared.outcome.lock().is_some()
    }

    /// Pushes `name` into `queue` when the ticket is done, or immediately if it is already done.
    /// Replaces an earlier queue.
    pub fn notify(&self, queue: &Arc<CompletionQueue>, name: u64) {
        let mut listener = self.shared.listener.lock();
        if self.done() {
            queue.push(name);
        } else {
            *listener = Some((Arc::clone(queue), name));
        }
    }

    /// Stops the ticket: no further I/O is started. The ticket is done when I/O in flight has
    /// ended, or was left behind ([`Segments::read_runs`](ritornello_volume::Segments::read_runs)).
    /// Its outcome includes the pages that were complete by this time.
    pub fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Release);
    }

    /// Waits for the outcome, at most `timeout`, or without a limit if `timeout` is `None`. Returns
    /// `None` on timeout.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Arc<Outcome>> {
        self.shared.wait(timeout)
    }

    /// Waits until section `number` and all earlier sections of all pages have arrived, or the
    /// ticket is done: at most `timeout`, or without a limit if `timeout` is `None`. Returns
    /// `false` on timeout. Arrived sections may be read; the buffers remain the ticket's until it
    /// is done.
    #[must_use]
    pub fn wait_section(&self, number: usize, timeout: Option<Duration>) -> bool {
        let Some(sections) = &self.shared.sections else { return self.wait(timeout).is_some() };
        sections.wait(number, timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    pub(crate) fn cancelled(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.cancelled)
    }

    pub(crate) fn finish(&self, outcome: Outcome) {
        *self.shared.outcome.lock() = Some(Arc::new(outcome));
        self.shared.outcome.wake_all();
        if let Some(sections) = &self.shared.sections {
            sections.end();
        }
        signal(&self.event);
        // Read the listener after the outcome is set, so that `notify` serves a queue that is
        // registered concurrently.
        if let Some((queue, name)) = self.shared.listener.lock().take() {
            queue.push(name);
        }
    }
}
