//! The `lsm` index after kills and damage, within its budget of file bytes, while its tree changes
//! shape, and with concurrent threads.
#![cfg(feature = "lsm")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../chains/mod.rs"]
mod chains;
mod damage;

use chains::{SCOPE, check_concurrently, insert};
use ritornello_format::{ErrorKind, PageHash};
use ritornello_index::conformance::{contents, page, pages};
use ritornello_index::lsm::{Mode, ProbeMethod};
use ritornello_index::tuning::Setting;
use ritornello_index::{LsmIndex, LsmOptions, PrefixIndex};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

/// Opens an index with memtables of 256 KiB, so that tables are written.
fn open(dir: &Path) -> LsmIndex {
    let options = LsmOptions { budget: 1 << 30, ..LsmOptions::within(4 << 20) };
    LsmIndex::open(dir, &options).unwrap()
}

/// Inserts a chain for each family of pages: three runs, each of five pages.
fn fill(index: &dyn PrefixIndex, families: std::ops::Range<u64>) {
    for family in families {
        let keys = pages(family, 15);
        let mut parent = None;
        for (at, run) in keys.chunks(5).enumerate() {
            insert(index, family * 3 + at as u64 + 1, parent, run).unwrap();
            parent = run.last().copied();
        }
    }
}

/// Opens one directory by several paths: RocksDB's guard against a second opening compares paths
/// only.
#[test]
fn second_open_by_another_path_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let through = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let (one, two) = (File::open(dir.path()).unwrap(), File::open(dir.path()).unwrap());
    let index = open(&through(&one));
    for path in [through(&two), dir.path().to_owned(), through(&one)] {
        let error = LsmIndex::open(&path, &LsmOptions::within(4 << 20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
    }
    fill(&index, 0..3);
    drop(index);
    open(&through(&two));
}

/// The owner may have been killed before it synced the data of its last runs.
#[test]
fn first_sync_after_an_open_syncs_the_data_of_recovered_runs() {
    let dir = tempfile::tempdir().unwrap();
    fill(&open(dir.path()), 0..3);
    let index = open(dir.path());
    let synced = AtomicBool::new(false);
    index
        .sync_after(&|| {
            synced.store(true, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
    assert!(synced.into_inner());
}

/// Fills an index until [`synced_changes_survive_a_kill`], which runs this test in another process,
/// kills the process. Does nothing if the variable `RITORNELLO_TEST_KILLED_DIR` is not set.
#[test]
fn child_that_is_killed() {
    let Some(dir) = std::env::var_os("RITORNELLO_TEST_KILLED_DIR") else { return };
    let index = open(Path::new(&dir));
    for family in 0.. {
        fill(&index, family..family + 1);
        if family % 5 == 2 {
            index.remove(SCOPE, &[page(family - 2, 7)]);
        }
        if family % 7 == 6 {
            index.sync().unwrap();
            println!("synced {family}");
        }
    }
}

#[test]
fn synced_changes_survive_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_is_killed", "--nocapture"])
        .env("RITORNELLO_TEST_KILLED_DIR", dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The first line may follow output of the test harness.
    let synced =
        lines.filter_map(|line| line.unwrap().split_once("synced ")?.1.parse::<u64>().ok());
    let mut last = 0;
    for line in synced {
        last = line;
        if last > 300 {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let index = open(dir.path());
    assert!(!index.recovered().damaged, "a kill is not damage");
    let _ = contents(&index);
    let mut ended = false;
    for family in 0..last + 1000 {
        let found = index.probe(SCOPE, &pages(family, 15));
        let cut = family % 5 == 0 && family + 2 <= last;
        if family <= last {
            assert_eq!(found, if cut { 7 } else { 15 }, "family {family} of {last}");
        } else {
            // Unsynced changes may be present, but only in order and without gaps.
            assert!(!ended || found == 0, "family {family} of {last}");
            ended |= found < 15 && !(family % 5 == 0 && found == 7);
        }
    }
    fill(&index, 1_000_000..1_000_001);
    index.sync().unwrap();
}

#[test]
fn recency_retention_and_clock_survive_a_close() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..3);
    let (run, _) = index.locate(SCOPE, page(1, 0)).unwrap();
    index.touch(run, 77);
    index.retain(&[(run, 99)], 42);
    let before = contents(&index);
    drop(index);
    let index = open(dir.path());
    assert_eq!(contents(&index), before);
    assert_eq!(index.clock(), 42);
    let view = index.run(index.locate(SCOPE, page(1, 3)).unwrap().0).unwrap();
    assert_eq!((view.recency, view.retain_until), (77, 99));
}

#[test]
fn second_open_leaves_an_open_index_intact() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..3);
    let second = LsmIndex::open(dir.path(), &LsmOptions::default()).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Retry, "{second}");
    fill(&index, 3..6);
    drop(index);
    assert_eq!(contents(&open(dir.path())).len(), 18);
}

#[test]
fn database_of_other_format_is_refused_with_its_format() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let path = dir.path().join("lsm");
    let options = rocksdb::Options::default();
    let names = rocksdb::DB::list_cf(&options, &path).unwrap();
    let db = rocksdb::DB::open_cf(&options, &path, names).unwrap();
    db.put(b"counts", [9; 33]).unwrap();
    drop(db);
    let error = LsmIndex::open(dir.path(), &LsmOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("format=9"), "{error}");
}

