//! Verifies runs without delivering their bytes: for `fsck`, the scrub, and the emptying of
//! segments. The header of a run can also be read alone.

use super::chunk::{Chunk, RunLayout};
use super::{Control, Encoded, MissReason, PageOutcome, RunRead};
use crate::io_engine::{IoVec, Op, Work};
use crate::memory_block::Block;
use crate::page_memory::{FragmentMut, PageTarget};
use crate::segments::{OpInFlight, Segments};
use crate::staging::StagingBuffer;
use ritornello_format::{Error, Place, Result, RunHeader, SegmentId, UNIT};
use std::error::Error as _;
use std::fmt;
use std::io;

/// Maximum bytes that are read at a time and then verified. Longer pages are verified as
/// [`Segments::verify_page`] does.
const WINDOW: usize = 16 << 20;

/// Whether `error` is a failed read of the disk (`EIO`), not a shortage of files or memory.
#[must_use]
pub fn is_unreadable_on_disk(error: &Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.and_then(io::Error::raw_os_error) == Some(libc::EIO)
}

/// A run after verification.
#[derive(Clone, Debug)]
pub struct VerifiedRun {
    /// The run header, whose checksum matches the checksum in the place.
    pub header: RunHeader,
    /// The outcome of every page that the place holds.
    pub pages: Vec<PageOutcome>,
}

impl Segments {
    /// Reads the header of a run.
    ///
    /// # Errors
    /// `Miss` if the place is inconsistent, or the bytes are not the header that the place names;
    /// `Retry` if the header cannot be read now, for example because its volume has stalled, which
    /// does not prove damage.
    pub fn read_header(&self, place: &Place) -> Result<RunHeader> {
        let adds_up = RunLayout::new(place, u64::from(place.page_units) * UNIT, 0..0, self);
        let layout = adds_up.ok_or_else(|| {
            Error::miss("a run's place is inconsistent").with("generation", place.generation)
        })?;
        let mut chunks = Vec::new();
        layout.cut(place, 0..layout.header, &mut chunks);
        let mut block = Block::new(layout.header as usize);
        let unread = |error: io::Error| {
            Error::retry("a run header cannot be read")
                .with("generation", place.generation)
                .because(error)
        };
        for chunk in chunks {
            let Chunk { segment, offset, logical } = chunk;
            let to = logical.start as usize..logical.end as usize;
            self.fetch(segment, offset, &mut block.bytes_mut()[to]).map_err(unread)?;
        }
        let (header, checksum) = RunHeader::decode(block.bytes())?;
        let same = checksum == place.header_checksum
            && header.generation == place.generation
            && header.header_units == place.header_units
            && header.page_units == place.page_units;
        if same {
            Ok(header)
        } else {
            Err(Error::miss("a run header differs from the expected header")
                .with("generation", place.generation))
        }
    }

    /// Reads a whole run and verifies every page that the place holds, without decoding. Pages that
    /// are not read, because `control` stops the call or staging has no memory, are missed.
    ///
    /// # Errors
    /// `Miss` if the place is inconsistent, or if the header is not the header that the place names
    /// or does not match the place; `Retry` if the header cannot be read now.
    pub fn verify_run(&self, place: &Place, control: &Control) -> Result<VerifiedRun> {
        let (header, count) = self.header_and_pages(place)?;
        let padded = place.page_units as usize * UNIT as usize;
        if padded > WINDOW {
            let verify = |page| self.verify_stored_page(place, &header, page, control);
            let pages = (0..count as u32).map(verify).collect();
            return Ok(VerifiedRun { header, pages });
        }
        let keys: Vec<&[u8]> = header.keys.iter().take(count).collect();
        let at_once = (WINDOW / padded).clamp(1, keys.len().max(1));
        let mut pages = Vec::with_capacity(keys.len());
        if let Some(memory) = control.stage(&self.staging, at_once * padded) {
            let target = WindowTarget { memory, padded };
            for keys in keys.chunks(at_once) {
                let read = RunRead {
                    place,
                    scope: header.scope,
                    page_bytes: header.page_bytes,
                    keys,
                    first: pages.len() as u32,
                    target: &target,
                    target_first: 0,
                    encoded: Encoded::AsStored,
                };
                pages.extend(self.read_runs(&[read], control).into_iter().flatten());
            }
        }
        let rest = control.stop().unwrap_or(MissReason::Staging);
        pages.resize(keys.len(), PageOutcome::Missed(rest));
        Ok(VerifiedRun { header, pages })
    }

