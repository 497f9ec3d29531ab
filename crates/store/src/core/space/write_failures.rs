//! Volumes that puts avoid: volumes that fail writes to their segments, although they can be read
//! and synced; volumes that have stalled; and volumes whose segments a salvage must first search
//! for runs that the index lacks.

use super::StoreSpace;
use ritornello_format::Extent;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Number of consecutive runs that could not be written to a volume after which puts avoid the
/// volume. The runs are at different places, because the place of a failed run is quarantined. With
/// fewer bad places in succession, only these places are lost.
const FAILED_RUNS_MAX: u32 = 8;
/// Interval at which one run is placed on an avoided volume as a test.
const TRIAL_INTERVAL: Duration = Duration::from_secs(30);

/// Volumes with failed writes since the last run that was written to the volume.
#[derive(Debug, Default)]
pub(super) struct WriteFailures(BTreeMap<u8, FailingVolume>);

#[derive(Debug, Default)]
struct FailingVolume {
    /// Consecutive runs that could not be written.
    runs: u32,
    /// The quarantined places of these runs.
    places: Vec<Extent>,
    /// The time of the next test; `None` if puts do not avoid the volume.
    next_trial: Option<Instant>,
}

impl StoreSpace {
    /// Records that a run was written to `extents`. Failed writes are then no longer a reason for
    /// which puts avoid the volumes of these extents.
    pub(crate) fn note_written(&mut self, extents: &[Extent]) {
        if self.failures.0.is_empty() {
            return;
        }
        for volume in volumes_of(extents) {
            // Places where writes failed stay quarantined, because only these places are bad.
            let failing = self.failures.0.remove(&volume);
            if failing.is_some_and(|failing| failing.next_trial.is_some()) {
                tracing::warn!(volume, "writes to the volume succeed again");
                self.update_avoided(volume);
            }
        }
    }

    /// Records that a run could not be written to `extents`, because writes to the `failed` volumes
    /// failed. Quarantines the places on these volumes. After [`FAILED_RUNS_MAX`] failed runs in
    /// succession the whole volume counts as failing: its places leave quarantine, and puts avoid
    /// the volume if another can be used. Returns the extents that may be reused.
    pub(crate) fn note_failed(&mut self, extents: Vec<Extent>, failed: &[u8]) -> Vec<Extent> {
        let (bad, mut reusable): (Vec<_>, Vec<_>) =
            extents.into_iter().partition(|extent| failed.contains(&extent.segment.volume()));
        for volume in volumes_of(&bad) {
            let own = bad.iter().copied().filter(|extent| extent.segment.volume() == volume);
            let own: Vec<Extent> = own.collect();
            let failing = self.failures.0.entry(volume).or_default();
            failing.runs += 1;
            if failing.runs < FAILED_RUNS_MAX {
                failing.places.extend(&own);
                self.quarantine(own);
                continue;
            }
            reusable.extend(own);
            let places = std::mem::take(&mut failing.places);
            reusable.extend(self.quarantine.take(&places));
            if failing.next_trial.is_none() && self.allocator.has_usable_besides(volume) {
                tracing::warn!(volume, "writes to a volume fail: puts avoid it; check its disk");
                failing.next_trial = Some(Instant::now() + TRIAL_INTERVAL);
                self.allocator.avoid(volume, true);
            }
        }
        reusable
    }

    /// Makes puts avoid each of the `stalled` volumes while another volume is usable. Lets puts use
    /// the volumes that are no longer in `stalled`, unless puts avoid them for another reason.
    pub(super) fn avoid_stalled(&mut self, stalled: &[u8]) {
        if stalled.is_empty() && self.stalled.is_empty() {
            return;
        }
        let ended: Vec<u8> =
            self.stalled.iter().copied().filter(|volume| !stalled.contains(volume)).collect();
        for volume in ended {
            self.stalled.remove(&volume);
            self.update_avoided(volume);
        }
        for &volume in stalled {
            if self.allocator.has_usable_besides(volume) {
                self.stalled.insert(volume);
                self.allocator.avoid(volume, true);
            }
        }
    }

    /// Makes puts avoid a volume if it has stalled, if its segments must be searched first, or if
    /// it fails writes; otherwise lets puts use it.
    pub(super) fn update_avoided(&mut self, volume: u8) {
        let avoided =
            self.is_held_off(volume) || self.avoided_volumes().any(|failing| failing == volume);
        self.allocator.avoid(volume, avoided);
    }

    /// Whether puts avoid a volume because it has stalled, or because a salvage must search its
    /// segments first.
    fn is_held_off(&self, volume: u8) -> bool {
        self.stalled.contains(&volume) || self.unsearched.contains(&volume)
    }

    /// Lets puts use volumes that puts avoid only because writes failed: those whose test is due,
    /// or all of them if no volume is usable.
    pub(super) fn begin_trials(&mut self, now: Instant) {
        let avoided = |failing: &FailingVolume| failing.next_trial.is_some();
        if !self.failures.0.values().any(avoided) {
            return;
        }
        let none_usable = self.allocator.usable_volumes() == 0;
        let held_off: BTreeSet<u8> = self.stalled.union(&self.unsearched).copied().collect();
        for (volume, failing) in &mut self.failures.0 {
            let is_due = failing.next_trial.is_some_and(|trial| now >= trial);
            if (is_due || none_usable) && !held_off.contains(volume) {
                self.allocator.avoid(*volume, false);
            }
            if none_usable {
                failing.next_trial = None;
            }
        }
    }

