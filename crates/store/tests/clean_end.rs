//! The state in which the next owner finds a store after its last owner ended cleanly or uncleanly.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::{Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk, SimProcess};
use ritornello_store::{Directory, Options};
use std::path::Path;
use std::sync::Arc;

fn process(disk: &SimDisk) -> SimProcess {
    disk.process(|path| path.to_string_lossy().contains("seg-"))
}

fn store_options() -> Options {
    Options { background_threads: false, ..options(Path::new("/store"), 8) }
}

/// A process is killed with writes to a segment in flight. The next owner cannot open this segment,
/// and closes the store. The third owner must still drain the segment before it reuses the
/// segment's space.
#[test]
fn absent_segment_makes_the_end_unclean() {
    let disk = SimDisk::new(64 * MIB);
    let dying = process(&disk);
    let open = open_on(Arc::new(dying.clone()), &store_options()).unwrap();
    assert_eq!(put(&open.store, &chained(65_536), &sequence(50, 1), None).pages, 1);
    open.store.flush().unwrap();
    dying.kill(0, 16);
    let _ = try_put(&open.store, &chained(65_536), &sequence(77, 8), None);
    assert!(disk.in_flight() > 0);
    std::mem::forget(open);

    let schedule = Schedule::new();
    schedule.add(Rule::nth(1, MediumFault::NoSystemFiles).onward().on(Op::Open).at("seg-000000"));
    let faulty: Arc<dyn Medium> = Arc::new(Faulty::new(Arc::new(process(&disk)), schedule));
    open_on(faulty, &store_options()).unwrap().close();

    let open = open_on(Arc::new(process(&disk)), &store_options()).unwrap();
    for name in 0..16 {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 4), None).pages, 4);
    }
    open.store.flush().unwrap();
    disk.land(7);
    for name in 0..16 {
        let pages = get(&open.store, &chained(65_536), &sequence(name, 4)).pages;
        assert_eq!(pages, 4, "flushed sequence {name} was overwritten by a dead process");
    }
}

/// The manifest names a capacity below the segments that exist, as after a kill while the store
/// shrank. The next owner keeps the same number of pages, and moves the same number of bytes, after
/// an unclean end as after a clean end.
#[test]
fn shrink_resumes_equally_after_a_close_and_a_kill() {
    let run = |clean: bool| {
        let disk = SimDisk::new(64 * MIB);
        let one = Options { background_threads: false, ..options(Path::new("/store"), 16) };
        let open = open_on(Arc::new(disk.clone()), &one).unwrap();
        for name in 0..12 {
            put(&open.store, &chained(65_536), &sequence(name, 8), None);
        }
        for name in 5..12 {
            open.store.delete(&chained(65_536), &refs(&sequence(name, 8))).unwrap();
        }
        open.store.flush().unwrap();
        open.close();
        let directory = Directory::new(Arc::new(disk.clone()), Path::new("/store"));
        let mut manifest = directory.manifest().unwrap().unwrap();
        manifest.capacity = 6 * MIB;
        manifest.clean = clean;
        directory.write_manifest(&manifest).unwrap();
        let plain = Options { background_threads: false, ..Options::new(Path::new("/store")) };
        let open = open_on(Arc::new(disk), &plain).unwrap();
        for _ in 0..5 {
            open.core.run_once();
            open.store.flush().unwrap();
        }
        let stats = open.store.stats().unwrap().catalog;
        let found: usize =
            (0..5).map(|name| get(&open.store, &chained(65_536), &sequence(name, 8)).pages).sum();
        let counters = &stats.counters;
        (found, counters["evicted_pages"], counters["bytes_moved"], stats.segments)
    };
    let (clean, killed) = (run(true), run(false));
    assert_eq!(clean, killed);
}
