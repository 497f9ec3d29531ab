//! Cuts a run into operations.

use crate::segments::Segments;
use ritornello_format::{
    Extent, PAGE_BYTES_MAX, Place, RUN_HEADER_UNITS_MAX, SegmentId, UNIT, units_of,
};
use std::ops::Range;

/// A span of one segment that holds bytes `logical` of a run, counted from the header's first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) segment: SegmentId,
    pub(super) offset: u64,
    pub(super) logical: Range<u64>,
}

/// The byte layout of a run: header, then pages. All lengths are in bytes and, except in
/// [`RunLayout::EMPTY`], multiples of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunLayout {
    /// Length of the longest operation, without the header.
    pub(super) op: u64,
    pub(super) header: u64,
    pub(super) page: u64,
}

impl RunLayout {
    /// The layout of a run of which nothing is read or written.
    pub(super) const EMPTY: Self = Self { op: 1, header: 0, page: 1 };

    /// The layout of `place` for pages of `page_bytes`, encoded or not. `None` if the place is
    /// inconsistent, outside the segments, or does not hold pages `pages`.
    pub(super) fn new(
        place: &Place,
        page_bytes: u64,
        pages: Range<u64>,
        within: &Segments,
    ) -> Option<Self> {
        let volumes = place.extents.iter().map(|e| within.volumes_up_to(e.segment.volume()));
        Self::within(
            place,
            page_bytes,
            pages,
            volumes.max().unwrap_or(1),
            within.segment_bytes(),
            within.op_bytes(),
        )
    }

    fn within(
        place: &Place,
        page_bytes: u64,
        pages: Range<u64>,
        volumes: usize,
        segment_bytes: u64,
        op: u64,
    ) -> Option<Self> {
        let fits = |extent: &Extent| {
            extent.units > 0
                && usize::from(extent.segment.volume()) < volumes
                && extent.offset() + extent.bytes() <= segment_bytes
        };
        let valid = (1..=PAGE_BYTES_MAX).contains(&page_bytes)
            && (1..=units_of(page_bytes)).contains(&u64::from(place.page_units))
            && (1..=RUN_HEADER_UNITS_MAX).contains(&place.header_units)
            && place.extents.iter().all(fits);
        let units = pages.end.checked_mul(u64::from(place.page_units))?;
        let enough = place.units() >= units.checked_add(u64::from(place.header_units))?;
        (valid && enough).then(|| Self {
            op,
            header: u64::from(place.header_units) * UNIT,
            page: u64::from(place.page_units) * UNIT,
        })
    }

    /// The byte range of pages `pages` in the run, counted from the header's first byte.
    pub(super) fn pages(&self, pages: Range<u64>) -> Range<u64> {
        self.header + pages.start * self.page..self.header + pages.end * self.page
    }

