//! One page that has been read: verified slice by slice, and decoded if it is encoded.

use super::page::PageMemory;
use super::slices::{SliceSums, total};
use super::{Encoded, MissReason, PageFate, RunRead, Unpack};
use crate::memory_block::Block;
use crate::staging::Piece;
use ritornello_format::{RunHeader, Slice, SliceChecksum};
use std::sync::Arc;

/// A page's bytes as they lie on disk, in memory of our own.
pub(super) enum StoredBytes {
    /// From this byte of a piece of staging memory on.
    Staged(Arc<Piece>, usize),
    /// Out of the way of what it decodes to.
    Block(Block),
}

/// A page being verified.
pub(super) struct PageCheck<'a> {
    page: usize,
    key: &'a [u8],
    generation: u64,
    page_bytes: u64,
    slices: Vec<Slice>,
    /// Bytes that are done, and bytes in all, as they lie on disk.
    at: usize,
    end: usize,
    work: Work<'a>,
}

enum Work<'a> {
    /// The bytes are where they are to be.
    InPlace(Box<SliceSums<'a>>),
    /// They are to be decoded. Counts the slices that are.
    Decode { from: StoredBytes, by: &'a dyn Unpack, number: u16 },
}

impl<'a> PageCheck<'a> {
    /// Of page `page` of the read, which landed in staging memory; or in the target's, or lies where
    /// it can be had from: `copy` copies that many bytes of it, if it has to be decoded.
    ///
    /// # Errors
    /// Why the page cannot be right whatever its bytes, or cannot be decoded here.
    pub(super) fn open(
        read: &RunRead<'a>,
        header: &RunHeader,
        page: usize,
        staged: Option<(Arc<Piece>, usize)>,
        copy: impl FnOnce(usize) -> Block,
    ) -> Result<Self, MissReason> {
        let key = read.keys[page];
        let slices = slices_of(read, header, page)?;
        let bytes = total(slices);
        let is_raw = slices.iter().all(|slice| slice.codec == Slice::RAW);
        let generation = read.place.generation;
        let work = match (read.encoded, staged) {
            (Encoded::AsStored, _) => {
                Work::InPlace(Box::new(SliceSums::new(key, generation, slices)))
            }
            (_, None) if is_raw => Work::InPlace(Box::new(SliceSums::new(key, generation, slices))),
            (Encoded::Unpack(by), staged) => {
                let from = staged.map_or_else(
                    || StoredBytes::Block(copy(bytes as usize)),
                    |(piece, at)| StoredBytes::Staged(piece, at),
                );
                Work::Decode { from, by, number: 0 }
            }
            (Encoded::Refuse, _) => return Err(MissReason::Codec),
        };
        Ok(Self {
            page,
            key,
            generation,
            page_bytes: read.page_bytes,
            slices: slices.to_vec(),
            at: 0,
            end: bytes as usize,
            work,
        })
    }

    /// The page, counted in the read.
    pub(super) fn page(&self) -> usize {
        self.page
    }

    /// Whether the page's bytes are verified where they are to be.
    pub(super) fn is_in_place(&self) -> bool {
        matches!(self.work, Work::InPlace(_))
    }

    /// Verifies up to `most` bytes more, or decodes a slice. The fate of the page, when it is known.
    /// `scratch` is for slices that decode into several fragments.
    ///
    /// # Safety
    /// `target`, whose memory is the page's, is ours, and what is verified now has landed there.
    pub(super) unsafe fn step(
        &mut self,
        target: &PageMemory,
        scratch: &mut Vec<u8>,
        most: usize,
    ) -> Option<PageFate> {
        match &mut self.work {
            Work::InPlace(sums) => {
                let next = (self.at + most).min(self.end);
                // SAFETY: promised by the caller.
                unsafe { target.digest(self.at..next, sums) };
                self.at = next;
            }
            Work::Decode { from, by, number } => {
                let slice = self.slices[usize::from(*number)];
                let encoded = from.bytes(self.at, slice.bytes as usize);
                let mut sum = SliceChecksum::new(self.key, self.generation, *number);
                sum.update(encoded);
                if sum.finish() != slice.checksum {
                    return Some(PageFate::Missed(MissReason::Checksum));
                }
                let part = Slice::part(*number, self.slices.len() as u16, self.page_bytes);
                let part = part.start as usize..part.end as usize;
                if slice.codec == Slice::RAW {
                    // SAFETY: promised by the caller; the copy is our own memory.
                    unsafe { target.scatter(part, encoded) };
                } else if let Some(to) = target.contiguous(&part) {
                    // SAFETY: inside a fragment of the target, which is ours and initialised.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, part.len()) };
                    if let Err(reason) = by.unpack(slice.codec, encoded, to) {
                        return Some(PageFate::Missed(reason));
                    }
                } else {
                    scratch.resize(part.len(), 0);
                    if let Err(reason) = by.unpack(slice.codec, encoded, scratch) {
                        return Some(PageFate::Missed(reason));
                    }
                    // SAFETY: promised by the caller; `scratch` is our own memory.
                    unsafe { target.scatter(part, scratch) };
                }
                self.at += slice.bytes as usize;
                *number += 1;
            }
        }
        if self.at < self.end {
            return None;
        }
        let Work::InPlace(sums) = &mut self.work else { return Some(PageFate::Verified) };
        let right = self.slices.iter().map(|slice| slice.checksum).eq(sums.done().iter().copied());
        Some(if right { PageFate::Verified } else { PageFate::Missed(MissReason::Checksum) })
    }
}

impl StoredBytes {
    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        match self {
            Self::Staged(piece, start) => &piece.bytes()[start + at..start + at + length],
            Self::Block(block) => &block.bytes()[at..at + length],
        }
    }
}

/// The slices of page `page` of the read.
///
/// # Errors
/// Why the page cannot be right whatever its bytes, or cannot be decoded here.
pub(super) fn slices_of<'h>(
    read: &RunRead<'_>,
    header: &'h RunHeader,
    page: usize,
) -> Result<&'h [Slice], MissReason> {
    let in_run = read.first as usize + page;
    if header.keys.get(in_run).is_none_or(|named| named != read.keys[page]) {
        return Err(MissReason::Key);
    }
    let slices = header.slices_of(in_run);
    let bytes = total(slices);
    let fits = bytes <= read.page_bytes && bytes <= place_bytes(read);
    if slices.is_empty() || !fits || !(0..).zip(slices).all(|(at, s)| is_sound(header, at, s)) {
        return Err(MissReason::Header);
    }
    let known = |slice: &Slice| match read.encoded {
        Encoded::Unpack(by) => slice.codec == Slice::RAW || by.knows(slice.codec),
        Encoded::Refuse => slice.codec == Slice::RAW,
        Encoded::AsStored => true,
    };
    if slices.iter().all(known) { Ok(slices) } else { Err(MissReason::Codec) }
}

fn place_bytes(read: &RunRead<'_>) -> u64 {
    u64::from(read.place.page_units) * ritornello_format::UNIT
}

/// Whether a slice is not empty, nor longer or, stored as it came, shorter than its part of the page.
fn is_sound(header: &RunHeader, number: u16, slice: &Slice) -> bool {
    let part = Slice::part(number, header.slices_per_page, header.page_bytes);
    let (bytes, most) = (u64::from(slice.bytes), part.end - part.start);
    bytes > 0 && if slice.codec == Slice::RAW { bytes == most } else { bytes <= most }
}
