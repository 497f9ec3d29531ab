//! Reads runs from files.
//!
//! Pages that are read as a whole are read at the same time as the header of their run, which saves
//! a round trip to the disk: the header says only later whether they are right. Sections are read
//! after all headers, because only the headers say where their slices are.

use super::{InFlight, OpBuffers, Piece};
use crate::io_engine::{Op, Work};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::staging::StagingBuffer;
use crate::transfer::check::{PartCheck, StoredBytes};
use crate::transfer::chunk::Chunk;
use crate::transfer::page::{Direct, PageMemory};
use crate::transfer::read::{Header, ReadJob};
use crate::transfer::{Control, Encoded, MissReason, PageOutcome, RunRead, Sections};
use ritornello_format::{UNIT, units_of};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes checksummed per step; between steps the engine collects completions and submits
/// operations.
const STEP: usize = 1 << 20;
/// A call in sections keeps 1/8 of the usual bytes in flight: slices needed last must not delay, in
/// the disk's queue, slices needed first.
const IN_FLIGHT_DIVISOR: usize = 8;
/// A call in sections reads no more while 1/32 of the usual bytes wait for verification: a section
/// is of no use to its waiter before it is verified, so verifying comes before reading more.
const UNVERIFIED_DIVISOR: usize = 4 * IN_FLIGHT_DIVISOR;

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
    sections: Option<&Sections>,
) -> Vec<Vec<PageOutcome>> {
    let mut job = ReadJob::new(segments, reads, control, sections);
    if job.is_stopped() {
        return job.outcomes();
    }
    let (in_flight, unverified) = match sections {
        None => (1, 1),
        Some(_) => (IN_FLIGHT_DIVISOR, UNVERIFIED_DIVISOR),
    };
    let mut read = DiskRead {
        job,
        headers: Vec::with_capacity(reads.len()),
        fetches: Vec::new(),
        queue: VecDeque::new(),
        next_part: None,
        in_flight: InFlight::new(segments.in_flight_bytes() / in_flight),
        unverified: Unverified {
            limit: (segments.in_flight_bytes() / unverified) as u64,
            ..Unverified::default()
        },
        scratch: Vec::new(),
    };
    segments.engine().run(&mut read);
    read.job.outcomes()
}

struct DiskRead<'a> {
    job: ReadJob<'a>,
    /// For each run that has begun, the state of its header.
    headers: Vec<HeaderFetch>,
    /// For each part, the state of its bytes.
    fetches: Vec<Fetch>,
    /// Chunks to submit, of the run or the part begun last.
    queue: VecDeque<Span>,
    /// In sections, the next part to begin; `None` until all headers are known.
    next_part: Option<usize>,
    in_flight: InFlight<PendingOp>,
    unverified: Unverified<'a>,
    /// Holds slices that decode into several fragments.
    scratch: Vec<u8>,
}

#[derive(Default)]
struct HeaderFetch {
    /// The memory of the header as read; dropped once the header is decoded.
    block: Option<Block>,
    /// Chunks that have not completed.
    chunks: u32,
    /// The first part of the run, if its pages are read as a whole.
    first_part: usize,
}

#[derive(Default)]
struct Fetch {
    /// Whether the part is read to staging, and delivered from there.
    needs_staging: bool,
    staged: Option<Staged>,
    /// Chunks that have not completed.
    chunks: u32,
    /// Why one of its chunks was not read.
    failure: Option<MissReason>,
    /// Bytes that count as unverified while the part waits for its check.
    unverified_bytes: u64,
}

/// Staging memory of a part.
struct Staged {
    /// The staging buffer, which is shared by all parts that begin in one chunk.
    buffer: Arc<StagingBuffer>,
    /// Offset of the part's first unit in `buffer`.
    at: usize,
    memory: PageMemory,
}

/// A chunk of a run, and the parts that it holds bytes of.
#[derive(Clone)]
struct Span {
    run: usize,
    chunk: Chunk,
    parts: Range<usize>,
}

struct PendingOp {
    span: Span,
    buffers: OpBuffers,
    /// Staging memory of parts, held until the operation has completed, because the kernel writes
    /// to it.
    _staging_buffers: Vec<Arc<StagingBuffer>>,
}

