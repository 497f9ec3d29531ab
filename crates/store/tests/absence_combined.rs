//! Absent space together with other features: reservations, the capacity, drained directories,
//! deletions, mounts that change while a store is opened, and stores of earlier builds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::*;
use common::*;
use ritornello_format::{Extent, Manifest};
use ritornello_medium::{Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{
    CapacityChange, Catalog, ClientAlive, ClientId, Directory, Options, ReserveRequest,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "0123456789abcdef0123456789abcdef";

fn segments(disk: &SimDisk, dir: &str) -> Vec<String> {
    let names = disk.list(Path::new(dir)).unwrap();
    let names = names.into_iter().map(|name| name.to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("seg-")).collect()
}

/// A volume is drained while one of its segments cannot be opened. Every page that was not evicted
/// is found afterwards.
#[test]
fn drain_with_an_absent_segment_loses_no_page() {
    let scope = chained(65_536);
    for number in 0..4 {
        let disk = SimDisk::new(64 * MIB);
        let open = open_on(Arc::new(disk.clone()), &two_volumes()).unwrap();
        for name in 0..20 {
            assert_eq!(put(&open.store, &scope, &sequence(name, 3), None).pages, 3);
        }
        open.store.flush().unwrap();
        open.close();
        let found = |open: &Open| -> usize {
            (0..20).map(|name| get(&open.store, &scope, &sequence(name, 3)).pages).sum()
        };
        let schedule = Schedule::new();
        let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
        let path = format!("/b/seg-00000{number}");
        schedule
            .add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at(path.as_str()));
        let open = reopen(faulty);
        let absent = found(&open);
        let _ = open
            .core
            .change_capacity(&CapacityChange::DrainVolume("/b".to_owned()), Duration::ZERO);
        for _ in 0..4 {
            open.core.run_once();
            open.store.flush().unwrap();
        }
        schedule.heal();
        for _ in 0..4 {
            open.core.run_once();
            open.store.flush().unwrap();
        }
        let stats = open.store.stats().unwrap().catalog;
        println!(
            "{absent} pages found without the segment {path}; {:?} {:?}; segments left in /b: {:?}",
            stats.absent_space,
            stats.paths,
            segments(&disk, "/b")
        );
        let (now, evictions) = (found(&open), evicted(&open));
        open.close();
        let open = reopen(Arc::new(disk));
        let again = found(&open);
        assert!(
            again as u64 + evictions >= 60,
            "of 60 pages {now} were found, {again} after reopening, and {evictions} were evicted"
        );
    }
}

/// Segments that cannot be opened count towards the store's capacity.
#[test]
fn absent_segments_count_towards_the_capacity() {
    let disk = SimDisk::new(256 * MIB);
    fill(&disk);
    let before: Vec<String> = ["/a", "/b"]
        .iter()
        .flat_map(|dir| segments(&disk, dir).into_iter().map(move |name| format!("{dir}/{name}")))
        .collect();
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    for path in &before {
        schedule
            .add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at(path.as_str()));
    }
    let open = reopen(faulty);
    for name in 100..200 {
        let _ = try_put(&open.store, &chained(65_536), &sequence(name, 4), None);
    }
    schedule.heal();
    let max = open.store.stats().unwrap().catalog.segments_max;
    let files = segments(&disk, "/a").len() + segments(&disk, "/b").len();
    assert!(files as u64 <= max, "{files} segment files exceed the maximum of {max}");
}

/// The store gives up a segment that it could not open and whose file was removed: its pages can be
/// put again.
#[test]
fn absent_segment_without_file_is_given_up() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule
        .add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at("/b/seg-000000"));
    let open = reopen(faulty);
    schedule.heal();
    disk.remove(Path::new("/b/seg-000000")).unwrap();
    for _ in 0..3 {
        open.core.run_once();
    }
    for name in 0..SEQUENCES {
        let outcome = put(&open.store, &chained(65_536), &sequence(name, 8), None);
        assert_eq!((outcome.pages, outcome.reason), (8, ""), "sequence {name}");
    }
}

/// The store does not give up an absent segment while its directory is an empty mount point,
/// because the unmounted volume may still have the segment.
#[test]
fn absent_segment_of_unmounted_volume_is_kept() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule
        .add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at("/b/seg-000000"));
    let open = reopen(faulty);
    schedule.heal();
    disk.unmount(Path::new("/b")).unwrap();
    open.core.run_once();
    open.store.flush().unwrap();
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    open.close();
    let open = reopen(Arc::new(disk));
    assert_eq!(found(&open), PAGES);
}

