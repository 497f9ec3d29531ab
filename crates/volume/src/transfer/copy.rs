//! Copies a run to a new place without decoding it.

use super::Control;
use super::chunk::RunLayout;
use super::stored_page::{StoredPageCheck, WINDOW, windows};
use super::verify_run::{SingleOp, StalledVolume, is_unreadable_on_disk};
use super::write::{FailedWrite, stopped};
use crate::io_engine::{IoVec, Op};
use crate::memory_block::Block;
use crate::segments::Segments;
use ritornello_format::{Error, ErrorKind, Extent, Place, Result, RunHeader, UNIT};
use std::error::Error as StdError;
use std::io;

type AnyError = Box<dyn StdError + Send + Sync>;

impl Segments {
    /// Copies a run, verifies each live page on the way, and returns the header checksum that the
    /// index must keep for the new place. Pages stay encoded and keep their generation, so their
    /// checksums stay valid; only the header changes, because it names the extents.
    ///
    /// `live` holds for each page whether it still exists. Removed pages are not read, and are zero
    /// in the new place. `to` holds as many pages as `live` has entries; its `header_checksum` is
    /// ignored. The copy is durable only after [`Segments::sync`].
    ///
    /// # Errors
    /// `Miss` if `from` is inconsistent or outside the segments, if the header or a live page fails
    /// verification, if the disk refuses to read the header (`EIO`), or if a live page cannot be
    /// read for any reason but a stalled volume. `Retry` if the header cannot be read for another
    /// reason, a volume has stalled, a write failed (see [`failed_volume`](super::failed_volume)),
    /// no memory was free, or `control` stopped the call. `Invalid` if `to` does not match `from`,
    /// `live` or the segments, or if `from` or its header has fewer pages than `live`.
    pub fn copy_run(
        &self,
        from: &Place,
        to: &Place,
        live: &[bool],
        control: &Control,
    ) -> Result<u64> {
        let header = self.read_header(from).map_err(|error| match error.kind() {
            ErrorKind::Retry if is_unreadable_on_disk(&error) => {
                Error::miss("the disk refuses to read a run to be moved").because(error)
            }
            _ => error,
        })?;
        let count = live.len() as u64;
        let fits = |place: &Place| {
            RunLayout::new(place, u64::from(place.page_units) * UNIT, 0..count, self).is_some()
        };
        let same = from.header_units == to.header_units
            && from.page_units == to.page_units
            && from.generation == to.generation
            && u64::from(to.holds()) == count
            && header.keys.len() as u64 >= count;
        if !same || !fits(from) || !fits(to) {
            return Err(Error::invalid("a run cannot be moved to a place of another layout")
                .with("generation", from.generation));
        }
        let page_bytes = u64::from(from.page_units) * UNIT;
        let at_once = (WINDOW / page_bytes).clamp(1, count.max(1));
        let stopped = || stopped(control.stop().unwrap_or(super::MissReason::Staging));
        let window_bytes = (at_once * page_bytes).min(WINDOW) as usize;
        let mut memory = control.stage(&self.staging, window_bytes).ok_or_else(stopped)?;
        let mut first = 0;
        while first < live.len() {
            if let Some(reason) = control.stop() {
                return Err(super::write::stopped(reason));
            }
            if page_bytes > WINDOW {
                let (page, is_live) = (first as u32, live[first]);
                let bytes = memory.bytes_mut();
                self.copy_long_page(&header, (from, to), page, is_live, bytes, control)?;
                first += 1;
                continue;
            }
            let pages = (live.len() - first).min(at_once as usize);
            let bytes = &mut memory.bytes_mut()[..pages * page_bytes as usize];
            let window = first as u32..(first + pages) as u32;
            // Read a window in one step only if it has no removed page, whose space may be reused
            // or unreadable.
            let whole = live[first..first + pages].iter().all(|live| *live);
            if whole {
                let read = self.read_extents(&from.pages(window.start, pages as u32), bytes);
                read.map_err(|error| unread(from, error))?;
            }
            for (at, page) in bytes.chunks_mut(page_bytes as usize).enumerate() {
                if !live[first + at] {
                    page.fill(0);
                    continue;
                }
                if !whole {
                    let read = self.read_extents(&from.page((first + at) as u32), page);
                    read.map_err(|error| unread(from, error))?;
                }
                let mut check = StoredPageCheck::new(&header, from.generation, first + at);
                check.iter_mut().for_each(|check| check.add(page));
                intact(check, from, first + at)?;
            }
            let written = self.write_extents(&to.pages(window.start, pages as u32), bytes);
            written.map_err(|error| unwritten(to, error))?;
            first += pages;
        }
        let moved = RunHeader { extents: to.extents.clone(), ..header };
        let (bytes, checksum) = moved.encode()?;
        let mut block = Block::new(to.header_units as usize * UNIT as usize);
        block.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        self.write_extents(&to.header(), block.bytes_mut())
            .map_err(|error| unwritten(to, error))?;
        Ok(checksum)
    }

