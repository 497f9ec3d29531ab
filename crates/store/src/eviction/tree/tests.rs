//! Splitting and merging the pieces of runs, and the victims among them.

use super::super::lru::Lru;
use super::super::{EvictionContext, Victim};
use super::*;
use std::cell::Cell;

#[test]
fn pieces_used_together_are_merged() {
    let mut tree = Tree::new(Box::new(Lru::new()), 1);
    let run = RunId(1);
    let resident =
        Resident { run, key: 1, parent: None, pages: 40, page_units: 4, header_units: 1 };
    tree.admit(&resident);
    let mut pieces_after = |pages| {
        tree.hit(&[Used { run, pages }]);
        tree.pieces.len()
    };
    assert_eq!([10, 20, 40, 40].map(&mut pieces_after), [2, 3, 2, 1]);
    assert_eq!((tree.units, tree.pages), (161, 40));
}

#[test]
fn runs_split_at_children_and_rarely_at_uses() {
    let mut tree = Tree::new(Box::new(Lru::new()), 1);
    let resident = |run, parent, pages| Resident {
        run: RunId(run),
        key: run,
        parent,
        pages,
        page_units: 4,
        header_units: 1,
    };
    tree.admit(&resident(1, None, 10_000));
    (2..102).for_each(|run| tree.admit(&resident(run, Some((RunId(1), run as u32)), 1)));
    assert_eq!(tree.pieces.len(), 201);
    for pages in (200..9000).rev() {
        tree.hit(&[Used { run: RunId(1), pages }]);
    }
    assert!(tree.pieces.len() <= 2 * tree.len() + SPLITS_SPARE);
    tree.remove(RunId(1));
    assert_eq!((tree.len(), tree.pages()), (100, 100));
    (2..102).for_each(|run| tree.remove(RunId(run)));
    assert_eq!((tree.pieces.len(), tree.units), (0, 0));
}

#[test]
fn child_admitted_before_its_parent_is_evicted_first() {
    let mut tree = Tree::new(Box::new(Lru::new()), 1);
    let resident = |run, parent| Resident {
        run: RunId(run),
        key: run,
        parent,
        pages: 2,
        page_units: 4,
        header_units: 0,
    };
    tree.admit(&resident(2, Some((RunId(1), 0))));
    tree.admit(&resident(3, Some((RunId(1), 1))));
    tree.remove(RunId(3));
    tree.admit(&resident(1, None));
    let unprotected: &dyn EvictionContext = &(|_: RunId| false);
    let names = |victim: &Victim| (victim.run.0, victim.keep_pages);
    assert_eq!(tree.victims(4, unprotected).iter().map(names).collect::<Vec<_>>(), [(2, 1)]);
    assert_eq!(
        tree.victims(12, unprotected).iter().map(names).collect::<Vec<_>>(),
        [(2, 0), (1, 1), (1, 0)]
    );
    assert!(tree.orphans.is_empty());
}

/// Protects the runs whose ids are below the first number. The second number counts the queries.
struct ProtectedBefore(Cell<u64>, Cell<u64>);

impl EvictionContext for ProtectedBefore {
    fn is_protected(&self, run: RunId) -> bool {
        self.1.update(|queries| queries + 1);
        run.0 < self.0.get()
    }
    fn page_key(&self, run: RunId, _: u32) -> u64 {
        run.0
    }
}

#[test]
fn later_evictions_examine_few_protected_pieces() {
    const PROTECTED: u64 = 10_000;
    let mut tree = Tree::new(Box::new(Lru::new()), 1);
    for run in 0..PROTECTED + 20 {
        let run = RunId(run);
        let resident =
            Resident { run, key: run.0, parent: None, pages: 1, page_units: 4, header_units: 0 };
        tree.admit(&resident);
    }
    let context = ProtectedBefore(Cell::new(PROTECTED), Cell::new(0));
    let mut next = |context: &ProtectedBefore| {
        context.1.set(0);
        let victims = tree.victims(4, context);
        (victims.first().map(|victim| victim.run.0), context.1.get())
    };
    assert_eq!(next(&context).0, Some(PROTECTED), "the victim follows all protected runs");
    for run in PROTECTED + 1..PROTECTED + 20 {
        let (victim, queries) = next(&context);
        assert_eq!(victim, Some(run));
        assert!(queries < 200, "{queries} queries");
    }
    let (victim, queries) = next(&context);
    assert_eq!(victim, None, "all remaining runs are protected");
    assert!(queries < PROTECTED, "{queries} queries");
    context.0.set(0);
    let mut evicted: Vec<u64> = std::iter::from_fn(|| next(&context).0).collect();
    assert_eq!(evicted.len() as u64, PROTECTED);
    evicted.sort_unstable();
    evicted.dedup();
    assert_eq!(evicted.len() as u64, PROTECTED, "each run is evicted once");
}
