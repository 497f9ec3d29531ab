//! The `lsm` index across kills and damage, at its budget, and with threads.
#![cfg(all(feature = "lsm", not(loom)))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod chains;

use chains::{SCOPE, crowd, insert};
use ritornello_format::{ErrorKind, PageHash};
use ritornello_index::conformance::{contents, page, pages};
use ritornello_index::lsm::{Mode, ProbeMethod};
use ritornello_index::tuning::Setting;
use ritornello_index::{LsmIndex, LsmOptions, PrefixIndex};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

/// Opens an index with memtables of 256 KiB, so that tables are written.
fn open(dir: &Path) -> LsmIndex {
    let options = LsmOptions { budget: 1 << 30, ..LsmOptions::within(4 << 20) };
    LsmIndex::open(dir, &options).unwrap()
}

/// Chains of three runs of five pages.
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

/// RocksDB's own guard goes by the path.
#[test]
fn index_opens_once_by_whichever_path() {
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

/// The process that [`synced_changes_survive_a_kill`] kills; passes without work when run alone.
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
            // Changes that were not synced may exist, in order and without gaps.
            assert!(!ended || found == 0, "family {family} of {last}");
            ended |= found < 15 && !(family % 5 == 0 && found == 7);
        }
    }
    fill(&index, 1_000_000..1_000_001);
    index.sync().unwrap();
}

fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_files(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Models a failed sync of the log, or of log and manifest, whose dropped pages still read back.
/// `on_disk` has the disk's versions of these files, `cached` what reads return. Tables are synced
/// before the manifest names them.
fn check_dropped_pages(root: &Path, on_disk: &Path, cached: &Path) {
    let database = cached.join("lsm");
    // Keep the old files open, so that no new file gets the inode number of an old file.
    let files = fs::read_dir(&database).unwrap().map(|entry| File::open(entry.unwrap().path()));
    let held: Vec<File> = files.map(Result::unwrap).collect();
    let old: Vec<u64> = held.iter().map(|file| file.metadata().unwrap().ino()).collect();

    let index = open(cached);
    assert!(!index.recovered().damaged);
    fill(&index, 40..60);
    index.sync().unwrap();

    let left = root.join("left");
    copy_files(cached, &left);
    for entry in fs::read_dir(&database).unwrap() {
        let entry = entry.unwrap();
        let name = Path::new("lsm").join(entry.file_name());
        let is_table = name.extension().is_some_and(|kind| kind == "sst");
        if is_table || !old.contains(&entry.metadata().unwrap().ino()) {
            continue;
        }
        if fs::copy(on_disk.join(&name), left.join(&name)).is_err() {
            fs::remove_file(left.join(&name)).unwrap();
        }
    }
    drop(held);
    let index = open(&left);
    assert!(!index.recovered().damaged);
    for family in 0..60 {
        assert_eq!(index.probe(SCOPE, &pages(family, 15)), 15, "family {family}");
    }
}

#[test]
fn pages_dropped_by_failed_sync_are_rewritten_at_open() {
    for closed in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let [dir, on_disk, cached] = ["index", "disk", "cache"].map(|name| root.path().join(name));
        let index = open(&dir);
        fill(&index, 0..20);
        index.sync().unwrap();
        copy_files(&dir, &on_disk);
        fill(&index, 20..40);
        index.sync().unwrap();
        if closed {
            // Writes tables, and a manifest that names them.
            drop(index);
            copy_files(&dir, &cached);
        } else {
            copy_files(&dir, &cached);
        }
        check_dropped_pages(root.path(), &on_disk, &cached);
    }
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

/// Files of the database whose names have this ending.
fn files(dir: &Path, ending: &str) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(dir.join("lsm")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.to_string_lossy().contains(ending)).collect();
    files.sort();
    files
}