/// Parts that are in memory and not verified.
#[derive(Default)]
struct Unverified<'a> {
    parts: VecDeque<usize>,
    checking: Option<(usize, PartCheck<'a>)>,
    /// Bytes of these parts that are limited.
    bytes: u64,
    limit: u64,
}

enum NextOp {
    Ready(Op),
    Wait,
    Fail(MissReason),
}

impl<'a> DiskRead<'a> {
    /// Makes sure that a chunk is queued. Returns `false` if none can be now.
    fn fill_queue(&mut self) -> bool {
        while self.queue.is_empty() {
            if self.job.runs.len() < self.job.reads.len() {
                self.begin_run();
            } else if self.job.arrivals.is_none() {
                return false;
            } else if let Some(part) = self.next_part {
                if part == self.job.parts.len() {
                    return false;
                }
                self.next_part = Some(part + 1);
                self.begin_part(part);
            } else if self.in_flight.is_idle() {
                self.job.cut_pages();
                self.fetches.resize_with(self.job.parts.len(), Fetch::default);
                self.next_part = Some(0);
            } else {
                return false;
            }
        }
        true
    }

    /// Begins the next run: queues its header and, unless they are read in sections, its pages.
    fn begin_run(&mut self) {
        let (run, first_part) = (self.job.runs.len(), self.job.parts.len());
        let read = &self.job.reads[run];
        let direct = Direct::of(self.job.segments, self.job.control);
        let mut header = HeaderFetch { first_part, ..HeaderFetch::default() };
        if let Some((layout, pages)) = self.job.begin(direct) {
            let mut chunks = Vec::new();
            let (first, body) = (pages.start as usize, layout.pages(pages));
            if self.job.arrivals.is_some() {
                layout.cut(read.place, 0..layout.header, &mut chunks);
            } else {
                if first == 0 {
                    layout.cut(read.place, 0..body.end, &mut chunks);
                } else {
                    layout.cut(read.place, 0..layout.header, &mut chunks);
                    layout.cut(read.place, body, &mut chunks);
                }
                // Pages that are shorter on disk are encoded, and have to be decoded on their way.
                let needs_staging = u64::from(read.place.page_units) < units_of(read.page_bytes)
                    && !matches!(read.encoded, Encoded::AsStored);
                for page in 0..read.keys.len() {
                    self.job.push_unknown(run, page);
                    self.fetches.push(Fetch { needs_staging, ..Fetch::default() });
                }
            }
            for chunk in chunks {
                header.chunks += u32::from(chunk.logical.start < layout.header);
                let mut parts = first_part..first_part;
                for (page, _) in layout.parts(&chunk.logical) {
                    let part = first_part + page - first;
                    self.fetches[part].chunks += 1;
                    parts = if parts.is_empty() { part..part + 1 } else { parts.start..part + 1 };
                }
                self.queue.push_back(Span { run, chunk, parts });
            }
            header.block = Some(Block::new(layout.header as usize));
        }
        self.headers.push(header);
    }

    /// Begins a part of a section: queues its bytes.
    fn begin_part(&mut self, part: usize) {
        let Some(expected) = self.job.expected(part).filter(|_| !self.job.is_decided(part)) else {
            // The page missed with an earlier section.
            self.job.complete(part, Err(MissReason::Header));
            return;
        };
        // Bytes can be read to the target if that is their form and their offset in the page, and if
        // they are whole units: the bytes beside them may have arrived, and be in use.
        let stored = &expected.stored;
        let ends = stored.end.is_multiple_of(UNIT) || stored.end == expected.read.page_bytes;
        let in_place = expected.is_in_place()
            && stored.start == expected.target_start()
            && stored.start.is_multiple_of(UNIT)
            && ends;
        let run = self.job.parts[part].run;
        let mut chunks = Vec::new();
        let cover = self.job.cover(part);
        self.job.runs[run].layout.cut(self.job.reads[run].place, cover, &mut chunks);
        let fetch = &mut self.fetches[part];
        (fetch.needs_staging, fetch.chunks) = (!in_place, chunks.len() as u32);
        let span = |chunk| Span { run, chunk, parts: part..part + 1 };
        self.queue.extend(chunks.into_iter().map(span));
    }

