//! Space that was freed by a record which is not durable yet.

use super::State;
use ritornello_format::{Extent, SegmentId};
use std::collections::HashMap;

/// Extents on their way to being free.
///
/// Invariant: `by_segment` holds what was added and has not landed, by segment, without zeroes;
/// `units` is its sum.
#[derive(Debug, Default)]
pub(super) struct Limbo {
    /// Not in any sync round yet.
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

    /// What the next sync round covers. It counts until it has landed.
    pub(super) fn take(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.waiting)
    }

    /// A sync round that took these failed.
    pub(super) fn put_back(&mut self, extents: Vec<Extent>) {
        self.waiting.extend(extents);
    }

    /// These are free.
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

    /// Units in all.
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    fn units_in(&self, segment: SegmentId) -> u64 {
        self.by_segment.get(&segment).copied().unwrap_or(0)
    }

    /// Whether extents wait for the next sync round.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl State {
    /// Units in limbo that nobody will get: their segments are to go.
    pub(super) fn leaving_units(&self) -> u64 {
        let closed = self.space.closed();
        closed.into_iter().map(|segment| self.limbo.units_in(segment)).sum()
    }

    /// Units that a put may count on soon.
    pub(super) fn reclaimable(&self) -> u64 {
        self.space.free_units() + self.limbo.units() - self.leaving_units()
    }

    /// Space that was given up joins the limbo: the record that freed it may be young.
    pub(super) fn add_to_limbo(&mut self, extents: Vec<Extent>) {
        self.limbo.add(extents);
    }
}
