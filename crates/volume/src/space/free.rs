//! Free extents of one volume, by place and by size.

use super::SpaceError;
use ritornello_format::{Extent, SegmentId};
use std::collections::{BTreeMap, BTreeSet};

/// Segments are shorter than this many units, so that [`Hole`] fits into 64 bits.
pub(super) const SEGMENT_UNITS_LIMIT: u32 = 1 << 20;
/// Size classes of the histogram: powers of two of units.
const SIZE_CLASSES: usize = 20;

/// A free extent of one volume, packed so that order is by length, then segment, then start:
/// 20 bits, 24 bits, 20 bits. Best fit is the first hole at or above a length; among equals the
/// lowest place wins, which keeps the ends of segments free.
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
/// Invariants: `by_size` and the maps in `segments` hold the same holes; holes of a segment
/// neither overlap nor touch; `units` is their sum, `classes` their number by size.
#[derive(Debug, Default)]
pub(super) struct FreeMap {
    /// For each segment that exists, start → length of its holes.
    segments: BTreeMap<u32, BTreeMap<u32, u32>>,
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
        // At most 2^24 of them.
        self.segments.len() as u32
    }

    pub(super) fn has_segment(&self, number: u32) -> bool {
        self.segments.contains_key(&number)
    }

    /// The lowest number that no segment has.
    pub(super) fn unused_number(&self) -> u32 {
        let taken = self.segments.keys().zip(0..).take_while(|(number, at)| *number == at);
        taken.count() as u32
    }

    /// The smallest hole of at least `units`.
    pub(super) fn best(&self, units: u64) -> Option<Hole> {
        let least = units.min(u64::from(SEGMENT_UNITS_LIMIT)) << 44;
        self.by_size.range(Hole(least)..).next().copied()
    }

    /// Holes, the largest first.
    pub(super) fn largest_first(&self) -> impl Iterator<Item = Hole> + '_ {
        self.by_size.iter().rev().copied()
    }

    /// Adds a segment that exists and is free.
    pub(super) fn add_segment(&mut self, number: u32, units: u32) {
        debug_assert!(!self.has_segment(number));
        self.segments.insert(number, BTreeMap::new());
        self.insert(number, 0, units);
    }

    /// Takes the first `units` of `hole`.
    pub(super) fn take(&mut self, hole: Hole, units: u32) {
        debug_assert!(units > 0 && units <= hole.units());
        self.remove(hole.number(), hole.start(), hole.units());
        if units < hole.units() {
            self.insert(hole.number(), hole.start() + units, hole.units() - units);
        }
    }

    /// Takes exactly `extent`, wherever in a hole it lies.
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

    /// Gives `extent` back, grown together with the holes it touches. Changes nothing if any part
    /// of it is free already.
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
        let fresh = self.by_size.insert(Hole::new(number, start, units));
        debug_assert!(fresh);
        if let Some(holes) = self.segments.get_mut(&number) {
            let old = holes.insert(start, units);
            debug_assert!(old.is_none());
        }
        self.units += u64::from(units);
        self.classes[class_of(units)] += 1;
    }

    fn remove(&mut self, number: u32, start: u32, units: u32) {
        let there = self.by_size.remove(&Hole::new(number, start, units));
        debug_assert!(there);
        if let Some(holes) = self.segments.get_mut(&number) {
            let old = holes.remove(&start);
            debug_assert_eq!(old, Some(units));
        }
        self.units -= u64::from(units);
        self.classes[class_of(units)] -= 1;
    }

    /// Every hole, segment by segment (for tests and `fsck`).
    pub(super) fn each(&self, volume: u8) -> impl Iterator<Item = Extent> + '_ {
        self.segments.iter().flat_map(move |(&number, holes)| {
            let segment = SegmentId::new(volume, number);
            holes.iter().map(move |(&start, &units)| Extent { segment, start, units })
        })
    }
}

/// The power of two at or below `units`.
fn class_of(units: u32) -> usize {
    (units.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)
}
