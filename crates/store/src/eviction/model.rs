//! Compares the victims of LRU with a plain list of pages by last use, and checks invariants that
//! every policy keeps.

use super::adaptive::Adaptive;
use super::arc::AdaptiveReplacement;
use super::density::Density;
use super::eviction_policy::EvictionPolicy;
use super::fixed::FixedPolicy;
use super::lru::Lru;
use super::s3fifo::S3Fifo;
use super::tree::Tree;
use super::two_q::TwoQ;
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

impl<F: Fn(RunId) -> bool> EvictionContext for F {
    fn is_protected(&self, run: RunId) -> bool {
        self(run)
    }
    fn page_key(&self, run: RunId, page: u32) -> u64 {
        (run.0 << 32) | u64::from(page)
    }
}

fn used(run: u64, pages: u32) -> Used {
    Used { run: RunId(run), pages }
}

const UNPROTECTED: &dyn EvictionContext = &(|_: RunId| false);

fn lru(chunk_units: u32) -> FixedPolicy {
    FixedPolicy::with_chunk(Box::new(Lru::new()), chunk_units)
}

fn fixed_policies() -> [Box<dyn EvictionPolicy>; 5] {
    [
        Box::new(Lru::new()),
        Box::new(AdaptiveReplacement::new()),
        Box::new(TwoQ::new()),
        Box::new(S3Fifo::new()),
        Box::new(Density::new()),
    ]
}

/// Every policy, with runs cut in chunks of `chunk_units`.
fn policies(chunk_units: u32) -> Vec<Box<dyn Eviction>> {
    let single =
        |policy| Box::new(FixedPolicy::with_chunk(policy, chunk_units)) as Box<dyn Eviction>;
    let adaptive = Box::new(Adaptive::with_chunk(chunk_units)) as Box<dyn Eviction>;
    fixed_policies().into_iter().map(single).chain([adaptive]).collect()
}

#[test]
fn long_runs_lose_their_tail_in_chunks() {
    let mut lru = lru(16);
    lru.admit(&resident(1, None, 100));
    lru.admit(&resident(2, None, 100));
    assert_eq!(names(&lru.victims(1, UNPROTECTED)), [(1, 96)]);
    lru.shrink(RunId(1), 4);
    assert_eq!(names(&lru.victims(17, UNPROTECTED)), [(1, 88)]);
    lru.shrink(RunId(1), 8);
    let victims = lru.victims(360, UNPROTECTED);
    assert_eq!(names(&victims), [(1, 0), (2, 96)]);
    assert_eq!(victims[0].units, 88 * 4 + 1);
    assert_eq!(lru.len(), 1);
}

#[test]
fn shared_prompt_is_evicted_after_its_tails() {
    let mut lru = lru(4);
    lru.admit(&resident(1, None, 10));
    lru.admit(&resident(2, Some((1, 2)), 5));
    lru.hit(&[used(1, 10), used(2, 5)]);
    // Run 2 is evicted before run 1, its parent, although one request used both.
    assert_eq!(names(&lru.victims(20, UNPROTECTED)), [(2, 0)]);
    lru.admit(&resident(3, Some((1, 2)), 5));
    assert_eq!(names(&lru.victims(1000, &|run: RunId| run == RunId(3))), [(1, 3)]);
    assert_eq!(names(&lru.victims(1000, UNPROTECTED)), [(3, 0), (1, 0)]);
    assert!(lru.is_empty());
}

#[test]
fn parent_is_evicted_after_its_last_child() {
    let mut lru = lru(4);
    lru.admit(&resident(1, None, 1));
    lru.admit(&resident(2, None, 1));
    lru.admit(&resident(3, None, 1));
    lru.link(RunId(3), RunId(1), 0);
    lru.admit(&resident(4, None, 1));
    assert_eq!(names(&lru.victims(1, UNPROTECTED)), [(2, 0)]);
    assert_eq!(names(&lru.victims(6, UNPROTECTED)), [(3, 0), (1, 0)]);
    lru.remove(RunId(4));
    assert!(lru.victims(1, UNPROTECTED).is_empty());
}

