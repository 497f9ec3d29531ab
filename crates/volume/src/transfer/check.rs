//! Verifies a run's header against the header checksum in the index, and slices against the
//! checksums in the header. Decodes encoded slices.

use super::page::PageMemory;
use super::{Encoded, MissReason, RunRead, wide_crc};
use crate::memory_block::Block;
use crate::staging::StagingBuffer;
use ritornello_format::{RunHeader, Slice, SliceChecksum};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a slice that are checksummed, and then copied while they are in the processor's cache.
const BLOCK: usize = 64 << 10;

/// Computes the checksums of slices that follow one another on disk.
pub(super) struct SliceSums<'a> {
    key: &'a [u8],
    generation: u64,
    /// Number of the current slice.
    number: u16,
    /// Bytes of the current slice that are not added yet; zero after the last slice.
    left: usize,
    open: SliceChecksum,
}

impl<'a> SliceSums<'a> {
    /// Begins with slice `number`, which is `bytes` long on disk.
    pub(super) fn new(key: &'a [u8], generation: u64, number: u16, bytes: u32) -> Self {
        let open = SliceChecksum::new(key, generation, number);
        Self { key, generation, number, left: bytes as usize, open }
    }

    /// Adds the next bytes. `end_slice` receives the number and the checksum of each slice that is
    /// complete, and returns the length of the next slice; `None` after the last slice. Bytes after
    /// the last slice are padding and are ignored.
    pub(super) fn update(
        &mut self,
        mut bytes: &[u8],
        mut end_slice: impl FnMut(u16, u64) -> Option<u32>,
    ) {
        while !bytes.is_empty() && self.left > 0 {
            let (now, rest) = bytes.split_at(bytes.len().min(self.left));
            wide_crc::update(&mut self.open, now);
            self.left -= now.len();
            bytes = rest;
            if self.left == 0 {
                let ended = self.number;
                self.number += 1;
                let open = SliceChecksum::new(self.key, self.generation, self.number);
                let sum = std::mem::replace(&mut self.open, open).finish();
                self.left = end_slice(ended, sum).unwrap_or(0) as usize;
            }
        }
    }

    /// Adds the next bytes of a page, and stores the checksums of complete slices in `slices`, all
    /// slices of the page.
    pub(super) fn fill(&mut self, bytes: &[u8], slices: &mut [Slice]) {
        self.update(bytes, |number, sum| {
            slices[usize::from(number)].checksum = sum;
            slices.get(usize::from(number) + 1).map(|next| next.bytes)
        });
    }
}

/// Total length of slices on disk, in bytes.
pub(super) fn total(slices: &[Slice]) -> u64 {
    slices.iter().map(|slice| u64::from(slice.bytes)).sum()
}

/// The slices of a raw page of `page_bytes`: `count` parts, whose lengths differ by at most one
/// byte.
pub(super) fn raw(count: u16, page_bytes: u64) -> impl Iterator<Item = Slice> {
    let count = count.max(1);
    (0..count).map(move |number| {
        let part = Slice::part(number, count, page_bytes);
        Slice { bytes: (part.end - part.start) as u32, codec: Slice::RAW, checksum: 0 }
    })
}

/// Decodes the header of a run. The checksum from the index proves that this is the header that the
/// index names; the key of each page is checked later, in [`slices_of`].
///
/// # Errors
/// `Header` if the bytes are not a header, or are a header that the index does not name or whose
/// page length differs from the read's; `Scope` if the header names a different scope.
pub(super) fn decode_header(read: &RunRead<'_>, bytes: &[u8]) -> Result<RunHeader, MissReason> {
    let place = read.place;
    match RunHeader::decode(bytes) {
        Ok((header, checksum))
            if checksum == place.header_checksum
                && header.generation == place.generation
                && header.header_units == place.header_units
                && header.page_units == place.page_units
                && header.page_bytes == read.page_bytes =>
        {
            if header.scope == read.scope {
                Ok(header)
            } else {
                Err(MissReason::Scope)
            }
        }
        _ => Err(MissReason::Header),
    }
}

/// The slices that the header lists for page `page` of the read.
///
/// # Errors
/// The miss reason if the key or the slices do not fit the read, or if the read does not accept the
/// codec of a slice.
pub(super) fn slices_of<'h>(
    read: &RunRead<'_>,
    header: &'h RunHeader,
    page: usize,
) -> Result<&'h [Slice], MissReason> {
    let in_run = read.first as usize + page;
    if header.keys.get(in_run) != Some(read.keys[page]) {
        return Err(MissReason::Key);
    }
    let slices = header.slices_of(in_run);
    let place_bytes = u64::from(read.place.page_units) * ritornello_format::UNIT;
    let fits = total(slices) <= read.page_bytes.min(place_bytes);
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

