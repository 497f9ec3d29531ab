//! A failing disk: calls fail or miss, no wrong byte is delivered, and no call hangs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use parking_lot::Mutex;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{Options, PutOptions};
use ritornello_volume::page_memory::{BorrowedPages, BorrowedPagesMut};
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn faulty() -> (Schedule, Open) {
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(SimDisk::new(64 << 20)), schedule.clone()));
    let open = open_on(medium, &options(Path::new("/store"), 12)).unwrap();
    (schedule, open)
}

#[test]
fn failed_writes_release_their_space() {
    let (schedule, open) = faulty();
    let scope = chained(64 << 10);
    put(&open.store, &scope, &sequence(1, 4), None);
    for fault in [MediumFault::Io, MediumFault::NoSpace, MediumFault::Short] {
        schedule.add(Rule::always(fault).on(Op::Write).at("seg-"));
        let outcome = put(&open.store, &scope, &sequence(2, 4), None);
        assert_eq!((outcome.pages, outcome.reason), (0, "io"), "{fault:?}");
        schedule.heal();
        assert_eq!(open.store.stats().unwrap().catalog.reserved_bytes, 0);
    }
    assert_eq!(put(&open.store, &scope, &sequence(2, 4), None).pages, 4);
    assert_eq!(get(&open.store, &scope, &sequence(1, 4)).pages, 4);
    open.close();
}

#[test]
fn torn_writes_miss_once_then_are_not_found() {
    let (schedule, open) = faulty();
    let (scope, keys) = (chained(64 << 10), sequence(1, 4));
    schedule.add(Rule::always(MediumFault::Torn).on(Op::Write).at("seg-"));
    put(&open.store, &scope, &keys, None);
    schedule.heal();
    let outcome = get(&open.store, &scope, &keys);
    assert_eq!(outcome.pages, 0);
    assert!(["checksum", "header"].contains(&outcome.reason), "{}", outcome.reason);
    assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), 0);
    assert!(open.store.stats().unwrap().catalog.quarantined_bytes > 0);
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
    assert_eq!(get(&open.store, &scope, &keys).pages, 4);
    open.close();
}

#[test]
fn failed_and_damaged_reads_are_misses() {
    for fault in [MediumFault::Io, MediumFault::Short, MediumFault::Torn] {
        let (schedule, open) = faulty();
        let (scope, keys) = (chained(64 << 10), sequence(1, 4));
        put(&open.store, &scope, &keys, None);
        schedule.add(Rule::always(fault).on(Op::Read).at("seg-"));
        assert_eq!(get(&open.store, &scope, &keys).pages, 0, "{fault:?}");
        schedule.heal();
        assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
        assert_eq!(get(&open.store, &scope, &keys).pages, 4);
        open.close();
    }
}

#[test]
fn failed_sync_poisons_until_reopened() {
    for file in ["seg-", "index"] {
        let schedule = Schedule::new();
        let disk = SimDisk::new(64 << 20);
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        let open = open_on(medium, &options(Path::new("/store"), 12)).unwrap();
        let scope = chained(64 << 10);
        put(&open.store, &scope, &sequence(1, 4), None);
        open.store.flush().unwrap();
        put(&open.store, &scope, &sequence(2, 4), None);
        schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData).at(file));
        assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Retry, "{file}");
        assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Retry);
        let refused = try_put(&open.store, &scope, &sequence(3, 4), None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Retry);
        assert_eq!(get(&open.store, &scope, &sequence(1, 4)).pages, 4);
        open.forget();
        let open = open_on(Arc::new(disk.crash(1)), &options(Path::new("/store"), 12)).unwrap();
        assert_eq!(get(&open.store, &scope, &sequence(1, 4)).pages, 4);
        assert_eq!(put(&open.store, &scope, &sequence(3, 4), None).pages, 4);
        open.close();
    }
}

#[test]
fn full_disk_stops_growth_only() {
    let (schedule, open) = faulty();
    let scope = chained(64 << 10);
    put(&open.store, &scope, &sequence(1, 4), None);
    schedule.add(Rule::always(MediumFault::NoSpace).on(Op::Allocate));
    for name in 2..40 {
        assert_eq!(put(&open.store, &scope, &sequence(name, 4), None).pages, 4);
    }
    assert_eq!(get(&open.store, &scope, &sequence(39, 4)).pages, 4);
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.segments < stats.segments_max && stats.counters["evicted_pages"] > 0);
    open.close();
}

#[test]
fn fault_during_open_returns_no_wrong_byte() {
    let disk = SimDisk::new(64 << 20);
    let opts = options(Path::new("/store"), 12);
    let scope = chained(64 << 10);
    let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
    put(&open.store, &scope, &sequence(1, 4), None);
    open.close();
    let mut opened = 0;
    for nth in 1..60 {
        let schedule = Schedule::new();
        schedule.add(Rule::nth(nth, MediumFault::Io));
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        if let Ok(open) = open_on(medium, &opts) {
            schedule.heal();
            get(&open.store, &scope, &sequence(1, 4));
            open.forget();
            opened += 1;
        }
    }
    assert!(opened > 0, "every opening failed");
}

