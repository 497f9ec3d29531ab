//! Space whose freeing record is not durable yet.

use ritornello_format::{Extent, SegmentId};
use std::collections::HashMap;

/// Extents that become free once a sync round has made the records that free them durable.
///
/// Invariant: `by_segment` has the units of the extents added and not removed, by segment, without
/// zeroes; `units` is the total.
#[derive(Debug, Default)]
pub(super) struct Limbo {
    /// Extents that wait for the next sync round, which makes them reusable.
    waiting: Vec<Extent>,
    units: u64,
    by_segment: HashMap<SegmentId, u64>,
}

impl Limbo {
    pub(super) fn add(&mut self, extents: impl IntoIterator<Item = Extent>) {
        for extent in extents {
            self.units += u64::from(extent.units);
            *self.by_segment.entry(extent.segment).or_default() += u64::from(extent.units);
            self.waiting.push(extent);
        }
    }

    /// Takes the extents that become free when the sync round that begins now succeeds. These
    /// extents count towards the units until [`Limbo::remove`].
    pub(super) fn take(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.waiting)
    }

    /// Puts extents back whose sync round failed: they wait for the next round.
    pub(super) fn put_back(&mut self, extents: Vec<Extent>) {
        self.waiting.extend(extents);
    }

    /// Removes extents that are free now.
    pub(super) fn remove(&mut self, extents: &[Extent]) {
        for extent in extents {
            let units = u64::from(extent.units);
            self.units -= units;
            if let Some(held) = self.by_segment.get_mut(&extent.segment) {
                *held -= units;
                if *held == 0 {
                    self.by_segment.remove(&extent.segment);
                }
            }
        }
    }

    /// Total units.
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Units of one segment.
    pub(super) fn units_in(&self, segment: SegmentId) -> u64 {
        self.by_segment.get(&segment).copied().unwrap_or(0)
    }

    /// Whether extents wait for the next sync round.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}
