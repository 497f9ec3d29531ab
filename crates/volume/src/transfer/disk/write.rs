//! Writes runs to files. Pages that move in place are checksummed while they are in flight, except
//! a first page that shares the header's operation, which is checksummed before. Pages that go
//! through staging are checksummed as they are copied. A run's header is submitted when all
//! checksums are known.

use super::{InFlight, OpBuffers, STEP};
use crate::io_engine::{Op, Work};
use crate::memory_block::Block;
use crate::segments::{OpInFlight, Segments};
use crate::transfer::check::SliceSums;
use crate::transfer::chunk::Chunk;
use crate::transfer::page::Direct;
use crate::transfer::volume_times::VolumeTimes;
use crate::transfer::write::{self, FailedWrite, NewRun, stopped};
use crate::transfer::{Control, MissReason, RunWrite};
use ritornello_format::{Error, Result};
use std::cell::Cell;
use std::collections::VecDeque;
use std::error::Error as StdError;
use std::io;
use std::time::Duration;

/// Writes runs as [`Segments::write_runs`] does. Starts no operation while `in_flight` bytes are in
/// flight. Adds the bytes and the busy time of each volume to `times`. Returns also for how long
/// the thread waited for the disk.
pub(in crate::transfer) fn write(
    segments: &Segments,
    writes: &[RunWrite<'_>],
    control: &Control,
    in_flight: usize,
    times: Option<&VolumeTimes>,
) -> (Vec<Result<u64>>, Duration) {
    let mut write = DiskWrite {
        segments,
        writes,
        control,
        runs: Vec::with_capacity(writes.len()),
        heads: VecDeque::new(),
        in_flight: InFlight::new(in_flight, times),
        to_sum: VecDeque::new(),
        summing: None,
    };
    let waited = segments.engine.run(&mut write);
    (write.results(), waited)
}

/// The state of one call.
struct DiskWrite<'a> {
    segments: &'a Segments,
    writes: &'a [RunWrite<'a>],
    control: &'a Control,
    /// For each run that has begun, its state, or its error once it has failed. Only the last run
    /// has chunks in `body`.
    runs: Vec<Result<RunState<'a>>>,
    /// Runs whose `body` is submitted. The headers of these runs wait until the checksums of pages
    /// are known.
    heads: VecDeque<usize>,
    in_flight: InFlight<'a, PendingOp>,
    /// Pages that move in place and are not checksummed yet, as run and page. Pages that go through
    /// staging are checksummed during the copy.
    to_sum: VecDeque<(usize, usize)>,
    summing: Option<PageSums<'a>>,
}

/// A run that is being written.
struct RunState<'a> {
    new: NewRun<'a>,
    /// Chunks still to submit that do not hold the header, and do not share an operation with it.
    body: VecDeque<Chunk>,
    /// Chunks of the header still to submit: one chunk, which may include the first page, unless
    /// the header is in several extents.
    head: VecDeque<Chunk>,
    /// Whether all of `body` is submitted and the run is queued for its header.
    is_body_issued: bool,
    /// The encoded header and its checksum, once all checksums of pages are known.
    encoded_header: Option<(Vec<u8>, u64)>,
    /// For each page, whether it was queued in [`DiskWrite::to_sum`].
    queued: Vec<bool>,
    /// Number of pages whose checksums are not known yet.
    unsummed: usize,
    /// 1 if the first page goes through staging and shares the header's operation, else 0. Such a
    /// page is checksummed only when this operation is prepared, so the header does not wait for
    /// it.
    unsummed_in_head: usize,
    /// Checksums of the page that is being copied to staging, chunk by chunk.
    gather_sums: Option<SliceSums<'a>>,
}

struct PendingOp {
    run: usize,
    chunk: Chunk,
    _op: OpInFlight,
    /// Memory of the operation, held until it has completed.
    _buffers: (OpBuffers, Option<Block>),
}

struct PageSums<'a> {
    run: usize,
    page: usize,
    at: usize,
    sums: SliceSums<'a>,
}

enum NextOp {
    Ready(Op),
    Wait,
    Fail(Error),
}