    /// Reads the header of a run, and returns the number of pages that the place holds.
    ///
    /// # Errors
    /// As [`Segments::verify_run`].
    pub(super) fn header_and_pages(&self, place: &Place) -> Result<(RunHeader, usize)> {
        let header = self.read_header(place)?;
        let body = place.units().saturating_sub(u64::from(place.header_units));
        let count = body / u64::from(place.page_units).max(1);
        if count * u64::from(place.page_units) != body || count > header.keys.len() as u64 {
            return Err(Error::miss("a run's place and header do not match")
                .with("generation", place.generation)
                .with("pages", header.keys.len()));
        }
        Ok((header, count as usize))
    }

    /// Whether reading the page now fails with `EIO`, and not for a shortage of files or memory.
    #[must_use]
    pub fn is_unreadable(&self, place: &Place, page: u32) -> bool {
        let mut block = Block::new(place.page_units as usize * UNIT as usize);
        let read = self.read_extents(&place.page(page), block.bytes_mut());
        read.is_err_and(|error| error.raw_os_error() == Some(libc::EIO))
    }

    /// Reads bytes of a segment into `to`. Offset, and length and address of `to`, must be
    /// multiples of 4 KiB.
    ///
    /// # Errors
    /// [`StalledVolume`] if the segment's volume has stalled: nothing was read. An error if the
    /// segments were opened before a fork. Errors of the file system.
    pub(super) fn fetch(&self, segment: SegmentId, offset: u64, to: &mut [u8]) -> io::Result<()> {
        if self.is_inherited() {
            return Err(io::Error::other("these segments were opened before a fork"));
        }
        let in_flight = self.begin(segment.volume())?;
        let file = self.file(segment)?;
        let iovec = IoVec::new(to.as_mut_ptr(), to.len());
        // SAFETY: `to` is borrowed mutably until the engine returns.
        let op = unsafe { Op::new(0, file, false, offset, vec![iovec]) };
        SingleOp::run(self, op.on(segment.volume()), in_flight)
    }

    /// Records an operation on `volume` that is about to begin.
    ///
    /// # Errors
    /// [`StalledVolume`] if the volume has stalled: the operation must not begin.
    pub(super) fn begin(&self, volume: u8) -> io::Result<OpInFlight> {
        self.stalls.begin(volume).ok_or_else(|| io::Error::other(StalledVolume))
    }
}

/// The cause of an error for an operation that was not begun because its volume has stalled.
#[derive(Debug)]
pub(super) struct StalledVolume;

impl StalledVolume {
    /// Whether `error` was caused by a stalled volume.
    pub(super) fn caused(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|cause| cause.is::<Self>())
    }
}

impl fmt::Display for StalledVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the volume completes no operation: check its disk")
    }
}

impl std::error::Error for StalledVolume {}

/// A single operation.
pub(super) struct SingleOp {
    op: Option<Op>,
    result: io::Result<()>,
}

impl SingleOp {
    /// Runs the operation, which [`Segments::begin`] recorded, and waits for it.
    pub(super) fn run(segments: &Segments, op: Op, in_flight: OpInFlight) -> io::Result<()> {
        let _in_flight = in_flight.submitted();
        let mut work = Self { op: Some(op), result: Err(io::ErrorKind::Other.into()) };
        segments.engine.run(&mut work);
        work.result
    }
}

impl Work for SingleOp {
    fn next(&mut self) -> Option<Op> {
        self.op.take()
    }
    fn done(&mut self, _: u64, result: io::Result<()>) {
        self.result = result;
    }
    fn compute(&mut self) -> bool {
        false
    }
}

/// Staging memory for several pages.
struct WindowTarget {
    memory: StagingBuffer,
    padded: usize,
}

// SAFETY: the buffer lives as long as this value, which owns it, and pages do not overlap in it.
// Each call of `read_runs` by `verify_run` fills a page at most once, and returns before the next.
unsafe impl PageTarget for WindowTarget {
    fn len(&self) -> usize {
        self.memory.bytes().len() / self.padded
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        if page < self.len() {
            let at = self.memory.as_ptr().wrapping_add(page * self.padded);
            // SAFETY: inside the buffer.
            out.push(unsafe { FragmentMut::new(at, self.padded) });
        }
    }
}
