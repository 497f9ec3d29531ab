//! Reading: pages and their headers at once, each page verified when both are there.

use super::chunk::{Chunk, Shape};
use super::flight::{Cargo, Flight};
use super::page::PageMemory;
use super::{Control, MissReason, PageFate, RunRead};
use crate::engine::{Op, Work};
use crate::memory_block::Block;
use crate::segments::Segments;
use ritornello_format::{RunHeader, Slice, SliceChecksum};
use std::collections::VecDeque;
use std::io;

/// Bytes checksummed in one go, between looks at what has landed.
const STEP: usize = 1 << 20;

/// Reads in progress.
pub(super) struct Reading<'a> {
    segments: &'a Segments,
    reads: &'a [RunRead<'a>],
    control: &'a Control,
    /// The reads that have begun; the last one still has chunks to issue.
    runs: Vec<Run>,
    flight: Flight<Landing>,
    /// Pages that are in memory and whose header is known.
    to_verify: VecDeque<(usize, usize)>,
    verifying: Option<Verifying>,
    stopped: Option<MissReason>,
}

struct Run {
    shape: Shape,
    chunks: Vec<Chunk>,
    issued: usize,
    header: Header,
    /// Where the header lands; gone when it has.
    header_block: Option<Block>,
    header_chunks: u32,
    pages: Vec<Page>,
    /// Pages without a fate.
    open: usize,
}

enum Header {
    Awaited,
    Good(Box<RunHeader>),
    Bad(MissReason),
}

struct Page {
    memory: PageMemory,
    /// Chunks that have not landed.
    chunks: u32,
    fate: Option<PageFate>,
}

struct Landing {
    run: usize,
    chunk: Chunk,
    cargo: Cargo,
}

struct Verifying {
    run: usize,
    page: usize,
    at: usize,
    sum: SliceChecksum,
    expected: u64,
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
            to_verify: VecDeque::new(),
            verifying: None,
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
            self.runs.push(begin(self.segments, read));
        }
    }

    fn launch(&mut self, at: usize) -> Launch {
        let run = &self.runs[at];
        if let Header::Bad(reason) = run.header {
            return Launch::Fail(reason);
        }
        let chunk = run.chunks[run.issued].clone();
        let file = match self.segments.file(chunk.segment) {
            Ok(file) => file,
            Err(error) => {
                tracing::debug!(%error, segment = chunk.segment.0, "a segment cannot be opened");
                return Launch::Fail(MissReason::Io);
            }
        };
        let first = self.reads[at].first as usize;
        let idle = self.flight.is_idle();
        let cargo = Cargo::load(
            &chunk,
            run.shape,
            run.header_block.as_ref(),
            |page| &run.pages[page - first].memory,
            // With something of our own in flight there is no need to wait for others.
            |bytes| match self.segments.arena().try_take(bytes) {
                None if idle => self.segments.arena().take(bytes, self.control),
                piece => piece,
            },
        );
        let Some((cargo, spans)) = cargo else {
            let reason = self.control.stop().unwrap_or(MissReason::Staging);
            return if idle { Launch::Fail(reason) } else { Launch::Wait };
        };
        let (offset, bytes) = (chunk.offset, chunk.logical.end - chunk.logical.start);
        let tag = self.flight.launch(bytes, Landing { run: at, chunk, cargo });
        // SAFETY: the target's memory is ours until `run` returns (`PageTarget`), the cargo's until
        // it has landed, the header's until its last chunk has; and the engine does not return
        // before all have.
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
            Header::Good(_) => self.to_verify.push_back((at, page)),
        }
    }

    /// Starts on the next page, deciding at once those that cannot be right.
    fn verify_next(&mut self) -> Option<Verifying> {
        loop {
            let (at, page) = self.to_verify.pop_front()?;
            let (run, read) = (&mut self.runs[at], &self.reads[at]);
            let Header::Good(header) = &run.header else { continue };
            let in_run = read.first as usize + page;
            let key = read.keys[page];
            let reason = if header.keys.get(in_run).is_none_or(|named| named != key) {
                MissReason::Key
            } else if let [Slice { bytes, codec: Slice::RAW, checksum }] = *header.slices_of(in_run)
                && u64::from(bytes) == read.page_bytes
            {
                let sum = SliceChecksum::new(key, read.place.generation, 0);
                return Some(Verifying { run: at, page, at: 0, sum, expected: checksum });
            } else {
                MissReason::Codec
            };
            run.decide(page, PageFate::Missed(reason));
        }
    }
}

