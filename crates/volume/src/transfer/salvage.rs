//! Finds runs by their headers, without an index.

use super::Control;
use super::chunk::RunLayout;
use super::verify_run::StalledVolume;
use crate::segments::Segments;
use ritornello_format::{
    Extent, Place, RUN_HEADER_UNITS_MAX, RUN_MAGIC, Result, RunHeader, SegmentId, UNIT,
};

/// Bytes of a segment that are read at a time and then searched for run headers.
const WINDOW: u64 = 4 << 20;

/// A run header found in a segment. The run's pages are not verified, and may be overwritten.
#[derive(Clone, Debug)]
pub struct SalvagedRun {
    /// Location of the run when it was written. The place holds fewer pages than the header names
    /// if the header had no room for all extents of the run.
    pub place: Place,
    /// The header.
    pub header: RunHeader,
    /// Number of pages that the place holds.
    pub pages: u32,
}

impl Segments {
    /// Searches every unit of a segment for run headers. Passes to `found` each run whose header
    /// names the position where it was found, and whose place holds at least one page. Returns the
    /// number of bytes that could not be read, with the bytes that a file shorter than a segment
    /// lacks.
    ///
    /// # Errors
    /// `Retry` if the segment cannot be opened, if its volume has stalled, or if `control` stopped
    /// the call.
    pub fn scan_headers(
        &self,
        segment: SegmentId,
        control: &Control,
        found: &mut dyn FnMut(SalvagedRun),
    ) -> Result<u64> {
        let length = self.file(segment)?.length()?.min(self.segment_bytes()) / UNIT * UNIT;
        // A header that begins in a window may end after it: read `overlap` bytes more.
        let overlap = u64::from(RUN_HEADER_UNITS_MAX - 1) * UNIT;
        let mut window = crate::memory_block::Block::new((WINDOW + overlap) as usize);
        let mut unreadable = self.segment_bytes() - length;
        let mut start = 0;
        while start < length {
            if let Some(reason) = control.stop() {
                return Err(ritornello_format::Error::retry("a search for runs was stopped")
                    .with("reason", reason.word()));
            }
            let bytes = (WINDOW + overlap).min(length - start) as usize;
            let bytes = &mut window.bytes_mut()[..bytes];
            if self.fetch(segment, start, bytes).is_err() {
                unreadable += self.fetch_units(segment, start, bytes)?;
            }
            for at in (0..WINDOW.min(length - start)).step_by(UNIT as usize) {
                let unit = &bytes[at as usize..];
                if unit.starts_with(&RUN_MAGIC)
                    && let Some(run) = self.parse_run(segment, start + at, unit)
                {
                    found(run);
                }
            }
            start += WINDOW;
        }
        Ok(unreadable)
    }

    /// Reads unit by unit a window that cannot be read as a whole. Unreadable units become zero.
    /// Returns the number of unreadable bytes among the first [`WINDOW`] bytes: bytes after them
    /// are counted with the next window.
    ///
    /// # Errors
    /// `Retry` if the segment's volume has stalled.
    fn fetch_units(&self, segment: SegmentId, start: u64, to: &mut [u8]) -> Result<u64> {
        let mut unreadable = 0;
        for (at, unit) in to.chunks_mut(UNIT as usize).enumerate() {
            let at = at as u64 * UNIT;
            match self.fetch(segment, start + at, unit) {
                Ok(()) => {}
                Err(error) if StalledVolume::caused(&error) => {
                    return Err(ritornello_format::Error::retry(
                        "a segment cannot be searched for runs now",
                    )
                    .with("segment", segment.0)
                    .because(error));
                }
                Err(_) => {
                    unit.fill(0);
                    unreadable += if at < WINDOW { unit.len() as u64 } else { 0 };
                }
            }
        }
        Ok(unreadable)
    }

    fn parse_run(&self, segment: SegmentId, offset: u64, bytes: &[u8]) -> Option<SalvagedRun> {
        let (header, header_checksum) = RunHeader::decode(bytes).ok()?;
        let Extent { segment: named, start, .. } = *header.extents.first()?;
        // A header that names a different position is the content of a page, not a run.
        if named != segment || u64::from(start) * UNIT != offset {
            return None;
        }
        let mut place = Place {
            generation: header.generation,
            header_checksum,
            header_units: header.header_units,
            page_units: header.page_units,
            extents: header.extents.clone(),
        };
        let body = place.units().checked_sub(u64::from(place.header_units))?;
        let held = body.checked_div(u64::from(place.page_units))?;
        let pages = held.min(header.keys.len() as u64) as u32;
        if pages == 0 {
            return None;
        }
        place.truncate(pages);
        RunLayout::new(&place, header.page_bytes, 0..u64::from(pages), self)?;
        Some(SalvagedRun { place, header, pages })
    }
}
