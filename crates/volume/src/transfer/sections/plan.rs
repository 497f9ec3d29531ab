//! What is to be read for which section, and what becomes of it.

use super::Sections;
use crate::memory_block::Block;
use crate::segments::Segments;
use crate::transfer::check::slices_of;
use crate::transfer::chunk::Shape;
use crate::transfer::inbound::believe;
use crate::transfer::page::{Direct, PageMemory};
use crate::transfer::{Control, Encoded, MissReason, PageFate, RunRead, Unpack};
use ritornello_format::{Slice, SliceChecksum, UNIT};
use std::ops::Range;

/// Consecutive slices of a page that are needed for one section.
#[derive(Clone, Debug)]
pub(super) struct Stretch {
    pub(super) page: usize,
    pub(super) section: usize,
    pub(super) slices: Range<u16>,
    /// The bytes of the page that they take as it is stored.
    pub(super) stored: Range<u64>,
}

/// A page that is to come.
pub(super) struct Page<'a> {
    /// The number of its read.
    pub(super) read: usize,
    /// Its first byte in the run.
    pub(super) start: u64,
    pub(super) memory: PageMemory,
    key: &'a [u8],
    generation: u64,
    bytes: u64,
    by: Option<&'a dyn Unpack>,
    slices: Vec<Slice>,
    /// Why it does not come.
    lost: Option<MissReason>,
}

/// All pages of some reads, and what is still to be read of them.
pub(super) struct Plan<'a> {
    sections: &'a Sections,
    pub(super) control: &'a Control,
    /// Of each read, its pages among `pages`, or why none of them comes.
    reads: Vec<(usize, Result<Range<usize>, MissReason>)>,
    pub(super) pages: Vec<Page<'a>>,
    pub(super) shapes: Vec<Shape>,
    /// In the order in which they are wanted.
    pub(super) stretches: Vec<Stretch>,
    /// Of each section, the stretches that are not settled.
    open: Vec<usize>,
    /// Sections before this one are not lacking in any page.
    bound: usize,
    /// Bytes of a page before this one are in place already.
    floor: usize,
    scratch: Vec<u8>,
}

