//! Reads runs from files.
//!
//! Without sections, whole pages are read at the same time as the header of their run, which saves
//! a round trip to the disk; they are verified once the header is known. Sections are read after
//! all headers, because only the headers say where the slices of a section are.
//!
//! A stopped call leaves its operations behind if none of them writes to memory of the target
//! ([`Wait::Abandon`]): each operation owns its staging memory, its block of last units, and a
//! share of its run's header block. The store releases the lease on the runs when the call returns,
//! so an operation left behind may read bytes of other runs. No code reads the memory that it
//! fills.

use super::fetches::{Fetches, Span};
use super::{InFlight, OpMemory, STEP};
use crate::io_engine::{AbandonedOp, Op, Wait, Work};
use crate::segments::{LeftBehind, OpInFlight, Segments};
use crate::transfer::check::PartCheck;
use crate::transfer::read::ReadJob;
use crate::transfer::volume_times::VolumeTimes;
use crate::transfer::{Control, MissReason, PageOutcome, RunRead, Sections};
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A call with sections keeps 1/8 of the usual bytes in flight: otherwise reads of slices needed
/// last would delay, in the disk's queue, reads of slices needed first.
const IN_FLIGHT_DIVISOR: usize = 8;
/// A call with sections starts no read while 1/32 of the usual bytes in flight wait for
/// verification: waiters can use only verified sections, so verification comes before further
/// reads.
const UNVERIFIED_DIVISOR: usize = 4 * IN_FLIGHT_DIVISOR;
/// Time for which a stopped call still waits for operations that it can leave behind. A disk that
/// works completes most operations in this time, and the call delivers their pages.
const LEAVE_AFTER: Duration = Duration::from_millis(50);

/// Reads runs as [`Segments::read_runs`] does. Starts no operation while `in_flight` bytes, or with
/// sections 1/8 of `in_flight` bytes, are in flight. Adds the bytes and the busy time of each volume
/// to `times`. Returns also for how long the thread waited for the disk.
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
    sections: Option<&Sections>,
    in_flight: usize,
    times: Option<&VolumeTimes>,
) -> (Vec<Vec<PageOutcome>>, Duration) {
    let mut job = ReadJob::new(segments, reads, control, sections);
    if job.is_stopped() {
        return (job.outcomes(), Duration::ZERO);
    }
    let (in_flight, unverified) = match sections {
        None => (in_flight, in_flight),
        Some(_) => (in_flight / IN_FLIGHT_DIVISOR, in_flight / UNVERIFIED_DIVISOR),
    };
    let mut read = DiskRead {
        fetches: Fetches::new(job),
        in_flight: InFlight::new(in_flight, times),
        in_target: 0,
        stopped_since: None,
        unverified_limit: unverified as u64,
        checking: None,
        scratch: Vec::new(),
    };
    let waited = segments.engine.run(&mut read);
    (read.fetches.job.outcomes(), waited)
}

struct DiskRead<'a> {
    fetches: Fetches<'a>,
    in_flight: InFlight<'a, PendingOp>,
    /// Number of operations in flight that write to memory of the target.
    in_target: usize,
    /// When the call, after it was stopped, first waited without an operation in flight that writes
    /// to the target.
    stopped_since: Option<Instant>,
    /// No chunk is read while this number of bytes in memory, or more, is unverified. Without
    /// sections only bytes in staging count.
    unverified_limit: u64,
    /// The part that is being verified.
    checking: Option<(usize, PartCheck<'a>)>,
    /// Memory for slices that cannot be decoded straight to the target.
    scratch: Vec<u8>,
}

struct PendingOp {
    span: Span,
    memory: OpMemory,
    op: OpInFlight,
}

/// An operation that was left behind: its memory, and its share of the stall accounting. The fields
/// are dropped in this order: the memory is free before the operation stops counting as in flight.
struct LeftOp {
    _memory: OpMemory,
    op: OpInFlight,
    _call: Arc<LeftBehind>,
}

impl AbandonedOp for LeftOp {
    fn not_performed(&mut self) {
        self.op.not_performed();
    }
}

enum NextOp {
    Ready(Op),
    Wait,
    Fail(MissReason),
}

