//! Stores that are opened with a list of directories: the list adds directories and removes none.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::{PAGES, SEQUENCES, found};
use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{CapacityChange, Options};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The store in `/store`, with further directories.
fn listed(further: &[&str]) -> Options {
    let further_dirs = Some(further.iter().map(PathBuf::from).collect());
    Options { further_dirs, background_threads: false, ..options(Path::new("/store"), 24) }
}

fn open_sim(disk: &SimDisk, options: &Options) -> Open {
    open_on(Arc::new(disk.clone()), options).unwrap()
}

/// The directories that the store uses, in the order of their numbers.
fn dirs(open: &Open) -> Vec<String> {
    let paths = open.store.stats().unwrap().catalog.paths;
    paths.into_iter().map(|path| path.dir).collect()
}

fn fill(open: &Open) {
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
}

#[test]
fn new_store_uses_all_listed_directories() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_sim(&disk, &listed(&["/a", "/b"]));
    assert_eq!(dirs(&open), ["segments", "/a", "/b"]);
    fill(&open);
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!(stats.capacity_bytes, 24 * MIB, "the capacity must cover all directories");
    assert!(stats.paths.iter().all(|path| path.used_bytes > 0), "{:?}", stats.paths);
    open.close();
    for again in [listed(&["/b", "/a"]), Options { further_dirs: None, ..listed(&[]) }] {
        let open = open_sim(&disk, &again);
        assert_eq!(dirs(&open), ["segments", "/a", "/b"]);
        assert_eq!(found(&open), PAGES);
        open.close();
    }
}

#[test]
fn opening_adds_listed_directories_and_keeps_unlisted_directories() {
    for seed in 0..8 {
        let disk = SimDisk::new(64 * MIB);
        let open = open_sim(&disk, &listed(&["/a"]));
        fill(&open);
        open.close();
        // This opening adds two directories and raises the capacity.
        let larger = Options { capacity: Some(32 * MIB), ..listed(&["/b", "/c"]) };
        let open = open_sim(&disk, &larger);
        assert_eq!(dirs(&open), ["segments", "/a", "/b", "/c"]);
        assert_eq!(open.store.stats().unwrap().catalog.capacity_bytes, 32 * MIB);
        let disk = disk.crash(seed);
        open.forget();
        let open = open_sim(&disk, &Options { further_dirs: None, capacity: None, ..larger });
        assert_eq!(dirs(&open), ["segments", "/a", "/b", "/c"], "seed {seed}");
        assert_eq!(found(&open), PAGES, "seed {seed}");
        open.close();
    }
}

#[test]
fn listed_directory_that_is_absent_is_neither_added_nor_made() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_sim(&disk, &listed(&["/a", "/b"]));
    fill(&open);
    open.close();
    disk.unmount(Path::new("/b")).unwrap();
    let open = open_sim(&disk, &listed(&["/a", "/b"]));
    assert_eq!(dirs(&open), ["segments", "/a", "/b"]);
    assert_eq!(open.store.stats().unwrap().catalog.absent_space.reasons.len(), 1);
    assert!(found(&open) < PAGES);
    assert!(disk.created_under(Path::new("/b")).is_empty());
    disk.mount(Path::new("/b")).unwrap();
    open.core.run_once();
    assert_eq!(found(&open), PAGES);
    open.close();
}

#[test]
fn store_opens_without_a_directory_that_cannot_be_added() {
    let disk = SimDisk::new(64 * MIB);
    open_sim(&disk, &listed(&["/a"])).close();
    let schedule = Schedule::new();
    let faulty = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::CreateDir).at("/b"));
    let open = open_on(faulty, &listed(&["/a", "/b", "/c"])).unwrap();
    assert_eq!(dirs(&open), ["segments", "/a", "/c"]);
    fill(&open);
    open.close();
    let open = open_sim(&disk, &listed(&["/a", "/b", "/c"]));
    assert_eq!(dirs(&open), ["segments", "/a", "/c", "/b"]);
    assert_eq!(found(&open), PAGES);
    open.close();
}

