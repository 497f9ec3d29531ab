//! Writes runs: pages first, checksummed while they are in flight, and each header last.

use super::chunk::Chunk;
use super::in_flight::{InFlight, OpBuffers};
use super::page::Direct;
use super::slices::SliceSums;
use super::write_error::{failed, inherited, stopped};
use super::write_state::{Page, WriteState};
use super::{Control, MissReason, RunWrite};
use crate::io_engine::{Op, Work};
use crate::memory_block::Block;
use crate::segments::Segments;
use ritornello_format::{Error, Result};
use std::collections::VecDeque;
use std::io;

/// Bytes checksummed per step; between steps the engine collects completions and submits
/// operations.
const STEP: usize = 1 << 20;

/// The state of one [`Segments::write_runs`] call.
pub(super) struct WriteJob<'a> {
    segments: &'a Segments,
    writes: &'a [RunWrite<'a>],
    control: &'a Control,
    /// The runs that have begun; only the last run has pages to submit.
    runs: Vec<WriteState<'a>>,
    /// Runs whose pages are submitted and whose header waits for their checksums.
    heads: VecDeque<usize>,
    in_flight: InFlight<PendingOp>,
    /// Pages that move in place and are not checksummed yet, as run and page. Pages that go through
    /// staging are checksummed during the copy.
    to_sum: VecDeque<(usize, usize)>,
    summing: Option<PageSums<'a>>,
}

struct PendingOp {
    run: usize,
    chunk: Chunk,
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

impl<'a> WriteJob<'a> {
    pub(super) fn run(
        segments: &'a Segments,
        writes: &'a [RunWrite<'a>],
        control: &'a Control,
    ) -> Vec<Result<u64>> {
        if segments.is_inherited() {
            return writes.iter().map(|_| Err(inherited())).collect();
        }
        let mut job = Self {
            segments,
            writes,
            control,
            runs: Vec::with_capacity(writes.len()),
            heads: VecDeque::new(),
            in_flight: InFlight::new(segments.in_flight_bytes()),
            to_sum: VecDeque::new(),
            summing: None,
        };
        segments.engine().run(&mut job);
        job.results()
    }

    /// The outcome of every run. A run that is not finished was stopped by `control`.
    fn results(self) -> Vec<Result<u64>> {
        let stopped = || stopped(self.control.stop().unwrap_or(MissReason::Io));
        let mut results = Vec::with_capacity(self.writes.len());
        for run in self.runs {
            results.push(match (run.failed, run.encoded_header) {
                (Some(error), _) => Err(error),
                (None, Some((_, sum))) if run.body.is_empty() && run.head.is_empty() => Ok(sum),
                _ => Err(stopped()),
            });
        }
        results.extend(self.writes[results.len()..].iter().map(|_| Err(stopped())));
        results
    }

    /// The run that has a chunk to submit, and whether the chunk is its header's. A header whose
    /// checksums are known goes first, since it completes a run; then the pages of the newest run,
    /// which is begun if necessary.
    fn current(&mut self) -> Option<(usize, bool)> {
        loop {
            while let Some(&at) = self.heads.front() {
                let run = &self.runs[at];
                if run.failed.is_some() || run.head.is_empty() {
                    self.heads.pop_front();
                } else if run.unsummed <= run.unsummed_in_head {
                    return Some((at, true));
                } else {
                    break;
                }
            }
            let at = self.runs.len().wrapping_sub(1);
            match self.runs.last_mut() {
                Some(run) if run.failed.is_none() && !run.body.is_empty() => {
                    return Some((at, false));
                }
                Some(run) if run.failed.is_none() && !run.is_body_issued => {
                    run.is_body_issued = true;
                    self.heads.push_back(at);
                    self.queue(at, 0);
                }
                _ => {
                    let write = self.writes.get(self.runs.len())?;
                    let direct = Direct::of(self.segments, self.control);
                    let run = WriteState::begin(self.segments, write, direct)
                        .unwrap_or_else(WriteState::refused);
                    self.runs.push(run);
                }
            }
        }
    }

