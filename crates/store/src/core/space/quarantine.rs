//! Space whose bytes failed verification, or could not be written.

use ritornello_format::{Extent, SegmentId};
use std::collections::VecDeque;

/// Quarantined extents, oldest first.
///
/// Invariant: `units` is the length of all extents.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    extents: VecDeque<Extent>,
    units: u64,
}

impl Quarantine {
    /// Adds extents. Then removes and returns the oldest extents until at most `most` units are
    /// left.
    pub(super) fn add(&mut self, extents: Vec<Extent>, most: u64) -> Vec<Extent> {
        self.units += units(&extents);
        self.extents.extend(extents);
        let mut released = Vec::new();
        while self.units > most {
            let Some(oldest) = self.extents.pop_front() else { break };
            self.units -= u64::from(oldest.units);
            released.push(oldest);
        }
        released
    }

    /// Removes the extents of the segments that `which` selects. Returns them.
    pub(super) fn release(&mut self, which: impl Fn(SegmentId) -> bool) -> Vec<Extent> {
        let (gone, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.extents).into_iter().partition(|e| which(e.segment));
        self.extents = kept.into();
        self.units -= units(&gone);
        gone
    }

    /// Removes from quarantine the quarantined extents among `extents`. Returns them.
    pub(super) fn take(&mut self, extents: &[Extent]) -> Vec<Extent> {
        let (gone, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.extents).into_iter().partition(|e| extents.contains(e));
        self.extents = kept.into();
        self.units -= units(&gone);
        gone
    }

    /// Total units.
    pub(super) fn units(&self) -> u64 {
        self.units
    }
}

fn units(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| u64::from(extent.units)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(segment: u32, units: u32) -> Extent {
        Extent { segment: SegmentId::new(0, segment), start: 0, units }
    }

    #[test]
    fn oldest_extents_are_released_above_the_bound() {
        let mut quarantine = Quarantine::default();
        assert!(quarantine.add(vec![extent(0, 4), extent(1, 3)], 8).is_empty());
        assert_eq!(quarantine.add(vec![extent(2, 2)], 8), [extent(0, 4)]);
        assert_eq!(quarantine.release(|segment| segment.number() == 1), [extent(1, 3)]);
        assert_eq!(quarantine.units(), 2);
    }
}
