//! Splits a long transfer into lanes that run at the same time, each on a separate thread.
//!
//! Most lanes move runs of one volume, and checksum their bytes. A volume has one lane, or several
//! if one thread checksums more slowly than the volume moves bytes (`segments/speeds.rs`). The
//! lanes of a volume together keep up to [`SegmentsConfig::in_flight_bytes`](crate::SegmentsConfig)
//! in flight. The disks of a store therefore work at the same time, a slow disk delays only lanes
//! with runs on it, and checksums use one processor for each lane. Runs that are on several volumes
//! (long pages) go to further lanes, which together keep `in_flight_bytes` in flight for each
//! volume. If the pages go through staging memory, all lanes together keep only `in_flight_bytes`
//! in flight, but each lane at least two operations.
//!
//! A lane with runs of one volume measures this volume by its own time. If the runs of any lane are
//! on several volumes, the transfer measures every volume by its operations instead
//! ([`VolumeTimes`]).
//!
//! A transfer of at most [`SegmentsConfig::in_flight_bytes`](crate::SegmentsConfig) is one lane:
//! all its operations are in flight at the same time anyway.

use super::volume_times::VolumeTimes;
use super::{RunRead, RunWrite};
use crate::scoped_threads::map_on_threads;
use crate::segments::{Moved, Segments};
use ritornello_format::{Place, UNIT};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Maximum number of lanes, of all volumes together, for runs that are on a single volume; and
/// maximum number of lanes for runs that are on several volumes. Volumes whose numbers differ by a
/// multiple of this limit share their lanes.
const LANES_MAX: usize = 16;

/// Runs of one transfer that are moved by one thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Lane {
    /// Positions of the runs in the transfer, ascending.
    runs: Vec<usize>,
    bytes: u64,
    /// The volume of all runs of the lane; `None` if they are on several volumes.
    volume: Option<u8>,
    /// Bytes that the lane keeps in flight.
    in_flight: usize,
}

/// A run of a transfer, and the number of its bytes that the transfer moves.
pub(super) trait MovedRun: Copy + Sync {
    fn place(&self) -> &Place;
    fn bytes(&self) -> u64;
}

impl MovedRun for RunRead<'_> {
    fn place(&self) -> &Place {
        self.place
    }
    fn bytes(&self) -> u64 {
        u64::from(self.place.page_units) * UNIT * self.keys.len() as u64
    }
}

impl MovedRun for RunWrite<'_> {
    fn place(&self) -> &Place {
        self.place
    }
    fn bytes(&self) -> u64 {
        self.place.units() * UNIT
    }
}

/// The lanes of one transfer.
pub(super) struct Lanes<'a> {
    segments: &'a Segments,
    moved: Moved,
    lanes: Vec<Lane>,
    /// `None` if the runs of each lane are on one volume.
    volume_times: Option<VolumeTimes>,
    began: Instant,
}

/// The time that a lane took.
struct LaneTime {
    elapsed: Duration,
    /// The part of `elapsed` in which the lane did not wait for the disk.
    computed: Duration,
    /// Whether the lane moved all its bytes.
    is_complete: bool,
}

impl<'a> Lanes<'a> {
    /// Distributes `runs` over lanes. With `are_staged`, the pages go through staging memory, and
    /// the lanes keep fewer bytes in flight, to leave staging memory to other transfers.
    pub(super) fn of<R: MovedRun>(
        segments: &'a Segments,
        runs: &[R],
        moved: Moved,
        are_staged: bool,
    ) -> Self {
        let mut lanes = split(runs, segments.in_flight_bytes, segments.speeds.lanes(moved));
        if are_staged {
            let share = segments.in_flight_bytes / lanes.len().max(1);
            let least = 2 * segments.op_bytes() as usize;
            lanes.iter_mut().for_each(|lane| lane.in_flight = lane.in_flight.min(share.max(least)));
        }
        let is_wide = |lane: &Lane| lane.volume.is_none();
        let volume_times = lanes.iter().any(is_wide).then(VolumeTimes::default);
        Self { segments, moved, lanes, volume_times, began: Instant::now() }
    }

    /// The bytes that the only lane keeps in flight; `None` if there are several lanes. With one
    /// lane the caller moves all runs itself, and then calls [`Lanes::end`].
    pub(super) fn only(&self) -> Option<usize> {
        if let [lane] = self.lanes.as_slice() { Some(lane.in_flight) } else { None }
    }

    /// Measures of the volumes, to which the lanes add their operations; `None` if the times of the
    /// lanes suffice.
    pub(super) fn volume_times(&self) -> Option<&VolumeTimes> {
        self.volume_times.as_ref()
    }

