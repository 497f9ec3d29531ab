//! Runs calls of a backend with threads that may hang, deadlines, retries and a circuit breaker.
//!
//! A user-supplied backend may never return from a call. The executor calls the backend on a
//! bounded number of separate threads; a caller waits at most until its deadline. When all threads
//! hang and the queue is full, calls fail immediately.

use super::backend::Backend;
use super::breaker::{Breaker, CallKind, CallOutcome};
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_store::{DurationCounters, DurationCounts};
use ritornello_volume::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum calls that run concurrently.
const THREADS: usize = 8;
/// Maximum calls that wait for a thread.
const MAX_QUEUED: usize = 64;
/// Maximum attempts of one call, and the pause before the first retry. The pause doubles for each
/// further retry.
const TRIES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The retry budget: one retry per `RETRY_SHARE` attempts, plus `RETRIES_FREE`.
const RETRY_SHARE: u64 = 10;
const RETRIES_FREE: u64 = 20;

/// Calls of a remote and their outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteCalls {
    /// Attempts made, retries included.
    pub calls: u64,
    /// Attempts that were retries.
    pub retries: u64,
    /// Calls that ended with an error or timed out. A panic of the backend is not counted, unless
    /// the caller notices it only after the deadline of the call.
    pub failures: u64,
    /// Failed calls that timed out.
    pub late: u64,
    /// Calls not made because the circuit breaker was open, or because all threads for calls to the
    /// remote were busy and the queue of calls was full.
    pub spared: u64,
    /// Whether the circuit breaker is open.
    pub open: bool,
    /// Bytes of objects that were read in time.
    pub read_bytes: u64,
    /// Bytes of objects that were written in time.
    pub written_bytes: u64,
    /// Times that the circuit breaker opened.
    pub openings: u64,
    /// Total time that the circuit breaker was open, including the current opening.
    pub open_time: Duration,
}

/// The operation of a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Get,
    Put,
    Exists,
}

/// The circuit breaker and the counters of the calls of one backend.
#[derive(Debug, Default)]
pub(crate) struct CallCounters {
    breaker: Mutex<Breaker>,
    /// Attempts, by [`Operation`].
    calls: [AtomicU64; 3],
    /// Durations of the attempts to get that ended.
    gets: DurationCounters,
    /// Durations of the attempts to put that ended.
    puts: DurationCounters,
    retries: AtomicU64,
    failures: AtomicU64,
    late: AtomicU64,
    spared: AtomicU64,
    /// Bytes of objects that gets returned in time.
    pub(super) read_bytes: AtomicU64,
    /// Bytes of objects that puts wrote in time.
    pub(super) written_bytes: AtomicU64,
}

impl CallCounters {
    /// The nine entries of [`CacheCounts`](ritornello_store::CacheCounts) between the counts of the
    /// gate and the durations.
    pub(crate) fn counts(&self) -> [u64; 9] {
        let (openings, open) = {
            let breaker = self.breaker.lock();
            (breaker.openings, breaker.open_time(Instant::now()))
        };
        let [get, put, exists] = self.calls.each_ref().map(|calls| calls.load(Relaxed));
        let [failures, spared, read, written] =
            [&self.failures, &self.spared, &self.read_bytes, &self.written_bytes]
                .map(|count| count.load(Relaxed));
        let open = u64::try_from(open.as_micros()).unwrap_or(u64::MAX);
        [get, put, exists, failures, spared, read, written, openings, open]
    }

    /// The durations of the attempts that ended, to get and to put. An attempt that fails, finds no
    /// object, or ends after its deadline counts; an attempt that never ends, or panics, does not.
    pub(crate) fn durations(&self) -> [DurationCounts; 2] {
        [self.gets.counts(), self.puts.counts()]
    }

    fn attempt_ended(&self, operation: Operation, elapsed: Duration) {
        match operation {
            Operation::Get => self.gets.add(elapsed),
            Operation::Put => self.puts.add(elapsed),
            Operation::Exists => {}
        }
    }

    fn calls(&self) -> u64 {
        self.calls.iter().map(|calls| calls.load(Relaxed)).sum()
    }
}

/// State shared by the calls of one backend.
#[derive(Debug)]
struct Shared {
    backend: Arc<dyn Backend>,
    counts: Arc<CallCounters>,
}

/// Executes calls of one backend. Dropping the executor abandons threads that hang. Such threads
/// keep the backend, its counters and the data of their calls in memory, but nothing else of the
/// tier.
#[derive(Debug)]
pub(super) struct CallExecutor {
    shared: Arc<Shared>,
    /// A panic of the backend fails only its call: the sender is dropped, which closes the caller's
    /// channel.
    threads: ThreadPool<Box<dyn FnOnce() + Send>>,
}

