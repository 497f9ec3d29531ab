//! Compares the index `art` with the index `memory`, across reopenings; and tests failures in the
//! middle of a batch, and damage.

use super::{ArtIndex, ArtOptions, ArtRecovered};
use crate::conformance::{Content, contents, page, pages, place, sum};
use crate::{MemoryIndex, NewRun, PrefixIndex, RunId};
use proptest::prelude::*;
use ritornello_format::{ErrorKind, Extent, PageHash, ScopeSlot};
use std::collections::BTreeMap;
use std::path::Path;

fn open(dir: &Path) -> ArtIndex {
    ArtIndex::open(dir, ArtOptions { cache_bytes: 8 << 20, ..ArtOptions::default() }).unwrap()
}

/// Inserts pages as one run. A scope with an even number is chained.
fn insert(
    index: &dyn PrefixIndex,
    scope: u32,
    parent: Option<PageHash>,
    pages: &[PageHash],
    generation: u64,
) -> ritornello_format::Result<RunId> {
    let place = place(generation, pages.len() as u32);
    let (scope, chained) = (ScopeSlot(scope), scope.is_multiple_of(2));
    index.insert(&NewRun { scope, chained, parent, pages, place: &place, recency: 1 })
}

/// A random operation on consecutive pages of a path, beginning with page `at`, or on the run that
/// [`Pair::pick`] selects. A put with `attach` names the page before page `at` as its parent.
#[derive(Clone, Debug)]
enum Op {
    Put { scope: u32, path: u64, at: u64, count: u64, attach: bool },
    Link { scope: u32, path: u64, at: u64 },
    Truncate { pick: usize, keep: u32 },
    Remove { scope: u32, path: u64, at: u64, count: u64 },
    DropScope(u32),
    Relocate(usize),
    Touch(usize, u64),
    Retain(usize, u64),
    Sync,
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    let (scope, path, at, pick) = (0..3u32, 0..6u64, 0..300u64, any::<usize>());
    prop_oneof![
        10 => (scope.clone(), path.clone(), at.clone(), 1..300u64, any::<bool>())
            .prop_map(|(scope, path, at, count, attach)| Op::Put { scope, path, at, count, attach }),
        2 => (scope.clone(), path.clone(), at.clone())
            .prop_map(|(scope, path, at)| Op::Link { scope, path, at }),
        4 => (pick, 0..300u32).prop_map(|(pick, keep)| Op::Truncate { pick, keep }),
        4 => (scope.clone(), path, at, 1..200u64)
            .prop_map(|(scope, path, at, count)| Op::Remove { scope, path, at, count }),
        1 => scope.prop_map(Op::DropScope),
        2 => pick.prop_map(Op::Relocate),
        2 => (pick, 0..50u64).prop_map(|(pick, recency)| Op::Touch(pick, recency)),
        2 => (pick, 0..5u64).prop_map(|(pick, until)| Op::Retain(pick, until)),
        1 => Just(Op::Sync),
        2 => Just(Op::Reopen),
    ]
}

/// Paths `2n` and `2n + 1` share their first 100 pages. All paths share their first 40 pages.
fn key(path: u64, at: u64) -> PageHash {
    page(
        if at < 40 {
            100
        } else if at < 100 {
            200 + path / 2
        } else {
            path
        },
        at,
    )
}

struct Pair {
    dir: tempfile::TempDir,
    art: Option<ArtIndex>,
    memory: MemoryIndex,
    generation: u64,
}

impl Pair {
    /// Returns a run that both indexes hold: its name in `art`, its name in `memory`, and its
    /// number of pages. `pick` selects the run among all runs in order of generation, modulo their
    /// number. Returns `None` if there is no run, or the selected run has no page left.
    fn pick(&self, pick: usize) -> Option<(RunId, RunId, u32)> {
        let mut runs = Vec::new();
        self.memory.for_each(&mut |run, view| runs.push((view.place.generation, run, view)));
        runs.sort_by_key(|(generation, _, _)| *generation);
        let (_, run, view) = runs.get(pick % runs.len().max(1))?;
        let at = view.pages.iter().position(|page| *page != PageHash::NONE)?;
        let (twin, _) = self.art.as_ref()?.locate(view.scope, view.pages[at])?;
        Some((twin, *run, view.pages.len() as u32))
    }

