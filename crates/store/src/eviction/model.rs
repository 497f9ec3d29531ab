//! The policy against a plain list, and the promises that hold for every policy.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn resident(run: u64, parent: Option<(u64, u32)>, pages: u32) -> Resident {
    let parent = parent.map(|(run, page)| (RunId(run), page));
    Resident { run: RunId(run), key: run, parent, pages, page_units: 4, header_units: 1 }
}

fn names(victims: &[Victim]) -> Vec<(u64, u32)> {
    victims.iter().map(|victim| (victim.run.0, victim.keep_pages)).collect()
}

impl<F: Fn(RunId) -> bool> Holdings for F {
    fn is_pinned(&self, run: RunId) -> bool {
        self(run)
    }
    fn page_key(&self, run: RunId, page: u32) -> u64 {
        run.0 << 32 | u64::from(page)
    }
}

fn used(run: u64) -> Used {
    Used { run: RunId(run), pages: u32::MAX }
}

const NOBODY: &dyn Holdings = &(|_: RunId| false);

#[test]
fn long_runs_lose_their_tail_in_chunks() {
    let mut lru = Lru::with_chunk(16);
    lru.admit(&resident(1, None, 100));
    lru.admit(&resident(2, None, 100));
    assert_eq!(names(&lru.victims(1, NOBODY)), [(1, 96)]);
    lru.shrink(RunId(1), 4);
    assert_eq!(names(&lru.victims(17, NOBODY)), [(1, 88)]);
    lru.shrink(RunId(1), 8);
    let victims = lru.victims(360, NOBODY);
    assert_eq!(names(&victims), [(1, 0), (2, 96)]);
    assert_eq!(victims[0].units, 88 * 4 + 1);
    assert_eq!(lru.len(), 1);
}

#[test]
fn a_prompt_that_others_share_stays_while_its_tail_goes() {
    let mut lru = Lru::with_chunk(4);
    lru.admit(&resident(1, None, 10));
    lru.admit(&resident(2, Some((1, 2)), 5));
    lru.hit(&[used(1), used(2)]);
    // Run 2 is listed before run 1, though both were used at once.
    assert_eq!(names(&lru.victims(20, NOBODY)), [(2, 0)]);
    lru.admit(&resident(3, Some((1, 2)), 5));
    assert_eq!(names(&lru.victims(1000, &|run: RunId| run == RunId(3))), [(1, 3)]);
    assert_eq!(names(&lru.victims(1000, NOBODY)), [(3, 0), (1, 0)]);
    assert!(lru.is_empty());
}

#[test]
fn a_run_set_aside_goes_right_after_its_last_child() {
    let mut lru = Lru::with_chunk(4);
    lru.admit(&resident(1, None, 1));
    lru.admit(&resident(2, None, 1));
    lru.admit(&resident(3, None, 1));
    lru.link(RunId(3), RunId(1), 0);
    lru.admit(&resident(4, None, 1));
    assert_eq!(names(&lru.victims(1, NOBODY)), [(2, 0)]);
    assert_eq!(names(&lru.victims(6, NOBODY)), [(3, 0), (1, 0)]);
    lru.remove(RunId(4));
    assert!(lru.victims(1, NOBODY).is_empty());
}

#[derive(Clone, Debug)]
enum Action {
    Put { parent: Option<usize>, page: u32, pages: u32 },
    Link { child: usize, parent: usize, page: u32 },
    Hit(usize),
    Drop(usize),
    Cut { which: usize, pages: u32 },
    Pin(usize),
    Unpin(usize),
    Evict(u64),
}

fn actions(parents: bool) -> impl Strategy<Value = Vec<Action>> {
    let any = any::<usize>;
    let parent = prop_oneof![Just(None), any().prop_map(Some)]
        .prop_map(move |parent| parent.filter(|_| parents));
    let link = if parents { 2 } else { 0 };
    let action = prop_oneof![
        6 => (parent, 0..40u32, 1..40u32)
            .prop_map(|(parent, page, pages)| Action::Put { parent, page, pages }),
        1 + link => (any(), any(), 0..40u32)
            .prop_map(move |(child, parent, page)| if parents {
                Action::Link { child, parent, page }
            } else {
                Action::Hit(child)
            }),
        3 => any().prop_map(Action::Hit),
        1 => any().prop_map(Action::Drop),
        1 => (any(), 1..10u32).prop_map(|(which, pages)| Action::Cut { which, pages }),
        1 => any().prop_map(Action::Pin),
        1 => any().prop_map(Action::Unpin),
        3 => (1..400u64).prop_map(Action::Evict),
    ];
    prop::collection::vec(action, 1..150)
}

/// What an index would hold: closed under truncation.
#[derive(Default)]
struct Index {
    runs: BTreeMap<u64, (Option<(u64, u32)>, u32)>,
    /// By last use, oldest first.
    order: Vec<u64>,
    pinned: BTreeSet<u64>,
    next: u64,
}

impl Index {
    fn nth(&self, which: usize) -> Option<u64> {
        let count = self.runs.len().max(1);
        self.runs.keys().nth(which % count).copied()
    }

