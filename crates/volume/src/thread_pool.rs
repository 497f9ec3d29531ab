//! A bounded pool of threads with a bounded queue of jobs.
//!
//! Each component has a separate pool, so that jobs of one component that hang do not take the
//! threads of another component. Published thread pools do not suffice: some stop if a thread
//! cannot be started, some have a queue without a limit, and some cannot take back a waiting job.

use crate::{ForkSafeLock, process_id};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::Instant;

/// Work for one thread of a pool.
pub trait Job: Send + 'static {
    /// Does the work.
    fn run(self);
}

impl Job for Box<dyn FnOnce() + Send> {
    fn run(self) {
        self();
    }
}

/// The threads of a pool start when they are first needed. If a thread fails to start, the pool
/// continues with fewer. A panic of a job ends the job only. Dropping the pool does not wait: the
/// threads end after they have run the queued jobs.
pub struct ThreadPool<J> {
    shared: Arc<ForkSafeLock<State<J>>>,
    name: Cow<'static, str>,
    max_threads: usize,
    max_queued: usize,
    /// The process that made the pool. A forked child does not have the threads, and may inherit a
    /// lock that is never released, so a call in the child does not touch the lock.
    process: u32,
}

struct State<J> {
    jobs: VecDeque<J>,
    threads: usize,
    running: usize,
    closed: bool,
}

impl<J> ThreadPool<J> {
    /// A pool of at most `max_threads` threads, in which at most `max_queued` jobs wait for a
    /// thread.
    #[must_use]
    pub fn new(name: impl Into<Cow<'static, str>>, max_threads: usize, max_queued: usize) -> Self {
        let state = State { jobs: VecDeque::new(), threads: 0, running: 0, closed: false };
        Self {
            shared: Arc::new(ForkSafeLock::new(state)),
            name: name.into(),
            max_threads,
            max_queued,
            process: process_id(),
        }
    }

    /// Jobs that are queued or running.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.lock().map_or(0, |state| state.jobs.len() + state.running)
    }

    /// The state; `None` in a forked child.
    fn lock(&self) -> Option<MutexGuard<'_, State<J>>> {
        (process_id() == self.process).then(|| self.shared.lock())
    }

    /// Takes back the queued jobs that match `filter`.
    pub fn remove(&self, mut filter: impl FnMut(&J) -> bool) -> Vec<J> {
        let Some(mut state) = self.lock() else { return Vec::new() };
        let (removed, kept): (Vec<J>, Vec<J>) = state.jobs.drain(..).partition(|job| filter(job));
        state.jobs = kept.into();
        removed
    }

    /// Refuses further jobs, discards the queued jobs, and ends each thread after its current job.
    pub fn close(&self) {
        let Some(mut state) = self.lock() else { return };
        state.closed = true;
        let discarded = std::mem::take(&mut state.jobs);
        drop(state);
        self.shared.wake_all();
        // Drop the jobs outside the lock, because a dropped job may run code that takes other
        // locks.
        drop(discarded);
    }

    /// Waits until the threads of a closed pool have ended. Returns false if threads remain at
    /// `deadline`; they still end after their current jobs. Returns true in a forked child, which
    /// has no threads to wait for.
    pub fn wait_ended(&self, deadline: Instant) -> bool {
        let Some(mut state) = self.lock() else { return true };
        while state.threads > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.shared.wait_for(state, left);
        }
        true
    }
}

impl<J: Job> ThreadPool<J> {
    /// Queues a job.
    ///
    /// # Errors
    /// Returns the job if the queue is full, if the pool is closed or belongs to the parent of this
    /// forked process, or if the pool has no thread and cannot start one.
    pub fn submit(&self, job: J) -> Result<(), J> {
        let Some(mut state) = self.lock() else { return Err(job) };
        if state.closed {
            return Err(job);
        }
        let idle = state.threads - state.running;
        if idle <= state.jobs.len() && state.threads < self.max_threads {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name(self.name.clone().into_owned());
            if thread.spawn(move || work(&shared)).is_ok() {
                state.threads += 1;
            }
        }
        if state.threads == 0 || state.jobs.len() >= self.max_queued {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.shared.wake_one();
        Ok(())
    }
}

fn work<J: Job>(shared: &ForkSafeLock<State<J>>) {
    let mut state = shared.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            state.running += 1;
            drop(state);
            // Ignore a panic: the process's panic hook has already reported it.
            let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
            state = shared.lock();
            state.running -= 1;
        } else if state.closed {
            state.threads -= 1;
            shared.wake_all();
            return;
        } else {
            state = shared.wait(state);
        }
    }
}

