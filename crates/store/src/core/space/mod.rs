//! The space of a store: which extents are free, and when other extents become free.
//!
//! Space freed by an eviction is not reused before the journal record that frees it is durable.
//! Otherwise a crash could revive entries whose place holds another run: the checksums would detect
//! this at a get, but a probe would already have reported a hit. Until the record is durable, the
//! space is in *limbo*. Space whose bytes failed verification, or could not be written, is
//! *quarantined*, and space to which a dead process may be writing is *withheld*.

pub(crate) mod capacity;
pub(crate) mod drain;
mod limbo;
mod placement;
mod quarantine;
mod relocate;
mod sealed;
mod volumes;
mod write_failures;

pub(crate) use placement::SpaceDeadline;

use drain::Draining;
use limbo::Limbo;
use placement::GrowthPauses;
use quarantine::Quarantine;
use ritornello_format::{Extent, SegmentId};
use ritornello_volume::space::{Reserve, Space};
use std::collections::BTreeSet;
use std::time::Instant;
use write_failures::WriteFailures;

/// All space of the store.
///
/// Invariant: an extent is free in the allocator, or named by a run or a reservation, allocated for
/// a run that is being reserved, moved or salvaged, deferred by a lease, in limbo, quarantined or
/// withheld: exactly one of these.
pub(crate) struct StoreSpace {
    allocator: Space,
    limbo: Limbo,
    quarantine: Quarantine,
    draining: Draining,
    growth: GrowthPauses,
    failures: WriteFailures,
    /// The volumes that puts avoid because they have stalled.
    stalled: BTreeSet<u8>,
    /// The volumes that puts avoid because their segments may hold runs that the index lacks.
    unsearched: BTreeSet<u8>,
}

/// Space that waits for the end of the current sync round.
pub(crate) struct RoundSpace {
    limbo: Vec<Extent>,
    withheld: Vec<Extent>,
}

impl StoreSpace {
    /// The space of a store at open: `allocator` knows the extents that are in use.
    pub(crate) fn new(allocator: Space) -> Self {
        Self {
            allocator,
            limbo: Limbo::default(),
            quarantine: Quarantine::default(),
            draining: Draining::default(),
            growth: GrowthPauses::default(),
            failures: WriteFailures::default(),
            stalled: BTreeSet::new(),
            unsearched: BTreeSet::new(),
        }
    }

    /// Allocates extents for a run: see [`Space::allocate`].
    fn allocate(
        &mut self,
        header_units: u32,
        page_units: u32,
        pages: u32,
        reserve: Reserve,
        now: Instant,
    ) -> Option<Vec<Extent>> {
        let extents = self.allocator.allocate(header_units, page_units, pages, reserve)?;
        self.note_placed(&extents, now);
        Some(extents)
    }

    /// The allocator, which knows free and used units and the segments.
    pub(crate) fn allocator(&self) -> &Space {
        &self.allocator
    }

    /// Adds measured speeds of the volumes: see [`Space::measured`].
    pub(crate) fn measured(&mut self, speeds: &[u32]) {
        self.allocator.measured(speeds);
    }

    /// Marks free extents as in use. Returns whether all of them were free; otherwise marks none.
    pub(crate) fn mark(&mut self, extents: &[Extent]) -> bool {
        self.allocator.mark(extents).is_ok()
    }

    /// Gives extents back to the allocator. The caller ensures that recovery after a crash finds no
    /// run in them. Skips an extent that is free already, at least in part, which is a bug: its
    /// other units stay in use until the next opening, rather than being allocated twice.
    pub(crate) fn free(&mut self, extents: &[Extent]) {
        for extent in extents {
            if let Err(error) = self.allocator.free(std::slice::from_ref(extent)) {
                tracing::error!(
                    %error,
                    "an extent was freed twice: a part of it may stay unused until the next opening"
                );
            }
        }
    }

    /// Adds released space to the limbo, because the record that frees it may not be durable.
    pub(crate) fn add_to_limbo(&mut self, extents: Vec<Extent>) {
        self.limbo.add(extents);
    }

    /// Withholds extents until the writes of a dead process to them have ended.
    pub(crate) fn withhold(&mut self, extents: Vec<Extent>) {
        self.draining.add(extents);
    }

    /// Quarantines space whose bytes failed verification, or could not be written. Above one
    /// sixteenth of the store, the oldest extents go into limbo.
    pub(crate) fn quarantine(&mut self, extents: Vec<Extent>) {
        let released = self.quarantine.add(extents, self.allocator.capacity_units() / 16);
        self.limbo.add(released);
    }

    /// Returns the given extents that are in present segments. Space in an absent segment is not
    /// freed: when the segment returns, its space is derived from the index.
    pub(crate) fn only_present(&self, mut extents: Vec<Extent>) -> Vec<Extent> {
        extents.retain(|extent| self.allocator.has_segment(extent.segment));
        extents
    }

    /// Adds a segment that was absent; all of it is free. Returns whether it was added.
    pub(crate) fn restore_segment(&mut self, id: SegmentId) -> bool {
        self.allocator.restore_segment(id).is_ok()
    }

