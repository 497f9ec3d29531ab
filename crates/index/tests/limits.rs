//! The index `run` at its limits, with failing media, and under concurrency.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod chains;

use chains::{SCOPE, check_concurrently, insert};
use ritornello_format::ErrorKind;
use ritornello_format::journal::{JournalRecord, RunImage};
use ritornello_format::wire::Writer;
use ritornello_index::conformance::{contents, page, pages, place};
use ritornello_index::{PrefixIndex, RunIndex, RunOptions};
use ritornello_medium::{Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const DIR: &str = "/index";

fn open(medium: Arc<dyn Medium>, options: RunOptions) -> RunIndex {
    RunIndex::open(medium, Path::new(DIR), options).unwrap()
}

#[test]
fn failed_write_or_sync_poisons_the_index() {
    for (op, fault) in [
        (Op::Write, MediumFault::Io),
        (Op::Write, MediumFault::Short),
        (Op::SyncData, MediumFault::Io),
    ] {
        let disk = SimDisk::new(1 << 24);
        let schedule = Schedule::new();
        let index = open(
            Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())),
            RunOptions::default(),
        );
        insert(&index, 1, None, &pages(1, 3)).unwrap();
        index.sync().unwrap();
        insert(&index, 2, None, &pages(2, 3)).unwrap();
        schedule.add(Rule::nth(1, fault).on(op));
        assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal, "{op:?} {fault:?}");
        // The disk works again, but the index stays poisoned.
        assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal);
        assert_eq!(index.checkpoint().unwrap_err().kind(), ErrorKind::Fatal);
        let refused = insert(&index, 3, None, &pages(3, 3)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Fatal);
        // Probes and removals work while the index is poisoned, and add no journal records.
        assert_eq!(index.probe(SCOPE, &pages(1, 3)), 3);
        let (run, _) = index.locate(SCOPE, page(1, 0)).unwrap();
        assert_eq!(index.truncate(run, 0).len(), 1);
        let after = open(Arc::new(disk.crash(5)), RunOptions::default());
        assert_eq!(after.probe(SCOPE, &pages(1, 3)), 3, "a synced run must be found");
    }
}

#[test]
fn full_disk_does_not_poison_the_index() {
    let disk = SimDisk::new(1 << 24);
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    let index = open(medium, RunOptions::default());
    insert(&index, 1, None, &pages(1, 3)).unwrap();
    schedule.add(Rule::nth(1, MediumFault::NoSpace).on(Op::Write));
    assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Retry);
    insert(&index, 2, None, &pages(2, 3)).unwrap();
    index.sync().unwrap();
    let after = open(Arc::new(disk.crash(5)), RunOptions::default());
    assert_eq!(after.probe(SCOPE, &pages(1, 3)), 3, "the run whose first write failed is durable");
    assert_eq!(after.probe(SCOPE, &pages(2, 3)), 3, "a run inserted after the failure is durable");
}

#[test]
fn failed_checkpoint_poisons_but_loses_no_run() {
    for op in [Op::Write, Op::SyncData, Op::Open, Op::SetLen, Op::SyncDir] {
        for nth in 1..4 {
            let disk = SimDisk::new(1 << 24);
            let schedule = Schedule::new();
            let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
            let index = open(medium, RunOptions::default());
            for family in 0..9 {
                insert(&index, family + 1, None, &pages(family, 3)).unwrap();
                if family % 4 == 3 {
                    index.checkpoint().unwrap();
                }
            }
            index.sync().unwrap();
            let before = contents(&index);
            schedule.add(Rule::nth(nth, MediumFault::Io).on(op));
            if let Err(error) = index.checkpoint() {
                assert_eq!(error.kind(), ErrorKind::Fatal);
                assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal);
            }
            assert_eq!(contents(&open(Arc::new(disk.crash(nth)), RunOptions::default())), before);
        }
    }
}

#[test]
fn failed_open_loses_no_run() {
    let disk = nine_runs();
    for op in [Op::Open, Op::Read, Op::List, Op::Stat, Op::CreateDir] {
        for nth in 1..20 {
            let schedule = Schedule::new();
            schedule.add(Rule::nth(nth, MediumFault::Io).on(op));
            let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
            match RunIndex::open(medium, Path::new(DIR), RunOptions::default()) {
                Ok(index) => assert_eq!(index.stats().runs, 9, "{op:?} {nth}"),
                Err(error) => assert!(op != Op::Read, "{nth}: one failed read: {error}"),
            }
        }
    }
    assert_eq!(open(Arc::new(disk), RunOptions::default()).stats().runs, 9);
}

/// Two checkpoints and a journal with nine runs, of which each checkpoint and the journal files
/// have some.
fn nine_runs() -> SimDisk {
    let disk = SimDisk::new(1 << 24);
    let index = open(Arc::new(disk.clone()), RunOptions::default());
    for family in 0..9 {
        insert(&index, family + 1, None, &pages(family, 3)).unwrap();
        if family % 4 == 3 {
            index.sync().unwrap();
            index.checkpoint().unwrap();
        }
    }
    index.sync().unwrap();
    disk
}

