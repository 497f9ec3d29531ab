//! The engine of `io_uring`. Each running call has its own ring, which later calls reuse.
//!
//! A call that abandons its operations leaves its ring to a new thread, which waits until nothing
//! is in flight and then closes the ring. The kernel runs a completion on the thread that submitted
//! the operation, and wakes this thread from an interruptible sleep, also with `COOP_TASKRUN`:
//! `TWA_SIGNAL_NO_IPI` in kernel/task_work.c leaves out only the interrupt of a thread that runs in
//! user mode, which then completes the operation when it next enters the kernel, at the latest at a
//! timer interrupt. The kernel runs the completions of a thread that has ended without the thread.
//! Two states of the thread delay completions: a sleep that nothing interrupts, for example in the
//! opening of a file on another disk that hangs, and the thread's exit, which waits for the kernel's
//! workers (io-wq) that perform operations of the thread. Until then the operations keep their
//! memory, and count as in flight on their volumes.

use super::{Abandoned, Inline, IoEngine, Op, OpQueue, Work, drive};
use io_uring::{
    IoUring, opcode, squeue,
    types::{Fd, SubmitArgs, Timespec},
};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::time::Duration;

/// Maximum operations of one call in flight.
const ENTRIES: u32 = 128;
/// Maximum idle rings kept for later calls. A call that finds no idle ring creates a ring. A call
/// that ends while this number of rings are idle drops its ring.
const IDLE_RINGS_MAX: usize = 16;

/// Maximum time of one timed wait. The kernel adds the time to its clock without a check for
/// overflow.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// The engine, with its idle rings.
pub(crate) struct Uring {
    idle: Mutex<Vec<IoUring>>,
    /// The process that made the rings. A forked child does not have their memory, and may have
    /// other memory at the same addresses.
    process: u32,
}

impl Uring {
    /// # Errors
    /// `EPERM` or `ENOSYS` if `io_uring` is forbidden or unknown to the kernel; `Unsupported`
    /// before Linux 5.5; other errors of `io_uring_setup(2)`.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { idle: Mutex::new(vec![ring()?]), process: std::process::id() })
    }
}

/// Makes a ring. Where the kernel supports `COOP_TASKRUN`, completions do not interrupt the calling
/// thread: it polls for them.
fn ring() -> io::Result<IoUring> {
    let ring = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .dontfork()
        .build(ENTRIES)
        .or_else(|_| IoUring::builder().dontfork().build(ENTRIES))?;
    // Before Linux 5.5 arrays of `iovec` had to stay in place after their submission
    // (`SUBMIT_STABLE`), and completions could be dropped (`NODROP`). On such kernels the store
    // uses the pool instead.
    if ring.params().is_feature_nodrop() && ring.params().is_feature_submit_stable() {
        Ok(ring)
    } else {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl IoEngine for Uring {
    fn run(&self, work: &mut dyn Work) -> Duration {
        let idle = self.idle.lock().pop();
        let Some(ring) = idle.map_or_else(|| ring().ok(), Some) else {
            // The process is out of descriptors or memory, so it has no ring: do the I/O without
            // concurrency.
            return Inline.run(work);
        };
        let mut queue = RingQueue::new(ring);
        let waited = drive(&mut queue, work);
        if !queue.abandoned.is_empty() {
            queue.leave();
        } else if let Some(ring) = queue.into_ring() {
            let mut rings = self.idle.lock();
            if rings.len() < IDLE_RINGS_MAX {
                rings.push(ring);
            }
        }
        waited
    }
    fn name(&self) -> &'static str {
        "uring"
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::take(self.idle.get_mut()).into_iter().for_each(std::mem::forget);
        }
    }
}

struct RingQueue {
    /// The ring; `None` only after `into_ring`.
    ring: Option<IoUring>,
    /// Operations that the kernel or the submission queue holds, by slot. An entry carries its slot
    /// as user data.
    slots: Vec<Option<Op>>,
    vacant: Vec<usize>,
    /// Slots of entries in the submission queue that the kernel has not consumed, oldest first.
    unsent: VecDeque<usize>,
    /// Operations that failed before the kernel consumed them.
    failed: Vec<(u64, io::Result<()>)>,
    /// Whether the kernel has refused a submission with an error other than `EINTR`, `ETIME`,
    /// `EAGAIN` and `EBUSY`. Nothing is submitted to such a ring again.
    broken: bool,
    /// The memory of the operations in flight, once the call has abandoned them.
    abandoned: Abandoned,
}

impl RingQueue {
    fn new(ring: IoUring) -> Self {
        Self {
            ring: Some(ring),
            slots: (0..ENTRIES).map(|_| None).collect(),
            vacant: (0..ENTRIES as usize).rev().collect(),
            unsent: VecDeque::new(),
            failed: Vec::new(),
            broken: false,
            abandoned: Abandoned::new(),
        }
    }

