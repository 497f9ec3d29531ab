//! Names of new segments: a flush makes these directory entries durable, even if the volume was
//! detached or a dead owner created the segments.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::*;
use common::*;
use ritornello_medium::{Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// After `umount --lazy` open files can be synced, but their directory cannot.
#[test]
fn flush_covers_segments_of_a_detached_volume() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &two_volumes()).unwrap();
    put_all(&open);
    disk.detach(Path::new("/b")).unwrap();
    open.store.flush().unwrap();
    check_crashes(&disk);
}

#[test]
fn flush_covers_pages_put_while_a_volume_detaches() {
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

/// Another store's disk is mounted over the volume while one of its segments is created.
#[test]
fn failed_segment_creation_removes_no_file_of_another_store() {
    let disk = SimDisk::new(64 * MIB);
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    let other = disk.clone();
    schedule.before(Op::SyncDir, "/b", move || {
        other.detach(Path::new("/b")).unwrap();
        let access = Access { write: true, create: true, direct: false };
        other.open(Path::new("/b/seg-000000"), access).unwrap();
    });
    for name in 0..SEQUENCES {
        put(&open.store, &chained(65_536), &sequence(name, 8), None);
    }
    assert_eq!(disk.list(Path::new("/b")).unwrap(), ["seg-000000"]);
}

/// A failed creation that could not remove its file prevents no later creation.
#[test]
fn volume_grows_past_a_leftover_segment() {
    let disk = SimDisk::new(64 * MIB);
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncDir).at("/b"));
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::Remove).at("/b/seg"));
    put(&open.store, &chained(65_536), &sequence(0, 8), None);
    put(&open.store, &chained(65_536), &sequence(1, 8), None);
    assert_eq!(schedule.injected(), 2);
    let second = || disk.list(Path::new("/b")).unwrap().contains(&"seg-000001".into());
    let until = Instant::now() + Duration::from_secs(60);
    for name in 2.. {
        put(&open.store, &chained(65_536), &sequence(name, 8), None);
        if second() {
            break;
        }
        assert!(Instant::now() < until, "the volume does not grow again");
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// An owner dies after it created a segment and before it synced the directory. The next owner
/// writes to the segment; its volume is present at the opening, or returns later.
#[test]
fn flush_covers_a_dead_owners_segments() {
    for returns_later in [false, true] {
        cover_segments_of_dead_owner(returns_later);
    }
}

fn cover_segments_of_dead_owner(returns_later: bool) {
    let disk = SimDisk::new(64 * MIB);
    open_on(Arc::new(disk.clone()), &two_volumes()).unwrap().close();
    let schedule = Schedule::new();
    let open = reopen(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::SyncDir).at("/b"));
    schedule.add(Rule::nth(1, MediumFault::Io).onward().on(Op::Remove).at("/b/seg"));
    put(&open.store, &chained(65_536), &sequence(0, 8), None);
    put(&open.store, &chained(65_536), &sequence(1, 8), None);
    // The owner ends without a flush or a close.
    std::mem::forget(open);
    let made = disk.list(Path::new("/b")).unwrap();
    assert!(made.iter().any(|name| name.to_string_lossy().starts_with("seg-")), "{made:?}");
    if returns_later {
        disk.detach(Path::new("/b")).unwrap();
    }
    let open = reopen(Arc::new(disk.clone()));
    if returns_later {
        disk.mount(Path::new("/b")).unwrap();
        open.core.run_once();
    }
    for name in 0..2 {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
    // Check that no further segment was created, because its creation would have made the first
    // segment's name durable.
    assert_eq!(disk.list(Path::new("/b")).unwrap(), made);
    let paths = open.store.stats().unwrap().catalog.paths;
    assert!(paths[1].used_bytes > 0, "{paths:?}");
    for seed in 0..CRASHES {
        assert_eq!(found(&reopen(Arc::new(disk.crash(seed)))), 16, "crash {seed}");
    }
}