    fn apply(&mut self, op: &Op) {
        let Some(art) = &self.art else { panic!("the index is closed") };
        let memory = &self.memory;
        let same = |a: &[crate::Removed], b: &[crate::Removed]| {
            let (a, b) = (sum(a), sum(b));
            assert_eq!((a.0, a.1, a.2.len()), (b.0, b.1, b.2.len()));
        };
        match *op {
            Op::Put { scope, path, at, count, attach } => {
                let pages: Vec<_> = (at..at + count).map(|at| key(path, at)).collect();
                let parent = (attach && at > 0).then(|| key(path, at - 1));
                self.generation += 1;
                let of = |index| insert(index, scope, parent, &pages, self.generation);
                let kind = |error: ritornello_format::Error| error.kind();
                assert_eq!(of(art).map(drop).map_err(kind), of(memory).map(drop).map_err(kind));
            }
            Op::Link { scope, path, at } => {
                for index in [art as &dyn PrefixIndex, memory] {
                    index.link(ScopeSlot(scope), key(path, at), key(path, at + 1));
                }
            }
            Op::Truncate { pick, keep } => {
                let Some((a, b, pages)) = self.pick(pick) else { return };
                same(&art.truncate(a, keep % pages), &memory.truncate(b, keep % pages));
            }
            Op::Remove { scope, path, at, count } => {
                let pages: Vec<_> = (at..at + count).map(|at| key(path, at)).collect();
                let slot = ScopeSlot(scope);
                same(&art.remove(slot, &pages), &memory.remove(slot, &pages));
            }
            Op::DropScope(scope) => {
                let slot = ScopeSlot(scope);
                same(&art.drop_scope(slot), &memory.drop_scope(slot));
            }
            Op::Relocate(pick) => {
                let Some((a, b, pages)) = self.pick(pick) else { return };
                self.generation += 1;
                let place = place(self.generation, pages);
                let (a, b) = (art.relocate(a, &place), memory.relocate(b, &place));
                same(&Vec::from_iter(a), &Vec::from_iter(b));
            }
            Op::Touch(pick, recency) => {
                let Some((a, b, _)) = self.pick(pick) else { return };
                art.touch(a, recency);
                memory.touch(b, recency);
            }
            Op::Retain(pick, until) => {
                let Some((a, b, _)) = self.pick(pick) else { return };
                art.retain(&[(a, until)], until);
                memory.retain(&[(b, until)], until);
            }
            Op::Sync => art.sync().unwrap(),
            Op::Reopen => {
                art.sync().unwrap();
                self.art = None;
                let art = open(self.dir.path());
                assert_eq!(art.recovered(), ArtRecovered::default());
                self.art = Some(art);
            }
        }
    }