    fn path(&self, run: u64) -> Vec<u64> {
        let up = |run: &u64| self.runs[run].0.map(|(parent, _)| parent);
        let mut path: Vec<u64> = std::iter::successors(Some(run), up).collect();
        path.reverse();
        path
    }

    fn held(&self, run: u64) -> u32 {
        let hang = self.runs.values().filter_map(|(parent, _)| *parent);
        hang.filter(|(parent, _)| *parent == run).map(|(_, page)| page + 1).max().unwrap_or(0)
    }

    fn touch(&mut self, run: u64) {
        self.order.retain(|other| *other != run);
        self.order.push(run);
    }

    /// Truncates as the index does, and reports to the policy.
    fn truncate(&mut self, run: u64, keep: u32, lru: &mut Lru) {
        let Some((_, pages)) = self.runs.get_mut(&run) else { return };
        let gone = pages.saturating_sub(keep);
        *pages = (*pages).min(keep);
        let behind: Vec<u64> = self
            .runs
            .iter()
            .filter(|(_, (parent, _))| parent.is_some_and(|(up, page)| up == run && page >= keep))
            .map(|(child, _)| *child)
            .collect();
        if keep == 0 {
            self.runs.remove(&run);
            self.order.retain(|other| *other != run);
            self.pinned.remove(&run);
            lru.remove(RunId(run));
        } else if gone > 0 {
            lru.shrink(RunId(run), gone);
        }
        behind.into_iter().for_each(|child| self.truncate(child, 0, lru));
    }

    fn evict(&mut self, units: u64, lru: &mut Lru, exact: bool) {
        let pinned = self.pinned.clone();
        let victims = lru.victims(units, &|run: RunId| pinned.contains(&run.0));
        let mut freed = 0;
        for Victim { run, keep_pages, units: promised } in victims {
            assert!(!pinned.contains(&run.0), "a pinned run was chosen");
            let pages = self.runs[&run.0].1;
            assert!(keep_pages < pages);
            assert!(self.held(run.0) <= keep_pages, "a run went before what hangs from it");
            assert_eq!(
                promised,
                u64::from(pages - keep_pages) * 4 + u64::from(keep_pages == 0),
                "the victim frees what it says"
            );
            assert!(freed < units, "no more than it takes");
            if exact {
                let first = self.order.iter().find(|run| !pinned.contains(run));
                assert_eq!(first, Some(&run.0), "the one used longest ago goes first");
            }
            freed += promised;
            self.truncate(run.0, keep_pages, lru);
        }
        if freed < units {
            let cuttable = |run: &u64| !pinned.contains(run) && self.held(*run) < self.runs[run].1;
            assert!(!self.runs.keys().any(cuttable), "something could still have gone");
        }
    }
}

fn run(actions: Vec<Action>, exact: bool) {
    let (mut lru, mut index) = (Lru::with_chunk(20), Index::default());
    for action in actions {
        match action {
            Action::Put { parent, page, pages } => {
                let run = index.next;
                index.next += 1;
                let parent = parent.and_then(|which| index.nth(which));
                let parent = parent.map(|up| (up, page % index.runs[&up].1));
                index.runs.insert(run, (parent, pages));
                index.touch(run);
                lru.admit(&resident(run, parent, pages));
            }
            Action::Link { child, parent, page } => {
                if let (Some(child), Some(parent)) = (index.nth(child), index.nth(parent))
                    && index.runs[&child].0.is_none()
                    && !index.path(parent).contains(&child)
                {
                    let page = page % index.runs[&parent].1;
                    index.runs.get_mut(&child).unwrap().0 = Some((parent, page));
                    lru.link(RunId(child), RunId(parent), page);
                }
            }
            Action::Hit(which) => {
                let Some(run) = index.nth(which) else { continue };
                let path = index.path(run);
                path.iter().rev().for_each(|run| index.touch(*run));
                lru.hit(&path.into_iter().map(used).collect::<Vec<_>>());
            }
            Action::Drop(which) => {
                let Some(run) = index.nth(which) else { continue };
                index.truncate(run, 0, &mut lru);
            }
            Action::Cut { which, pages } => {
                let Some(run) = index.nth(which) else { continue };
                let keep = index.runs[&run].1.saturating_sub(pages);
                index.truncate(run, keep, &mut lru);
            }
            Action::Pin(which) => index.pinned.extend(index.nth(which)),
            Action::Unpin(which) => {
                let run = index.pinned.iter().nth(which % index.pinned.len().max(1)).copied();
                run.map(|run| index.pinned.remove(&run));
            }
            Action::Evict(units) => index.evict(units, &mut lru, exact),
        }
        assert_eq!(lru.len(), index.runs.len());
    }
    index.pinned.clear();
    index.evict(u64::MAX, &mut lru, exact);
    assert!(lru.is_empty() && index.runs.is_empty(), "everything can go when nothing is pinned");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn leaves_go_first_whatever_happens(actions in actions(true)) {
        run(actions, false);
    }

    #[test]
    fn runs_of_their_own_go_in_order_of_use(actions in actions(false)) {
        run(actions, true);
    }
}
