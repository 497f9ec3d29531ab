//! Markers of volumes, the files `VOLUME` that name the store to which a directory belongs:
//! interrupted creations, other stores, mount points, shrinking with an absent volume.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::*;
use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, ClientId, Directory, Options, Store, open_segments};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::staging::Staging;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The creation of a store fails before one of its directories is marked, and another store is
/// created on this directory. The first store, opened again, must not use the directory.
#[test]
fn interrupted_creation_takes_no_other_stores_volume() {
    let disk = SimDisk::new(128 * MIB);
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule.add(Rule::nth(1, MediumFault::NoSpace).on(Op::Write).at("/b/VOLUME"));
    let first = Options { dir: "/first".into(), ..two_volumes() };
    assert!(open_on(faulty, &first).is_err());
    let paths = vec!["/b".into()];
    fill_with(&disk, &Options { paths, ..two_volumes() });
    // Open the first store again.
    match open_on(Arc::new(disk.clone()), &first) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
        Ok(open) => {
            for name in 300..330 {
                let _ = try_put(&open.store, &chained(65_536), &sequence(name, 8), None);
            }
            open.store.flush().unwrap();
            open.close();
        }
    }
    let open = reopen(Arc::new(disk));
    assert_eq!(found(&open), PAGES);
}

/// A store of an earlier build, whose directories have no marker, takes no directory that has
/// another store's marker.
#[test]
fn upgraded_store_takes_no_other_stores_volume() {
    let disk = SimDisk::new(128 * MIB);
    let old = Options { dir: "/old".into(), paths: vec!["/b".into()], ..two_volumes() };
    open_on(Arc::new(disk.clone()), &old).unwrap().close();
    let directory = Directory::new(Arc::new(disk.clone()), Path::new("/old"));
    let mut manifest = directory.manifest().unwrap().unwrap();
    manifest.volumes[0].marked = false;
    directory.write_manifest(&manifest).unwrap();
    // The store's volume is unmounted, and another store's file system is mounted in its place.
    disk.unmount(Path::new("/b")).unwrap();
    fill_with(&disk, &Options { paths: vec!["/b".into()], ..two_volumes() });
    match open_on(Arc::new(disk.clone()), &at("/old")) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{error}"),
        Ok(open) => {
            for name in 300..330 {
                let _ = try_put(&open.store, &chained(65_536), &sequence(name, 8), None);
            }
            open.store.flush().unwrap();
            open.close();
        }
    }
    let open = reopen(Arc::new(disk));
    assert_eq!(found(&open), PAGES);
}

/// This build opens a store of an earlier build that has no pages. The store takes an unmarked
/// directory only if the directory is empty and inside the store's directory.
#[test]
fn upgraded_store_takes_only_an_empty_directory() {
    for foreign in [None, Some("/old/segments/notes")] {
        let disk = SimDisk::new(128 * MIB);
        let old = Options { dir: "/old".into(), paths: Vec::new(), ..two_volumes() };
        open_on(Arc::new(disk.clone()), &old).unwrap().close();
        unmark(&disk, "/old", &["/old/segments"]);
        if let Some(name) = foreign {
            let access = Access { write: true, create: true, direct: false };
            disk.open(Path::new(name), access).unwrap();
        }
        let open = open_on(Arc::new(disk.clone()), &at("/old")).unwrap();
        let degraded = is_degraded(&open);
        let put = try_put(&open.store, &chained(65_536), &sequence(0, 8), None);
        let stored = put.map_or(0, |outcome| outcome.pages);
        open.close();
        let marked = disk.list(Path::new("/old/segments")).unwrap().contains(&"VOLUME".into());
        let expected = if foreign.is_some() { (true, 0, false) } else { (false, 8, true) };
        assert_eq!((degraded, stored, marked), expected, "{foreign:?}");
    }
}

/// This build opens a store of an earlier build while a volume without pages is not mounted. The
/// opening writes nothing below the mount point. After the volume is mounted again, the store uses
/// its empty directory only once `paths add` has marked the directory.
#[test]
fn upgraded_empty_directory_is_marked_on_demand() {
    let disk = SimDisk::new(64 * MIB);
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    unmark(&disk, "/store", &["/a", "/b"]);
    disk.unmount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    assert!(is_degraded(&open));
    for name in 0..4 {
        let _ = try_put(&open.store, &chained(65_536), &sequence(name, 8), None);
    }
    open.store.flush().unwrap();
    assert!(disk.created_under(Path::new("/b")).is_empty());
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert!(is_degraded(&open), "an empty directory was used as a volume");
    for dir in ["/a", "/b"] {
        open.core
            .change_capacity(&CapacityChange::AddVolume(dir.to_owned()), Duration::ZERO)
            .unwrap();
    }
    assert!(!is_degraded(&open));
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
    open.close();
    let open = reopen(Arc::new(disk));
    assert_eq!((is_degraded(&open), found(&open)), (false, PAGES));
}