#[test]
fn unused_pages_are_evicted_before_used_head() {
    // The test omits 2Q, whose queue does not reorder used pages. The test omits `density` too,
    // which has to learn from more uses, and `adaptive`, which begins with `density`.
    let those = ["lru", "arc", "s3fifo"];
    for mut policy in policies(4).into_iter().filter(|policy| those.contains(&policy.name())) {
        policy.admit(&resident(1, None, 40));
        policy.admit(&resident(2, None, 40));
        policy.hit(&[used(1, 10)]);
        policy.hit(&[used(1, 10)]);
        // Request fewer units than the 70 unused pages have, so that no policy may choose a used
        // page.
        let victims = policy.victims(4 * 60, UNPROTECTED);
        let kept: u32 =
            victims.iter().filter(|v| v.run == RunId(1)).map(|v| v.keep_pages).min().unwrap_or(40);
        assert!(kept >= 10, "{}: {victims:?}", policy.name());
    }
}

/// Returns the hits of 100 passes over 400 one-page sequences in a store of 200 pages.
fn hits_of_a_loop(policy: &mut dyn Eviction) -> u32 {
    const FITS: usize = 200;
    let (mut there, mut next, mut hits) = (BTreeMap::new(), 0, 0);
    for key in (0..100).flat_map(|_| 0..400u64) {
        let page = || [(key << 40) | 1].into_iter();
        if let Some(&run) = there.get(&key) {
            hits += 1;
            policy.hit(&[used(run, 1)]);
            policy.demanded(Demand::Read, None, &mut page());
            continue;
        }
        policy.demanded(Demand::Write, None, &mut page());
        if there.len() == FITS {
            for victim in policy.victims(1, UNPROTECTED) {
                there.retain(|_, run| *run != victim.run.0);
                policy.remove(victim.run);
            }
        }
        next += 1;
        there.insert(key, next);
        policy.admit(&Resident { key: (key << 40) | 1, ..resident(next, None, 1) });
    }
    hits
}

#[test]
fn part_of_a_loop_longer_than_the_store_is_kept() {
    assert_eq!(hits_of_a_loop(&mut lru(1)), 0);
    for policy in [PolicyKind::Density, PolicyKind::Adaptive] {
        let mut policy = policy.build();
        let hits = hits_of_a_loop(policy.as_mut());
        assert!(hits > 10_000, "{}: {hits} of 40,000", policy.name());
        let measured = policy.measured();
        let by_name = |name| measured.shadows.iter().find(|shadow| shadow.name == name);
        if let (Some(lru), Some(density)) = (by_name("lru"), by_name("density")) {
            assert!(density.hits > 4 * lru.hits && density.requested == lru.requested);
            assert_eq!(measured.following, "density");
        }
    }
}

/// An action. `which`, `parent`, `child` and the numbers of `Drop`, `Protect` and `Unprotect`
/// select a run; `Evict` has a number of units.
#[derive(Clone, Debug)]
enum Action {
    Put { parent: Option<usize>, page: u32, pages: u32 },
    Link { child: usize, parent: usize, page: u32 },
    Hit { which: usize, pages: u32 },
    Drop(usize),
    Cut { which: usize, pages: u32 },
    Protect(usize),
    Unprotect(usize),
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
                Action::Hit { which: child, pages: page + 1 }
            }),
        3 => (any(), 1..40u32).prop_map(|(which, pages)| Action::Hit { which, pages }),
        1 => any().prop_map(Action::Drop),
        1 => (any(), 1..10u32).prop_map(|(which, pages)| Action::Cut { which, pages }),
        1 => any().prop_map(Action::Protect),
        1 => any().prop_map(Action::Unprotect),
        3 => (1..400u64).prop_map(Action::Evict),
    ];
    prop::collection::vec(action, 1..150)
}

/// A model of the index. If it removes a page, it also removes the runs that follow the page.
#[derive(Default)]
struct Index {
    runs: BTreeMap<u64, (Option<(u64, u32)>, u32)>,
    /// Pages by last use, oldest first.
    by_last_use: Vec<(u64, u32)>,
    protected: BTreeSet<u64>,
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

