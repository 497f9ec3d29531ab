//! Volumes and segments that return under load, and a directory that cannot be written.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use parking_lot::Mutex;
use ritornello_format::Scope;
use ritornello_medium::{Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Options};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn two_volumes(mib: u64) -> Options {
    let paths = vec!["/a".into(), "/b".into()];
    Options { paths, background_threads: false, ..options(Path::new("/store"), mib) }
}

/// If one of two volumes cannot be written, the store opens without it. A volume on a full disk
/// stays in use: no new file can be created on it, but its segments can be written.
#[test]
fn unwritable_volume_is_absent_unless_full() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &two_volumes(16)).unwrap();
    for name in 0..12 {
        put(&open.store, &chained(65_536), &sequence(name, 8), None);
    }
    open.store.flush().unwrap();
    open.close();
    for fault in [MediumFault::NoSystemFiles, MediumFault::NoSpace, MediumFault::Io] {
        let schedule = Schedule::new();
        schedule.add(Rule::nth(1, fault).onward().on(Op::Open).at("/b/.selftest"));
        if fault != MediumFault::NoSpace {
            schedule.add(Rule::nth(1, fault).onward().on(Op::Write).at("/b/"));
        }
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
        let plain = Options { background_threads: false, ..Options::new(Path::new("/store")) };
        let open = open_on(medium, &plain);
        assert!(open.is_ok(), "{fault:?}: {}", open.map(Open::close).unwrap_err());
        let open = open.unwrap();
        let pages = |name| get(&open.store, &chained(65_536), &sequence(name, 8)).pages;
        let found: usize = (0..12).map(pages).sum();
        assert_eq!(found == 96, fault == MediumFault::NoSpace, "{fault:?}: {found} pages");
        open.close();
    }
}

/// Threads put, get, delete and flush while a volume or a segment returns. No call hangs, flushed
/// pages are lost only by a deletion or an eviction, and no space is lost.
#[test]
fn space_returns_under_load() {
    for round in 0..40u64 {
        let disk = SimDisk::new(256 * MIB);
        let open = open_on(Arc::new(disk.clone()), &two_volumes(32)).unwrap();
        let scope = chained(16_384);
        for name in 0..60 {
            put(&open.store, &scope, &sequence(name, 8), None);
        }
        open.store.flush().unwrap();
        open.close();
        let schedule = Schedule::new();
        if round % 2 == 0 {
            disk.unmount(Path::new("/b")).unwrap();
        } else {
            let rule = Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open);
            schedule.add(rule.at("/b/seg-000000"));
        }
        let medium: Arc<dyn Medium> =
            Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        let plain =
            Options { background_threads: round % 4 < 2, ..Options::new(Path::new("/store")) };
        let open = open_on(medium, &plain).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let (open, stop, scope) = (&open, &stop, &scope);
            for thread in 0..3u64 {
                threads.spawn(move || {
                    let mut n = 1000 * (thread + 1);
                    while !stop.load(Ordering::Relaxed) {
                        n += 1;
                        let _ = try_put(&open.store, scope, &sequence(n, 4), None);
                        let old = (n * 7 + thread) % 60;
                        if old < 30 && n % 5 == 0 {
                            open.store.delete(scope, &refs(&sequence(old, 8))).unwrap();
                        }
                        get(&open.store, scope, &sequence(old, 8));
                        if n % 11 == 0 {
                            open.store.flush().unwrap();
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            if round % 2 == 0 {
                disk.mount(Path::new("/b")).unwrap();
            } else {
                schedule.heal();
            }
            open.core.run_once();
            std::thread::sleep(Duration::from_millis(20));
            open.core.run_once();
            stop.store(true, Ordering::Relaxed);
        });
        open.core.run_once();
        open.store.flush().unwrap();
        open.store.flush().unwrap();
        let stats = open.store.stats().unwrap().catalog;
        assert!(stats.absent_space.reasons.is_empty());
        let evicted = stats.counters["evicted_pages"];
        let kept: u64 =
            (30..60).map(|name| get(&open.store, &scope, &sequence(name, 8)).pages as u64).sum();
        assert!(
            kept + evicted >= 240,
            "round {round}: of 240 pages {kept} stayed, {evicted} were evicted"
        );
        let used = open.store.stats().unwrap().catalog.used_bytes;
        open.close();
        let open =
            open_on(Arc::new(disk), &Options { background_threads: false, ..plain }).unwrap();
        let again = open.store.stats().unwrap().catalog.used_bytes;
        assert_eq!(used, again, "round {round}: space was lost");
        assert!(open.core.verify(false, &mut |_, _| {}).unwrap().findings.is_empty());
        open.close();
    }
}

/// A volume returns while a segment is created on another volume. The returning volume has segments
/// without runs, so fewer segments are left for the other volumes. The allocator still knows every
/// segment file.
#[test]
fn segment_created_during_return_is_counted() {
    let disk = SimDisk::new(256 * MIB);
    let scope = unchained(65_536);
    let open = open_on(Arc::new(disk.clone()), &two_volumes(16)).unwrap();
    for name in 0..24 {
        assert_eq!(put(&open.store, &scope, &sequence(name, 8), None).pages, 8);
    }
    for name in 0..24 {
        assert_eq!(open.store.delete(&scope, &refs(&sequence(name, 8))).unwrap(), 8);
    }
    open.store.change_capacity(&CapacityChange::AddVolume("/c".to_owned())).unwrap();
    open.close();
    disk.unmount(Path::new("/b")).unwrap();
    let schedule = Schedule::new();
    let medium = Faulty::new(Arc::new(disk.clone()), schedule.clone());
    let plain = Options { background_threads: false, ..Options::new(Path::new("/store")) };
    let open = open_on(Arc::new(medium), &plain).unwrap();
    let slow = MediumFault::Slow(Duration::from_millis(200));
    schedule.add(Rule::nth(1, slow).on(Op::Allocate).at("/c/seg-"));
    let before = schedule.count(Op::Allocate);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for name in 100..108 {
                put(&open.store, &scope, &sequence(name, 8), None);
            }
        });
        while schedule.count(Op::Allocate) == before {
            std::thread::yield_now();
        }
        disk.mount(Path::new("/b")).unwrap();
        open.core.run_once();
    });
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.absent_space.reasons.is_empty(), "{:?}", stats.absent_space);
    let counted: u64 = stats.paths.iter().map(|path| path.segments).sum();
    assert_eq!(stats.segments, counted, "{:?}", stats.paths);
    open.close();
}

