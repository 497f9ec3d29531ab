//! Moving runs, as `resize` and the draining of a directory do: holes, damage, and faults.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Options};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 60_000;

fn two_paths(dir: &Path) -> Options {
    let paths = vec![dir.join("a"), dir.join("b")];
    Options { paths, ..options(&dir.join("home"), 24) }
}

fn drain(open: &Open, dir: &Path) -> ritornello_format::Result<()> {
    open.store.change_capacity(&CapacityChange::DrainVolume(dir.to_str().unwrap().to_owned()))
}

/// A removed page leaves a hole in its run. A moved run has the same holes, whose space is free.
#[test]
fn holes_take_no_space_when_moved() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    let scope = unchained(PAGE);
    for name in 0..20 {
        put(&open.store, &scope, &sequence(name, 8), None);
        let keys = sequence(name, 8);
        open.store.delete(&scope, &[&keys[3], &keys[5]]).unwrap();
    }
    open.store.flush().unwrap();
    let used = open.store.stats().unwrap().catalog.used_bytes;
    drain(&open, &dir.path().join("a")).unwrap();
    open.store.flush().unwrap();
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.counters["runs_moved"] > 0);
    assert_eq!(stats.used_bytes, used);
    let check = |open: &Open| {
        for name in 0..20 {
            let keys = sequence(name, 8);
            let present = open.store.exists(&scope, &refs(&keys)).unwrap();
            assert_eq!(present, [true, true, true, false, true, false, true, true]);
            assert_eq!(get(&open.store, &scope, &keys[..3]).pages, 3);
            assert_eq!(get(&open.store, &scope, &keys[6..]).pages, 2);
        }
    };
    check(&open);
    open.close();
    let again = Options { capacity: None, paths: Vec::new(), ..two_paths(dir.path()) };
    let open = open_on(Arc::new(Host), &again).unwrap();
    check(&open);
    assert_eq!(open.store.stats().unwrap().catalog.used_bytes, used);
    open.close();
}

/// A drain moves neither a damaged page nor the pages after it in its chain, and loses no other
/// page.
#[test]
fn damaged_pages_are_not_moved() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    let scope = chained(PAGE);
    for name in 0..20 {
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    open.store.flush().unwrap();
    let segment = std::fs::read_dir(dir.path().join("a")).unwrap().flatten().next().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(segment.path()).unwrap();
    file.write_at(&[0x5A; 4096], 70 * 4096).unwrap();
    drain(&open, &dir.path().join("a")).unwrap();
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.counters["damaged_pages"] > 0 && stats.counters["runs_moved"] > 0);
    let hit = |name| open.store.probe(&scope, &refs(&sequence(name, 8))).unwrap();
    // The run with the damaged page lost this page and the pages after it: its first four pages
    // remain. All other runs are whole.
    let mut hits: Vec<usize> = (0..20).map(hit).collect();
    hits.sort_unstable();
    assert_eq!((hits[0], &hits[1..]), (4, &[8; 19][..]));
    for name in 0..20 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 8)).pages, hit(name));
    }
    open.close();
}

/// A move never reads the place of removed pages, so a disk that cannot read this place can be
/// drained.
#[test]
fn unreadable_holes_do_not_stop_a_move() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    let scope = unchained(PAGE);
    for name in 0..20 {
        let keys = sequence(name, 8);
        put(&open.store, &scope, &keys, None);
        open.store.delete(&scope, &[&keys[6], &keys[7]]).unwrap();
    }
    open.store.flush().unwrap();
    // A segment holds two runs of 1 + 8 * 15 units. The file is cut after the sixth page of the
    // second run, so the two removed pages of that run cannot be read.
    for segment in std::fs::read_dir(dir.path().join("a")).unwrap().flatten() {
        let file = std::fs::OpenOptions::new().write(true).open(segment.path()).unwrap();
        file.set_len((121 + 1 + 6 * 15) * 4096).unwrap();
    }
    drain(&open, &dir.path().join("a")).unwrap();
    assert!(open.store.stats().unwrap().catalog.counters["runs_moved"] > 0);
    for name in 0..20 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 6)).pages, 6);
    }
    open.close();
}

/// A read of a run's old place that fails after the move does not remove the run.
#[test]
fn run_moved_during_verification_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    let scope = chained(PAGE);
    for name in 0..20 {
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    open.store.flush().unwrap();
    let mut drained = false;
    let report = open.core.verify(false, &mut |_, _| {
        if !std::mem::replace(&mut drained, true) {
            drain(&open, &dir.path().join("a")).unwrap();
        }
    });
    assert_eq!(report.unwrap().pages_dropped, 0);
    for name in 0..20 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 8)).pages, 8);
    }
    open.close();
}

/// A failed write leaves every run in place, and a later move succeeds.
#[test]
fn failed_copy_moves_nothing_and_is_retried() {
    let schedule = Schedule::new();
    let disk = SimDisk::new(64 << 20);
    let medium = Faulty::new(Arc::new(disk.clone()), schedule.clone());
    let paths = vec!["/a".into(), "/b".into()];
    let options = Options { background_threads: false, paths, ..options(Path::new("/store"), 24) };
    let open = open_on(Arc::new(medium), &options).unwrap();
    let scope = chained(PAGE);
    for name in 0..20 {
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    open.store.flush().unwrap();
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("seg-"));
    let change = CapacityChange::DrainVolume("/a".to_owned());
    assert!(open.core.change_capacity(&change, Duration::from_secs(5)).is_err());
    assert!(schedule.injected() > 0);
    schedule.heal();
    for name in 0..20 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 8)).pages, 8);
    }
    drain(&open, Path::new("/a")).unwrap();
    for name in 0..20 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 8)).pages, 8);
    }
    assert_eq!(disk.list(Path::new("/a")).unwrap().len(), 0);
    open.close();
}
