//! Verifies a page that was read, slice by slice, and decodes it if it is encoded.

use super::page::PageMemory;
use super::slices::{SliceSums, total};
use super::{Encoded, MissReason, PageOutcome, RunRead, Unpack};
use crate::memory_block::Block;
use crate::staging::StagingBuffer;
use ritornello_format::{RunHeader, Slice, SliceChecksum};
use std::sync::Arc;

/// A page's bytes as stored on disk, in memory of this crate.
pub(super) enum StoredBytes {
    /// A staging buffer, and the offset of the page's first byte in it.
    Staged(Arc<StagingBuffer>, usize),
    /// A copy on the heap: decoding writes to the memory that holds the page as read.
    Block(Block),
}

/// A page being verified.
pub(super) struct PageCheck<'a> {
    page: usize,
    key: &'a [u8],
    generation: u64,
    page_bytes: u64,
    slices: Vec<Slice>,
    /// Bytes verified so far, of the `end` bytes that the page takes on disk.
    at: usize,
    end: usize,
    work: Work<'a>,
}

enum Work<'a> {
    /// The page was read to its destination: only checksums are computed.
    InPlace(Box<SliceSums<'a>>),
    /// The page is encoded. `number` slices are decoded so far.
    Decode { from: StoredBytes, by: &'a dyn Unpack, number: u16 },
}

impl<'a> PageCheck<'a> {
    /// Begins with page `page` of the read. The page's bytes are in `staged`. If `staged` is `None`
    /// and the page must be decoded, `copy` is called with a length and returns a copy of that
    /// number of the page's bytes.
    ///
    /// # Errors
    /// The miss reason if the header rules the page out, or its codec is not available.
    pub(super) fn open(
        read: &RunRead<'a>,
        header: &RunHeader,
        page: usize,
        staged: Option<(Arc<StagingBuffer>, usize)>,
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
                    |(buffer, at)| StoredBytes::Staged(buffer, at),
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

    /// Whether the page's bytes are verified at their destination.
    pub(super) fn is_in_place(&self) -> bool {
        matches!(self.work, Work::InPlace(_))
    }

    /// Verifies up to `most` more bytes, or verifies and decodes one slice. Returns the outcome of the
    /// page once it is known. `scratch` holds slices that decode into several fragments.
    ///
    /// # Safety
    /// `target` is the page's memory, this call has exclusive use of it, and the bytes verified now
    /// have been read to it.
    pub(super) unsafe fn step(
        &mut self,
        target: &PageMemory,
        scratch: &mut Vec<u8>,
        most: usize,
    ) -> Option<PageOutcome> {
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
                // The checksum covers the encoded bytes, so a decoder never gets damaged input.
                let mut sum = SliceChecksum::new(self.key, self.generation, *number);
                sum.update(encoded);
                if sum.finish() != slice.checksum {
                    return Some(PageOutcome::Missed(MissReason::Checksum));
                }
                let part = Slice::part(*number, self.slices.len() as u16, self.page_bytes);
                let part = part.start as usize..part.end as usize;
                if slice.codec == Slice::RAW {
                    // SAFETY: promised by the caller; `encoded` is memory of this crate.
                    unsafe { target.scatter(part, encoded) };
                } else if let Some(to) = target.contiguous(&part) {
                    // SAFETY: inside a fragment of the target, which is initialised and exclusive.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, part.len()) };
                    if let Err(reason) = by.unpack(slice.codec, encoded, to) {
                        return Some(PageOutcome::Missed(reason));
                    }
                } else {
                    scratch.resize(part.len(), 0);
                    if let Err(reason) = by.unpack(slice.codec, encoded, scratch) {
                        return Some(PageOutcome::Missed(reason));
                    }
                    // SAFETY: promised by the caller; `scratch` is memory of this crate.
                    unsafe { target.scatter(part, scratch) };
                }
                self.at += slice.bytes as usize;
                *number += 1;
            }
        }
        if self.at < self.end {
            return None;
        }
        let Work::InPlace(sums) = &mut self.work else { return Some(PageOutcome::Verified) };
        let right = self.slices.iter().map(|slice| slice.checksum).eq(sums.done().iter().copied());
        Some(if right { PageOutcome::Verified } else { PageOutcome::Missed(MissReason::Checksum) })
    }
}

impl StoredBytes {
    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        match self {
            Self::Staged(buffer, start) => &buffer.bytes()[start + at..start + at + length],
            Self::Block(block) => &block.bytes()[at..at + length],
        }
    }
}

/// The slices that the header lists for page `page` of the read.
///
/// # Errors
/// The miss reason if key or slices do not fit the read, or a codec is not available.
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
    if slices.is_empty()
        || !fits
        || !(0..).zip(slices).all(|(at, s)| has_valid_length(header, at, s))
    {
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

/// Whether a slice has a possible length: as long as its part of the page if it is raw, else not
/// empty and not longer.
fn has_valid_length(header: &RunHeader, number: u16, slice: &Slice) -> bool {
    let part = Slice::part(number, header.slices_per_page, header.page_bytes);
    let (bytes, most) = (u64::from(slice.bytes), part.end - part.start);
    bytes > 0 && if slice.codec == Slice::RAW { bytes == most } else { bytes <= most }
}
