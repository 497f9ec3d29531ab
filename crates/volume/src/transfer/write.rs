//! Writes runs. Pages are checksummed as they are copied, or while they are in flight. A run's
//! header holds these checksums, so it is written as soon as all of them are known; operations that
//! write pages may still be in flight then.

use super::check::{SliceSums, raw, total};
use super::chunk::RunLayout;
use super::lanes::Lanes;
use super::page::{Direct, PageMemory};
use super::{Control, MissReason, RunWrite, disk, mapped};
use crate::segments::{Moved, Segments};
use ritornello_format::{Error, ErrorKind, Result, RunHeader, SegmentId, Slice, UNIT};
use std::error::Error as StdError;
use std::fmt;
use std::io;

impl Segments {
    /// Writes runs, and returns for each the header checksum that the index must keep. The runs are
    /// durable only after [`Segments::sync`].
    ///
    /// Pages are padded with zeroes. If any operation of a run fails, the run fails.
    ///
    /// # Errors
    /// For each run: `Invalid` if place, header and source do not match; `Retry` if the file system
    /// failed, a volume has stalled, staging memory ran out, or `control` stopped the call (context
    /// `reason`); `Closed` if the segments were opened before a fork.
    pub fn write_runs(&self, runs: &[RunWrite<'_>], control: &Control) -> Vec<Result<u64>> {
        if self.is_inherited() {
            return runs.iter().map(|_| Err(inherited())).collect();
        }
        if self.is_mapped() {
            return mapped::write(self, runs, control);
        }
        let lanes = Lanes::of(self, runs, Moved::Written, control.through_staging);
        if let Some(in_flight) = lanes.only() {
            let times = lanes.volume_times();
            let (results, waited) = disk::write(self, runs, control, in_flight, times);
            lanes.end(waited, results.iter().all(Result::is_ok));
            return results;
        }
        lanes.run(runs, Result::is_ok, |runs, in_flight, times| {
            disk::write(self, runs, control, in_flight, times)
        })
    }
}

/// A run to write whose header and source fit its place.
pub(super) struct NewRun<'a> {
    pub(super) write: &'a RunWrite<'a>,
    pub(super) layout: RunLayout,
    pub(super) pages: Vec<NewPage>,
    /// The slices of all pages, in order, the same number for each page. Their checksums are zero
    /// until they are computed.
    slices: Vec<Slice>,
}

pub(super) struct NewPage {
    pub(super) memory: PageMemory,
    /// Length on disk, without padding.
    pub(super) bytes: usize,
}

impl<'a> NewRun<'a> {
    /// # Errors
    /// `Invalid` if place, header and source do not match.
    pub(super) fn new(
        segments: &Segments,
        write: &'a RunWrite<'a>,
        direct: Direct,
    ) -> Result<Self> {
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
        let per_page = usize::from(header.slices_per_page.max(1));
        let mut slices = header.slices.clone();
        if slices.is_empty() {
            slices.reserve_exact(header.keys.len() * per_page);
            for _ in 0..header.keys.len() {
                slices.extend(raw(header.slices_per_page, page_bytes));
            }
        }
        if slices.len() != header.keys.len() * per_page {
            return Err(Error::invalid("a run's slices do not match its keys")
                .with("slices", slices.len())
                .with("pages", count)
                .with("slices_per_page", per_page));
        }
        let mut pages = Vec::with_capacity(header.keys.len());
        for (page, slices) in slices.chunks_exact(per_page).enumerate() {
            let bytes = total(slices);
            let memory = PageMemory::of_source(source, first + page, bytes as usize, direct)
                .filter(|_| bytes <= layout.page && slices.iter().all(|slice| slice.bytes > 0))
                .ok_or_else(|| {
                    Error::invalid("a page's slices do not fit its memory or its place")
                        .with("page", first + page)
                        .with("page_bytes", page_bytes)
                })?;
            pages.push(NewPage { memory, bytes: bytes as usize });
        }
        Ok(Self { write, layout, pages, slices })
    }

    /// Number of slices of each page.
    fn slices_per_page(&self) -> usize {
        usize::from(self.write.header.slices_per_page.max(1))
    }

    /// The slices of page `page`.
    pub(super) fn slices_of(&self, page: usize) -> &[Slice] {
        let count = self.slices_per_page();
        &self.slices[page * count..][..count]
    }

    /// The memory and the slices of page `page`.
    pub(super) fn page_mut(&mut self, page: usize) -> (&NewPage, &mut [Slice]) {
        let count = self.slices_per_page();
        (&self.pages[page], &mut self.slices[page * count..][..count])
    }

    /// Begins the checksums of the slices of page `page`. The caller adds the bytes of the page in
    /// order.
    pub(super) fn sums_of(&self, page: usize) -> SliceSums<'a> {
        let RunWrite { place, header, .. } = self.write;
        let first = self.slices_of(page).first().map_or(0, |slice| slice.bytes);
        SliceSums::new(&header.keys[page], place.generation, 0, first)
    }

    /// The encoded header and its checksum. All checksums of the pages must be known.
    pub(super) fn encode_header(&self) -> Result<(Vec<u8>, u64)> {
        let RunWrite { place, header, .. } = self.write;
        RunHeader {
            generation: place.generation,
            header_units: place.header_units,
            page_units: place.page_units,
            extents: place.extents.clone(),
            extents_total: place.extents.len() as u32,
            slices_per_page: header.slices_per_page.max(1),
            slices: self.slices.clone(),
            ..RunHeader::clone(header)
        }
        .encode()
    }
}

/// Error for a failed write to `segment`.
pub(super) fn failed(
    what: &str,
    segment: SegmentId,
    error: impl Into<Box<dyn StdError + Send + Sync>>,
) -> Error {
    Error::retry(what)
        .with("reason", MissReason::Io.word())
        .with("segment", segment.0)
        .because(error)
}

/// The cause of an error for a write that the disk failed.
#[derive(Debug)]
pub(super) struct FailedWrite {
    volume: u8,
    error: io::Error,
}

impl FailedWrite {
    pub(super) fn new(segment: SegmentId, error: io::Error) -> Self {
        Self { volume: segment.volume(), error }
    }
}

impl fmt::Display for FailedWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl StdError for FailedWrite {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}

/// If a failed write to a file caused `error`, an error of [`Segments::write_runs`] or
/// [`Segments::copy_run`], returns the volume of this write. `None` for other causes, for mapped
/// segments, and if the write failed because the process lacked memory. A write to a segment that
/// was allocated whole can fail for lack of space too: on file systems that copy on write, and on
/// block devices that are provisioned thinly.
#[must_use]
pub fn failed_volume(error: &Error) -> Option<u8> {
    let failed: &FailedWrite = error.source()?.downcast_ref()?;
    (failed.error.kind() != io::ErrorKind::OutOfMemory).then_some(failed.volume)
}

/// Error for segments that the parent process opened before a fork.
fn inherited() -> Error {
    Error::new(
        ErrorKind::Closed,
        "these segments were opened before a fork: open the store again in the child",
    )
}

/// Error for a run that was not complete when the call stopped, for `reason`.
pub(super) fn stopped(reason: MissReason) -> Error {
    Error::retry("a run was not written completely").with("reason", reason.word())
}