#[test]
fn unreadable_checkpoint_is_replaced_by_the_other() {
    for name in ["checkpoint-0", "checkpoint-1"] {
        for nth in 1..4 {
            let (disk, schedule) = (nine_runs(), Schedule::new());
            schedule.add(Rule::nth(nth, MediumFault::Io).onward().on(Op::Read).at(name));
            let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
            let index = open(medium.clone(), RunOptions::default());
            assert_eq!((index.stats().runs, index.recovered().damaged), (9, false), "{name} {nth}");
            insert(&index, 10, None, &pages(10, 3)).unwrap();
            index.sync().unwrap();
            drop(index);
            schedule.heal();
            assert_eq!(open(medium, RunOptions::default()).stats().runs, 10, "{name} {nth}");
        }
    }
}

#[test]
fn unreadable_journal_costs_its_records_only() {
    let (disk, schedule) = (nine_runs(), Schedule::new());
    let last = disk.list(Path::new(DIR)).unwrap().pop().unwrap();
    let last = last.to_str().unwrap().to_owned();
    // The header of the file can be read, and no record of it.
    schedule.add(Rule::nth(2, MediumFault::Io).onward().on(Op::Read).at(last));
    let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
    let index = open(medium, RunOptions::default());
    assert_eq!((index.stats().runs, index.recovered().damaged), (8, true));
    drop(index);
    let index = open(Arc::new(disk), RunOptions::default());
    assert_eq!((index.stats().runs, index.recovered().damaged), (8, false));
}

/// The first reads of a journal file fail, and one checkpoint is missing: the index is read again
/// before records are given up. With one of the checkpoints missing both files are read.
#[test]
fn journal_that_can_be_read_again_loses_no_record() {
    let mut injected = [0; 2];
    for missing in ["checkpoint-0", "checkpoint-1"] {
        for (journal, failures) in (0..2).flat_map(|journal| (1..4).map(move |n| (journal, n))) {
            let (disk, schedule) = (nine_runs(), Schedule::new());
            disk.remove(&Path::new(DIR).join(missing)).unwrap();
            let mut names = disk.list(Path::new(DIR)).unwrap();
            names.retain(|name| name.to_str().unwrap().starts_with("journal-"));
            let name = names[names.len() - 1 - journal].to_str().unwrap();
            for nth in 1..=failures {
                schedule.add(Rule::nth(nth, MediumFault::Io).on(Op::Read).at(name));
            }
            let medium = Arc::new(Faulty::new(Arc::new(disk), schedule.clone()));
            let index = open(medium, RunOptions::default());
            let recovered = (index.stats().runs, index.recovered().damaged);
            assert_eq!(recovered, (9, false), "{missing} {name} {failures}");
            injected[journal] += schedule.injected();
        }
    }
    assert!(injected.iter().all(|reads| *reads > 0), "{injected:?}");
}

#[test]
fn journal_buffer_is_bounded_until_a_sync() {
    let options = RunOptions { pending_bytes_max: 4096, ..RunOptions::default() };
    let index = open(Arc::new(SimDisk::new(1 << 24)), options);
    let mut refused = 0;
    for family in 0..200 {
        if let Err(error) = insert(&index, family + 1, None, &pages(family, 4)) {
            assert_eq!(error.kind(), ErrorKind::Retry);
            assert_eq!(index.exists(SCOPE, &pages(family, 4)), [false; 4]);
            refused += 1;
            index.sync().unwrap();
            insert(&index, family + 1, None, &pages(family, 4)).unwrap();
        }
        assert!(index.stats().pending_bytes <= 4096);
    }
    assert!(refused > 3);
    assert_eq!(index.stats().runs, 200);
}

#[test]
fn files_stay_within_their_budget() {
    let disk = SimDisk::new(1 << 26);
    let budget = 1 << 20;
    let options = RunOptions { metadata_bytes_max: budget, ..RunOptions::default() };
    let index = open(Arc::new(disk.clone()), options.clone());
    let on_disk = || {
        let names = disk.list(Path::new(DIR)).unwrap();
        let length =
            |name| disk.open(&Path::new(DIR).join(name), Access::default()).unwrap().length();
        (names.len(), names.into_iter().map(|name| length(name).unwrap()).sum::<u64>())
    };
    let mut runs = std::collections::VecDeque::new();
    let mut most = 0;
    for family in 0..20_000u64 {
        let run = loop {
            match insert(&index, family + 1, None, &pages(family, 4)) {
                Ok(run) => break run,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Retry);
                    index.sync().unwrap();
                    index.maintain().unwrap();
                    if insert(&index, family + 1, None, &pages(family, 4)).is_err() {
                        // The index is full of runs, not of unsynced journal records: remove the
                        // oldest runs.
                        most = most.max(runs.len());
                        for _ in 0..50 {
                            index.truncate(runs.pop_front().unwrap(), 0);
                        }
                    } else {
                        let (run, _) = index.locate(SCOPE, page(family, 0)).unwrap();
                        break run;
                    }
                }
            }
        };
        runs.push_back(run);
        if family % 64 == 0 {
            index.sync().unwrap();
            let (files, bytes) = on_disk();
            assert!(bytes <= budget, "{bytes} bytes");
            assert!(files <= 5, "{files} files");
            let stats = index.stats();
            assert_eq!((stats.files, stats.disk_bytes), (files as u64, bytes));
        }
    }
    assert!(most > 1500, "the budget is not used up: the index held at most {most} runs");
    index.sync().unwrap();
    let stats = index.stats();
    drop(index);
    assert_eq!(open(Arc::new(disk.crash(1)), options).stats().runs, stats.runs);
}

