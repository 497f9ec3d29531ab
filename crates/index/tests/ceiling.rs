//! The memory ceiling of `run`: the resident memory of the index exceeds the ceiling by at most
//! `SLACK`. At the ceiling the index refuses puts and nothing else, and removals make room for
//! puts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_format::{ErrorKind, PageHash, Place, ScopeSlot};
use ritornello_index::conformance::page;
use ritornello_index::{NewRun, PrefixIndex, RunId, RunIndex, RunOptions};
use ritornello_medium::Host;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

const CEILING: u64 = 64 << 20;
/// Maximum bytes by which the resident memory of the index, as the kernel counts it, may exceed the
/// ceiling.
const SLACK: u64 = 4 << 20;
const SCOPE: ScopeSlot = ScopeSlot(3);

fn open(dir: &Path) -> RunIndex {
    let options = RunOptions { memory_bytes_max: CEILING, ..RunOptions::default() };
    RunIndex::open(Arc::new(Host), dir, options).unwrap()
}

/// Anonymous memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

struct Filled {
    index: RunIndex,
    /// Resident bytes before the index was opened.
    before: u64,
    /// Runs, oldest first.
    runs: VecDeque<RunId>,
    next: u64,
    refused: u64,
}

impl Filled {
    fn pages(&self, count: u64) -> Vec<PageHash> {
        (self.next..self.next + count).map(|number| page(1, number)).collect()
    }

    /// Inserts a run of `count` pages; syncs and tries again while the journal buffer is full.
    /// Returns whether the run was accepted.
    fn put(&mut self, count: u64) -> bool {
        let pages = self.pages(count);
        let place = Place { generation: self.next + 1, ..Place::default() };
        let run = NewRun {
            scope: SCOPE,
            chained: true,
            parent: None,
            pages: &pages,
            place: &place,
            recency: 1,
        };
        loop {
            let room = self.index.has_memory_for(&pages);
            match self.index.insert(&run) {
                Ok(name) => {
                    self.runs.push_back(name);
                    self.next += count;
                    return true;
                }
                Err(error) if error.to_string().contains("sync, then") => {
                    self.index.sync().unwrap();
                    self.index.maintain().unwrap();
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
                    assert!(error.to_string().contains("memory ceiling"), "{error}");
                    assert!(!room, "insert refused a run for which has_memory_for found room");
                    self.refused += 1;
                    return false;
                }
            }
        }
    }

    fn fill(&mut self, count: u64) -> usize {
        let mut put = 0;
        while self.put(count) {
            put += 1;
            if put % 4096 == 0 {
                self.check(count);
            }
        }
        self.check(count);
        put
    }

    fn check(&self, count: u64) {
        let stats = self.index.stats();
        assert!(stats.memory_bytes <= CEILING && stats.memory_percent <= 100, "{stats:?}");
        let own = 8 * self.runs.capacity() as u64;
        let index = resident().saturating_sub(self.before + own);
        assert!(
            index <= CEILING + SLACK,
            "{index} bytes are resident, with {count} pages per run: {stats:?}"
        );
    }

    /// Removes the `count` oldest runs.
    fn evict(&mut self, count: usize) {
        for run in self.runs.drain(..count.min(self.runs.len())) {
            assert_eq!(self.index.truncate(run, 0).len(), 1);
        }
    }
}

#[test]
fn only_puts_are_refused_at_the_ceiling() {
    let dir = tempfile::tempdir().unwrap();
    let before = resident();
    let (runs, next, refused) = (VecDeque::new(), 1, 0);
    let mut full = Filled { index: open(dir.path()), before, runs, next, refused };
    assert_eq!(full.index.stats().memory_percent, 0);
    let single = full.fill(1);
    assert!(full.index.stats().memory_percent >= 98);
    assert!(full.refused == 1 && single > 250_000, "{single}");
    let last = full.pages(1)[0];
    let present = page(1, full.next - 1);
    assert_eq!(full.index.probe(SCOPE, &[present, last]), 1);
    assert!(full.index.locate(SCOPE, present).is_some() && !full.put(1));
    full.runs.iter().for_each(|run| full.index.touch(*run, 9));
    full.check(1);
    full.index.sync().unwrap();
    full.check(1);
    // Each removal of the oldest sixteenth of the runs makes room for nearly the same number of
    // runs of the same length.
    for _ in 0..4 {
        full.evict(single / 16);
        let again = full.fill(1);
        assert!(again + 1024 >= single / 16, "{again} puts after {} removals", single / 16);
    }
    // The memory of removed short runs can be used for long runs.
    let mut long = 0;
    for _ in 0..24 {
        full.evict(single / 16);
        long += full.fill(100);
    }
    let pages = full.index.stats().pages;
    assert!(pages > 20 * single as u64 / 16, "only {pages} pages after {long} puts of long runs");
    assert_eq!(full.index.probe(SCOPE, &[present]), 0, "the first fill must be removed");
    // An index whose contents exceed its ceiling still opens, and refuses puts.
    full.index.sync().unwrap();
    let kept = full.index.stats();
    drop(full.index);
    let options = RunOptions { memory_bytes_max: CEILING / 2, ..RunOptions::default() };
    let small = RunIndex::open(Arc::new(Host), dir.path(), options).unwrap();
    assert_eq!((small.stats().runs, small.stats().pages), (kept.runs, kept.pages));
    assert!(!small.has_memory_for(&[last]));
    let mut names = Vec::new();
    small.for_each(&mut |run, _| names.push(run));
    names.iter().skip(names.len() / 4).for_each(|run| drop(small.truncate(*run, 0)));
    assert!(small.has_memory_for(&[last]));
}