impl DiskRead<'_> {
    /// Prepares the operation of the first queued chunk.
    fn next_op(&mut self) -> NextOp {
        if let Some(reason) = self.fetches.front_failure() {
            return NextOp::Fail(reason);
        }
        let Some(Span { chunk, .. }) = self.fetches.queue.front() else { return NextOp::Wait };
        let (segments, control) = (self.fetches.job.segments, self.fetches.job.control);
        let (segment, volume) = (chunk.segment, chunk.segment.volume());
        // Opening a file may wait for its disk, and meanwhile the completed operations on other
        // disks would count as in flight: their disks would seem to stall.
        if !self.in_flight.is_idle() && !segments.is_open(segment) {
            return NextOp::Wait;
        }
        let Some(op) = segments.stalls.begin(volume) else {
            return NextOp::Fail(MissReason::Stalled);
        };
        let file = match segments.file(segment) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, segment = segment.0, "a segment cannot be opened");
                return NextOp::Fail(MissReason::Io);
            }
        };
        // A call waits for staging memory only while it holds no staging memory: two calls that
        // each hold some and wait for more would wait for each other. The completion of operations
        // in flight and the check of parts in memory free staging memory.
        let idle = self.in_flight.is_idle()
            && self.fetches.unchecked.is_empty()
            && self.checking.is_none();
        let arena = &segments.staging;
        // While the call waits for memory, the operation does not count as in flight: its disk would
        // seem to stall.
        let op = Cell::new(Some(op));
        let take = |bytes| match arena.try_take(bytes) {
            None if idle => {
                op.take();
                control.stage(arena, bytes)
            }
            buffer => buffer,
        };
        let mut has_room = self.fetches.stage_front(|bytes| arena.try_take(bytes));
        if !has_room && idle {
            // Little memory is free: continue part by part. The remainder of a part that has memory
            // is read first: its memory must not be held while the call waits for memory of another
            // part.
            self.fetches.split_front();
            if let Some(reason) = self.fetches.front_failure() {
                return NextOp::Fail(reason);
            }
            has_room = self.fetches.stage_front(take);
        }
        let prepared = if has_room { self.fetches.prepare_front(take) } else { None };
        let Some((memory, iovecs)) = prepared else {
            let reason = control.stop().unwrap_or(MissReason::Staging);
            return if idle { NextOp::Fail(reason) } else { NextOp::Wait };
        };
        let Some(op) = op.take().or_else(|| segments.stalls.begin(volume)) else {
            return NextOp::Fail(MissReason::Stalled);
        };
        let Some(span) = self.fetches.queue.pop_front() else { return NextOp::Wait };
        let (offset, bytes) =
            (span.chunk.offset, span.chunk.logical.end - span.chunk.logical.start);
        self.in_target += usize::from(memory.uses_target);
        let pending = PendingOp { span, memory, op: op.submitted() };
        let tag = self.in_flight.insert(volume, bytes, pending);
        // SAFETY: the target's memory is exclusive until the call returns (`PageTarget`), and the
        // engine does not return before an operation that writes to it completes, because `wait`
        // abandons no such operation. `OpMemory` owns all other memory of the operation; the
        // pending operation holds it until `done`, and `wait` passes it to the engine otherwise.
        NextOp::Ready(unsafe { Op::new(tag, file, false, offset, iovecs) }.on(volume))
    }
}

impl Work for DiskRead<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            let is_behind = self.fetches.unverified_bytes >= self.unverified_limit;
            if self.fetches.job.is_stopped() || is_behind || !self.in_flight.has_room() {
                return None;
            }
            if !self.fetches.fill_queue(self.in_flight.is_idle()) {
                return None;
            }
            match self.next_op() {
                NextOp::Wait => return None,
                NextOp::Ready(op) => return Some(op),
                NextOp::Fail(reason) => {
                    let span = self.fetches.queue.pop_front()?;
                    self.fetches.complete_chunk(&span, Some(reason));
                }
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some(PendingOp { span, memory, op }) = self.in_flight.complete(tag) else { return };
        self.in_target -= usize::from(memory.uses_target);
        let failure = result.err().map(|error| {
            let (segment, offset) = (span.chunk.segment.0, span.chunk.offset);
            tracing::debug!(%error, segment, offset, "a read failed");
            MissReason::Io
        });
        if failure.is_none() {
            for bounce in &memory.buffers.bounces {
                let (to, _) = self.fetches.memory(bounce.piece);
                // SAFETY: the operation that moved these bytes has completed; the target is
                // exclusive.
                unsafe { to.scatter(bounce.range.clone(), memory.buffers.bytes(bounce)) };
            }
        }
        drop(memory);
        self.fetches.complete_chunk(&span, failure);
        drop(op);
    }

    fn wait(&mut self) -> Wait {
        if self.in_target > 0 {
            return Wait::Unlimited;
        }
        if !self.fetches.job.is_stopped() {
            return self.fetches.job.control.check_after().map_or(Wait::Unlimited, Wait::AtMost);
        }
        let since = self.stopped_since.get_or_insert_with(Instant::now);
        let left = LEAVE_AFTER.saturating_sub(since.elapsed());
        if !left.is_zero() {
            return Wait::AtMost(left);
        }
        let Some(call) = self.fetches.job.segments.stalls.leave().map(Arc::new) else {
            return Wait::AtMost(LEAVE_AFTER);
        };
        let leave = |(tag, PendingOp { memory, op, .. })| {
            let left = LeftOp { _memory: memory, op, _call: Arc::clone(&call) };
            (tag, Box::new(left) as Box<dyn AbandonedOp>)
        };
        Wait::Abandon(self.in_flight.abandon().map(leave).collect())
    }

    fn compute(&mut self) -> bool {
        let waiting = self.fetches.unchecked.len();
        let next = self.checking.take().or_else(|| self.fetches.next_check());
        let Some((part, mut check)) = next else {
            // `next_check` completed parts that do not match their header, and this may permit
            // further reads.
            return waiting > 0;
        };
        let result = match self.fetches.job.expected(part) {
            // SAFETY: all operations on this part have completed, the target is exclusive except
            // for bytes that arrived earlier, and the part is the same in every step.
            Some(expected) => unsafe { check.step(&expected, &mut self.scratch, STEP) },
            None => Some(Err(MissReason::Header)),
        };
        match result {
            None => self.checking = Some((part, check)),
            Some(result) => self.fetches.finish_check(part, result),
        }
        true
    }
}