/// For every kind of damage the index opens, reports it, and holds only runs that were inserted.
#[test]
fn damaged_database_is_repaired_or_dropped() {
    type Break = fn(&Path);
    let flip: Break = |path| {
        let mut bytes = fs::read(path).unwrap();
        for at in (0..bytes.len()).step_by(997) {
            bytes[at] ^= 0x55;
        }
        fs::write(path, bytes).unwrap();
    };
    let cut: Break = |path| {
        let length = fs::metadata(path).unwrap().len();
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length / 2).unwrap();
    };
    let lose: Break = |path| fs::remove_file(path).unwrap();
    let mut repaired = 0;
    let breaks: [(&str, &[Break]); 5] = [
        (".sst", &[flip, cut, lose]),
        ("MANIFEST", &[flip, lose]),
        ("CURRENT", &[cut, lose]),
        (".log", &[flip]),
        ("", &[flip]),
    ];
    for (ending, breaks) in breaks {
        for damage in breaks {
            let dir = tempfile::tempdir().unwrap();
            let index = open(dir.path());
            fill(&index, 0..300);
            let before = contents(&index);
            drop(index);
            let index = open(dir.path());
            fill(&index, 300..310);
            index.sync().unwrap();
            drop(index);
            let broken = files(dir.path(), ending);
            let broken: Vec<_> = match ending {
                // Every other table, or all of them.
                ".sst" => broken.iter().step_by(2).collect(),
                _ => broken.iter().collect(),
            };
            broken.into_iter().for_each(|path| damage(path));
            let judge = |index: &LsmIndex| {
                for (generation, content) in contents(index) {
                    if let Some(then) = before.get(&generation) {
                        assert_eq!(&content, then, "{ending}");
                    } else {
                        assert!(generation > 900, "{ending}");
                    }
                }
                for family in 0..310 {
                    let keys = pages(family, 15);
                    let walk = index.walk(SCOPE, &keys);
                    for step in walk {
                        let view = index.run(step.run).unwrap();
                        let from = step.first as usize;
                        let named = &keys[step.at as usize..][..step.pages as usize];
                        assert_eq!(&view.pages[from..][..named.len()], named);
                    }
                }
            };
            let mut index = open(dir.path());
            // Reads may be the first to find damage. The damage is then marked, and the next open
            // repairs it.
            let mut found = std::collections::BTreeMap::new();
            index.for_each(&mut |_, view| drop(found.insert(view.place.generation, view)));
            for family in 0..310 {
                index.exists(SCOPE, &pages(family, 15));
            }
            if index.sync().is_err() || insert(&index, 1 << 40, None, &pages(1 << 20, 2)).is_err() {
                assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal);
                drop(index);
                index = open(dir.path());
                assert!(index.recovered().damaged);
            } else {
                index.remove(SCOPE, &pages(1 << 20, 2));
            }
            repaired += u64::from(index.recovered().damaged);
            judge(&index);
            fill(&index, 5000..5010);
            index.sync().unwrap();
            drop(index);
            let index = open(dir.path());
            assert!(!index.recovered().damaged, "once is enough");
            assert_eq!(index.probe(SCOPE, &pages(5009, 15)), 15);
        }
    }
    assert!(repaired > 5, "{repaired}");
}

/// RocksDB reads a manifest that lost its end as the manifest of an older database, without some
/// families or tables, and deletes the tables that it does not name.
#[test]
fn truncated_manifest_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..20);
    let before = contents(&index);
    index.sync().unwrap();
    drop(index);
    // Cut at every number of families, and at some other offsets.
    let copy_to = |to: &Path, cut: u64| {
        fs::create_dir(to.join("lsm")).unwrap();
        fs::copy(dir.path().join("lsm.seal"), to.join("lsm.seal")).unwrap();
        for file in files(dir.path(), "") {
            fs::copy(&file, to.join("lsm").join(file.file_name().unwrap())).unwrap();
        }
        let list = files(to, "MANIFEST").pop().unwrap();
        fs::OpenOptions::new().write(true).open(list).unwrap().set_len(cut).unwrap();
    };
    let length = fs::metadata(files(dir.path(), "MANIFEST").pop().unwrap()).unwrap().len();
    let listing = tempfile::tempdir().unwrap();
    copy_to(listing.path(), length);
    let mut families = std::collections::BTreeSet::new();
    for cut in (0..length).rev().step_by(16) {
        let list = files(listing.path(), "MANIFEST").pop().unwrap();
        fs::OpenOptions::new().write(true).open(list).unwrap().set_len(cut).unwrap();
        let listed = rocksdb::DB::list_cf(&rocksdb::Options::default(), listing.path().join("lsm"));
        if !families.insert(listed.map_or(0, |families| families.len())) && cut % 256 >= 16 {
            continue;
        }
        for is_sealed in [true, false] {
            let copy = tempfile::tempdir().unwrap();
            copy_to(copy.path(), cut);
            if !is_sealed {
                fs::remove_file(copy.path().join("lsm.seal")).unwrap();
            }
            let index = open(copy.path());
            let found = contents(&index);
            if is_sealed {
                assert!(index.recovered().damaged, "cut at {cut} of {length}");
                assert_eq!(found, before, "cut at {cut} of {length}");
            } else {
                // The contents existed at some time.
                assert!(found.iter().all(|(generation, run)| before[generation] == *run));
            }
            // The descendants of a page are removed with it, and can be inserted again.
            let keys = pages(7, 15);
            let found = index.probe(SCOPE, &keys);
            index.remove(SCOPE, &&keys[4..5]);
            let stay = index.exists(SCOPE, &keys).into_iter().filter(|present| *present).count();
            assert_eq!(stay, found.min(4), "cut at {cut} of {length}");
            index.remove(SCOPE, &keys);
            insert(&index, 1 << 40, None, &keys).unwrap();
            assert_eq!(index.probe(SCOPE, &keys), 15);
            index.sync().unwrap();
            drop(index);
            let index = open(copy.path());
            assert!(!index.recovered().damaged, "once is enough");
            assert_eq!(index.probe(SCOPE, &keys), 15);
        }
    }
    assert!(families.len() > 5, "every number of families was met: {families:?}");
}