/// An earlier build wrote a segment below the mount point of a marked volume that is not mounted
/// now. The store neither uses nor marks the directory that it finds there.
#[test]
fn directory_with_some_segments_of_a_marked_volume_is_not_used() {
    let disk = SimDisk::new(256 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let file = disk.open(Path::new("/a/seg-000000"), Access::default()).unwrap();
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let access = Access { write: true, create: true, direct: false };
    let copy = disk.open(Path::new("/b/seg-000000"), access).unwrap();
    copy.write_at(&bytes, 0).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    assert!(is_degraded(&open));
    let marked =
        open.core.change_capacity(&CapacityChange::AddVolume("/b".to_owned()), Duration::ZERO);
    assert_eq!(
        marked.unwrap_err().kind(),
        ErrorKind::Invalid,
        "a directory that lacks most segments was marked"
    );
    open.close();
    assert_eq!(disk.list(Path::new("/b")).unwrap(), ["seg-000000"]);
    disk.mount(Path::new("/b")).unwrap();
    assert_eq!(found(&reopen(Arc::new(disk))), PAGES);
}

/// The marker of a volume is lost: `paths add` marks the directory again.
#[test]
fn lost_marker_is_rewritten_on_demand() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.remove(Path::new("/b/VOLUME")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    assert!(is_degraded(&open) && found(&open) < PAGES);
    let add = CapacityChange::AddVolume("/b".to_owned());
    open.core.change_capacity(&add, Duration::ZERO).unwrap();
    assert_eq!((is_degraded(&open), found(&open)), (false, PAGES));
    open.close();
    let open = reopen(Arc::new(disk.clone()));
    assert_eq!((is_degraded(&open), found(&open)), (false, PAGES));
    assert!(open.core.change_capacity(&add, Duration::ZERO).is_err());
    // The marker is lost while the store is open.
    disk.remove(Path::new("/b/VOLUME")).unwrap();
    open.core.change_capacity(&add, Duration::ZERO).unwrap();
    assert!(disk.list(Path::new("/b")).unwrap().contains(&"VOLUME".into()));
}

/// A volume's directory has no marker and no segment that identifies it, but a file that the store
/// did not make. `paths add` refuses to mark the directory, because the volume's disk may not be
/// mounted.
#[test]
fn foreign_files_forbid_marking_without_segments() {
    let disk = SimDisk::new(64 * MIB);
    let make = |path: &str| {
        let access = Access { write: true, create: true, direct: false };
        disk.open(Path::new(path), access).unwrap()
    };
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    disk.remove(Path::new("/b/VOLUME")).unwrap();
    make("/b/photos");
    let open = reopen(Arc::new(disk.clone()));
    let add = |open: &Open| {
        open.core.change_capacity(&CapacityChange::AddVolume("/b".to_owned()), Duration::ZERO)
    };
    let refused = add(&open).unwrap_err();
    assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("photos"));
    assert!(is_degraded(&open));
    disk.remove(Path::new("/b/photos")).unwrap();
    disk.create_dir(Path::new("/b/lost+found")).unwrap();
    make("/b/VOLUME").write_at(b"torn", 0).unwrap();
    add(&open).unwrap();
    assert!(!is_degraded(&open));
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.close();
    make("/b/photos");
    disk.remove(Path::new("/b/VOLUME")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    add(&open).unwrap();
    assert_eq!((is_degraded(&open), found(&open)), (false, PAGES));
}

/// While a store is open, another store's disk is mounted over one of its volumes, which is then
/// drained: no file of the other store is removed.
#[test]
fn drain_removes_no_files_of_another_store() {
    let disk = SimDisk::new(256 * MIB);
    fill(&disk);
    let open = reopen(Arc::new(disk.clone()));
    let second = mount_another_store(&disk);
    let before = disk.list(Path::new("/b")).unwrap();
    let change = CapacityChange::DrainVolume("/b".to_owned());
    let _ = open.core.change_capacity(&change, Duration::from_millis(200));
    for _ in 0..5 {
        open.core.run_once();
    }
    let _ = open.core.close();
    assert_eq!(disk.list(Path::new("/b")).unwrap(), before);
    assert_eq!(found(&second), PAGES);
}

/// A client has found the store's volumes and has no segment of /b open when another store's disk
/// is mounted over /b.
#[test]
fn client_writes_to_no_segment_of_another_store() {
    let disk = SimDisk::new(256 * MIB);
    fill(&disk);
    let open = reopen(Arc::new(disk.clone()));
    let (_, segments) =
        open_segments(Arc::new(disk.clone()), Path::new("/store"), IoChoice::Auto).unwrap();
    let catalog = Arc::new(open.core.catalog_for(ClientId(1), "0123456789abcdef0123456789abcdef"));
    let client = Store::new(catalog, segments, Staging::new(8 << 20).unwrap());
    let second = mount_another_store(&disk);
    let stored = |name: &u64| {
        let put = try_put(&client, &chained(65_536), &sequence(*name, 1), None);
        put.is_ok_and(|outcome| outcome.pages == 1)
    };
    let acknowledged: Vec<u64> = (700..740).filter(stored).collect();
    client.flush().unwrap();
    let returned =
        |name: &&u64| get(&open.store, &chained(65_536), &sequence(**name, 1)).pages == 1;
    assert_eq!(acknowledged.iter().filter(returned).count(), acknowledged.len());
    assert_eq!(found(&second), PAGES);
}

/// Unmounts /b. Creates and fills a store in /other, whose volume is the directory that is now at
/// /b, and returns this store, open.
fn mount_another_store(disk: &SimDisk) -> Open {
    disk.unmount(Path::new("/b")).unwrap();
    let other = Options { dir: "/other".into(), paths: vec!["/b".into()], ..two_volumes() };
    fill_with(disk, &other);
    open_on(Arc::new(disk.clone()), &at("/other")).unwrap()
}

/// Removes the markers of a store, as if a build without markers had made the store.
fn unmark(disk: &SimDisk, store: &str, dirs: &[&str]) {
    let directory = Directory::new(Arc::new(disk.clone()), Path::new(store));
    let mut manifest = directory.manifest().unwrap().unwrap();
    for volume in &mut manifest.volumes {
        volume.marked = false;
    }
    directory.write_manifest(&manifest).unwrap();
    for dir in dirs {
        disk.remove(&Path::new(dir).join("VOLUME")).unwrap();
        disk.sync_dir(Path::new(dir)).unwrap();
    }
}

fn is_degraded(open: &Open) -> bool {
    !open.store.stats().unwrap().catalog.absent_space.reasons.is_empty()
}

/// A store whose creation failed, because one of its directories could not be made, can be created
/// with other directories.
#[test]
fn failed_creation_can_be_repeated_with_other_paths() {
    let disk = SimDisk::new(64 * MIB);
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::CreateDir).at("/typo"));
    let wrong = Options { paths: vec!["/typo".into()], ..two_volumes() };
    assert!(open_on(faulty, &wrong).is_err());
    let again = open_on(Arc::new(disk), &two_volumes()).map(Open::close);
    assert!(again.is_ok(), "{}", again.unwrap_err());
}

