//! The seam between what is to be moved and how: a [`Work`] says which operations come next, an
//! [`IoEngine`] keeps some of them in flight, on the calling thread.

mod inline;
mod op;
mod pool;
mod uring;

pub(crate) use inline::Inline;
pub(crate) use op::{Op, Span};
pub(crate) use pool::Pool;
pub(crate) use uring::Uring;

use std::io;

/// What is to be moved, pulled by an engine.
pub(crate) trait Work {
    /// The next operation, or `None` if there is none now: because all are issued, or because one
    /// in flight must end first, or because [`Work::compute`] has something to do before.
    ///
    /// May block only while nothing of this work is in flight.
    fn next(&mut self) -> Option<Op>;
    /// The operation `tag` has ended; its memory is free again.
    fn done(&mut self, tag: u64, result: io::Result<()>);
    /// A short step of computation while operations are in flight; `false` if there is none to do.
    fn compute(&mut self) -> bool;
}

/// A way to do I/O. Any number of threads may run work at once.
pub(crate) trait IoEngine: Send + Sync {
    /// Runs `work` to its end. Whatever happens, nothing is in flight when this returns or unwinds.
    fn run(&self, work: &mut dyn Work);
    /// The engine in one word.
    fn name(&self) -> &'static str;
}

/// Operations of one [`IoEngine::run`] that are in flight. Dropping it waits for them.
trait OpQueue {
    /// Whether another operation may be submitted.
    fn has_room(&self) -> bool;
    /// Submits one.
    fn submit(&mut self, op: Op);
    /// Number in flight.
    fn in_flight(&self) -> usize;
    /// Collects operations that have ended; with `wait`, at least one.
    fn reap(&mut self, wait: bool, ended: &mut Vec<(u64, io::Result<()>)>);
}

/// The loop all engines share. Order matters: first keep the device busy, then compute, then wait.
fn drive(queue: &mut dyn OpQueue, work: &mut dyn Work) {
    let mut ended = Vec::new();
    loop {
        while queue.has_room()
            && let Some(op) = work.next()
        {
            queue.submit(op);
        }
        queue.reap(false, &mut ended);
        if ended.is_empty() {
            if work.compute() {
                continue;
            }
            if queue.in_flight() == 0 {
                return;
            }
            queue.reap(true, &mut ended);
        }
        for (tag, result) in ended.drain(..) {
            work.done(tag, result);
        }
    }
}
