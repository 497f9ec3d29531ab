//! `io_uring`: one ring a running call, idle for the next one.

use super::{Inline, IoEngine, Op, OpQueue, Work, drive};
use io_uring::{IoUring, opcode, squeue, types::Fd};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// Operations of one call in flight at most.
const ENTRIES: u32 = 128;
/// Rings idle for later calls; more calls than that at once make and drop their own.
const IDLE_RINGS_MAX: usize = 16;

/// The engine of rings.
pub(crate) struct Uring {
    idle: Mutex<Vec<IoUring>>,
    /// A forked child does not have the rings' memory, and may have other memory in its place.
    process: u32,
}

impl Uring {
    /// # Errors
    /// As `io_uring_setup(2)`: `EPERM` or `ENOSYS` where it is forbidden or unknown.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { idle: Mutex::new(vec![ring()?]), process: std::process::id() })
    }
}

/// Completions need not interrupt the thread: it asks for them.
fn ring() -> io::Result<IoUring> {
    let ring = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .dontfork()
        .build(ENTRIES)
        .or_else(|_| IoUring::builder().dontfork().build(ENTRIES))?;
    // Before 5.5 vectors had to outlive their submission; no such kernel is worth the care.
    if ring.params().is_feature_nodrop() && ring.params().is_feature_submit_stable() {
        Ok(ring)
    } else {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl IoEngine for Uring {
    fn run(&self, work: &mut dyn Work) {
        let idle = self.idle.lock().pop();
        let Some(ring) = idle.map_or_else(|| ring().ok(), Some) else {
            // Out of descriptors or memory: slower, but it moves.
            return Inline.run(work);
        };
        let mut queue = RingQueue::new(ring);
        drive(&mut queue, work);
        if let Some(ring) = queue.into_ring() {
            let mut rings = self.idle.lock();
            if rings.len() < IDLE_RINGS_MAX {
                rings.push(ring);
            }
        }
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
    /// `None` only after `into_ring`.
    ring: Option<IoUring>,
    /// Operations in flight, by slot; the slot is the user data.
    slots: Vec<Option<Op>>,
    vacant: Vec<usize>,
    /// Slots in the submission queue that the kernel has not taken yet, oldest first.
    unsent: VecDeque<usize>,
    /// Ended without the kernel.
    failed: Vec<(u64, io::Result<()>)>,
    /// The kernel refused to take submissions: nothing more goes through this ring.
    broken: bool,
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
        }
    }

    fn in_kernel(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// The ring, if it can serve again.
    fn into_ring(mut self) -> Option<IoUring> {
        self.drain();
        self.ring.take().filter(|_| !self.broken)
    }

    fn drain(&mut self) {
        let mut ended = Vec::new();
        while self.in_flight() > 0 {
            self.reap(true, &mut ended);
        }
    }

    fn release(&mut self, slot: usize) -> Option<Op> {
        let op = self.slots.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        Some(op)
    }

    /// Hands the operation in `slot` to the kernel.
    fn push(&mut self, slot: usize) {
        let (Some(ring), Some(Some(op))) = (&mut self.ring, self.slots.get(slot)) else { return };
        let entry = op.descriptor().filter(|_| !self.broken).map(|fd| entry(op, Fd(fd), slot));
        let pushed = entry.is_some_and(|entry| {
            // SAFETY: the memory stays valid until the completion is seen (`Op::new`), the vector
            // and the file because `slots` keeps the operation until then.
            unsafe { ring.submission().push(&entry) }.is_ok()
        });
        if !pushed {
            if let Some(op) = self.release(slot) {
                let error = io::Error::other("the ring does not take operations");
                self.failed.push((op.tag, Err(error)));
            }
            return;
        }
        self.unsent.push_back(slot);
        self.enter(0);
    }

    /// Gives the kernel what is in the queue and waits for `want` completions.
    fn enter(&mut self, want: usize) {
        let Some(ring) = &mut self.ring else { return };
        loop {
            match ring.submit_and_wait(want) {
                Ok(_) => break,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) if want == 0 => {}
                    // Interrupted, short of memory, or completions must be taken first: what is
                    // in the queue goes with the next call.
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => break,
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
            // A broken ring is never entered again, so it does not take these any more.
            while let Some(slot) = self.unsent.pop_front() {
                if let Some(op) = self.release(slot) {
                    self.failed.push((op.tag, Err(io::Error::other("the ring is broken"))));
                }
            }
        }
    }
}

fn entry(op: &Op, fd: Fd, slot: usize) -> squeue::Entry {
    let offset = op.offset();
    let entry = match op.window() {
        [one] if op.is_write() => {
            opcode::Write::new(fd, one.iov_base.cast(), one.iov_len as u32).offset(offset).build()
        }
        [one] => {
            opcode::Read::new(fd, one.iov_base.cast(), one.iov_len as u32).offset(offset).build()
        }
        many if op.is_write() => {
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
    fn reap(&mut self, wait: bool, ended: &mut Vec<(u64, io::Result<()>)>) {
        ended.append(&mut self.failed);
        let in_kernel = self.in_kernel();
        let Some(ring) = &mut self.ring else { return };
        if in_kernel == 0 {
            return;
        }
        let want = usize::from(wait && ended.is_empty());
        // Entering the kernel also runs completions that wait for it (`COOP_TASKRUN`).
        let enter = if want > 0 {
            ring.completion().is_empty()
        } else {
            let queue = ring.submission();
            queue.taskrun() || queue.cq_overflow() || !queue.is_empty()
        };
        if enter && !self.broken {
            self.enter(want);
        } else if enter && want > 0 {
            // A broken ring still completes what it took; nothing but looking is left.
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
                None => self.push(slot),
                Some(end) => {
                    if let Some(op) = self.release(slot) {
                        ended.push((op.tag, end));
                    }
                }
            }
        }
    }
}

impl Drop for RingQueue {
    fn drop(&mut self) {
        self.drain();
    }
}