/// Offsets of the record types in the first block of a manifest or log.
fn types_of_records(file: &Path) -> Vec<usize> {
    let bytes = fs::read(file).unwrap();
    let mut at = 0;
    let mut types = Vec::new();
    while at + 7 <= bytes.len().min(32 << 10) && bytes[at + 6] != 0 {
        types.push(at + 6);
        at += 7 + usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
    }
    types
}

/// RocksDB reads a record of a recycled log again and again in a file that is not recycled.
#[test]
fn record_of_recycled_log_does_not_block_opening() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..20);
    index.sync().unwrap();
    let before = contents(&index);
    let copy_to = |to: &Path| {
        fs::create_dir(to.join("lsm")).unwrap();
        for file in files(dir.path(), "") {
            fs::copy(&file, to.join("lsm").join(file.file_name().unwrap())).unwrap();
        }
    };
    let damaged = |name: &str, record: usize, bit: u8| {
        let copy = tempfile::tempdir().unwrap();
        copy_to(copy.path());
        let file = files(copy.path(), name).pop().unwrap();
        let mut bytes = fs::read(&file).unwrap();
        bytes[types_of_records(&file)[record]] ^= bit;
        fs::write(&file, bytes).unwrap();
        let (done, opened) = std::sync::mpsc::channel();
        std::thread::spawn(move || drop(done.send((open(copy.path()), copy))));
        opened.recv_timeout(std::time::Duration::from_secs(60)).unwrap()
    };
    let logged = files(dir.path(), ".log").into_iter().map(|log| types_of_records(&log).len());
    let logged = logged.max().unwrap();
    assert!(logged > 2, "there is a log to replay");
    for record in [0, 1, logged - 1] {
        let (index, _copy) = damaged(".log", record, 4);
        assert!(index.recovered().damaged, "record {record} of {logged} in the log");
        let found = contents(&index);
        assert!(found.iter().all(|(generation, run)| before[generation] == *run));
        assert!(found.len() <= before.len());
    }
    drop(index);
    let listed = types_of_records(&files(dir.path(), "MANIFEST").pop().unwrap()).len();
    for record in 0..listed {
        for bit in [4, 10] {
            let (index, _copy) = damaged("MANIFEST", record, bit);
            assert!(index.recovered().damaged, "record {record} of {listed}");
            assert_eq!(contents(&index), before, "record {record} of {listed}");
        }
    }
}

#[test]
fn intact_but_suspected_database_is_copied_whole() {
    let dir = tempfile::tempdir().unwrap();
    let index = open(dir.path());
    fill(&index, 0..300);
    drop(index);
    fs::write(dir.path().join("lsm.damaged"), b"").unwrap();
    let index = open(dir.path());
    let recovered = index.recovered();
    assert!(recovered.damaged);
    assert_eq!((recovered.saved_runs, recovered.dropped_runs), (900, 0));
    assert_eq!(index.stats().pages, 4500);
    assert_eq!(contents(&index).len(), 900);
}

#[test]
fn open_index_is_not_repaired() {
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
fn other_format_is_refused_with_its_number() {
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
    assert!(most > 500, "and the budget is used: {most} runs of eight pages");
    // A smaller budget is met after some removals.
    index.set_budget(budget / 2);
    for _ in 0..runs.len() * 3 / 4 {
        index.truncate(runs.pop_front().unwrap(), 0);
    }
    index.maintain().unwrap();
    assert!(index.stats().disk_bytes <= budget / 2, "{:?}", index.stats());
    insert(&index, 3001, None, &pages(3001, 8)).unwrap();
}

/// Inserts chains until `flushes` flushes have happened, with maintenance after each.
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
    // The setting now allows seven runs per level, so some of the next runs remain.
    let mut most = 0;
    for _ in 0..8 {
        flush(&index, &mut next, 1);
        most = most.max(index.tuning().unwrap().sorted_runs);
    }
    assert!(most > 4, "{most} runs at most");
    let before = contents(&index);
    drop(index);
    assert_eq!(contents(&open(dir.path())), before);
}

#[test]
fn decisions_follow_operations_and_are_reported() {
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
    // A shift takes two windows, and the first of them may have begun among writes.
    assert!(last.mix.writes < 0.3 && last.mix.hits > 0.3 && last.mix.empty > 0.1, "{last:?}");
    assert!(read.target.runs <= written.target.runs, "{read:?}");
}

#[test]
fn statistics_count_written_entries() {
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

/// Readers, writers, syncs and compactions run concurrently.
#[test]
fn many_threads_run_concurrently() {
    let dir = tempfile::tempdir().unwrap();
    let index = LsmIndex::open(dir.path(), &LsmOptions::within(64 << 20)).unwrap();
    let index = &index;
    let walk = |seed: u64, keys: &[PageHash]| {
        let probe = [ProbeMethod::Bisect, ProbeMethod::Scan][(seed >> 32) as usize % 2];
        index.walk_with(probe, SCOPE, &keys)
    };
    crowd(index, 2, 300, &AtomicBool::new(false), &walk);
    index.sync().unwrap();
    let before = contents(index);
    assert_eq!(index.stats().runs, before.len() as u64);
}
