//! A disk that completes no operations holds up no background work on other disks, and no close
//! beyond its deadline.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Result, UNIT};
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_store::{CapacityChange, IndexKind, Options};
use ritornello_volume::segments::IoChoice;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const PAGE: u64 = 64 << 10;
const PAGES: usize = 120;
const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(60);

fn dirs(dir: &Path) -> Vec<PathBuf> {
    ["disk0", "disk1", "disk2"].map(|name| dir.join(name)).to_vec()
}

/// Opens a store on three disks. `scrub_rate`: bytes per second that it scrubs; 0 for no scrub.
fn three_volumes(dir: &Path, scrub_rate: u64) -> (Schedule, Open) {
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let options = Options {
        paths: dirs(dir),
        io: IoChoice::Pool,
        scrub_rate,
        ..options(&dir.join("home"), 96)
    };
    (schedule, open_on(medium, &options).unwrap())
}

/// Puts pages one by one, so that each volume has a third of them, and flushes.
fn fill(open: &Open) {
    for key in sequence(1, PAGES).chunks(1) {
        assert_eq!(put(&open.store, &unchained(PAGE), key, None).pages, 1);
    }
    open.store.flush().unwrap();
}

fn found(open: &Open) -> usize {
    let outcome = get(&open.store, &unchained(PAGE), &sequence(1, PAGES));
    outcome.ok.iter().filter(|ok| **ok).count()
}

/// Number of pages that the index has.
fn stored(open: &Open) -> usize {
    let exists = open.store.exists(&unchained(PAGE), &refs(&sequence(1, PAGES))).unwrap();
    exists.iter().filter(|exists| **exists).count()
}

fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    let patience = Instant::now() + LONG;
    while !is_true() {
        assert!(Instant::now() < patience, "timed out; expected: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn drain(open: &Open, dir: &Path, timeout: Duration) -> Result<()> {
    open.core.change_capacity(&CapacityChange::DrainVolume(dir.display().to_string()), timeout)
}

/// Closes the store on a separate thread, because a close that hangs would hang the test.
fn close(open: &Open) -> Result<()> {
    let (core, (ended, end)) = (Arc::clone(&open.core), mpsc::channel());
    open.store.close();
    std::thread::spawn(move || {
        let closed = core.close_within(LONG / 2);
        // Drop the core before the caller opens the directory again: the index `lsm` cannot be
        // opened twice in one process.
        drop(core);
        ended.send(closed)
    });
    let ended = end.recv_timeout(LONG);
    ended.map_err(|_| "the close waits for a disk that does not answer").unwrap()
}

#[test]
fn stalled_scrub_delays_no_drain_and_no_close() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_, open) = three_volumes(dir.path(), 0);
    fill(&open);
    close(&open).unwrap();
    drop(open);
    let (schedule, open) = three_volumes(dir.path(), 1 << 30);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Read).at("disk0/seg-"));
    wait_until("the scrub reads the stalled disk", || schedule.injected() > 0);
    drain(&open, &dir.path().join("disk2"), LONG).unwrap();
    wait_until("scrubbing continues on disk1", || {
        let scrubbed = open.store.stats().unwrap().catalog.counters["scrubbed_runs"];
        scrubbed > PAGES as u64
    });
    close(&open).unwrap();
    assert!(!open.core.is_writing());
    schedule.heal();
}

#[test]
fn close_waits_for_the_run_of_a_scrub_pass() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = three_volumes(dir.path(), 0);
    fill(&open);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Read).at("disk0/seg-"));
    let core = Arc::clone(&open.core);
    let scrub = std::thread::spawn(move || core.scrub_pass(&mut |_, _| true).map(|_| ()));
    wait_until("the scrub reads the stalled disk", || schedule.injected() > 0);
    open.store.close();
    // The close waits for less time than the scrub waits for the stalled read.
    assert_eq!(open.core.close_within(SHORT / 5).unwrap_err().kind(), ErrorKind::Retry);
    assert!(open.core.is_writing(), "the core must report the scrub in progress");
    schedule.heal();
    close(&open).unwrap();
    assert!(!open.core.is_writing());
    assert_eq!(scrub.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn stalled_relocation_delays_no_drain_of_another_volume() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = three_volumes(dir.path(), 0);
    fill(&open);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Read).at("disk0/seg-"));
    let refused = drain(&open, &dir.path().join("disk0"), Duration::from_secs(3)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Retry);
    assert!(refused.to_string().contains("disk0"), "{refused}");
    drain(&open, &dir.path().join("disk2"), LONG).unwrap();
    let paths = open.store.stats().unwrap().catalog.paths;
    assert!(paths.iter().all(|path| !path.dir.ends_with("disk2")), "{paths:?}");
    schedule.heal();
    wait_until("the drain of disk0 completes", || {
        open.store.stats().unwrap().catalog.paths.len() == 1
    });
    assert_eq!(found(&open), PAGES, "pages were lost");
    close(&open).unwrap();
}

