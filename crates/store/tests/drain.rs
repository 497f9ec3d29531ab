//! Adding and draining directories while the store is in use.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Options, Store, open_segments};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::staging::Staging;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 60_000;
const PAGES: usize = 6;

fn fill(open: &Open, from: u64, count: u64) {
    for name in from..from + count {
        put(&open.store, &chained(PAGE), &sequence(name, PAGES), None);
    }
}

/// Returns the complete sequences among `0..count`; `get` checks every byte.
fn whole(store: &Store, count: u64) -> Vec<u64> {
    let scope = chained(PAGE);
    (0..count).filter(|&name| get(store, &scope, &sequence(name, PAGES)).pages == PAGES).collect()
}

fn segments_in(dir: &Path) -> usize {
    std::fs::read_dir(dir).map_or(0, |names| names.flatten().count())
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn directory_is_added_and_another_drained() {
    let dir = tempfile::tempdir().unwrap();
    let (home, second) = (dir.path().join("home"), dir.path().join("second"));
    let open = open(&home, 12);
    fill(&open, 0, 24);
    let present = whole(&open.store, 24);
    open.store.change_capacity(&CapacityChange::AddVolume(text(&second))).unwrap();
    open.store.resize(24 * MIB).unwrap();
    fill(&open, 24, 24);
    let (first, other) = (segments_in(&home.join("segments")), segments_in(&second));
    assert!(
        first > 0 && other > 0,
        "{first} segments in the first directory, {other} in the second"
    );
    open.store.change_capacity(&CapacityChange::DrainVolume("segments".to_owned())).unwrap();
    assert_eq!(segments_in(&home.join("segments")), 0);
    assert!(open.core.manifest().volumes[0].is_retired());
    let left = whole(&open.store, 48);
    assert!(present.iter().any(|name| left.contains(name)), "pages must be moved, not lost");
    assert!(left.len() > 24, "{}", left.len());
    fill(&open, 100, 10);
    assert_eq!(
        segments_in(&home.join("segments")),
        0,
        "new pages were placed in the drained directory"
    );
    let left = whole(&open.store, 48);
    open.close();
    let again = Options { capacity: None, paths: vec![second.clone()], ..options(&home, 0) };
    let open = open_on(Arc::new(Host), &again).unwrap();
    assert_eq!(whole(&open.store, 48), left);
    open.close();
    // The store opens, and ignores the paths in its options: the manifest names its directories.
    let third = dir.path().join("third");
    let others = Options { paths: vec![third.clone()], ..again };
    let open = open_on(Arc::new(Host), &others).unwrap();
    assert_eq!(whole(&open.store, 48), left);
    assert!(!third.exists());
    open.close();
}

#[test]
fn unusable_directories_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let open = open(&home, 8);
    let refused = |change: &CapacityChange, word: &str| {
        let error = open.store.change_capacity(change).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(&CapacityChange::DrainVolume("segments".to_owned()), "last");
    refused(&CapacityChange::DrainVolume("elsewhere".to_owned()), "not in the store");
    refused(&CapacityChange::AddVolume(text(&home.join("segments"))), "already");
    let full = dir.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("seg-000000"), "another store's").unwrap();
    refused(&CapacityChange::AddVolume(text(&full)), "is not empty");
    let (empty, alias) = (dir.path().join("empty"), dir.path().join("alias"));
    // `lost+found` is in the root of a new ext4 file system.
    std::fs::create_dir_all(empty.join("lost+found")).unwrap();
    open.store.change_capacity(&CapacityChange::AddVolume(text(&empty))).unwrap();
    std::os::unix::fs::symlink(&empty, &alias).unwrap();
    refused(&CapacityChange::AddVolume(text(&alias)), "already");
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    refused(&CapacityChange::AddVolume(text(&file)), "cannot be used");
    fill(&open, 0, 3);
    assert_eq!(whole(&open.store, 3).len(), 3, "puts must succeed after refused changes");
    open.close();
}

