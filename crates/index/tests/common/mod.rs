//! Random operations on the `run` index and on `memory`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod recorder;

use proptest::prelude::*;
use ritornello_format::{PageHash, Result, ScopeSlot};
use ritornello_index::conformance::{Content, contents, page, place, sum};
use ritornello_index::{MemoryIndex, NewRun, PrefixIndex, RunId, RunIndex, RunOptions};
use ritornello_medium::{Medium, SimDisk};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Configuration of a random test: `PROPTEST_CASES` cases if this variable is set, else `count`.
pub fn cases(count: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_some() {
        config
    } else {
        ProptestConfig { cases: count, ..config }
    }
}

/// Number of scopes; scopes 0 and 1 are chained.
pub const SCOPES: u32 = 4;

/// A random operation. `pick` selects a run by its number in order of generation, modulo the number
/// of runs; without runs the operation does nothing.
#[derive(Clone, Debug)]
pub enum Op {
    /// Puts one run of the first `length` pages of a path, which [`key`] describes: the pages after
    /// the stored leading pages, up to the next stored page. A `skip` above 6 leaves out `skip` - 6
    /// pages, stored or not, before the run begins. Without `attach` the run names no parent.
    Put {
        scope: u32,
        path: u8,
        length: u8,
        attach: bool,
        skip: u8,
    },
    /// Calls [`PrefixIndex::link`] with page `at` of a path as the parent, and page `at` + 1 as the
    /// child.
    Link {
        scope: u32,
        path: u8,
        at: u8,
    },
    /// Truncates a run to `keep` pages, modulo one more than its number of pages.
    Truncate {
        pick: u8,
        keep: u8,
    },
    /// Removes the stored pages among `count` pages of a path, beginning with page `at`.
    Remove {
        scope: u32,
        path: u8,
        at: u8,
        count: u8,
    },
    DropScope {
        scope: u32,
    },
    /// Moves a run to a new place of equal size.
    Relocate {
        pick: u8,
    },
    Touch {
        pick: u8,
        recency: u8,
    },
    /// Retains a run until `until`, and passes the same number as the current value of the clock.
    Retain {
        pick: u8,
        until: u8,
    },
    Sync,
    Checkpoint,
    /// Syncs the index, and opens it again.
    Reopen,
    /// Loses power, and opens the index again. Tests that model no power loss skip this operation,
    /// or sync or reopen the index instead.
    Crash {
        seed: u64,
    },
}

pub fn op() -> impl Strategy<Value = Op> {
    let scope = 0..SCOPES;
    prop_oneof![
        12 => (scope.clone(), any::<u8>(), 1u8..24, any::<bool>(), 0u8..12)
            .prop_map(|(scope, path, length, attach, skip)| Op::Put { scope, path, length, attach, skip }),
        3 => (scope.clone(), any::<u8>(), 0u8..24).prop_map(|(scope, path, at)| Op::Link { scope, path, at }),
        4 => (any::<u8>(), 0u8..16).prop_map(|(pick, keep)| Op::Truncate { pick, keep }),
        4 => (scope.clone(), any::<u8>(), 0u8..24, 1u8..6)
            .prop_map(|(scope, path, at, count)| Op::Remove { scope, path, at, count }),
        1 => scope.prop_map(|scope| Op::DropScope { scope }),
        2 => any::<u8>().prop_map(|pick| Op::Relocate { pick }),
        3 => (any::<u8>(), any::<u8>()).prop_map(|(pick, recency)| Op::Touch { pick, recency }),
        3 => (any::<u8>(), 0u8..8).prop_map(|(pick, until)| Op::Retain { pick, until }),
        4 => Just(Op::Sync),
        2 => Just(Op::Checkpoint),
        2 => Just(Op::Reopen),
        2 => any::<u64>().prop_map(|seed| Op::Crash { seed }),
    ]
}

/// Returns page `at` of a path. The paths form a binary tree that branches at pages 3, 7, 12 and
/// 18. In unchained scopes every fifth page is the same on all paths. Every fourth page takes its
/// first eight bytes from its position alone, so paths share these bytes at equal positions.
pub fn key(scope: u32, path: u8, at: u64) -> PageHash {
    let taken = [3, 7, 12, 18].iter().filter(|branch| at >= **branch).count();
    let family = u64::from(path & ((1 << taken) - 1)) | (taken as u64) << 8 | 1 << 16;
    let mut hash = if scope >= 2 && at % 5 == 4 { page(1, at) } else { page(family, at) };
    if at % 4 == 1 {
        hash.0[..8].copy_from_slice(&page(2, at).0[..8]);
    }
    hash
}

pub fn keys(scope: u32, path: u8, length: u8) -> Vec<PageHash> {
    (0..u64::from(length)).map(|at| key(scope, path, at)).collect()
}

/// Returns the medium through which an index uses a simulated disk.
type MediumOver = Box<dyn Fn(&SimDisk) -> Arc<dyn Medium>>;