    /// Copies one page that is longer than `memory`, window by window, and verifies it on the way. A
    /// removed page is not read, and is zero in the new place.
    fn copy_long_page(
        &self,
        header: &RunHeader,
        (from, to): (&Place, &Place),
        page: u32,
        is_live: bool,
        memory: &mut [u8],
        control: &Control,
    ) -> Result<()> {
        let mut check = StoredPageCheck::new(header, from.generation, page as usize);
        for (first, units) in windows(from.page_units) {
            if let Some(reason) = control.stop() {
                return Err(stopped(reason));
            }
            let bytes = &mut memory[..units as usize * UNIT as usize];
            if is_live {
                let read = self.read_extents(&from.page_part(page, first, units), bytes);
                read.map_err(|error| unread(from, error))?;
                check.iter_mut().for_each(|check| check.add(bytes));
            } else {
                bytes.fill(0);
            }
            let written = self.write_extents(&to.page_part(page, first, units), bytes);
            written.map_err(|error| unwritten(to, error))?;
        }
        if is_live { intact(check, from, page as usize) } else { Ok(()) }
    }

    pub(super) fn read_extents(&self, extents: &[Extent], mut to: &mut [u8]) -> io::Result<()> {
        for extent in extents {
            let (now, rest) = to.split_at_mut(extent.bytes() as usize);
            let mut offset = extent.offset();
            // A longer operation on a slow disk could take longer than the time after which the
            // disk's volume counts as stalled.
            for part in now.chunks_mut(self.op_bytes() as usize) {
                self.fetch(extent.segment, offset, part)?;
                offset += part.len() as u64;
            }
            to = rest;
        }
        Ok(())
    }

    fn write_extents(
        &self,
        extents: &[Extent],
        mut from: &mut [u8],
    ) -> std::result::Result<(), AnyError> {
        if self.is_inherited() {
            return Err(io::Error::other("these segments were opened before a fork").into());
        }
        for extent in extents {
            let (now, rest) = from.split_at_mut(extent.bytes() as usize);
            let mut offset = extent.offset();
            for part in now.chunks_mut(self.op_bytes() as usize) {
                let in_flight = self.begin(extent.segment.volume())?;
                let file = self.file(extent.segment)?;
                let iovec = IoVec::new(part.as_mut_ptr(), part.len());
                // SAFETY: `part` is borrowed until the engine returns.
                let op = unsafe { Op::new(0, file, true, offset, vec![iovec]) };
                SingleOp::run(self, op.on(extent.segment.volume()), in_flight)
                    .map_err(|error| FailedWrite::new(extent.segment, error))?;
                offset += part.len() as u64;
            }
            from = rest;
        }
        Ok(())
    }
}

/// Fails unless the check, after all bytes of the page, found it intact.
fn intact(check: Option<StoredPageCheck<'_>>, from: &Place, page: usize) -> Result<()> {
    if check.is_some_and(|check| check.is_intact()) {
        return Ok(());
    }
    Err(Error::miss("a page to be moved fails its checksum")
        .with("generation", from.generation)
        .with("page", page))
}

fn unread(place: &Place, error: io::Error) -> Error {
    // A stalled volume may work again, so its pages are not lost.
    let unread = if StalledVolume::caused(&error) { Error::retry } else { Error::miss };
    unread("a run to be moved cannot be read").with("generation", place.generation).because(error)
}

fn unwritten(place: &Place, error: AnyError) -> Error {
    Error::retry("a run could not be written to its new place")
        .with("generation", place.generation)
        .because(error)
}
