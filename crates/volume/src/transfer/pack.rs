//! Encodes pages into staging memory, to be written from staging.

use super::page::{Direct, PageMemory};
use super::{Control, MissReason};
use crate::page_memory::{Fragment, PageSource};
use crate::segments::Segments;
use crate::staging::StagingBuffer;
use ritornello_format::{Slice, UNIT, units_of};

/// Encodes slices. The store implements this trait: this crate knows no codecs.
pub trait Pack: Send + Sync {
    /// Encodes a slice into the start of `out`, which is as long as the slice. Returns the codec's
    /// number ([`Slice::RAW`] if the slice is better stored raw) and the number of bytes written;
    /// `None` if the slice cannot be encoded.
    fn pack(&self, slice: &[u8], out: &mut [u8]) -> Option<(u8, usize)>;
}

/// Decodes slices. The store implements this trait: this crate knows no codecs.
pub trait Unpack: Send + Sync {
    /// Whether the codec of number `codec` is known.
    fn knows(&self, codec: u8) -> bool;
    /// Decodes a slice whose checksum matches, and fills all of `out`.
    ///
    /// # Errors
    /// [`MissReason::Codec`] if the codec or its variant is unknown; [`MissReason::Frame`] if the
    /// codec is known and the bytes do not decode to exactly `out.len()` bytes: the bytes were
    /// damaged before they were written.
    fn unpack(&self, codec: u8, encoded: &[u8], out: &mut [u8]) -> Result<(), MissReason>;
}

/// An encoded page in staging memory.
#[derive(Debug)]
pub struct PackedPage {
    buffer: StagingBuffer,
    bytes: usize,
    slices: Vec<Slice>,
}

impl PackedPage {
    /// Length on disk in units of 4 KiB; less than the length of the raw page.
    #[must_use]
    pub const fn units(&self) -> u32 {
        units_of(self.bytes as u64) as u32
    }

    /// The slices. The slices' checksums are zero: they depend on the generation of the run.
    #[must_use]
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }
}

/// The outcome of encoding a page.
#[derive(Debug)]
pub enum Packing {
    /// The page is encoded.
    Packed(PackedPage),
    /// The page is to be written raw: its encoded form does not save a unit, a slice cannot be
    /// encoded, the source does not have the page in this length, or the page is longer than half
    /// of staging.
    NoShorter,
    /// No staging memory is free.
    NoMemory,
}

impl Segments {
    /// Encodes a page of `page_bytes` into staging memory, in `slices` parts whose lengths differ
    /// by at most one byte, unless the page is longer than half of staging. Waits for memory until
    /// `control` stops the call, at most 30 seconds; does not wait without `control`.
    #[must_use]
    pub fn pack_page(
        &self,
        source: &dyn PageSource,
        page: usize,
        page_bytes: u64,
        slices: u16,
        pack: &dyn Pack,
        control: Option<&Control>,
    ) -> Packing {
        let length = page_bytes as usize;
        // Leave half of staging to concurrent calls, and to readers of the page.
        if length > self.staging.capacity() / 2 {
            return Packing::NoShorter;
        }
        let Some(memory) = PageMemory::of_source(source, page, length, Direct::Any) else {
            return Packing::NoShorter;
        };
        let arena = &self.staging;
        let buffer = match control {
            None => arena.try_take(length),
            Some(control) => control.stage(arena, length),
        };
        let Some(mut buffer) = buffer else { return Packing::NoMemory };
        let (mut scratch, mut packed, mut at) = (Vec::new(), Vec::new(), 0);
        for number in 0..slices {
            let part = Slice::part(number, slices, page_bytes);
            let part = part.start as usize..part.end as usize;
            let slice = match memory.contiguous(&part) {
                // SAFETY: inside a fragment, which a source promises to be readable.
                Some(from) => unsafe { std::slice::from_raw_parts(from.cast_const(), part.len()) },
                None => {
                    scratch.resize(part.len(), 0);
                    // SAFETY: a source promises that its pages are readable.
                    unsafe { memory.gather(part.clone(), &mut scratch) };
                    scratch.as_slice()
                }
            };
            // The buffer is as long as the page, and each encoded slice is at most as long as its
            // part of the page, so there is always room for the next slice.
            let Some((codec, bytes)) =
                pack.pack(slice, &mut buffer.bytes_mut()[at..][..part.len()])
            else {
                return Packing::NoShorter;
            };
            packed.push(Slice { bytes: bytes as u32, codec, checksum: 0 });
            at += bytes;
        }
        if units_of(at as u64) >= units_of(page_bytes) || at == 0 {
            return Packing::NoShorter;
        }
        let padded = at.next_multiple_of(UNIT as usize);
        buffer.bytes_mut()[at..padded].fill(0);
        buffer.shrink(padded);
        Packing::Packed(PackedPage { buffer, bytes: at, slices: packed })
    }
}

/// Pages of a source, some of them replaced by their encoded form.
pub struct PackedPages<'a> {
    source: &'a dyn PageSource,
    first: usize,
    pages: Vec<Option<PackedPage>>,
}

impl<'a> PackedPages<'a> {
    /// The pages of `source` starting at `first`, one for each entry of `pages`.
    #[must_use]
    pub fn new(source: &'a dyn PageSource, first: usize, pages: Vec<Option<PackedPage>>) -> Self {
        Self { source, first, pages }
    }

    /// The encoded form of page `page`; `None` if the page is raw.
    #[must_use]
    pub fn packed(&self, page: usize) -> Option<&PackedPage> {
        self.pages.get(page)?.as_ref()
    }
}

// SAFETY: an encoded page is a staging buffer that belongs to this value, is initialised, lives as
// long, and is zero after the end of the page; the other pages belong to the source, which makes
// the same promises.
unsafe impl PageSource for PackedPages<'_> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        match self.pages.get(page) {
            Some(Some(packed)) => {
                // SAFETY: `bytes` is at most the buffer's length.
                out.push(unsafe { Fragment::new(packed.buffer.as_ptr(), packed.bytes) });
            }
            Some(None) => self.source.fragments(self.first + page, out),
            None => {}
        }
    }
    fn padded(&self, page: usize) -> bool {
        self.packed(page).is_some() || self.source.padded(self.first + page)
    }
}