pub struct Pair {
    pub disk: SimDisk,
    medium: MediumOver,
    pub run: Arc<RunIndex>,
    memory: MemoryIndex,
    generation: u64,
    /// States that a crash may restore: all states since the last sync, oldest first.
    pub history: Vec<BTreeMap<u64, Content>>,
}

pub fn open(disk: &SimDisk) -> Arc<RunIndex> {
    open_through(Arc::new(disk.clone()))
}

/// Opens an index that writes its checkpoints run by run, so that a test can apply operations
/// between two writes of a checkpoint.
fn open_through(medium: Arc<dyn Medium>) -> Arc<RunIndex> {
    let options = RunOptions { checkpoint_write_bytes: 1, ..RunOptions::default() };
    Arc::new(RunIndex::open(medium, Path::new("/index"), options).unwrap())
}

/// Returns the contents without recency, because a crash may lose recency.
pub fn shape(contents: &BTreeMap<u64, Content>) -> BTreeMap<u64, Content> {
    let without = |(generation, content): (&u64, &Content)| {
        (*generation, Content { recency: 0, ..content.clone() })
    };
    contents.iter().map(without).collect()
}

impl Pair {
    pub fn new() -> Self {
        Self::on(SimDisk::new(1 << 30), |disk| Arc::new(disk.clone()))
    }

    /// Creates an empty pair: an index on `medium(disk)`, and a `MemoryIndex`.
    pub fn on(disk: SimDisk, medium: impl Fn(&SimDisk) -> Arc<dyn Medium> + 'static) -> Self {
        let run = open_through(medium(&disk));
        let memory = MemoryIndex::new();
        let medium = Box::new(medium);
        Self { disk, medium, run, memory, generation: 0, history: vec![BTreeMap::new()] }
    }

    /// Selects a run by `pick`. Returns its ids in `run` and in `memory`, and its number of pages;
    /// `None` if the indexes are empty.
    fn pick(&self, pick: u8) -> Option<(RunId, RunId, usize)> {
        let of = |index: &dyn PrefixIndex| {
            let mut runs = BTreeMap::new();
            index.for_each(&mut |run, view| {
                runs.insert(view.place.generation, (run, view.pages.len()));
            });
            runs
        };
        let (a, b) = (of(&*self.run), of(&self.memory));
        let (generation, &(run, pages)) = a.iter().nth(usize::from(pick) % a.len().max(1))?;
        Some((run, b[generation].0, pages))
    }

    fn put(&mut self, scope: u32, path: u8, length: u8, attach: bool, skip: u8) {
        let slot = ScopeSlot(scope);
        let keys = keys(scope, path, length);
        let from = self.memory.probe(slot, &keys);
        assert_eq!(self.run.probe(slot, &keys), from);
        let from = (from + usize::from(skip.saturating_sub(6))).min(keys.len());
        let missing =
            keys[from..].iter().take_while(|key| self.memory.locate(slot, **key).is_none()).count();
        let pages = &keys[from..from + missing];
        let mut parent = from.checked_sub(1).map(|at| keys[at]).filter(|_| attach);
        if scope < 2 {
            // An insert fails if its parent is not stored. A put that skips pages often has no
            // stored parent, and then names none.
            parent = parent.filter(|parent| self.memory.locate(slot, *parent).is_some());
        }
        self.generation += 1;
        let place = place(self.generation, pages.len() as u32);
        let new =
            NewRun { scope: slot, chained: scope < 2, parent, pages, place: &place, recency: 1 };
        let kind = |result: Result<RunId>| result.map(|_| ()).map_err(|error| error.kind());
        assert_eq!(kind(self.run.insert(&new)), kind(self.memory.insert(&new)), "{new:?}");
    }

    pub fn apply(&mut self, op: &Op) {
        match *op {
            Op::Put { scope, path, length, attach, skip } => {
                self.put(scope, path, length, attach, skip)
            }
            Op::Link { scope, path, at } => {
                let (parent, child) =
                    (key(scope, path, at.into()), key(scope, path, u64::from(at) + 1));
                self.run.link(ScopeSlot(scope), parent, child);
                self.memory.link(ScopeSlot(scope), parent, child);
            }
            Op::Truncate { pick, keep } => {
                let Some((a, b, pages)) = self.pick(pick) else { return };
                let keep = u32::from(keep) % (pages as u32 + 1);
                let (a, b) = (self.run.truncate(a, keep), self.memory.truncate(b, keep));
                compare_removed(&a, &b);
            }
            Op::Remove { scope, path, at, count } => {
                let pages: Vec<_> =
                    (at..at + count).map(|at| key(scope, path, at.into())).collect();
                let slot = ScopeSlot(scope);
                compare_removed(&self.run.remove(slot, &pages), &self.memory.remove(slot, &pages));
            }
            Op::DropScope { scope } => {
                let slot = ScopeSlot(scope);
                compare_removed(&self.run.drop_scope(slot), &self.memory.drop_scope(slot));
            }
            Op::Relocate { pick } => {
                let Some((a, b, pages)) = self.pick(pick) else { return };
                self.generation += 1;
                let place = place(self.generation, pages as u32);
                let (a, b) = (self.run.relocate(a, &place), self.memory.relocate(b, &place));
                compare_removed(&Vec::from_iter(a), &Vec::from_iter(b));
            }
            Op::Touch { pick, recency } => {
                let Some((a, b, _)) = self.pick(pick) else { return };
                self.run.touch(a, recency.into());
                self.memory.touch(b, recency.into());
            }
            Op::Retain { pick, until } => {
                let Some((a, b, _)) = self.pick(pick) else { return };
                self.run.retain(&[(a, until.into())], until.into());
                self.memory.retain(&[(b, until.into())], until.into());
            }
            Op::Sync => {
                self.run.sync().unwrap();
                assert_eq!(self.run.stats().pending_bytes, 0);
            }
            Op::Checkpoint => {
                self.run.checkpoint().unwrap();
                assert!(self.run.stats().files <= 5);
            }
            Op::Reopen => {
                self.run.sync().unwrap();
                self.run = open_through((self.medium)(&self.disk));
                assert_eq!(self.run.recovered().dropped_runs, 0);
                assert!(!self.run.recovered().damaged);
            }
            Op::Crash { seed } => self.crash(seed),
        }
    }

