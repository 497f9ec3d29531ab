//! The threads that work on tickets.

use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_volume::ForkSafeLock;
use ritornello_volume::segments::Segments;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Threads that work on tickets while the volumes complete operations. Each thread keeps several
/// I/O operations in flight, so few threads saturate a disk. But an engine may store a page in
/// parts, one per scope, and then waits for the gets of all scopes before it computes a layer, so
/// these gets must run at the same time.
const THREADS: usize = 8;
/// Threads that puts leave to gets, so that puts do not delay reads.
const THREADS_FOR_GETS: usize = 5;
/// Maximum threads while a volume is stalled. A call that has an operation in flight on the volume
/// keeps its thread until the kernel returns the operation, or, if the operation reads into staging
/// memory, until the deadline of the call. Tickets for other volumes therefore need more threads.
const THREADS_MAX: usize = 64;
/// Maximum threads while a volume completes no operations and does not count as stalled yet. Calls
/// still begin operations on such a volume, and may occupy all of these threads. Once the volume
/// counts as stalled, new calls on it end immediately, and threads up to [`THREADS_MAX`] start.
const THREADS_MAX_AT_FIRST: usize = 32;
/// Time without a completion on a volume after which further threads are started.
const SILENT_AFTER: Duration = Duration::from_millis(250);
/// Interval at which the queues are checked while jobs wait for a thread.
const CHECK: Duration = Duration::from_millis(250);
/// Maximum time that a thread waits for a ticket while there are more than [`THREADS`] threads.
const IDLE: Duration = Duration::from_secs(5);
/// Maximum waiting tickets.
const QUEUE_MAX: usize = 4096;

/// The work of a ticket. If it begins after its deadline, it ends without I/O.
pub(crate) struct Job {
    pub(crate) deadline: Option<Instant>,
    pub(crate) work: Box<dyn FnOnce(Closing) + Send>,
}

impl Job {
    /// Does the work. The thread survives a panic, which was reported when it happened.
    fn run(self, closing: Closing) {
        let _ = catch_unwind(AssertUnwindSafe(|| (self.work)(closing)));
    }
}

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

/// The threads that work on tickets, gets before puts. A `ritornello_volume::ThreadPool` does not
/// suffice: gets and puts share threads but have separate queues, closing waits for running tickets
/// and ends waiting tickets, and stalled volumes must not take all threads.
pub(crate) struct IoThreads {
    shared: Arc<Shared>,
    segments: Arc<Segments>,
}

struct Shared {
    queues: ForkSafeLock<Queues>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queues {
    gets: VecDeque<Job>,
    puts: VecDeque<Job>,
    threads: usize,
    gets_running: usize,
    puts_running: usize,
    /// Whether a thread runs [`watch`], because jobs wait for a thread that may take them.
    is_watched: bool,
    closing: bool,
}

impl Queues {
    /// Takes a job that may run now. Puts leave [`THREADS_FOR_GETS`] threads to gets; if this
    /// leaves no thread to puts, one put runs at a time.
    fn take(&mut self) -> Option<(JobKind, Job)> {
        if let Some(job) = self.gets.pop_front() {
            return Some((JobKind::Get, job));
        }
        let may_put = self.puts_running == 0 || self.puts_running + THREADS_FOR_GETS < self.threads;
        let job = if may_put { self.puts.pop_front() } else { None };
        job.map(|job| (JobKind::Put, job))
    }

    /// Takes the jobs whose deadline has passed.
    fn take_expired(&mut self) -> VecDeque<Job> {
        let now = Instant::now();
        let is_expired = |job: &Job| job.deadline.is_some_and(|deadline| deadline <= now);
        let mut expired = VecDeque::new();
        for queue in [&mut self.gets, &mut self.puts] {
            let (ended, waiting) = std::mem::take(queue).into_iter().partition(is_expired);
            *queue = waiting;
            expired.extend::<VecDeque<Job>>(ended);
        }
        expired
    }

    fn running(&mut self, kind: JobKind) -> &mut usize {
        match kind {
            JobKind::Get => &mut self.gets_running,
            JobKind::Put => &mut self.puts_running,
        }
    }

    fn waiting(&self) -> usize {
        self.gets.len() + self.puts.len()
    }

    /// Whether a job may have to wait for a thread: the running and waiting jobs outnumber the
    /// threads, or the puts among them outnumber the threads less [`THREADS_FOR_GETS`].
    fn lack_threads(&self) -> bool {
        let all = self.gets_running + self.puts_running + self.waiting();
        all > self.threads || self.puts_running + self.puts.len() + THREADS_FOR_GETS > self.threads
    }
}

impl IoThreads {
    pub(crate) fn new(segments: Arc<Segments>) -> Self {
        let (queues, handles) = (ForkSafeLock::default(), Mutex::default());
        Self { shared: Arc::new(Shared { queues, handles }), segments }
    }