/// A scope of many runs is dropped while a volume returns. The store frees the space of each run
/// once: freeing it twice could free space that already holds flushed pages.
#[test]
fn scope_dropped_during_return_is_freed_once() {
    const RUNS: u64 = 2048;
    let full = SimDisk::new(256 * MIB);
    let (keep, doomed) = (unchained(4096), Scope::opaque("doomed", 4096, false));
    let open = open_on(Arc::new(full.clone()), &two_volumes(128)).unwrap();
    for name in 0..RUNS {
        assert_eq!(put(&open.store, &doomed, &sequence(name, 1), None).pages, 1);
    }
    open.store.flush().unwrap();
    open.close();
    for round in 0..40 {
        let disk = full.crash(round);
        disk.unmount(Path::new("/b")).unwrap();
        let plain = Options { background_threads: false, ..Options::new(Path::new("/store")) };
        let open = open_on(Arc::new(disk.clone()), &plain).unwrap();
        let stop = AtomicBool::new(false);
        let flushed = Mutex::new(Vec::new());
        std::thread::scope(|threads| {
            for thread in 0..2u64 {
                let (open, stop, keep, flushed) = (&open, &stop, &keep, &flushed);
                threads.spawn(move || {
                    let mut name = 1_000_000 * (thread + 1);
                    while !stop.load(Ordering::Relaxed) {
                        let put = |name: &u64| {
                            put(&open.store, keep, &sequence(*name, 1), None).pages == 1
                        };
                        let stored: Vec<u64> = (name..name + 8).filter(put).collect();
                        open.store.flush().unwrap();
                        flushed.lock().extend(stored);
                        name += 8;
                    }
                });
            }
            threads.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    open.core.run_once();
                }
            });
            threads.spawn(|| {
                std::thread::sleep(Duration::from_micros(round * 500));
                open.store.drop_scope(&doomed).unwrap();
            });
            std::thread::sleep(Duration::from_millis(2));
            disk.mount(Path::new("/b")).unwrap();
            std::thread::sleep(Duration::from_millis(60));
            stop.store(true, Ordering::Relaxed);
        });
        let lost = |name: &&u64| get(&open.store, &keep, &sequence(**name, 1)).pages == 0;
        let flushed = flushed.into_inner();
        let lost = flushed.iter().filter(lost).count() as u64;
        // On a fast machine the threads fill the store, which then evicts flushed pages: no more
        // pages than the evicted pages may be missing.
        let evicted = open.store.stats().unwrap().catalog.counters["evicted_pages"];
        assert!(lost <= evicted, "round {round}: {lost} of {} pages were lost", flushed.len());
    }
}
