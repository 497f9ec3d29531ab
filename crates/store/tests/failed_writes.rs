//! A disk that fails writes to the segments on it, although it can be read and synced, costs few
//! puts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::{
    DiskChange, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk, Watch, Watched,
};
use ritornello_store::{CapacityChange, Catalog, ClientId, Options, Outcome, Store};
use ritornello_volume::staging::Staging;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const PAGE: u64 = 64 << 10;
/// Number of runs that may fail before puts avoid a volume.
const FAILED_MAX: usize = 8;

fn two_volumes(medium: Arc<dyn Medium>) -> Open {
    let paths = vec!["/a".into(), "/b".into()];
    let options = Options { paths, background_threads: false, ..options(Path::new("/store"), 64) };
    open_on(medium, &options).unwrap()
}

fn faulty() -> (Schedule, Open) {
    let schedule = Schedule::new();
    let disk = Arc::new(SimDisk::new(256 * MIB));
    let open = two_volumes(Arc::new(Faulty::new(disk, schedule.clone())));
    (schedule, open)
}

/// Puts the first `count` pages of sequence `name`, one page in each put. Returns the outcomes.
fn put_pages(store: &Store, name: u64, count: usize) -> Vec<Outcome> {
    let keys = sequence(name, count);
    keys.chunks(1).map(|key| put(store, &unchained(PAGE), key, None)).collect()
}

fn failed(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.reason == "io").count()
}

fn stored(outcomes: &[Outcome]) -> usize {
    outcomes.iter().map(|outcome| outcome.pages).sum()
}

/// Used bytes of each volume.
fn used(open: &Open) -> Vec<u64> {
    let stats = open.store.stats().unwrap().catalog;
    stats.paths.iter().map(|path| path.used_bytes).collect()
}

/// Leases the pages on `/a` among the first `count` pages of sequence `name`.
fn lease_first_volume(open: &Open, name: u64, count: usize) {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let scope = catalog.resolve(&unchained(PAGE), false).unwrap().unwrap();
    for key in sequence(name, count) {
        let located = catalog.begin_read(scope, &[&key]).unwrap();
        let mut extents = located.runs.iter().flat_map(|run| &run.place.extents);
        if extents.any(|extent| extent.segment.volume() == 1) {
            catalog.release(located.lease).unwrap();
        }
    }
}

#[test]
fn puts_avoid_a_volume_that_fails_writes() {
    let (schedule, open) = faulty();
    assert_eq!(stored(&put_pages(&open.store, 1, 40)), 40);
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    let outcomes = put_pages(&open.store, 2, 40);
    assert_eq!((failed(&outcomes), stored(&outcomes)), (FAILED_MAX, 40 - FAILED_MAX));
    assert_eq!(stored(&put_pages(&open.store, 3, 100)), 100);
    open.store.flush().unwrap();
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.io.warnings.iter().any(|line| line.contains("/b: writes fail")));
    assert_eq!(stats.counters["runs_failed"], FAILED_MAX as u64);
    assert_eq!((stats.reserved_bytes, stats.quarantined_bytes), (0, 0));
    assert!(stats.absent_space.reasons.is_empty());
    assert_eq!(get(&open.store, &unchained(PAGE), &sequence(1, 40)).pages, 40);
    open.close();
}

/// The store is full. Eviction makes room on the volume that takes writes.
#[test]
fn full_store_avoids_a_volume_that_fails_writes() {
    let (schedule, open) = faulty();
    put_pages(&open.store, 1, 1500);
    assert!(open.store.stats().unwrap().catalog.counters["evicted_pages"] > 0);
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    let outcomes = put_pages(&open.store, 2, 300);
    assert_eq!((failed(&outcomes), stored(&outcomes)), (FAILED_MAX, 300 - FAILED_MAX));
    open.close();
}

