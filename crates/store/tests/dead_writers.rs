//! Writes of dead processes: they reach the disk after the process has lost its locks, but never in
//! space that was since granted to another put.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::{
    Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk, SimProcess,
};
use ritornello_store::{
    Catalog, ClientAlive, ClientId, Options, ReserveRequest, Store, open_segments,
};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::staging::Staging;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const NAME: &str = "0123456789abcdef0123456789abcdef";

/// Returns a process whose segment writes may stay in flight when it is killed. Its other writes
/// complete immediately, as system calls do.
fn process(disk: &SimDisk) -> SimProcess {
    disk.process(|path| path.to_string_lossy().contains("seg-"))
}

fn store_options() -> Options {
    Options { background_threads: false, ..options(Path::new("/store"), 8) }
}

/// Puts and flushes 16 sequences, which take half of the store. Returns their number.
fn fill(store: &Store) -> u64 {
    let names = 16;
    for name in 0..names {
        assert_eq!(put(store, &chained(65_536), &sequence(name, 4), None).pages, 4);
    }
    store.flush().unwrap();
    names
}

fn check(store: &Store, names: u64) {
    for name in 0..names {
        assert_eq!(get(store, &chained(65_536), &sequence(name, 4)).pages, 4, "sequence {name}");
    }
}

/// An owner dies during a put: its segment writes stay in flight.
fn kill_owner_in_a_put(disk: &SimDisk) {
    let dying = process(disk);
    let open = open_on(Arc::new(dying.clone()), &store_options()).unwrap();
    // Create the first segment, so that the next put writes into it.
    assert_eq!(put(&open.store, &chained(65_536), &sequence(50, 1), None).pages, 1);
    open.store.flush().unwrap();
    dying.kill(0, 16);
    let _ = try_put(&open.store, &chained(65_536), &sequence(77, 8), None);
    assert!(disk.in_flight() > 0);
    std::mem::forget(open);
}

#[test]
fn next_owner_drains_space_before_reuse() {
    let disk = SimDisk::new(64 * MIB);
    kill_owner_in_a_put(&disk);
    let open = open_on(Arc::new(process(&disk)), &store_options()).unwrap();
    let names = fill(&open.store);
    disk.land(7);
    check(&open.store, names);
    open.close();
}

#[test]
fn owner_drains_dead_clients_space_before_reuse() {
    let disk = SimDisk::new(64 * MIB);
    let lives = Arc::new(AtomicBool::new(true));
    let looked_at = Arc::clone(&lives);
    let alive: ClientAlive = Arc::new(move |_| looked_at.load(Ordering::Relaxed));
    let open = open_beside(Arc::new(process(&disk)), &store_options(), alive).unwrap();
    // The client is a separate process, so that the kill ends its writes and not the owner's.
    let dying = process(&disk);
    let segments = {
        let medium: Arc<dyn Medium> = Arc::new(dying.clone());
        open_segments(medium, Path::new("/store"), IoChoice::Auto).unwrap().1
    };
    let catalog = Arc::new(open.core.catalog_for(ClientId(1), NAME));
    let client = Store::new(catalog, segments, Staging::new(8 << 20).unwrap());
    // Create the first segment, so that the client writes into it.
    assert_eq!(put(&open.store, &chained(65_536), &sequence(50, 1), None).pages, 1);
    dying.kill(0, 16);
    let _ = try_put(&client, &chained(65_536), &sequence(77, 8), None);
    assert!(disk.in_flight() > 0);
    open.core.client_left(ClientId(1));
    lives.store(false, Ordering::Relaxed);
    open.core.run_once();
    let names = fill(&open.store);
    disk.land(9);
    check(&open.store, names);
    open.close();
}

#[test]
fn undrainable_space_stays_withheld() {
    let disk = SimDisk::new(64 * MIB);
    kill_owner_in_a_put(&disk);
    let schedule = Schedule::new();
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::Drain));
    let medium = Faulty::new(Arc::new(process(&disk)), schedule.clone());
    let open = open_on(Arc::new(medium), &store_options()).unwrap();
    let withheld = open.store.stats().unwrap().catalog.reserved_bytes;
    assert!(withheld >= MIB / 2, "{withheld}");
    assert_eq!(
        put(&open.store, &chained(65_536), &sequence(1, 4), None).pages,
        4,
        "the put must find space in a new segment"
    );
    open.store.flush().unwrap();
    disk.land(3);
    assert_eq!(get(&open.store, &chained(65_536), &sequence(1, 4)).pages, 4);
    schedule.heal();
    open.core.run_once();
    assert_eq!(open.store.stats().unwrap().catalog.reserved_bytes, 0);
    open.close();
}

