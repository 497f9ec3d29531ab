use super::*;

const SEGMENT: u32 = 1024;

fn config(volumes: &[u32]) -> SpaceConfig {
    SpaceConfig { segment_units: SEGMENT, volumes: volumes.to_vec(), reserve_percent: 0 }
}

/// A space in which all segments exist.
fn full(volumes: &[u32]) -> Space {
    let mut space = Space::new(config(volumes)).unwrap();
    while let Some(id) = space.next_segment() {
        space.add_segment(id).unwrap();
    }
    space
}

fn extent(number: u32, start: u32, units: u32) -> Extent {
    Extent { segment: SegmentId::new(0, number), start, units }
}

#[test]
fn run_goes_into_smallest_fitting_hole() {
    let mut space = full(&[1]);
    space.mark(&[extent(0, 100, 1), extent(0, 160, 1)]).unwrap();
    assert_eq!(space.allocate(1, 9, 6, Reserve::Keep).unwrap(), [extent(0, 101, 55)]);
    assert_eq!(space.allocate(1, 9, 6, Reserve::Keep).unwrap(), [extent(0, 0, 55)]);
    assert_eq!(space.stats().largest, 1024 - 161);
}

/// Volume 0, whose turn it is, has two holes of `hole` units; volume 1 is empty. Returns the volume
/// of each extent of a run of two pages.
fn volumes_taken(hole: u32, page_units: u32) -> Vec<u8> {
    const SEGMENT: u32 = 8192;
    let config = SpaceConfig { segment_units: SEGMENT, ..config(&[1, 1]) };
    let mut space = Space::new(config).unwrap();
    while let Some(id) = space.next_segment() {
        space.add_segment(id).unwrap();
    }
    space.mark(&[extent(0, hole, SEGMENT - 2 * hole)]).unwrap();
    let extents = space.allocate(1, page_units, 2, Reserve::Keep).unwrap();
    extents.iter().map(|extent| extent.segment.volume()).collect()
}

#[test]
fn volume_in_turn_takes_long_run_in_two_pieces() {
    assert_eq!(volumes_taken(2000, 1500), [0, 0]);
    assert_eq!(volumes_taken(1400, 1500), [1], "the two holes are too short");
    assert_eq!(volumes_taken(600, 500), [1], "one operation reads a run of 4 MiB");
}

#[test]
fn marking_is_all_or_nothing() {
    let mut space = full(&[2]);
    let free = space.free_units();
    let twice = [extent(0, 0, 10), extent(1, 5, 10), extent(0, 9, 2)];
    assert_eq!(space.mark(&twice), Err(SpaceError::InUse(extent(0, 9, 2))));
    assert_eq!(space.free_units(), free);
    for wrong in [extent(2, 0, 1), extent(0, 1020, 5), extent(0, 0, 0), extent(0, u32::MAX, 2)] {
        assert_eq!(space.mark(&[extent(0, 0, 5), wrong]), Err(SpaceError::OutOfRange(wrong)));
    }
    let other = Extent { segment: SegmentId::new(7, 0), ..extent(0, 0, 1) };
    assert!(space.mark(&[other]).is_err());
    assert_eq!(space.holes().collect::<Vec<_>>(), [extent(0, 0, 1024), extent(1, 0, 1024)]);
}

#[test]
fn double_free_is_detected_and_harmless() {
    let mut space = full(&[1]);
    space.mark(&[extent(0, 0, 1024)]).unwrap();
    space.free(&[extent(0, 10, 10)]).unwrap();
    for wrong in [extent(0, 10, 10), extent(0, 19, 1), extent(0, 5, 6), extent(0, 0, 1024)] {
        assert_eq!(space.free(&[wrong]), Err(SpaceError::FreeAlready(wrong)));
    }
    let bad = extent(0, 15, 10);
    assert_eq!(space.free(&[bad, extent(0, 20, 5)]), Err(SpaceError::FreeAlready(bad)));
    assert_eq!(space.holes().collect::<Vec<_>>(), [extent(0, 10, 15)]);
}

#[test]
fn reserve_stays_free_unless_used() {
    let mut space = Space::new(SpaceConfig { reserve_percent: 50, ..config(&[2]) }).unwrap();
    space.add_segment(SegmentId::new(0, 0)).unwrap();
    assert_eq!((space.capacity_units(), space.reserve_units()), (2048, 1024));
    assert!(space.allocate(24, 100, 10, Reserve::Keep).is_some());
    assert!(space.allocate(1, 1, 1, Reserve::Keep).is_none());
    assert_eq!(space.shortfall(7, Reserve::Keep), 7);
    assert!(space.allocate(1, 1, 1, Reserve::Use).is_none(), "the only existing segment is full");
    let next = space.next_segment().unwrap();
    space.add_segment(next).unwrap();
    assert!(space.allocate(1, 1, 1, Reserve::Keep).is_none());
    assert!(space.allocate(24, 100, 10, Reserve::Use).is_some());
    let stats = space.stats();
    assert_eq!((stats.refused_reserve, stats.refused_shape, stats.runs), (2, 1, 2));
}

#[test]
fn volumes_alternate_and_grow_evenly() {
    let mut space = Space::new(config(&[4, 2])).unwrap();
    let mut made = Vec::new();
    let mut used = Vec::new();
    for _ in 0..18 {
        let extents = loop {
            match space.allocate(6, 100, 3, Reserve::Keep) {
                Some(extents) => break extents,
                None => {
                    let id = space.next_segment().unwrap();
                    space.add_segment(id).unwrap();
                    made.push((id.volume(), id.number()));
                }
            }
        };
        used.push(extents[0].segment.volume());
    }
    assert_eq!(used[..6], [0, 1, 0, 1, 0, 1]);
    assert_eq!(made, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3)]);
    assert!(space.next_segment().is_none());
}