    fn check(&self) {
        let Some(art) = &self.art else { panic!("the index is closed") };
        assert_eq!(contents(art), contents(&self.memory));
        assert_eq!(art.clock(), self.memory.clock());
        for (scope, path, from) in [(0, 0, 0), (0, 1, 30), (1, 2, 0), (2, 5, 90)] {
            let keys: Vec<_> = (from..600).map(|at| key(path, at)).collect();
            let slot = ScopeSlot(scope);
            let steps = |index: &dyn PrefixIndex| -> Vec<(u32, u32, u32)> {
                index.walk(slot, &keys).iter().map(|s| (s.first, s.pages, s.at)).collect()
            };
            assert_eq!(steps(art), steps(&self.memory));
            for method in art.probe_methods() {
                let found = art.probe_by(method, slot, &keys);
                assert_eq!(found, self.memory.probe(slot, &keys), "{method}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn art_matches_memory_backend(ops in prop::collection::vec(op(), 1..40)) {
        let dir = tempfile::tempdir().unwrap();
        let art = Some(open(dir.path()));
        let mut pair = Pair { dir, art, memory: MemoryIndex::new(), generation: 0 };
        for op in &ops {
            pair.apply(op);
            pair.check();
        }
    }
}

#[test]
fn insert_failing_midway_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    let trunk = pages(1, 50);
    insert(&index, 2, None, &trunk, 1).unwrap();
    let before = contents(&index);
    // The first batch of the insert fails after its first `after` changes.
    for (count, after) in [(1, 0), (1, 2), (40, 41), (900, 3), (3000, 900)] {
        let more = pages(2, count);
        *index.tree.fail_after.lock() = Some(after);
        let error = insert(&index, 2, trunk.last().copied(), &more, 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
        assert!(error.to_string().contains("remove pages"), "the error must give advice: {error}");
        assert_eq!(contents(&index), before);
        assert!(index.tree.scan(b"p").count() == 1, "only the chunk of the first run is left");
        assert_eq!(index.tree.scan(b"h").count(), 50);
        // `fail_after` affects one batch, so the same insert succeeds now.
        let run = insert(&index, 2, trunk.last().copied(), &more, 2).unwrap();
        assert_eq!(index.truncate(run, 0).len(), 1);
    }
    drop(index);
    assert_eq!(contents(&open(dir.path())), before);
}

#[test]
fn run_with_too_many_extents_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    insert(&index, 2, None, &pages(1, 5), 1).unwrap();
    let before = contents(&index);
    // The place has one extent for the header and one for each page: more than 64 KiB of extents.
    let keys = pages(2, 6000);
    let mut scattered = place(2, 6000);
    let segment = scattered.extents[0].segment;
    let piece = |at: u32, units: u32| Extent { segment, start: at * 3, units };
    scattered.extents =
        std::iter::once(piece(0, 1)).chain((1..=6000).map(|at| piece(at, 2))).collect();
    let (scope, pages) = (ScopeSlot(2), &keys[..]);
    let new = NewRun { scope, chained: true, parent: None, pages, place: &scattered, recency: 1 };
    let memory = MemoryIndex::new();
    memory.insert(&new).unwrap();
    let error = index.insert(&new).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("64 KiB"), "{error}");
    assert_eq!(contents(&index), before);
    let run = insert(&index, 2, None, &keys, 2).unwrap();
    let before = contents(&index);
    assert!(index.relocate(run, &scattered).is_none());
    assert_eq!(contents(&index), before);
}

#[test]
fn crash_remains_of_a_long_run_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    insert(&index, 2, None, &pages(1, 5), 1).unwrap();
    let long = insert(&index, 2, None, &pages(2, 1000), 2).unwrap();
    let behind = insert(&index, 2, Some(page(2, 700)), &pages(3, 5), 3).unwrap();
    // Deletes the record of the run, as if the process had died before it wrote the record.
    let mut batch = super::tree::Batch::default();
    batch.delete(&super::key::run(long));
    index.apply(&batch).unwrap();
    assert_eq!(
        index.locate(ScopeSlot(2), page(2, 3)),
        None,
        "a run without a record does not exist"
    );
    index.sync().unwrap();
    drop(index);
    let index = open(dir.path());
    assert_eq!(index.recovered().leftover_keys, 8);
    assert_eq!(index.recovered().dropped_runs, 1, "only the child {behind:?} is dropped");
    assert_eq!(contents(&index).len(), 1);
    assert_eq!(index.tree.scan(b"h").count(), 5);
    assert!(!index.tree.any(super::key::CHILDREN).unwrap());
    insert(&index, 2, None, &pages(2, 1000), 4).unwrap();
    index.sync().unwrap();
    drop(index);
    assert_eq!(open(dir.path()).recovered(), ArtRecovered::default());
}

