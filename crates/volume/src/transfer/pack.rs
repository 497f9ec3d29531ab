//! Pages encoded into staging memory, to be written from there.

use super::page::{Direct, PageMemory};
use super::{Control, MissReason};
use crate::memory::{Fragment, PageSource};
use crate::segments::Segments;
use crate::staging::Piece;
use ritornello_format::{Slice, UNIT, units_of};

/// Encodes slices; what the store brings along, since this crate knows no codecs.
pub trait Pack: Send + Sync {
    /// Encodes a slice into the beginning of `out`, which is as long. Returns the codec's number
    /// ([`Slice::RAW`] if the slice is better stored as it came) and the bytes written; `None` if
    /// it cannot be encoded.
    fn pack(&self, slice: &[u8], out: &mut [u8]) -> Option<(u8, usize)>;
}

/// Decodes slices; what the store brings along, since this crate knows no codecs.
pub trait Unpack: Send + Sync {
    /// Whether it knows the codec of that number.
    fn knows(&self, codec: u8) -> bool;
    /// Decodes a slice whose checksum is right and fills `out` with it, to the last byte.
    ///
    /// # Errors
    /// [`MissReason::Codec`] if the bytes are of a kind that is not known, [`MissReason::Frame`] if
    /// they are of one that is and do not decode to just that: they were wrong when written.
    fn unpack(&self, codec: u8, encoded: &[u8], out: &mut [u8]) -> Result<(), MissReason>;
}

/// A page as it will lie on disk, in staging memory.
#[derive(Debug)]
pub struct PackedPage {
    piece: Piece,
    bytes: usize,
    slices: Vec<Slice>,
}

impl PackedPage {
    /// Units that it takes on disk: fewer than the page as it came.
    #[must_use]
    pub const fn units(&self) -> u32 {
        units_of(self.bytes as u64) as u32
    }

    /// Its slices. Their checksums are not known before the run has a generation.
    #[must_use]
    pub fn slices(&self) -> &[Slice] {
        &self.slices
    }
}

/// What became of a page that was to be encoded.
#[derive(Debug)]
pub enum Packing {
    /// It is encoded.
    Packed(PackedPage),
    /// It is no shorter encoded, or there is no such page: write it as it came.
    NoShorter,
    /// There was no staging memory.
    NoMemory,
}

impl Segments {
    /// Encodes a page of `page_bytes` in `slices` equal parts into staging memory; waits for memory
    /// until `control` says stop, or not at all without.
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
        let Some(memory) = PageMemory::of_source(source, page, length, Direct::Any) else {
            return Packing::NoShorter;
        };
        let arena = self.arena();
        let piece = match control {
            None => arena.try_take(length),
            Some(control) => arena.take(length, control),
        };
        let Some(mut piece) = piece else { return Packing::NoMemory };
        let (mut scratch, mut packed, mut at) = (Vec::new(), Vec::new(), 0);
        for number in 0..slices {
            let part = Slice::part(number, slices, page_bytes);
            let part = part.start as usize..part.end as usize;
            let slice = match memory.contiguous(&part) {
                // SAFETY: inside a fragment, which a source promises to be readable.
                Some(from) => unsafe { std::slice::from_raw_parts(from.cast_const(), part.len()) },
                None => {
                    scratch.resize(part.len(), 0);
                    // SAFETY: as above.
                    unsafe { memory.gather(part.clone(), &mut scratch) };
                    scratch.as_slice()
                }
            };
            // What is written so far is no longer than what was read.
            let Some((codec, bytes)) = pack.pack(slice, &mut piece.bytes_mut()[at..][..part.len()])
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
        piece.bytes_mut()[at..padded].fill(0);
        piece.shrink(padded);
        Packing::Packed(PackedPage { piece, bytes: at, slices: packed })
    }
}

/// Some pages of a source, those that are encoded in the place of those they encode.
pub struct PackedPages<'a> {
    source: &'a dyn PageSource,
    first: usize,
    pages: Vec<Option<PackedPage>>,
}

impl<'a> PackedPages<'a> {
    /// As many pages of `source` as `pages` has entries, from `first` on.
    #[must_use]
    pub fn new(source: &'a dyn PageSource, first: usize, pages: Vec<Option<PackedPage>>) -> Self {
        Self { source, first, pages }
    }

    /// Page `page`, if it is encoded.
    #[must_use]
    pub fn packed(&self, page: usize) -> Option<&PackedPage> {
        self.pages.get(page)?.as_ref()
    }
}

// SAFETY: an encoded page is a piece of staging memory, this value's alone, initialised, living as
// long as it, and zero behind its end; the others are the source's, which promises the same.
unsafe impl PageSource for PackedPages<'_> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        match self.pages.get(page) {
            Some(Some(packed)) => {
                // SAFETY: `bytes` is at most the piece's length.
                out.push(unsafe { Fragment::new(packed.piece.as_ptr(), packed.bytes) });
            }
            Some(None) => self.source.fragments(self.first + page, out),
            None => {}
        }
    }
    fn padded(&self, page: usize) -> bool {
        self.packed(page).is_some() || self.source.padded(self.first + page)
    }
}