    /// Records the time that the only lane took, and the part of this time that it `waited` for the
    /// disk. `is_complete`: whether the lane moved all its bytes.
    pub(super) fn end(&self, waited: Duration, is_complete: bool) {
        self.record(&[LaneTime::since(self.began, waited, is_complete)]);
    }

    /// Runs `work` on every lane, at the same time, and returns its results, in the order of
    /// `runs`. `work` gets the runs of its lane, the bytes to keep in flight, and
    /// [`Lanes::volume_times`]. It returns one result for each of these runs, and for how long it
    /// waited for the disk. `is_complete` says whether a result means that all bytes of its run
    /// were moved.
    pub(super) fn run<R: MovedRun, T: Send>(
        self,
        runs: &[R],
        is_complete: impl Fn(&T) -> bool + Sync,
        work: impl Fn(&[R], usize, Option<&VolumeTimes>) -> (Vec<T>, Duration) + Sync,
    ) -> Vec<T> {
        let count = self.lanes.len();
        let done = map_on_threads(count, count, "ritornello-lane", |at| {
            let began = Instant::now();
            let lane = &self.lanes[at];
            let runs: Vec<R> = lane.runs.iter().map(|run| runs[*run]).collect();
            let (results, waited) = work(&runs, lane.in_flight, self.volume_times());
            let time = LaneTime::since(began, waited, results.iter().all(&is_complete));
            (results, time)
        });
        let (done, times): (Vec<Vec<T>>, Vec<LaneTime>) = done.into_iter().unzip();
        self.record(&times);
        let mut results: Vec<Option<T>> = runs.iter().map(|_| None).collect();
        for (lane, of_lane) in self.lanes.into_iter().zip(done) {
            let each = lane.runs.into_iter().zip(of_lane);
            each.for_each(|(run, result)| results[run] = Some(result));
        }
        results.into_iter().flatten().collect()
    }

    /// Records the speeds of the volumes. If the transfer is long enough for several lanes, also
    /// records how long the lanes of the busiest volume computed.
    fn record(&self, times: &[LaneTime]) {
        let speeds = &self.segments.speeds;
        let Measures { volumes, busiest } = measure(&self.lanes, times, self.volume_times());
        for (volume, bytes, elapsed) in volumes {
            speeds.moved(self.moved, volume, bytes, elapsed);
        }
        let total: u64 = self.lanes.iter().map(|lane| lane.bytes).sum();
        if let Some(busiest) = busiest
            && total > self.segments.in_flight_bytes as u64
        {
            speeds.computed(self.moved, self.began.elapsed(), busiest);
        }
    }
}

/// Measures of one transfer.
#[derive(Debug, PartialEq, Eq)]
struct Measures {
    /// The number of each measured volume, the bytes moved from or to it, and the time they took.
    volumes: Vec<(u8, u64, Duration)>,
    /// The sum of the times that the lanes of a volume computed, for the volume with the largest
    /// sum. `None` if a lane moves runs of several volumes, whose time may be longer, or if a lane
    /// did not move all its bytes: a lane that failed or stalled computed for less time than the
    /// volume permits.
    busiest: Option<Duration>,
}

/// Measures the volumes of a transfer. Leaves out volumes with a lane that did not move all its
/// bytes, because failed operations may end faster than the volume works; with `volume_times`,
/// leaves out all volumes if there is such a lane.
fn measure(lanes: &[Lane], times: &[LaneTime], volume_times: Option<&VolumeTimes>) -> Measures {
    let mut volumes = BTreeMap::<u8, (u64, Duration, Duration, bool)>::new();
    for (lane, time) in lanes.iter().zip(times) {
        let Some(volume) = lane.volume else { continue };
        let sum = volumes.entry(volume).or_insert((0, Duration::ZERO, Duration::ZERO, true));
        sum.0 += lane.bytes;
        sum.1 = sum.1.max(time.elapsed);
        sum.2 += time.computed;
        sum.3 &= time.is_complete;
    }
    let are_complete = times.iter().all(|time| time.is_complete);
    let busiest = volumes.values().map(|(_, _, computed, _)| *computed).max();
    let by_lanes = volumes.into_iter().filter(|(_, (.., is_complete))| *is_complete);
    let volumes = match volume_times {
        Some(volume_times) if are_complete => volume_times.measured(),
        Some(_) => Vec::new(),
        None => by_lanes.map(|(volume, (bytes, elapsed, ..))| (volume, bytes, elapsed)).collect(),
    };
    Measures { volumes, busiest: busiest.filter(|_| are_complete && volume_times.is_none()) }
}

impl LaneTime {
    fn since(began: Instant, waited: Duration, is_complete: bool) -> Self {
        let elapsed = began.elapsed();
        Self { elapsed, computed: elapsed.saturating_sub(waited), is_complete }
    }
}

