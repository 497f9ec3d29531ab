//! Free extents of one volume, indexed by position and by size.

use super::SpaceError;
use ritornello_format::{Extent, SegmentId};
use std::collections::{BTreeMap, BTreeSet};

/// Exclusive limit of units per segment, so that [`Hole`] fits 64 bits.
pub(super) const SEGMENT_UNITS_LIMIT: u32 = 1 << 20;
/// Number of size classes of free extents (`SpaceStats::free_extents`): class `n` begins at 2^n
/// units.
const SIZE_CLASSES: usize = 20;

/// A free extent of one volume, packed into 64 bits: length, segment and start (20, 24 and 20
/// bits), which is also the sort order. The best fit for a length is the first hole at or above the
/// length; among holes of equal length the lowest position wins, which keeps the ends of segments
/// free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hole(u64);

impl Hole {
    fn new(number: u32, start: u32, units: u32) -> Self {
        debug_assert!(units > 0 && units < SEGMENT_UNITS_LIMIT && start < SEGMENT_UNITS_LIMIT);
        debug_assert!(number < 1 << 24);
        Self(u64::from(units) << 44 | u64::from(number) << 20 | u64::from(start))
    }

    pub(super) fn units(self) -> u32 {
        (self.0 >> 44) as u32
    }

    pub(super) fn start(self) -> u32 {
        self.0 as u32 & (SEGMENT_UNITS_LIMIT - 1)
    }

    pub(super) fn number(self) -> u32 {
        (self.0 >> 20) as u32 & 0x00ff_ffff
    }
}

/// The free extents of one volume.
///
/// Invariants: `by_size` and the maps in `segments` hold the same holes, except that holes of
/// sealed segments are only in `segments`. Holes of a segment neither overlap nor touch. `units` is
/// the sum of the lengths in `by_size`, `classes` the number of holes in `by_size` by size class,
/// and `sealed_units` the sum of the lengths of all other holes.
#[derive(Debug, Default)]
pub(super) struct FreeMap {
    /// For each segment that exists, its holes: start to length.
    segments: BTreeMap<u32, BTreeMap<u32, u32>>,
    /// Segments that take no runs until they are unsealed.
    sealed: BTreeSet<u32>,
    /// Sealed segments whose file is being removed, or is partly removed.
    removing: BTreeSet<u32>,
    sealed_units: u64,
    /// The lowest segment number that a new segment may get.
    first: u32,
    by_size: BTreeSet<Hole>,
    units: u64,
    classes: [u64; SIZE_CLASSES],
}

impl FreeMap {
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    pub(super) fn holes(&self) -> u64 {
        self.by_size.len() as u64
    }

    pub(super) fn classes(&self) -> &[u64; SIZE_CLASSES] {
        &self.classes
    }

    pub(super) fn segments(&self) -> u32 {
        // The cast is exact: there are at most 2^24 segments.
        self.segments.len() as u32
    }

    pub(super) fn has_segment(&self, number: u32) -> bool {
        self.segments.contains_key(&number)
    }