/// A sector of the scope registry cannot be read: the opening drops the scopes, as after damage. If
/// the registry can be read again, the opening drops nothing.
#[test]
fn unreadable_scope_registry_does_not_prevent_opening() {
    let opts = options(Path::new("/store"), 12);
    let (scope, keys) = (chained(64 << 10), sequence(1, 4));
    for lasts in [true, false] {
        let disk = SimDisk::new(64 << 20);
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        put(&open.store, &scope, &keys, None);
        open.close();
        let schedule = Schedule::new();
        let fault = Rule::nth(1, MediumFault::Io).on(Op::Read).at("/store/SCOPES");
        schedule.add(if lasts { fault.onward() } else { fault });
        let medium = Arc::new(Faulty::new(Arc::new(disk), schedule.clone()));
        let open = open_on(medium, &opts).unwrap();
        assert_eq!(schedule.injected() > 1, lasts);
        assert_eq!(get(&open.store, &scope, &keys).pages, if lasts { 0 } else { 4 });
        assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
        open.close();
    }
}

/// The index finds no space: a flush may fail, no page is lost, and a flush succeeds once space is
/// free.
#[test]
fn flush_succeeds_after_a_full_disk() {
    for op in [Op::Write, Op::Open, Op::SetLen] {
        let (schedule, disk) = (Schedule::new(), SimDisk::new(64 << 20));
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        let open = open_on(medium, &options(Path::new("/store"), 12)).unwrap();
        let (scope, other) = (chained(64 << 10), unchained(4096));
        let full = || schedule.add(Rule::always(MediumFault::NoSpace).on(op).at("index"));
        full();
        put(&open.store, &scope, &sequence(1, 4), None);
        if let Err(error) = open.store.flush() {
            assert_eq!(error.kind(), ErrorKind::Retry, "{op:?}: {error}");
        }
        assert_eq!(get(&open.store, &scope, &sequence(1, 4)).pages, 4);
        schedule.heal();
        open.store.flush().unwrap();
        let after = open_on(Arc::new(disk.crash(1)), &options(Path::new("/store"), 12)).unwrap();
        assert_eq!(get(&after.store, &scope, &sequence(1, 4)).pages, 4, "{op:?}");
        after.close();

        // The work is long enough for a checkpoint, both before the disk is full and while it is
        // full.
        let work = |names: std::ops::Range<u64>| {
            for name in names {
                put(&open.store, &other, &sequence(name, 40), None);
                let _ = open.store.flush();
                open.core.run_once();
            }
        };
        work(0..100);
        full();
        work(100..250);
        assert!(open.store.stats().unwrap().catalog.poisoned.is_none(), "{op:?}");
        schedule.heal();
        open.store.flush().unwrap();
        work(250..350);
        let last = sequence(349, 40);
        assert_eq!(get(&open.store, &other, &last).pages, 40, "{op:?}");
        let after = open_on(Arc::new(disk.crash(2)), &options(Path::new("/store"), 12)).unwrap();
        assert_eq!(get(&after.store, &other, &last).pages, 40, "{op:?}");
        after.close();
        open.close();
    }
}

/// Runs a short workload: puts, gets, flushes, a deletion, a dropped scope, evictions and
/// maintenance. Flushes after every second put of a chained sequence. Returns the sequences of
/// these puts, if their flush succeeded, each with the number of its stored pages.
fn run_short_workload(open: &Open) -> Vec<(u64, usize)> {
    let (scope, other) = (chained(64 << 10), unchained(5000));
    let mut flushed = Vec::new();
    for name in 0..6 {
        let stored = try_put(&open.store, &scope, &sequence(name, 16), None);
        let _ = try_put(&open.store, &other, &sequence(name, 9), None);
        if name % 2 == 1 && open.store.flush().is_ok() {
            flushed.push((name, stored.map_or(0, |outcome| outcome.pages)));
        }
        get(&open.store, &scope, &sequence(name, 16));
    }
    let _ = open.store.delete(&other, &refs(&sequence(1, 3)));
    let _ = open.store.drop_scope(&other);
    let _ = open.store.flush();
    // The store is full now, so these puts evict.
    for name in 6..14 {
        let _ = try_put(&open.store, &scope, &sequence(name, 16), None);
    }
    open.core.run_once();
    flushed
}

