//! Reads runs from mapped segments: the header first, then each page.

use super::PIECE;
use super::copy_threads::map_pages;
use super::mapped_run::MappedRun;
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::chunk::RunLayout;
use crate::transfer::page::{Direct, PageMemory};
use crate::transfer::page_check::PageCheck;
use crate::transfer::read::ReadJob;
use crate::transfer::read_state::decode_expected_header;
use crate::transfer::{Control, Encoded, MissReason, PageOutcome, RunRead};
use ritornello_format::{RunHeader, SegmentId};
use std::io;

/// Bytes of pages whose headers are in memory at the same time, or one run if it is longer: one
/// call may read thousands of runs.
const WINDOW: u64 = 64 << 20;

/// A run whose header is known.
struct MappedRead<'r, 'a> {
    read: &'r RunRead<'a>,
    layout: RunLayout,
    mapped: MappedRun,
    header: RunHeader,
}

/// The start of a read, before its pages are copied.
enum ReadStart<'r, 'a> {
    Ready(Box<MappedRead<'r, 'a>>),
    /// All pages miss.
    Missed(MissReason),
    /// Part of the run is not mapped: system calls read it.
    Elsewhere,
}

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
) -> Vec<Vec<PageOutcome>> {
    let mut outcomes = Vec::with_capacity(reads.len());
    let mut rest = reads;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |read: &&RunRead<'_>| {
            let before = bytes;
            bytes += bytes_of(read);
            before < WINDOW
        };
        let (window, behind) = rest.split_at(rest.iter().take_while(fits).count());
        outcomes.extend(read_window(segments, window, control));
        rest = behind;
    }
    outcomes
}

fn bytes_of(read: &RunRead<'_>) -> u64 {
    read.page_bytes.saturating_mul(read.keys.len() as u64)
}

fn read_window(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
) -> Vec<Vec<PageOutcome>> {
    let begin = |read| match control.stop() {
        Some(reason) => ReadStart::Missed(reason),
        None => MappedRead::begin(segments, read),
    };
    let starts: Vec<ReadStart<'_, '_>> = reads.iter().map(begin).collect();
    let mut pages: Vec<(&MappedRead<'_, '_>, usize)> = Vec::new();
    for one in &starts {
        if let ReadStart::Ready(run) = one {
            pages.extend((0..run.read.keys.len()).map(|page| (&**run, page)));
        }
    }
    let bytes = reads.iter().map(bytes_of).sum();
    let mut moved = map_pages(pages.len(), bytes, |number| {
        let (run, page) = pages[number];
        match control.stop() {
            Some(reason) => PageOutcome::Missed(reason),
            None => run.get(page),
        }
    })
    .into_iter();
    let one = |(read, starts): (&RunRead<'_>, &ReadStart<'_, '_>)| match starts {
        ReadStart::Ready(_) => moved.by_ref().take(read.keys.len()).collect(),
        ReadStart::Missed(reason) => vec![PageOutcome::Missed(*reason); read.keys.len()],
        ReadStart::Elsewhere => ReadJob::run(segments, std::slice::from_ref(read), control)
            .pop()
            .unwrap_or_else(|| vec![PageOutcome::Missed(MissReason::Io); read.keys.len()]),
    };
    reads.iter().zip(&starts).map(one).collect()
}

