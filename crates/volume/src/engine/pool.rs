//! A few threads that call `preadv` and `pwritev`: where `io_uring` is forbidden.

use super::{Engine, Op, Port, Work, drive};
use crate::Parked;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Threads of a pool, and operations of one caller in flight.
const THREADS: usize = 16;

/// The engine of blocking calls. Threads are started when first needed; they end when the pool is
/// dropped and are not waited for then: they hold nothing of a caller's, since every caller waits
/// for its own operations.
pub(crate) struct Pool {
    queue: Arc<Parked<Queue>>,
    /// A forked child has no threads, and locks that nobody may ever let go.
    process: u32,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<(Op, Arc<Reply>)>,
    idle: usize,
    threads: usize,
    closed: bool,
}

/// Where one caller's operations end.
#[derive(Default)]
struct Reply {
    ended: Parked<Vec<(u64, io::Result<()>)>>,
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

impl Engine for Pool {
    fn run(&self, work: &mut dyn Work) {
        let reply = Arc::default();
        drive(&mut Desk { queue: &self.queue, reply, in_flight: 0 }, work);
    }
    fn name(&self) -> &'static str {
        "pool"
    }
}

fn serve(shared: &Parked<Queue>) {
    let mut queue = shared.lock();
    loop {
        if let Some((mut op, reply)) = queue.jobs.pop_front() {
            drop(queue);
            let result = op.perform();
            let tag = op.tag;
            // The file is let go before the caller hears of the end.
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

struct Desk<'a> {
    queue: &'a Arc<Parked<Queue>>,
    reply: Arc<Reply>,
    in_flight: usize,
}

impl Desk<'_> {
    /// Makes sure that somebody will serve the queue.
    fn staff(&self, queue: &mut Queue) {
        if queue.idle >= queue.jobs.len() || queue.threads >= THREADS {
            return;
        }
        let shared = Arc::clone(self.queue);
        let thread = std::thread::Builder::new().name("ritornello-io".into());
        if thread.spawn(move || serve(&shared)).is_ok() {
            queue.threads += 1;
        }
    }
}

impl Port for Desk<'_> {
    fn has_room(&self) -> bool {
        self.in_flight < THREADS
    }
    fn submit(&mut self, op: Op) {
        self.in_flight += 1;
        let mut queue = self.queue.lock();
        queue.jobs.push_back((op, Arc::clone(&self.reply)));
        self.staff(&mut queue);
        if queue.threads > 0 {
            drop(queue);
            self.queue.wake_one();
        } else if let Some((mut op, reply)) = queue.jobs.pop_back() {
            // No thread can be had: do it here.
            drop(queue);
            let result = op.perform();
            reply.push(op.tag, result);
        }
    }
    fn in_flight(&self) -> usize {
        self.in_flight
    }
    fn reap(&mut self, wait: bool, ended: &mut Vec<(u64, io::Result<()>)>) {
        let mut here = self.reply.ended.lock();
        while wait && here.is_empty() && self.in_flight > 0 {
            here = self.reply.ended.wait(here);
        }
        self.in_flight -= here.len();
        ended.append(&mut here);
    }
}

impl Drop for Desk<'_> {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight > 0 {
            self.reap(true, &mut ended);
        }
    }
}