#[test]
fn file_of_other_version_is_refused_with_its_version() {
    for name in ["checkpoint-0", "journal-0000000000000002"] {
        let disk = SimDisk::new(1 << 24);
        let index = open(Arc::new(disk.clone()), RunOptions::default());
        insert(&index, 1, None, &pages(1, 3)).unwrap();
        index.checkpoint().unwrap();
        drop(index);
        let path = Path::new(DIR).join(name);
        let file = disk.open(&path, Access { write: true, ..Access::default() }).unwrap();
        let header = if name.starts_with('c') { 48 } else { 40 };
        let mut bytes = vec![0; header];
        file.read_at(&mut bytes, 0).unwrap();
        bytes[8] = 9;
        let sum = ritornello_format::checksum(&bytes[..header - 8]);
        bytes[header - 8..].copy_from_slice(&sum.to_le_bytes());
        file.write_at(&bytes, 0).unwrap();
        let error =
            RunIndex::open(Arc::new(disk), Path::new(DIR), RunOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name}");
        assert!(error.to_string().contains("format 9"), "{error}");
    }
}

/// The upper 32 bits of a run's name count the reuses of the record whose number is in the lower 32
/// bits. The run of this test has nearly the maximum count, so an open of the index gives all runs
/// new names.
#[test]
fn runs_are_renumbered_before_names_run_out() {
    let disk = SimDisk::new(1 << 24);
    let index = open(Arc::new(disk.clone()), RunOptions::default());
    index.sync().unwrap();
    drop(index);
    let (old, place) = (u64::from(u32::MAX - 1) << 32 | 3, place(1, 2));
    let mut frames = Writer::new();
    JournalRecord::Insert(RunImage {
        run: old,
        scope: SCOPE,
        chained: true,
        parent: None,
        recency: 4,
        place: Cow::Borrowed(&place),
        pages: Cow::Owned(pages(1, 2)),
    })
    .encode(1, &mut frames);
    let path = Path::new(DIR).join("journal-0000000000000001");
    let file = disk.open(&path, Access { write: true, ..Access::default() }).unwrap();
    file.write_at(frames.as_slice(), 40).unwrap();
    file.sync_data().unwrap();
    for seed in 0..3 {
        let disk = disk.crash(seed);
        let index = open(Arc::new(disk.clone()), RunOptions::default());
        assert!(!index.recovered().damaged);
        let (run, _) = index.locate(SCOPE, page(1, 1)).unwrap();
        assert!(run.0 >> 32 < 10, "{run:?}");
        index.truncate(run, 1);
        insert(&index, 2, Some(page(1, 0)), &pages(2, 2)).unwrap();
        index.sync().unwrap();
        let before = contents(&index);
        assert_eq!(contents(&open(Arc::new(disk.crash(seed)), RunOptions::default())), before);
    }
}

#[test]
fn concurrent_index_syncs_share_file_syncs() {
    let disk = Arc::new(SimDisk::new(1 << 26));
    let schedule = Schedule::new();
    let index = open(Arc::new(Faulty::new(disk, schedule.clone())), RunOptions::default());
    let before = schedule.count(Op::SyncData);
    // The first sync holds the journal's lock until the other callers wait for the lock.
    schedule.add(Rule::nth(1, MediumFault::Stall).on(Op::SyncData));
    let begun = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for generation in 1..=8 {
            let (index, begun) = (&index, &begun);
            scope.spawn(move || {
                insert(index, generation, None, &pages(generation, 2)).unwrap();
                begun.fetch_add(1, Ordering::AcqRel);
                index.sync().unwrap();
            });
        }
        while begun.load(Ordering::Acquire) < 8 || schedule.injected() == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(50));
        schedule.heal();
    });
    let syncs = schedule.count(Op::SyncData) - before;
    assert!(syncs < 8, "8 callers made {syncs} syncs");
    assert_eq!(index.stats().pending_bytes, 0);
}

#[test]
fn concurrent_threads_leave_a_consistent_index() {
    let disk = Arc::new(SimDisk::new(1 << 30));
    let options = RunOptions { metadata_bytes_max: 64 << 20, ..RunOptions::default() };
    let index = open(Arc::clone(&disk) as Arc<dyn Medium>, options.clone());
    let (index, stop) = (&index, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                index.checkpoint().unwrap();
            }
        });
        check_concurrently(index, 3, 600, stop, &|_, keys| index.walk(SCOPE, &keys));
    });
    index.sync().unwrap();
    let before = contents(index);
    let after = open(Arc::new(disk.crash(9)), options);
    assert!(!after.recovered().damaged);
    assert_eq!(contents(&after), before);
}