impl<'r, 'a> MappedRead<'r, 'a> {
    fn begin(segments: &'a Segments, read: &'r RunRead<'a>) -> ReadStart<'r, 'a> {
        if segments.is_inherited() {
            return ReadStart::Missed(MissReason::Io);
        }
        let first = u64::from(read.first);
        let pages = first..first + read.keys.len() as u64;
        let Some(layout) = RunLayout::new(read.place, read.page_bytes, pages.clone(), segments)
        else {
            return ReadStart::Missed(MissReason::Place);
        };
        let mapped = match MappedRun::new(segments, read.place, 0..layout.pages(pages).end) {
            Ok(Some(mapped)) => mapped,
            Ok(None) => return ReadStart::Elsewhere,
            Err(failure) => return ReadStart::Missed(failed(&failure)),
        };
        let mut block = Block::new(layout.header as usize);
        if let Err(reason) = copy_out(&mapped, 0, layout.header as usize, &mut block) {
            return ReadStart::Missed(reason);
        }
        match decode_expected_header(read, block.bytes()) {
            Ok(header) => ReadStart::Ready(Box::new(Self { read, layout, mapped, header })),
            Err(reason) => ReadStart::Missed(reason),
        }
    }

    /// Copies page `page` of the read to its target, and verifies it.
    fn get(&self, page: usize) -> PageOutcome {
        self.try_get(page).unwrap_or_else(PageOutcome::Missed)
    }

    fn try_get(&self, page: usize) -> Result<PageOutcome, MissReason> {
        let read = self.read;
        let start = self.layout.pages(0..u64::from(read.first) + page as u64).end;
        let as_stored = matches!(read.encoded, Encoded::AsStored);
        let bytes = if as_stored { self.layout.page } else { read.page_bytes } as usize;
        let target =
            PageMemory::of_target(read.target, read.target_first + page, bytes, Direct::Any)
                .ok_or(MissReason::Memory)?;
        let mut failure = None;
        let copy = |length| {
            let mut block = Block::new(length);
            failure = copy_out(&self.mapped, start, length, &mut block).err();
            block
        };
        let mut check = PageCheck::open(read, &self.header, page, None, copy)?;
        if let Some(reason) = failure {
            return Err(reason);
        }
        let (mut scratch, mut at, mut outcome) = (Vec::new(), 0, None);
        if !check.is_in_place() {
            loop {
                // SAFETY: the target is exclusive (`PageTarget`); the decoder reads a copy.
                if let Some(outcome) = unsafe { check.step(&target, &mut scratch, PIECE) } {
                    return Ok(outcome);
                }
            }
        }
        while at < bytes {
            let piece = PIECE.min(bytes - at);
            let mut to = at;
            let from = start + at as u64;
            let copied = self.mapped.for_each(from..from + piece as u64, |bytes, length| {
                // SAFETY: the target is exclusive (`PageTarget`) and does not overlap the map,
                // which is private to this crate; `for_each` faulted the mapped bytes in, and no
                // reference to them exists.
                unsafe { target.write_from(to, bytes, length) };
                to += length;
            });
            copied.map_err(|failure| failed(&failure))?;
            at += piece;
            if outcome.is_none() {
                // SAFETY: the target is exclusive, and these bytes of it were copied above.
                outcome = unsafe { check.step(&target, &mut scratch, piece) };
            }
        }
        Ok(outcome.unwrap_or(PageOutcome::Missed(MissReason::Checksum)))
    }
}

/// Copies `length` bytes of the run, starting at byte `start`, to the start of `block`. Headers and
/// encoded pages are copied before they are parsed, because other processes may change mapped
/// bytes.
pub(in crate::transfer) fn copy_out(
    mapped: &MappedRun,
    start: u64,
    length: usize,
    block: &mut Block,
) -> Result<(), MissReason> {
    debug_assert!(length <= block.len());
    let mut to = block.as_ptr();
    let copied = mapped.for_each(start..start + length as u64, |bytes, length| {
        // SAFETY: the block has `length` bytes and does not overlap the map; the mapped bytes were
        // faulted in by `for_each`.
        unsafe { to.copy_from_nonoverlapping(bytes, length) };
        to = to.wrapping_add(length);
    });
    copied.map_err(|failure| failed(&failure))
}

pub(in crate::transfer) fn failed((segment, error): &(SegmentId, io::Error)) -> MissReason {
    tracing::debug!(%error, segment = segment.0, "a mapped segment cannot be read");
    MissReason::Io
}
