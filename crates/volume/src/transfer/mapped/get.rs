//! Reading: the header first, then each page by itself.

use super::PIECE;
use super::hands::share;
use super::lay::Lay;
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::check::Check;
use crate::transfer::chunk::Shape;
use crate::transfer::inbound::believe;
use crate::transfer::page::{Direct, PageMemory};
use crate::transfer::read::Reading;
use crate::transfer::{Control, Encoded, MissReason, PageFate, RunRead};
use ritornello_format::{RunHeader, SegmentId};
use std::io;

/// Bytes whose headers are in memory at once, unless a run is longer: thousands of runs may be read
/// in one call.
const WINDOW: u64 = 64 << 20;

/// A run whose header is known.
struct Ready<'r, 'a> {
    read: &'r RunRead<'a>,
    shape: Shape,
    lay: Lay,
    header: RunHeader,
}

/// What can be said of a read before its pages are looked at.
enum Begun<'r, 'a> {
    Ready(Box<Ready<'r, 'a>>),
    /// All its pages miss.
    Bad(MissReason),
    /// Not all of it is mapped.
    Elsewhere,
}

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
) -> Vec<Vec<PageFate>> {
    let mut fates = Vec::with_capacity(reads.len());
    let mut rest = reads;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |read: &&RunRead<'_>| {
            let before = bytes;
            bytes += bytes_of(read);
            before < WINDOW
        };
        let (window, behind) = rest.split_at(rest.iter().take_while(fits).count());
        fates.extend(read_window(segments, window, control));
        rest = behind;
    }
    fates
}

fn bytes_of(read: &RunRead<'_>) -> u64 {
    read.page_bytes.saturating_mul(read.keys.len() as u64)
}

fn read_window(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
) -> Vec<Vec<PageFate>> {
    let begin = |read| match control.stop() {
        Some(reason) => Begun::Bad(reason),
        None => Ready::begin(segments, read),
    };
    let begun: Vec<Begun<'_, '_>> = reads.iter().map(begin).collect();
    let mut pages: Vec<(&Ready<'_, '_>, usize)> = Vec::new();
    for one in &begun {
        if let Begun::Ready(ready) = one {
            pages.extend((0..ready.read.keys.len()).map(|page| (&**ready, page)));
        }
    }
    let bytes = reads.iter().map(bytes_of).sum();
    let mut moved = share(pages.len(), bytes, |number| {
        let (ready, page) = pages[number];
        match control.stop() {
            Some(reason) => PageFate::Missed(reason),
            None => ready.get(page),
        }
    })
    .into_iter();
    let one = |(read, begun): (&RunRead<'_>, &Begun<'_, '_>)| match begun {
        Begun::Ready(_) => moved.by_ref().take(read.keys.len()).collect(),
        Begun::Bad(reason) => vec![PageFate::Missed(*reason); read.keys.len()],
        Begun::Elsewhere => Reading::run(segments, std::slice::from_ref(read), control)
            .pop()
            .unwrap_or_else(|| vec![PageFate::Missed(MissReason::Io); read.keys.len()]),
    };
    reads.iter().zip(&begun).map(one).collect()
}

impl<'r, 'a> Ready<'r, 'a> {
    fn begin(segments: &'a Segments, read: &'r RunRead<'a>) -> Begun<'r, 'a> {
        if segments.is_inherited() {
            return Begun::Bad(MissReason::Io);
        }
        let first = u64::from(read.first);
        let pages = first..first + read.keys.len() as u64;
        let Some(shape) = Shape::of(read.place, read.page_bytes, pages.clone(), segments) else {
            return Begun::Bad(MissReason::Place);
        };
        let lay = match Lay::of(segments, read.place, 0..shape.pages(pages).end) {
            Ok(Some(lay)) => lay,
            Ok(None) => return Begun::Elsewhere,
            Err(failure) => return Begun::Bad(failed(&failure)),
        };
        let mut block = Block::new(shape.header as usize);
        if let Err(reason) = copy_out(&lay, 0, shape.header as usize, &mut block) {
            return Begun::Bad(reason);
        }
        match believe(read, block.bytes()) {
            Ok(header) => Begun::Ready(Box::new(Self { read, shape, lay, header })),
            Err(reason) => Begun::Bad(reason),
        }
    }

    /// Copies page `page` of the read to its target, and verifies it.
    fn get(&self, page: usize) -> PageFate {
        self.try_get(page).unwrap_or_else(PageFate::Missed)
    }

    fn try_get(&self, page: usize) -> Result<PageFate, MissReason> {
        let read = self.read;
        let start = self.shape.pages(0..u64::from(read.first) + page as u64).end;
        let as_stored = matches!(read.encoded, Encoded::AsStored);
        let bytes = if as_stored { self.shape.page } else { read.page_bytes } as usize;
        let target =
            PageMemory::of_target(read.target, read.target_first + page, bytes, Direct::Any)
                .ok_or(MissReason::Memory)?;
        let mut lost = None;
        let copy = |length| {
            let mut block = Block::new(length);
            lost = copy_out(&self.lay, start, length, &mut block).err();
            block
        };
        let mut check = Check::open(read, &self.header, page, None, copy)?;
        if let Some(reason) = lost {
            return Err(reason);
        }
        let (mut scratch, mut at, mut fate) = (Vec::new(), 0, None);
        if !check.is_in_place() {
            loop {
                // SAFETY: the target is ours (`PageTarget`); what is decoded is a copy.
                if let Some(fate) = unsafe { check.step(&target, &mut scratch, PIECE) } {
                    return Ok(fate);
                }
            }
        }
        while at < bytes {
            let piece = PIECE.min(bytes - at);
            let mut to = at;
            let from = start + at as u64;
            let copied = self.lay.each(from..from + piece as u64, |bytes, length| {
                // SAFETY: the target is ours (`PageTarget`), and can be nowhere in our map; the
                // mapped bytes are there, and no reference to them is made.
                unsafe { target.take(to, bytes, length) };
                to += length;
            });
            copied.map_err(|failure| failed(&failure))?;
            at += piece;
            if fate.is_none() {
                // SAFETY: the target is ours, and these bytes of it were copied just now.
                fate = unsafe { check.step(&target, &mut scratch, piece) };
            }
        }
        Ok(fate.unwrap_or(PageFate::Missed(MissReason::Checksum)))
    }
}

/// Copies `length` bytes of the run, from byte `start` on, to the beginning of `block`.
pub(in crate::transfer) fn copy_out(
    lay: &Lay,
    start: u64,
    length: usize,
    block: &mut Block,
) -> Result<(), MissReason> {
    debug_assert!(length <= block.len());
    let mut to = block.as_ptr();
    let copied = lay.each(start..start + length as u64, |bytes, length| {
        // SAFETY: the block is borrowed and as long; the mapped bytes are there, and lie elsewhere.
        unsafe { to.copy_from_nonoverlapping(bytes, length) };
        to = to.wrapping_add(length);
    });
    copied.map_err(|failure| failed(&failure))
}

pub(in crate::transfer) fn failed((segment, error): &(SegmentId, io::Error)) -> MissReason {
    tracing::debug!(%error, segment = segment.0, "a mapped segment cannot be read");
    MissReason::Io
}