/// The volumes of the first `count` runs of 300 units, with segments made as needed.
fn volumes_of_runs(maxima: &[u32], count: usize) -> Vec<u8> {
    let mut space = Space::new(config(maxima)).unwrap();
    let run = |_| loop {
        if let Some(extents) = space.allocate(1, 299, 1, Reserve::Keep) {
            return extents[0].segment.volume();
        }
        let id = space.next_segment().unwrap();
        space.add_segment(id).unwrap();
    };
    (0..count).map(run).collect()
}

#[test]
fn volumes_without_room_are_skipped() {
    assert_eq!(volumes_of_runs(&[0, 4, 4, 4], 9), [1, 2, 3, 1, 2, 3, 1, 2, 3]);
    assert_eq!(volumes_of_runs(&[4, 0, 4], 6), [0, 2, 0, 2, 0, 2]);
    // The first volume is full after three runs.
    let volumes = volumes_of_runs(&[1, 8, 8], 20);
    assert_eq!(volumes.iter().filter(|volume| **volume == 0).count(), 3);
    assert!(volumes[9..].windows(2).all(|pair| pair[0] != pair[1]), "{volumes:?}");
}

#[test]
fn stopped_volumes_get_no_segments_until_resumed() {
    let mut space = Space::new(config(&[2, 2])).unwrap();
    assert!(space.allocate(1, 10, 1, Reserve::Keep).is_none());
    space.stop_growth(0);
    assert_eq!(space.capacity_units(), 2048);
    let id = space.next_segment().unwrap();
    assert_eq!(id, SegmentId::new(1, 0));
    space.add_segment(id).unwrap();
    assert_eq!(space.add_segment(id), Err(SpaceError::Segment(id)));
    assert_eq!(space.allocate(1, 10, 1, Reserve::Keep).unwrap()[0].segment.volume(), 1);
    assert_eq!(space.next_segment(), Some(SegmentId::new(1, 1)));
    space.stop_growth(1);
    assert_eq!(space.next_segment(), None);
    assert!(space.allocate(1, 10, 1, Reserve::Keep).is_some());
    space.resume_growth(0);
    space.resume_growth(1);
    assert_eq!(space.next_segment(), Some(SegmentId::new(0, 0)));
    assert!(space.add_segment(SegmentId::new(2, 0)).is_err());
    assert!(Space::new(config(&[])).is_err());
    assert!(Space::new(SpaceConfig { segment_units: 0, ..config(&[1]) }).is_err());
}

#[test]
fn run_is_on_several_volumes_only_when_no_volume_has_room() {
    let mut space = full(&[1, 1]);
    let other = |start, units| Extent { segment: SegmentId::new(1, 0), start, units };
    space.mark(&[extent(0, 300, 724), other(300, 724)]).unwrap();
    let extents = space.allocate(0, 100, 5, Reserve::Keep).unwrap();
    assert_eq!(extents.iter().map(|e| e.units).sum::<u32>(), 500);
    assert_eq!(extents.len(), 2);
    assert_ne!(extents[0].segment, extents[1].segment);
}

/// A long page needs a new segment on volume 1. Before the segment is created, a short run is
/// placed, after which `next_segment` names a segment of volume 0.
#[test]
fn segment_to_create_stays_valid_after_other_runs() {
    let mut space = Space::new(config(&[3, 3])).unwrap();
    space.add_segment(SegmentId::new(0, 0)).unwrap();
    space.add_segment(SegmentId::new(1, 0)).unwrap();
    let short = |space: &mut Space| assert!(space.allocate(1, 10, 1, Reserve::Keep).is_some());
    short(&mut space);
    assert!(space.allocate(2, 5000, 1, Reserve::Keep).is_none());
    let lacking = space.next_segment().unwrap();
    assert_eq!(lacking, SegmentId::new(1, 1));
    short(&mut space);
    assert_eq!(space.next_segment(), Some(SegmentId::new(0, 1)));
    assert!(space.is_creatable(lacking));
    space.add_segment(lacking).unwrap();
    assert!(!space.is_creatable(lacking), "the segment exists already");
    let next = SegmentId::new(1, 2);
    assert!(space.is_creatable(next));
    space.stop_growth(1);
    assert!(!space.is_creatable(next) && space.is_creatable(SegmentId::new(0, 1)));
    assert!(!space.is_creatable(SegmentId::new(9, 0)), "no such volume");
    space.set_shares(&[3, 3], 3);
    assert!(!space.is_creatable(SegmentId::new(0, 1)), "the maximum of three segments exists");
}

#[test]
fn avoided_volume_gets_no_runs_and_no_segments() {
    let mut space = Space::new(config(&[2, 1])).unwrap();
    space.add_segment(SegmentId::new(0, 0)).unwrap();
    space.avoid(0, true);
    assert_eq!(space.avoided_segments().collect::<Vec<_>>(), [SegmentId::new(0, 0)]);
    assert_eq!(space.next_segment(), Some(SegmentId::new(1, 0)));
    space.add_segment(SegmentId::new(1, 0)).unwrap();
    assert_eq!(space.next_segment(), None);
    for _ in 0..4 {
        assert_eq!(space.allocate(6, 50, 5, Reserve::Keep).unwrap()[0].segment.volume(), 1);
    }
    assert!(space.allocate(6, 50, 5, Reserve::Use).is_none());
    assert_eq!((space.free_units(), space.allocatable_units()), (u64::from(SEGMENT), 0));
    assert!(!space.has_usable_besides(1) && space.has_usable_besides(0));
    space.avoid(0, false);
    assert_eq!(space.allocate(6, 50, 5, Reserve::Keep).unwrap()[0].segment.volume(), 0);
}
