//! The engine of blocking calls: a pool of threads that call `preadv` and `pwritev`, where
//! `io_uring` is forbidden.

use super::{IoEngine, Op, OpQueue, Work, drive};
use crate::ForkSafeLock;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Maximum threads of the pool, and maximum operations of one call in flight.
const THREADS_MAX: usize = 16;

/// A pool of threads. Threads start when they are first needed, and end when the pool is dropped.
/// The drop does not wait for them: an idle thread holds no caller's memory, since every call waits
/// for its own operations.
pub(crate) struct Pool {
    queue: Arc<ForkSafeLock<Queue>>,
    /// The process that made the pool. A forked child does not have the threads, and may inherit a
    /// lock that is never released: its drop must not touch the queue.
    process: u32,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<(Op, Arc<Reply>)>,
    idle: usize,
    threads: usize,
    closed: bool,
}

/// Completed operations of one call.
#[derive(Default)]
struct Reply {
    ended: ForkSafeLock<Vec<(u64, io::Result<()>)>>,
}

impl Reply {
    fn push(&self, tag: u64, result: io::Result<()>) {
        self.ended.lock().push((tag, result));
        self.ended.wake_one();
    }
}

impl Pool {
    pub(crate) fn new() -> Self {
        Self { queue: Arc::default(), process: std::process::id() }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.queue.lock().closed = true;
            self.queue.wake_all();
        }
    }
}

impl IoEngine for Pool {
    fn run(&self, work: &mut dyn Work) {
        let reply = Arc::default();
        drive(&mut PoolQueue { queue: &self.queue, reply, in_flight: 0 }, work);
    }
    fn name(&self) -> &'static str {
        "pool"
    }
}

fn run_jobs(shared: &ForkSafeLock<Queue>) {
    let mut queue = shared.lock();
    loop {
        if let Some((mut op, reply)) = queue.jobs.pop_front() {
            drop(queue);
            let result = op.perform();
            let tag = op.tag;
            // Drop the file first: when a call returns, the pool must not hold its files open.
            drop(op);
            reply.push(tag, result);
            queue = shared.lock();
        } else if queue.closed {
            queue.threads -= 1;
            return;
        } else {
            queue.idle += 1;
            queue = shared.wait(queue);
            queue.idle -= 1;
        }
    }
}

struct PoolQueue<'a> {
    queue: &'a Arc<ForkSafeLock<Queue>>,
    reply: Arc<Reply>,
    in_flight: usize,
}

impl PoolQueue<'_> {
    /// Starts another thread if there are more jobs than idle threads, up to the limit.
    fn ensure_thread(&self, queue: &mut Queue) {
        if queue.idle >= queue.jobs.len() || queue.threads >= THREADS_MAX {
            return;
        }
        let shared = Arc::clone(self.queue);
        let thread = std::thread::Builder::new().name("ritornello-pool".into());
        if thread.spawn(move || run_jobs(&shared)).is_ok() {
            queue.threads += 1;
        }
    }
}

impl OpQueue for PoolQueue<'_> {
    fn has_room(&self) -> bool {
        self.in_flight < THREADS_MAX
    }
    fn submit(&mut self, op: Op) {
        self.in_flight += 1;
        let mut queue = self.queue.lock();
        queue.jobs.push_back((op, Arc::clone(&self.reply)));
        self.ensure_thread(&mut queue);
        if queue.threads > 0 {
            drop(queue);
            self.queue.wake_one();
        } else if let Some((mut op, reply)) = queue.jobs.pop_back() {
            // The pool has no thread and cannot start one: run the operation on this thread.
            drop(queue);
            let result = op.perform();
            reply.push(op.tag, result);
        }
    }
    fn in_flight(&self) -> usize {
        self.in_flight
    }
    fn reap(&mut self, wait: bool, ended: &mut Vec<(u64, io::Result<()>)>) {
        let mut completed = self.reply.ended.lock();
        while wait && completed.is_empty() && self.in_flight > 0 {
            completed = self.reply.ended.wait(completed);
        }
        self.in_flight -= completed.len();
        ended.append(&mut completed);
    }
}

impl Drop for PoolQueue<'_> {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight > 0 {
            self.reap(true, &mut ended);
        }
    }
}