    fn in_kernel(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Waits for all operations, and returns the ring if it can be used again.
    fn into_ring(mut self) -> Option<IoUring> {
        self.drain();
        self.ring.take().filter(|_| !self.broken)
    }

    /// Waits for all operations. Frees the memory of each abandoned operation when it has
    /// completed.
    fn drain(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight() > 0 {
            self.reap(None, &mut ended);
            for (tag, _) in ended.drain(..) {
                drop(self.abandoned.remove(&tag));
            }
        }
    }

    /// Waits for the abandoned operations on a new thread. Waits on this thread if no thread can be
    /// started.
    fn leave(self) {
        let thread = std::thread::Builder::new().name("ritornello-reap".to_owned());
        let left = LeftQueue(ManuallyDrop::new(self));
        // If the thread fails to start, `spawn` drops the closure, and with it `left`.
        if let Err(error) = thread.spawn(move || drop(left)) {
            tracing::debug!(%error, "a call waited for operations that it had abandoned");
        }
    }

    fn release(&mut self, slot: usize) -> Option<Op> {
        let op = self.slots.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        Some(op)
    }

    /// Pushes the operation in `slot` to the submission queue, and enters the kernel.
    fn push(&mut self, slot: usize) {
        let (Some(ring), Some(Some(op))) = (&mut self.ring, self.slots.get(slot)) else { return };
        let entry = op.descriptor().filter(|_| !self.broken).map(|fd| entry(op, Fd(fd), slot));
        let pushed = entry.is_some_and(|entry| {
            // SAFETY: the memory stays valid until the completion is reaped (`Op::new`). The array
            // of iovecs and the file stay valid too, because `slots` holds the operation until
            // then.
            unsafe { ring.submission().push(&entry) }.is_ok()
        });
        if !pushed {
            if let Some(op) = self.release(slot) {
                let error = io::Error::other("io_uring does not accept the operation");
                self.failed.push((op.tag, Err(error)));
            }
            return;
        }
        self.unsent.push_back(slot);
        self.enter(0, None);
    }

    /// Submits the entries of the queue and waits for `want` completions, at most `limit`. Before
    /// Linux 5.11, the limit has no effect.
    fn enter(&mut self, want: usize, limit: Option<Duration>) {
        let Some(ring) = &mut self.ring else { return };
        let limit = limit.filter(|_| want > 0 && ring.params().is_feature_ext_arg());
        let timeout = limit.map(|limit| Timespec::from(limit.min(WAIT_MAX)));
        loop {
            let entered = match &timeout {
                Some(timeout) => {
                    ring.submitter().submit_with_args(want, &SubmitArgs::new().timespec(timeout))
                }
                None => ring.submit_and_wait(want),
            };
            match entered {
                Ok(_) => break,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) if want == 0 => {}
                    // A signal, the limit, memory pressure or a full completion queue ended the
                    // call. The next call of `enter` submits the remaining entries.
                    Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY) => break,
                    _ => {
                        self.broken = true;
                        break;
                    }
                },
            }
        }
        let left = ring.submission().len();
        while self.unsent.len() > left {
            self.unsent.pop_front();
        }
        if self.broken {
            // A broken ring is never entered again, so the kernel will not consume these entries.
            while let Some(slot) = self.unsent.pop_front() {
                if let Some(op) = self.release(slot) {
                    self.failed
                        .push((op.tag, Err(io::Error::other("io_uring refuses submissions"))));
                }
            }
        }
    }
}

/// A queue whose operations were abandoned. Dropping it waits for them. If a panic ends the wait
/// (the end of an operation may write to the log), the queue is leaked, because the kernel still
/// writes to the memory of the other operations.
struct LeftQueue(ManuallyDrop<RingQueue>);

impl Drop for LeftQueue {
    fn drop(&mut self) {
        self.0.drain();
        // SAFETY: `self.0` is not used again.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

fn entry(op: &Op, fd: Fd, slot: usize) -> squeue::Entry {
    let offset = op.offset;
    let entry = match op.window() {
        [one] if op.write => {
            opcode::Write::new(fd, one.iov_base.cast(), one.iov_len as u32).offset(offset).build()
        }
        [one] => {
            opcode::Read::new(fd, one.iov_base.cast(), one.iov_len as u32).offset(offset).build()
        }
        many if op.write => {
            opcode::Writev::new(fd, many.as_ptr(), many.len() as u32).offset(offset).build()
        }
        many => opcode::Readv::new(fd, many.as_ptr(), many.len() as u32).offset(offset).build(),
    };
    entry.user_data(slot as u64)
}

impl OpQueue for RingQueue {
    fn has_room(&self) -> bool {
        !self.vacant.is_empty()
    }
    fn submit(&mut self, op: Op) {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot] = Some(op);
            self.push(slot);
        }
    }
    fn in_flight(&self) -> usize {
        self.in_kernel() + self.failed.len()
    }
    fn reap(&mut self, limit: Option<Duration>, ended: &mut Vec<(u64, io::Result<()>)>) {
        ended.append(&mut self.failed);
        let in_kernel = self.in_kernel();
        let Some(ring) = &mut self.ring else { return };
        if in_kernel == 0 {
            return;
        }
        let want = usize::from(limit != Some(Duration::ZERO) && ended.is_empty());
        // Entering the kernel also runs completions that are deferred to this thread
        // (`COOP_TASKRUN`).
        let enter = if want > 0 {
            ring.completion().is_empty()
        } else {
            let queue = ring.submission();
            queue.taskrun() || queue.cq_overflow() || !queue.is_empty()
        };
        if enter && !self.broken {
            self.enter(want, limit);
        } else if enter && want > 0 {
            // A broken ring cannot be entered to wait. Sleep and poll it instead, because entries
            // that the kernel has consumed still complete.
            std::thread::sleep(Duration::from_millis(1));
        }
        ended.append(&mut self.failed);
        let Some(ring) = &mut self.ring else { return };
        let events: Vec<_> =
            ring.completion().map(|event| (event.user_data() as usize, event.result())).collect();
        for (slot, result) in events {
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            let Some(Some(op)) = self.slots.get_mut(slot) else { continue };
            match op.advance(result) {
                // The rest of an abandoned operation is not submitted: no code needs it.
                None if self.abandoned.is_empty() => self.push(slot),
                end => {
                    let end = end.unwrap_or(Ok(()));
                    if let Some(op) = self.release(slot) {
                        ended.push((op.tag, end));
                    }
                }
            }
        }
    }
    fn abandon(&mut self, memory: Abandoned) {
        self.abandoned = memory;
    }
}

impl Drop for RingQueue {
    fn drop(&mut self) {
        self.drain();
    }
}
