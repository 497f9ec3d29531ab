//! The engine of blocking calls: a pool of threads that call `preadv` and `pwritev`. This engine is
//! used where `io_uring` is forbidden, on file systems that are not known to let a process wait for
//! the `io_uring` writes of a killed process, for files without descriptors, for I/O through the
//! page cache, and on request.

use super::{Abandoned, IoEngine, Op, OpQueue, Work, drive};
use crate::{ForkSafeLock, Job, ThreadPool};
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Maximum threads for each volume. A call has at most this number of operations in flight, times
/// the number of volumes that it has used.
const THREADS_MAX: usize = 16;

/// Threads that run operations, separate for each volume: operations on a stalled volume take no
/// thread from operations on other volumes. The queues have no limit, but the operations of a call
/// have (`THREADS_MAX`). A call returns only after its operations have completed or were abandoned.
/// The memory of abandoned operations belongs to their [`Reply`]: after the call has returned, no
/// thread uses memory that the call had borrowed.
pub(crate) struct Pool(Box<[OnceLock<ThreadPool<OpJob>>]>);

struct OpJob {
    op: Op,
    reply: Arc<Reply>,
}

/// The state of one call's operations, which the call and the jobs of its operations share.
type Reply = ForkSafeLock<Replies>;

#[derive(Default)]
struct Replies {
    /// Completed operations that the call has not collected.
    ended: Vec<(u64, io::Result<()>)>,
    /// The memory of the operations in flight, once the call has abandoned them.
    abandoned: Option<Abandoned>,
}

impl Job for OpJob {
    fn run(mut self) {
        // An abandoned operation that waited for a thread is not performed: no code needs it.
        let is_abandoned = self.reply.lock().abandoned.is_some();
        let result = if is_abandoned { Ok(()) } else { self.op.perform() };
        let tag = self.op.tag;
        // Drop the file first: when a call returns, the pool must not hold the call's files open,
        // except the files of abandoned operations.
        drop(self.op);
        let mut replies = self.reply.lock();
        let mut memory = match &mut replies.abandoned {
            Some(abandoned) => abandoned.remove(&tag),
            None => {
                replies.ended.push((tag, result));
                None
            }
        };
        drop(replies);
        self.reply.wake_one();
        // Free the memory outside the lock, because it may take other locks.
        if let Some(memory) = memory.as_mut().filter(|_| is_abandoned) {
            memory.not_performed();
        }
        drop(memory);
    }
}

impl Pool {
    pub(crate) fn new() -> Self {
        Self((0..=u8::MAX).map(|_| OnceLock::new()).collect())
    }

    fn of(&self, volume: u8) -> &ThreadPool<OpJob> {
        self.0[usize::from(volume)]
            .get_or_init(|| ThreadPool::new("ritornello-pool", THREADS_MAX, usize::MAX))
    }
}

impl IoEngine for Pool {
    fn run(&self, work: &mut dyn Work) -> Duration {
        drive(
            &mut PoolQueue {
                pool: self,
                reply: Arc::default(),
                in_flight: 0,
                volumes: BTreeSet::new(),
            },
            work,
        )
    }
    fn name(&self) -> &'static str {
        "pool"
    }
}

struct PoolQueue<'a> {
    pool: &'a Pool,
    reply: Arc<Reply>,
    in_flight: usize,
    /// The volumes of the operations that were submitted.
    volumes: BTreeSet<u8>,
}

impl OpQueue for PoolQueue<'_> {
    fn has_room(&self) -> bool {
        self.in_flight < THREADS_MAX * self.volumes.len().max(1)
    }
    fn submit(&mut self, op: Op) {
        self.in_flight += 1;
        self.volumes.insert(op.volume);
        if let Err(job) =
            self.pool.of(op.volume).submit(OpJob { op, reply: Arc::clone(&self.reply) })
        {
            // The pool has no thread and cannot start one: run the operation on this thread.
            job.run();
        }
    }
    fn in_flight(&self) -> usize {
        self.in_flight
    }
    fn reap(&mut self, limit: Option<Duration>, ended: &mut Vec<(u64, io::Result<()>)>) {
        let mut replies = self.reply.lock();
        if limit != Some(Duration::ZERO) {
            let until = limit.map(|limit| Instant::now() + limit);
            while replies.ended.is_empty() && self.in_flight > 0 {
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                replies = match left {
                    None => self.reply.wait(replies),
                    Some(Duration::ZERO) => break,
                    Some(left) => self.reply.wait_for(replies, left),
                };
            }
        }
        self.in_flight -= replies.ended.len();
        ended.append(&mut replies.ended);
    }
    fn abandon(&mut self, mut memory: Abandoned) {
        let mut replies = self.reply.lock();
        // An operation that has completed since the last `reap` does not look for its memory again.
        let completed: Vec<_> =
            replies.ended.drain(..).filter_map(|(tag, _)| memory.remove(&tag)).collect();
        replies.abandoned = Some(memory);
        drop(replies);
        self.in_flight = 0;
        drop(completed);
        // Operations that no thread has begun would keep their memory until a thread is free.
        for volume in &self.volumes {
            let is_own = |job: &OpJob| Arc::ptr_eq(&job.reply, &self.reply);
            self.pool.of(*volume).remove(is_own).into_iter().for_each(OpJob::run);
        }
    }
}

impl Drop for PoolQueue<'_> {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight > 0 {
            self.reap(None, &mut ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_engine::IoVec;
    use crate::memory_block::Block;

    #[test]
    fn call_has_operations_in_flight_for_each_of_its_volumes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path();
        let access = ritornello_medium::Access { write: true, create: false, direct: false };
        let file = ritornello_medium::Medium::open(&ritornello_medium::Host, path, access).unwrap();
        let pool = Pool::new();
        let mut block = Block::new(4096);
        let to = block.bytes_mut();
        let mut queue = PoolQueue {
            pool: &pool,
            reply: Arc::default(),
            in_flight: 0,
            volumes: BTreeSet::new(),
        };
        let op = |volume: u8| {
            let iovec = vec![IoVec::new(to.as_ptr().cast_mut(), to.len())];
            // SAFETY: `queue` waits for all operations before `block` is dropped.
            let op = unsafe { Op::new(0, Arc::clone(&file), true, 0, iovec) };
            op.on(volume)
        };
        (0..THREADS_MAX).for_each(|_| queue.submit(op(0)));
        assert!(!queue.has_room());
        queue.submit(op(1));
        assert!(queue.has_room());
        drop(queue);
    }
}