    /// Queues a job. The first job starts the threads; later jobs start the threads that could not
    /// be started before.
    ///
    /// # Errors
    /// `Closed`; `Retry` if too many tickets wait, or no thread runs and none can be started.
    pub(crate) fn submit(&self, kind: JobKind, job: Job) -> Result<()> {
        let mut queues = self.shared.queues.lock();
        if queues.closing {
            return Err(Error::new(ErrorKind::Closed, "the store is closed: open it again"));
        }
        if queues.waiting() >= QUEUE_MAX {
            return Err(Error::retry("too many tickets are waiting: submit again later")
                .with("tickets", QUEUE_MAX));
        }
        while queues.threads < THREADS {
            match self.shared.start(&mut queues, work) {
                Ok(()) => queues.threads += 1,
                Err(error) if queues.threads == 0 => return Err(error),
                Err(_) => break,
            }
        }
        match kind {
            JobKind::Get => queues.gets.push_back(job),
            JobKind::Put => queues.puts.push_back(job),
        }
        if queues.lack_threads() && !queues.is_watched {
            // If the watching thread cannot start, the jobs wait for the running threads.
            let segments = Arc::clone(&self.segments);
            let watch = move |shared: &Arc<Shared>| watch(shared, segments);
            queues.is_watched = self.shared.start(&mut queues, watch).is_ok();
        }
        drop(queues);
        self.shared.queues.wake_one();
        Ok(())
    }

    /// The numbers of gets and puts that wait for a thread.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let queues = self.shared.queues.lock();
        (queues.gets.len(), queues.puts.len())
    }

    /// Ends waiting jobs without their work ([`Closing::Yes`]), and waits until every thread has
    /// ended its job and uses nothing of the store. Does not wait for the kernel's end of the
    /// threads: a thread that has left reads behind may end only when the disk answers.
    pub(crate) fn close(&self) {
        let waiting: Vec<Job> = {
            let mut queues = self.shared.queues.lock();
            queues.closing = true;
            let queues = &mut *queues;
            queues.gets.drain(..).chain(queues.puts.drain(..)).collect()
        };
        self.shared.queues.wake_all();
        waiting.into_iter().for_each(|job| job.run(Closing::Yes));
        let handles = std::mem::take(&mut *self.shared.handles.lock());
        handles.iter().for_each(|handle| handle.thread().unpark());
        let me = thread::current().id();
        let own = usize::from(handles.iter().any(|handle| handle.thread().id() == me));
        let mut queues = self.shared.queues.lock();
        while queues.threads + usize::from(queues.is_watched) > own {
            queues = self.shared.queues.wait(queues);
        }
    }
}

impl Shared {
    /// Starts a thread that runs `work`. The caller holds the lock of the queues, so that
    /// [`IoThreads::close`] finds every thread.
    fn start(
        self: &Arc<Self>,
        _: &mut Queues,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> Result<()> {
        let shared = Arc::clone(self);
        let handle = thread::Builder::new()
            .name("ritornello-io".to_owned())
            .spawn(move || work(&shared))
            .map_err(|error| {
                Error::retry("no thread could be started for tickets: check the limit of threads")
                    .because(error)
            })?;
        let mut handles = self.handles.lock();
        handles.retain(|handle| !handle.is_finished());
        handles.push(handle);
        Ok(())
    }
}

/// Works on tickets.
fn work(shared: &Arc<Shared>) {
    let mut queues = shared.queues.lock();
    let mut was_idle = false;
    loop {
        if let Some((kind, job)) = queues.take() {
            was_idle = false;
            *queues.running(kind) += 1;
            drop(queues);
            job.run(Closing::No);
            queues = shared.queues.lock();
            *queues.running(kind) -= 1;
            if kind == JobKind::Put {
                // Wake another thread for a waiting put, which may run now that this put has ended:
                // this thread takes a get first.
                shared.queues.wake_one();
            }
        } else if queues.closing || (was_idle && queues.threads > THREADS) {
            queues.threads -= 1;
            if queues.closing {
                shared.queues.wake_all();
            }
            return;
        } else if queues.threads > THREADS {
            queues = shared.queues.wait_for(queues, IDLE);
            was_idle = true;
        } else {
            queues = shared.queues.wait(queues);
        }
    }
}

/// While jobs wait, ends the jobs whose deadline has passed, and starts further threads if a volume
/// completes no operations. Returns when no job waits, or the threads are closing.
fn watch(shared: &Arc<Shared>, segments: Arc<Segments>) {
    loop {
        thread::park_timeout(CHECK);
        let mut queues = shared.queues.lock();
        let expired = queues.take_expired();
        if !expired.is_empty() {
            drop(queues);
            expired.into_iter().for_each(|job| job.run(Closing::No));
            queues = shared.queues.lock();
        }
        if queues.closing || queues.waiting() == 0 {
            drop(segments);
            queues.is_watched = false;
            shared.queues.wake_all();
            return;
        }
        let max = match segments.longest_silence() {
            silence if silence >= Segments::STALLED_AFTER => THREADS_MAX,
            silence if silence >= SILENT_AFTER => THREADS_MAX_AT_FIRST,
            _ => continue,
        };
        for _ in 0..queues.waiting().min(THREADS) {
            if queues.threads >= max || shared.start(&mut queues, work).is_err() {
                break;
            }
            queues.threads += 1;
        }
    }
}

impl std::fmt::Debug for IoThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoThreads").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(threads: usize, puts: usize) -> Queues {
        let job = || Job { deadline: None, work: Box::new(|_| ()) };
        Queues { puts: (0..puts).map(|_| job()).collect(), threads, ..Queues::default() }
    }

    #[test]
    fn puts_run_although_few_threads_started() {
        for (threads, expected) in [(1, 1), (THREADS_FOR_GETS, 1), (THREADS, 3)] {
            let mut queues = queues(threads, THREADS);
            while queues.take().is_some() {
                queues.puts_running += 1;
            }
            assert_eq!(queues.puts_running, expected, "{threads}");
        }
    }
}