pub(super) struct PendingCall<T> {
    answer: Receiver<Result<T>>,
    kind: CallKind,
    shared: Arc<Shared>,
    deadline: Instant,
}

impl CallExecutor {
    pub(super) fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            shared: Arc::new(Shared { backend, counts: Arc::default() }),
            threads: ThreadPool::new("ritornello-remote", THREADS, MAX_QUEUED),
        }
    }

    /// Starts `call`. A call that fails with `Retry` is repeated up to [`TRIES`] attempts, within
    /// the retry budget and until the deadline.
    ///
    /// # Errors
    /// `Retry` if the circuit breaker is open, or all threads are busy and the queue is full.
    pub(super) fn start<T: Send + 'static>(
        &self,
        operation: Operation,
        deadline: Instant,
        call: impl Fn(&dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<PendingCall<T>> {
        let shared = &self.shared;
        let Some(kind) = shared.counts.breaker.lock().admit(Instant::now()) else {
            shared.counts.spared.fetch_add(1, Relaxed);
            return Err(Error::retry(
                "the remote failed or refused earlier calls: calls pause for up to 60 s",
            ));
        };
        let (answered, answer) = sync_channel(1);
        let caller = Arc::clone(shared);
        let job = Box::new(move || caller.run(operation, kind, deadline, &answered, &call));
        if self.threads.submit(job).is_err() {
            shared.counts.spared.fetch_add(1, Relaxed);
            shared.record(kind, CallOutcome::Failed, "all threads are waiting for answers");
            return Err(Error::retry(
                "all threads for calls to the remote are still waiting for an answer",
            ));
        }
        Ok(PendingCall { answer, kind, shared: Arc::clone(shared), deadline })
    }

    /// [Starts](Self::start) a call and waits for its answer.
    pub(super) fn call<T: Send + 'static>(
        &self,
        operation: Operation,
        deadline: Instant,
        call: impl Fn(&dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.start(operation, deadline, call)?.wait()
    }

    pub(super) fn counters(&self) -> &Arc<CallCounters> {
        &self.shared.counts
    }

    pub(super) fn calls(&self) -> RemoteCalls {
        let counts = &self.shared.counts;
        let (open, openings, open_time) = {
            let breaker = counts.breaker.lock();
            (breaker.is_open(), breaker.openings, breaker.open_time(Instant::now()))
        };
        RemoteCalls {
            calls: counts.calls(),
            retries: counts.retries.load(Relaxed),
            failures: counts.failures.load(Relaxed),
            late: counts.late.load(Relaxed),
            spared: counts.spared.load(Relaxed),
            open,
            read_bytes: counts.read_bytes.load(Relaxed),
            written_bytes: counts.written_bytes.load(Relaxed),
            openings,
            open_time,
        }
    }
}

impl<T> PendingCall<T> {
    /// Waits for the answer until the deadline.
    pub(super) fn wait(self) -> Result<T> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.answer.recv_timeout(left) {
            Ok(answer) => answer,
            // The thread discards a late answer and closes the channel, so after the deadline a
            // closed channel means a timeout too.
            Err(error) if error == RecvTimeoutError::Timeout || Instant::now() >= self.deadline => {
                self.shared.counts.failures.fetch_add(1, Relaxed);
                self.shared.counts.late.fetch_add(1, Relaxed);
                self.shared.record(self.kind, CallOutcome::Failed, "no answer in time");
                Err(Error::retry("the remote did not answer in time"))
            }
            Err(_) => {
                self.shared.record(self.kind, CallOutcome::Failed, "the backend panicked");
                Err(Error::retry("the backend of the remote panicked during the call"))
            }
        }
    }
}

