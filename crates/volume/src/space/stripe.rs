//! Allocates space for a page longer than 16 MiB on several volumes.

use super::pick::Pick;
use super::shape::RunShape;
use super::{RUN_EXTENTS_MAX, Space, Volume};
use ritornello_format::{Extent, PIECE_UNITS};
use std::collections::BTreeSet;

/// Maximum number of volumes over which a page is divided. A page has equally many pieces on each
/// of its volumes: over 17 volumes the longest page, 512 MiB, would have 34 pieces, more than
/// [`PIECES_MAX`].
const STRIPES_MAX: usize = 16;
/// Maximum pieces of one page. A page that needs more pieces is placed as pages of up to 16 MiB
/// are. On some numbers of volumes, pages longer than 352 MiB need more pieces: 512 MiB on three
/// volumes would have 33. In segments shorter than 16 MiB, shorter pages need more pieces too.
const PIECES_MAX: u64 = RUN_EXTENTS_MAX as u64 / 2;

impl Space {
    /// Allocates a run of one page that is longer than 16 MiB. The run consists of equal pieces of
    /// at most 16 MiB, on the volumes in the allocation order, so that several volumes read and
    /// write the page at the same time.
    ///
    /// `Ok(None)` if the page is not longer than 16 MiB or not alone in its run, if fewer than two
    /// volumes are usable, if the page needs more than [`PIECES_MAX`] pieces, or if no hole is long
    /// enough for a piece. `Err` names a volume that must grow first.
    pub(super) fn allocate_stripes(
        &mut self,
        shape: RunShape,
    ) -> Result<Option<Vec<Extent>>, usize> {
        let volumes = self.usable_volumes().min(STRIPES_MAX) as u64;
        if shape.page_units <= shape.long_page_units || volumes < 2 || shape.pages != 1 {
            return Ok(None);
        }
        let page = u64::from(shape.page_units);
        // The first piece is contiguous with the header: both must fit into a segment.
        let room = shape.segment_units.saturating_sub(shape.header_units);
        let longest = u64::from(room.min(shape.long_page_units).max(1));
        let pieces = volumes * page.div_ceil(volumes * longest);
        if pieces > PIECES_MAX {
            return Ok(None);
        }
        let piece = page.div_ceil(pieces);
        let before = self.rotation.clone();
        let mut extents = Vec::with_capacity(pieces as usize);
        let mut left = shape.units();
        while left > 0 {
            // The header is in the first extent. A remainder shorter than 256 KiB is added to the
            // last extent.
            let header = if extents.is_empty() { u64::from(shape.header_units) } else { 0 };
            let mut units = (header + piece).min(left);
            if left - units < u64::from(PIECE_UNITS) {
                units = left;
            }
            let used = extents.iter().map(|extent: &Extent| extent.segment.volume()).collect();
            match self.place_stripe(units, &used) {
                Ok(Some(extent)) => extents.push(extent),
                failed => {
                    let freed = self.free(&extents);
                    debug_assert!(freed.is_ok(), "these extents were taken above");
                    self.rotation = before;
                    return failed.map(|_| None);
                }
            }
            left -= units;
        }
        Ok(Some(extents))
    }

    /// Allocates `units` on the first volume of the allocation order that has a hole of this
    /// length. Once the page has pieces on [`STRIPES_MAX`] volumes (`used`), these volumes precede
    /// the others. If a volume without such a hole can grow and comes first, returns it as `Err`.
    fn place_stripe(&mut self, units: u64, used: &BTreeSet<u8>) -> Result<Option<Extent>, usize> {
        let mut order = self.order();
        if used.len() >= STRIPES_MAX {
            order.sort_by_key(|at| u8::try_from(*at).map_or(true, |at| !used.contains(&at)));
        }
        for at in order {
            let Some(hole) = self.volumes[at].free.best(units) else {
                if self.can_grow(at) {
                    return Err(at);
                }
                continue;
            };
            let Ok(volume) = u8::try_from(at) else { return Ok(None) };
            return Ok(Some(self.take(Pick { volume, hole, units: units as u32 })));
        }
        Ok(None)
    }

    /// Number of volumes that are not avoided, and have unsealed segments or may get some.
    #[must_use]
    pub fn usable_volumes(&self) -> usize {
        (0..self.volumes.len()).filter(|at| self.is_usable(*at)).count()
    }

    /// Whether any volume except `volume` is usable: see [`Space::usable_volumes`].
    #[must_use]
    pub fn has_usable_besides(&self, volume: u8) -> bool {
        (0..self.volumes.len()).any(|at| at != usize::from(volume) && self.is_usable(at))
    }