    /// The parts of pages that `logical` covers: page number and byte range of the padded page.
    pub(super) fn parts(
        &self,
        logical: &Range<u64>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + Clone + use<> {
        let (layout, end) = (*self, logical.end);
        let mut at = logical.start.max(self.header);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let page = (at - layout.header) / layout.page;
            let from = (at - layout.header) % layout.page;
            let to = (from + end - at).min(layout.page);
            at += to - from;
            Some((page as usize, from as usize..to as usize))
        })
    }

    /// Cuts bytes `range` of the run at `place` into chunks of at most `self.op` bytes, the header
    /// not counted, and appends them to `chunks`. A chunk is inside one extent. If pages are at
    /// most `self.op` long, each chunk ends at a page border, at the end of its extent, or at the
    /// end of `range`.
    pub(super) fn cut(&self, place: &Place, range: Range<u64>, chunks: &mut Vec<Chunk>) {
        let mut base = 0;
        for extent in &place.extents {
            let (from, to) = (base.max(range.start), (base + extent.bytes()).min(range.end));
            let mut at = from;
            while at < to {
                let end = self.chunk_end(at, to);
                chunks.push(Chunk {
                    segment: extent.segment,
                    offset: extent.offset() + (at - base),
                    logical: at..end,
                });
                at = end;
            }
            base += extent.bytes();
        }
    }

    /// The end of a chunk that starts at `at`, at most `to`.
    fn chunk_end(&self, at: u64, to: u64) -> u64 {
        // The header does not count towards the limit, because it shares the operation of the first
        // page.
        let limit = at.max(self.header) + self.op;
        if limit >= to {
            return to;
        }
        let border = limit - (limit - self.header) % self.page;
        if border > at.max(self.header) {
            return border;
        }
        // Cut a page longer than an operation into parts of nearly equal length: with parts of the
        // full length the last could be very short.
        let left = (border + self.page).min(to) - at.max(self.header);
        let share = left.div_ceil(left.div_ceil(self.op)).next_multiple_of(UNIT);
        (at.max(self.header) + share).min(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: u64 = 1 << 20;

    fn place(page_units: u32, extents: &[(u32, u32)]) -> Place {
        let segment = SegmentId::new(0, 3);
        let extents =
            extents.iter().map(|&(start, units)| Extent { segment, start, units }).collect();
        Place { header_units: 1, page_units, extents, ..Place::default() }
    }

    fn cut(place: &Place, pages: Range<u64>, with_header: bool) -> Vec<Range<u64>> {
        let bytes = u64::from(place.page_units) * UNIT;
        let layout = RunLayout::within(place, bytes, pages.clone(), 1, 1 << 30, OP).unwrap();
        let range = layout.pages(pages);
        let start = if with_header { 0 } else { range.start };
        let mut chunks = Vec::new();
        layout.cut(place, start..range.end, &mut chunks);
        chunks.into_iter().map(|chunk| chunk.logical).collect()
    }

    #[test]
    fn small_pages_and_header_share_an_operation() {
        let place = place(48, &[(100, 1 + 48 * 7)]);
        let (header, page) = (UNIT, 48 * UNIT);
        assert_eq!(
            cut(&place, 0..7, true),
            [0..header + 5 * page, header + 5 * page..header + 7 * page]
        );
        assert_eq!(cut(&place, 2..4, false).first(), Some(&(header + 2 * page..header + 4 * page)));
    }

    #[test]
    fn long_pages_are_cut_into_equal_parts() {
        let place = place(2048, &[(0, 1 + 2048 * 2)]);
        let chunks = cut(&place, 0..2, true);
        assert_eq!(chunks.len(), 16);
        assert_eq!(chunks[0], 0..UNIT + OP);
        assert!(chunks[1..].iter().all(|chunk| chunk.end - chunk.start == OP));
        let place = self::place(300, &[(0, 301)]);
        let chunks = cut(&place, 0..1, false);
        assert_eq!(chunks, [UNIT..151 * UNIT, 151 * UNIT..301 * UNIT]);
    }

    #[test]
    fn chunks_cover_the_run_and_end_with_extents() {
        let place = place(100, &[(500, 40), (0, 3), (900, 258)]);
        let chunks = cut(&place, 0..3, true);
        assert_eq!(chunks.first().unwrap().start, 0);
        assert_eq!(chunks.last().unwrap().end, 301 * UNIT);
        assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
        let ends: Vec<u64> = chunks.iter().map(|chunk| chunk.end).collect();
        assert!(ends.contains(&(40 * UNIT)) && ends.contains(&(43 * UNIT)));
    }

    #[test]
    fn parts_leave_out_the_header() {
        let layout = RunLayout { op: OP, header: 10, page: 100 };
        let parts: Vec<_> = layout.parts(&(0..130)).collect();
        assert_eq!(parts, [(0, 0..100), (1, 0..20)]);
        assert_eq!(layout.parts(&(60..70)).collect::<Vec<_>>(), [(0, 50..60)]);
    }

    #[test]
    fn inconsistent_places_have_no_layout() {
        let good = place(4, &[(0, 9)]);
        let layout = |place: &Place, bytes, pages, volumes, segment| {
            RunLayout::within(place, bytes, pages, volumes, segment, OP)
        };
        assert!(layout(&good, 4 * UNIT, 0..2, 1, 9 * UNIT).is_some());
        assert!(layout(&good, 4 * UNIT, 0..3, 1, 9 * UNIT).is_none());
        assert!(layout(&good, 4 * UNIT, 0..2, 1, 8 * UNIT).is_none());
        assert!(layout(&good, 4 * UNIT, 0..2, 0, 9 * UNIT).is_none());
        assert!(layout(&good, 3 * UNIT, 0..2, 1, 9 * UNIT).is_none(), "longer than raw: refused");
        assert!(layout(&good, 5 * UNIT, 0..2, 1, 9 * UNIT).is_some(), "shorter than raw: encoded");
        assert!(layout(&good, 4 * UNIT, 0..u64::MAX, 1, 9 * UNIT).is_none());
        let headless = Place { header_units: 0, ..good };
        assert!(layout(&headless, 4 * UNIT, 0..2, 1, 9 * UNIT).is_none());
    }
}
