//! Reads operations from the bytes of an input, and applies them to the indexes `run`, `art` and
//! `memory`. `run` and `art` must return the same results as `memory`, and keep their contents
//! across a reopening.

use ritornello_format::{ErrorKind, PageHash, ScopeSlot};
use ritornello_index::conformance::{contents, page, place, sum};
use ritornello_index::{
    ArtIndex, ArtOptions, MemoryIndex, NewRun, PrefixIndex, RunId, RunIndex, RunOptions,
};
use ritornello_medium::SimDisk;
use std::path::Path;
use std::sync::Arc;

/// Bytes of an operation, one for each of: its kind, its scope, its path (a sequence of pages, see
/// [`key`]), the first page, the number of pages, and an operand.
const OP_BYTES: usize = 6;
/// Maximum operations that one input runs.
const OPS_MAX: usize = 100;
/// Number of scopes. The first half of them is chained.
const SCOPES: u8 = 4;

/// Returns two inputs: inserts on eight paths before and after operations of all kinds, and the
/// first five of these inserts.
pub fn operations() -> Vec<Vec<u8>> {
    let put = |path: u8, first: u8| [0, path, path, first, 9, 1];
    let puts = (0..8).flat_map(|path| [put(path, 0), put(path, 9)]);
    let rest = (1..10).map(|what| [what, what, what / 2, what, 3, what]);
    let drop_scope = [6, 1, 0, 0, 0, 8];
    let rest = rest.chain([drop_scope]);
    let all: Vec<u8> = puts.clone().chain(rest).chain(puts).flatten().collect();
    vec![all.clone(), all[..30].to_vec()]
}

/// Applies the operations of an input to all indexes. Returns true, because every input is valid;
/// panics if two indexes differ.
pub fn run(bytes: &[u8]) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let disk = SimDisk::new(1 << 28);
    let mut all = All { memory: MemoryIndex::new(), others: Vec::new(), generation: 0 };
    all.others = open(&disk, dir.path());
    for op in bytes.chunks_exact(OP_BYTES).take(OPS_MAX) {
        if op[0] % 10 == 9 {
            all.reopen(&disk, dir.path());
        } else {
            all.apply(op);
        }
    }
    all.same(contents);
    all.reopen(&disk, dir.path());
    all.same(contents);
    true
}

fn open(disk: &SimDisk, dir: &Path) -> Vec<Box<dyn PrefixIndex>> {
    let options = RunOptions { checkpoint_write_bytes: 1, ..RunOptions::default() };
    let run = RunIndex::open(Arc::new(disk.clone()), Path::new("/index"), options).unwrap();
    let options = ArtOptions { cache_bytes: 8 << 20, ..ArtOptions::default() };
    vec![Box::new(run), Box::new(ArtIndex::open(&dir.join("art"), options).unwrap())]
}

/// Returns the hash of page `at` of one of 16 paths. All paths share pages 0 to 3, and paths whose
/// numbers have the same two lowest bits share pages 4 to 11. The first eight bytes of every fourth
/// page's hash are equal on all paths.
fn key(path: u8, at: u64) -> PageHash {
    let family = u64::from(path % 16) & [0, 3, 15][usize::from(at >= 4) + usize::from(at >= 12)];
    let mut hash = page(family, at);
    if at % 4 == 1 {
        hash.0[..8].copy_from_slice(&page(99, at).0[..8]);
    }
    hash
}

struct All {
    memory: MemoryIndex,
    others: Vec<Box<dyn PrefixIndex>>,
    generation: u64,
}

impl All {
    /// Returns the result of `f`, which must be the same for all indexes.
    fn same<T: PartialEq + std::fmt::Debug>(&self, f: impl Fn(&dyn PrefixIndex) -> T) -> T {
        let memory = f(&self.memory);
        for other in &self.others {
            assert_eq!(memory, f(&**other), "memory and {other:?}");
        }
        memory
    }

    fn reopen(&mut self, disk: &SimDisk, dir: &Path) {
        self.same(|index| index.sync().is_ok());
        self.others.clear();
        self.others = open(disk, dir);
    }

    /// Calls `f` for each index that has `page`, with the index, the run that holds the page in it,
    /// and the number of the run's pages.
    fn on_run<T: PartialEq + std::fmt::Debug>(
        &self,
        scope: ScopeSlot,
        page: PageHash,
        f: impl Fn(&dyn PrefixIndex, RunId, usize) -> T,
    ) {
        self.same(|index| {
            let (run, _) = index.locate(scope, page)?;
            let pages = index.run(run).map_or(0, |view| view.pages.len());
            Some(f(index, run, pages))
        });
    }

    fn apply(&mut self, op: &[u8]) {
        let [what, scope, path, first, count, more] = *op else { return };
        let (first, count) = (u64::from(first % 20), u64::from(count % 20));
        let is_chained = scope % SCOPES < SCOPES / 2;
        let slot = ScopeSlot(u32::from(scope % SCOPES));
        let here = key(path, first);
        let pages: Vec<PageHash> = (first..first + count).map(|at| key(path, at)).collect();
        match what % 10 {
            0..=2 => {
                let parent = first.checked_sub(1).filter(|_| more % 2 == 1);
                let parent = parent.map(|before| key(path, before));
                self.generation += 1;
                let place = place(self.generation, pages.len() as u32);
                let recency = more.into();
                let chained = is_chained;
                let new =
                    NewRun { scope: slot, chained, parent, pages: &pages, place: &place, recency };
                let kind = self.same(|index| index.insert(&new).err().map(|error| error.kind()));
                assert!(kind.is_none_or(|kind| kind == ErrorKind::Invalid), "{kind:?}");
            }
            3 => self.same(|index| index.link(slot, here, key(path, first + 1))),
            4 => drop(self.same(|index| gone(&index.remove(slot, &pages)))),
            5 => self.on_run(slot, here, |index, run, pages| {
                gone(&index.truncate(run, u32::from(more) % (pages as u32 + 1)))
            }),
            6 if more % 8 == 0 => drop(self.same(|index| gone(&index.drop_scope(slot)))),
            6 => self.same(|index| index.maintain().unwrap()),
            7 => {
                self.generation += 1;
                let generation = self.generation;
                self.on_run(slot, here, |index, run, pages| {
                    gone(&Vec::from_iter(index.relocate(run, &place(generation, pages as u32))))
                });
            }
            _ => self.on_run(slot, here, |index, run, _| {
                index.touch(run, more.into());
                index.retain(&[(run, count)], first);
            }),
        }
        let all: Vec<PageHash> = (0..40).map(|at| key(path, at)).collect();
        self.same(|index| (index.probe(slot, &all), index.exists(slot, &all)));
        self.same(|index| {
            let walk = index.walk(slot, &all);
            walk.iter().map(|step| (step.first, step.pages, step.at)).collect::<Vec<_>>()
        });
    }
}

fn gone(removed: &[ritornello_index::Removed]) -> impl PartialEq + std::fmt::Debug + use<> {
    let (units, pages, whole) = sum(removed);
    (units, pages, whole.len())
}
