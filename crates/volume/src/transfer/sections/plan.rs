//! The slices to read for each section, and the outcome of each page.

use super::Sections;
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::chunk::RunLayout;
use crate::transfer::page::{Direct, PageMemory};
use crate::transfer::page_check::slices_of;
use crate::transfer::read_state::decode_expected_header;
use crate::transfer::{Control, Encoded, MissReason, PageOutcome, RunRead, Unpack};
use ritornello_format::{Slice, SliceChecksum, UNIT};
use std::ops::Range;

/// Consecutive slices of a page that one section needs.
#[derive(Clone, Debug)]
pub(super) struct SliceGroup {
    pub(super) page: usize,
    pub(super) section: usize,
    pub(super) slices: Range<u16>,
    /// The bytes that the slices take in the stored page.
    pub(super) stored: Range<u64>,
}

/// A page to read.
pub(super) struct Page<'a> {
    /// Number of its read.
    pub(super) read: usize,
    /// Offset of its first byte in the run.
    pub(super) start: u64,
    pub(super) memory: PageMemory,
    key: &'a [u8],
    generation: u64,
    bytes: u64,
    by: Option<&'a dyn Unpack>,
    slices: Vec<Slice>,
    /// Why the page missed; `None` if it has not missed.
    missed: Option<MissReason>,
}

/// All pages of all reads, and the groups of slices to read for them.
pub(super) struct Plan<'a> {
    sections: &'a Sections,
    pub(super) control: &'a Control,
    /// For each read, its number of pages, and their range in `pages` or why all of them miss.
    reads: Vec<(usize, Result<Range<usize>, MissReason>)>,
    pub(super) pages: Vec<Page<'a>>,
    pub(super) layouts: Vec<RunLayout>,
    /// The groups in the order of their sections.
    pub(super) groups: Vec<SliceGroup>,
    /// For each section, the number of groups that are not complete.
    pending: Vec<usize>,
    /// Sections below this number can still arrive. A page that misses limits it: a section arrives
    /// only if every page has it.
    deliverable: usize,
    /// Leading bytes of each page that arrived in an earlier call. These bytes may be in use by
    /// waiters and are not written again.
    arrived_bytes: usize,
    scratch: Vec<u8>,
}

