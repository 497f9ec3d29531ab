//! A disk that fails: refused, counted, never wrong, never stuck.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Fault, Faulty, Op, Rule, Schedule, SimDisk};
use std::path::Path;
use std::sync::Arc;

fn faulty() -> (Schedule, Open) {
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(SimDisk::new(64 << 20)), schedule.clone()));
    let open = open_on(medium, &options(Path::new("/store"), 12)).unwrap();
    (schedule, open)
}

#[test]
fn failed_writes_are_not_stored_and_their_space_comes_back() {
    let (schedule, open) = faulty();
    let scope = chained(64 << 10);
    put(&open.store, &scope, &sequence(1, 4), None);
    for fault in [Fault::Io, Fault::NoSpace, Fault::Short] {
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
fn silently_torn_writes_are_misses_once_and_then_absent() {
    let (schedule, open) = faulty();
    let (scope, keys) = (chained(64 << 10), sequence(1, 4));
    schedule.add(Rule::always(Fault::Torn).on(Op::Write).at("seg-"));
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
    for fault in [Fault::Io, Fault::Short, Fault::Torn] {
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
fn a_failed_sync_poisons_and_a_reopened_store_goes_on() {
    for file in ["seg-", "index"] {
        let schedule = Schedule::new();
        let disk = SimDisk::new(64 << 20);
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        let open = open_on(medium, &options(Path::new("/store"), 12)).unwrap();
        let scope = chained(64 << 10);
        put(&open.store, &scope, &sequence(1, 4), None);
        open.store.flush().unwrap();
        put(&open.store, &scope, &sequence(2, 4), None);
        schedule.add(Rule::nth(1, Fault::Io).on(Op::SyncData).at(file));
        assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Fatal, "{file}");
        // Not retried, though the disk is well again.
        assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Fatal);
        let refused = try_put(&open.store, &scope, &sequence(3, 4), None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Fatal);
        assert_eq!(get(&open.store, &scope, &sequence(1, 4)).pages, 4);
        open.forget();
        let open = open_on(Arc::new(disk.crash(1)), &options(Path::new("/store"), 12)).unwrap();
        assert_eq!(get(&open.store, &scope, &sequence(1, 4)).pages, 4);
        assert_eq!(put(&open.store, &scope, &sequence(3, 4), None).pages, 4);
        open.close();
    }
}

#[test]
fn a_full_disk_stops_growth_not_the_store() {
    let (schedule, open) = faulty();
    let scope = chained(64 << 10);
    put(&open.store, &scope, &sequence(1, 4), None);
    schedule.add(Rule::always(Fault::NoSpace).on(Op::Allocate));
    for name in 2..40 {
        assert_eq!(put(&open.store, &scope, &sequence(name, 4), None).pages, 4);
    }
    assert_eq!(get(&open.store, &scope, &sequence(39, 4)).pages, 4);
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.segments < stats.segments_max && stats.counters["pages_evicted"] > 0);
    open.close();
}

#[test]
fn every_single_fault_during_open_is_an_error_or_harmless() {
    let disk = SimDisk::new(64 << 20);
    let opts = options(Path::new("/store"), 12);
    let scope = chained(64 << 10);
    let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
    put(&open.store, &scope, &sequence(1, 4), None);
    open.close();
    for nth in 1..60 {
        let schedule = Schedule::new();
        schedule.add(Rule::nth(nth, Fault::Io));
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        if let Ok(open) = open_on(medium, &opts) {
            schedule.heal();
            get(&open.store, &scope, &sequence(1, 4));
            open.forget();
        }
    }
}