    /// The memory that receives a part, and the offset in the run of that memory.
    fn memory(&self, part: usize) -> (&PageMemory, u64) {
        match &self.fetches[part].staged {
            Some(staged) => (&staged.memory, self.job.cover(part).start),
            None => (self.job.target(part), self.job.page_start(part)),
        }
    }

    fn pieces<'s>(&'s self, span: &'s Span) -> impl Iterator<Item = Piece<'s>> + Clone {
        span.parts.clone().map(|part| {
            let (cover, chunk) = (self.job.cover(part), &span.chunk.logical);
            let (memory, start) = self.memory(part);
            let from = (cover.start.max(chunk.start) - start) as usize;
            let to = (cover.end.min(chunk.end) - start) as usize;
            (part, from..to, memory)
        })
    }

    fn next_op(&mut self) -> NextOp {
        let Some(span) = self.queue.front() else { return NextOp::Wait };
        if matches!(self.job.runs[span.run].header, Header::Done) {
            // All pages of the run have missed, so this reason replaces none.
            return NextOp::Fail(MissReason::Header);
        }
        if let Some(reason) = self.front_failure() {
            return NextOp::Fail(reason);
        }
        let (segments, control) = (self.job.segments, self.job.control);
        let file = match segments.file(span.chunk.segment) {
            Ok(file) => file,
            Err(error) => {
                let segment = span.chunk.segment.0;
                tracing::debug!(%error, segment, "a segment cannot be opened");
                return NextOp::Fail(MissReason::Io);
            }
        };
        // A call waits for staging memory only while it holds no staging memory: two calls that
        // each hold some and wait for more would wait for each other. With operations in flight,
        // their completion frees memory; so does the check of parts that are in memory.
        let idle = self.in_flight.is_idle() && self.unverified.is_empty();
        let arena = segments.arena();
        let take = |bytes| match arena.try_take(bytes) {
            None if idle => control.stage(arena, bytes),
            buffer => buffer,
        };
        let mut has_room = self.stage_front(|bytes| arena.try_take(bytes));
        if !has_room && idle {
            // Little memory is free: continue part by part. The remainder of a part that has memory
            // is read first: its memory must not be held while the call waits for memory of another
            // part.
            self.split_front();
            if let Some(reason) = self.front_failure() {
                return NextOp::Fail(reason);
            }
            has_room = self.stage_front(take);
        }
        let prepared = self.queue.front().filter(|_| has_room).and_then(|span| {
            let header = self.headers[span.run].block.as_ref();
            let header_bytes = self.job.runs[span.run].layout.header;
            OpBuffers::prepare(&span.chunk, header, header_bytes, self.pieces(span), take)
        });
        let Some((buffers, iovecs)) = prepared else {
            let reason = control.stop().unwrap_or(MissReason::Staging);
            return if idle { NextOp::Fail(reason) } else { NextOp::Wait };
        };
        let Some(span) = self.queue.pop_front() else { return NextOp::Wait };
        let (offset, bytes) =
            (span.chunk.offset, span.chunk.logical.end - span.chunk.logical.start);
        let staged = span.parts.clone().filter_map(|part| self.fetches[part].staged.as_ref());
        let mut staging_buffers: Vec<_> = staged.map(|staged| Arc::clone(&staged.buffer)).collect();
        staging_buffers.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let pending = PendingOp { span, buffers, _staging_buffers: staging_buffers };
        let tag = self.in_flight.insert(bytes, pending);
        // SAFETY: the target's memory is exclusive until the call returns (`PageTarget`), `pending`
        // holds the buffers until the operation completes, the header block stays until its last
        // chunk completes, and the engine does not return before all operations complete.
        NextOp::Ready(unsafe { Op::new(tag, file, false, offset, iovecs) })
    }

