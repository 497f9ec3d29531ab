//! Volumes and segments that an opening cannot use: no page is lost unless the volume is retired,
//! no file is created in their place, and the store reattaches them when they can be used again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::*;
use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Options};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn unmounted_volume_is_reattached_while_open() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    let present = found(&open);
    assert!((1..PAGES).contains(&present), "{present}");
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!(stats.absent_space.reasons.len(), 1, "{:?}", stats.absent_space);
    assert!(stats.absent_space.reasons[0].contains("/b"), "{:?}", stats.absent_space);
    assert!(stats.absent_space.runs > 0);
    // `get`, `probe` and `exists` agree, and a put does not count a page on the absent volume as
    // stored.
    for name in 0..SEQUENCES {
        let (scope, keys) = (chained(65_536), sequence(name, 8));
        let pages = get(&open.store, &scope, &keys).pages;
        assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), pages);
        let exists = open.store.exists(&scope, &refs(&keys)).unwrap();
        assert_eq!(exists.iter().filter(|present| **present).count(), pages);
        let again = put(&open.store, &scope, &keys, None);
        assert_eq!(again.pages, pages);
        assert_eq!(again.reason, if pages < 8 { "absent_space" } else { "" });
    }
    // The volume that is still mounted takes new pages.
    assert_eq!(put(&open.store, &chained(65_536), &sequence(99, 2), None).pages, 2);
    open.core.run_once();
    assert_eq!(found(&open), present);
    assert!(disk.created_under(Path::new("/b")).is_empty());

    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert_eq!(found(&open), PAGES);
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.absent_space.reasons.len(), stats.absent_space.runs), (0, 0));
    open.close();
    let open = reopen(Arc::new(disk));
    assert_eq!(
        (found(&open), get(&open.store, &chained(65_536), &sequence(99, 2)).pages),
        (PAGES, 2)
    );
    open.close();
}

#[test]
fn remounted_volume_returns_all_but_deleted_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/a")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    assert!(found(&open) < PAGES);
    // Pages deleted while the volume is absent stay deleted after its return.
    assert_eq!(open.store.delete(&chained(65_536), &refs(&sequence(0, 8))).unwrap(), 8);
    open.store.flush().unwrap();
    open.close();
    disk.mount(Path::new("/a")).unwrap();
    let open = reopen(Arc::new(disk));
    assert_eq!(found(&open), 88);
    assert!(open.core.verify(false, &mut |_, _| {}).unwrap().findings.is_empty());
    open.close();
}

#[test]
fn segment_that_fails_to_open_keeps_its_pages() {
    for fault in [MediumFault::NoSystemFiles, MediumFault::NoProcessFiles, MediumFault::Io] {
        let disk = SimDisk::new(64 * MIB);
        fill(&disk);
        let schedule = Schedule::new();
        let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        schedule.add(Rule::nth(1, fault).onward().on(Op::Open).at("/a/seg-000000"));
        let open = reopen(Arc::clone(&faulty) as _);
        let present = found(&open);
        assert!((1..PAGES).contains(&present), "{present}");
        open.store.flush().unwrap();
        open.core.run_once();
        assert_eq!(found(&open), present);
        schedule.heal();
        open.core.run_once();
        assert_eq!(found(&open), PAGES);
        // New segments do not get the numbers of segments that were absent, so these puts overwrite
        // no page.
        for name in 100..108 {
            put(&open.store, &chained(65_536), &sequence(name, 8), None);
        }
        open.store.flush().unwrap();
        open.close();
        assert!(found(&reopen(Arc::new(disk))) >= 88);
    }
}

#[test]
fn retired_volume_is_not_used_again() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let forget = |open: &Open, dir: &str| {
        open.core.change_capacity(&CapacityChange::ForgetVolume(dir.to_owned()), Duration::ZERO)
    };
    let open = reopen(Arc::new(disk.clone()));
    let error = forget(&open, "/b").unwrap_err();
    assert!(error.to_string().contains("drain it instead"), "{error}");
    open.close();
    disk.unmount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    let present = found(&open);
    forget(&open, "/b").unwrap();
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.absent_space.runs, stats.paths.len()), (0, 1));
    // After the volume was retired, its pages can be put again.
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
    open.close();
    disk.mount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk));
    assert_eq!(found(&open), PAGES);
    assert!(present < PAGES);
    assert_eq!(
        open.store.stats().unwrap().catalog.paths.len(),
        1,
        "the retired volume was used again"
    );
    open.close();
}

#[test]
fn new_store_refuses_volumes_of_another_store() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    // While a store's directory is not mounted, a new store must not use the store's volumes.
    let elsewhere = Options { dir: "/elsewhere".into(), ..two_volumes() };
    let error = open_on(Arc::new(disk.clone()), &elsewhere).map(Open::close).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("mount or name the right one"), "{error}");
    assert_eq!(found(&reopen(Arc::new(disk))), PAGES);
}

#[test]
fn read_failure_removes_no_page() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk), schedule.clone()));
    let open = reopen(faulty);
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::Read).at("seg-"));
    assert_eq!(found(&open), 0);
    schedule.heal();
    assert_eq!(found(&open), PAGES, "a reader's report of a failed read removed pages");
    assert_eq!(open.store.stats().unwrap().catalog.counters["damaged_pages"], 0);
    open.close();
}

#[test]
fn scrub_keeps_unreadable_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk), schedule.clone()));
    let options = Options { scrub_rate: 1 << 40, ..Options::new(Path::new("/store")) };
    let open = open_on(faulty, &options).unwrap();
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::Read).at("seg-"));
    let scrubbed = || open.store.stats().unwrap().catalog.counters["scrubbed_runs"];
    let until = std::time::Instant::now() + Duration::from_secs(30);
    while scrubbed() < SEQUENCES && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(scrubbed() > 0, "the scrubber did not run");
    schedule.heal();
    assert_eq!(found(&open), PAGES);
    open.close();
}