impl Work for Reading<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            if self.stopped.is_none() {
                self.stopped = self.control.stop();
            }
            if self.stopped.is_some() || !self.flight.has_room() {
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
        let Some(Landing { run: at, chunk, cargo }) = self.flight.land(tag) else { return };
        let failure = result.err().map(|error| {
            let (segment, offset) = (chunk.segment.0, chunk.offset);
            tracing::debug!(%error, segment, offset, "a read failed");
            MissReason::Io
        });
        if failure.is_none() {
            let first = self.reads[at].first as usize;
            for bounce in &cargo.bounces {
                let memory = &self.runs[at].pages[bounce.page - first].memory;
                // SAFETY: the operation that moved these bytes has landed; the target is ours.
                unsafe { memory.scatter(bounce.range.clone(), cargo.bytes(bounce)) };
            }
        }
        drop(cargo);
        self.settle(at, &chunk, failure);
    }

    fn spare(&mut self) -> bool {
        let Some(mut now) = self.verifying.take().or_else(|| self.verify_next()) else {
            return false;
        };
        let bytes = self.reads[now.run].page_bytes as usize;
        let end = (now.at + STEP).min(bytes);
        let run = &mut self.runs[now.run];
        // SAFETY: all operations on this page have landed, and the target is ours.
        unsafe { run.pages[now.page].memory.digest(now.at..end, &mut now.sum) };
        if end < bytes {
            now.at = end;
            self.verifying = Some(now);
        } else if now.sum.finish() == now.expected {
            run.decide(now.page, PageFate::Verified);
        } else {
            run.decide(now.page, PageFate::Missed(MissReason::Checksum));
        }
        true
    }
}

/// Looks at a read and cuts it into chunks. One that cannot be has no chunks, and its pages have
/// their fate.
fn begin(segments: &Segments, read: &RunRead<'_>) -> Run {
    let first = u64::from(read.first);
    let pages = first..first + read.keys.len() as u64;
    let shape = Shape::of(read.place, read.page_bytes, pages.clone(), segments);
    let mut run = Run {
        shape: shape.unwrap_or(Shape { op: 1, header: 0, page: 1 }),
        chunks: Vec::new(),
        issued: 0,
        header: Header::Awaited,
        header_block: None,
        header_chunks: 0,
        pages: Vec::with_capacity(read.keys.len()),
        open: read.keys.len(),
    };
    let aligned = segments.needs_alignment();
    for page in 0..read.keys.len() {
        let memory = shape.and_then(|_| {
            let bytes = read.page_bytes as usize;
            PageMemory::of_target(read.target, read.target_first + page, bytes, aligned)
        });
        let lacking = memory.is_none();
        let memory = memory.unwrap_or_else(PageMemory::nowhere);
        run.pages.push(Page { memory, chunks: 0, fate: None });
        if lacking {
            let reason = if shape.is_some() { MissReason::Memory } else { MissReason::Place };
            run.decide(page, PageFate::Missed(reason));
        }
    }
    let Some(shape) = shape.filter(|_| run.open > 0) else { return run };
    let body = shape.pages(pages);
    if first == 0 {
        shape.cut(read.place, 0..body.end, &mut run.chunks);
    } else {
        shape.cut(read.place, 0..shape.header, &mut run.chunks);
        shape.cut(read.place, body, &mut run.chunks);
    }
    for chunk in &run.chunks {
        run.header_chunks += u32::from(chunk.logical.start < shape.header);
        for (page, _) in shape.parts(&chunk.logical) {
            run.pages[page - read.first as usize].chunks += 1;
        }
    }
    run.header_block = Some(Block::new(shape.header as usize));
    run
}

impl Run {
    fn decide(&mut self, page: usize, fate: PageFate) {
        let page = &mut self.pages[page];
        if page.fate.is_none() {
            page.fate = Some(fate);
            self.open -= 1;
        }
        if self.open == 0 {
            // Thousands of runs may be read in one call: what is decided is let go.
            if let Header::Good(_) = self.header {
                self.header = Header::Bad(MissReason::Header);
            }
        }
    }

    /// Believes the header that has landed, or not.
    fn read_header(&mut self, read: &RunRead<'_>) {
        let Some(block) = &self.header_block else { return };
        let place = read.place;
        self.header = match RunHeader::decode(block.bytes()) {
            Ok((header, checksum))
                if checksum == place.header_checksum
                    && header.generation == place.generation
                    && header.header_units == place.header_units
                    && header.page_units == place.page_units
                    && header.page_bytes == read.page_bytes =>
            {
                if header.scope == read.scope {
                    Header::Good(Box::new(header))
                } else {
                    Header::Bad(MissReason::Scope)
                }
            }
            _ => Header::Bad(MissReason::Header),
        };
    }
}
