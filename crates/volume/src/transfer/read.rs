//! Reading: pages and their headers at once, each page verified when both are there.

use super::check::Check;
use super::chunk::Chunk;
use super::flight::{Cargo, Flight};
use super::inbound::{Header, Inbound, Page};
use super::page::Direct;
use super::{Control, MissReason, PageFate, RunRead};
use crate::engine::{Op, Work};
use crate::segments::Segments;
use crate::staging::Piece;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Bytes checksummed in one go, between looks at what has landed.
const STEP: usize = 1 << 20;

/// Reads in progress.
pub(super) struct Reading<'a> {
    segments: &'a Segments,
    reads: &'a [RunRead<'a>],
    control: &'a Control,
    /// The reads that have begun; the last one still has chunks to issue.
    runs: Vec<Inbound>,
    flight: Flight<Landing>,
    /// Pages that are in memory and whose header is known.
    to_check: VecDeque<(usize, usize)>,
    checking: Option<(usize, Check<'a>)>,
    /// Bytes in staging that have landed and wait for their check.
    landed: u64,
    /// For slices that decode into several fragments.
    scratch: Vec<u8>,
    stopped: Option<MissReason>,
}

struct Landing {
    run: usize,
    chunk: Chunk,
    cargo: Cargo,
    /// Staging memory of pages, held until the operation has landed.
    _pieces: Vec<Arc<Piece>>,
}

enum Launch {
    Go(Op),
    Wait,
    Fail(MissReason),
}

impl<'a> Reading<'a> {
    pub(super) fn run(
        segments: &'a Segments,
        reads: &'a [RunRead<'a>],
        control: &'a Control,
    ) -> Vec<Vec<PageFate>> {
        let mut reading = Self {
            segments,
            reads,
            control,
            runs: Vec::with_capacity(reads.len()),
            flight: Flight::new(segments.in_flight_bytes()),
            to_check: VecDeque::new(),
            checking: None,
            landed: 0,
            scratch: Vec::new(),
            stopped: segments.is_inherited().then_some(MissReason::Io),
        };
        if reading.stopped.is_some() {
            return reading.fates();
        }
        segments.engine().run(&mut reading);
        reading.fates()
    }

    /// A page without a fate by now is one that was not begun, or whose header was not.
    fn fates(self) -> Vec<Vec<PageFate>> {
        let rest = PageFate::Missed(self.stopped.unwrap_or(MissReason::Io));
        let mut fates: Vec<Vec<PageFate>> = self
            .runs
            .iter()
            .map(|run| run.pages.iter().map(|page| page.fate.unwrap_or(rest)).collect())
            .collect();
        fates.extend(self.reads[fates.len()..].iter().map(|read| vec![rest; read.keys.len()]));
        fates
    }

    /// The run with a chunk to issue, begun if need be.
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
            self.runs.push(Inbound::begin(
                self.segments,
                read,
                Direct::of(self.segments, self.control),
            ));
        }
    }

    fn launch(&mut self, at: usize) -> Launch {
        let run = &mut self.runs[at];
        if let Header::Bad(reason) = run.header {
            return Launch::Fail(reason);
        }
        let mut chunk = run.chunks[run.issued].clone();
        let file = match self.segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, segment = chunk.segment.0, "a segment cannot be opened");
                return Launch::Fail(MissReason::Io);
            }
        };
        let first = self.reads[at].first as usize;
        // With something of our own under way there is no need to wait for others: it gives back
        // what it holds.
        let idle = self.flight.is_idle() && self.checking.is_none() && self.to_check.is_empty();
        let arena = self.segments.arena();
        let take = |bytes| match arena.try_take(bytes) {
            None if idle => arena.take(bytes, self.control),
            piece => piece,
        };
        let mut has_room = run.stage(&chunk, first, |bytes| arena.try_take(bytes));
        if !has_room && idle {
            // Page by page, then. A page that has memory gets its rest first: it must not be held
            // while waiting for the memory of another.
            chunk = run.narrow();
            has_room = run.stage(&chunk, first, take);
        }
        let cargo = has_room.then(|| {
            let memory = |page: usize| run.pages[page - first].memory();
            Cargo::load(&chunk, run.shape, run.header_block.as_ref(), memory, take)
        });
        let Some((cargo, spans)) = cargo.flatten() else {
            let reason = self.control.stop().unwrap_or(MissReason::Staging);
            return if idle { Launch::Fail(reason) } else { Launch::Wait };
        };
        let (offset, bytes) = (chunk.offset, chunk.logical.end - chunk.logical.start);
        let pieces = run.pieces(&chunk, first);
        let landing = Landing { run: at, chunk, cargo, _pieces: pieces };
        let tag = self.flight.launch(bytes, landing);
        // SAFETY: the target's memory is ours until `run` returns (`PageTarget`), the cargo's and
        // the pieces' until it has landed, the header's until its last chunk has; and the engine
        // does not return before all have.
        Launch::Go(unsafe { Op::new(tag, file, false, offset, spans) })
    }

    /// Takes note that a chunk is over: landed, or failed for a reason.
    fn settle(&mut self, at: usize, chunk: &Chunk, failure: Option<MissReason>) {
        let first = self.reads[at].first as usize;
        let run = &mut self.runs[at];
        if chunk.logical.start < run.shape.header {
            run.header_chunks -= 1;
            if matches!(run.header, Header::Awaited) {
                if let Some(reason) = failure {
                    run.header = Header::Bad(reason);
                } else if run.header_chunks == 0 {
                    run.read_header(&self.reads[at]);
                }
            }
            if run.header_chunks == 0 {
                run.header_block = None;
            }
            if !matches!(run.header, Header::Awaited) {
                let landed = (0..run.pages.len()).filter(|&page| run.pages[page].chunks == 0);
                for page in landed.collect::<Vec<_>>() {
                    self.page_landed(at, page);
                }
            }
        }
        let shape = self.runs[at].shape;
        for (page, _) in shape.parts(&chunk.logical) {
            let page = page - first;
            let run = &mut self.runs[at];
            run.pages[page].chunks -= 1;
            if let Some(reason) = failure {
                run.decide(page, PageFate::Missed(reason));
            }
            if run.pages[page].chunks == 0 {
                self.page_landed(at, page);
            }
        }
    }

    /// All of a page is in memory. It waits for its header, if that is not there yet.
    fn page_landed(&mut self, at: usize, page: usize) {
        let run = &mut self.runs[at];
        if run.pages[page].fate.is_some() {
            return;
        }
        match &run.header {
            Header::Awaited => {}
            Header::Bad(reason) => run.decide(page, PageFate::Missed(*reason)),
            Header::Good(_) => {
                self.landed += if run.is_staged { run.shape.page } else { 0 };
                self.to_check.push_back((at, page));
            }
        }
    }

    /// Starts on the next page, deciding at once those that cannot be right.
    fn check_next(&mut self) -> Option<(usize, Check<'a>)> {
        loop {
            let (at, page) = self.to_check.pop_front()?;
            let (run, read) = (&mut self.runs[at], &self.reads[at]);
            let Page { target, staged, .. } = &mut run.pages[page];
            let staged = staged.take().map(|staged| (staged.piece, staged.at));
            let Header::Good(header) = &run.header else { continue };
            // SAFETY: the page has landed in the target, which is ours.
            let copy = |bytes| unsafe { target.copy(bytes) };
            match Check::open(read, header, page, staged, copy) {
                Ok(check) => return Some((at, check)),
                Err(reason) => self.decide(at, page, PageFate::Missed(reason)),
            }
        }
    }

    /// The fate of a page that waited for its check.
    fn decide(&mut self, at: usize, page: usize, fate: PageFate) {
        let run = &mut self.runs[at];
        self.landed -= if run.is_staged { run.shape.page } else { 0 };
        run.decide(page, fate);
    }
}