#[test]
fn relocation_avoids_a_stalled_volume_and_close_waits_for_its_write() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (schedule, open) = three_volumes(dir.path(), 0);
    fill(&open);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Write).at("disk0/seg-"));
    drain(&open, &dir.path().join("disk2"), LONG).unwrap();
    assert!(schedule.injected() > 0, "no write of a copy to the stalled disk was begun");
    assert_eq!(stored(&open), PAGES);
    open.store.close();
    let refused = open.core.close_within(SHORT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Retry);
    assert!(open.core.is_writing(), "the core must report the write in flight");
    schedule.heal();
    close(&open).unwrap();
    assert!(!open.core.is_writing());
    drop(open);
    let (_, open) = three_volumes(dir.path(), 0);
    assert_eq!(found(&open), PAGES);
    close(&open).unwrap();
}

#[test]
fn close_ends_although_a_sync_does_not() {
    for sync_interval in [Duration::from_millis(1), Duration::from_secs(3600)] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let schedule = Schedule::new();
        let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
        let options = Options {
            paths: dirs(dir.path()),
            io: IoChoice::Pool,
            sync_interval,
            ..options(&dir.path().join("home"), 96)
        };
        let open = open_on(medium, &options).unwrap();
        fill(&open);
        schedule.add(Rule::always(MediumFault::Stall).on(Op::SyncData).at("disk0/seg-"));
        for key in sequence(2, 9).chunks(1) {
            assert_eq!(put(&open.store, &unchained(PAGE), key, None).pages, 1);
        }
        if sync_interval < SHORT {
            wait_until("a background thread syncs", || schedule.injected() > 0);
        }
        open.store.close();
        assert_eq!(open.core.close_within(SHORT).unwrap_err().kind(), ErrorKind::Retry);
        assert!(open.core.is_writing(), "the core must report the sync in flight");
        schedule.heal();
        close(&open).unwrap();
        assert!(!open.core.is_writing());
    }
}

#[test]
fn returning_volume_is_reattached_beside_a_stalled_volume() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_, open) = three_volumes(dir.path(), 0);
    fill(&open);
    close(&open).unwrap();
    drop(open);
    let (home, away) = (dir.path().join("disk2"), dir.path().join("away"));
    std::fs::rename(&home, &away).unwrap();
    let (schedule, open) = three_volumes(dir.path(), 0);
    assert!(found(&open) < PAGES);
    schedule.add(Rule::always(MediumFault::Stall).at("disk0/"));
    std::fs::rename(&away, &home).unwrap();
    wait_until("the volume is reattached", || stored(&open) == PAGES);
    schedule.heal();
    assert_eq!(found(&open), PAGES);
    close(&open).unwrap();
}

#[test]
fn commit_ends_while_a_sync_stalls() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let options = Options {
        io: IoChoice::Pool,
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        ..options(dir.path(), 96)
    };
    let open = open_on(medium, &options).unwrap();
    schedule.add(Rule::always(MediumFault::Stall).on(Op::SyncData).at("seg-"));
    let put_one =
        |name| try_put(&open.store, &unchained(UNIT), &sequence(name, 1), None).unwrap().pages;
    // About 600 records fill the index's buffer. The next commit needs a sync, which stalls.
    let started = Instant::now();
    let stored = (0..2000).take_while(|name| put_one(*name) == 1).count();
    assert!((1..2000).contains(&stored), "{stored} of 2,000 puts were stored");
    assert!(started.elapsed() < LONG);
    schedule.heal();
    wait_until("puts are stored again", || put_one(2000) == 1);
    close(&open).unwrap();
}