    /// Records whether a volume waits for a salvage, which searches its segments for runs that the
    /// index lacks. While the volume waits (`held`), puts avoid it, and none of its segments is
    /// sealed by [`StoreSpace::share_out`].
    pub(crate) fn hold_unsearched(&mut self, volume: u8, held: bool) {
        if held {
            self.unsearched.insert(volume);
        } else {
            self.unsearched.remove(&volume);
        }
        self.update_avoided(volume);
    }

    /// The volumes whose segments a salvage has not yet searched for runs that the index lacks.
    pub(crate) fn unsearched(&self) -> &BTreeSet<u8> {
        &self.unsearched
    }

    /// Permits the creation of segments on a volume that was absent and has returned.
    pub(crate) fn resume_growth(&mut self, volume: u8) {
        self.allocator.resume_growth(volume);
    }

    /// Whether the limbo is larger than half of the reserve: a sync round should then not wait for
    /// its interval.
    pub(crate) fn is_limbo_large(&self) -> bool {
        self.limbo.units() * 2 > self.allocator.reserve_units()
    }

    /// Whether extents wait for the next sync round.
    pub(crate) fn has_limbo_waiting(&self) -> bool {
        self.limbo.has_waiting()
    }

    /// Units in limbo.
    pub(crate) fn limbo_units(&self) -> u64 {
        self.limbo.units()
    }

    /// Units in limbo that puts cannot get, because their segments are sealed or on avoided
    /// volumes.
    pub(crate) fn unusable_limbo_units(&self) -> u64 {
        let sealed = self.allocator.sealed();
        let avoided = self.allocator.avoided_segments().filter(|id| !self.allocator.is_sealed(*id));
        sealed.into_iter().chain(avoided).map(|segment| self.limbo.units_in(segment)).sum()
    }

    /// Units in limbo that puts can get after a sync round.
    fn usable_limbo_units(&self) -> u64 {
        self.limbo.units() - self.unusable_limbo_units()
    }

    /// Units in limbo on avoided volumes.
    pub(crate) fn avoided_limbo_units(&self) -> u64 {
        self.allocator.avoided_segments().map(|segment| self.limbo.units_in(segment)).sum()
    }

    /// Units that puts can get, now or after a sync round.
    fn reclaimable(&self) -> u64 {
        self.allocator.allocatable_units() + self.usable_limbo_units()
    }

    /// Units in quarantine.
    pub(crate) fn quarantined_units(&self) -> u64 {
        self.quarantine.units()
    }

    /// Units withheld.
    pub(crate) fn withheld_units(&self) -> u64 {
        self.draining.units()
    }

    /// Takes the space that waits for the next sync round. The space counts as in limbo or withheld
    /// until the round ends.
    pub(crate) fn begin_round(&mut self) -> RoundSpace {
        RoundSpace { limbo: self.limbo.take(), withheld: self.draining.take_undurable() }
    }

    /// Ends a round. Returns the extents to [`free`](Self::free_from_limbo) if it succeeded.
    pub(crate) fn end_round(&mut self, space: RoundSpace, synced: bool) -> Vec<Extent> {
        // After a successful round no durable record names a run in the withheld space, so the
        // space may be reused once its segments are drained.
        self.draining.put_back(space.withheld, synced);
        if synced {
            return space.limbo;
        }
        self.limbo.put_back(space.limbo);
        Vec::new()
    }

    /// Frees extents of the limbo whose round has ended.
    pub(crate) fn free_from_limbo(&mut self, extents: &[Extent]) {
        self.free(extents);
        self.limbo.remove(extents);
    }
}

const _: () =
    assert!(ritornello_format::UNIT == 4096, "the arithmetic of space counts 4 KiB units");

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_volume::space::{Reserve, SpaceConfig};

    /// A segment of 64 units, all of them in use by one run.
    fn full() -> (StoreSpace, Vec<Extent>) {
        let config = SpaceConfig { segment_units: 64, volumes: vec![1], reserve_percent: 0 };
        let mut space = StoreSpace::new(Space::new(config).unwrap());
        space.allocator.add_segment(SegmentId::new(0, 0)).unwrap();
        let run = space.allocator.allocate(1, 1, 63, Reserve::Keep).unwrap();
        (space, run)
    }

    #[test]
    fn limbo_is_reusable_after_a_successful_round() {
        let (mut space, run) = full();
        space.add_to_limbo(run);
        assert_eq!((space.allocator.free_units(), space.reclaimable()), (0, 64));
        let round = space.begin_round();
        assert!(space.end_round(round, false).is_empty() && space.has_limbo_waiting());
        let round = space.begin_round();
        assert_eq!((space.limbo_units(), space.has_limbo_waiting()), (64, false));
        let reusable = space.end_round(round, true);
        space.free_from_limbo(&reusable);
        assert_eq!((space.allocator.free_units(), space.limbo_units()), (64, 0));
    }

    #[test]
    fn oldest_quarantined_space_goes_into_limbo_above_a_sixteenth() {
        let (mut space, run) = full();
        let part = |start, units| Extent { start, units, ..run[0] };
        space.quarantine(vec![part(0, 3)]);
        assert_eq!((space.quarantined_units(), space.limbo_units()), (3, 0));
        space.quarantine(vec![part(3, 2)]);
        assert_eq!((space.quarantined_units(), space.limbo_units()), (2, 3));
    }
}
