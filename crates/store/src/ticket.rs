//! Tickets: puts and gets that run in the background.

use crate::outcome::Outcome;
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_volume::{ForkSafeLock, Sections};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Threads that work on tickets. Each thread keeps several I/O operations in flight, so few threads
/// saturate a disk. But a page may be stored as several objects, whose gets must run at the same
/// time, because a layer needs its part of every object.
const IO_THREADS: usize = 8;
/// Threads reserved for gets, because reads come first.
const IO_THREADS_FOR_GETS: usize = 5;
/// Maximum waiting tickets.
const QUEUE_MAX: usize = 4096;

/// A submitted put or get. Its buffers are kept until the ticket is done, even if the ticket is
/// dropped.
#[derive(Clone, Debug)]
pub struct Ticket {
    shared: Arc<TicketState>,
}

#[derive(Debug)]
struct TicketState {
    outcome: ForkSafeLock<Option<Arc<Outcome>>>,
    event: OwnedFd,
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

    /// An eventfd, readable from the first completion until it is read.
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

impl Ticket {
    pub(crate) fn new(sections: Option<Arc<Sections>>) -> Result<Self> {
        Ok(Self {
            shared: Arc::new(TicketState {
                outcome: ForkSafeLock::new(None),
                event: event()?,
                cancelled: Arc::default(),
                listener: Mutex::default(),
                sections,
            }),
        })
    }

    /// An eventfd, readable once the ticket is done.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
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
    /// ended; pages that completed count.
    pub fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Release);
    }

    /// Waits for the outcome, at most `timeout`.
    #[must_use]
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Arc<Outcome>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let finished = &self.shared.outcome;
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

    /// Waits, at most `timeout`, until section `number` and all earlier sections of all pages have
    /// arrived, or the ticket is done. Returns `false` on timeout. Arrived sections may be read;
    /// the buffers remain the ticket's until it is done.
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
        signal(&self.shared.event);
        // Read the listener after the outcome is set, so that `notify` serves a queue that is
        // registered concurrently.
        if let Some((queue, name)) = self.shared.listener.lock().take() {
            queue.push(name);
        }
    }
}

type Job = Box<dyn FnOnce(Closing) + Send>;

/// Whether a job does its work, or only reports that the I/O threads are closing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    No,
    Yes,
}

/// The kind of a job; each kind has a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobKind {
    Get,
    Put,
}

#[derive(Default)]
struct Queues {
    gets: VecDeque<Job>,
    puts: VecDeque<Job>,
    puts_running: usize,
    closing: bool,
}

/// The threads that work on tickets, gets before puts. A `ThreadPool` does not suffice: gets and
/// puts share threads but have separate queues, and closing waits for running tickets and reports
/// waiting tickets.
pub(crate) struct IoThreads {
    shared: Arc<ForkSafeLock<Queues>>,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

impl IoThreads {
    pub(crate) fn new() -> Self {
        Self { shared: Arc::default(), threads: Mutex::default() }
    }

    /// Queues a job. The first job starts the threads.
    pub(crate) fn submit(&self, kind: JobKind, job: Job) -> Result<()> {
        self.start()?;
        let mut queues = self.shared.lock();
        if queues.closing {
            return Err(Error::new(ErrorKind::Closed, "the store is closed: open it again"));
        }
        if queues.gets.len() + queues.puts.len() >= QUEUE_MAX {
            return Err(Error::retry("too many tickets are waiting").with("tickets", QUEUE_MAX));
        }
        match kind {
            JobKind::Get => queues.gets.push_back(job),
            JobKind::Put => queues.puts.push_back(job),
        }
        self.shared.wake_one();
        Ok(())
    }

    fn start(&self) -> Result<()> {
        let mut threads = self.threads.lock();
        while threads.len() < IO_THREADS {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new()
                .name("ritornello-io".to_owned())
                .spawn(move || work(&shared))
                .map_err(|e| Error::retry("no thread for tickets").because(e))?;
            threads.push(thread);
        }
        Ok(())
    }

    /// Finishes running jobs, ends waiting ones, and joins the threads.
    pub(crate) fn close(&self) {
        let waiting: Vec<Job> = {
            let mut queues = self.shared.lock();
            queues.closing = true;
            let queues = &mut *queues;
            queues.gets.drain(..).chain(queues.puts.drain(..)).collect()
        };
        self.shared.wake_all();
        waiting.into_iter().for_each(|job| job(Closing::Yes));
        let threads = std::mem::take(&mut *self.threads.lock());
        let me = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != me) {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn work(queues: &ForkSafeLock<Queues>) {
    let mut guard = queues.lock();
    loop {
        let put_allowed = guard.puts_running < IO_THREADS - IO_THREADS_FOR_GETS;
        if let Some(job) = guard.gets.pop_front() {
            drop(guard);
            job(Closing::No);
        } else if put_allowed && let Some(job) = guard.puts.pop_front() {
            guard.puts_running += 1;
            drop(guard);
            job(Closing::No);
            queues.lock().puts_running -= 1;
            queues.wake_one();
        } else if guard.closing {
            return;
        } else {
            guard = queues.wait(guard);
            continue;
        }
        guard = queues.lock();
    }
}

impl std::fmt::Debug for IoThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoThreads").finish_non_exhaustive()
    }
}
