//! Changes of the store's own files that fail half-way, or happen during an opening: no stored page
//! is lost, and no later page is acknowledged that the next owner might not find.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::*;
use common::*;
use ritornello_format::{ErrorKind, Manifest};
use ritornello_medium::{Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Directory};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The sync after the rename of MANIFEST that retires a volume fails, so the disk may have the old
/// or the new MANIFEST. When the volume returns, the store must acknowledge no flush and no put.
#[test]
fn failed_retirement_of_a_volume_fails_flush() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    // The first sync of the directory is for MANIFEST.copy, the second for MANIFEST.
    schedule.add(Rule::nth(2, MediumFault::Io).on(Op::SyncDir).at("/store"));
    let forgotten =
        open.core.change_capacity(&CapacityChange::ForgetVolume("/b".to_owned()), Duration::ZERO);
    assert_eq!(forgotten.unwrap_err().kind(), ErrorKind::Fatal);
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Retry);
    assert!(try_put(&open.store, &chained(65_536), &sequence(500, 8), None).is_err());
}

#[test]
fn failed_drop_of_a_scope_fails_puts() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::SyncDir).at("/store"));
    let dropped = open.store.drop_scope(&chained(65_536));
    assert_eq!(dropped.unwrap_err().kind(), ErrorKind::Retry);
    schedule.heal();
    assert_eq!(found(&open), PAGES, "a failed drop removed pages");
    assert!(try_put(&open.store, &chained(65_536), &sequence(500, 8), None).is_err());
    assert_eq!(open.store.flush().unwrap_err().kind(), ErrorKind::Retry);
}

/// A change that fails on a full disk leaves the store unchanged.
#[test]
fn change_on_full_disk_loses_nothing() {
    for name in ["MANIFEST.copy.new", "/MANIFEST.new", "SCOPES.new"] {
        let disk = SimDisk::new(64 * MIB);
        fill(&disk);
        let schedule = Schedule::new();
        let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
        schedule.add(Rule::nth(1, MediumFault::NoSpace).onward().on(Op::Write).at(name));
        if name == "SCOPES.new" {
            assert!(open.store.drop_scope(&chained(65_536)).is_err());
        } else {
            let larger = CapacityChange::Capacity(20 * MIB);
            assert!(open.core.change_capacity(&larger, Duration::ZERO).is_err());
        }
        assert_eq!(put(&open.store, &chained(65_536), &sequence(500, 8), None).pages, 8);
        open.store.flush().unwrap();
        let file = |name: &str| {
            let file = disk.open(&Path::new("/store").join(name), Access::default()).unwrap();
            let mut bytes = vec![0; file.length().unwrap() as usize];
            file.read_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(file("MANIFEST") == file("MANIFEST.copy"), "{name}: MANIFEST and its copy differ");
        assert_eq!(found(&open), PAGES);
    }
}

/// `paths forget` writes MANIFEST.copy, and finds no file handle to write MANIFEST; a later opening
/// finds none to read MANIFEST. The copy holds a change that never took effect, so the opening must
/// not use it.
#[test]
fn unopenable_manifest_is_not_replaced_by_copy() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    disk.unmount(Path::new("/b")).unwrap();
    let schedule = Schedule::new();
    let medium: Arc<dyn Medium> = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    let open = reopen(Arc::clone(&medium));
    schedule.add(Rule::nth(1, MediumFault::NoSystemFiles).on(Op::Open).at("/store/MANIFEST.new"));
    // The store writes the old MANIFEST.copy back, and finds no file handle for it either.
    schedule
        .add(Rule::nth(2, MediumFault::NoSystemFiles).on(Op::Open).at("/store/MANIFEST.copy.new"));
    let forgotten =
        open.core.change_capacity(&CapacityChange::ForgetVolume("/b".to_owned()), Duration::ZERO);
    assert_eq!((forgotten.unwrap_err().kind(), schedule.injected()), (ErrorKind::Fatal, 2));
    disk.mount(Path::new("/b")).unwrap();
    std::mem::forget(open);
    schedule.add(Rule::nth(1, MediumFault::NoSystemFiles).on(Op::Open).at("/store/MANIFEST"));
    assert_eq!(
        open_on(medium, &at("/store")).map(Open::close).unwrap_err().kind(),
        ErrorKind::Retry
    );
    assert_eq!(found(&reopen(Arc::new(disk))), PAGES);
}

/// A process opens the store while another process creates it. The opening finds no MANIFEST;
/// before it reads MANIFEST.copy, the other process creates a MANIFEST that is newer than this
/// copy.
#[test]
fn manifest_created_during_the_opening_is_read() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let (path, aside) = (Path::new("/store/MANIFEST"), Path::new("/store/MANIFEST.new"));
    let stored = Directory::new(Arc::new(disk.clone()), Path::new("/store")).manifest().unwrap();
    let stored = stored.unwrap();
    let older = Manifest { owner_epoch: stored.owner_epoch - 1, ..stored.clone() };
    let write = Access { write: true, ..Access::default() };
    let copy = disk.open(Path::new("/store/MANIFEST.copy"), write).unwrap();
    copy.write_at(&older.encode(), 0).unwrap();
    disk.rename(path, aside).unwrap();
    let schedule = Schedule::new();
    let medium = Faulty::new(Arc::new(disk.clone()), schedule.clone());
    schedule.before(Op::Open, "/store/MANIFEST.copy", move || disk.rename(aside, path).unwrap());
    let directory = Directory::new(Arc::new(medium), Path::new("/store"));
    assert_eq!(directory.manifest().unwrap(), Some(stored));
    assert_eq!(schedule.hooks(), 0);
}

/// A close finds no space for the index and fails. A second close must not report the changes as
/// durable.
#[test]
fn second_close_claims_no_durability() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    assert_eq!(put(&open.store, &chained(65_536), &sequence(77, 6), None).pages, 6);
    schedule.add(Rule::nth(1, MediumFault::NoSpace).onward().on(Op::Write).at("/index/"));
    assert!(open.core.close().is_err());
    assert!(open.core.close().is_err());
    schedule.heal();
    open.core.close().unwrap();
    open.core.close().unwrap();
    let open = reopen(Arc::new(disk));
    assert_eq!(get(&open.store, &chained(65_536), &sequence(77, 6)).pages, 6);
}