impl<'a> Plan<'a> {
    /// For reads whose headers are these.
    pub(super) fn new(
        segments: &Segments,
        reads: &[RunRead<'a>],
        headers: Vec<Result<(Shape, Block), MissReason>>,
        sections: &'a Sections,
        control: &'a Control,
    ) -> Self {
        let from = sections.here();
        let floor = from.checked_sub(1).map_or(0, |last| sections.ends[last] as usize);
        let mut plan = Self {
            sections,
            control,
            reads: Vec::with_capacity(reads.len()),
            pages: Vec::new(),
            shapes: Vec::with_capacity(reads.len()),
            stretches: Vec::new(),
            open: vec![0; sections.ends.len()],
            bound: sections.ends.len(),
            floor,
            scratch: Vec::new(),
        };
        for (number, (read, header)) in reads.iter().zip(headers).enumerate() {
            plan.shapes.push(header.as_ref().map_or(NO_SHAPE, |(shape, _)| *shape));
            let pages = plan.add(segments, number, read, header);
            if pages.is_err() {
                plan.bound = 0;
            }
            plan.reads.push((read.keys.len(), pages));
        }
        plan.stretches.sort_by_key(|stretch| stretch.section);
        plan.stretches.iter().for_each(|stretch| plan.open[stretch.section] += 1);
        plan.tell();
        plan
    }

    fn add(
        &mut self,
        segments: &Segments,
        number: usize,
        read: &RunRead<'a>,
        header: Result<(Shape, Block), MissReason>,
    ) -> Result<Range<usize>, MissReason> {
        let (shape, block) = header?;
        let header = believe(read, block.bytes())?;
        let first = self.pages.len();
        let direct = Direct::of(segments, self.control);
        for (at, key) in read.keys.iter().enumerate() {
            let bytes = read.page_bytes as usize;
            let memory = PageMemory::of_target(read.target, read.target_first + at, bytes, direct);
            let slices = slices_of(read, &header, at);
            let lost = if memory.is_none() { Some(MissReason::Memory) } else { slices.err() };
            if lost.is_some() {
                self.bound = 0;
            }
            self.pages.push(Page {
                read: number,
                start: shape.pages(0..u64::from(read.first) + at as u64).end,
                memory: memory.unwrap_or_else(PageMemory::nowhere),
                key,
                generation: read.place.generation,
                bytes: read.page_bytes,
                by: if let Encoded::Unpack(by) = read.encoded { Some(by) } else { None },
                slices: slices.map(<[Slice]>::to_vec).unwrap_or_default(),
                lost,
            });
            self.cut(first + at);
        }
        Ok(first..self.pages.len())
    }

    /// Cuts a page into stretches.
    fn cut(&mut self, page: usize) {
        let it = &self.pages[page];
        if it.lost.is_some() {
            return;
        }
        let mut stored = 0;
        let begun = self.stretches.len();
        for (number, slice) in (0..).zip(&it.slices) {
            let part = it.part(number);
            let (from, to) = (stored, stored + u64::from(slice.bytes));
            stored = to;
            if part.end as usize <= self.floor {
                continue;
            }
            let section = self.sections.of(part.start.max(self.floor as u64));
            match self.stretches[begun..].last_mut() {
                Some(last) if last.section == section => {
                    last.slices.end = number + 1;
                    last.stored.end = to;
                }
                _ => self.stretches.push(Stretch {
                    page,
                    section,
                    slices: number..number + 1,
                    stored: from..to,
                }),
            }
        }
    }

    /// Whether the page of a stretch is lost, so that there is no use in reading it.
    pub(super) fn is_lost(&self, stretch: &Stretch) -> bool {
        self.pages[stretch.page].lost.is_some()
    }

    /// Takes note that nothing of a stretch is being moved any more.
    pub(super) fn settle(&mut self, stretch: &Stretch, result: Result<(), MissReason>) {
        if let Err(reason) = result {
            self.pages[stretch.page].lost.get_or_insert(reason);
            self.bound = self.bound.min(stretch.section);
        }
        self.open[stretch.section] -= 1;
        self.tell();
    }

    fn tell(&self) {
        let settled = self.open.iter().take_while(|open| **open == 0).count();
        self.sections.arrive(settled.min(self.bound));
    }

    /// Whether a slice can be read to where it is to be, because it is stored as it came, and nothing
    /// of it is in place already.
    pub(super) fn is_plain(&self, page: usize, number: u16) -> bool {
        let page = &self.pages[page];
        page.slices[usize::from(number)].codec == Slice::RAW
            && page.part(number).start >= self.floor as u64
    }

    /// Where a slice begins in the page as it is stored.
    pub(super) fn stored_at(&self, stretch: &Stretch, number: u16) -> Range<u64> {
        let slices = &self.pages[stretch.page].slices;
        let before = &slices[usize::from(stretch.slices.start)..usize::from(number)];
        let start = stretch.stored.start + crate::transfer::slices::total(before);
        start..start + u64::from(slices[usize::from(number)].bytes)
    }

    /// The units of the page that hold a stretch.
    pub(super) fn cover(&self, stretch: &Stretch) -> Range<u64> {
        let start = self.pages[stretch.page].start;
        start + stretch.stored.start / UNIT * UNIT
            ..start + stretch.stored.end.next_multiple_of(UNIT)
    }

    /// Verifies a slice that was read to where it is to be.
    ///
    /// # Safety
    /// The slice has landed in the target, which is ours.
    pub(super) unsafe fn verify(&self, page: usize, number: u16) -> Result<(), MissReason> {
        let page = &self.pages[page];
        let part = page.part(number);
        let mut sum = page.checksum(number);
        // SAFETY: promised by the caller.
        unsafe { page.memory.each(part.start as usize..part.end as usize, |b| sum.update(b)) };
        page.judge(number, sum)
    }

    /// Verifies a slice, and puts it where it is to be.
    ///
    /// # Safety
    /// The target is ours, but for bytes that are in place already; `stored` lies elsewhere.
    pub(super) unsafe fn deliver(
        &mut self,
        page: usize,
        number: u16,
        stored: &[u8],
    ) -> Result<(), MissReason> {
        let (page, scratch) = (&self.pages[page], &mut self.scratch);
        let mut sum = page.checksum(number);
        sum.update(stored);
        page.judge(number, sum)?;
        let part = page.part(number);
        let part = part.start as usize..part.end as usize;
        let have = self.floor.saturating_sub(part.start);
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
        // SAFETY: promised by the caller; `scratch` is our own memory.
        unsafe { page.memory.scatter(part.start + have..part.end, &plain[have..]) };
        Ok(())
    }

    /// What became of all pages, when all stretches are settled.
    pub(super) fn fates(self) -> Vec<Vec<PageFate>> {
        let fate = |page: &Page<'_>| page.lost.map_or(PageFate::Verified, PageFate::Missed);
        let of = |(count, pages): &(usize, Result<Range<usize>, MissReason>)| match pages {
            Ok(pages) => self.pages[pages.clone()].iter().map(fate).collect(),
            Err(reason) => vec![PageFate::Missed(*reason); *count],
        };
        self.reads.iter().map(of).collect()
    }
}

impl Page<'_> {
    /// The bytes of the page that a slice holds.
    pub(super) fn part(&self, number: u16) -> Range<u64> {
        Slice::part(number, self.slices.len() as u16, self.bytes)
    }

    pub(super) fn checksum(&self, number: u16) -> SliceChecksum {
        SliceChecksum::new(self.key, self.generation, number)
    }

    pub(super) fn judge(&self, number: u16, sum: SliceChecksum) -> Result<(), MissReason> {
        let right = sum.finish() == self.slices[usize::from(number)].checksum;
        if right { Ok(()) } else { Err(MissReason::Checksum) }
    }
}

/// Of a read of which nothing is read.
const NO_SHAPE: Shape = Shape { op: 1, header: 0, page: 1 };