/// A process that opened the store before a directory was added reads and writes segments in this
/// directory.
#[test]
fn open_clients_find_a_new_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (home, second) = (dir.path().join("home"), dir.path().join("second"));
    let open = open(&home, 8);
    fill(&open, 0, 4);
    let (_, segments) = open_segments(Arc::new(Host), &home, IoChoice::Auto).unwrap();
    let catalog = open.core.catalog_for(ritornello_store::ClientId(7), "seven");
    let theirs = Store::new(Arc::new(catalog), segments, Staging::new(8 * MIB as usize).unwrap());
    assert_eq!(whole(&theirs, 4).len(), 4);
    open.store.change_capacity(&CapacityChange::AddVolume(text(&second))).unwrap();
    open.store.change_capacity(&CapacityChange::DrainVolume("segments".to_owned())).unwrap();
    assert!(segments_in(&second) > 0);
    assert_eq!(whole(&theirs, 4).len(), 4, "pages moved to a new directory must be found");
    put(&theirs, &chained(PAGE), &sequence(9, PAGES), None);
    assert_eq!(get(&open.store, &chained(PAGE), &sequence(9, PAGES)).pages, PAGES);
    theirs.close();
    open.close();
}

/// Power is lost while a directory is drained. The next owner retires the directory if the manifest
/// records the drain.
#[test]
fn power_loss_while_draining_keeps_flushed_pages() {
    for seed in 0..16u64 {
        let disk = SimDisk::new(64 << 20);
        let paths = vec!["/a".into(), "/b".into()];
        let opts = Options { background_threads: false, paths, ..options(Path::new("/store"), 24) };
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        fill(&open, 0, 20);
        open.store.flush().unwrap();
        let (after, done) = std::thread::scope(|scope| {
            let change = CapacityChange::DrainVolume("/a".to_owned());
            let core = Arc::clone(&open.core);
            let draining =
                scope.spawn(move || core.change_capacity(&change, Duration::from_secs(60)));
            let mut after = disk.crash(seed);
            for _ in 0..seed * 2 {
                if draining.is_finished() {
                    break;
                }
                after = disk.crash(seed);
            }
            (after, draining.join().unwrap())
        });
        done.unwrap();
        assert_eq!(whole(&open.store, 20).len(), 20, "all sequences must fit");
        open.forget();
        let again = Options { capacity: None, paths: Vec::new(), ..opts };
        let open = open_on(Arc::new(after), &again).unwrap();
        assert_eq!(whole(&open.store, 20).len(), 20, "seed {seed}");
        open.core.run_once();
        let volumes = &open.core.manifest().volumes;
        assert!(volumes[0].is_retired() || volumes[0].is_active(), "{volumes:?}");
        assert_eq!(whole(&open.store, 20).len(), 20, "seed {seed}");
        open.close();
    }
}

/// A put is creating a segment in a directory when a drain of this directory begins. The drain
/// removes this segment as well.
#[test]
fn drained_directory_gets_no_new_segment() {
    let (schedule, disk) = (Schedule::new(), SimDisk::new(64 << 20));
    let medium = Faulty::new(Arc::new(disk.clone()), schedule.clone());
    let paths = vec!["/a".into(), "/b".into()];
    let opts = Options { background_threads: false, paths, ..options(Path::new("/store"), 24) };
    let open = open_on(Arc::new(medium), &opts).unwrap();
    schedule.add(Rule::nth(1, MediumFault::Slow(Duration::from_millis(300))).on(Op::Allocate));
    std::thread::scope(|scope| {
        let before = schedule.count(Op::Allocate);
        scope.spawn(|| fill(&open, 0, 1));
        while schedule.count(Op::Allocate) == before {
            std::thread::yield_now();
        }
        open.core
            .change_capacity(&CapacityChange::DrainVolume("/a".to_owned()), Duration::from_secs(60))
            .unwrap();
    });
    assert_eq!(disk.list(Path::new("/a")).unwrap().len(), 0);
    open.core
        .change_capacity(&CapacityChange::Capacity(12 * MIB), Duration::from_secs(60))
        .unwrap();
    open.close();
}