impl<'a> DiskWrite<'a> {
    /// The outcome of every run. A run that is not finished was stopped by `control`.
    fn results(self) -> Vec<Result<u64>> {
        let stopped = || stopped(self.control.stop().unwrap_or(MissReason::Io));
        let finished = |run: RunState<'_>| match run.encoded_header {
            Some((_, sum)) if run.body.is_empty() && run.head.is_empty() => Ok(sum),
            _ => Err(stopped()),
        };
        let mut results: Vec<Result<u64>> =
            self.runs.into_iter().map(|run| run.and_then(finished)).collect();
        results.extend(self.writes[results.len()..].iter().map(|_| Err(stopped())));
        results
    }

    fn fail(&mut self, run: usize, error: Error) {
        if self.runs[run].is_ok() {
            self.runs[run] = Err(error);
        }
    }

    /// The run whose chunk is to be submitted next, and whether this is a chunk of `head`. A header
    /// whose page checksums are known has precedence, because it completes a run; next is the body
    /// of the newest run. If neither has a chunk, begins the next run.
    fn current(&mut self) -> Option<(usize, bool)> {
        loop {
            while let Some(&at) = self.heads.front() {
                match &self.runs[at] {
                    Ok(run) if !run.head.is_empty() => {
                        if run.unsummed <= run.unsummed_in_head {
                            return Some((at, true));
                        }
                        break;
                    }
                    _ => self.heads.pop_front(),
                };
            }
            let at = self.runs.len().wrapping_sub(1);
            match self.runs.last_mut() {
                Some(Ok(run)) if !run.body.is_empty() => return Some((at, false)),
                Some(Ok(run)) if !run.is_body_issued => {
                    run.is_body_issued = true;
                    self.heads.push_back(at);
                    self.queue(at, 0);
                }
                _ => {
                    let write = self.writes.get(self.runs.len())?;
                    let direct = Direct::of(self.segments, self.control);
                    self.runs.push(NewRun::new(self.segments, write, direct).map(RunState::begin));
                }
            }
        }
    }

    /// Queues a page for its checksums if it moves in place and is not queued yet.
    fn queue(&mut self, at: usize, page: usize) {
        if let Ok(run) = &mut self.runs[at]
            && run.new.pages[page].memory.is_in_place()
            && !std::mem::replace(&mut run.queued[page], true)
        {
            self.to_sum.push_back((at, page));
        }
    }

    fn next_op(&mut self, at: usize, is_head: bool) -> NextOp {
        let Ok(run) = &mut self.runs[at] else { return NextOp::Wait };
        let queue = if is_head { &run.head } else { &run.body };
        let Some(chunk) = queue.front().cloned() else { return NextOp::Wait };
        let volume = chunk.segment.volume();
        // As in reads: the open may wait for its disk.
        if !self.in_flight.is_idle() && !self.segments.is_open(chunk.segment) {
            return NextOp::Wait;
        }
        let Some(op) = self.segments.stalls.begin(volume) else {
            return NextOp::Fail(stopped(MissReason::Stalled));
        };
        let file = match self.segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => return NextOp::Fail(failed("a segment cannot be opened", &chunk, error)),
        };
        let layout = run.new.layout;
        let mut header = is_head.then(|| Block::new(layout.header as usize));
        let idle = self.in_flight.is_idle();
        // The call waits for staging memory only while it has no operation in flight: another call
        // may be waiting for the memory that such an operation holds.
        // As in reads: while the call waits, the operation does not count as in flight.
        let op = Cell::new(Some(op));
        let take = |bytes| match self.segments.staging.try_take(bytes) {
            None if idle => {
                op.take();
                self.control.stage(&self.segments.staging, bytes)
            }
            buffer => buffer,
        };
        let pages = &run.new.pages;
        let parts = layout.parts(&chunk.logical);
        let pieces = parts.clone().map(|(page, range)| (page, range, &pages[page].memory));
        let prepared = OpBuffers::prepare(&chunk, header.as_ref(), layout.header, pieces, take);
        let Some((buffers, iovecs)) = prepared else {
            let reason = self.control.stop().unwrap_or(MissReason::Staging);
            return if idle { NextOp::Fail(stopped(reason)) } else { NextOp::Wait };
        };
        let Some(op) = op.take().or_else(|| self.segments.stalls.begin(volume)) else {
            return NextOp::Fail(stopped(MissReason::Stalled));
        };
        run.gather(&buffers);
        if let Some(block) = &mut header {
            match run.encode_header() {
                Ok(bytes) => block.bytes_mut()[..bytes.len()].copy_from_slice(bytes),
                Err(error) => return NextOp::Fail(error),
            }
        }
        let (offset, bytes) = (chunk.offset, chunk.logical.end - chunk.logical.start);
        let pending =
            PendingOp { run: at, chunk, _op: op.submitted(), _buffers: (buffers, header) };
        let tag = self.in_flight.insert(volume, bytes, pending);
        for (page, _) in parts {
            self.queue(at, page);
        }
        // SAFETY: the source's memory is readable until the call returns (`PageSource`),
        // `in_flight` holds buffers and header until the operation completes, and the engine does
        // not return before that.
        NextOp::Ready(unsafe { Op::new(tag, file, true, offset, iovecs) }.on(volume))
    }
}