/// The bytes in flight from which a read with sections, which has one lane, derives its limits:
/// `in_flight_bytes` for each of its volumes, at most [`LANES_MAX`] times.
pub(super) fn in_flight<R: MovedRun>(segments: &Segments, runs: &[R]) -> usize {
    segments.in_flight_bytes * volumes_of(runs).len().clamp(1, LANES_MAX)
}

/// Distributes runs over lanes: up to `per_volume` lanes for each volume, with `in_flight` bytes in
/// flight on it, and further lanes for runs on several volumes.
fn split<R: MovedRun>(runs: &[R], in_flight: usize, per_volume: usize) -> Vec<Lane> {
    let lane = |of_lane: Vec<usize>, volumes: &BTreeSet<u8>, in_flight| Lane {
        bytes: of_lane.iter().map(|run| runs[*run].bytes()).sum(),
        volume: volumes.first().copied().filter(|_| volumes.len() == 1),
        runs: of_lane,
        in_flight,
    };
    let volumes = volumes_of(runs);
    let all = lane((0..runs.len()).collect(), &volumes, in_flight);
    let is_short = all.bytes <= in_flight as u64 || volumes.is_empty();
    if is_short || (volumes.len() < 2 && per_volume < 2) {
        return vec![all];
    }
    // The runs of volumes whose numbers differ by a multiple of `LANES_MAX` share their lanes.
    let mut narrow = BTreeMap::<u8, Vec<usize>>::new();
    let mut wide = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        let mut on = run.place().extents.iter().map(|extent| extent.segment.volume());
        match on.next().filter(|first| on.all(|volume| volume == *first)) {
            Some(volume) => narrow.entry(volume % LANES_MAX as u8).or_default().push(at),
            None => wide.push(at),
        }
    }
    let per_volume = per_volume.min(LANES_MAX / narrow.len().max(1)).max(1);
    let mut lanes = Vec::new();
    for of_slot in narrow.into_values() {
        let on = volumes_of(&of_slot.iter().map(|run| runs[*run]).collect::<Vec<R>>());
        let in_flight = in_flight * on.len() / per_volume.min(of_slot.len());
        lanes.extend(distribute(&of_slot, per_volume).map(|of_lane| lane(of_lane, &on, in_flight)));
    }
    // The lanes of runs on several volumes share the bytes that all volumes may have in flight.
    let parts = volumes.len().min(LANES_MAX).min(wide.len());
    let in_flight = in_flight * volumes.len().min(LANES_MAX) / parts.max(1);
    lanes.extend(distribute(&wide, parts).map(|of_lane| lane(of_lane, &volumes, in_flight)));
    lanes
}

fn volumes_of<R: MovedRun>(runs: &[R]) -> BTreeSet<u8> {
    let extents = runs.iter().flat_map(|run| &run.place().extents);
    extents.map(|extent| extent.segment.volume()).collect()
}

/// Distributes `runs` round robin over at most `count` lists, none of which is empty.
fn distribute(runs: &[usize], count: usize) -> impl Iterator<Item = Vec<usize>> + '_ {
    let count = count.min(runs.len());
    (0..count).map(move |first| runs.iter().skip(first).step_by(count).copied().collect())
}

#[cfg(test)]
mod busy_threads;

#[cfg(test)]
mod tests {
    use super::*;
    use ritornello_format::{Extent, SegmentId};

    #[derive(Clone)]
    struct Run(Place);

    impl MovedRun for &Run {
        fn place(&self) -> &Place {
            &self.0
        }
        fn bytes(&self) -> u64 {
            self.0.units() * UNIT
        }
    }

    /// A run with an extent of ten units on each of `volumes`.
    fn run(volumes: &[u8]) -> Run {
        let extent =
            |volume: &u8| Extent { segment: SegmentId::new(*volume, 0), start: 0, units: 10 };
        Run(Place { extents: volumes.iter().map(extent).collect(), ..Place::default() })
    }

    /// Splits `runs` with `in_flight` units in flight on each volume. Returns the numbers of each
    /// lane's runs, and the lane's units in flight.
    fn lanes(runs: &[Run], in_flight: u64, per_volume: usize) -> Vec<(Vec<usize>, usize)> {
        let runs: Vec<&Run> = runs.iter().collect();
        let lanes = split(&runs, (in_flight * UNIT) as usize, per_volume);
        let moved: u64 = lanes.iter().map(|lane| lane.bytes).sum();
        assert_eq!(moved, runs.iter().map(|run| run.bytes()).sum::<u64>());
        lanes.into_iter().map(|lane| (lane.runs, lane.in_flight / UNIT as usize)).collect()
    }

