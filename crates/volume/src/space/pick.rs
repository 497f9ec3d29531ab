//! Selects the holes for a run.

use super::free::Hole;
use super::shape::RunShape;
use super::{RUN_EXTENTS_MAX, Space};
use ritornello_format::UNIT;

/// Maximum length of a run that one operation reads: 4 MiB, the upper bound of
/// [`Segments::op_bytes`](crate::segments::Segments::op_bytes).
const ONE_OP_UNITS: u64 = (4 << 20) / UNIT;

/// The first `units` of a hole, which hold a piece of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pick {
    pub(super) volume: u8,
    pub(super) hole: Hole,
    pub(super) units: u32,
}

impl Space {
    /// Selects holes for a run, in the order of its bytes:
    ///
    /// 1. on the first volume of the allocation order with room: the smallest hole that holds the
    ///    whole run or, in a full space of several volumes, two pieces of a run of several
    ///    operations;
    /// 2. pieces on one volume: of several volumes with room, the one that needs the fewest pieces;
    /// 3. pieces on several volumes.
    ///
    /// While segments can still be created, all pieces of a run are on one volume, and a run has at
    /// most one piece more than the number of segments that its length needs. If there is a
    /// [`Space::growing_volume`], no other volume is tried, so that volumes fill evenly.
    pub(super) fn pick(&self, shape: RunShape) -> Option<Vec<Pick>> {
        let count = self.volumes.len();
        let growing = (0..count).any(|at| self.can_grow(at));
        let units = shape.units();
        let candidates = match self.growing_volume(units) {
            Some(volume) => vec![volume],
            None => self.order(),
        };
        for &at in &candidates {
            if let Some(hole) = self.volumes[at].free.best(units) {
                let pick = Pick { volume: u8::try_from(at).ok()?, hole, units: units as u32 };
                return Some(vec![pick]);
            }
            // A run of several operations is read as fast in two pieces as in one, and a run on a
            // volume out of turn makes the transfers of its put slower.
            if count > 1
                && !growing
                && units > ONE_OP_UNITS
                && let Some(pieces) = self.pieces(shape, &[at], 2)
            {
                return Some(pieces);
            }
        }
        let limit = if growing {
            1 + usize::try_from(units.div_ceil(u64::from(self.segment_units))).ok()?
        } else {
            RUN_EXTENTS_MAX
        };
        let pieces = candidates.iter().filter_map(|&at| self.pieces(shape, &[at], limit));
        let fewest = pieces.min_by_key(Vec::len);
        if fewest.is_none() && !growing && count > 1 {
            return self.pieces(shape, &candidates, limit);
        }
        fewest
    }

    /// The first volume of the allocation order that has a hole of `units` or can grow; `None` if
    /// this volume cannot grow.
    pub(super) fn growing_volume(&self, units: u64) -> Option<usize> {
        let takes = |at: &usize| self.can_grow(*at) || self.volumes[*at].free.best(units).is_some();
        self.order().into_iter().find(takes).filter(|at| self.can_grow(*at))
    }

    /// Takes the largest holes of `volumes` until the remainder of the run fits the largest hole
    /// left. Puts the remainder into the smallest hole on that hole's volume that is long enough.
    /// If runs could be cut anywhere, no other choice would have fewer pieces.
    fn pieces(&self, shape: RunShape, volumes: &[usize], limit: usize) -> Option<Vec<Pick>> {
        let mut cursors: Vec<_> = volumes
            .iter()
            .map(|&at| (at, self.volumes[at].free.largest_first().peekable()))
            .collect();
        let mut picks = Vec::new();
        let mut from = 0;
        while picks.len() < limit {
            let left = shape.units() - from;
            let (at, holes) = cursors
                .iter_mut()
                .filter_map(|(at, holes)| {
                    holes.peek().map(|hole| hole.units()).map(|u| (u, at, holes))
                })
                .max_by_key(|(units, _, _)| *units)
                .map(|(_, at, holes)| (*at, holes))?;
            let largest = holes.next()?;
            if u64::from(largest.units()) >= left {
                // No hole is picked twice: in the order of `Hole`, holes picked so far on this
                // volume come after `largest`, and the best fit is `largest` or comes before it.
                let hole = self.volumes[at].free.best(left).unwrap_or(largest);
                debug_assert!(hole <= largest);
                picks.push(Pick { volume: u8::try_from(at).ok()?, hole, units: left as u32 });
                return Some(picks);
            }
            let units = shape.usable(from, u64::from(largest.units()));
            if units == 0 {
                return None;
            }
            picks.push(Pick { volume: u8::try_from(at).ok()?, hole: largest, units: units as u32 });
            from += units;
        }
        None
    }
}
