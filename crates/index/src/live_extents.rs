//! The extents that a run holds.

use crate::RunView;
use ritornello_format::{Extent, PageHash, Place};

impl RunView {
    /// The extents of the run's header and live pages. An opening of a store marks these extents as
    /// in use.
    #[must_use]
    pub fn live_extents(&self) -> Vec<Extent> {
        held(&self.place, &self.pages, 0)
    }
}

/// Returns the extents of the pages from `from` that were not removed, and of the header if `from`
/// is zero. Adjacent extents are joined.
pub(crate) fn held(place: &Place, pages: &[PageHash], from: u32) -> Vec<Extent> {
    if place.extents.is_empty() {
        return Vec::new();
    }
    let mut extents = if from == 0 { place.header() } else { Vec::new() };
    let mut first = from as usize;
    while first < pages.len() {
        let live = |page: &PageHash| *page != PageHash::NONE;
        let count = pages[first..].iter().take_while(|page| live(page)).count();
        if count > 0 {
            extents.extend(place.pages(first as u32, count as u32));
        }
        first += count;
        first += pages[first..].iter().take_while(|page| !live(page)).count();
    }
    join(extents)
}

/// Joins extents that are adjacent in the list and on disk.
pub(crate) fn join(extents: Vec<Extent>) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match joined.last_mut() {
            Some(last) if last.segment == extent.segment && last.end() == extent.start => {
                last.units += extent.units;
            }
            _ => joined.push(extent),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{ScopeSlot, SegmentId};

    #[test]
    fn live_extents_leave_out_holes() {
        let extent = |start, units| Extent { segment: SegmentId(1), start, units };
        let (a, none) = (PageHash([1; 16]), PageHash::NONE);
        let mut view = RunView {
            scope: ScopeSlot(0),
            chained: false,
            parent: None,
            pages: vec![a, a, none, a],
            place: Place {
                header_units: 1,
                page_units: 2,
                extents: vec![extent(10, 4), extent(50, 5)],
                ..Place::default()
            },
            recency: 0,
            retain_until: 0,
        };
        assert_eq!(view.live_extents(), [extent(10, 4), extent(50, 1), extent(53, 2)]);
        view.pages[0] = none;
        assert_eq!(
            view.live_extents(),
            [extent(10, 1), extent(13, 1), extent(50, 1), extent(53, 2)]
        );
    }
}