/// Whether a slice has a possible length. A raw slice is as long as its part of the page. An
/// encoded slice is not empty, and not longer than that part.
pub(super) fn has_valid_length(header: &RunHeader, number: u16, slice: &Slice) -> bool {
    let part = Slice::part(number, header.slices_per_page, header.page_bytes);
    let (bytes, most) = (u64::from(slice.bytes), part.end - part.start);
    bytes > 0 && if slice.codec == Slice::RAW { bytes == most } else { bytes <= most }
}

/// Slices of one page that are read together, as the header describes them, and their target.
pub(super) struct Expected<'e, 'a> {
    pub(super) read: &'a RunRead<'a>,
    pub(super) key: &'a [u8],
    /// All slices of the page.
    pub(super) slices: &'e [Slice],
    /// The slices that are read together.
    pub(super) numbers: Range<u16>,
    /// Byte range of these slices in the page as stored on disk.
    pub(super) stored: Range<u64>,
    /// Memory of the whole page.
    pub(super) target: &'e PageMemory,
    /// Number of leading bytes of the page that an earlier read delivered to the same target
    /// ([`Sections::arrived`](super::Sections::arrived)); zero without sections. This read does not
    /// write to them, because the caller may be using them.
    pub(super) arrived_bytes: u64,
}

impl Expected<'_, '_> {
    fn is_as_stored(&self) -> bool {
        matches!(self.read.encoded, Encoded::AsStored)
    }

    /// Range of slice `number` in the decoded page.
    fn decoded(&self, number: u16) -> Range<u64> {
        Slice::part(number, self.slices.len() as u16, self.read.page_bytes)
    }

    /// Offset in the target page of the first byte of these slices.
    pub(super) fn target_start(&self) -> u64 {
        if self.is_as_stored() { self.stored.start } else { self.decoded(self.numbers.start).start }
    }

    /// Whether these slices can be read straight to their position in the target: their bytes on
    /// disk are the bytes of the target, and none of them arrived earlier.
    pub(super) fn is_in_place(&self) -> bool {
        let numbers = usize::from(self.numbers.start)..usize::from(self.numbers.end);
        self.is_as_stored()
            || self.target_start() >= self.arrived_bytes
                && self.slices[numbers].iter().all(|slice| slice.codec == Slice::RAW)
    }

    /// Verifies slice `number` in its form on disk, and copies or decodes it to the target. If the
    /// memory of the slice is in several fragments, or part of the slice arrived earlier, decodes
    /// to `scratch` first.
    ///
    /// # Safety
    /// The caller has exclusive use of the target, except the bytes that arrived earlier, and
    /// `stored` does not overlap the target.
    unsafe fn deliver(
        &self,
        number: u16,
        stored: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<(), MissReason> {
        let slice = self.slices[usize::from(number)];
        let is_raw = slice.codec == Slice::RAW;
        let mut sum = SliceChecksum::new(self.key, self.read.place.generation, number);
        let Range { start, end } = self.decoded(number);
        let have = self.arrived_bytes.saturating_sub(start).min(end - start) as usize;
        let to = start as usize..end as usize;
        let mut done = 0;
        for block in stored.chunks(BLOCK) {
            wide_crc::update(&mut sum, block);
            if is_raw {
                // Copy the block while it is in the cache. If the slice turns out to be damaged,
                // its page misses, and the target of a missed page may hold any bytes.
                let skip = have.saturating_sub(done).min(block.len());
                // SAFETY: promised by the caller.
                unsafe { self.target.stream(to.start + done + skip, &block[skip..]) };
            }
            done += block.len();
        }
        // The checksum covers the bytes on disk, so a decoder never gets bytes that changed after
        // they were written.
        if sum.finish() != slice.checksum {
            return Err(MissReason::Checksum);
        }
        match self.read.encoded {
            _ if is_raw => return Ok(()),
            Encoded::Unpack(by) => {
                if have == 0
                    && let Some(to_ptr) = self.target.contiguous(&to)
                {
                    // SAFETY: inside a fragment of the target, which is initialised and exclusive.
                    let out = unsafe { std::slice::from_raw_parts_mut(to_ptr, to.len()) };
                    return by.unpack(slice.codec, stored, out);
                }
                scratch.resize(to.len(), 0);
                by.unpack(slice.codec, stored, scratch)?;
            }
            Encoded::Refuse | Encoded::AsStored => return Err(MissReason::Codec),
        }
        // SAFETY: promised by the caller; `scratch` is memory of this crate.
        unsafe { self.target.scatter(to.start + have..to.end, &scratch[have..]) };
        Ok(())
    }
}

/// A part of a page as stored on disk, in memory of this crate.
pub(super) enum StoredBytes {
    /// A staging buffer, and the offset of the part's first byte in it.
    Staged(Arc<StagingBuffer>, usize),
    /// A copy on the heap: of bytes that were read to the target, where decoding overwrites them,
    /// or of bytes of a mapped segment.
    Block(Block),
}

impl StoredBytes {
    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        match self {
            Self::Staged(buffer, start) => buffer.part(start + at..start + at + length),
            Self::Block(block) => &block.bytes()[at..at + length],
        }
    }
}