#[test]
fn list_does_not_stop_the_draining_of_a_directory() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_sim(&disk, &listed(&["/a"]));
    fill(&open);
    // A leased page keeps the directory from being emptied.
    let all: Vec<_> = (0..SEQUENCES).map(|name| sequence(name, 8)).collect();
    let leases: Vec<_> = all.iter().map(|keys| begin_read(&open, &chained(65_536), keys)).collect();
    let drain = CapacityChange::DrainVolume("/a".to_owned());
    let error = open.core.change_capacity(&drain, Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Retry);
    drop(leases);
    open.forget();
    let open = open_sim(&disk, &listed(&["/a"]));
    let is_draining = |open: &Open| open.store.stats().unwrap().catalog.paths[1].draining;
    assert!(is_draining(&open), "opening with the list ended the draining");
    // An opening adds /b before the drain of /a is complete: without background threads the drain
    // makes no progress.
    open.close();
    let open = open_sim(&disk, &listed(&["/a", "/b"]));
    assert_eq!(dirs(&open), ["segments", "/a", "/b"]);
    assert!(is_draining(&open));
    open.core.run_once();
    assert_eq!(dirs(&open), ["segments", "/b"]);
    open.close();
}

#[test]
fn invalid_lists_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (home, link) = (at("home"), at("link"));
    std::fs::create_dir(at("a")).unwrap();
    std::os::unix::fs::symlink(at("a"), &link).unwrap();
    let try_list = |further: &[PathBuf]| {
        let further_dirs = Some(further.to_vec());
        open_on(Arc::new(Host), &Options { further_dirs, ..options(&home, 16) })
    };
    let lists: [(&[PathBuf], &str); 8] = [
        (&[at("a"), at("a")], "listed twice"),
        (&[at("a"), link.clone()], "listed twice"),
        (&[at("a/../a/."), at("a")], "listed twice"),
        (&[at("./home")], "listed twice"),
        (&[at("home/segments")], "inside another"),
        (&[at("a/b"), link.clone()], "inside another"),
        (&[dir.path().to_owned()], "inside another"),
        (&[PathBuf::new()], "is empty"),
    ];
    // The lists are refused before the store exists, and again once it exists.
    for _ in 0..2 {
        for (further, words) in &lists {
            let error = try_list(further).map(Open::close).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(words), "{further:?}: {error}");
        }
        try_list(&[]).unwrap().close();
    }
    let both =
        Options { paths: vec![at("b")], further_dirs: Some(vec![at("c")]), ..options(&home, 16) };
    let error = open_on(Arc::new(Host), &both).map(Open::close).unwrap_err();
    assert!(error.to_string().contains("leave out `paths`"), "{error}");
    assert!(!at("a/b").exists() && !at("c").exists());
    // The link names a directory that the store has, so the list adds no directory.
    try_list(&[at("a")]).unwrap().close();
    let open = try_list(&[link]).unwrap();
    assert_eq!(dirs(&open).len(), 2);
    open.close();
}

/// A store uses neither a directory of another store nor a directory inside such a directory.
#[test]
fn directories_of_other_stores_are_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let with = |home: &str, further: &str| {
        let further_dirs = Some(vec![at(further)]);
        open_on(Arc::new(Host), &Options { further_dirs, ..options(&at(home), 16) })
    };
    with("other", "volume").unwrap().close();
    open(&at("home"), 16).close();
    for theirs in ["other", "other/new", "volume", "volume/new"] {
        let error = with("new", theirs).map(Open::close).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("another store"), "{error}");
        let open = with("home", theirs).unwrap();
        assert_eq!(dirs(&open), ["segments"], "{theirs}");
        open.close();
    }
    assert!(!at("other/new").exists() && !at("volume/new").exists());
    with("other", "volume").unwrap().close();
}
