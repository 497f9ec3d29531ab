//! Reads sections from mapped segments: copies, in the order of the sections.

use super::plan::{Plan, SliceGroup};
use super::{Sections, disk};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::chunk::RunLayout;
use crate::transfer::mapped::{MappedRun, PIECE, copy_out, failed};
use crate::transfer::{Control, MissReason, PageOutcome, RunRead};

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    sections: &Sections,
    control: &Control,
) -> Vec<Vec<PageOutcome>> {
    let (mut headers, mut mapped_runs) = (Vec::with_capacity(reads.len()), Vec::new());
    for read in reads {
        let found = begin(segments, read, control);
        if matches!(found, Ok(None)) {
            // One run is not fully mapped: system calls read them all, to keep the order of
            // sections across runs.
            return disk::read(segments, reads, sections, control);
        }
        let (header, mapped) = match found {
            Ok(Some((layout, block, mapped))) => (Ok((layout, block)), Some(mapped)),
            Ok(None) => (Err(MissReason::Io), None),
            Err(reason) => (Err(reason), None),
        };
        headers.push(header);
        mapped_runs.push(mapped);
    }
    let mut plan = Plan::new(segments, reads, headers, sections, control);
    for group in std::mem::take(&mut plan.groups) {
        let result = match (&mapped_runs[plan.pages[group.page].read], control.stop()) {
            _ if plan.is_missed(&group) => Ok(()),
            (_, Some(reason)) => Err(reason),
            (None, None) => Err(MissReason::Io),
            (Some(mapped), None) => {
                let mut slices = group.slices.clone();
                slices.try_for_each(|number| get(&mut plan, mapped, &group, number))
            }
        };
        plan.complete_group(&group, result);
    }
    plan.outcomes()
}

/// Maps a run and reads its header; `None` if part of the run is not mapped.
fn begin(
    segments: &Segments,
    read: &RunRead<'_>,
    control: &Control,
) -> Result<Option<(RunLayout, Block, MappedRun)>, MissReason> {
    if let Some(reason) = segments.is_inherited().then_some(MissReason::Io).or(control.stop()) {
        return Err(reason);
    }
    let first = u64::from(read.first);
    let pages = first..first + read.keys.len() as u64;
    let layout = RunLayout::new(read.place, read.page_bytes, pages.clone(), segments);
    let layout = layout.ok_or(MissReason::Place)?;
    let mapped = MappedRun::new(segments, read.place, 0..layout.pages(pages).end);
    let Some(mapped) = mapped.map_err(|failure| failed(&failure))? else { return Ok(None) };
    let mut block = Block::new(layout.header as usize);
    copy_out(&mapped, 0, layout.header as usize, &mut block)?;
    Ok(Some((layout, block, mapped)))
}

/// Copies slice `number` of a group to the target, and verifies the copy.
fn get(
    plan: &mut Plan<'_>,
    mapped: &MappedRun,
    group: &SliceGroup,
    number: u16,
) -> Result<(), MissReason> {
    let stored = plan.stored_at(group, number);
    let page = &plan.pages[group.page];
    let (start, length) = (page.start + stored.start, (stored.end - stored.start) as usize);
    if !plan.is_plain(group.page, number) {
        let mut block = Block::new(length);
        copy_out(mapped, start, length, &mut block)?;
        // SAFETY: the target is exclusive, and the block is other memory.
        return unsafe { plan.deliver(group.page, number, &block.bytes()[..length]) };
    }
    let to = page.part(number).start as usize;
    let (mut sum, mut at) = (page.checksum(number), 0);
    while at < length {
        let piece = PIECE.min(length - at);
        let (from, mut into) = (start + at as u64, to + at);
        let copied = mapped.for_each(from..from + piece as u64, |bytes, length| {
            // SAFETY: the target is exclusive (`PageTarget`) and does not overlap the map;
            // `for_each` faulted the mapped bytes in, and no reference to them exists.
            unsafe { page.memory.write_from(into, bytes, length) };
            into += length;
        });
        copied.map_err(|failure| failed(&failure))?;
        // SAFETY: the target is exclusive, and these bytes of it were copied above.
        unsafe { page.memory.for_each(to + at..to + at + piece, |bytes| sum.update(bytes)) };
        at += piece;
    }
    page.check_sum(number, sum)
}
