//! The record of a run in the index `run`, in two halves.
//!
//! A probe reads the hot half, which has 32 bytes, among them the scope, the length, and the hash
//! of the last page. The hashes of a run with several pages are on the heap. The cold half has 72
//! bytes, among them the place, the recency, and the run's position in the tree of attachments. The
//! position names the parent, the first child, and the previous and the next sibling, so that
//! attaching and detaching take constant time.

use super::slots::Number;
use crate::sync::{AtomicBool, AtomicU64};
use ritornello_format::{Extent, PageHash, Place, ScopeSlot};

/// The hashes of a run. The hash of the last page is in the record itself, so that a probe in a
/// chained scope which finds all pages of the run reads the record only.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    last: PageHash,
    /// All hashes of the run; `None` if the run has one page.
    many: Option<Box<Hashes>>,
}

/// A boxed slice, boxed again, so that [`Pages`] holds a thin pointer.
#[derive(Debug)]
struct Hashes(Box<[PageHash]>);

impl Pages {
    /// Holds the hashes `pages`, at least one.
    pub(crate) fn new(pages: impl AsRef<[PageHash]> + Into<Box<[PageHash]>>) -> Self {
        let last = pages.as_ref().last().copied().unwrap_or_default();
        let many = pages.as_ref().len() > 1;
        Self { last, many: many.then(|| Box::new(Hashes(pages.into()))) }
    }

    #[inline]
    pub(super) fn as_slice(&self) -> &[PageHash] {
        match &self.many {
            None => std::slice::from_ref(&self.last),
            Some(pages) => &pages.0,
        }
    }

    pub(super) fn clear(&mut self, page: usize) {
        if let Some(hash) = self.many.as_mut().and_then(|pages| pages.0.get_mut(page)) {
            *hash = PageHash::NONE;
        }
        self.last = self.as_slice().last().copied().unwrap_or_default();
    }

    /// Bytes that the hashes take on the heap, with the allocator's overhead.
    pub(super) fn heap_bytes(&self) -> usize {
        self.many.as_ref().map_or(0, |pages| Self::heap_bytes_of(pages.0.len()))
    }

    /// Bytes on the heap that the hashes of `pages` pages take, with the allocator's overhead.
    pub(super) const fn heap_bytes_of(pages: usize) -> usize {
        if pages > 1 { 32 + pages * 16 + 16 } else { 0 }
    }
}

/// The extents of a run; nearly always one.
#[derive(Debug, Default)]
pub(super) enum Extents {
    #[default]
    None,
    One(Extent),
    /// Boxed twice, so that the pointer is thin and the enum takes no more than the 16 bytes that
    /// `One` needs.
    Many(Box<ManyExtents>),
}

#[derive(Debug)]
pub(super) struct ManyExtents(Box<[Extent]>);

impl Extents {
    pub(super) fn new(extents: &[Extent]) -> Self {
        match extents {
            [] => Self::None,
            [one] => Self::One(*one),
            many => Self::Many(Box::new(ManyExtents(many.into()))),
        }
    }

    pub(super) fn as_slice(&self) -> &[Extent] {
        match self {
            Self::None => &[],
            Self::One(extent) => std::slice::from_ref(extent),
            Self::Many(extents) => &extents.0,
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::None | Self::One(_) => 0,
            Self::Many(extents) => Self::heap_bytes_of(extents.0.len()),
        }
    }

    /// Bytes on the heap that `extents` extents take, with the allocator's overhead.
    pub(super) const fn heap_bytes_of(extents: usize) -> usize {
        if extents > 1 { 32 + extents * 12 + 16 } else { 0 }
    }
}

/// The half of a run's record that a probe reads.
#[derive(Debug, Default)]
pub(crate) struct Hot {
    /// At least `length` hashes. The hashes are undefined in a free record, and complete before the
    /// run is published.
    pub(super) pages: Pages,
    pub(crate) scope: ScopeSlot,
    /// Number of pages, including holes. Zero if the record is free, or if its run is not published
    /// yet, so that lookups find none of its pages.
    pub(super) length: u16,
    pub(crate) chained: bool,
    /// Whether the run is in the list of runs touched since the last sync.
    pub(crate) touched: AtomicBool,
}

impl Hot {
    /// The hashes of the pages of a published run; [`PageHash::NONE`] for pages that were removed
    /// individually. Empty for any other record.
    #[inline]
    pub(crate) fn pages(&self) -> &[PageHash] {
        self.pages.as_slice().get(..usize::from(self.length)).unwrap_or_default()
    }

    /// The number of hashes in [`Hot::pages`] for page `page` and later pages.
    #[inline]
    pub(crate) fn pages_from(&self, page: u16) -> usize {
        usize::from(self.length.saturating_sub(page))
    }

    /// Whether page `page`, which is below `length`, has `hash`. The comparison with the last page
    /// reads no memory outside the record.
    #[inline]
    pub(crate) fn is(&self, page: usize, hash: PageHash) -> bool {
        if page + 1 == usize::from(self.length) {
            self.pages.last == hash
        } else {
            self.pages().get(page) == Some(&hash)
        }
    }
}

/// The half of a run's record that a probe does not read.
#[derive(Debug, Default)]
pub(crate) struct Cold {
    pub(super) generation: u64,
    pub(super) header_checksum: u64,
    pub(crate) recency: AtomicU64,
    pub(super) extents: Extents,
    pub(super) header_units: u32,
    pub(super) page_units: u32,
    /// Reuse count, which grows whenever the record gets a new run. The record's number and this
    /// count are the run's name.
    pub(super) reuse: u32,
    pub(crate) parent: Number,
    pub(crate) child: Number,
    /// The next sibling; in a free record, the next free record.
    pub(crate) next: Number,
    pub(super) previous: Number,
    pub(crate) parent_page: u16,
    /// Number of pages that exist. Less than [`Hot::length`] if the run has holes.
    pub(super) live: u16,
}

impl Cold {
    pub(super) fn place(&self) -> Place {
        Place {
            generation: self.generation,
            header_checksum: self.header_checksum,
            header_units: self.header_units,
            page_units: self.page_units,
            extents: self.extents.as_slice().to_vec(),
        }
    }

    /// Sets the place. Returns the bytes of heap that were freed, and the bytes allocated.
    pub(super) fn set_place(&mut self, place: &Place) -> (usize, usize) {
        let freed = self.extents.heap_bytes();
        self.generation = place.generation;
        self.header_checksum = place.header_checksum;
        self.header_units = place.header_units;
        self.page_units = place.page_units;
        self.extents = Extents::new(&place.extents);
        (freed, self.extents.heap_bytes())
    }
}

#[cfg(all(not(feature = "loom"), target_pointer_width = "64"))]
const _: () = assert!(size_of::<Hot>() == 32 && size_of::<Cold>() == 72);