/// The next owner cannot open the segment with a live client's reservation. When the segment has
/// returned, the owner grants the reserved space to no other put.
#[test]
fn live_clients_absent_space_stays_withheld() {
    let disk = SimDisk::new(64 * MIB);
    let alive: ClientAlive = Arc::new(|_| true);
    let all = Options { background_threads: false, ..options(Path::new("/store"), 8) };
    let open = open_beside(Arc::new(disk.clone()), &all, Arc::clone(&alive)).unwrap();
    let client = open.core.catalog_for(ClientId(1), NAME);
    let scope = client.resolve(&chained(65_536), true).unwrap().unwrap();
    let keys = sequence(77, 4);
    let request = ReserveRequest { timeout: Duration::from_secs(1), ..ReserveRequest::default() };
    let reserved = client.reserve(scope, &refs(&keys), None, &request).unwrap();
    let theirs: Vec<Extent> =
        reserved.runs.iter().flat_map(|run| run.place.extents.clone()).collect();
    assert!(!theirs.is_empty());
    std::mem::forget(open);

    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule.add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at("seg-000000"));
    let open = open_beside(faulty, &at("/store"), alive).unwrap();
    schedule.heal();
    open.core.run_once();
    open.core.run_once();
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let scope = catalog.resolve(&chained(65_536), true).unwrap().unwrap();
    let mut granted = 0;
    for name in 0..20 {
        let keys = sequence(name, 4);
        let ours = catalog.reserve(scope, &refs(&keys), None, &request).unwrap();
        granted += ours.runs.len();
        for extent in ours.runs.iter().flat_map(|run| &run.place.extents) {
            let overlaps = |other: &&Extent| {
                other.segment == extent.segment
                    && other.start < extent.end()
                    && extent.start < other.end()
            };
            let hit = theirs.iter().find(overlaps);
            assert!(hit.is_none(), "{extent:?} overlaps the live client's {hit:?}");
        }
    }
    assert!(granted > 0, "no put got space");
}

/// Pages are deleted during the sync with which the store reattaches a volume: their space must not
/// be reused before the deletion is durable.
#[test]
fn space_freed_while_reattaching_waits_for_durability() {
    let disk = SimDisk::new(64 * MIB);
    let small = Options { capacity: Some(10 * MIB), ..two_volumes() };
    {
        let open = open_on(Arc::new(disk.clone()), &small).unwrap();
        for name in 0..SEQUENCES {
            assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
        }
        open.store.flush().unwrap();
        open.close();
    }
    disk.unmount(Path::new("/b")).unwrap();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    let store = Arc::clone(&open.store);
    let scope = chained(65_536);
    // Select the sequences that are on the absent volume.
    let absent: Vec<u64> = (0..SEQUENCES)
        .filter(|name| store.probe(&scope, &refs(&sequence(*name, 8))).unwrap() == 0)
        .collect();
    assert!(!absent.is_empty());
    // This put leaves a journal record and a segment that the next sync must make durable.
    put(&store, &scope, &sequence(900, 1), None);
    let (names, deleting) = (absent.clone(), Arc::clone(&store));
    let delete = move || {
        for name in names {
            deleting.delete(&chained(65_536), &refs(&sequence(name, 8))).unwrap();
        }
    };
    schedule.before(Op::SyncData, "seg-", delete);
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert_eq!(schedule.hooks(), 0, "no segment was synced during the reattachment");
    // Without a flush these puts must not use the space of the deleted pages. The remaining free
    // space suffices, so that no put syncs in search of space.
    for name in 200..207 {
        assert_eq!(put(&store, &scope, &sequence(name, 8), None).pages, 8);
    }
    std::mem::forget(open);
    let mut broken = 0;
    // The process is killed: its writes stay on the disk, and its memory is lost.
    let open = reopen(Arc::new(disk));
    for name in &absent {
        let keys = sequence(*name, 8);
        let promised = open.store.probe(&scope, &refs(&keys)).unwrap();
        let returned = get(&open.store, &scope, &keys).pages;
        broken += promised.saturating_sub(returned);
    }
    assert_eq!(broken, 0, "a probe counted pages that a get does not deliver");
}

/// A volume is unmounted while a store is opened, after the volume's marker was read and before its
/// segments are listed.
#[test]
fn volume_lost_during_opening_keeps_its_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let unmounting = disk.clone();
    schedule.before(Op::List, "/b", move || unmounting.unmount(Path::new("/b")).unwrap());
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    assert_eq!(schedule.hooks(), 0, "the volume was not listed");
    assert!((1..PAGES).contains(&found(&open)), "the volume must be absent");
    open.store.flush().unwrap();
    open.close();
    disk.mount(Path::new("/b")).unwrap();
    assert_eq!(found(&reopen(Arc::new(disk))), PAGES);
}