#[test]
fn files_stay_within_their_budget() {
    let dir = tempfile::tempdir().unwrap();
    let budget = 2 << 20;
    let index = LsmIndex::open(dir.path(), &LsmOptions::within(budget)).unwrap();
    let mut runs = std::collections::VecDeque::new();
    let mut most = 0;
    for family in 0..3000u64 {
        let run = loop {
            match insert(&index, family + 1, None, &pages(family, 8)) {
                Ok(run) => break run,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Retry);
                    most = most.max(runs.len());
                    for _ in 0..runs.len() / 4 {
                        index.truncate(runs.pop_front().unwrap(), 0);
                    }
                    index.sync().unwrap();
                    index.maintain().unwrap();
                }
            }
        };
        runs.push_back(run);
        if family % 64 == 0 {
            let bytes = index.stats().disk_bytes;
            assert!(bytes <= budget, "{bytes} bytes");
        }
    }
    assert!(most > 500, "the budget is not used up: the index held at most {most} runs");
    // After removals the files fit a smaller budget.
    index.set_budget(budget / 2);
    for _ in 0..runs.len() * 3 / 4 {
        index.truncate(runs.pop_front().unwrap(), 0);
    }
    index.maintain().unwrap();
    assert!(index.stats().disk_bytes <= budget / 2, "{:?}", index.stats());
    insert(&index, 3001, None, &pages(3001, 8)).unwrap();
}

/// Inserts chains and calls `maintain` until the bytes of RocksDB's tables have changed `flushes`
/// times, by flushes of memtables or by compactions.
fn flush(index: &LsmIndex, next: &mut u64, flushes: u64) {
    for _ in 0..flushes {
        let before = index.stats().written_bytes;
        let tables = index.tuning().unwrap().tree.bytes;
        while index.tuning().unwrap().tree.bytes == tables {
            fill(index, *next..*next + 20);
            *next += 20;
            index.maintain().unwrap();
        }
        assert!(index.stats().written_bytes > before);
    }
}

#[test]
fn tree_shape_changes_stepwise_while_open() {
    let dir = tempfile::tempdir().unwrap();
    let from = Setting { ratio: 2, runs: 1 };
    let to = Setting { ratio: 8, runs: 7 };
    let options =
        LsmOptions { budget: 1 << 30, mode: Mode::Static(from), ..LsmOptions::within(4 << 20) };
    let index = LsmIndex::open(dir.path(), &options).unwrap();
    let mut next = 0;
    flush(&index, &mut next, 12);
    let leveled = index.tuning().unwrap();
    assert_eq!((leveled.applied, leveled.target), (from, from));
    index.set_mode(Mode::Static(to));
    let mut steps = 0;
    let mut last = from;
    while last != to {
        fill(&index, next..next + 20);
        next += 20;
        index.maintain().unwrap();
        let applied = index.tuning().unwrap().applied;
        assert!(applied.ratio - last.ratio <= 1 && applied.runs - last.runs <= 1, "{applied:?}");
        steps += u32::from(applied != last);
        last = applied;
    }
    assert_eq!(steps, 6);
    // A level may now hold seven sorted runs, so some of the next runs are not merged.
    let mut most = 0;
    for _ in 0..8 {
        flush(&index, &mut next, 1);
        most = most.max(index.tuning().unwrap().sorted_runs);
    }
    assert!(most > 4, "the tree had at most {most} sorted runs");
    let before = contents(&index);
    drop(index);
    assert_eq!(contents(&open(dir.path())), before);
}

#[test]
fn tuner_decisions_follow_the_mix_of_operations() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    let mut next = 0;
    flush(&index, &mut next, 20);
    let written = index.tuning().unwrap();
    assert!(written.adaptive && written.operations > 4096);
    let last = *written.decisions.last().unwrap();
    assert!(last.mix.writes > 0.5, "{last:?}");
    for family in 0..2000 {
        index.probe(SCOPE, &pages(family % next, 15));
        index.probe(SCOPE, &pages(1 << 20, 15));
        index.maintain().unwrap();
    }
    let read = index.tuning().unwrap();
    let last = *read.decisions.last().unwrap();
    // The tuner makes a new decision after two consecutive windows of at least 4,096 operations
    // whose mix has shifted. The first of these windows may have begun while the test still wrote,
    // so the mix may contain writes.
    assert!(last.mix.writes < 0.3 && last.mix.hits > 0.3 && last.mix.empty > 0.1, "{last:?}");
    assert!(read.target.runs <= written.target.runs, "{read:?}");
}

#[test]
fn statistics_count_pending_and_written_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..100);
    let pending = index.stats().pending_bytes;
    assert!(pending > 100 * 15 * 16, "{pending}");
    index.sync().unwrap();
    let stats = index.stats();
    assert_eq!(stats.pending_bytes, 0);
    assert!(stats.written_bytes >= pending, "{stats:?}");
    assert!(stats.memory_bytes > 0 && stats.disk_bytes > 0 && stats.files > 3, "{stats:?}");
}

#[test]
fn concurrent_threads_leave_a_consistent_index() {
    let dir = tempfile::tempdir().unwrap();
    let index = LsmIndex::open(dir.path(), &LsmOptions::within(64 << 20)).unwrap();
    let index = &index;
    let walk = |seed: u64, keys: &[PageHash]| {
        let probe = [ProbeMethod::Bisect, ProbeMethod::Scan][(seed >> 32) as usize % 2];
        index.walk_with(probe, SCOPE, &keys)
    };
    check_concurrently(index, 2, 300, &AtomicBool::new(false), &walk);
    index.sync().unwrap();
    let before = contents(index);
    assert_eq!(index.stats().runs, before.len() as u64);
}