/// One of two volumes fails writes. Puts replace the contents of the other volume several times.
/// They evict no page of the failing volume, because this would make no room for a put.
#[test]
fn eviction_spares_a_volume_that_puts_avoid() {
    let (schedule, open) = faulty();
    put_pages(&open.store, 1, 1500);
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    put_pages(&open.store, 2, 40);
    let before = used(&open)[1];
    assert!(before > 20 * MIB, "{before}");
    let outcomes = put_pages(&open.store, 3, 1500);
    assert_eq!(stored(&outcomes), 1500);
    open.store.flush().unwrap();
    assert_eq!(used(&open)[1], before);
    open.close();
}

/// Every chain has pages on both volumes, so an eviction of a page may also evict pages after it on
/// the volume that puts avoid.
#[test]
fn eviction_removes_few_pages_of_an_avoided_volume() {
    let (schedule, open) = faulty();
    for name in 0..130 {
        for pages in 1..=8 {
            put(&open.store, &chained(PAGE), &sequence(name, 8)[..pages], None);
        }
    }
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    put_pages(&open.store, 1, 40);
    let before = used(&open)[1];
    assert!(before > 20 * MIB, "{before}");
    let outcomes = put_pages(&open.store, 2, 60);
    assert_eq!(stored(&outcomes), 60);
    let wasted = before - used(&open)[1];
    assert!(wasted <= 8 * 60 * PAGE, "{} pages of the avoided volume were evicted", wasted / PAGE);
    open.close();
}

#[test]
fn owner_avoids_a_volume_that_failed_a_clients_writes() {
    let (schedule, open) = faulty();
    let catalog = Arc::new(open.core.catalog_for(ClientId(1), "client"));
    let staging = Staging::new(8 * MIB as usize).unwrap();
    let client = Store::new(catalog, open.core.segments(), staging);
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    assert_eq!(failed(&put_pages(&client, 1, 40)), FAILED_MAX);
    assert_eq!(failed(&put_pages(&open.store, 2, 40)), 0);
    client.close();
    open.close();
}

/// Fails writes that cover one unit of the volume `/b`, as a bad sector does.
#[derive(Debug, Default)]
struct BadSector {
    failed: AtomicU64,
}

impl Watch for BadSector {
    fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
        const BAD: u64 = 40 << 12;
        match *change {
            DiskChange::Write(path, offset, bytes)
                if path.starts_with("/b/seg-000000")
                    && (offset..offset + bytes as u64).contains(&BAD) =>
            {
                self.failed.fetch_add(1, Ordering::Relaxed);
                Err(io::ErrorKind::Other.into())
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn bad_sector_costs_one_put() {
    let sector = Arc::new(BadSector::default());
    let disk = Arc::new(SimDisk::new(256 * MIB));
    let open = two_volumes(Arc::new(Watched::new(disk, Arc::clone(&sector) as Arc<dyn Watch>)));
    let outcomes = put_pages(&open.store, 1, 100);
    assert_eq!((failed(&outcomes), stored(&outcomes)), (1, 99));
    assert_eq!(sector.failed.load(Ordering::Relaxed), 1);
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.quarantined_bytes >= PAGE && stats.io.warnings.is_empty());
    let used = used(&open);
    assert!(used[0].abs_diff(used[1]) <= 2 * MIB, "both volumes must take puts: {used:?}");
    open.close();
}

/// The next owner does not know of the bad sector. The hole that contains the sector is the best
/// place for a run that a drain moves.
#[test]
fn bad_sector_does_not_stop_a_drain() {
    let sector = Arc::new(BadSector::default());
    let disk = SimDisk::new(256 * MIB);
    let open = || {
        let watch = Arc::clone(&sector) as Arc<dyn Watch>;
        two_volumes(Arc::new(Watched::new(Arc::new(disk.clone()), watch)))
    };
    let first = open();
    assert_eq!(stored(&put_pages(&first.store, 1, 100)), 99);
    first.close();
    let next = open();
    let drain = CapacityChange::DrainVolume("/a".to_owned());
    let is_drained = || next.core.change_capacity(&drain, Duration::from_secs(60)).is_ok();
    assert!((0..10).any(|_| is_drained()));
    assert_eq!(sector.failed.load(Ordering::Relaxed), 2, "one put and one copy must fail");
    let found = get(&next.store, &unchained(PAGE), &sequence(1, 100)).ok;
    assert_eq!(found.iter().filter(|found| **found).count(), 99);
    next.close();
}

/// A file system that copies on write can lack room for writes to segments that exist.
#[test]
fn puts_avoid_a_volume_whose_writes_lack_room() {
    let (schedule, open) = faulty();
    put_pages(&open.store, 1, 1500);
    schedule.add(Rule::always(MediumFault::NoSpace).on(Op::Write).at("/b/seg-"));
    let outcomes = put_pages(&open.store, 2, 300);
    assert_eq!((failed(&outcomes), stored(&outcomes)), (FAILED_MAX, 300 - FAILED_MAX));
    assert_eq!(open.store.stats().unwrap().catalog.quarantined_bytes, 0);
    open.close();
}

/// `/a` has room for the runs of `/c`, and every write to `/b` fails.
#[test]
fn drain_ends_beside_a_volume_whose_writes_fail() {
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(SimDisk::new(256 * MIB)), schedule.clone()));
    let paths = vec!["/a".into(), "/b".into(), "/c".into()];
    let options = Options { paths, background_threads: false, ..options(Path::new("/store"), 64) };
    let open = open_on(medium, &options).unwrap();
    assert_eq!(stored(&put_pages(&open.store, 1, 100)), 100);
    schedule.add(Rule::always(MediumFault::NoSpace).on(Op::Write).at("/b/seg-"));
    let drain = CapacityChange::DrainVolume("/c".to_owned());
    let is_drained = || open.core.change_capacity(&drain, Duration::from_secs(60)).is_ok();
    assert!((0..20).any(|_| is_drained()));
    assert!(schedule.injected() > 0);
    assert_eq!(get(&open.store, &unchained(PAGE), &sequence(1, 100)).pages, 100);
    open.close();
}