impl Work for Reading<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.stopped.is_none() {
                self.stopped = self.control.stop();
            }
            let is_behind = self.landed >= self.segments.in_flight_bytes() as u64;
            if self.stopped.is_some() || is_behind || !self.flight.has_room() {
                return None;
            }
            let at = self.current()?;
            match self.launch(at) {
                Launch::Wait => return None,
                Launch::Go(op) => {
                    self.runs[at].issued += 1;
                    return Some(op);
                }
                Launch::Fail(reason) => {
                    let run = &mut self.runs[at];
                    let chunk = run.chunks[run.issued].clone();
                    run.issued += 1;
                    self.settle(at, &chunk, Some(reason));
                }
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some(landing) = self.flight.land(tag) else { return };
        let Landing { run: at, chunk, cargo, .. } = landing;
        let failure = result.err().map(|error| {
            let (segment, offset) = (chunk.segment.0, chunk.offset);
            tracing::debug!(%error, segment, offset, "a read failed");
            MissReason::Io
        });
        if failure.is_none() {
            let first = self.reads[at].first as usize;
            for bounce in &cargo.bounces {
                let memory = self.runs[at].pages[bounce.page - first].memory();
                // SAFETY: the operation that moved these bytes has landed; the target is ours.
                unsafe { memory.scatter(bounce.range.clone(), cargo.bytes(bounce)) };
            }
        }
        drop(cargo);
        self.settle(at, &chunk, failure);
    }

    fn compute(&mut self) -> bool {
        let Some((at, mut check)) = self.checking.take().or_else(|| self.check_next()) else {
            return false;
        };
        let target = &self.runs[at].pages[check.page()].target;
        // SAFETY: all operations on this page have landed, and the target is ours.
        match unsafe { check.step(target, &mut self.scratch, STEP) } {
            None => self.checking = Some((at, check)),
            Some(fate) => self.decide(at, check.page(), fate),
        }
        true
    }
}
