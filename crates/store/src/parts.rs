//! Puts in parts: a part is encoded while the previous part is written.

use crate::catalog::ScopeRef;
use crate::encode::Encoder;
use ritornello_format::{Slice, units_of};
use ritornello_volume::page_memory::PageSource;
use ritornello_volume::segments::Segments;
use ritornello_volume::transfer::{Control, PackedPages, Packing};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Maximum payload of the missing pages in the first part, unless one page is longer. The first
/// part is shorter than later parts, because nothing is written while it is encoded.
const FIRST_BYTES: u64 = 8 << 20;
/// Maximum payload of the missing pages in a later part, unless one page is longer. No run contains
/// pages of two parts.
const PART_BYTES: u64 = 16 << 20;
/// Maximum time of one wait of a put for staging memory. After a timeout the put waits no more.
const STAGING_WAIT_MAX: Duration = Duration::from_millis(100);

/// Consecutive pages of a put. A page stays unencoded if it is stored already, if its encoded form
/// would not be shorter by a unit, if it cannot be encoded, or if staging memory is lacking.
pub(crate) struct Part<'a> {
    pub(crate) keys: Range<usize>,
    pub(crate) pages: PackedPages<'a>,
    slices: u16,
    page_bytes: u64,
}

impl Part<'_> {
    /// Units of each page on disk.
    pub(crate) fn units(&self) -> Vec<u32> {
        let raw = units_of(self.page_bytes) as u32;
        let pages = 0..self.keys.len();
        pages.map(|page| self.pages.packed(page).map_or(raw, |packed| packed.units())).collect()
    }

    pub(crate) fn slices_per_page(&self) -> u16 {
        self.slices
    }

    /// Bytes of pages `pages` of the part after encoding, without padding.
    pub(crate) fn encoded_bytes(&self, pages: Range<usize>) -> u64 {
        let bytes =
            |slices: &[Slice]| slices.iter().map(|slice| u64::from(slice.bytes)).sum::<u64>();
        let of = |page| self.pages.packed(page).map(|packed| bytes(packed.slices()));
        pages.map(|page| of(page).unwrap_or(self.page_bytes)).sum()
    }

    /// The slices of pages `pages` of the part, page after page.
    pub(crate) fn slices(&self, pages: Range<usize>) -> Vec<Slice> {
        let raw: Vec<Slice> = (0..self.slices)
            .map(|number| {
                let part = Slice::part(number, self.slices, self.page_bytes);
                let bytes = (part.end - part.start) as u32;
                Slice { bytes, codec: Slice::RAW, checksum: 0 }
            })
            .collect();
        let of = |page| self.pages.packed(page).map_or(raw.as_slice(), |packed| packed.slices());
        pages.flat_map(|page| of(page).iter().copied()).collect()
    }
}

/// The parts of a put, encoded on demand. Ends early if the put is cancelled or its deadline has
/// passed.
pub(crate) struct Parts<'a> {
    pub(crate) segments: &'a Segments,
    pub(crate) scope: ScopeRef,
    pub(crate) encoder: &'a Encoder,
    pub(crate) source: &'a dyn PageSource,
    pub(crate) control: &'a Control,
    /// For each page, whether it is already stored.
    pub(crate) present: Vec<bool>,
    pub(crate) at: usize,
    /// Whether a wait of this put for staging memory has timed out.
    pub(crate) starved: bool,
}

impl Parts<'_> {
    /// Whether the missing pages have at most [`FIRST_BYTES`], so that the first part can hold them
    /// all.
    pub(crate) fn is_single(&self) -> bool {
        let missing = self.present.iter().filter(|present| !**present).count() as u64;
        missing.saturating_mul(self.scope.page_bytes) <= FIRST_BYTES
    }

    fn pack(&mut self, page: usize, control: Option<&Control>) -> Packing {
        let (bytes, slices) = (self.scope.page_bytes, self.encoder.slices());
        self.segments.pack_page(self.source, page, bytes, slices, self.encoder, control)
    }

    /// Waits at most [`STAGING_WAIT_MAX`] for staging memory. After a timeout, pages for which
    /// staging has no memory are written unencoded.
    fn pack_with_wait(&mut self, page: usize) -> Packing {
        if self.starved {
            return Packing::NoMemory;
        }
        let patience = Instant::now() + STAGING_WAIT_MAX;
        let deadline = self.control.deadline.map_or(patience, |deadline| deadline.min(patience));
        let control = Control { deadline: Some(deadline), ..self.control.clone() };
        let packing = self.pack(page, Some(&control));
        self.starved = matches!(packing, Packing::NoMemory);
        packing
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = Part<'a>;

    fn next(&mut self) -> Option<Part<'a>> {
        let first = self.at;
        let most = if first == 0 { FIRST_BYTES } else { PART_BYTES };
        let (mut pages, mut bytes) = (Vec::new(), 0);
        while self.at < self.present.len() && self.control.stop().is_none() {
            let packed = if self.present[self.at] {
                None
            } else if bytes > 0 && bytes + self.scope.page_bytes > most {
                break;
            } else {
                let packing = match self.pack(self.at, None) {
                    // End the part before this page: the write of the part frees staging memory.
                    Packing::NoMemory if pages.iter().any(Option::is_some) => break,
                    Packing::NoMemory => self.pack_with_wait(self.at),
                    packing => packing,
                };
                bytes += self.scope.page_bytes;
                if let Packing::Packed(page) = packing { Some(page) } else { None }
            };
            pages.push(packed);
            self.at += 1;
        }
        let pages = PackedPages::new(self.source, first, pages);
        (first < self.at).then(|| Part {
            keys: first..self.at,
            pages,
            slices: self.encoder.slices(),
            page_bytes: self.scope.page_bytes,
        })
    }
}