/// `/a` has few segments, because its disk is full, and the reserve of the whole store is larger
/// than they are. While puts avoid `/b`, they replace pages of `/a` only.
#[test]
fn small_volume_takes_puts_while_a_large_volume_is_avoided() {
    let (schedule, open) = faulty();
    schedule.add(Rule::nth(3, MediumFault::NoSpace).onward().on(Op::Allocate).at("/a/seg-"));
    put_pages(&open.store, 1, 1500);
    let sizes = open.store.stats().unwrap().catalog;
    assert!(sizes.health.reserve_bytes > 2 * sizes.segment_bytes, "the reserve exceeds `/a`");
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    assert_eq!(failed(&put_pages(&open.store, 2, 40)), FAILED_MAX);
    let before = used(&open)[1];
    assert_eq!(stored(&put_pages(&open.store, 3, 20)), 20);
    assert_eq!(used(&open)[1], before);
    let found = get(&open.store, &unchained(PAGE), &sequence(3, 20)).ok;
    assert!(found.iter().filter(|found| **found).count() >= 10, "{found:?}");
    open.close();
}

/// Everything on `/a` is leased, so no eviction makes room while puts avoid `/b`.
#[test]
fn refused_puts_evict_nothing_on_an_avoided_volume() {
    let (schedule, open) = faulty();
    put_pages(&open.store, 1, 1500);
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("/b/seg-"));
    put_pages(&open.store, 2, 40);
    lease_first_volume(&open, 1, 1500);
    lease_first_volume(&open, 2, 40);
    let before = used(&open)[1];
    assert!(before > 20 * MIB, "{before}");
    // The first of these puts take the free reserve of `/a`.
    let outcomes: Vec<Outcome> = (100..200)
        .flat_map(|name| {
            let outcomes = put_pages(&open.store, name, 1);
            lease_first_volume(&open, name, 1);
            outcomes
        })
        .collect();
    assert!(outcomes[50..].iter().all(|outcome| outcome.reason == "no_space"));
    assert_eq!(used(&open)[1], before);
    open.close();
}
