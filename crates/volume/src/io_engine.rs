//! I/O engines. A [`Work`] supplies operations; an [`IoEngine`] keeps some of them in flight and
//! runs on the calling thread.
//!
//! **Operations left behind.** A process cannot cancel an operation that the kernel holds, and the
//! kernel uses the operation's memory until the operation completes. An engine therefore waits for
//! all operations of a work, unless the work abandons them ([`Wait::Abandon`]): it then passes the
//! memory of *all* operations in flight to the engine, which keeps memory and file of each
//! operation until the kernel has completed it. After the call nothing reads this memory. Where
//! the engine cannot leave operations behind, it waits for them.

mod inline;
mod op;
mod pool;
mod uring;

pub(crate) use inline::Inline;
pub(crate) use op::{IoVec, Op};
pub(crate) use pool::Pool;
pub(crate) use uring::Uring;

use std::collections::BTreeMap;
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
    /// For how long to wait now: operations are in flight, and neither a completion nor a step of
    /// computation is ready. The engine calls this function again before each wait. After
    /// [`Wait::Abandon`] the engine calls no function of the work.
    fn wait(&mut self) -> Wait {
        Wait::Unlimited
    }
}

/// How a call waits for its operations in flight.
pub(crate) enum Wait {
    /// Until an operation completes.
    Unlimited,
    /// Until an operation completes, or for this time. An engine may wait longer.
    AtMost(Duration),
    /// Not at all: the engine leaves all operations in flight behind.
    Abandon(Abandoned),
}

/// The memory of every operation in flight, by the operation's tag. The engine drops a value when
/// its operation has completed.
pub(crate) type Abandoned = BTreeMap<u64, Box<dyn AbandonedOp>>;

/// An abandoned operation: owns all memory that the operation reads or writes.
pub(crate) trait AbandonedOp: Send {
    /// Reports, before the value is dropped, that the operation was not performed: its end says
    /// nothing about its disk.
    fn not_performed(&mut self);
}

/// An implementation of reads and writes of files. Any number of threads may call `run` at the same
/// time.
pub(crate) trait IoEngine: Send + Sync {
    /// Runs `work` to its end, and returns for how long the thread waited for operations in flight:
    /// zero from [`Inline`], which completes each operation when it is submitted. When the call
    /// returns or unwinds, no operation is in flight, except operations whose memory the work has
    /// passed to the engine ([`Wait::Abandon`]). The caller may therefore free all memory of
    /// operations that it still owns.
    fn run(&self, work: &mut dyn Work) -> Duration;
    /// The engine's name as one lower-case word.
    fn name(&self) -> &'static str;
}

/// The operations of one [`IoEngine::run`] that are in flight. Dropping the queue waits for them,
/// except for abandoned operations of a [`Pool`].
trait OpQueue {
    /// Whether another operation can be submitted.
    fn has_room(&self) -> bool;
    fn submit(&mut self, op: Op);
    fn in_flight(&self) -> usize;
    /// Appends completed operations to `ended`. If there are none, waits until an operation
    /// completes, at most `limit`; without a limit if `limit` is `None`. A wait may be longer where
    /// the kernel does not support the limit, and may end earlier.
    fn reap(&mut self, limit: Option<Duration>, ended: &mut Vec<(u64, io::Result<()>)>);
    /// Takes the memory of all operations in flight, and keeps each value until its operation has
    /// completed.
    fn abandon(&mut self, memory: Abandoned);
}

/// The loop of all engines. The loop submits first, so that the device works during the
/// computation; then it computes; it blocks only when no computation is ready. Ends when nothing is
/// in flight, or when the work abandons its operations. Returns for how long it blocked.
fn drive(queue: &mut dyn OpQueue, work: &mut dyn Work) -> Duration {
    let (mut ended, mut waited) = (Vec::new(), Duration::ZERO);
    loop {
        while queue.has_room()
            && let Some(op) = work.next()
        {
            queue.submit(op);
        }
        queue.reap(Some(Duration::ZERO), &mut ended);
        if ended.is_empty() {
            if work.compute() {
                continue;
            }
            if queue.in_flight() == 0 {
                return waited;
            }
            let limit = match work.wait() {
                Wait::Unlimited => None,
                Wait::AtMost(limit) => Some(limit),
                Wait::Abandon(memory) => {
                    queue.abandon(memory);
                    return waited;
                }
            };
            let began = Instant::now();
            queue.reap(limit, &mut ended);
            waited += began.elapsed();
        }
        for (tag, result) in ended.drain(..) {
            work.done(tag, result);
        }
    }
}

#[cfg(test)]
mod tests;