    /// Number of leading pages of `run` up to the last page that another run follows.
    fn held(&self, run: u64) -> u32 {
        let hang = self.runs.values().filter_map(|(parent, _)| *parent);
        hang.filter(|(parent, _)| *parent == run).map(|(_, page)| page + 1).max().unwrap_or(0)
    }

    /// Makes the first `pages` pages of `run` the most recently used of all pages, and page 0 the
    /// most recently used of them.
    fn touch(&mut self, run: u64, pages: u32) {
        let pages = pages.min(self.runs[&run].1);
        self.by_last_use.retain(|(other, page)| *other != run || *page >= pages);
        self.by_last_use.extend((0..pages).rev().map(|page| (run, page)));
    }

    /// Removes the pages of `run` from page `keep`, and all runs that follow them. Reports the
    /// removals to the policy.
    fn truncate(&mut self, run: u64, keep: u32, policy: &mut dyn Eviction) {
        let Some((_, pages)) = self.runs.get_mut(&run) else { return };
        let removed = pages.saturating_sub(keep);
        *pages = (*pages).min(keep);
        self.by_last_use.retain(|(other, page)| *other != run || *page < keep);
        let behind: Vec<u64> = self
            .runs
            .iter()
            .filter(|(_, (parent, _))| parent.is_some_and(|(up, page)| up == run && page >= keep))
            .map(|(child, _)| *child)
            .collect();
        if keep == 0 {
            self.runs.remove(&run);
            self.protected.remove(&run);
            policy.remove(RunId(run));
        } else if removed > 0 {
            policy.shrink(RunId(run), removed);
        }
        behind.into_iter().for_each(|child| self.truncate(child, 0, policy));
    }

    /// Evicts at least `units` units, if unprotected runs have as many, and checks the victims.
    /// With `exact`, checks that they are the least recently used pages.
    fn evict(&mut self, units: u64, policy: &mut dyn Eviction, exact: bool) {
        let protected = self.protected.clone();
        let victims = policy.victims(units, &|run: RunId| protected.contains(&run.0));
        let mut freed = 0;
        for Victim { run, keep_pages, units: promised } in victims {
            assert!(!protected.contains(&run.0), "a protected run must not be chosen");
            let pages = self.runs[&run.0].1;
            assert!(keep_pages < pages);
            assert!(self.held(run.0) <= keep_pages, "a run was evicted before its descendants");
            assert_eq!(
                promised,
                u64::from(pages - keep_pages) * 4 + u64::from(keep_pages == 0),
                "a victim must free its announced units"
            );
            assert!(freed < units, "a victim was chosen beyond the requested units");
            if exact {
                let free = self.by_last_use.iter().filter(|(run, _)| !protected.contains(run));
                let oldest: Vec<_> = free.take((pages - keep_pages) as usize).copied().collect();
                let evicted: Vec<_> = (keep_pages..pages).rev().map(|page| (run.0, page)).collect();
                assert_eq!(evicted, oldest, "the least recently used pages must go first");
            }
            freed += promised;
            self.truncate(run.0, keep_pages, policy);
        }
        if freed < units {
            let cuttable =
                |run: &u64| !protected.contains(run) && self.held(*run) < self.runs[run].1;
            assert!(
                !self.runs.keys().any(cuttable),
                "an unprotected run still had a page that could be evicted"
            );
        }
    }
}