impl<'a> RunState<'a> {
    /// Cuts a run into chunks.
    fn begin(new: NewRun<'a>) -> Self {
        let (layout, place, count) = (new.layout, new.write.place, new.pages.len());
        let (mut body, mut head) = (Vec::new(), Vec::new());
        layout.cut(place, layout.pages(1..count as u64), &mut body);
        // A short first page shares the header's operation where page and header are contiguous.
        let first_page = layout.pages(0..1);
        if layout.page <= layout.op {
            layout.cut(place, 0..first_page.end, &mut head);
        }
        let mut unsummed_in_head = usize::from(!new.pages[0].memory.is_in_place());
        if head.len() != 1 {
            head.clear();
            unsummed_in_head = 0;
            layout.cut(place, first_page, &mut body);
            layout.cut(place, 0..layout.header, &mut head);
        }
        Self {
            new,
            body: body.into(),
            head: head.into(),
            is_body_issued: false,
            encoded_header: None,
            queued: vec![false; count],
            unsummed: count,
            unsummed_in_head,
            gather_sums: None,
        }
    }

    /// Copies the bytes that do not move in place to their buffers, and checksums bytes of pages
    /// that go through staging. Chunks are prepared in order, so the bytes of each page are added
    /// to its checksums in order.
    fn gather(&mut self, buffers: &OpBuffers) {
        for bounce in &buffers.bounces {
            let page = &self.new.pages[bounce.piece];
            // SAFETY: the operation is not submitted yet, and a source's memory is readable.
            let copy = unsafe {
                let copy = buffers.bytes_mut(bounce);
                page.memory.gather(bounce.range.clone(), copy);
                copy
            };
            // Bytes after the end of a page are padding, which no checksum covers.
            if !bounce.staged || bounce.range.start >= page.bytes {
                continue;
            }
            let (from, to) = (bounce.range.start, bounce.range.end.min(page.bytes));
            let sums = self.gather_sums.take();
            let mut sums = sums.unwrap_or_else(|| self.new.sums_of(bounce.piece));
            let (page, slices) = self.new.page_mut(bounce.piece);
            sums.fill(&copy[..to - from], slices);
            if to < page.bytes {
                self.gather_sums = Some(sums);
            } else {
                self.unsummed -= 1;
            }
        }
    }

    /// The encoded header. All checksums of the pages must be known.
    fn encode_header(&mut self) -> Result<&[u8]> {
        let encoded_header = match self.encoded_header.take() {
            Some(encoded_header) => encoded_header,
            None => self.new.encode_header()?,
        };
        Ok(&self.encoded_header.insert(encoded_header).0)
    }
}

impl Work for DiskWrite<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.control.stop().is_some() || !self.in_flight.has_room() {
                return None;
            }
            let (at, is_head) = self.current()?;
            match self.next_op(at, is_head) {
                NextOp::Wait => return None,
                NextOp::Ready(op) => {
                    if let Ok(run) = &mut self.runs[at] {
                        if is_head { &mut run.head } else { &mut run.body }.pop_front();
                    }
                    return Some(op);
                }
                NextOp::Fail(error) => self.fail(at, error),
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some(PendingOp { run, chunk, .. }) = self.in_flight.complete(tag) else { return };
        if let Err(error) = result {
            let error = FailedWrite::new(chunk.segment, error);
            self.fail(run, failed("a run could not be written", &chunk, error));
        }
    }

    fn compute(&mut self) -> bool {
        let next = match self.summing.take() {
            Some(PageSums { run, page, at, sums }) => Some((run, page, at, Some(sums))),
            None => self.to_sum.pop_front().map(|(run, page)| (run, page, 0, None)),
        };
        let Some((at, page, from, sums)) = next else { return false };
        let Ok(run) = &mut self.runs[at] else { return true };
        let mut sums = sums.unwrap_or_else(|| run.new.sums_of(page));
        let (new, slices) = run.new.page_mut(page);
        let to = (from + STEP).min(new.bytes);
        // SAFETY: a source's memory is readable (`PageSource`).
        unsafe { new.memory.for_each(from..to, |bytes| sums.fill(bytes, slices)) };
        if to < new.bytes {
            self.summing = Some(PageSums { run: at, page, at: to, sums });
        } else {
            run.unsummed -= 1;
        }
        true
    }
}

/// Error for an operation on `chunk` that the file system failed.
fn failed(what: &str, chunk: &Chunk, error: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
    write::failed(what, chunk.segment, error).with("offset", chunk.offset)
}
