//! The state of a run that is being read: its header, and the memory of its pages.

use super::chunk::{Chunk, RunLayout};
use super::page::{Direct, PageMemory};
use super::{Encoded, MissReason, PageOutcome, RunRead};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::staging::StagingBuffer;
use ritornello_format::{RunHeader, units_of};
use std::sync::Arc;

/// A run that is being read.
pub(super) struct ReadState {
    pub(super) layout: RunLayout,
    pub(super) chunks: Vec<Chunk>,
    pub(super) issued: usize,
    pub(super) header: Header,
    /// The memory of the header as read; dropped once the header is decoded.
    pub(super) header_block: Option<Block>,
    /// Header chunks that have not completed.
    pub(super) header_chunks: u32,
    pub(super) pages: Vec<Page>,
    /// Whether pages are read to staging, because they have to be decoded on their way to the target.
    pub(super) is_staged: bool,
    /// Pages without an outcome.
    undecided: usize,
}

pub(super) enum Header {
    Awaited,
    Valid(Box<RunHeader>),
    Invalid(MissReason),
}

pub(super) struct Page {
    pub(super) target: PageMemory,
    pub(super) staged: Option<Staged>,
    /// Chunks that have not completed.
    pub(super) chunks: u32,
    pub(super) outcome: Option<PageOutcome>,
}

/// Staging memory of a page that is not read to the target.
pub(super) struct Staged {
    /// The staging buffer, which is shared by all pages that begin in one chunk.
    pub(super) buffer: Arc<StagingBuffer>,
    /// Offset of the page's first byte in `buffer`.
    pub(super) at: usize,
    memory: PageMemory,
}

impl Page {
    /// The memory that receives the page: staging or the target.
    pub(super) fn memory(&self) -> &PageMemory {
        self.staged.as_ref().map_or(&self.target, |staged| &staged.memory)
    }
}

impl ReadState {
    /// Validates a read and cuts it into chunks. If the place or the target is unusable, there are no
    /// chunks and the pages have their outcome.
    pub(super) fn begin(segments: &Segments, read: &RunRead<'_>, direct: Direct) -> Self {
        let first = u64::from(read.first);
        let pages = first..first + read.keys.len() as u64;
        let layout = RunLayout::new(read.place, read.page_bytes, pages.clone(), segments);
        let as_stored = matches!(read.encoded, Encoded::AsStored);
        let shorter = u64::from(read.place.page_units) < units_of(read.page_bytes);
        let mut run = Self {
            layout: layout.unwrap_or(RunLayout { op: 1, header: 0, page: 1 }),
            chunks: Vec::new(),
            issued: 0,
            header: Header::Awaited,
            header_block: None,
            header_chunks: 0,
            pages: Vec::with_capacity(read.keys.len()),
            is_staged: shorter && !as_stored,
            undecided: read.keys.len(),
        };
        for page in 0..read.keys.len() {
            let memory = layout.and_then(|layout| {
                let bytes = if as_stored { layout.page } else { read.page_bytes } as usize;
                PageMemory::of_target(read.target, read.target_first + page, bytes, direct)
            });
            let lacking = memory.is_none();
            let target = memory.unwrap_or_else(PageMemory::empty);
            run.pages.push(Page { target, staged: None, chunks: 0, outcome: None });
            if lacking {
                let reason = if layout.is_some() { MissReason::Memory } else { MissReason::Place };
                run.set_outcome(page, PageOutcome::Missed(reason));
            }
        }
        let Some(layout) = layout.filter(|_| run.undecided > 0) else { return run };
        let body = layout.pages(pages);
        if first == 0 {
            layout.cut(read.place, 0..body.end, &mut run.chunks);
        } else {
            layout.cut(read.place, 0..layout.header, &mut run.chunks);
            layout.cut(read.place, body, &mut run.chunks);
        }
        for chunk in &run.chunks {
            run.header_chunks += u32::from(chunk.logical.start < layout.header);
            for (page, _) in layout.parts(&chunk.logical) {
                run.pages[page - read.first as usize].chunks += 1;
            }
        }
        run.header_block = Some(Block::new(layout.header as usize));
        run
    }

