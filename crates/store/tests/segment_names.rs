//! Names of new segments: a flush covers them wherever their volume is by then, and whatever owner
//! made them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::*;
use common::*;
use ritornello_medium::{Fault, Faulty, Medium, Op, Rule, Schedule, SimDisk};
use std::path::Path;
use std::sync::Arc;

const CRASHES: u64 = 8;

fn put_all(open: &Open) {
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
}

fn check_crashes(disk: &SimDisk) {
    for seed in 0..CRASHES {
        let crashed = disk.crash(seed);
        if crashed.is_unmounted(Path::new("/b")) {
            crashed.mount(Path::new("/b")).unwrap();
        }
        assert_eq!(found(&reopen(Arc::new(crashed))), PAGES, "crash {seed}");
    }
}

/// Open files can be synced after `umount --lazy`, their directory cannot.
#[test]
fn flush_covers_segments_of_a_volume_detached_before_it() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &two_volumes()).unwrap();
    put_all(&open);
    disk.detach(Path::new("/b")).unwrap();
    open.store.flush().unwrap();
    check_crashes(&disk);
}

#[test]
fn segment_whose_volume_is_detached_while_it_is_made_takes_no_put() {
    let disk = SimDisk::new(64 * MIB);
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    let detached = disk.clone();
    schedule.before(Op::SyncDir, "/b", move || detached.detach(Path::new("/b")).unwrap());
    for name in 0..SEQUENCES {
        put(&open.store, &chained(65_536), &sequence(name, 8), None);
    }
    assert!(disk.is_unmounted(Path::new("/b")), "no segment was made in /b");
    let flushed = found(&open);
    assert!(flushed > 0);
    open.store.flush().unwrap();
    for seed in 0..CRASHES {
        let crashed = disk.crash(seed);
        crashed.mount(Path::new("/b")).unwrap();
        assert_eq!(found(&reopen(Arc::new(crashed))), flushed, "crash {seed}");
    }
}

/// An owner dies between making a segment and syncing its directory; the next one writes to it.
#[test]
fn flush_covers_segments_that_a_dead_owner_made() {
    let disk = SimDisk::new(64 * MIB);
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    schedule.add(Rule::nth(1, Fault::Io).onward().on(Op::SyncDir).at("/b"));
    schedule.add(Rule::nth(1, Fault::Io).onward().on(Op::Remove).at("/b/seg"));
    put(&open.store, &chained(65_536), &sequence(0, 8), None);
    put(&open.store, &chained(65_536), &sequence(1, 8), None);
    // It neither flushes nor closes.
    std::mem::forget(open);
    let made = disk.list(Path::new("/b")).unwrap();
    assert!(made.iter().any(|name| name.to_string_lossy().starts_with("seg-")), "{made:?}");
    let open = reopen(Arc::new(disk.clone()));
    for name in 0..2 {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
    // Another segment's making would make this one's name durable.
    assert_eq!(disk.list(Path::new("/b")).unwrap(), made);
    let paths = open.store.stats().unwrap().catalog.paths;
    assert!(paths[1].used_bytes > 0, "{paths:?}");
    for seed in 0..CRASHES {
        assert_eq!(found(&reopen(Arc::new(disk.crash(seed)))), 16, "crash {seed}");
    }
}
