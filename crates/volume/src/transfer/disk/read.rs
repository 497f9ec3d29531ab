//! Reads runs from files.
//!
//! Without sections, whole pages are read at the same time as the header of their run, which saves
//! a round trip to the disk; they are verified once the header is known. Sections are read after
//! all headers, because only the headers say where the slices of a section are.

use super::fetches::{Fetches, Span};
use super::{InFlight, OpBuffers, STEP};
use crate::io_engine::{Op, Work};
use crate::segments::{OpInFlight, Segments};
use crate::staging::StagingBuffer;
use crate::transfer::check::PartCheck;
use crate::transfer::read::ReadJob;
use crate::transfer::volume_times::VolumeTimes;
use crate::transfer::{Control, MissReason, PageOutcome, RunRead, Sections};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A call with sections keeps 1/8 of the usual bytes in flight: otherwise reads of slices needed
/// last would delay, in the disk's queue, reads of slices needed first.
const IN_FLIGHT_DIVISOR: usize = 8;
/// A call with sections starts no read while 1/32 of the usual bytes in flight wait for
/// verification: waiters can use only verified sections, so verification comes before further
/// reads.
const UNVERIFIED_DIVISOR: usize = 4 * IN_FLIGHT_DIVISOR;

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
        unverified_limit: unverified as u64,
        checking: None,
        scratch: Vec::new(),
    };
    let waited = segments.engine.run(&mut read);
    (read.fetches.job.outcomes(), waited)
}

struct DiskRead<'a> {
    fetches: Fetches<'a>,
    in_flight: InFlight<'a, PendingOp<'a>>,
    /// No chunk is read while this number of bytes in memory, or more, is unverified. Without
    /// sections only bytes in staging count.
    unverified_limit: u64,
    /// The part that is being verified.
    checking: Option<(usize, PartCheck<'a>)>,
    /// Memory for slices that cannot be decoded straight to the target.
    scratch: Vec<u8>,
}

struct PendingOp<'a> {
    span: Span,
    buffers: OpBuffers,
    _op: OpInFlight<'a>,
    /// Staging memory of parts, held until the operation has completed, because the kernel writes
    /// to it.
    _staging_buffers: Vec<Arc<StagingBuffer>>,
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
        let volume = chunk.segment.volume();
        // Opening a file may wait for its disk, and meanwhile the completed operations on other
        // disks would count as in flight: their disks would seem to stall.
        if !self.in_flight.is_idle() && !segments.is_open(chunk.segment) {
            return NextOp::Wait;
        }
        let Some(op) = segments.stalls.begin(volume) else {
            return NextOp::Fail(MissReason::Stalled);
        };
        let file = match segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, segment = chunk.segment.0, "a segment cannot be opened");
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
        let take = |bytes| match arena.try_take(bytes) {
            None if idle => control.stage(arena, bytes),
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
        let Some((buffers, iovecs)) = prepared else {
            let reason = control.stop().unwrap_or(MissReason::Staging);
            return if idle { NextOp::Fail(reason) } else { NextOp::Wait };
        };
        let Some(span) = self.fetches.queue.pop_front() else { return NextOp::Wait };
        let (offset, bytes) =
            (span.chunk.offset, span.chunk.logical.end - span.chunk.logical.start);
        let _staging_buffers = self.fetches.staging_of(&span);
        let pending = PendingOp { span, buffers, _op: op.submitted(), _staging_buffers };
        let tag = self.in_flight.insert(volume, bytes, pending);
        // SAFETY: the target's memory is exclusive until the call returns (`PageTarget`), the
        // pending operation holds the buffers until it completes, the header block stays until its
        // last chunk completes, and the engine does not return before all operations complete.
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
        let Some(PendingOp { span, buffers, _op, _staging_buffers }) = self.in_flight.complete(tag)
        else {
            return;
        };
        let failure = result.err().map(|error| {
            let (segment, offset) = (span.chunk.segment.0, span.chunk.offset);
            tracing::debug!(%error, segment, offset, "a read failed");
            MissReason::Io
        });
        if failure.is_none() {
            for bounce in &buffers.bounces {
                let (memory, _) = self.fetches.memory(bounce.piece);
                // SAFETY: the operation that moved these bytes has completed; the target is
                // exclusive.
                unsafe { memory.scatter(bounce.range.clone(), buffers.bytes(bounce)) };
            }
        }
        drop(buffers);
        self.fetches.complete_chunk(&span, failure);
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