impl<J> Drop for ThreadPool<J> {
    fn drop(&mut self) {
        if let Some(mut state) = self.lock() {
            state.closed = true;
            drop(state);
            self.shared.wake_all();
        }
    }
}

impl<J> fmt::Debug for ThreadPool<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ThreadPool").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, reason = "a job of a test panics")]
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);

    /// A job that reports its number, and then waits until its gate opens.
    struct Numbered(usize, Sender<usize>, Arc<ForkSafeLock<bool>>);

    impl Job for Numbered {
        fn run(self) {
            self.1.send(self.0).unwrap();
            let mut open = self.2.lock();
            while !*open {
                open = self.2.wait(open);
            }
        }
    }

    struct Fixture {
        pool: ThreadPool<Numbered>,
        gate: Arc<ForkSafeLock<bool>>,
        started: (Sender<usize>, Receiver<usize>),
    }

    impl Fixture {
        fn new(max_threads: usize, max_queued: usize) -> Self {
            let pool = ThreadPool::new("test", max_threads, max_queued);
            Self { pool, gate: Arc::default(), started: channel() }
        }

        fn submit(&self, number: usize) -> bool {
            let job = Numbered(number, self.started.0.clone(), Arc::clone(&self.gate));
            self.pool.submit(job).is_ok()
        }

        fn open(&self) {
            *self.gate.lock() = true;
            self.gate.wake_all();
        }

        fn started(&self, count: usize) -> Vec<usize> {
            let started = (0..count).map(|_| self.started.1.recv_timeout(LONG).unwrap());
            let mut started: Vec<_> = started.collect();
            started.sort_unstable();
            started
        }
    }

    #[test]
    fn full_queue_returns_the_job() {
        let all = Fixture::new(2, 3);
        assert!(all.submit(0) && all.submit(1));
        assert_eq!(all.started(2), [0, 1]);
        assert!((2..5).all(|number| all.submit(number)));
        assert!(!all.submit(5));
        assert_eq!(all.pool.pending(), 5);
        let removed = all.pool.remove(|job| job.0 == 3);
        assert_eq!(removed.iter().map(|job| job.0).collect::<Vec<_>>(), [3]);
        all.open();
        assert_eq!(all.started(2), [2, 4]);
        assert!(all.submit(6));
        assert_eq!(all.started(1), [6]);
    }

    #[test]
    fn close_discards_queued_jobs_and_ends_threads() {
        let all = Fixture::new(1, 9);
        assert!(all.submit(0) && all.submit(1));
        assert_eq!(all.started(1), [0]);
        all.pool.close();
        assert!(!all.submit(2));
        assert!(!all.pool.wait_ended(Instant::now() + Duration::from_millis(20)));
        all.open();
        assert!(all.pool.wait_ended(Instant::now() + LONG));
        assert!(all.started.1.try_recv().is_err(), "the queued job must not run");
        assert_eq!(all.pool.pending(), 0);
    }

    #[test]
    fn dropped_pool_finishes_queued_jobs() {
        let all = Fixture::new(1, 9);
        assert!((0..3).all(|number| all.submit(number)));
        drop(all.pool);
        *all.gate.lock() = true;
        all.gate.wake_all();
        let mut started: Vec<_> =
            (0..3).map(|_| all.started.1.recv_timeout(LONG).unwrap()).collect();
        started.sort_unstable();
        assert_eq!(started, [0, 1, 2]);
    }

    #[test]
    fn thread_survives_a_panic_of_its_job() {
        let pool = ThreadPool::<Box<dyn FnOnce() + Send>>::new("test", 1, 9);
        let (sent, received) = channel();
        assert!(pool.submit(Box::new(|| panic!("a bug"))).is_ok());
        assert!(pool.submit(Box::new(move || sent.send(7).unwrap())).is_ok());
        assert_eq!(received.recv_timeout(LONG), Ok(7));
    }

    #[test]
    fn pool_refuses_jobs_in_another_process() {
        let mut all = Fixture::new(1, 9);
        all.pool.process = 0;
        let held = all.pool.shared.lock();
        assert!(!all.submit(0) && all.pool.pending() == 0 && all.pool.remove(|_| true).is_empty());
        all.pool.close();
        assert!(all.pool.wait_ended(Instant::now() + LONG));
        drop(held);
    }
}