    /// Records that a run was placed in `extents`: if that is the test of an avoided volume, puts
    /// avoid the volume again until the run is written, or until the next test.
    pub(super) fn note_placed(&mut self, extents: &[Extent], now: Instant) {
        if self.failures.0.is_empty() {
            return;
        }
        for volume in volumes_of(extents) {
            if let Some(failing) = self.failures.0.get_mut(&volume)
                && let Some(trial) = &mut failing.next_trial
            {
                *trial = now + TRIAL_INTERVAL;
                self.allocator.avoid(volume, true);
            }
        }
    }

    /// The volumes that puts avoid because writes failed.
    pub(crate) fn avoided_volumes(&self) -> impl Iterator<Item = u8> + '_ {
        let failing = self.failures.0.iter();
        failing.filter(|(_, failing)| failing.next_trial.is_some()).map(|(volume, _)| *volume)
    }
}

fn volumes_of(extents: &[Extent]) -> BTreeSet<u8> {
    extents.iter().map(|extent| extent.segment.volume()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::SegmentId;
    use ritornello_volume::space::{Reserve, Space, SpaceConfig};

    fn space(volumes: usize) -> StoreSpace {
        let config =
            SpaceConfig { segment_units: 1024, volumes: vec![1; volumes], reserve_percent: 0 };
        let mut allocator = Space::new(config).unwrap();
        for volume in 0..volumes as u8 {
            allocator.add_segment(SegmentId::new(volume, 0)).unwrap();
        }
        StoreSpace::new(allocator)
    }

    fn place(space: &mut StoreSpace, now: Instant) -> Vec<Extent> {
        space.begin_trials(now);
        space.allocate(1, 1, 1, Reserve::Keep, now).unwrap()
    }

    /// Places `runs` runs and reports each run on volume 0 as failed. Returns the number of failed
    /// runs.
    fn place_many(space: &mut StoreSpace, runs: usize, now: Instant) -> usize {
        let fails = |space: &mut StoreSpace| {
            let extents = place(space, now);
            let fails = extents[0].segment.volume() == 0;
            let reusable = if fails { space.note_failed(extents, &[0]) } else { extents };
            space.free(&reusable);
            fails
        };
        (0..runs).filter(|_| fails(space)).count()
    }

    #[test]
    fn failing_volume_is_avoided_and_tested() {
        let (mut space, start) = (space(2), Instant::now());
        assert_eq!(place_many(&mut space, 7, start), 4, "volumes get runs in turn");
        assert_eq!((space.quarantined_units(), space.avoided_volumes().count()), (8, 0));
        assert_eq!(place_many(&mut space, 60, start), 4);
        assert_eq!(space.avoided_volumes().collect::<Vec<_>>(), [0]);
        assert_eq!(space.quarantined_units(), 0, "the quarantine ends if the whole disk fails");
        assert_eq!(space.allocator.free_units(), 2048);
        let later = start + 2 * TRIAL_INTERVAL;
        assert_eq!(place_many(&mut space, 60, later), 1, "one run tests the volume");
        let later = later + TRIAL_INTERVAL;
        let trial = std::iter::repeat_with(|| place(&mut space, later))
            .find(|extents| extents[0].segment.volume() == 0)
            .unwrap();
        assert!((0..10).all(|_| place(&mut space, later)[0].segment.volume() == 1));
        space.note_written(&trial);
        assert_eq!(space.avoided_volumes().count(), 0);
        assert!((0..4).any(|_| place(&mut space, later)[0].segment.volume() == 0));
    }

    #[test]
    fn written_run_resets_the_count_and_keeps_the_quarantine() {
        let mut space = space(2);
        for _ in 0..5 {
            assert!(place_many(&mut space, 4, Instant::now()) > 0);
            let good = std::iter::repeat_with(|| place(&mut space, Instant::now()))
                .find(|extents| extents[0].segment.volume() == 0)
                .unwrap();
            space.note_written(&good);
        }
        assert_eq!(space.avoided_volumes().count(), 0);
        assert!(space.quarantined_units() > 0);
    }

    #[test]
    fn stalled_volume_is_avoided_until_it_works() {
        let (mut space, now) = (space(2), Instant::now());
        let used = |space: &mut StoreSpace| -> BTreeSet<u8> {
            (0..8).map(|_| place(space, now)[0].segment.volume()).collect()
        };
        space.avoid_stalled(&[0]);
        assert_eq!(used(&mut space), [1].into());
        space.avoid_stalled(&[0, 1]);
        assert_eq!(used(&mut space), [1].into(), "the last usable volume must not be avoided");
        space.avoid_stalled(&[]);
        assert_eq!(used(&mut space), [0, 1].into());
        place_many(&mut space, 60, now);
        space.avoid_stalled(&[0]);
        space.avoid_stalled(&[]);
        assert_eq!(used(&mut space), [1].into(), "a volume with failed writes must stay avoided");
    }

    #[test]
    fn last_usable_volume_is_not_avoided() {
        let mut space = space(1);
        assert_eq!(place_many(&mut space, 20, Instant::now()), 20);
        assert_eq!((space.avoided_volumes().count(), space.quarantined_units()), (0, 0));
    }
}