    #[test]
    fn short_transfers_and_one_volume_are_one_lane() {
        let two = [run(&[0]), run(&[1])];
        assert_eq!(lanes(&two, 20, 1), [(vec![0, 1], 20)]);
        let one = [run(&[3]), run(&[3]), run(&[3])];
        assert_eq!(lanes(&one, 20, 1), [(vec![0, 1, 2], 20)]);
        assert_eq!(lanes(&[], 20, 4), [(vec![], 20)]);
    }

    #[test]
    fn each_volume_has_a_lane() {
        let runs = [run(&[2]), run(&[0]), run(&[2]), run(&[0]), run(&[1])];
        let expected = [(vec![1, 3], 20), (vec![4], 20), (vec![0, 2], 20)];
        assert_eq!(lanes(&runs, 20, 1), expected);
    }

    #[test]
    fn lanes_of_one_volume_share_its_bytes_in_flight() {
        let runs = [run(&[0]), run(&[0]), run(&[0]), run(&[0]), run(&[0])];
        assert_eq!(lanes(&runs, 20, 2), [(vec![0, 2, 4], 10), (vec![1, 3], 10)]);
    }

    #[test]
    fn runs_on_several_volumes_share_their_bytes_in_flight() {
        let wide = [run(&[0, 1, 2, 3]), run(&[1, 2, 3, 0])];
        assert_eq!(lanes(&wide, 20, 1), [(vec![0], 40), (vec![1], 40)]);
        assert_eq!(lanes(&wide[..1], 20, 1), [(vec![0], 80)]);
        let mixed = [run(&[0]), run(&[0, 1]), run(&[1])];
        assert_eq!(lanes(&mixed, 20, 1), [(vec![0], 20), (vec![2], 20), (vec![1], 40)]);
    }

    #[test]
    fn lanes_of_256_volumes_stay_within_limit() {
        let runs: Vec<Run> = (0..=u8::MAX).map(|volume| run(&[volume])).collect();
        let lanes = lanes(&runs, 20, 4);
        assert_eq!(lanes.len(), LANES_MAX);
        assert_eq!(lanes[3].1, 20 * 16, "each lane must have the bytes of its 16 volumes");
    }

    const SECOND: Duration = Duration::from_secs(1);

    /// Measures `lanes`, each of ten bytes on one volume, or on several if the volume is `None`.
    /// Lane `n` takes `n + 1` seconds, and computes for half of this time.
    fn measures(lanes: &[(Option<u8>, bool)], volume_times: Option<&VolumeTimes>) -> Measures {
        let time = |(at, (_, is_complete)): (u32, &(Option<u8>, bool))| LaneTime {
            elapsed: SECOND * (at + 1),
            computed: SECOND * (at + 1) / 2,
            is_complete: *is_complete,
        };
        let times: Vec<LaneTime> = (0..).zip(lanes).map(time).collect();
        let lane = |(volume, _): &(Option<u8>, bool)| Lane {
            bytes: 10,
            volume: *volume,
            ..Lane::default()
        };
        let lanes: Vec<Lane> = lanes.iter().map(lane).collect();
        measure(&lanes, &times, volume_times)
    }

    #[test]
    fn lanes_of_a_volume_are_measured_together() {
        let Measures { volumes, busiest } =
            measures(&[(Some(4), true), (Some(2), true), (Some(4), true)], None);
        assert_eq!(volumes, [(2, 10, 2 * SECOND), (4, 20, 3 * SECOND)]);
        assert_eq!(busiest, Some(2 * SECOND), "the lanes of volume 4 computed for 0.5 + 1.5 s");
    }

    #[test]
    fn failed_lanes_leave_the_number_of_lanes_unchanged() {
        let Measures { volumes, busiest } = measures(&[(Some(4), false), (Some(2), true)], None);
        assert_eq!((volumes, busiest), (vec![(2, 10, 2 * SECOND)], None));
    }

    #[test]
    fn lanes_on_several_volumes_are_measured_by_their_operations() {
        let (times, start) = (VolumeTimes::default(), Instant::now());
        for (volume, bytes) in [(0, 30), (7, 50)] {
            times.begin(volume, start);
            times.end(volume, bytes, start + SECOND);
        }
        let by_operations = vec![(0, 30, SECOND), (7, 50, SECOND)];
        let Measures { volumes, busiest } = measures(&[(None, true), (None, true)], Some(&times));
        assert_eq!((volumes, busiest), (by_operations.clone(), None));
        let mixed = measures(&[(Some(0), true), (None, true)], Some(&times));
        assert_eq!(mixed, Measures { volumes: by_operations, busiest: None });
        let failed = measures(&[(Some(0), true), (None, false)], Some(&times));
        assert_eq!(failed, Measures { volumes: Vec::new(), busiest: None });
    }
}