impl<'a> Plan<'a> {
    /// Plans reads with these headers.
    pub(super) fn new(
        segments: &Segments,
        reads: &[RunRead<'a>],
        headers: Vec<Result<(RunLayout, Block), MissReason>>,
        sections: &'a Sections,
        control: &'a Control,
    ) -> Self {
        let from = sections.arrived();
        let arrived_bytes = from.checked_sub(1).map_or(0, |last| sections.ends[last] as usize);
        let mut plan = Self {
            sections,
            control,
            reads: Vec::with_capacity(reads.len()),
            pages: Vec::new(),
            layouts: Vec::with_capacity(reads.len()),
            groups: Vec::new(),
            pending: vec![0; sections.ends.len()],
            deliverable: sections.ends.len(),
            arrived_bytes,
            scratch: Vec::new(),
        };
        for (number, (read, header)) in reads.iter().zip(headers).enumerate() {
            plan.layouts.push(header.as_ref().map_or(EMPTY_LAYOUT, |(layout, _)| *layout));
            let pages = plan.add_read(segments, number, read, header);
            if pages.is_err() {
                plan.deliverable = 0;
            }
            plan.reads.push((read.keys.len(), pages));
        }
        plan.groups.sort_by_key(|group| group.section);
        plan.groups.iter().for_each(|group| plan.pending[group.section] += 1);
        plan.publish();
        plan
    }

    fn add_read(
        &mut self,
        segments: &Segments,
        number: usize,
        read: &RunRead<'a>,
        header: Result<(RunLayout, Block), MissReason>,
    ) -> Result<Range<usize>, MissReason> {
        let (layout, block) = header?;
        let header = decode_expected_header(read, block.bytes())?;
        let first = self.pages.len();
        let direct = Direct::of(segments, self.control);
        for (at, key) in read.keys.iter().enumerate() {
            let bytes = read.page_bytes as usize;
            let memory = PageMemory::of_target(read.target, read.target_first + at, bytes, direct);
            let slices = slices_of(read, &header, at);
            let missed = if memory.is_none() { Some(MissReason::Memory) } else { slices.err() };
            if missed.is_some() {
                self.deliverable = 0;
            }
            self.pages.push(Page {
                read: number,
                start: layout.pages(0..u64::from(read.first) + at as u64).end,
                memory: memory.unwrap_or_else(PageMemory::empty),
                key,
                generation: read.place.generation,
                bytes: read.page_bytes,
                by: if let Encoded::Unpack(by) = read.encoded { Some(by) } else { None },
                slices: slices.map(<[Slice]>::to_vec).unwrap_or_default(),
                missed,
            });
            self.group_slices(first + at);
        }
        Ok(first..self.pages.len())
    }

    /// Appends the groups of slices that `page` needs.
    fn group_slices(&mut self, page: usize) {
        let it = &self.pages[page];
        if it.missed.is_some() {
            return;
        }
        let mut stored = 0;
        let begun = self.groups.len();
        for (number, slice) in (0..).zip(&it.slices) {
            let part = it.part(number);
            let (from, to) = (stored, stored + u64::from(slice.bytes));
            stored = to;
            if part.end as usize <= self.arrived_bytes {
                continue;
            }
            let section = self.sections.section_of(part.start.max(self.arrived_bytes as u64));
            match self.groups[begun..].last_mut() {
                Some(last) if last.section == section => {
                    last.slices.end = number + 1;
                    last.stored.end = to;
                }
                _ => self.groups.push(SliceGroup {
                    page,
                    section,
                    slices: number..number + 1,
                    stored: from..to,
                }),
            }
        }
    }

    /// Whether the page of a group missed already, so that reading the group is useless.
    pub(super) fn is_missed(&self, group: &SliceGroup) -> bool {
        self.pages[group.page].missed.is_some()
    }

    /// Records the result of a group whose operations have all completed, and publishes the
    /// sections that have arrived.
    pub(super) fn complete_group(&mut self, group: &SliceGroup, result: Result<(), MissReason>) {
        if let Err(reason) = result {
            self.pages[group.page].missed.get_or_insert(reason);
            self.deliverable = self.deliverable.min(group.section);
        }
        self.pending[group.section] -= 1;
        self.publish();
    }

    fn publish(&self) {
        let settled = self.pending.iter().take_while(|open| **open == 0).count();
        self.sections.set_arrived(settled.min(self.deliverable));
    }

    /// Whether a slice can be read straight to the target: the slice is raw, and all its bytes are
    /// still to be delivered.
    pub(super) fn is_plain(&self, page: usize, number: u16) -> bool {
        let page = &self.pages[page];
        page.slices[usize::from(number)].codec == Slice::RAW
            && page.part(number).start >= self.arrived_bytes as u64
    }

    /// Byte range of slice `number` in the stored page.
    pub(super) fn stored_at(&self, group: &SliceGroup, number: u16) -> Range<u64> {
        let slices = &self.pages[group.page].slices;
        let before = &slices[usize::from(group.slices.start)..usize::from(number)];
        let start = group.stored.start + crate::transfer::slices::total(before);
        start..start + u64::from(slices[usize::from(number)].bytes)
    }

    /// The units of the run that hold a group.
    pub(super) fn cover(&self, group: &SliceGroup) -> Range<u64> {
        let start = self.pages[group.page].start;
        start + group.stored.start / UNIT * UNIT..start + group.stored.end.next_multiple_of(UNIT)
    }

    /// Verifies a slice that was read to the target.
    ///
    /// # Safety
    /// The slice has been read to the target, and this call has exclusive use of it.
    pub(super) unsafe fn verify(&self, page: usize, number: u16) -> Result<(), MissReason> {
        let page = &self.pages[page];
        let part = page.part(number);
        let mut sum = page.checksum(number);
        // SAFETY: promised by the caller.
        unsafe { page.memory.for_each(part.start as usize..part.end as usize, |b| sum.update(b)) };
        page.check_sum(number, sum)
    }

    /// Verifies a slice, decodes it, and copies it to the target.
    ///
    /// # Safety
    /// This call has exclusive use of the target except for bytes that arrived earlier, which it
    /// does not access; `stored` does not overlap the target.
    pub(super) unsafe fn deliver(
        &mut self,
        page: usize,
        number: u16,
        stored: &[u8],
    ) -> Result<(), MissReason> {
        let (page, scratch) = (&self.pages[page], &mut self.scratch);
        let mut sum = page.checksum(number);
        sum.update(stored);
        page.check_sum(number, sum)?;
        let part = page.part(number);
        let part = part.start as usize..part.end as usize;
        let have = self.arrived_bytes.saturating_sub(part.start);
        let slice = &page.slices[usize::from(number)];
        let plain = match page.by {
            _ if slice.codec == Slice::RAW => stored,
            None => return Err(MissReason::Codec),
            Some(by) => {
                scratch.resize(part.len(), 0);
                by.unpack(slice.codec, stored, scratch)?;
                scratch
            }
        };
        // SAFETY: promised by the caller; `scratch` is memory of this crate.
        unsafe { page.memory.scatter(part.start + have..part.end, &plain[have..]) };
        Ok(())
    }

    /// The outcome of every page, after all groups are complete.
    pub(super) fn outcomes(self) -> Vec<Vec<PageOutcome>> {
        let outcome =
            |page: &Page<'_>| page.missed.map_or(PageOutcome::Verified, PageOutcome::Missed);
        let of = |(count, pages): &(usize, Result<Range<usize>, MissReason>)| match pages {
            Ok(pages) => self.pages[pages.clone()].iter().map(outcome).collect(),
            Err(reason) => vec![PageOutcome::Missed(*reason); *count],
        };
        self.reads.iter().map(of).collect()
    }
}

impl Page<'_> {
    /// Byte range of slice `number` in the decoded page.
    pub(super) fn part(&self, number: u16) -> Range<u64> {
        Slice::part(number, self.slices.len() as u16, self.bytes)
    }

    pub(super) fn checksum(&self, number: u16) -> SliceChecksum {
        SliceChecksum::new(self.key, self.generation, number)
    }

    pub(super) fn check_sum(&self, number: u16, sum: SliceChecksum) -> Result<(), MissReason> {
        let right = sum.finish() == self.slices[usize::from(number)].checksum;
        if right { Ok(()) } else { Err(MissReason::Checksum) }
    }
}

/// The layout of a read that failed before its layout was known.
const EMPTY_LAYOUT: RunLayout = RunLayout { op: 1, header: 0, page: 1 };