    fn crash(&mut self, seed: u64) {
        self.disk = self.disk.crash(seed);
        self.run = open_through((self.medium)(&self.disk));
        assert!(!self.run.recovered().damaged, "a crash is not damage");
        let now = shape(&contents(&*self.run));
        let found = self.history.iter().any(|then| shape(then) == now);
        assert!(
            found,
            "a crash must leave a state since the last sync, but left {now:#?}\n{:#?}",
            self.history
        );
        // Rebuild `memory` from the recovered state, without the runs that the crash lost.
        self.memory = MemoryIndex::new();
        let runs = contents(&*self.run);
        let mut left: Vec<&u64> = runs.keys().collect();
        while !left.is_empty() {
            let before = left.len();
            left.retain(|generation| {
                let run = &runs[generation];
                let parent = run.parent.map(|(parent, page)| runs[&parent].pages[page as usize]);
                if parent.is_some_and(|parent| self.memory.locate(run.scope, parent).is_none()) {
                    return true;
                }
                self.restore(run, parent);
                false
            });
            assert!(left.len() < before);
        }
    }

    fn restore(&self, run: &Content, parent: Option<PageHash>) {
        // A removed page has no hash. Insert the run with a substitute hash for each removed page,
        // and remove the substitutes after that.
        let filled: Vec<PageHash> = run
            .pages
            .iter()
            .enumerate()
            .map(|(at, hash)| if *hash == PageHash::NONE { page(99, at as u64) } else { *hash })
            .collect();
        let new = NewRun {
            scope: run.scope,
            chained: run.scope.0 < 2,
            parent,
            pages: &filled,
            place: &run.place,
            recency: run.recency,
        };
        self.memory.insert(&new).unwrap();
        let holes: Vec<PageHash> =
            filled.iter().zip(&run.pages).filter(|(a, b)| a != b).map(|(a, _)| *a).collect();
        self.memory.remove(run.scope, &holes);
        if let Some((name, _)) =
            run.pages.iter().find_map(|page| self.memory.locate(run.scope, *page))
        {
            self.memory.retain(&[(name, run.retain_until)], self.run.clock());
        }
    }

    /// Compares the contents of both indexes, and records the state that a crash may restore.
    pub fn check(&mut self, op: &Op) {
        let (run, memory) = (contents(&*self.run), contents(&self.memory));
        assert_eq!(run, memory);
        assert!(self.run.clock() >= run.values().map(|run| run.retain_until).max().unwrap_or(0));
        for scope in 0..SCOPES {
            for path in [0, 1, 5, 11, 255] {
                let keys = keys(scope, path, 24);
                for from in [0, 5] {
                    let slot = ScopeSlot(scope);
                    let keys = &&keys[from..];
                    let found = self.memory.probe(slot, keys);
                    assert_eq!(self.run.probe(slot, keys), found);
                    assert_eq!(self.run.exists(slot, keys), self.memory.exists(slot, keys));
                    let steps = |index: &dyn PrefixIndex| -> Vec<(u32, u32, u32)> {
                        let walk = index.walk(slot, keys);
                        walk.iter().map(|step| (step.first, step.pages, step.at)).collect()
                    };
                    assert_eq!(steps(&*self.run), steps(&self.memory));
                }
            }
        }
        if matches!(op, Op::Sync | Op::Checkpoint | Op::Reopen | Op::Crash { .. }) {
            self.history.clear();
        }
        self.history.push(run);
    }
}

fn compare_removed(run: &[ritornello_index::Removed], memory: &[ritornello_index::Removed]) {
    let (a, b) = (sum(run), sum(memory));
    assert_eq!((a.0, a.1, a.2.len()), (b.0, b.1, b.2.len()));
}