    /// Why all parts of the first chunk have failed already: their other bytes are not worth a read,
    /// nor a wait for memory. `None` if the chunk holds bytes of the header, or any part may be
    /// delivered.
    fn front_failure(&self) -> Option<MissReason> {
        let Span { run, chunk, parts } = self.queue.front()?;
        let has_header = chunk.logical.start < self.job.runs[*run].layout.header;
        let mut failures = parts.clone().map(|part| self.fetches[part].failure);
        let first = failures.next().filter(|_| !has_header)??;
        failures.all(|failure| failure.is_some()).then_some(first)
    }

    /// Allocates staging memory with `take` for the parts of the first chunk that need it, in one
    /// buffer. Returns `false`, without changes, if `take` returns `None`.
    fn stage_front(&mut self, take: impl FnOnce(usize) -> Option<StagingBuffer>) -> bool {
        let Some(Span { parts, .. }) = self.queue.front() else { return true };
        let lacks = |fetch: &Fetch| fetch.needs_staging && fetch.staged.is_none();
        let lacking: Vec<usize> =
            parts.clone().filter(|part| lacks(&self.fetches[*part])).collect();
        if lacking.is_empty() {
            return true;
        }
        let length = |part: usize| {
            let cover = self.job.cover(part);
            (cover.end - cover.start) as usize
        };
        let bytes = lacking.iter().map(|part| length(*part)).sum();
        let Some(buffer) = take(bytes).map(Arc::new) else { return false };
        let mut at = 0;
        for part in lacking {
            let length = length(part);
            let memory = PageMemory::of_staging(buffer.as_ptr().wrapping_add(at), length);
            let buffer = Arc::clone(&buffer);
            self.fetches[part].staged = Some(Staged { buffer, at, memory });
            at += length;
        }
        true
    }

    /// Splits the first chunk after its first part.
    fn split_front(&mut self) {
        let Some(Span { run, chunk, parts }) = self.queue.front_mut() else { return };
        let border =
            if Range::is_empty(parts) { u64::MAX } else { self.job.cover(parts.start).end };
        if border < chunk.logical.end {
            let rest = Chunk {
                segment: chunk.segment,
                offset: chunk.offset + (border - chunk.logical.start),
                logical: border..chunk.logical.end,
            };
            let rest = Span { run: *run, chunk: rest, parts: parts.start + 1..parts.end };
            chunk.logical.end = border;
            parts.end = parts.start + 1;
            self.queue.insert(1, rest);
        }
    }

    /// Accounts for a chunk that was read, or failed with a reason.
    fn complete_chunk(&mut self, span: &Span, failure: Option<MissReason>) {
        // The header first: the parts of the chunk may need it.
        if span.chunk.logical.start < self.job.runs[span.run].layout.header {
            self.complete_header_chunk(span.run, failure);
        }
        for part in span.parts.clone() {
            let fetch = &mut self.fetches[part];
            fetch.chunks -= 1;
            fetch.failure = fetch.failure.or(failure);
            if fetch.chunks == 0 {
                self.complete_fetch(part);
            }
        }
    }

    fn complete_header_chunk(&mut self, run: usize, failure: Option<MissReason>) {
        let fetch = &mut self.headers[run];
        fetch.chunks -= 1;
        // Operations on other chunks of the header write to the block until the last is complete.
        let block = if fetch.chunks == 0 { fetch.block.take() } else { None };
        if !matches!(self.job.runs[run].header, Header::Awaited) {
            return;
        }
        match (failure, block) {
            (Some(reason), _) => self.job.set_header(run, Err(reason)),
            (None, Some(block)) => self.job.set_header(run, Ok(block.bytes())),
            (None, None) => return,
        }
        if self.job.arrivals.is_none() {
            // Pages that are in memory waited for their header.
            let first = self.headers[run].first_part;
            for part in first..first + self.job.reads[run].keys.len() {
                if self.fetches[part].chunks == 0 {
                    self.complete_fetch(part);
                }
            }
        }
    }