impl Shared {
    /// Calls the backend until it answers with anything but `Retry`, the deadline passes, or no
    /// retry is left. A late answer is discarded.
    fn run<T>(
        &self,
        operation: Operation,
        kind: CallKind,
        deadline: Instant,
        answered: &SyncSender<Result<T>>,
        call: &dyn Fn(&dyn Backend) -> Result<T>,
    ) {
        let mut pause = FIRST_PAUSE;
        for left in (0..TRIES).rev() {
            if Instant::now() >= deadline {
                return;
            }
            self.counts.calls[operation as usize].fetch_add(1, Relaxed);
            let started = Instant::now();
            let outcome = call(self.backend.as_ref());
            self.counts.attempt_ended(operation, started.elapsed());
            let failed = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Retry);
            let again = failed && left > 0 && Instant::now() + pause < deadline && self.may_retry();
            if again {
                thread::sleep(pause);
                pause *= 2;
                continue;
            }
            if Instant::now() < deadline {
                if let Err(error) = &outcome {
                    self.counts.failures.fetch_add(1, Relaxed);
                    tracing::debug!(%error, "a call to the remote failed");
                }
                match &outcome {
                    Ok(_) => self.record(kind, CallOutcome::Answered, ""),
                    Err(error) if error.kind() == ErrorKind::Fatal => {
                        self.record(kind, CallOutcome::Refused, error);
                    }
                    Err(error) => self.record(kind, CallOutcome::Failed, error),
                }
                let _ = answered.send(outcome);
            }
            return;
        }
    }

    fn may_retry(&self) -> bool {
        let budget = RETRIES_FREE + self.counts.calls() / RETRY_SHARE;
        let may = self.counts.retries.load(Relaxed) < budget;
        if may {
            self.counts.retries.fetch_add(1, Relaxed);
        }
        may
    }

    fn record(&self, kind: CallKind, outcome: CallOutcome, why: impl std::fmt::Display) {
        let changed = self.counts.breaker.lock().record(kind, outcome, Instant::now());
        match changed {
            Some(true) => tracing::warn!(
                backend = ?self.backend,
                %why,
                "the remote fails: calls are paused, and its pages are misses until it answers again"
            ),
            Some(false) => tracing::info!(backend = ?self.backend, "the remote answers again"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, reason = "a user's backend may panic")]
    use super::super::MemoryBackend;
    use super::*;
    use std::sync::mpsc::TryRecvError;

    #[test]
    fn answer_after_the_deadline_counts_as_timeout() {
        let executor = CallExecutor::new(Arc::new(MemoryBackend::default()));
        let deadline = Instant::now() + FIRST_PAUSE;
        let call = executor.start(Operation::Get, deadline, move |_| {
            thread::sleep(deadline.saturating_duration_since(Instant::now()));
            Ok(())
        });
        let call = call.unwrap();
        // The waiting caller may see the end of the late call before its own timeout.
        while !matches!(call.answer.try_recv(), Err(TryRecvError::Disconnected)) {
            thread::yield_now();
        }
        assert_eq!(call.wait().unwrap_err().kind(), ErrorKind::Retry);
        let calls = executor.calls();
        assert_eq!((calls.failures, calls.late), (1, 1));
    }

    #[test]
    fn attempts_are_timed_by_operation() {
        let executor = CallExecutor::new(Arc::new(MemoryBackend::default()));
        let until = Instant::now() + Duration::from_secs(60);
        let put = |remote: &dyn Backend| {
            thread::sleep(FIRST_PAUSE);
            remote.set("a", b"value")
        };
        executor.call(Operation::Put, until, put).unwrap();
        for name in ["a", "absent", "a"] {
            executor.call(Operation::Get, until, move |remote| remote.get(name, None)).unwrap();
        }
        executor.call(Operation::Exists, until, |remote| remote.exists("a")).unwrap();
        let [[gets, before, ..], [puts, put_micros, buckets @ ..]] =
            executor.counters().durations();
        assert_eq!((gets, puts), (3, 1));
        assert!(put_micros >= FIRST_PAUSE.as_micros() as u64, "the put took {put_micros} us");
        assert_eq!(buckets[..6], [0; 6], "the put took longer than 30 ms");
        // A failing call makes three attempts. Their durations exclude the pauses between them.
        let (began, pauses) = (Instant::now(), FIRST_PAUSE * 3);
        let fails = |_: &dyn Backend| -> Result<()> { Err(Error::retry("a fault")) };
        assert!(executor.call(Operation::Get, until, fails).is_err());
        let took = began.elapsed();
        let [[gets, after, ..], [puts, ..]] = executor.counters().durations();
        assert_eq!((gets, puts), (6, 1));
        let attempts = Duration::from_micros(after - before);
        assert!(attempts + pauses <= took, "{attempts:?} of {took:?}");
    }

    #[test]
    fn panicking_backend_fails_calls_but_keeps_threads() {
        let executor = CallExecutor::new(Arc::new(MemoryBackend::default()));
        let until = Instant::now() + Duration::from_secs(60);
        let calls: Vec<_> = (0..THREADS)
            .map(|_| executor.start(Operation::Put, until, |_| -> Result<()> { panic!("a bug") }))
            .collect();
        for call in calls {
            assert!(call.and_then(PendingCall::wait).is_err());
        }
        let calls = executor.calls();
        assert_eq!((calls.failures, calls.late), (0, 0));
        // The breaker stays open for a second or two before a trial call.
        while executor.call(Operation::Exists, until, |remote| remote.exists("a")).is_err() {
            assert!(Instant::now() < until, "no call succeeds after the panics");
            thread::sleep(FIRST_PAUSE);
        }
    }
}
