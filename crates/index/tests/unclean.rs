//! Opening the index `run` after the previous owner was killed, or after its last sync failed. The
//! page cache may then hold bytes that are not on the disk, and reads return these bytes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "shared with another test")]

mod chains;
mod common;

use chains::insert;
use common::recorder::Recorder;
use ritornello_format::{Error, ErrorKind};
use ritornello_index::conformance::{Content, contents, pages};
use ritornello_index::{Backend, OpenOptions, PrefixIndex, RunIndex, RunOptions};
use ritornello_medium::{Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const DIR: &str = "/index";
/// Pages per run: enough that a checkpoint of a few runs takes several blocks.
const PAGES: u64 = 60;

type Contents = BTreeMap<u64, Content>;

/// Opens the index. `clean` says whether the previous owner closed it without a failed sync.
fn try_open(medium: impl Medium + 'static, clean: bool) -> Result<RunIndex, Error> {
    let options = RunOptions { clean, checkpoint_write_bytes: 2048, ..RunOptions::default() };
    RunIndex::open(Arc::new(medium), Path::new(DIR), options)
}

fn open(medium: impl Medium + 'static, clean: bool) -> RunIndex {
    try_open(medium, clean).unwrap()
}

fn put(index: &RunIndex, families: std::ops::Range<u64>) {
    for family in families {
        insert(index, family + 1, None, &pages(family, PAGES)).unwrap();
    }
}

/// Makes nine runs durable. The newer checkpoint has the first seven runs, the older checkpoint the
/// first five. The journal has records of the last runs only, so recovery needs one of the
/// checkpoints.
fn flushed(medium: impl Medium + 'static) -> RunIndex {
    let index = open(medium, true);
    for families in [0..3, 3..5, 5..7] {
        put(&index, families);
        index.sync().unwrap();
        index.checkpoint().unwrap();
    }
    put(&index, 7..9);
    index.sync().unwrap();
    index
}

/// The file whose sync fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Journal,
    Checkpoint,
}

const FAILURES: [Failure; 2] = [Failure::Journal, Failure::Checkpoint];

/// Returns a disk whose last owner ended after a failed sync, the contents that were durable before
/// that sync, and the contents of the owner's index. `seed` decides which sectors of the failed
/// sync reach the disk.
fn after_failed_sync(failure: Failure, seed: u64) -> (SimDisk, Contents, Contents) {
    let disk = SimDisk::new(1 << 24);
    let index = flushed(disk.clone());
    let durable = contents(&index);
    put(&index, 9..11);
    let failed = match failure {
        Failure::Journal => {
            disk.fail_next_sync("journal-", seed);
            index.sync()
        }
        Failure::Checkpoint => {
            disk.fail_next_sync("checkpoint-", seed);
            index.checkpoint()
        }
    };
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Fatal);
    let all = contents(&index);
    // The index syncs its journal before it writes a checkpoint, so all contents are durable unless
    // the sync of the journal fails.
    let durable = if failure == Failure::Journal { durable } else { all.clone() };
    (disk, durable, all)
}

fn check_everything_survives(disk: &SimDisk, index: &RunIndex, what: &str) {
    let now = contents(index);
    for seed in 0..4 {
        let after = open(disk.crash(seed), seed.is_multiple_of(2));
        assert_eq!(contents(&after), now, "{what}, crash {seed}");
    }
}

#[test]
fn synced_runs_survive_a_predecessors_failed_sync() {
    for failure in FAILURES {
        for seed in 0..12 {
            let (disk, _, all) = after_failed_sync(failure, seed);
            let index = open(disk.clone(), false);
            assert_eq!(contents(&index), all, "the page cache has all runs");
            for round in 0..3 {
                let what = format!("sync of {failure:?} failed, seed {seed}, round {round}");
                put(&index, 20 + round * 2..22 + round * 2);
                index.sync().unwrap();
                check_everything_survives(&disk, &index, &what);
                index.checkpoint().unwrap();
                check_everything_survives(&disk, &index, &what);
            }
        }
    }
}

/// Opens the index on `disk`, whose last owner did not close it cleanly. For each change that this
/// opening makes to the disk, loses power after the change, opens the index again and calls `check`
/// on the index. If `depth` is not zero, also checks every seventh of the resulting disks in the
/// same way, with `depth` - 1.
fn check_power_losses(disk: &SimDisk, depth: u32, check: &dyn Fn(&RunIndex)) {
    let recorder = Recorder::over(disk.clone());
    drop(open(recorder.medium(), false));
    let crashes: Vec<SimDisk> = recorder.crashes.lock().drain(..).collect();
    assert!(!crashes.is_empty());
    for (moment, crash) in crashes.iter().enumerate() {
        let twin = crash.crash(0);
        check(&open(twin.clone(), true));
        assert!(!twin.list(Path::new(DIR)).unwrap().iter().any(|name| name == "checkpoint-new"));
        // Lose power a second time, while the open rewrites the index.
        if depth > 0 && moment % 7 == 3 {
            check_power_losses(crash, depth - 1, check);
        }
        let index = open(crash.clone(), false);
        check(&index);
        put(&index, 40..41);
        index.sync().unwrap();
        let now = contents(&index);
        let seed = moment as u64;
        assert_eq!(
            contents(&open(crash.crash(seed), seed.is_multiple_of(2))),
            now,
            "a second recovery must find the same runs"
        );
    }
}

#[test]
fn power_loss_while_rewriting_keeps_durable_runs() {
    for failure in FAILURES {
        for seed in 0..5 {
            let (disk, durable, all) = after_failed_sync(failure, seed);
            check_power_losses(&disk, u32::from(seed < 2), &|index| {
                let now = contents(index);
                let has =
                    |then: &Contents| then.iter().all(|(run, then)| now.get(run) == Some(then));
                assert!(has(&durable), "sync of {failure:?} failed, seed {seed}");
                assert!(now.iter().all(|(run, now)| all.get(run) == Some(now)));
            });
        }
    }
}