    /// Queues a part whose chunks are all complete for its check. While the header is awaited it does
    /// nothing: `complete_header_chunk` calls again, so that each part is completed once.
    fn complete_fetch(&mut self, part: usize) {
        let fetch = &mut self.fetches[part];
        let failure = match self.job.runs[self.job.parts[part].run].header {
            Header::Awaited => return,
            Header::Valid(_) => fetch.failure,
            Header::Done => fetch.failure.or(Some(MissReason::Header)),
        };
        if let Some(reason) = failure {
            fetch.staged = None;
            self.job.complete(part, Err(reason));
            return;
        }
        // Staging memory stays in use until the check, so it counts against the limit of bytes in
        // flight. Sections count all bytes, see `UNVERIFIED_DIVISOR`.
        if fetch.needs_staging || self.job.arrivals.is_some() {
            let cover = self.job.cover(part);
            fetch.unverified_bytes = cover.end - cover.start;
        }
        self.unverified.bytes += fetch.unverified_bytes;
        self.unverified.parts.push_back(part);
    }

    /// Takes the next part to verify. Pages that the header rules out miss here.
    fn next_check(&mut self) -> Option<(usize, PartCheck<'a>)> {
        loop {
            let part = self.unverified.parts.pop_front()?;
            let cover = self.job.cover(part);
            if self.job.arrivals.is_none() {
                let (run, page) = (self.job.parts[part].run, self.job.parts[part].page);
                match self.job.whole(run, page) {
                    Ok(whole) => self.job.parts[part] = whole,
                    Err(reason) => {
                        self.finish_check(part, Err(reason));
                        continue;
                    }
                }
            }
            let staged = self.fetches[part].staged.take();
            let Some(expected) = self.job.expected(part) else {
                self.finish_check(part, Err(MissReason::Header));
                continue;
            };
            let skip = self.job.page_start(part) + expected.stored.start - cover.start;
            let staged =
                staged.map(|staged| StoredBytes::Staged(staged.buffer, staged.at + skip as usize));
            // SAFETY: the page was read to the target, which is exclusive until the call returns.
            let copy = |bytes| Ok(unsafe { expected.target.to_block(bytes) });
            match PartCheck::open(&expected, staged, copy) {
                Ok(check) => return Some((part, check)),
                Err(reason) => self.finish_check(part, Err(reason)),
            }
        }
    }

    /// Records the result of a part that waited for its check.
    fn finish_check(&mut self, part: usize, result: Result<(), MissReason>) {
        let fetch = &mut self.fetches[part];
        fetch.staged = None;
        self.unverified.bytes -= fetch.unverified_bytes;
        self.job.complete(part, result);
    }
}

impl Unverified<'_> {
    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.checking.is_none()
    }
}

impl Work for DiskRead<'_> {
    fn next(&mut self) -> Option<Op> {
        loop {
            let is_behind = self.unverified.bytes >= self.unverified.limit;
            if self.job.is_stopped() || is_behind || !self.in_flight.has_room() {
                return None;
            }
            if !self.fill_queue() {
                return None;
            }
            match self.next_op() {
                NextOp::Wait => return None,
                NextOp::Ready(op) => return Some(op),
                NextOp::Fail(reason) => {
                    let span = self.queue.pop_front()?;
                    self.complete_chunk(&span, Some(reason));
                }
            }
        }
    }

    fn done(&mut self, tag: u64, result: io::Result<()>) {
        let Some(PendingOp { span, buffers, _staging_buffers }) = self.in_flight.complete(tag)
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
                let (memory, _) = self.memory(bounce.piece);
                // SAFETY: the operation that moved these bytes has completed; the target is
                // exclusive.
                unsafe { memory.scatter(bounce.range.clone(), buffers.bytes(bounce)) };
            }
        }
        drop(buffers);
        self.complete_chunk(&span, failure);
    }

    fn compute(&mut self) -> bool {
        let waiting = self.unverified.parts.len();
        let Some((part, mut check)) = self.unverified.checking.take().or_else(|| self.next_check())
        else {
            // Parts that their header ruled out are complete, and made room for the next reads.
            return waiting > 0;
        };
        let result = match self.job.expected(part) {
            // SAFETY: all operations on this part have completed, the target is exclusive except
            // for bytes that arrived earlier, and the part is the same in every step.
            Some(expected) => unsafe { check.step(&expected, &mut self.scratch, STEP) },
            None => Some(Err(MissReason::Header)),
        };
        match result {
            None => self.unverified.checking = Some((part, check)),
            Some(result) => self.finish_check(part, result),
        }
        true
    }
}