/// Applies `actions` to a policy and to the model. `exact`: see [`Index::evict`].
fn run(actions: &[Action], policy: &mut dyn Eviction, exact: bool) {
    let mut index = Index::default();
    for action in actions {
        match action.clone() {
            Action::Put { parent, page, pages } => {
                let run = index.next;
                index.next += 1;
                let parent = parent.and_then(|which| index.nth(which));
                let parent = parent.map(|up| (up, page % index.runs[&up].1));
                index.runs.insert(run, (parent, pages));
                index.touch(run, pages);
                policy.admit(&resident(run, parent, pages));
            }
            Action::Link { child, parent, page } => {
                if let (Some(child), Some(parent)) = (index.nth(child), index.nth(parent))
                    && index.runs[&child].0.is_none()
                    && !index.path(parent).contains(&child)
                {
                    let page = page % index.runs[&parent].1;
                    index.runs.get_mut(&child).unwrap().0 = Some((parent, page));
                    policy.link(RunId(child), RunId(parent), page);
                }
            }
            Action::Hit { which, pages } => {
                let Some(run) = index.nth(which) else { continue };
                let path = index.path(run);
                let hit = |at: usize| match path.get(at + 1) {
                    Some(next) => index.runs[next].0.map_or(0, |(_, page)| page + 1),
                    None => pages,
                };
                let path: Vec<Used> = (0..path.len()).map(|at| used(path[at], hit(at))).collect();
                path.iter().rev().for_each(|used| index.touch(used.run.0, used.pages));
                policy.hit(&path);
                let mut keys = path.iter().map(|used| used.run.0);
                policy.demanded(Demand::Read, None, &mut keys);
            }
            Action::Drop(which) => {
                let Some(run) = index.nth(which) else { continue };
                index.truncate(run, 0, policy);
            }
            Action::Cut { which, pages } => {
                let Some(run) = index.nth(which) else { continue };
                let keep = index.runs[&run].1.saturating_sub(pages);
                index.truncate(run, keep, policy);
            }
            Action::Protect(which) => index.protected.extend(index.nth(which)),
            Action::Unprotect(which) => {
                let run = index.protected.iter().nth(which % index.protected.len().max(1)).copied();
                run.map(|run| index.protected.remove(&run));
            }
            Action::Evict(units) => index.evict(units, policy, exact),
        }
        assert_eq!(policy.len(), index.runs.len());
    }
    index.protected.clear();
    index.evict(u64::MAX, policy, exact);
    assert!(
        policy.is_empty() && index.runs.is_empty(),
        "if no run is protected, all runs must be evicted"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn leaves_are_evicted_first(actions in actions(true), chunk in 1..40u32) {
        for mut policy in policies(chunk) {
            run(&actions, policy.as_mut(), false);
        }
    }

    #[test]
    fn pages_are_evicted_in_order_of_use(actions in actions(false)) {
        run(&actions, &mut lru(1), true);
    }

    /// The tree begins to switch to another policy as soon as the previous switch has ended.
    #[test]
    fn switching_policies_loses_no_piece(actions in actions(true)) {
        let tree = Tree::new(Box::new(Lru::new()), 8);
        run(&actions, &mut SwitchingPolicies { tree, switches: 0 }, false);
    }
}

/// Switches to another policy whenever no switch is in progress.
#[derive(Debug)]
struct SwitchingPolicies {
    tree: Tree,
    switches: usize,
}

impl SwitchingPolicies {
    fn switch(&mut self) {
        if !self.tree.is_moving() {
            self.switches += 1;
            let policy = fixed_policies().into_iter().nth(self.switches % 5).unwrap();
            self.tree.follow(policy);
        }
    }
}

impl Eviction for SwitchingPolicies {
    fn name(&self) -> &'static str {
        "restless"
    }
    fn admit(&mut self, resident: &Resident) {
        self.switch();
        self.tree.admit(resident);
    }
    fn link(&mut self, run: RunId, parent: RunId, page: u32) {
        self.tree.link(run, parent, page);
    }
    fn hit(&mut self, path: &[Used]) {
        self.switch();
        self.tree.hit(path);
    }
    fn shrink(&mut self, run: RunId, pages: u32) {
        self.tree.shrink(run, pages);
    }
    fn remove(&mut self, run: RunId) {
        self.tree.remove(run);
    }
    fn victims(&mut self, units: u64, context: &dyn EvictionContext) -> Vec<Victim> {
        self.switch();
        self.tree.victims(units, context)
    }
    fn len(&self) -> usize {
        self.tree.len()
    }
}
