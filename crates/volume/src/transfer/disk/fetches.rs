//! The run headers, and the parts of pages ([`Part`](crate::transfer::read::Part)), that one call
//! reads. Each header or part is queued in chunks, then its operations are in flight, then its
//! bytes are in memory and are verified.

use super::{OpBuffers, OpMemory};
use crate::io_engine::IoVec;
use crate::memory_block::Block;
use crate::staging::StagingBuffer;
use crate::transfer::check::{PartCheck, StoredBytes};
use crate::transfer::chunk::Chunk;
use crate::transfer::page::{Direct, PageMemory};
use crate::transfer::read::{Header, ReadJob};
use crate::transfer::{Encoded, MissReason};
use ritornello_format::{UNIT, units_of};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Maximum length of a page that is wholly in staging before its verification although it is not
/// encoded, in bytes.
const WHOLE_MAX: u64 = 16 << 20;

/// The chunks that one call reads, and the headers and parts that wait for them.
pub(super) struct Fetches<'a> {
    pub(super) job: ReadJob<'a>,
    /// For each run that has begun, the state of its header.
    headers: Vec<HeaderFetch>,
    /// For each part, the state of its bytes.
    parts: Vec<PartFetch>,
    /// Chunks to submit, of the run or the part begun last.
    pub(super) queue: VecDeque<Span>,
    /// If the call has sections, the next part to begin; `None` until all headers are known.
    next_part: Option<usize>,
    /// Parts that are in memory and whose check has not begun.
    pub(super) unchecked: VecDeque<usize>,
    /// Bytes of the parts that are in memory and not verified. Without sections, only parts in
    /// staging count.
    pub(super) unverified_bytes: u64,
}

#[derive(Default)]
struct HeaderFetch {
    /// The memory of the header as read, which the operations of its chunks share; dropped once the
    /// header is decoded.
    block: Option<Arc<Block>>,
    /// Number of chunks of the header that have neither been read nor failed.
    chunks: u32,
    /// The first part of the run, if its pages are read as a whole.
    first_part: usize,
}

#[derive(Default)]
struct PartFetch {
    /// Whether the part is read to staging, and delivered from staging.
    needs_staging: bool,
    staged: Option<Staged>,
    /// Number of chunks with bytes of the part that have neither been read nor failed.
    chunks: u32,
    /// Why a chunk of the part was not read; `None` if no chunk has failed.
    failure: Option<MissReason>,
    /// Bytes that the part adds to [`Fetches::unverified_bytes`] until its check has ended.
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
pub(super) struct Span {
    pub(super) run: usize,
    pub(super) chunk: Chunk,
    pub(super) parts: Range<usize>,
}

impl<'a> Fetches<'a> {
    pub(super) fn new(job: ReadJob<'a>) -> Self {
        Self {
            headers: Vec::with_capacity(job.reads.len()),
            job,
            parts: Vec::new(),
            queue: VecDeque::new(),
            next_part: None,
            unchecked: VecDeque::new(),
            unverified_bytes: 0,
        }
    }

