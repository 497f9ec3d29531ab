//! A run on its way in: its header, and where its pages land.

use super::chunk::{Chunk, RunLayout};
use super::page::{Direct, PageMemory};
use super::{Encoded, MissReason, PageFate, RunRead};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::staging::Piece;
use ritornello_format::{RunHeader, units_of};
use std::sync::Arc;

/// A run that is being read.
pub(super) struct ReadState {
    pub(super) layout: RunLayout,
    pub(super) chunks: Vec<Chunk>,
    pub(super) issued: usize,
    pub(super) header: Header,
    /// Where the header lands; gone when it has.
    pub(super) header_block: Option<Block>,
    pub(super) header_chunks: u32,
    pub(super) pages: Vec<Page>,
    /// Whether pages land in staging, because what lies on disk is not what goes to the target.
    pub(super) is_staged: bool,
    /// Pages without a fate.
    undecided: usize,
}

pub(super) enum Header {
    Awaited,
    Good(Box<RunHeader>),
    Bad(MissReason),
}

pub(super) struct Page {
    pub(super) target: PageMemory,
    pub(super) staged: Option<Staged>,
    /// Chunks that have not landed.
    pub(super) chunks: u32,
    pub(super) fate: Option<PageFate>,
}

/// Where a page lands that is not to land in the target.
pub(super) struct Staged {
    /// Shared by the pages that begin in one chunk.
    pub(super) piece: Arc<Piece>,
    /// The page's first byte in it.
    pub(super) at: usize,
    memory: PageMemory,
}

impl Page {
    /// Where the page lands.
    pub(super) fn memory(&self) -> &PageMemory {
        self.staged.as_ref().map_or(&self.target, |staged| &staged.memory)
    }
}

impl ReadState {
    /// Looks at a read and cuts it into chunks. One that cannot be has no chunks, and its pages
    /// have their fate.
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
            run.pages.push(Page { target, staged: None, chunks: 0, fate: None });
            if lacking {
                let reason = if layout.is_some() { MissReason::Memory } else { MissReason::Place };
                run.set_fate(page, PageFate::Missed(reason));
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

    /// Gives the pages that begin in a chunk staging memory, all or none; `take` may refuse.
    /// Returns whether they have it.
    pub(super) fn stage(
        &mut self,
        chunk: &Chunk,
        first: usize,
        take: impl FnOnce(usize) -> Option<Piece>,
    ) -> bool {
        let length = self.layout.page as usize;
        let lacking: Vec<usize> = self
            .layout
            .parts(&chunk.logical)
            .map(|(page, _)| page - first)
            .filter(|page| self.pages[*page].staged.is_none() && self.pages[*page].fate.is_none())
            .collect();
        if !self.is_staged || lacking.is_empty() {
            return true;
        }
        let Some(piece) = take(lacking.len() * length).map(Arc::new) else { return false };
        for (at, page) in lacking.into_iter().enumerate() {
            let at = at * length;
            let memory = PageMemory::of_staging(piece.as_ptr().wrapping_add(at), length);
            self.pages[page].staged = Some(Staged { piece: Arc::clone(&piece), at, memory });
        }
        true
    }

    /// Cuts the chunk that is issued next to its first page, and returns it.
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

    /// The staging memory that an operation on a chunk uses.
    pub(super) fn pieces(&self, chunk: &Chunk, first: usize) -> Vec<Arc<Piece>> {
        if !self.is_staged {
            return Vec::new();
        }
        let pages = self.layout.parts(&chunk.logical);
        let staged = pages.filter_map(|(page, _)| self.pages[page - first].staged.as_ref());
        let mut pieces: Vec<Arc<Piece>> = staged.map(|staged| Arc::clone(&staged.piece)).collect();
        pieces.dedup_by(|a, b| Arc::ptr_eq(a, b));
        pieces
    }

    pub(super) fn set_fate(&mut self, page: usize, fate: PageFate) {
        let page = &mut self.pages[page];
        page.staged = None;
        if page.fate.is_none() {
            page.fate = Some(fate);
            self.undecided -= 1;
        }
        if self.undecided == 0 {
            // Thousands of runs may be read in one call: what is decided is let go.
            if let Header::Good(_) = self.header {
                self.header = Header::Bad(MissReason::Header);
            }
        }
    }

    /// Believes the header that has landed, or not.
    pub(super) fn read_header(&mut self, read: &RunRead<'_>) {
        let Some(block) = &self.header_block else { return };
        self.header = match decode_expected_header(read, block.bytes()) {
            Ok(header) => Header::Good(Box::new(header)),
            Err(reason) => Header::Bad(reason),
        };
    }
}

/// The header of the run that is read, if these bytes are that.
///
/// # Errors
/// What is wrong with it.
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