    fn is_usable(&self, at: usize) -> bool {
        let Volume { free, avoided, .. } = &self.volumes[at];
        !avoided && (free.open_segments() > 0 || self.can_grow(at))
    }
}

#[cfg(test)]
mod tests {
    use crate::space::{Reserve, Space, SpaceConfig, shape::LONG_PAGE_UNITS};
    use ritornello_format::Extent;

    const SEGMENT: u32 = 4 * LONG_PAGE_UNITS;

    fn space(volumes: &[u32]) -> Space {
        let volumes = volumes.to_vec();
        Space::new(SpaceConfig { segment_units: SEGMENT, volumes, reserve_percent: 0 }).unwrap()
    }

    fn allocate(space: &mut Space, page_units: u32) -> Vec<Extent> {
        loop {
            if let Some(extents) = space.allocate(2, page_units, 1, Reserve::Keep) {
                return extents;
            }
            let id = space.next_segment().unwrap();
            space.add_segment(id).unwrap();
        }
    }

    fn units_by_volume(extents: &[Extent], volumes: usize) -> Vec<u32> {
        let of = |at| extents.iter().filter(move |e| usize::from(e.segment.volume()) == at);
        (0..volumes).map(|at| of(at).map(|extent| extent.units).sum()).collect()
    }

    #[test]
    fn long_pages_use_all_volumes_equally() {
        for (page, pieces) in [(LONG_PAGE_UNITS + 4, 4), (5 * LONG_PAGE_UNITS, 8)] {
            let mut space = space(&[4; 4]);
            let extents = allocate(&mut space, page);
            assert_eq!(extents.len(), pieces);
            assert!(extents.windows(2).all(|pair| pair[0].segment != pair[1].segment));
            let shares = units_by_volume(&extents, 4);
            assert_eq!(shares.iter().sum::<u32>(), page + 2);
            assert!(shares.iter().all(|share| share.abs_diff(page / 4) <= 4), "{shares:?}");
            assert_eq!(space.segments_by_volume(), [1; 4], "each volume must grow by one segment");
        }
    }

    #[test]
    fn longest_pages_use_16_of_more_volumes() {
        let mut space = space(&[8; 20]);
        let mut all = [0; 20];
        for _ in 0..20 {
            let extents = allocate(&mut space, 19 * LONG_PAGE_UNITS);
            assert_eq!(extents.len(), 32);
            let units = units_by_volume(&extents, 20);
            assert_eq!(units.iter().filter(|units| **units > 0).count(), 16, "{units:?}");
            all.iter_mut().zip(units).for_each(|(all, units)| *all += units);
        }
        assert!(all.iter().all(|units| *units > 0), "{all:?}");
    }

    #[test]
    fn smaller_threshold_divides_shorter_pages() {
        let mut space = space(&[4; 2]);
        assert_eq!(allocate(&mut space, 256).len(), 1);
        space.set_long_page(192);
        let units: Vec<u32> = allocate(&mut space, 256).iter().map(|extent| extent.units).collect();
        assert_eq!(units, [2 + 128, 128]);
        assert_eq!(allocate(&mut space, 192).len(), 1);
    }

    #[test]
    fn slow_volumes_take_less_of_long_pages() {
        let mut space = space(&[64; 2]);
        space.measured(&[300, 100]);
        let mut shares = [0, 0];
        for _ in 0..8 {
            let extents = allocate(&mut space, 8 * LONG_PAGE_UNITS);
            let of_page = units_by_volume(&extents, 2);
            shares = [shares[0] + of_page[0], shares[1] + of_page[1]];
        }
        let ratio = f64::from(shares[0]) / f64::from(shares[1]);
        assert!((2.5..3.5).contains(&ratio), "{shares:?}");
    }

    #[test]
    fn page_is_cut_shorter_if_no_hole_holds_a_piece() {
        let mut space = space(&[1, 1]);
        while let Some(id) = space.next_segment() {
            space.add_segment(id).unwrap();
        }
        // Every hole is one unit shorter than half of a piece of the page.
        let used = |at: u32, volume| Extent {
            segment: ritornello_format::SegmentId::new(volume, 0),
            start: at * LONG_PAGE_UNITS / 2 - 1,
            units: 1,
        };
        let used: Vec<Extent> = (1..=8).flat_map(|at| [used(at, 0), used(at, 1)]).collect();
        space.mark(&used).unwrap();
        let free = space.free_units();
        let extents = allocate(&mut space, 2 * LONG_PAGE_UNITS);
        let units: u32 = extents.iter().map(|extent| extent.units).sum();
        assert_eq!(units, 2 + 2 * LONG_PAGE_UNITS);
        space.free(&extents).unwrap();
        assert_eq!(space.free_units(), free, "failed attempts to allocate must keep no units");
    }
}