    /// Queues a chunk if none is queued. Returns `false` if no chunk can be queued now. `is_idle`
    /// says whether no operation is in flight.
    pub(super) fn fill_queue(&mut self, is_idle: bool) -> bool {
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
            } else if is_idle {
                self.job.cut_pages();
                self.parts.resize_with(self.job.parts.len(), PartFetch::default);
                self.next_part = Some(0);
            } else {
                return false;
            }
        }
        true
    }

    /// Begins the next run: queues its header and, if the call has no sections, its pages.
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
                // Two kinds of pages are wholly in staging until they are verified: encoded pages,
                // which are shorter on disk than in memory, and pages of up to `WHOLE_MAX` that
                // cannot be read straight to the target. A longer page of the second kind goes
                // through staging operation by operation, because all of it may not fit.
                let as_stored = matches!(read.encoded, Encoded::AsStored);
                let is_encoded = u64::from(read.place.page_units) < units_of(read.page_bytes);
                let is_short = layout.page <= WHOLE_MAX;
                let needs_staging = |target: &PageMemory| {
                    !as_stored && (is_encoded || (is_short && !target.is_in_place()))
                };
                for page in 0..read.keys.len() {
                    self.job.push_unknown(run, page);
                    let needs_staging = needs_staging(self.job.target(self.parts.len()));
                    self.parts.push(PartFetch { needs_staging, ..PartFetch::default() });
                }
            }
            for chunk in chunks {
                header.chunks += u32::from(chunk.logical.start < layout.header);
                let mut parts = first_part..first_part;
                for (page, _) in layout.parts(&chunk.logical) {
                    let part = first_part + page - first;
                    self.parts[part].chunks += 1;
                    parts = if parts.is_empty() { part..part + 1 } else { parts.start..part + 1 };
                }
                self.queue.push_back(Span { run, chunk, parts });
            }
            header.block = Some(Arc::new(Block::new(layout.header as usize)));
        }
        self.headers.push(header);
    }

    /// Begins a part of a section: queues its bytes.
    fn begin_part(&mut self, part: usize) {
        let Some(expected) = self.job.expected(part).filter(|_| !self.job.is_decided(part)) else {
            // The page missed when an earlier section was read.
            self.job.complete(part, Err(MissReason::Header));
            return;
        };
        // A part is read straight to the target if its bytes and its offset in the page are the
        // same on disk and in the target, if none of it arrived earlier, and if it begins at a unit
        // and ends at a unit or at the end of the page. A read moves whole units, so it would
        // otherwise overwrite bytes beside the part, which may have arrived earlier and be in use.
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
        let fetch = &mut self.parts[part];
        (fetch.needs_staging, fetch.chunks) = (!in_place, chunks.len() as u32);
        let span = |chunk| Span { run, chunk, parts: part..part + 1 };
        self.queue.extend(chunks.into_iter().map(span));
    }

    /// The memory that receives a part, and the offset in the run of the memory's first byte.
    pub(super) fn memory(&self, part: usize) -> (&PageMemory, u64) {
        match &self.parts[part].staged {
            Some(staged) => (&staged.memory, self.job.cover(part).start),
            None => (self.job.target(part), self.job.page_start(part)),
        }
    }

    /// The reason to skip the first queued chunk, because all its parts have failed already. `None`
    /// if the chunk must be read: it holds bytes of an awaited header, or of a part that may still
    /// be delivered.
    pub(super) fn front_failure(&self) -> Option<MissReason> {
        let Span { run, chunk, parts } = self.queue.front()?;
        let run = &self.job.runs[*run];
        if matches!(run.header, Header::Done) {
            // All pages of the run have an outcome already, so this reason is not reported.
            return Some(MissReason::Header);
        }
        let has_header = chunk.logical.start < run.layout.header;
        let mut failures = parts.clone().map(|part| self.parts[part].failure);
        let first = failures.next().filter(|_| !has_header)??;
        failures.all(|failure| failure.is_some()).then_some(first)
    }

    /// Allocates staging memory with `take` for the parts of the first chunk that need it, in one
    /// buffer. Returns `false`, without changes, if `take` returns `None`.
    pub(super) fn stage_front(
        &mut self,
        take: impl FnOnce(usize) -> Option<StagingBuffer>,
    ) -> bool {
        let Some(Span { parts, .. }) = self.queue.front() else { return true };
        let lacks = |fetch: &PartFetch| fetch.needs_staging && fetch.staged.is_none();
        let lacking: Vec<usize> = parts.clone().filter(|part| lacks(&self.parts[*part])).collect();
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
            self.parts[part].staged = Some(Staged { buffer, at, memory });
            at += length;
        }
        true
    }

    /// Splits the first queued chunk after its first part.
    pub(super) fn split_front(&mut self) {
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

    /// The memory and iovecs of the first chunk, whose parts have the staging memory that they
    /// need. `None` if `take` returns `None`.
    pub(super) fn prepare_front(
        &self,
        take: impl FnOnce(usize) -> Option<StagingBuffer>,
    ) -> Option<(OpMemory, Vec<IoVec>)> {
        let Span { run, chunk, parts } = self.queue.front()?;
        let pieces = parts.clone().map(|part| {
            let (cover, chunk) = (self.job.cover(part), &chunk.logical);
            let (memory, start) = self.memory(part);
            let from = (cover.start.max(chunk.start) - start) as usize;
            let to = (cover.end.min(chunk.end) - start) as usize;
            (part, from..to, memory)
        });
        let header_bytes = self.job.runs[*run].layout.header;
        let header =
            self.headers[*run].block.as_ref().filter(|_| chunk.logical.start < header_bytes);
        let (buffers, iovecs) =
            OpBuffers::prepare(chunk, header.map(Arc::as_ref), header_bytes, pieces.clone(), take)?;
        // `OpBuffers::prepare` uses the memory of a piece for its bytes before `in_place`.
        let uses_target = pieces.clone().any(|(part, range, memory)| {
            self.parts[part].staged.is_none() && range.start < memory.in_place()
        });
        let staged = parts.clone().filter_map(|part| self.parts[part].staged.as_ref());
        let mut of_parts: Vec<_> = staged.map(|staged| Arc::clone(&staged.buffer)).collect();
        of_parts.dedup_by(|a, b| Arc::ptr_eq(a, b));
        let (_staging_buffers, _header) = (of_parts, header.map(Arc::clone));
        Some((OpMemory { buffers, _staging_buffers, _header, uses_target }, iovecs))
    }

    /// Records that a chunk was read, or why it was not read.
    pub(super) fn complete_chunk(&mut self, span: &Span, failure: Option<MissReason>) {
        // Complete the header first, because the parts of the chunk may need it.
        if span.chunk.logical.start < self.job.runs[span.run].layout.header {
            self.complete_header_chunk(span.run, failure);
        }
        for part in span.parts.clone() {
            let fetch = &mut self.parts[part];
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
        // Keep the block until the last chunk of the header is complete, because operations write
        // to it.
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
            // Complete the pages whose bytes arrived before the header.
            let first = self.headers[run].first_part;
            for part in first..first + self.job.reads[run].keys.len() {
                if self.parts[part].chunks == 0 {
                    self.complete_fetch(part);
                }
            }
        }
    }

    /// Queues a part for its check, after all its chunks have completed. Does nothing while the
    /// header is awaited: `complete_header_chunk` then calls this function again.
    fn complete_fetch(&mut self, part: usize) {
        let fetch = &mut self.parts[part];
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
        // Staging memory stays in use until the check, so its bytes count against the limit of
        // unverified bytes. With sections the bytes of all parts count, because waiters can use
        // only verified sections (`UNVERIFIED_DIVISOR` in `disk/read.rs`).
        if fetch.needs_staging || self.job.arrivals.is_some() {
            let cover = self.job.cover(part);
            fetch.unverified_bytes = cover.end - cover.start;
        }
        self.unverified_bytes += fetch.unverified_bytes;
        self.unchecked.push_back(part);
    }

    /// Takes the next part to verify. A page that does not match the header misses.
    pub(super) fn next_check(&mut self) -> Option<(usize, PartCheck<'a>)> {
        loop {
            let part = self.unchecked.pop_front()?;
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
            let staged = self.parts[part].staged.take();
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
    pub(super) fn finish_check(&mut self, part: usize, result: Result<(), MissReason>) {
        let fetch = &mut self.parts[part];
        fetch.staged = None;
        self.unverified_bytes -= fetch.unverified_bytes;
        self.job.complete(part, result);
    }
}