/// Calls [`run_short_workload`] with `fault` at the `nth` operation of the medium. Returns whether
/// the store was poisoned.
fn run_with_fault(opts: &Options, fault: MediumFault, nth: u64) -> bool {
    let scope = chained(64 << 10);
    let (schedule, disk) = (Schedule::new(), SimDisk::new(64 << 20));
    let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule.add(Rule::nth(nth, fault));
    let Ok(open) = open_on(medium, opts) else { return false };
    let flushed = run_short_workload(&open);
    schedule.heal();
    // Count the flushed pages that are still present: puts of the workload may have evicted some,
    // and a torn write may have damaged some.
    let kept: Vec<(u64, usize)> = flushed
        .iter()
        .map(|&(name, pages)| {
            (name, pages.min(get(&open.store, &scope, &sequence(name, 16)).pages))
        })
        .collect();
    let stopped = open.store.stats().unwrap().catalog.poisoned.is_some();
    if !stopped {
        let outcome = put(&open.store, &scope, &sequence(50, 4), None);
        let stats = open.store.stats().unwrap().catalog;
        // After the creation of a segment failed, the store creates none for a while, and a put may
        // find no space.
        let waits = outcome.reason == "no_space" && stats.segments < stats.segments_max;
        assert!(outcome.pages == 4 || waits, "{fault:?} {nth}: {outcome:?}");
        open.store.flush().unwrap();
        assert_eq!(get(&open.store, &scope, &sequence(50, 4)).pages, outcome.pages);
    }
    drop(open);
    let open = open_on(Arc::new(disk.crash(nth)), opts).unwrap();
    for (name, pages) in kept {
        let present = get(&open.store, &scope, &sequence(name, 16)).pages;
        let evicted = !stopped;
        assert!(
            present >= pages || evicted,
            "{fault:?} at operation {nth}: sequence {name} had {pages} pages, has {present}"
        );
    }
    assert_eq!(put(&open.store, &scope, &sequence(60, 4), None).pages, 4, "{fault:?} {nth}");
    open.store.flush().unwrap();
    assert_eq!(get(&open.store, &scope, &sequence(60, 4)).pages, 4, "{fault:?} {nth}");
    open.close();
    stopped
}

/// Opens a store and calls [`run_short_workload`] many times, each time with one fault at another
/// operation. If the open succeeds, the store delivers no wrong byte, and continues, or is poisoned
/// and continues after it is opened again. Flushed pages that a poisoned store still returns
/// survive a power loss.
#[test]
fn any_single_fault_is_survived() {
    let opts = Options { background_threads: false, ..options(Path::new("/store"), 6) };
    let count = {
        let (schedule, disk) = (Schedule::new(), Arc::new(SimDisk::new(64 << 20)));
        let open = open_on(Arc::new(Faulty::new(disk, schedule.clone())), &opts).unwrap();
        run_short_workload(&open);
        schedule.total()
    };
    assert!(count > 200, "{count}");
    // Inject `Io` at every operation, and each other fault at every third operation.
    let faults = [MediumFault::Io, MediumFault::NoSpace, MediumFault::Short, MediumFault::Torn];
    let meets = |(at, nth): &(usize, u64)| *at == 0 || *nth % 3 == *at as u64 % 3;
    let cases = (0..4).flat_map(|at| (1..=count).map(move |nth| (at, nth))).filter(meets);
    let (cases, poisoned) = (Mutex::new(cases), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some((at, nth)) = cases.lock().next() else { return };
                    let stopped = run_with_fault(&opts, faults[at], nth);
                    poisoned.fetch_add(u64::from(stopped), Ordering::Relaxed);
                }
            });
        }
    });
    let poisoned = poisoned.into_inner();
    println!("faults at {count} operations; {poisoned} of the faults poisoned the store");
    assert!(poisoned > 0);
}

#[test]
fn slow_disk_is_awaited_until_the_deadline() {
    let (schedule, open) = faulty();
    let (scope, keys) = (chained(64 << 10), sequence(1, 16));
    put(&open.store, &scope, &keys, None);
    schedule
        .add(Rule::always(MediumFault::Slow(Duration::from_millis(30))).on(Op::Read).at("seg-"));
    schedule
        .add(Rule::always(MediumFault::Slow(Duration::from_millis(30))).on(Op::Write).at("seg-"));
    let control = |millis| Control {
        deadline: Some(Instant::now() + Duration::from_millis(millis)),
        ..Control::default()
    };
    let mut memory = vec![vec![0; 64 << 10]; 16];
    let mut late = |millis| {
        let mut slices: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
        let target = BorrowedPagesMut::new(&mut slices);
        open.store.get_batch(&scope, &refs(&keys), &target, &control(millis)).unwrap()
    };
    let outcome = late(0);
    assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    assert_eq!(late(60_000).pages, 16, "a slow disk must return the pages");
    let pages: Vec<Vec<u8>> = sequence(2, 16).iter().map(|key| page(&scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&pages);
    let names = sequence(2, 16);
    let outcome = open
        .store
        .put_batch(&scope, &refs(&names), &source, &PutOptions::default(), &control(0))
        .unwrap();
    assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    let catalog = open.store.stats().unwrap().catalog;
    assert_eq!((catalog.reserved_bytes, catalog.leases), (0, 0));
    schedule.heal();
    assert_eq!(put(&open.store, &scope, &names, None).pages, 16);
    open.close();
}