    /// Allocates staging memory with `take` for the pages of `chunk` that still need it, in one
    /// buffer. Returns `false`, without changes, if `take` returns `None`.
    pub(super) fn stage(
        &mut self,
        chunk: &Chunk,
        first: usize,
        take: impl FnOnce(usize) -> Option<StagingBuffer>,
    ) -> bool {
        let length = self.layout.page as usize;
        let lacking: Vec<usize> = self
            .layout
            .parts(&chunk.logical)
            .map(|(page, _)| page - first)
            .filter(|page| {
                self.pages[*page].staged.is_none() && self.pages[*page].outcome.is_none()
            })
            .collect();
        if !self.is_staged || lacking.is_empty() {
            return true;
        }
        let Some(buffer) = take(lacking.len() * length).map(Arc::new) else { return false };
        for (at, page) in lacking.into_iter().enumerate() {
            let at = at * length;
            let memory = PageMemory::of_staging(buffer.as_ptr().wrapping_add(at), length);
            self.pages[page].staged = Some(Staged { buffer: Arc::clone(&buffer), at, memory });
        }
        true
    }

    /// Splits the next chunk after its first page, and returns that page's part.
    pub(super) fn split_next_chunk(&mut self) -> Chunk {
        let chunk = &mut self.chunks[self.issued];
        let page = self.layout.parts(&chunk.logical).next().map_or(0, |(page, _)| page);
        let border = self.layout.pages(0..page as u64 + 1).end;
        if border < chunk.logical.end {
            let rest = Chunk {
                segment: chunk.segment,
                offset: chunk.offset + (border - chunk.logical.start),
                logical: border..chunk.logical.end,
            };
            chunk.logical.end = border;
            self.chunks.insert(self.issued + 1, rest);
        }
        self.chunks[self.issued].clone()
    }

    /// The staging buffers that an operation on `chunk` fills. The operation holds them, because a
    /// page drops its own reference when it misses early.
    pub(super) fn staging_buffers(&self, chunk: &Chunk, first: usize) -> Vec<Arc<StagingBuffer>> {
        if !self.is_staged {
            return Vec::new();
        }
        let pages = self.layout.parts(&chunk.logical);
        let staged = pages.filter_map(|(page, _)| self.pages[page - first].staged.as_ref());
        let mut buffers: Vec<Arc<StagingBuffer>> =
            staged.map(|staged| Arc::clone(&staged.buffer)).collect();
        buffers.dedup_by(|a, b| Arc::ptr_eq(a, b));
        buffers
    }

    pub(super) fn set_outcome(&mut self, page: usize, outcome: PageOutcome) {
        let page = &mut self.pages[page];
        page.staged = None;
        if page.outcome.is_none() {
            page.outcome = Some(outcome);
            self.undecided -= 1;
        }
        if self.undecided == 0 {
            // Thousands of runs may be read in one call: free the headers of finished ones.
            if let Header::Valid(_) = self.header {
                self.header = Header::Invalid(MissReason::Header);
            }
        }
    }

    /// Decodes and checks the header that was read.
    pub(super) fn read_header(&mut self, read: &RunRead<'_>) {
        let Some(block) = &self.header_block else { return };
        self.header = match decode_expected_header(read, block.bytes()) {
            Ok(header) => Header::Valid(Box::new(header)),
            Err(reason) => Header::Invalid(reason),
        };
    }
}

/// Decodes the header of a run. The checksum from the index proves that this is the header that the
/// index names; the key of each page is checked later, in `slices_of`.
///
/// # Errors
/// `Header` if the bytes are not a header, or a different header; `Scope` if the header names a
/// different scope.
pub(super) fn decode_expected_header(
    read: &RunRead<'_>,
    bytes: &[u8],
) -> Result<RunHeader, MissReason> {
    let place = read.place;
    match RunHeader::decode(bytes) {
        Ok((header, checksum))
            if checksum == place.header_checksum
                && header.generation == place.generation
                && header.header_units == place.header_units
                && header.page_units == place.page_units
                && header.page_bytes == read.page_bytes =>
        {
            if header.scope == read.scope {
                Ok(header)
            } else {
                Err(MissReason::Scope)
            }
        }
        _ => Err(MissReason::Header),
    }
}