/// Statistics and an increase of the capacity work while a segment cannot be opened.
#[test]
fn stats_and_growth_work_while_a_segment_is_absent() {
    let disk = SimDisk::new(64 * MIB);
    fill_with(&disk, &two_volumes());
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::Open).at("/b/seg-000000"));
    let open = reopen(faulty);
    let stats = open.store.stats();
    assert!(stats.is_ok(), "{}", stats.unwrap_err());
    let larger = open.core.change_capacity(&CapacityChange::Capacity(20 * MIB), Duration::ZERO);
    assert!(larger.is_ok(), "{}", larger.unwrap_err());
}

#[test]
fn shrinking_with_an_absent_volume_keeps_some_pages() {
    let disk = SimDisk::new(64 * MIB);
    fill_with(&disk, &two_volumes());
    disk.unmount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk.clone()));
    let before = found(&open);
    // Without background threads this call may leave the change incomplete.
    let _ = open.core.change_capacity(&CapacityChange::Capacity(6 * MIB), Duration::ZERO);
    for _ in 0..6 {
        open.core.run_once();
        open.store.flush().unwrap();
    }
    let after = found(&open);
    assert!(after <= before);
    put(&open.store, &chained(65_536), &sequence(500, 2), None);
    disk.mount(Path::new("/b")).unwrap();
    for _ in 0..6 {
        open.core.run_once();
        open.store.flush().unwrap();
    }
    assert!(after > 0, "all pages of the present volume were evicted");
}

/// A volume is unmounted while the store is open: all pages that are flushed afterwards are found
/// once the volume is mounted again, so none of them is below the mount point.
#[test]
fn pages_flushed_after_an_unmount_are_found() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &two_volumes()).unwrap();
    put(&open.store, &chained(65_536), &sequence(0, 8), None);
    put(&open.store, &chained(65_536), &sequence(1, 8), None);
    open.store.flush().unwrap();
    disk.unmount(Path::new("/b")).unwrap();
    let mut flushed = 0;
    for name in 2..SEQUENCES {
        flushed +=
            try_put(&open.store, &chained(65_536), &sequence(name, 8), None).map_or(0, |o| o.pages);
    }
    open.store.flush().unwrap();
    open.close();
    disk.mount(Path::new("/b")).unwrap();
    let open = reopen(Arc::new(disk));
    let now = found(&open);
    assert_eq!(now, 16 + flushed, "flushed pages are lost");
}
