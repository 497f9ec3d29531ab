//! Reads runs: headers and pages at the same time, each page verified once both are in memory.

use super::chunk::Chunk;
use super::in_flight::{InFlight, OpBuffers};
use super::page::Direct;
use super::page_check::PageCheck;
use super::read_state::{Header, Page, ReadState};
use super::{Control, MissReason, PageOutcome, RunRead};
use crate::io_engine::{Op, Work};
use crate::segments::Segments;
use crate::staging::StagingBuffer;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Bytes checksummed per step; between steps the engine collects completions and submits
/// operations.
const STEP: usize = 1 << 20;

/// The state of one [`Segments::read_runs`] call.
pub(super) struct ReadJob<'a> {
    segments: &'a Segments,
    reads: &'a [RunRead<'a>],
    control: &'a Control,
    /// The reads that have begun; only the last read has chunks to submit.
    runs: Vec<ReadState>,
    in_flight: InFlight<PendingOp>,
    /// Pages that are in memory and whose header is known, as run and page.
    to_check: VecDeque<(usize, usize)>,
    checking: Option<(usize, PageCheck<'a>)>,
    /// Bytes in staging that are read and not yet verified. Their memory stays in use, so this
    /// counts against the limit of bytes in flight.
    unchecked_bytes: u64,
    /// Holds slices that decode into several fragments.
    scratch: Vec<u8>,
    stopped: Option<MissReason>,
}

struct PendingOp {
    run: usize,
    chunk: Chunk,
    buffers: OpBuffers,
    /// Staging memory of pages, held until the operation has completed: the kernel writes to it
    /// even if the page has already missed.
    _staging_buffers: Vec<Arc<StagingBuffer>>,
}

enum NextOp {
    Ready(Op),
    Wait,
    Fail(MissReason),
}

impl<'a> ReadJob<'a> {
    pub(super) fn run(
        segments: &'a Segments,
        reads: &'a [RunRead<'a>],
        control: &'a Control,
    ) -> Vec<Vec<PageOutcome>> {
        let mut job = Self {
            segments,
            reads,
            control,
            runs: Vec::with_capacity(reads.len()),
            in_flight: InFlight::new(segments.in_flight_bytes()),
            to_check: VecDeque::new(),
            checking: None,
            unchecked_bytes: 0,
            scratch: Vec::new(),
            stopped: segments.is_inherited().then_some(MissReason::Io),
        };
        if job.stopped.is_some() {
            return job.outcomes();
        }
        segments.engine().run(&mut job);
        job.outcomes()
    }

    /// The outcome of every page. A page without an outcome was not begun, or its header was not
    /// read.
    fn outcomes(self) -> Vec<Vec<PageOutcome>> {
        let rest = PageOutcome::Missed(self.stopped.unwrap_or(MissReason::Io));
        let mut outcomes: Vec<Vec<PageOutcome>> = self
            .runs
            .iter()
            .map(|run| run.pages.iter().map(|page| page.outcome.unwrap_or(rest)).collect())
            .collect();
        outcomes
            .extend(self.reads[outcomes.len()..].iter().map(|read| vec![rest; read.keys.len()]));
        outcomes
    }

    /// The run with a chunk to submit, begun if necessary. `None` if all are submitted.
    fn current(&mut self) -> Option<usize> {
        loop {
            if let Some(run) = self.runs.last_mut() {
                if run.issued < run.chunks.len() {
                    return Some(self.runs.len() - 1);
                }
                run.chunks = Vec::new();
                run.issued = 0;
            }
            let read = self.reads.get(self.runs.len())?;
            self.runs.push(ReadState::begin(
                self.segments,
                read,
                Direct::of(self.segments, self.control),
            ));
        }
    }

    fn next_op(&mut self, at: usize) -> NextOp {
        let run = &mut self.runs[at];
        if let Header::Invalid(reason) = run.header {
            return NextOp::Fail(reason);
        }
        let mut chunk = run.chunks[run.issued].clone();
        let file = match self.segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, segment = chunk.segment.0, "a segment cannot be opened");
                return NextOp::Fail(MissReason::Io);
            }
        };
        let first = self.reads[at].first as usize;
        // A call waits for staging memory only while it holds no staging memory: two calls that
        // each hold some and wait for more would wait for each other. With operations in flight,
        // their completion frees memory.
        let idle = self.in_flight.is_idle() && self.checking.is_none() && self.to_check.is_empty();
        let arena = self.segments.arena();
        let take = |bytes| match arena.try_take(bytes) {
            None if idle => arena.take(bytes, self.control),
            buffer => buffer,
        };
        let mut has_room = run.stage(&chunk, first, |bytes| arena.try_take(bytes));
        if !has_room && idle {
            // Little memory is free: continue page by page. The remainder of a page that has memory
            // is read first: its memory must not be held while the call waits for memory of another
            // page.
            chunk = run.split_next_chunk();
            has_room = run.stage(&chunk, first, take);
        }
        let buffers = has_room.then(|| {
            let memory = |page: usize| run.pages[page - first].memory();
            OpBuffers::prepare(&chunk, run.layout, run.header_block.as_ref(), memory, take)
        });
        let Some((buffers, iovecs)) = buffers.flatten() else {
            let reason = self.control.stop().unwrap_or(MissReason::Staging);
            return if idle { NextOp::Fail(reason) } else { NextOp::Wait };
        };
        let (offset, bytes) = (chunk.offset, chunk.logical.end - chunk.logical.start);
        let staging_buffers = run.staging_buffers(&chunk, first);
        let pending = PendingOp { run: at, chunk, buffers, _staging_buffers: staging_buffers };
        let tag = self.in_flight.insert(bytes, pending);
        // SAFETY: the target's memory is exclusive until `run` returns (`PageTarget`), `pending`
        // holds the buffers until the operation completes, the header block stays until
        // its last chunk completes, and the engine does not return before all operations complete.
        NextOp::Ready(unsafe { Op::new(tag, file, false, offset, iovecs) })
    }

    /// Accounts for a chunk that was read, or failed with a reason.
    fn complete_chunk(&mut self, at: usize, chunk: &Chunk, failure: Option<MissReason>) {
        let first = self.reads[at].first as usize;
        let run = &mut self.runs[at];
        if chunk.logical.start < run.layout.header {
            run.header_chunks -= 1;
            if matches!(run.header, Header::Awaited) {
                if let Some(reason) = failure {
                    run.header = Header::Invalid(reason);
                } else if run.header_chunks == 0 {
                    run.read_header(&self.reads[at]);
                }
            }
            if run.header_chunks == 0 {
                run.header_block = None;
            }
            if !matches!(run.header, Header::Awaited) {
                let complete = (0..run.pages.len()).filter(|&page| run.pages[page].chunks == 0);
                for page in complete.collect::<Vec<_>>() {
                    self.complete_page(at, page);
                }
            }
        }
        let layout = self.runs[at].layout;
        for (page, _) in layout.parts(&chunk.logical) {
            let page = page - first;
            let run = &mut self.runs[at];
            run.pages[page].chunks -= 1;
            if let Some(reason) = failure {
                run.set_outcome(page, PageOutcome::Missed(reason));
            }
            if run.pages[page].chunks == 0 {
                self.complete_page(at, page);
            }
        }
    }

    /// Queues a page that is in memory for its check, unless its header is not known yet: then
    /// `complete_chunk` calls again once the header is known.
    fn complete_page(&mut self, at: usize, page: usize) {
        let run = &mut self.runs[at];
        if run.pages[page].outcome.is_some() {
            return;
        }
        match &run.header {
            Header::Awaited => {}
            Header::Invalid(reason) => run.set_outcome(page, PageOutcome::Missed(*reason)),
            Header::Valid(_) => {
                self.unchecked_bytes += if run.is_staged { run.layout.page } else { 0 };
                self.to_check.push_back((at, page));
            }
        }
    }

    /// Takes the next page to verify. Pages that the header rules out get their outcome here.
    fn check_next(&mut self) -> Option<(usize, PageCheck<'a>)> {
        loop {
            let (at, page) = self.to_check.pop_front()?;
            let (run, read) = (&mut self.runs[at], &self.reads[at]);
            let Page { target, staged, .. } = &mut run.pages[page];
            let staged = staged.take().map(|staged| (staged.buffer, staged.at));
            let Header::Valid(header) = &run.header else { continue };
            // SAFETY: the page has been read to the target, which is exclusive until `run` returns.
            let copy = |bytes| unsafe { target.to_block(bytes) };
            match PageCheck::open(read, header, page, staged, copy) {
                Ok(check) => return Some((at, check)),
                Err(reason) => self.finish_check(at, page, PageOutcome::Missed(reason)),
            }
        }
    }

    /// Sets the outcome of a page that waited for its check.
    fn finish_check(&mut self, at: usize, page: usize, outcome: PageOutcome) {
        let run = &mut self.runs[at];
        self.unchecked_bytes -= if run.is_staged { run.layout.page } else { 0 };
        run.set_outcome(page, outcome);
    }
}