#[test]
fn removal_failing_midway_poisons_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    let run = insert(&index, 2, None, &pages(1, 50), 1).unwrap();
    *index.tree.fail_after.lock() = Some(10);
    assert!(index.truncate(run, 0).is_empty());
    let error = insert(&index, 2, None, &pages(2, 5), 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fatal, "{error}");
    assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal);
    assert_eq!(index.probe(ScopeSlot(2), &pages(1, 50)), 0, "an incomplete run does not exist");
    drop(index);
    let index = open(dir.path());
    assert!(contents(&index).is_empty());
    insert(&index, 2, None, &pages(1, 50), 3).unwrap();
}

#[test]
fn durable_index_needs_no_sync() {
    let dir = tempfile::tempdir().unwrap();
    let copy = tempfile::tempdir().unwrap();
    let options = ArtOptions { durable: true, ..ArtOptions::default() };
    let index = ArtIndex::open(dir.path(), options).unwrap();
    insert(&index, 2, None, &pages(1, 50), 1).unwrap();
    // Copy the files while the index is open, as a kill would leave them.
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    assert_eq!(contents(&open(copy.path())), contents(&index));
    assert_eq!(index.stats().checkpoints, 0);
}

/// Checks that every recovered run existed before the damage with the same pages and place, and
/// that its parent exists.
fn assert_intact(index: &ArtIndex, before: &BTreeMap<u64, Content>) {
    let mut views = BTreeMap::new();
    index.for_each(&mut |run, view| drop(views.insert(run, view)));
    for view in views.values() {
        let then = before
            .get(&view.place.generation)
            .unwrap_or_else(|| panic!("found a run that was never inserted"));
        assert_eq!((view.scope, &view.pages, &view.place), (then.scope, &then.pages, &then.place));
        assert!(
            view.parent.is_none_or(|(parent, _)| views.contains_key(&parent)),
            "the parent of a run is missing"
        );
    }
    for content in before.values() {
        for (at, hash) in content.pages.iter().enumerate() {
            if let Some((run, number)) = index.locate(content.scope, *hash) {
                assert_eq!((number as usize, &views[&run].place), (at, &content.place));
            }
        }
    }
}

#[test]
fn damage_only_causes_misses_or_dropped_runs() {
    let source = tempfile::tempdir().unwrap();
    let index = open(source.path());
    let mut parent = None;
    for family in 0..200 {
        let keys = pages(family, 1 + family % 40);
        insert(&index, 2, parent, &keys, family + 1).unwrap();
        parent = keys.last().copied().filter(|_| family % 5 != 0);
        if family == 150 {
            index.sync().unwrap();
        }
    }
    let before = contents(&index);
    drop(index);
    let mut lost = 0;
    for seed in 0..60u64 {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(source.path()).unwrap() {
            let entry = entry.unwrap();
            let mut bytes = std::fs::read(entry.path()).unwrap();
            let random =
                crate::synthetic::mix(seed << 8 | u64::from(entry.file_name().len() as u8));
            // Damage only the part of the file up to its last byte that is not zero: the files are
            // preallocated.
            let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            if used > 0 && seed % 4 != 3 {
                bytes[random as usize % used] ^= 1 << (random >> 32 & 7);
            } else if random.is_multiple_of(2) {
                bytes.truncate(random as usize % (used + 1));
            }
            std::fs::write(dir.path().join(entry.file_name()), bytes).unwrap();
        }
        let index = open(dir.path());
        assert_intact(&index, &before);
        // If recovery reports no damage, only the newest unsynced changes may be missing.
        let runs = index.stats().runs;
        if index.recovered() == ArtRecovered::default() {
            assert!(runs > 150, "only {runs} of 200 runs, but no damage is reported");
            assert_eq!(contents(&index).last_key_value().map(|(last, _)| *last), Some(runs));
        } else {
            lost += 1;
        }
        insert(&index, 4, None, &pages(900, 20), 9000).unwrap();
        assert_eq!(index.probe(ScopeSlot(4), &pages(900, 20)), 20);
    }
    assert!(lost > 0, "recovery must report damage for some seeds");
}
