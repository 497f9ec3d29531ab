//! The copies of the store's files `MANIFEST` and `SCOPES` in the directories of its volumes: each
//! change of a file is copied, and no call waits for a copy.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Manifest, Scope};
use ritornello_medium::{Access, Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Options, VOLUME_COPIES};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u64 = 32 << 10;

fn listed() -> Options {
    let further_dirs = Some(["/a", "/b"].map(PathBuf::from).to_vec());
    Options { further_dirs, background_threads: false, ..options(Path::new("/store"), 24) }
}

fn open_sim(disk: &SimDisk) -> Open {
    open_on(Arc::new(disk.clone()), &listed()).unwrap()
}

fn read(disk: &SimDisk, path: &str) -> Vec<u8> {
    let file = disk.open(Path::new(path), Access::default()).unwrap();
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn copies_follow_changes_and_a_drain_removes_them() {
    let disk = SimDisk::new(96 * MIB);
    let open = open_sim(&disk);
    put(&open.store, &unchained(PAGE), &sequence(1, 1), None);
    open.core.run_once();
    let copy = |dir: &str| Manifest::decode(&read(&disk, &format!("{dir}/VOLUME.manifest")));
    assert_eq!(copy("/a").unwrap(), *open.core.manifest());
    let change = |change| open.core.change_capacity(&change, Duration::from_secs(60)).unwrap();
    change(CapacityChange::AddVolume("/c".to_owned()));
    change(CapacityChange::DrainVolume("/a".to_owned()));
    assert_eq!(disk.list(Path::new("/a")).unwrap(), [""; 0]);
    // Create the file of a copy again, as a kill during the removal of the copies may leave it.
    let access = Access { write: true, create: true, direct: false };
    disk.open(Path::new("/a/VOLUME.manifest"), access).unwrap();
    change(CapacityChange::AddVolume("/a".to_owned()));
    open.close();
    for dir in ["/a", "/b", "/c"] {
        assert_eq!(copy(dir).unwrap().encode(), read(&disk, "/store/MANIFEST"), "{dir}");
        assert_eq!(read(&disk, &format!("{dir}/VOLUME.scopes")), read(&disk, "/store/SCOPES"));
    }
    let names = disk.list(Path::new("/store/segments")).unwrap();
    assert!(!names.iter().any(|name| VOLUME_COPIES.iter().any(|copy| name == copy)), "{names:?}");
}

/// One volume stalls when the copy of the scopes is written to it: puts, gets, registrations of
/// scopes, flushes and the close of the store succeed, and the other volume gets its copies.
#[test]
fn stalled_copy_delays_no_call() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| dir.path().join(name);
    let schedule = Schedule::new();
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Write).at("disk1/VOLUME.scopes"));
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let further_dirs = Some(vec![at("disk1"), at("disk2")]);
    let options = Options { further_dirs, ..options(&at("home"), 24) };
    let open = open_on(medium, &options).unwrap();
    let began = Instant::now();
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < Duration::from_secs(20), "timed out; expected: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until("the copy to disk1 stalls", &|| at("disk1/VOLUME.scopes.new").exists());
    until("disk2 has copies", &|| at("disk2/VOLUME.manifest").exists());
    let scopes = |name: &str| std::fs::read(at(name)).unwrap();
    let before = scopes("disk2/VOLUME.scopes");
    for number in 0..20 {
        let scope = Scope::opaque(&format!("scope {number}"), PAGE, false);
        assert_eq!(put(&open.store, &scope, &sequence(1, 2), None).pages, 2);
        assert_eq!(get(&open.store, &scope, &sequence(1, 2)).pages, 2);
    }
    open.store.flush().unwrap();
    until("disk2 has later copies", &|| scopes("disk2/VOLUME.scopes") != before);
    assert!(!at("disk1/VOLUME.manifest").exists() && began.elapsed() < Duration::from_secs(60));
    let closed = Instant::now();
    open.close();
    assert!(closed.elapsed() < Duration::from_secs(10));
    schedule.heal();
    until("the copy to disk1 ends", &|| at("disk1/VOLUME.manifest").exists());
}

/// All operations on the copies fail: puts, flushes and the close of the store succeed.
#[test]
fn failed_copies_fail_no_call() {
    let disk = SimDisk::new(96 * MIB);
    let schedule = Schedule::new();
    for name in VOLUME_COPIES {
        schedule.add(Rule::always(MediumFault::Io).at(name));
    }
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule));
    let open = open_on(faulty, &listed()).unwrap();
    open.core.run_once();
    let keys = sequence(1, 40);
    assert_eq!(put(&open.store, &unchained(PAGE), &keys, None).pages, 40);
    open.store.flush().unwrap();
    assert!(open.core.poisoned().is_none());
    open.close();
    let open = open_sim(&disk);
    assert_eq!(get(&open.store, &unchained(PAGE), &keys).pages, 40);
    open.close();
}
