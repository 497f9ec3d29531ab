//! I/O engines. A [`Work`] supplies operations; an [`IoEngine`] keeps some of them in flight and
//! runs on the calling thread.

mod inline;
mod op;
mod pool;
mod uring;

pub(crate) use inline::Inline;
pub(crate) use op::{IoVec, Op};
pub(crate) use pool::Pool;
pub(crate) use uring::Uring;

use std::io;
use std::time::{Duration, Instant};

/// The operations of one call, and what the call computes while operations are in flight.
pub(crate) trait Work {
    /// The next operation. `None` if no operation is ready: all are submitted, or an operation in
    /// flight must complete first, or [`Work::compute`] must run first.
    ///
    /// May block only while no operation of this work is in flight.
    fn next(&mut self) -> Option<Op>;
    /// Reports that the operation `tag` has completed; the kernel no longer uses its memory.
    fn done(&mut self, tag: u64, result: io::Result<()>);
    /// Does one short step of computation, such as a checksum of bytes that were read; `false` if
    /// no step is ready.
    fn compute(&mut self) -> bool;
}

/// An implementation of reads and writes of files. Any number of threads may call `run` at the same
/// time.
pub(crate) trait IoEngine: Send + Sync {
    /// Runs `work` to its end, and returns for how long the thread waited for operations in flight:
    /// zero from [`Inline`], which completes each operation when it is submitted. When the call
    /// returns or unwinds, no operation is in flight, so that the caller may free the memory of the
    /// operations.
    fn run(&self, work: &mut dyn Work) -> Duration;
    /// The engine's name as one lower-case word.
    fn name(&self) -> &'static str;
}

/// The operations of one [`IoEngine::run`] that are in flight. Dropping the queue waits for them.
trait OpQueue {
    /// Whether another operation can be submitted.
    fn has_room(&self) -> bool;
    fn submit(&mut self, op: Op);
    fn in_flight(&self) -> usize;
    /// Appends completed operations to `ended`; with `wait`, blocks until at least one operation
    /// has completed.
    fn reap(&mut self, wait: bool, ended: &mut Vec<(u64, io::Result<()>)>);
}

/// The loop of all engines. The loop submits first, so that the device works during the
/// computation; then it computes; it blocks only when no computation is ready. Returns for how long
/// it blocked.
fn drive(queue: &mut dyn OpQueue, work: &mut dyn Work) -> Duration {
    let (mut ended, mut waited) = (Vec::new(), Duration::ZERO);
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
                return waited;
            }
            let began = Instant::now();
            queue.reap(true, &mut ended);
            waited += began.elapsed();
        }
        for (tag, result) in ended.drain(..) {
            work.done(tag, result);
        }
    }
}