/// The owner shortens a long reservation log by renaming a new file over it, and must neither open
/// the new file by name nor sync the directory afterwards: if the open or the sync failed, the
/// owner would append to the old file, which has lost its name, and the next owner would not read
/// it.
#[test]
fn shortened_reservation_log_is_found() {
    let reopened = Rule::nth(2, MediumFault::NoSystemFiles).on(Op::Open).at("RESERVATIONS");
    let synced = Rule::nth(1, MediumFault::Io).on(Op::SyncDir).at("/store");
    for rule in [reopened, synced] {
        let disk = SimDisk::new(64 * MIB);
        let schedule = Schedule::new();
        let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        let alive: ClientAlive = Arc::new(|_| true);
        let open = open_beside(medium, &store_options(), Arc::clone(&alive)).unwrap();
        let catalog = open.core.catalog_for(ClientId(1), NAME);
        let scope = catalog.resolve(&chained(4096), true).unwrap().unwrap();
        let keys = sequence(1, 4);
        let reserve =
            || catalog.reserve(scope, &refs(&keys), None, &ReserveRequest::default()).unwrap();
        // Create the segment before the rule is added: its creation syncs the directory, and one of
        // the rules fails such a sync.
        catalog.abort(reserve().id).unwrap();
        let renamed = schedule.count(Op::Rename);
        schedule.add(rule);
        for _ in 0..1500 {
            catalog.abort(reserve().id).unwrap();
        }
        assert!(schedule.count(Op::Rename) > renamed, "the reservation log was not shortened");
        assert!(!reserve().runs.is_empty());
        std::mem::forget(open);
        let open = open_beside(Arc::new(disk), &store_options(), alive).unwrap();
        let withheld = open.store.stats().unwrap().catalog.reserved_bytes;
        assert!(withheld > 0, "the next owner must withhold a living client's space");
    }
}

/// The disk cannot read the reservation log while a client may be writing: the free space, which
/// includes the client's, waits until the client has ended, also across a further opening.
#[test]
fn unreadable_reservation_log_withholds_free_space() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &store_options()).unwrap();
    assert_eq!(put(&open.store, &chained(65_536), &sequence(50, 1), None).pages, 1);
    let catalog = open.core.catalog_for(ClientId(1), NAME);
    let scope = catalog.resolve(&chained(65_536), true).unwrap().unwrap();
    let keys = sequence(77, 4);
    catalog.reserve(scope, &refs(&keys), None, &ReserveRequest::default()).unwrap();
    open.store.flush().unwrap();
    std::mem::forget(open);
    disk.create_dir(Path::new("/store/clients")).unwrap();
    let access = Access { write: true, create: true, direct: false };
    disk.open(&Path::new("/store/clients").join(NAME), access).unwrap();

    let lives = Arc::new(AtomicBool::new(true));
    let looked_at = Arc::clone(&lives);
    let alive: ClientAlive =
        Arc::new(move |name| name == NAME && looked_at.load(Ordering::Relaxed));
    let schedule = Schedule::new();
    schedule.add(Rule::always(MediumFault::Io).on(Op::Read).at("RESERVATIONS"));
    let medium = Faulty::new(Arc::new(disk.clone()), schedule);
    let withheld = |open: &Open| {
        open.core.run_once();
        open.store.stats().unwrap().catalog.reserved_bytes
    };
    let open = open_beside(Arc::new(medium), &store_options(), Arc::clone(&alive)).unwrap();
    let free = withheld(&open);
    assert!(free > MIB / 2, "{free}");
    std::mem::forget(open);
    let open = open_beside(Arc::new(disk), &store_options(), alive).unwrap();
    assert_eq!(withheld(&open), free);
    assert_eq!(put(&open.store, &chained(65_536), &sequence(1, 4), None).pages, 4);
    lives.store(false, Ordering::Relaxed);
    assert_eq!(withheld(&open), 0);
    assert_eq!(put(&open.store, &chained(65_536), &sequence(2, 4), None).pages, 4);
    open.close();
}

/// A process wrote a run and never committed it. `fsck --salvage` restores the run, and a flush
/// makes it durable.
#[test]
fn salvaged_pages_are_durable_after_a_flush() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &store_options()).unwrap();
    // Sync the writes of the opening, and create the first segment.
    put(&open.store, &chained(65_536), &sequence(50, 1), None);
    open.store.flush().unwrap();
    // Put the pages into a copy of the disk, and write the copy's segment to the disk itself: the
    // segment then holds a run that the store's index does not know.
    let (copy, keys) = (disk.crash(1), sequence(77, 6));
    let other = open_on(Arc::new(copy.clone()), &store_options()).unwrap();
    assert_eq!(put(&other.store, &chained(65_536), &keys, None).pages, 6);
    other.close();
    let segment = Path::new("/store/segments/seg-000000");
    let mut bytes = vec![0; MIB as usize];
    let read = copy.open(segment, Access::default()).unwrap().read_at(&mut bytes, 0).unwrap();
    let access = Access { write: true, create: false, direct: false };
    disk.open(segment, access).unwrap().write_at(&bytes[..read], 0).unwrap();
    assert_eq!(open.core.verify(true, &mut |_, _| {}).unwrap().pages_salvaged, 6);
    open.store.flush().unwrap();
    for seed in 0..20 {
        let open = open_on(Arc::new(disk.crash(seed)), &store_options()).unwrap();
        assert_eq!(get(&open.store, &chained(65_536), &keys).pages, 6, "crash {seed}");
    }
}
