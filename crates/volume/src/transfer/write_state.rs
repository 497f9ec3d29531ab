//! The state of a run that is being written: its pages, their checksums, and its header.

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
    /// Chunks that do not hold the header, and do not share an operation with it.
    pub(super) body: VecDeque<Chunk>,
    /// Chunks of the header. One, which may include the first page, unless the header is split over
    /// extents.
    pub(super) head: VecDeque<Chunk>,
    /// Whether all of `body` is submitted and the run is queued for its header.
    pub(super) is_body_issued: bool,
    /// The encoded header and its checksum, once all checksums of pages are known.
    pub(super) encoded_header: Option<(Vec<u8>, u64)>,
    /// Pages whose checksums are not known.
    pub(super) unsummed: usize,
    /// The subset of these pages that are checksummed only when the header is submitted, because
    /// they share its operation and go through staging.
    pub(super) unsummed_in_head: usize,
    /// Checksums of the page that is being copied to staging, chunk by chunk.
    gather_sums: Option<SliceSums<'a>>,
    pub(super) failed: Option<Error>,
}

pub(super) struct Page {
    pub(super) memory: PageMemory,
    /// Bytes on disk, without padding.
    pub(super) bytes: usize,
    pub(super) is_queued: bool,
    /// The slices. Their checksums are zero until they are computed.
    slices: Vec<Slice>,
}

impl Page {
    /// Stores the computed checksums of the slices.
    pub(super) fn set_checksums(&mut self, sums: &[u64]) {
        for (slice, sum) in self.slices.iter_mut().zip(sums) {
            slice.checksum = *sum;
        }
    }
}

impl<'a> WriteState<'a> {
    /// Validates a run and cuts it into chunks.
    ///
    /// # Errors
    /// `Invalid` if place, header and source do not match.
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
        // A short first page shares the operation of the header where they are contiguous.
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

    /// A run that failed before any of it was submitted.
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

    /// Checksums of page `page`, to be updated with its bytes in order.
    pub(super) fn sums_of(&self, write: &RunWrite<'a>, page: usize) -> SliceSums<'a> {
        let header = write.header;
        SliceSums::new(&header.keys[page], write.place.generation, &self.pages[page].slices)
    }

    /// Copies the bytes that do not move in place to their buffers, and checksums bytes of pages
    /// that go through staging. Chunks are submitted in order, so each page's bytes come in order.
    pub(super) fn gather(&mut self, buffers: &OpBuffers, write: &RunWrite<'a>) {
        for bounce in &buffers.bounces {
            // SAFETY: the operation is not submitted yet, and a source's memory is readable.
            let copy = unsafe {
                let copy = buffers.bytes_mut(bounce);
                self.pages[bounce.page].memory.gather(bounce.range.clone(), copy);
                copy
            };
            let bytes = self.pages[bounce.page].bytes;
            // Bytes after the end of a page are padding, which no checksum covers.
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

    /// The encoded header. All checksums of the pages must be known.
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
