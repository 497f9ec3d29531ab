//! From mapped segments: copies, in the order in which the sections are wanted.

use super::plan::{Plan, Stretch};
use super::{Sections, disk};
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::chunk::Shape;
use crate::transfer::mapped::{Lay, PIECE, copy_out, failed};
use crate::transfer::{Control, MissReason, PageFate, RunRead};

/// See [`Segments::read_runs`].
pub(in crate::transfer) fn read(
    segments: &Segments,
    reads: &[RunRead<'_>],
    sections: &Sections,
    control: &Control,
) -> Vec<Vec<PageFate>> {
    let (mut headers, mut lays) = (Vec::with_capacity(reads.len()), Vec::new());
    for read in reads {
        let found = begin(segments, read, control);
        if matches!(found, Ok(None)) {
            // Not all of it is mapped.
            return disk::read(segments, reads, sections, control);
        }
        let (header, lay) = match found {
            Ok(Some((shape, block, lay))) => (Ok((shape, block)), Some(lay)),
            Ok(None) => (Err(MissReason::Io), None),
            Err(reason) => (Err(reason), None),
        };
        headers.push(header);
        lays.push(lay);
    }
    let mut plan = Plan::new(segments, reads, headers, sections, control);
    for stretch in std::mem::take(&mut plan.stretches) {
        let result = match (&lays[plan.pages[stretch.page].read], control.stop()) {
            _ if plan.is_lost(&stretch) => Ok(()),
            (_, Some(reason)) => Err(reason),
            (None, None) => Err(MissReason::Io),
            (Some(lay), None) => {
                let mut slices = stretch.slices.clone();
                slices.try_for_each(|number| get(&mut plan, lay, &stretch, number))
            }
        };
        plan.settle(&stretch, result);
    }
    plan.fates()
}

/// Where a run lies, and its header; `None` if not all of it is mapped.
fn begin(
    segments: &Segments,
    read: &RunRead<'_>,
    control: &Control,
) -> Result<Option<(Shape, Block, Lay)>, MissReason> {
    if let Some(reason) = segments.is_inherited().then_some(MissReason::Io).or(control.stop()) {
        return Err(reason);
    }
    let first = u64::from(read.first);
    let pages = first..first + read.keys.len() as u64;
    let shape = Shape::of(read.place, read.page_bytes, pages.clone(), segments);
    let shape = shape.ok_or(MissReason::Place)?;
    let lay = Lay::of(segments, read.place, 0..shape.pages(pages).end);
    let Some(lay) = lay.map_err(|failure| failed(&failure))? else { return Ok(None) };
    let mut block = Block::new(shape.header as usize);
    copy_out(&lay, 0, shape.header as usize, &mut block)?;
    Ok(Some((shape, block, lay)))
}

/// Copies a slice to the target, and verifies the copy.
fn get(plan: &mut Plan<'_>, lay: &Lay, stretch: &Stretch, number: u16) -> Result<(), MissReason> {
    let stored = plan.stored_at(stretch, number);
    let page = &plan.pages[stretch.page];
    let (start, length) = (page.start + stored.start, (stored.end - stored.start) as usize);
    if !plan.is_plain(stretch.page, number) {
        let mut block = Block::new(length);
        copy_out(lay, start, length, &mut block)?;
        // SAFETY: the target is ours, and the block is memory of our own.
        return unsafe { plan.deliver(stretch.page, number, &block.bytes()[..length]) };
    }
    let to = page.part(number).start as usize;
    let (mut sum, mut at) = (page.checksum(number), 0);
    while at < length {
        let piece = PIECE.min(length - at);
        let (from, mut into) = (start + at as u64, to + at);
        let copied = lay.each(from..from + piece as u64, |bytes, length| {
            // SAFETY: the target is ours (`PageTarget`), and can be nowhere in our map; the mapped
            // bytes are there, and no reference to them is made.
            unsafe { page.memory.take(into, bytes, length) };
            into += length;
        });
        copied.map_err(|failure| failed(&failure))?;
        // SAFETY: the target is ours, and these bytes of it were copied just now.
        unsafe { page.memory.each(to + at..to + at + piece, |bytes| sum.update(bytes)) };
        at += piece;
    }
    page.judge(number, sum)
}