/// The verification of one part of a page, in steps.
pub(super) struct PartCheck<'a> {
    /// Number of verified bytes of the part, as stored on disk.
    done: u64,
    work: Work<'a>,
}

enum Work<'a> {
    /// The bytes are in the target: only checksums are computed.
    InPlace(Box<SliceSums<'a>>),
    /// The part's bytes in memory of this crate, and the number of the next slice. A raw slice is
    /// copied to the target while it is verified; an encoded slice is verified before it is
    /// decoded.
    Deliver(StoredBytes, u16),
}

impl<'a> PartCheck<'a> {
    /// Begins the check of a part whose bytes are in `staged`. If `staged` is `None`, the bytes
    /// were read to the target or are in a mapped segment: they are checked in the target
    /// ([`Expected::is_in_place`]), or in a copy that `copy` returns for a given length.
    ///
    /// # Errors
    /// A failure of `copy`.
    pub(super) fn open(
        expected: &Expected<'_, 'a>,
        staged: Option<StoredBytes>,
        copy: impl FnOnce(usize) -> Result<Block, MissReason>,
    ) -> Result<Self, MissReason> {
        let first = expected.numbers.start;
        let bytes = expected.stored.end - expected.stored.start;
        let work = match staged {
            None if expected.is_in_place() => {
                let length = expected.slices[usize::from(first)].bytes;
                let generation = expected.read.place.generation;
                Work::InPlace(Box::new(SliceSums::new(expected.key, generation, first, length)))
            }
            None => Work::Deliver(StoredBytes::Block(copy(bytes as usize)?), first),
            Some(staged) => Work::Deliver(staged, first),
        };
        Ok(Self { done: 0, work })
    }

    /// Whether the part's bytes are verified in the target.
    pub(super) fn is_in_place(&self) -> bool {
        matches!(self.work, Work::InPlace(_))
    }

    /// Verifies up to `most` more bytes in place, or verifies and delivers one slice. Returns the
    /// result for the part once it is known. `scratch` is memory for decoding, reused by all steps.
    ///
    /// # Safety
    /// `expected` describes the same part in every call. The caller has exclusive use of its
    /// target, except the bytes that arrived earlier. The bytes that this step verifies have been
    /// read.
    pub(super) unsafe fn step(
        &mut self,
        expected: &Expected<'_, '_>,
        scratch: &mut Vec<u8>,
        most: usize,
    ) -> Option<Result<(), MissReason>> {
        let Expected { slices, numbers, stored, target, .. } = expected;
        let all = stored.end - stored.start;
        let next = match &mut self.work {
            Work::InPlace(sums) => {
                let from = expected.target_start() + self.done;
                self.done = (self.done + most as u64).min(all);
                let to = expected.target_start() + self.done;
                let mut right = true;
                let mut compare = |number: u16, sum: u64| {
                    right &= slices[usize::from(number)].checksum == sum;
                    let next = number + 1;
                    (next < numbers.end).then(|| slices[usize::from(next)].bytes)
                };
                // SAFETY: promised by the caller.
                unsafe {
                    target.for_each(from as usize..to as usize, |bytes| {
                        sums.update(bytes, &mut compare);
                    });
                }
                if !right {
                    return Some(Err(MissReason::Checksum));
                }
                sums.number
            }
            Work::Deliver(from, number) => {
                let length = slices[usize::from(*number)].bytes as usize;
                let bytes = from.bytes(self.done as usize, length);
                // SAFETY: promised by the caller; `bytes` is memory of this crate.
                if let Err(reason) = unsafe { expected.deliver(*number, bytes, scratch) } {
                    return Some(Err(reason));
                }
                self.done += length as u64;
                *number += 1;
                *number
            }
        };
        // At the end of the bytes every slice must have been compared. If the target is shorter
        // than the header says, the last slice was not compared, and the part fails.
        let result = if next == numbers.end { Ok(()) } else { Err(MissReason::Checksum) };
        (self.done == all).then_some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slice_checksums_do_not_depend_on_update_sizes() {
        let bytes: Vec<u8> = (0..100).collect();
        let mut slices: Vec<Slice> =
            [30, 1, 69].map(|bytes| Slice { bytes, codec: Slice::RAW, checksum: 0 }).to_vec();
        let mut expected = Vec::new();
        for (number, range) in [0..30, 30..31, 31..100].into_iter().enumerate() {
            let mut sum = SliceChecksum::new(b"key-0001", 7, number as u16);
            sum.update(&bytes[range]);
            expected.push(sum.finish());
        }
        for step in [1, 29, 30, 31, 100] {
            slices.iter_mut().for_each(|slice| slice.checksum = 0);
            let mut sums = SliceSums::new(b"key-0001", 7, 0, 30);
            bytes.chunks(step).for_each(|part| sums.fill(part, &mut slices));
            sums.fill(b"padding", &mut slices);
            let done: Vec<u64> = slices.iter().map(|slice| slice.checksum).collect();
            assert_eq!(done, expected, "{step}");
        }
    }
}