#[test]
fn power_loss_while_rewriting_is_not_damage() {
    let disk = SimDisk::new(1 << 24);
    let schedule = Schedule::new();
    let index = flushed(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    let durable = contents(&index);
    put(&index, 9..11);
    // The failed sync stands for a kill between the write and the sync of the journal.
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData));
    index.sync().unwrap_err();
    drop(index);
    check_power_losses(&disk, 1, &|index| {
        assert!(!index.recovered().damaged, "{:?}", index.recovered());
        let now = contents(index);
        assert!(durable.iter().all(|(run, then)| now.get(run) == Some(then)));
    });
}

#[test]
fn index_killed_at_its_creation_opens_without_damage() {
    let disk = SimDisk::new(1 << 24);
    let schedule = Schedule::new();
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData));
    let killed = try_open(Faulty::new(Arc::new(disk.clone()), schedule), true);
    killed.unwrap_err();
    check_power_losses(&disk, 1, &|index| {
        assert!(!index.recovered().damaged);
        assert_eq!(index.stats().runs, 0);
    });
    let fresh = SimDisk::new(1 << 24);
    assert_eq!(open(fresh, false).stats().files, 1, "an empty index is not rewritten");
}

#[test]
fn failed_sync_while_rewriting_loses_nothing() {
    for file in ["checkpoint-new", "journal-"] {
        for seed in 0..12 {
            let (disk, durable, all) = after_failed_sync(FAILURES[seed as usize % 2], seed / 2);
            disk.fail_next_sync(file, seed);
            try_open(disk.clone(), false).unwrap_err();
            for crash in 0..4 {
                let now = contents(&open(disk.crash(crash), false));
                assert!(durable.iter().all(|(run, then)| now.get(run) == Some(then)));
            }
            let index = open(disk.clone(), false);
            assert_eq!(contents(&index), all);
            put(&index, 40..42);
            index.sync().unwrap();
            check_everything_survives(&disk, &index, file);
        }
    }
}

#[test]
fn full_disk_refuses_rewriting_and_keeps_files() {
    for at in ["checkpoint-new", "journal-"] {
        let (disk, durable, all) = after_failed_sync(Failure::Checkpoint, 3);
        let schedule = Schedule::new();
        schedule.add(Rule::nth(1, MediumFault::NoSpace).onward().on(Op::Write).at(at));
        let full = Faulty::new(Arc::new(disk.clone()), schedule.clone());
        let error = try_open(full.clone(), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Retry);
        assert!(error.to_string().contains("free some space"), "{error}");
        let names = disk.list(Path::new(DIR)).unwrap();
        assert!(!names.iter().any(|name| name == "checkpoint-new"), "{names:?}");
        assert_eq!(contents(&open(disk.crash(1), false)), durable);
        schedule.heal();
        assert_eq!(contents(&open(full, false)), all);
    }
}

#[test]
fn checkpoint_of_a_killed_owner_is_synced_at_open() {
    for seed in 0..24 {
        let disk = SimDisk::new(1 << 24);
        let schedule = Schedule::new();
        let faulty = || Faulty::new(Arc::new(disk.clone()), schedule.clone());
        let index = flushed(faulty());
        // The failed sync stands for a kill between the last write and the sync of a checkpoint.
        schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData).at("checkpoint-"));
        index.checkpoint().unwrap_err();
        drop(index);
        // The failed sync stands for a power loss before the end of the next checkpoint, which
        // overwrites the other file.
        let index = open(faulty(), true);
        let durable = contents(&index);
        schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData).at("checkpoint-"));
        index.checkpoint().unwrap_err();
        assert_eq!(contents(&open(disk.crash(seed), true)), durable, "crash {seed}");
    }
}

#[test]
fn journal_tail_of_a_killed_owner_is_synced_at_open() {
    for seed in 0..24 {
        let disk = SimDisk::new(1 << 24);
        let schedule = Schedule::new();
        let faulty = || Faulty::new(Arc::new(disk.clone()), schedule.clone());
        let index = flushed(faulty());
        put(&index, 9..11);
        // The failed sync stands for a kill between the write and the sync of the journal.
        schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData));
        index.sync().unwrap_err();
        drop(index);
        let index = open(faulty(), true);
        index.sync().unwrap();
        let now = contents(&index);
        assert_eq!(contents(&open(disk.crash(seed), true)), now, "crash {seed}");
    }
}

#[test]
fn journal_file_name_of_a_killed_owner_is_synced_at_open() {
    for seed in 0..24 {
        let disk = SimDisk::new(1 << 24);
        let schedule = Schedule::new();
        let faulty = || Faulty::new(Arc::new(disk.clone()), schedule.clone());
        let index = flushed(faulty());
        // The failed sync stands for a kill between the sync of a new journal file and the sync of
        // its directory.
        schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncDir));
        index.checkpoint().unwrap_err();
        drop(index);
        let index = open(faulty(), true);
        put(&index, 9..11);
        index.sync().unwrap();
        let now = contents(&index);
        assert_eq!(contents(&open(disk.crash(seed), true)), now, "crash {seed}");
    }
}

#[test]
fn backend_open_passes_clean_option() {
    let (disk, _, all) = after_failed_sync(Failure::Journal, 0);
    let options = OpenOptions { clean: false, ..OpenOptions::default() };
    let index = Backend::Run.open(Arc::new(disk.clone()), Path::new(DIR), &options).unwrap();
    assert_eq!(contents(&*index), all);
    assert_eq!(contents(&open(disk.crash(0), true)), all);
}
