//! A run on its way out: its pages, their checksums, and its header.

use super::RunWrite;
use super::chunk::{Chunk, RunLayout};
use super::in_flight::OpBuffers;
use super::page::{Direct, PageMemory};
use super::slices::{self, SliceSums};
use crate::segments::Segments;
use ritornello_format::{Error, Result, RunHeader, Slice, UNIT};
use std::collections::VecDeque;

/// A run that is being written.
pub(super) struct WriteState<'a> {
    pub(super) layout: RunLayout,
    pub(super) pages: Vec<Page>,
    /// Everything but the header, and the first page if that goes with it.
    pub(super) body: VecDeque<Chunk>,
    /// The rest. One chunk, unless the header itself is split over extents.
    pub(super) head: VecDeque<Chunk>,
    /// Whether the run waits for its header to be issued, or has waited.
    pub(super) is_body_issued: bool,
    /// The header and its checksum, when they are known.
    pub(super) encoded_header: Option<(Vec<u8>, u64)>,
    /// Pages whose checksums are not known.
    pub(super) unsummed: usize,
    /// Pages whose checksums become known only when the head is issued.
    pub(super) unsummed_in_head: usize,
    /// Checksums of the page that is being gathered into staging, chunk by chunk.
    gather_sums: Option<SliceSums<'a>>,
    pub(super) failed: Option<Error>,
}

pub(super) struct Page {
    pub(super) memory: PageMemory,
    /// Bytes as they go to the disk, not padded.
    pub(super) bytes: usize,
    pub(super) is_queued: bool,
    /// Their checksums are zero until they are known.
    slices: Vec<Slice>,
}

impl Page {
    /// Takes over the checksums of the slices.
    pub(super) fn set_checksums(&mut self, sums: &[u64]) {
        for (slice, sum) in self.slices.iter_mut().zip(sums) {
            slice.checksum = *sum;
        }
    }
}

impl<'a> WriteState<'a> {
    /// Looks at a run and cuts it into chunks.
    pub(super) fn begin(segments: &Segments, write: &RunWrite<'_>, direct: Direct) -> Result<Self> {
        let RunWrite { place, header, source, first } = *write;
        let (count, page_bytes) = (header.keys.len() as u64, header.page_bytes);
        let layout = RunLayout::new(place, page_bytes, 0..count, segments)
            .filter(|layout| layout.pages(0..count).end == place.units() * UNIT && count > 0)
            .ok_or_else(|| {
                Error::invalid("a run's place and header do not match")
                    .with("generation", place.generation)
                    .with("pages", count)
                    .with("page_bytes", page_bytes)
            })?;
        let mut pages = Vec::with_capacity(header.keys.len());
        for page in 0..header.keys.len() {
            let mut slices = header.slices_of(page).to_vec();
            if header.slices.is_empty() {
                slices = slices::raw(header.slices_per_page, page_bytes).collect();
            }
            let bytes = slices::total(&slices);
            let memory = PageMemory::of_source(source, first + page, bytes as usize, direct)
                .filter(|_| bytes <= layout.page && slices.iter().all(|slice| slice.bytes > 0))
                .ok_or_else(|| {
                    Error::invalid(
                        "a page's memory is not as long as its slices, or than its place",
                    )
                    .with("page", first + page)
                    .with("page_bytes", page_bytes)
                })?;
            pages.push(Page { memory, bytes: bytes as usize, is_queued: false, slices });
        }
        let (mut body, mut head) = (Vec::new(), Vec::new());
        layout.cut(place, layout.pages(1..count), &mut body);
        // A short first page goes with the header in one operation, if they lie together.
        let first_page = layout.pages(0..1);
        if layout.page <= layout.op {
            layout.cut(place, 0..first_page.end, &mut head);
        }
        let mut unsummed_in_head = usize::from(!pages[0].memory.is_in_place());
        if head.len() != 1 {
            head.clear();
            unsummed_in_head = 0;
            layout.cut(place, first_page, &mut body);
            layout.cut(place, 0..layout.header, &mut head);
        }
        Ok(Self {
            layout,
            unsummed: pages.len(),
            pages,
            body: body.into(),
            head: head.into(),
            is_body_issued: false,
            encoded_header: None,
            unsummed_in_head,
            gather_sums: None,
            failed: None,
        })
    }

    /// A run that failed before it began.
    pub(super) fn refused(error: Error) -> Self {
        Self {
            layout: RunLayout { op: 1, header: 0, page: 1 },
            pages: Vec::new(),
            body: VecDeque::new(),
            head: VecDeque::new(),
            is_body_issued: true,
            encoded_header: None,
            unsummed: 0,
            unsummed_in_head: 0,
            gather_sums: None,
            failed: Some(error),
        }
    }

    pub(super) fn fail(&mut self, error: Error) {
        self.failed.get_or_insert(error);
    }

    /// The checksums of page `page`, to be fed.
    pub(super) fn sums_of(&self, write: &RunWrite<'a>, page: usize) -> SliceSums<'a> {
        let header = write.header;
        SliceSums::new(&header.keys[page], write.place.generation, &self.pages[page].slices)
    }

    /// Copies what does not move in place, and checksums the copies of pages that go through
    /// staging: their chunks are issued in order, so that this can go along.
    pub(super) fn gather(&mut self, buffers: &OpBuffers, write: &RunWrite<'a>) {
        for bounce in &buffers.bounces {
            // SAFETY: the operation has not begun, and a source's memory may be read.
            let copy = unsafe {
                let copy = buffers.bytes_mut(bounce);
                self.pages[bounce.page].memory.gather(bounce.range.clone(), copy);
                copy
            };
            let bytes = self.pages[bounce.page].bytes;
            // Behind a page's bytes is padding only.
            if !bounce.staged || bounce.range.start >= bytes {
                continue;
            }
            let sums = self.gather_sums.take();
            let mut sums = sums.unwrap_or_else(|| self.sums_of(write, bounce.page));
            let (from, to) = (bounce.range.start, bounce.range.end.min(bytes));
            sums.update(&copy[..to - from]);
            if to < bytes {
                self.gather_sums = Some(sums);
            } else {
                self.pages[bounce.page].set_checksums(sums.done());
                self.unsummed -= 1;
            }
        }
    }

    /// The encoded header, now that all checksums are known.
    pub(super) fn encode_header(&mut self, write: &RunWrite<'_>) -> Result<&[u8]> {
        let encoded_header = match self.encoded_header.take() {
            Some(encoded_header) => encoded_header,
            None => {
                let (place, header) = (write.place, write.header);
                let slices: Vec<Slice> =
                    self.pages.iter().flat_map(|page| page.slices.iter().copied()).collect();
                RunHeader {
                    generation: place.generation,
                    header_units: place.header_units,
                    page_units: place.page_units,
                    extents: place.extents.clone(),
                    extents_total: place.extents.len() as u32,
                    slices_per_page: header.slices_per_page.max(1),
                    slices,
                    ..header.clone()
                }
                .encode()?
            }
        };
        Ok(&self.encoded_header.insert(encoded_header).0)
    }
}
