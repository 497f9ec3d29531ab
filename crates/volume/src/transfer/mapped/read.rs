//! Reads runs from mapped segments: copies and decodes the headers first, then copies and verifies
//! the parts of pages ([`Part`]).

use super::copy_threads::map_pages;
use super::{MappedRun, PIECE};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::check::PartCheck;
use crate::transfer::page::Direct;
use crate::transfer::read::{Header, Part, ReadJob};
use crate::transfer::{Control, Encoded, MissReason, PageOutcome, RunRead, Sections, disk};
use ritornello_format::SegmentId;
use std::io;

/// Length of a window, in bytes of pages. A call may read thousands of runs: without sections it
/// reads them window by window, so that only the headers of one window are in memory.
const WINDOW: u64 = 64 << 20;

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
    sections: Option<&Sections>,
) -> Vec<Vec<PageOutcome>> {
    if sections.is_some() {
        return read_window(segments, reads, control, sections);
    }
    let mut outcomes = Vec::with_capacity(reads.len());
    let mut rest = reads;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |read: &&RunRead<'_>| {
            let before = bytes;
            bytes += read.page_bytes.saturating_mul(read.keys.len() as u64);
            before < WINDOW
        };
        let (window, behind) = rest.split_at(rest.iter().take_while(fits).count());
        outcomes.extend(read_window(segments, window, control, None));
        rest = behind;
    }
    outcomes
}

fn read_window(
    segments: &Segments,
    reads: &[RunRead<'_>],
    control: &Control,
    sections: Option<&Sections>,
) -> Vec<Vec<PageOutcome>> {
    let mut job = ReadJob::new(segments, reads, control, sections);
    let mut runs = Vec::with_capacity(reads.len());
    while runs.len() < reads.len() && !job.is_stopped() {
        runs.push(begin(&mut job));
    }
    let is_elsewhere = |run: &usize| matches!(job.runs[*run].header, Header::Awaited);
    let elsewhere: Vec<usize> = (0..runs.len()).filter(is_elsewhere).collect();
    if sections.is_some() && !elsewhere.is_empty() {
        // At least one run is not fully mapped. All runs are then read by system calls, because
        // each section must be read for all runs before the next section is read.
        return disk::read(segments, reads, control, sections, segments.in_flight_bytes, None).0;
    }
    job.cut_pages();
    let mut next = 0;
    while let Some(first) = job.parts.get(next) {
        let count = job.parts[next..].partition_point(|part| part.section == first.section);
        let length = |part: &Part| part.stored.end - part.stored.start;
        let bytes = job.parts[next..next + count].iter().map(length).sum();
        for result in map_pages(count, bytes, |at| copy(&job, &runs, next + at)) {
            job.complete(next, result);
            next += 1;
        }
    }
    let mut outcomes = job.outcomes();
    for run in elsewhere {
        let in_flight = segments.in_flight_bytes;
        let read = &reads[run..=run];
        let read = disk::read(segments, read, control, None, in_flight, None).0.pop();
        if let Some(read) = read {
            outcomes[run] = read;
        }
    }
    outcomes
}

/// Begins the next read: maps its run and decodes the run's header. Returns `None` if the header
/// was not copied: all pages of the read have missed, or part of the run cannot be mapped, and
/// system calls must read the run. If the header is invalid, all pages have missed too.
fn begin(job: &mut ReadJob<'_>) -> Option<MappedRun> {
    let run = job.runs.len();
    let (layout, pages) = job.begin(Direct::Any)?;
    let range = 0..layout.pages(pages).end;
    let mapped = MappedRun::new(job.segments, job.reads[run].place, range);
    let copied = match mapped.map_err(|failure| failed(&failure)) {
        Ok(mapped) => {
            let mapped = mapped?;
            mapped.to_block(0, layout.header as usize).map(|block| (mapped, block))
        }
        Err(reason) => Err(reason),
    };
    match copied {
        Ok((mapped, block)) => {
            job.set_header(run, Ok(block.bytes()));
            Some(mapped)
        }
        Err(reason) => {
            job.set_header(run, Err(reason));
            None
        }
    }
}

/// Copies a part to its target, and verifies the copy.
fn copy(job: &ReadJob<'_>, runs: &[Option<MappedRun>], part: usize) -> Result<(), MissReason> {
    if job.is_decided(part) {
        // The page missed when an earlier section was read.
        return Err(MissReason::Header);
    }
    if let Some(reason) = job.control.stop() {
        return Err(reason);
    }
    let (run, expected) = (job.parts[part].run, job.expected(part));
    let (Some(expected), Some(mapped)) = (expected, &runs[run]) else {
        return Err(MissReason::Io);
    };
    let start = job.page_start(part) + expected.stored.start;
    let mut check = PartCheck::open(&expected, None, |length| mapped.to_block(start, length))?;
    let (mut scratch, mut result) = (Vec::new(), None);
    if !check.is_in_place() {
        while result.is_none() {
            // SAFETY: the target is exclusive (`PageTarget`); the decoder reads a copy.
            result = unsafe { check.step(&expected, &mut scratch, PIECE) };
        }
        return result.unwrap_or(Err(MissReason::Checksum));
    }
    let bytes = match expected.read.encoded {
        // A page delivered as stored includes its padding.
        Encoded::AsStored => job.runs[run].layout.page as usize,
        _ => (expected.stored.end - expected.stored.start) as usize,
    };
    let (to, mut at) = (expected.target_start() as usize, 0);
    while at < bytes {
        let piece = PIECE.min(bytes - at);
        let (from, mut to) = (start + at as u64, to + at);
        let copied = mapped.for_each(from..from + piece as u64, |bytes, length| {
            // SAFETY: the target is exclusive (`PageTarget`) and does not overlap the map, which is
            // private to this crate; `for_each` faulted the mapped bytes in, and no reference to
            // them exists.
            unsafe { expected.target.write_from(to, bytes, length) };
            to += length;
        });
        copied.map_err(|failure| failed(&failure))?;
        at += piece;
        if result.is_none() {
            // SAFETY: the target is exclusive, and these bytes of it were copied above.
            result = unsafe { check.step(&expected, &mut scratch, piece) };
        }
    }
    result.unwrap_or(Err(MissReason::Checksum))
}

fn failed((segment, error): &(SegmentId, io::Error)) -> MissReason {
    tracing::debug!(%error, segment = segment.0, "a mapped segment cannot be read");
    MissReason::Io
}

impl MappedRun {
    /// A copy of `length` bytes of the run, starting at byte `start`. Headers and encoded pages are
    /// copied before they are parsed, because other processes may change mapped bytes.
    fn to_block(&self, start: u64, length: usize) -> Result<Block, MissReason> {
        let block = Block::new(length);
        let mut to = block.as_ptr();
        let copied = self.for_each(start..start + length as u64, |bytes, length| {
            // SAFETY: the block has `length` bytes and does not overlap the map; the mapped bytes
            // were faulted in by `for_each`.
            unsafe { to.copy_from_nonoverlapping(bytes, length) };
            to = to.wrapping_add(length);
        });
        copied.map_err(|failure| failed(&failure)).map(|()| block)
    }
}