    /// The numbers of the segments that exist.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.segments.keys().copied()
    }

    /// Number of segments that are not sealed.
    pub(super) fn open_segments(&self) -> u32 {
        self.segments() - self.sealed.len() as u32
    }

    /// The lowest unused number that new segments may get.
    pub(super) fn unused_number(&self) -> u32 {
        let taken = self.segments.range(self.first..).zip(self.first..);
        self.first + taken.take_while(|((number, _), at)| *number == at).count() as u32
    }

    /// Raises the lowest number that new segments may get to `first`. Never lowers it.
    pub(super) fn start_numbers_at(&mut self, first: u32) {
        self.first = self.first.max(first);
    }

    /// Free units of sealed segments.
    pub(super) fn sealed_units(&self) -> u64 {
        self.sealed_units
    }

    pub(super) fn sealed(&self) -> impl Iterator<Item = u32> + '_ {
        self.sealed.iter().copied()
    }

    pub(super) fn is_sealed(&self, number: u32) -> bool {
        self.sealed.contains(&number)
    }

    /// Marks a sealed segment as being removed: it is never unsealed.
    pub(super) fn begin_removal(&mut self, number: u32) {
        if self.is_sealed(number) {
            self.removing.insert(number);
        }
    }

    /// Number of segments that are marked by [`FreeMap::begin_removal`] and still exist.
    pub(super) fn removing(&self) -> u32 {
        self.removing.len() as u32
    }

    /// Free units of a segment.
    pub(super) fn free_in(&self, number: u32) -> u64 {
        let holes = self.segments.get(&number).into_iter().flat_map(BTreeMap::values);
        holes.map(|units| u64::from(*units)).sum()
    }

    /// Unsealed segments in descending order of free units.
    pub(super) fn emptiest_first(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> =
            self.segments.keys().copied().filter(|number| !self.is_sealed(*number)).collect();
        numbers.sort_by_key(|number| (std::cmp::Reverse(self.free_in(*number)), *number));
        numbers
    }

    /// Seals or unseals a segment. A segment that is being removed stays sealed.
    pub(super) fn set_sealed(&mut self, number: u32, sealed: bool) {
        let Some(holes) = self.segments.get(&number).cloned() else { return };
        if self.is_sealed(number) == sealed || self.removing.contains(&number) {
            return;
        }
        for (&start, &units) in &holes {
            self.remove(number, start, units);
        }
        if sealed {
            self.sealed.insert(number);
        } else {
            self.sealed.remove(&number);
        }
        for (&start, &units) in &holes {
            self.insert(number, start, units);
        }
    }

    /// Removes a segment that is sealed and empty. Returns `false` if the segment is not sealed or
    /// not empty.
    pub(super) fn remove_segment(&mut self, number: u32, units: u32) -> bool {
        if !self.is_sealed(number) || self.free_in(number) != u64::from(units) {
            return false;
        }
        self.segments.remove(&number);
        self.sealed.remove(&number);
        self.removing.remove(&number);
        self.sealed_units -= u64::from(units);
        true
    }

    /// The smallest hole of at least `units`.
    pub(super) fn best(&self, units: u64) -> Option<Hole> {
        // No hole is as long as `SEGMENT_UNITS_LIMIT`. The shift would drop bits of such a length.
        let units = Some(units).filter(|units| *units < u64::from(SEGMENT_UNITS_LIMIT))?;
        self.by_size.range(Hole(units << 44)..).next().copied()
    }

    /// Holes, the largest first.
    pub(super) fn largest_first(&self) -> impl Iterator<Item = Hole> + '_ {
        self.by_size.iter().rev().copied()
    }

    /// Adds a segment of `units` units, all of them free.
    pub(super) fn add_segment(&mut self, number: u32, units: u32) {
        debug_assert!(!self.has_segment(number));
        self.segments.insert(number, BTreeMap::new());
        self.insert(number, 0, units);
    }

    /// Marks the first `units` of `hole` as in use.
    pub(super) fn take(&mut self, hole: Hole, units: u32) {
        debug_assert!(units > 0 && units <= hole.units());
        self.remove(hole.number(), hole.start(), hole.units());
        if units < hole.units() {
            self.insert(hole.number(), hole.start() + units, hole.units() - units);
        }
    }

    /// Marks `extent`, which may be anywhere in a hole, as in use.
    pub(super) fn carve(&mut self, extent: Extent) -> Result<(), SpaceError> {
        let number = extent.segment.number();
        let holes = self.segments.get(&number).ok_or(SpaceError::OutOfRange(extent))?;
        let (&start, &units) =
            holes.range(..=extent.start).next_back().ok_or(SpaceError::InUse(extent))?;
        if start + units < extent.end() {
            return Err(SpaceError::InUse(extent));
        }
        self.remove(number, start, units);
        if start < extent.start {
            self.insert(number, start, extent.start - start);
        }
        if extent.end() < start + units {
            self.insert(number, extent.end(), start + units - extent.end());
        }
        Ok(())
    }

    /// Frees `extent` and joins it with adjacent holes. Changes nothing if part of it is free
    /// already.
    pub(super) fn release(&mut self, extent: Extent) -> Result<(), SpaceError> {
        let number = extent.segment.number();
        let holes = self.segments.get(&number).ok_or(SpaceError::OutOfRange(extent))?;
        let before = holes.range(..extent.end()).next_back().map(|(&start, &units)| (start, units));
        let (mut start, mut end) = (extent.start, extent.end());
        let mut joined = None;
        if let Some((left, units)) = before {
            if left + units > extent.start {
                return Err(SpaceError::FreeAlready(extent));
            }
            if left + units == extent.start {
                joined = before;
                start = left;
            }
        }
        if let Some(&units) = holes.get(&extent.end()) {
            end += units;
            self.remove(number, extent.end(), units);
        }
        if let Some((left, units)) = joined {
            self.remove(number, left, units);
        }
        self.insert(number, start, end - start);
        Ok(())
    }

    fn insert(&mut self, number: u32, start: u32, units: u32) {
        if let Some(holes) = self.segments.get_mut(&number) {
            let old = holes.insert(start, units);
            debug_assert!(old.is_none());
        }
        if self.is_sealed(number) {
            self.sealed_units += u64::from(units);
            return;
        }
        let fresh = self.by_size.insert(Hole::new(number, start, units));
        debug_assert!(fresh);
        self.units += u64::from(units);
        self.classes[class_of(units)] += 1;
    }

    fn remove(&mut self, number: u32, start: u32, units: u32) {
        if let Some(holes) = self.segments.get_mut(&number) {
            let old = holes.remove(&start);
            debug_assert_eq!(old, Some(units));
        }
        if self.is_sealed(number) {
            self.sealed_units -= u64::from(units);
            return;
        }
        let removed = self.by_size.remove(&Hole::new(number, start, units));
        debug_assert!(removed);
        self.units -= u64::from(units);
        self.classes[class_of(units)] -= 1;
    }

    /// Every hole, by segment and start.
    pub(super) fn holes_of_volume(&self, volume: u8) -> impl Iterator<Item = Extent> + '_ {
        self.segments.iter().flat_map(move |(&number, holes)| {
            let segment = SegmentId::new(volume, number);
            holes.iter().map(move |(&start, &units)| Extent { segment, start, units })
        })
    }

    /// Every hole of one segment, by start.
    pub(super) fn holes_of_segment(&self, segment: SegmentId) -> impl Iterator<Item = Extent> + '_ {
        let holes = self.segments.get(&segment.number()).into_iter().flatten();
        holes.map(move |(&start, &units)| Extent { segment, start, units })
    }
}

/// The size class of `units`: the exponent of the largest power of two that is not above it.
fn class_of(units: u32) -> usize {
    (units.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_hole_is_never_shorter_than_asked() {
        let mut free = FreeMap::default();
        free.add_segment(1, 16);
        free.add_segment(2, SEGMENT_UNITS_LIMIT - 1);
        let limit = u64::from(SEGMENT_UNITS_LIMIT);
        for units in [1, 16, 17, limit - 1, limit, limit + 1, u64::from(u32::MAX), u64::MAX] {
            let best = free.best(units).map(|hole| u64::from(hole.units()));
            let expected = [16, limit - 1].into_iter().find(|&held| held >= units);
            assert_eq!(best, expected, "{units}");
        }
    }
}