/// A returned volume is unmounted again while the store reattaches it.
#[test]
fn volume_lost_while_reattaching_keeps_its_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    let here = found(&open);
    disk.mount(Path::new("/b")).unwrap();
    let unmounting = disk.clone();
    schedule.before(Op::List, "/b", move || unmounting.unmount(Path::new("/b")).unwrap());
    open.core.run_once();
    assert_eq!(schedule.hooks(), 0, "the volume was not listed");
    assert_eq!(found(&open), here);
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert_eq!(found(&open), PAGES);
}

/// A volume is unmounted before an opening lists its segments, and mounted again before the opening
/// opens a file of the volume.
#[test]
fn volume_unmounted_while_listed_keeps_its_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let (mounts, next) = (disk.clone(), schedule.clone());
    schedule.before(Op::List, "/b", move || {
        mounts.unmount(Path::new("/b")).unwrap();
        next.before(Op::Open, "/b/", move || mounts.mount(Path::new("/b")).unwrap());
    });
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    open.core.run_once();
    assert_eq!(schedule.hooks(), 0, "the volume was not listed, or none of its files was opened");
    assert_eq!(found(&open), PAGES);
    open.close();
    assert_eq!(found(&reopen(Arc::new(disk))), PAGES);
}

/// The owner cannot open a volume's segments, and the volume is then unmounted. While the owner
/// checks the volume, it is mounted again: after the owner has listed its segments, and before the
/// owner opens a file of the volume.
#[test]
fn volume_returning_after_listing_is_kept() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    schedule.add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at("/b/seg-"));
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    schedule.heal();
    disk.unmount(Path::new("/b")).unwrap();
    open.core.run_once();
    let (mounts, next) = (disk.clone(), schedule.clone());
    schedule.before(Op::List, "/b", move || {
        next.before(Op::Open, "/b/", move || mounts.mount(Path::new("/b")).unwrap());
    });
    for _ in 0..4 {
        open.core.run_once();
    }
    assert_eq!(schedule.hooks(), 0, "the volume was not listed, or none of its files was opened");
    assert_eq!(found(&open), PAGES);
    open.close();
    assert_eq!(found(&reopen(Arc::new(disk))), PAGES);
}

/// This build opens a store of an earlier build for the first time while a volume is not mounted.
#[test]
fn upgrade_with_unmounted_volume_keeps_its_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let directory = Directory::new(Arc::new(disk.clone()), Path::new("/store"));
    let mut manifest: Manifest = directory.manifest().unwrap().unwrap();
    for volume in &mut manifest.volumes {
        volume.marked = false;
    }
    directory.write_manifest(&manifest).unwrap();
    for dir in ["/a", "/b"] {
        disk.remove(&Path::new(dir).join("VOLUME")).unwrap();
        disk.sync_dir(Path::new(dir)).unwrap();
    }
    disk.unmount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    open.store.flush().unwrap();
    open.close();
    disk.mount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk));
    assert_eq!(found(&open), PAGES);
}

/// The store does not use another store's volume, even if the volume's directory has no marker.
#[test]
fn unmarked_volume_of_another_store_is_rejected() {
    let disk = SimDisk::new(128 * MIB);
    fill(&disk);
    // Create another store in the place of /b, and remove its marker, as if an earlier build had
    // created it.
    let b = disk.clone();
    b.unmount(Path::new("/b")).unwrap();
    let other = Options { dir: "/other".into(), paths: vec!["/b".into()], ..two_volumes() };
    let open = open_on(Arc::new(disk.clone()), &other).unwrap();
    for name in 0..SEQUENCES {
        put(&open.store, &unchained(65_536), &sequence(name, 4), None);
    }
    open.store.flush().unwrap();
    open.close();
    let directory = Directory::new(Arc::new(disk.clone()), Path::new("/other"));
    let mut manifest = directory.manifest().unwrap().unwrap();
    manifest.volumes[0].marked = false;
    directory.write_manifest(&manifest).unwrap();
    disk.remove(Path::new("/b/VOLUME")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    for name in 300..330 {
        let _ = try_put(&open.store, &chained(65_536), &sequence(name, 8), None);
    }
    open.store.flush().unwrap();
    open.close();
    let open = open_on(
        Arc::new(disk.clone()),
        &Options { background_threads: false, ..Options::new(Path::new("/other")) },
    );
    let theirs: usize = match &open {
        Ok(open) => (0..SEQUENCES)
            .map(|name| get(&open.store, &unchained(65_536), &sequence(name, 4)).pages)
            .sum(),
        Err(error) => panic!("the other store does not open: {error}"),
    };
    drop(open);
    assert_eq!(theirs as u64, 4 * SEQUENCES);
}
