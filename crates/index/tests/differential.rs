//! Compares all backends under the same random operations and after reopening: `memory`, `run`,
//! `art`, and `lsm` where it is compiled in.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "shared with other tests")]

mod common;

use common::{Op, SCOPES, key, keys, op};
use proptest::prelude::*;
use ritornello_format::{PageHash, ScopeSlot};
use ritornello_index::conformance::{Content, contents, place, sum};
use ritornello_index::{
    ArtIndex, ArtOptions, MatchedRun, MemoryIndex, NewRun, PrefixIndex, Removed, RunId, RunIndex,
};
use ritornello_medium::SimDisk;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

struct All {
    dir: tempfile::TempDir,
    disk: SimDisk,
    memory: MemoryIndex,
    run: std::sync::Arc<RunIndex>,
    /// The backends that keep their files on the host's file system instead of on `disk`. To reopen
    /// them, the test drops them first, because a directory cannot be open twice in a process.
    others: Vec<Box<dyn PrefixIndex>>,
    generation: u64,
    opened: u32,
}

/// Opens the backends that keep their files in `dir`. `opened` is the number of earlier calls, by
/// which `lsm` alternates between its two probe methods.
fn open_others(dir: &Path, opened: u32) -> Vec<Box<dyn PrefixIndex>> {
    let options = ArtOptions { cache_bytes: 8 << 20, ..ArtOptions::default() };
    let art = ArtIndex::open(&dir.join("art"), options).unwrap();
    assert_eq!(art.recovered(), Default::default(), "opened {opened} times");
    vec![
        Box::new(art),
        #[cfg(feature = "lsm")]
        {
            use ritornello_index::lsm::{LsmIndex, LsmOptions, ProbeMethod};
            let probe =
                if opened.is_multiple_of(2) { ProbeMethod::Bisect } else { ProbeMethod::Scan };
            let options = LsmOptions { probe, ..LsmOptions::within(1 << 20) };
            let lsm = LsmIndex::open(&dir.join("lsm"), &options).unwrap();
            assert!(!lsm.recovered().damaged);
            Box::new(lsm)
        },
    ]
}

fn steps(walk: &[MatchedRun]) -> Vec<(u32, u32, u32)> {
    walk.iter().map(|step| (step.first, step.pages, step.at)).collect()
}

fn gone(removed: &[Removed]) -> impl PartialEq + std::fmt::Debug + use<> {
    let (units, pages, whole) = sum(removed);
    let hashes = removed.iter().flat_map(|gone| &gone.hashes).copied();
    let hashes: BTreeSet<PageHash> = hashes.filter(|hash| *hash != PageHash::NONE).collect();
    (units, pages, whole.len(), hashes)
}

