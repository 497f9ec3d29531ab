//! Writes runs to mapped segments: copies all pages of a run, then writes the run's header.

use super::copy_threads::map_pages;
use super::{MappedRun, PIECE};
use crate::segments::Segments;
use crate::transfer::page::Direct;
use crate::transfer::write::{self, NewRun, stopped};
use crate::transfer::{Control, MissReason, RunWrite, disk};
use ritornello_format::{Error, Result, SegmentId, Slice};
use std::io;

/// See [`Segments::write_runs`].
pub(in crate::transfer) fn write(
    segments: &Segments,
    writes: &[RunWrite<'_>],
    control: &Control,
) -> Vec<Result<u64>> {
    writes.iter().map(|write| write_run(segments, write, control)).collect()
}

fn write_run(segments: &Segments, write: &RunWrite<'_>, control: &Control) -> Result<u64> {
    if let Some(reason) = control.stop() {
        return Err(stopped(reason));
    }
    let mut run = NewRun::new(segments, write, Direct::Any)?;
    let count = run.pages.len();
    let end = run.layout.pages(0..count as u64).end;
    let Some(mapped) = MappedRun::new(segments, write.place, 0..end).map_err(failed)? else {
        let in_flight = segments.in_flight_bytes;
        let write = std::slice::from_ref(write);
        let (results, _) = disk::write(segments, write, control, in_flight, None);
        return results.into_iter().next().unwrap_or_else(|| Err(stopped(MissReason::Io)));
    };
    let slices = map_pages(count, end, |page| match control.stop() {
        Some(reason) => Err(stopped(reason)),
        None => copy(&run, &mapped, page),
    });
    for (page, slices) in slices.into_iter().enumerate() {
        run.page_mut(page).1.copy_from_slice(&slices?);
    }
    let (header, checksum) = run.encode_header()?;
    let mut from = header.as_slice();
    mapped
        .for_each(0..run.layout.header, |to, length| {
            let (now, rest) = from.split_at(length.min(from.len()));
            // SAFETY: `for_each` faulted the mapped bytes in, they are reserved for this run, and
            // the encoded header is in a buffer outside the map.
            unsafe {
                to.copy_from_nonoverlapping(now.as_ptr(), now.len());
                to.add(now.len()).write_bytes(0, length - now.len());
            }
            from = rest;
        })
        .map_err(failed)?;
    Ok(checksum)
}

/// Copies a page to its place, padded with zeroes, and returns its slices with their checksums.
fn copy(run: &NewRun<'_>, mapped: &MappedRun, page: usize) -> Result<Vec<Slice>> {
    let mut sums = run.sums_of(page);
    let length = run.layout.page as usize;
    let start = run.layout.pages(0..page as u64).end;
    let mut slices = run.slices_of(page).to_vec();
    let page = &run.pages[page];
    let mut at = 0;
    while at < length {
        let piece = PIECE.min(length - at);
        // SAFETY: a source's memory is readable (`PageSource`).
        unsafe { page.memory.for_each(at..at + piece, |bytes| sums.fill(bytes, &mut slices)) };
        let mut done = at;
        let from = start + at as u64;
        let copied = mapped.for_each(from..from + piece as u64, |to, length| {
            let bytes = length.min(page.bytes.saturating_sub(done));
            // SAFETY: a source's memory is readable and does not overlap the map; `for_each`
            // faulted the mapped bytes in, and the place is reserved for this run, so no other
            // process writes to it.
            unsafe {
                page.memory.read_to(done, to, bytes);
                to.add(bytes).write_bytes(0, length - bytes);
            }
            done += length;
        });
        copied.map_err(failed)?;
        at += piece;
    }
    Ok(slices)
}

fn failed((segment, error): (SegmentId, io::Error)) -> Error {
    write::failed("a run could not be written", segment, error)
}
