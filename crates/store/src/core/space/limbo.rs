//! Space whose freeing record is not durable yet.

use crate::core::State;
use ritornello_format::{Extent, SegmentId};
use std::collections::HashMap;

/// Extents that become free with the next sync rounds.
///
/// Invariant: `by_segment` sums the extents added and not removed, by segment, without zeroes;
/// `units` is its sum.
#[derive(Debug, Default)]
pub(crate) struct Limbo {
    /// Not in any sync round yet.
    waiting: Vec<Extent>,
    units: u64,
    by_segment: HashMap<SegmentId, u64>,
}

impl Limbo {
    pub(crate) fn add(&mut self, extents: impl IntoIterator<Item = Extent>) {
        for extent in extents {
            self.units += u64::from(extent.units);
            *self.by_segment.entry(extent.segment).or_default() += u64::from(extent.units);
            self.waiting.push(extent);
        }
    }

    /// Takes the extents that the next sync round covers. The extents count until
    /// [`Limbo::remove`].
    pub(crate) fn take(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.waiting)
    }

    /// Returns extents whose sync round failed.
    pub(crate) fn put_back(&mut self, extents: Vec<Extent>) {
        self.waiting.extend(extents);
    }

    /// Removes extents that are free now.
    pub(crate) fn remove(&mut self, extents: &[Extent]) {
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
    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    fn units_in(&self, segment: SegmentId) -> u64 {
        self.by_segment.get(&segment).copied().unwrap_or(0)
    }

    /// Whether extents wait for the next sync round.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl State {
    /// Units in limbo that will not be reused, because their segments are sealed.
    pub(crate) fn sealed_limbo_units(&self) -> u64 {
        let sealed = self.space.sealed();
        sealed.into_iter().map(|segment| self.limbo.units_in(segment)).sum()
    }

    /// Units that a put may use soon.
    pub(crate) fn reclaimable(&self) -> u64 {
        self.space.free_units() + self.limbo.units() - self.sealed_limbo_units()
    }

    /// Adds released space to the limbo, because the record that frees it may not be durable.
    pub(crate) fn add_to_limbo(&mut self, extents: Vec<Extent>) {
        self.limbo.add(extents);
    }
}