impl All {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = SimDisk::new(1 << 30);
        let (run, others) = (common::open(&disk), open_others(dir.path(), 0));
        Self { dir, disk, memory: MemoryIndex::new(), run, others, generation: 0, opened: 0 }
    }

    fn each(&self) -> impl Iterator<Item = &dyn PrefixIndex> {
        let ours: [&dyn PrefixIndex; 2] = [&self.memory, &*self.run];
        ours.into_iter().chain(self.others.iter().map(|other| &**other))
    }

    /// Returns the result of `f`, and checks that it is the same for every backend.
    fn same<T: PartialEq + std::fmt::Debug>(&self, f: impl Fn(&dyn PrefixIndex) -> T) -> T {
        let memory = f(&self.memory);
        for index in self.each().skip(1) {
            assert_eq!(memory, f(index), "memory and {index:?}");
        }
        memory
    }

    fn reopen(&mut self) {
        self.each().for_each(|index| index.sync().unwrap());
        self.run = common::open(&self.disk);
        self.others.clear();
        self.opened += 1;
        self.others = open_others(self.dir.path(), self.opened);
    }

    fn apply(&mut self, op: &Op) {
        let all: BTreeMap<u64, Content> = contents(&self.memory);
        let picked = |pick: u8| all.values().nth(usize::from(pick) % all.len().max(1));
        let name = |index: &dyn PrefixIndex, run: &Content| -> RunId {
            let live = run.pages.iter().find(|page| **page != PageHash::NONE).unwrap();
            index.locate(run.scope, *live).unwrap().0
        };
        match *op {
            Op::Put { scope, path, length, attach, skip } => {
                let (slot, keys) = (ScopeSlot(scope), keys(scope, path, length));
                let from = self.same(|index| index.probe(slot, &keys));
                let from = (from + usize::from(skip.saturating_sub(6))).min(keys.len());
                let is_new = |key: &&PageHash| self.memory.locate(slot, **key).is_none();
                let pages = &keys[from..];
                let pages = &pages[..pages.iter().take_while(is_new).count()];
                let parent = from.checked_sub(1).map(|at| keys[at]).filter(|_| attach);
                self.generation += 1;
                let place = place(self.generation, pages.len() as u32);
                let chained = scope < 2;
                let new = NewRun { scope: slot, chained, parent, pages, place: &place, recency: 1 };
                self.same(|index| index.insert(&new).map(drop).map_err(|error| error.kind())).ok();
            }
            Op::Link { scope, path, at } => {
                let (parent, child) =
                    (key(scope, path, at.into()), key(scope, path, u64::from(at) + 1));
                self.same(|index| index.link(ScopeSlot(scope), parent, child));
            }
            Op::Truncate { pick, keep } => {
                let Some(run) = picked(pick) else { return };
                let keep = u32::from(keep) % (run.pages.len() as u32 + 1);
                self.same(|index| gone(&index.truncate(name(index, run), keep)));
            }
            Op::Remove { scope, path, at, count } => {
                let pages: Vec<_> =
                    (at..at + count).map(|at| key(scope, path, at.into())).collect();
                self.same(|index| gone(&index.remove(ScopeSlot(scope), &pages)));
            }
            Op::DropScope { scope } => {
                self.same(|index| gone(&index.drop_scope(ScopeSlot(scope))));
            }
            Op::Relocate { pick } => {
                let Some(run) = picked(pick) else { return };
                self.generation += 1;
                let place = place(self.generation, run.pages.len() as u32);
                self.same(|index| gone(&Vec::from_iter(index.relocate(name(index, run), &place))));
            }
            Op::Touch { pick, recency } => {
                let Some(run) = picked(pick) else { return };
                self.same(|index| index.touch(name(index, run), recency.into()));
            }
            Op::Retain { pick, until } => {
                let Some(run) = picked(pick) else { return };
                let retained = |index: &dyn PrefixIndex| [(name(index, run), until.into())];
                self.same(|index| index.retain(&retained(index), until.into()));
            }
            Op::Sync => self.same(|index| {
                index.sync().unwrap();
                assert_eq!(index.stats().pending_bytes, 0);
            }),
            Op::Checkpoint => self.same(|index| index.maintain().unwrap()),
            Op::Reopen | Op::Crash { .. } => self.reopen(),
        }
    }

    fn check(&self) {
        self.same(contents);
        self.same(|index| index.clock());
        for scope in 0..SCOPES {
            for path in [0, 1, 5, 11, 255] {
                let (slot, keys) = (ScopeSlot(scope), keys(scope, path, 24));
                for from in [0, 5] {
                    let keys = &&keys[from..];
                    let found = self.same(|index| index.probe(slot, keys));
                    self.same(|index| index.exists(slot, keys));
                    self.same(|index| steps(&index.walk(slot, keys)));
                    for index in self.each() {
                        for method in index.probe_methods() {
                            let found_by = index.probe_by(method, slot, keys);
                            assert_eq!(found_by, found, "{method}");
                        }
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(common::cases(24))]
    #[test]
    fn all_backends_behave_the_same(ops in prop::collection::vec(op(), 1..60)) {
        let mut all = All::new();
        for op in &ops {
            all.apply(op);
            all.check();
        }
        all.reopen();
        all.check();
    }
}