impl Work for ReadJob<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.stopped.is_none() {
                self.stopped = self.control.stop();
            }
            let is_behind = self.unchecked_bytes >= self.segments.in_flight_bytes() as u64;
            if self.stopped.is_some() || is_behind || !self.in_flight.has_room() {
                return None;
            }
            let at = self.current()?;
            match self.next_op(at) {
                NextOp::Wait => return None,
                NextOp::Ready(op) => {
                    self.runs[at].issued += 1;
                    return Some(op);
                }
                NextOp::Fail(reason) => {
                    let run = &mut self.runs[at];
                    let chunk = run.chunks[run.issued].clone();
                    run.issued += 1;
                    self.complete_chunk(at, &chunk, Some(reason));
                }
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some(pending) = self.in_flight.complete(tag) else { return };
        let PendingOp { run: at, chunk, buffers, .. } = pending;
        let failure = result.err().map(|error| {
            let (segment, offset) = (chunk.segment.0, chunk.offset);
            tracing::debug!(%error, segment, offset, "a read failed");
            MissReason::Io
        });
        if failure.is_none() {
            let first = self.reads[at].first as usize;
            for bounce in &buffers.bounces {
                let memory = self.runs[at].pages[bounce.page - first].memory();
                // SAFETY: the operation that moved these bytes has completed; the target is
                // exclusive.
                unsafe { memory.scatter(bounce.range.clone(), buffers.bytes(bounce)) };
            }
        }
        drop(buffers);
        self.complete_chunk(at, &chunk, failure);
    }

    fn compute(&mut self) -> bool {
        let Some((at, mut check)) = self.checking.take().or_else(|| self.check_next()) else {
            return false;
        };
        let target = &self.runs[at].pages[check.page()].target;
        // SAFETY: all operations on this page have completed, and the target is exclusive.
        match unsafe { check.step(target, &mut self.scratch, STEP) } {
            None => self.checking = Some((at, check)),
            Some(outcome) => self.finish_check(at, check.page(), outcome),
        }
        true
    }
}
