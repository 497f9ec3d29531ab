//! Compares [`Space`] with a set of the units in use ("bitmap" in the names of the tests), under
//! random operations.

use super::shape::LONG_PAGE_UNITS;
use super::*;
use proptest::prelude::*;
use ritornello_format::{PIECE_UNITS, WHOLE_PAGE_UNITS};
use std::collections::BTreeSet;

const SEGMENT: u32 = 700;
const MAX: u32 = 3;

#[derive(Clone, Debug)]
enum Action {
    /// Allocates a run, and adds segments until the run fits or no segment may be added.
    Allocate { header: u32, page: u32, pages: u32, reserve: Reserve },
    /// Frees run `which` modulo the number of runs; if `tail`, only the last of its extents if it
    /// has several.
    Free { which: usize, tail: bool },
    /// Frees a unit that is already free, in hole `which` modulo the number of holes: must fail.
    FreeAgain { which: usize },
    /// Replaces the space by a new space with the same segments, and marks the extents of all runs
    /// as used.
    Reopen,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let page = prop_oneof![1..=8u32, 40..=70u32, 120..=300u32];
    let reserve = prop_oneof![Just(Reserve::Keep), Just(Reserve::Use)];
    let action = prop_oneof![
        6 => (0..4u32, page, 1..12u32, reserve).prop_map(|(header, page, pages, reserve)| {
            Action::Allocate { header, page, pages, reserve }
        }),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, tail)| Action::Free { which, tail }),
        1 => any::<usize>().prop_map(|which| Action::FreeAgain { which }),
        1 => Just(Action::Reopen),
    ];
    prop::collection::vec(action, 1..120)
}

#[derive(Default)]
struct Model {
    /// Every unit in use.
    used: BTreeSet<(SegmentId, u32)>,
    segments: BTreeSet<SegmentId>,
    runs: Vec<Vec<Extent>>,
}

impl Model {
    fn take(&mut self, extents: &[Extent]) {
        for extent in extents {
            assert!(extent.units > 0 && extent.end() <= SEGMENT);
            assert!(self.segments.contains(&extent.segment));
            for unit in extent.start..extent.end() {
                assert!(
                    self.used.insert((extent.segment, unit)),
                    "overlap at {unit} of {extent:?}"
                );
            }
        }
    }

    fn give(&mut self, extents: &[Extent]) {
        for extent in extents {
            for unit in extent.start..extent.end() {
                assert!(self.used.remove(&(extent.segment, unit)));
            }
        }
    }

    /// The free space, as joined extents.
    fn holes(&self) -> Vec<Extent> {
        let mut holes: Vec<Extent> = Vec::new();
        for &segment in &self.segments {
            for start in (0..SEGMENT).filter(|unit| !self.used.contains(&(segment, *unit))) {
                match holes.last_mut() {
                    Some(last) if last.segment == segment && last.end() == start => last.units += 1,
                    _ => holes.push(Extent { segment, start, units: 1 }),
                }
            }
        }
        holes
    }
}

/// Checks that a run's extents obey the rules of the allocator, by arithmetic that differs from the
/// allocator's.
fn check_rules(header: u32, page: u32, pages: u32, extents: &[Extent]) {
    let total: u32 = extents.iter().map(|extent| extent.units).sum();
    assert_eq!(total, header + page * pages);
    assert!(extents.len() <= RUN_EXTENTS_MAX);
    if page <= LONG_PAGE_UNITS {
        assert!(extents[0].units >= header + page, "header and page 0 must be contiguous");
    } else {
        assert!(extents[0].units >= header + PIECE_UNITS, "header and 256 KiB must be contiguous");
    }
    let place = ritornello_format::Place {
        header_units: header,
        page_units: page,
        extents: extents.to_vec(),
        ..Default::default()
    };
    for number in 0..pages {
        let pieces = place.page(number);
        if page <= WHOLE_PAGE_UNITS {
            assert_eq!(pieces.len(), 1, "small pages must be whole");
        }
        assert!(pieces.len() == 1 || pieces.iter().all(|piece| piece.units >= PIECE_UNITS));
    }
}

fn check(space: &Space, model: &Model) {
    assert_eq!(space.holes().collect::<Vec<_>>(), model.holes());
    let total = model.segments.len() as u64 * u64::from(SEGMENT);
    let stats = space.stats();
    assert_eq!(stats.total_units, total);
    assert_eq!(stats.free_units, total - model.used.len() as u64);
    assert_eq!(stats.free_extents.values().sum::<u64>(), stats.holes);
    assert_eq!(stats.holes, model.holes().len() as u64);
    assert_eq!(stats.largest, model.holes().iter().map(|hole| hole.units).max().unwrap_or(0));
}

fn new(volumes: usize) -> Space {
    let config =
        SpaceConfig { segment_units: SEGMENT, volumes: vec![MAX; volumes], reserve_percent: 10 };
    Space::new(config).unwrap()
}

fn run(volumes: usize, actions: Vec<Action>) {
    let (mut space, mut model) = (new(volumes), Model::default());
    for action in actions {
        match action {
            Action::Allocate { header, page, pages, reserve } => loop {
                let free = space.free_units();
                if let Some(extents) = space.allocate(header, page, pages, reserve) {
                    check_rules(header, page, pages, &extents);
                    model.take(&extents);
                    model.runs.push(extents);
                    let creatable = space.capacity_units() - space.total_units();
                    let left = space.free_units() + creatable;
                    assert!(reserve == Reserve::Use || left >= space.reserve_units());
                    break;
                }
                assert_eq!(space.free_units(), free, "a refusal must change nothing");
                let Some(id) = space.next_segment() else { break };
                space.add_segment(id).unwrap();
                assert!(model.segments.insert(id));
            },
            Action::Free { which, tail } if !model.runs.is_empty() => {
                let at = which % model.runs.len();
                let freed = if tail && model.runs[at].len() > 1 {
                    vec![model.runs[at].pop().unwrap()]
                } else {
                    model.runs.swap_remove(at)
                };
                space.free(&freed).unwrap();
                model.give(&freed);
            }
            Action::FreeAgain { which } => {
                let holes = model.holes();
                if !holes.is_empty() {
                    let hole = holes[which % holes.len()];
                    assert!(space.free(&[hole.part(hole.units / 2, 1)]).is_err());
                }
            }
            Action::Reopen => {
                space = new(volumes);
                model.segments.iter().for_each(|id| space.add_segment(*id).unwrap());
                model.runs.iter().for_each(|run| space.mark(run).unwrap());
                if let Some(run) = model.runs.first() {
                    assert!(space.mark(run).is_err());
                }
            }
            Action::Free { .. } => {}
        }
        check(&space, &model);
    }
    for run in &model.runs {
        space.free(run).unwrap();
    }
    assert_eq!(space.free_units(), space.total_units());
    assert_eq!(space.stats().holes, model.segments.len() as u64, "each segment must be one hole");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn one_volume_matches_a_bitmap(actions in actions()) {
        run(1, actions);
    }

    #[test]
    fn three_volumes_match_a_bitmap(actions in actions()) {
        run(3, actions);
    }
}
