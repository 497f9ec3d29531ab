//! The positions at which the allocator may cut a run into extents.

use ritornello_format::{PIECE_UNITS, UNIT, WHOLE_PAGE_UNITS};

/// Maximum length of a page 0 that must be contiguous with the header, unless
/// [`Space::set_long_page`](super::Space::set_long_page) set another length. In a full store, few
/// holes would hold a longer page.
pub(super) const LONG_PAGE_UNITS: u32 = ((16 << 20) / UNIT) as u32;

/// A header, followed by pages of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunShape {
    pub(super) header_units: u32,
    pub(super) page_units: u32,
    pub(super) pages: u32,
    /// Length of a segment: no hole is longer.
    pub(super) segment_units: u32,
    /// A longer page is a long page.
    pub(super) long_page_units: u32,
}

impl RunShape {
    pub(super) fn units(self) -> u64 {
        u64::from(self.header_units) + u64::from(self.page_units) * u64::from(self.pages)
    }

    /// Length of the header and the part of page 0 that is contiguous with it. The part is all of
    /// page 0, so that one operation can read the header and page 0. If page 0 is a long page, or
    /// does not fit into a segment with the header, the part is only the first 256 KiB of page 0.
    pub(super) fn first_units(self) -> u64 {
        let (header, page) = (u64::from(self.header_units), u64::from(self.page_units));
        let is_long =
            self.page_units > self.long_page_units || header + page > u64::from(self.segment_units);
        header + if is_long { page.min(u64::from(PIECE_UNITS)) } else { page }
    }

    /// Number of units of the run, starting at its unit `from`, that a hole of `room` units can
    /// hold. `from` is zero or a legal cut. The held units end at a legal cut or at the end of the
    /// run.
    ///
    /// Legal cuts are between pages, and inside a page longer than 256 KiB if every piece of that
    /// page is at least 256 KiB long; in page 0 only after [`RunShape::first_units`].
    pub(super) fn usable(self, from: u64, room: u64) -> u64 {
        let total = self.units();
        debug_assert!(from < total);
        if room >= total - from {
            return total - from;
        }
        let (header, page) = (u64::from(self.header_units), u64::from(self.page_units));
        if from + room < self.first_units() {
            return 0;
        }
        // `raw`, `start` and `cut` are offsets from the start of page 0, in units.
        let raw = from + room - header;
        let start = raw - raw % page;
        let mut cut = raw;
        if self.page_units <= WHOLE_PAGE_UNITS {
            cut = start;
        } else if cut > start {
            let piece = u64::from(PIECE_UNITS);
            // Leave at least 256 KiB of the page for the piece after the cut.
            cut = cut.min(start + page - piece.min(page));
            // The piece before the cut begins at `near`: at the last cut in this page, or at the
            // start of the page. If the piece would be shorter than 256 KiB, do not cut the page
            // here: the bytes from `near` on go into the next hole.
            let near = start.max(from.saturating_sub(header));
            if cut < near + piece {
                cut = near;
            }
        }
        let end = header + cut;
        end.saturating_sub(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(header_units: u32, page_units: u32, pages: u32) -> RunShape {
        let (segment_units, long_page_units) = (1 << 16, LONG_PAGE_UNITS);
        RunShape { header_units, page_units, pages, segment_units, long_page_units }
    }

    #[test]
    fn run_of_small_pages_is_cut_between_pages_only() {
        let run = shape(2, 48, 3);
        assert_eq!(run.usable(0, 49), 0);
        assert_eq!(run.usable(0, 50), 50);
        assert_eq!(run.usable(0, 97), 50);
        assert_eq!(run.usable(50, 95), 48);
        assert_eq!(run.usable(50, 1000), 96);
        assert_eq!(run.usable(50, 47), 0);
    }

    #[test]
    fn pieces_of_large_pages_have_at_least_256_kib() {
        let run = shape(1, 200, 2);
        assert_eq!(run.usable(0, 200), 0, "page 0 must stay with its header");
        assert_eq!(run.usable(0, 220), 201, "19 units would be too short a piece");
        assert_eq!(run.usable(0, 265), 265);
        assert_eq!(
            run.usable(0, 390),
            201 + 136,
            "64 units must be left for the piece after the cut"
        );
        assert_eq!(run.usable(265, 63), 0, "a second piece of 63 units would be too short");
        assert_eq!(run.usable(265, 100), 72);
        assert_eq!(run.usable(265, 136), 136);
    }

    #[test]
    fn long_first_page_may_be_cut_after_256_kib() {
        let page = LONG_PAGE_UNITS + 1;
        let run = shape(1, page, 1);
        assert_eq!(run.usable(0, 64), 0, "63 units after the header would be too short a piece");
        assert_eq!(run.usable(0, 65), 65);
        let room = u64::from(page) - 1;
        assert_eq!(
            run.usable(0, room),
            1 + u64::from(page) - 64,
            "64 units must be left for a piece"
        );
        let short = RunShape { page_units: LONG_PAGE_UNITS, ..run };
        assert_eq!(short.usable(0, 65), 0);
        let segment = RunShape { segment_units: LONG_PAGE_UNITS, ..short };
        assert_eq!(segment.usable(0, 65), 65, "a page as long as a segment may be cut");
    }

    #[test]
    fn pages_too_short_for_two_pieces_stay_whole() {
        let run = shape(1, 127, 2);
        assert_eq!(run.usable(0, 250), 128);
        assert_eq!(run.usable(128, 126), 0);
    }
}