    /// Queues a page for its checksums if it moves in place and is not queued yet.
    fn queue(&mut self, at: usize, page: usize) {
        if let Some(Page { memory, is_queued, .. }) = self.runs[at].pages.get_mut(page)
            && memory.is_in_place()
            && !*is_queued
        {
            *is_queued = true;
            self.to_sum.push_back((at, page));
        }
    }

    fn next_op(&mut self, at: usize, is_head: bool) -> NextOp {
        let write = &self.writes[at];
        let run = &mut self.runs[at];
        let queue = if is_head { &run.head } else { &run.body };
        let Some(chunk) = queue.front().cloned() else { return NextOp::Wait };
        let file = match self.segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => return NextOp::Fail(failed("a segment cannot be opened", &chunk, error)),
        };
        let mut header = is_head.then(|| Block::new(run.layout.header as usize));
        let idle = self.in_flight.is_idle();
        let loaded = OpBuffers::prepare(
            &chunk,
            run.layout,
            header.as_ref(),
            |page| &run.pages[page].memory,
            // Waits for staging memory only if no operation is in flight: another call may wait for
            // the memory that this call holds.
            |bytes| match self.segments.arena().try_take(bytes) {
                None if idle => self.segments.arena().take(bytes, self.control),
                buffer => buffer,
            },
        );
        let Some((buffers, iovecs)) = loaded else {
            let reason = self.control.stop().unwrap_or(MissReason::Staging);
            return if idle { NextOp::Fail(stopped(reason)) } else { NextOp::Wait };
        };
        run.gather(&buffers, write);
        if let Some(block) = &mut header {
            match run.encode_header(write) {
                Ok(bytes) => block.bytes_mut()[..bytes.len()].copy_from_slice(bytes),
                Err(error) => return NextOp::Fail(error),
            }
        }
        let touched: Vec<usize> = run.layout.parts(&chunk.logical).map(|(page, _)| page).collect();
        let (offset, bytes) = (chunk.offset, chunk.logical.end - chunk.logical.start);
        let pending = PendingOp { run: at, chunk, _buffers: (buffers, header) };
        let tag = self.in_flight.insert(bytes, pending);
        for page in touched {
            self.queue(at, page);
        }
        // SAFETY: the source's memory is readable until `run` returns (`PageSource`), `in_flight`
        // holds buffers and header until the operation completes, and the engine does not return
        // before.
        NextOp::Ready(unsafe { Op::new(tag, file, true, offset, iovecs) })
    }
}

impl Work for WriteJob<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.control.stop().is_some() || !self.in_flight.has_room() {
                return None;
            }
            let (at, is_head) = self.current()?;
            match self.next_op(at, is_head) {
                NextOp::Wait => return None,
                NextOp::Ready(op) => {
                    let run = &mut self.runs[at];
                    if is_head { &mut run.head } else { &mut run.body }.pop_front();
                    return Some(op);
                }
                NextOp::Fail(error) => self.runs[at].fail(error),
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        if let Some(PendingOp { run, chunk, .. }) = self.in_flight.complete(tag)
            && let Err(error) = result
        {
            self.runs[run].fail(failed("a run could not be written", &chunk, error));
        }
    }

    fn compute(&mut self) -> bool {
        let next = self.summing.take().or_else(|| {
            let (run, page) = self.to_sum.pop_front()?;
            let sums = self.runs[run].sums_of(&self.writes[run], page);
            Some(PageSums { run, page, at: 0, sums })
        });
        let Some(mut now) = next else { return false };
        let run = &mut self.runs[now.run];
        if run.failed.is_some() {
            return true;
        }
        let page = &mut run.pages[now.page];
        let end = (now.at + STEP).min(page.bytes);
        // SAFETY: a source's memory is readable (`PageSource`).
        unsafe { page.memory.digest(now.at..end, &mut now.sums) };
        if end < page.bytes {
            now.at = end;
            self.summing = Some(now);
        } else {
            page.set_checksums(now.sums.done());
            run.unsummed -= 1;
        }
        true
    }
}
