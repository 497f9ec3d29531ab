//! Places of runs: extents in units of 4 KiB, and arithmetic on them.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The unit of allocation, alignment and direct I/O, in bytes.
pub const UNIT: u64 = 4096;

/// Maximum length, in units, of pages that are never split across extents.
pub const WHOLE_PAGE_UNITS: u32 = (256 * 1024 / UNIT) as u32;
/// The shortest piece of a split page, in units.
pub const PIECE_UNITS: u32 = WHOLE_PAGE_UNITS;

/// `bytes` rounded up to whole units.
#[must_use]
pub const fn units_of(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT)
}

/// A segment file: its volume in the top 8 bits, its number in that volume in the lower 24.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct SegmentId(pub u32);

impl SegmentId {
    /// Segment `number` of volume `volume`; `number < 2^24`.
    #[must_use]
    pub const fn new(volume: u8, number: u32) -> Self {
        Self((volume as u32) << 24 | (number & 0x00ff_ffff))
    }
    /// The volume's number.
    #[must_use]
    pub const fn volume(self) -> u8 {
        (self.0 >> 24) as u8
    }
    /// The file's number in the volume.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0 & 0x00ff_ffff
    }
}

/// A span of one segment, in units of 4 KiB.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Extent {
    /// The segment.
    pub segment: SegmentId,
    /// First unit of the extent in its segment.
    pub start: u32,
    /// Number of units, at least one.
    pub units: u32,
}

impl Extent {
    /// Position of the extent's first byte in the segment file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.start as u64 * UNIT
    }
    /// Length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.units as u64 * UNIT
    }
    /// The first unit after the extent.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.start + self.units
    }
    /// The part of this extent that begins `skip` units in and is `units` long.
    #[must_use]
    pub const fn part(&self, skip: u32, units: u32) -> Self {
        Self { segment: self.segment, start: self.start + skip, units }
    }
}

/// The location of one run.
///
/// The extents, concatenated, hold the run header in the first `header_units` units, then the pages
/// in order, each padded to `page_units`. So page `p` begins at logical unit `header_units + p *
/// page_units`.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Place {
    /// Identifies the run's contents. Unique in the store and never reused, not even after a
    /// restart. A run that is moved keeps its generation.
    pub generation: u64,
    /// Checksum of the encoded run header, which holds the checksums of the run's pages.
    pub header_checksum: u64,
    /// Length of the padded header, in units.
    pub header_units: u32,
    /// Length of a padded page, in units.
    pub page_units: u32,
    /// The extents, in logical order.
    pub extents: Vec<Extent>,
}

impl Place {
    /// The extents of the header.
    #[must_use]
    pub fn header(&self) -> Vec<Extent> {
        slice(&self.extents, 0, u64::from(self.header_units))
    }

    /// The extents of page `page`, in order. Empty if the place holds fewer pages.
    #[must_use]
    pub fn page(&self, page: u32) -> Vec<Extent> {
        self.pages(page, 1)
    }

    /// The extents of `count` pages starting at page `first`, in order.
    #[must_use]
    pub fn pages(&self, first: u32, count: u32) -> Vec<Extent> {
        let units = u64::from(self.page_units);
        let from = u64::from(self.header_units) + u64::from(first) * units;
        slice(&self.extents, from, u64::from(count) * units)
    }

    /// The extents of units `skip .. skip + units` of page `page`, in order. The page must have these
    /// units.
    #[must_use]
    pub fn page_part(&self, page: u32, skip: u32, units: u32) -> Vec<Extent> {
        let page = u64::from(page) * u64::from(self.page_units);
        let from = u64::from(self.header_units) + page + u64::from(skip);
        slice(&self.extents, from, u64::from(units))
    }

    /// Truncates the place after `keep` pages and returns the freed extents. If `keep` is zero, all
    /// extents are freed, including the header's.
    pub fn truncate(&mut self, keep: u32) -> Vec<Extent> {
        if keep == 0 {
            return std::mem::take(&mut self.extents);
        }
        let total = self.units();
        let head = u64::from(self.header_units) + u64::from(keep) * u64::from(self.page_units);
        let freed = slice(&self.extents, head, total.saturating_sub(head));
        self.extents = slice(&self.extents, 0, head);
        freed
    }

    /// Number of whole pages that the extents hold.
    #[must_use]
    pub fn holds(&self) -> u32 {
        let body = self.units().saturating_sub(u64::from(self.header_units));
        u32::try_from(body / u64::from(self.page_units.max(1))).unwrap_or(u32::MAX)
    }

    /// Total length in units.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.extents.iter().map(|extent| u64::from(extent.units)).sum()
    }

    /// Checks that the extents hold exactly the header and `pages` pages, and are inside segments
    /// of `segment_units` units.
    ///
    /// # Errors
    /// `Miss` if the extents are shorter or longer in total than the header and the pages, or if an
    /// extent is empty or exceeds its segment.
    pub fn check(&self, pages: u32, segment_units: u32) -> Result<()> {
        let expected = u64::from(self.header_units) + u64::from(pages) * u64::from(self.page_units);
        let inside = |e: &Extent| {
            e.units > 0 && e.start.checked_add(e.units).is_some_and(|end| end <= segment_units)
        };
        if self.units() == expected && self.extents.iter().all(inside) {
            Ok(())
        } else {
            Err(Error::miss(
                "a run's extents do not match its number of pages, or exceed their segment",
            )
            .with("generation", self.generation)
            .with("pages", pages))
        }
    }
}

/// Units `from .. from + units` of the concatenation of `extents`.
fn slice(extents: &[Extent], from: u64, units: u64) -> Vec<Extent> {
    let mut out = Vec::with_capacity(1);
    let (mut skip, mut left) = (from, units);
    for extent in extents {
        let length = u64::from(extent.units);
        if left == 0 {
            break;
        }
        if skip >= length {
            skip -= length;
            continue;
        }
        let take = left.min(length - skip);
        // The casts are exact: both numbers are at most `extent.units`.
        out.push(extent.part(skip as u32, take as u32));
        left -= take;
        skip = 0;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u32, units: u32) -> Extent {
        Extent { segment: SegmentId::new(0, 1), start, units }
    }

    fn place() -> Place {
        Place {
            generation: 1,
            header_checksum: 0,
            header_units: 1,
            page_units: 4,
            extents: vec![extent(10, 7), extent(100, 6)],
        }
    }

    #[test]
    fn pages_are_found_across_extents() {
        let place = place();
        assert_eq!(place.header(), vec![extent(10, 1)]);
        assert_eq!(place.page(0), vec![extent(11, 4)]);
        assert_eq!(place.page(1), vec![extent(15, 2), extent(100, 2)]);
        assert_eq!(place.pages(1, 2), vec![extent(15, 2), extent(100, 6)]);
        assert!(place.page(3).is_empty());
        assert_eq!(place.holds(), 3);
        assert!(place.check(3, 1000).is_ok());
        assert!(place.check(2, 1000).is_err());
        assert!(place.check(3, 105).is_err());
    }

    #[test]
    fn truncation_frees_exactly_the_removed_extents() {
        let mut kept = place();
        assert_eq!(kept.truncate(1), vec![extent(15, 2), extent(100, 6)]);
        assert_eq!(kept.extents, vec![extent(10, 5)]);
        assert!(kept.check(1, 1000).is_ok());
        assert_eq!(kept.truncate(0), vec![extent(10, 5)]);
        assert_eq!(kept.units(), 0);
    }
}
