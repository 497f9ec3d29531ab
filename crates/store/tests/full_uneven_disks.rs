//! A full store on two disks of different size and speed, or of which one stalls: puts replace old
//! pages, and both disks stay full.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::tickets::*;
use common::*;
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::{Catalog, ClientId, Options};
use ritornello_volume::segments::IoChoice;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 64 << 10;
/// Pages of a sequence.
const PAGES: usize = 8;
/// Segments of 1 MiB for which the small disk has room. Its share, half of the store's segments,
/// would be 11.
const SMALL_SEGMENTS: u64 = 6;
const SMALL: u8 = 0;
const SOON: Duration = Duration::from_millis(500);
const LATE: Duration = Duration::from_secs(60);

/// Opens a store of 24 MiB on two disks in `dir`, of which the first is small. The schedule is for
/// further faults.
fn store(inner: Arc<dyn Medium>, dir: &Path, base: Options) -> (Schedule, Open) {
    let (full, schedule) = (Schedule::new(), Schedule::new());
    let no_space = Rule::nth(SMALL_SEGMENTS + 1, MediumFault::NoSpace).onward().on(Op::Allocate);
    full.add(no_space.at("disk0/seg-"));
    let medium = Faulty::new(Arc::new(Faulty::new(inner, full)), schedule.clone());
    let paths: Vec<PathBuf> = ["disk0", "disk1"].map(|name| dir.join(name)).to_vec();
    let open = open_on(Arc::new(medium), &Options { paths, ..base }).unwrap();
    (schedule, open)
}

/// Puts sequences. Each put stores its pages, and a get delivers them.
fn put_all(open: &Open, names: Range<u64>) {
    for name in names {
        let keys = sequence(name, PAGES);
        let outcome = put(&open.store, &unchained(PAGE), &keys, None);
        assert_eq!((outcome.pages, outcome.reason), (PAGES, ""), "sequence {name}");
        assert_eq!(get(&open.store, &unchained(PAGE), &keys).pages, PAGES, "sequence {name}");
    }
}

/// The keys of those pages of sequences that are stored on the small disk, and on the large disk.
fn stored(open: &Open, names: Range<u64>) -> [Vec<Vec<u8>>; 2] {
    let scope = unchained(PAGE);
    let mut stored = [Vec::new(), Vec::new()];
    for key in names.flat_map(|name| sequence(name, PAGES)) {
        if open.store.probe(&scope, &[&key]).unwrap() == 1 {
            stored[usize::from(volumes_of(open, &scope, &key)[0])].push(key);
        }
    }
    stored
}

fn counter(open: &Open, name: &str) -> u64 {
    open.store.stats().unwrap().catalog.counters[name]
}

/// The segments and the used bytes of each disk.
fn sizes(open: &Open) -> Vec<(u64, u64)> {
    let paths = open.store.stats().unwrap().catalog.paths;
    paths.iter().map(|path| (path.segments, path.used_bytes)).collect()
}

/// Asserts that the disks have all segments of the store, and that both are full, except 1/8 for
/// the reserve and for holes.
fn assert_full(open: &Open) {
    let sizes = sizes(open);
    let segments_max = open.store.stats().unwrap().catalog.segments_max;
    let segments: Vec<u64> = sizes.iter().map(|(segments, _)| *segments).collect();
    assert_eq!(segments, [SMALL_SEGMENTS, segments_max - SMALL_SEGMENTS]);
    for (segments, used) in &sizes {
        assert!(used * 8 >= segments * MIB * 7, "{sizes:?}");
    }
}

/// The contents of the store are replaced five times.
#[test]
fn full_store_uses_all_space_of_uneven_volumes() {
    for speeds in [[8000, 1000], [1000, 8000]] {
        let disk = Arc::new(SimDisk::new(128 * MIB));
        let base = Options { background_threads: false, ..options(Path::new("/store"), 24) };
        let (_, open) = store(disk, Path::new("/"), base);
        // A process that has measured the disks reports speeds in KiB/s.
        open.core.catalog_for(ClientId::LOCAL, "").report_speeds(&speeds).unwrap();
        put_all(&open, 0..60);
        let before = counter(&open, "evicted_pages");
        for round in 1..6 {
            put_all(&open, 60 * round..60 * (round + 1));
            assert_full(&open);
            let new = stored(&open, 60 * round..60 * (round + 1));
            assert!(new.iter().all(|pages| !pages.is_empty()), "puts must use both disks");
        }
        assert!(counter(&open, "evicted_pages") - before >= 5 * 60 * PAGES as u64 * 9 / 10);
        assert_eq!(counter(&open, "refused_pages"), 0);
        open.close();
    }
}

/// The small disk completes no reads and no writes: puts replace pages of the large disk only.
/// Later the small disk completes no syncs: puts wait, until their deadlines, for the space of
/// evicted pages.
#[test]
fn full_store_takes_puts_beside_a_stalled_volume() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let base = Options { io: IoChoice::Pool, ..options(&dir.path().join("home"), 24) };
    let (schedule, open) = store(Arc::new(Host), dir.path(), base);
    let scope = Arc::new(unchained(PAGE));
    put_all(&open, 0..50);
    assert_full(&open);
    open.store.flush().unwrap();
    let [on_small, _] = stored(&open, 0..50);
    let (used, evicted) = (sizes(&open)[0].1, counter(&open, "evicted_pages"));

    let stall = |op| schedule.add(Rule::always(MediumFault::Stall).on(op).at("disk0/seg-"));
    stall(Op::Read);
    stall(Op::Write);
    let caught = start_get(&open, &scope, &on_small[..1], LATE);
    await_stall(&open, &[SMALL]);
    // More bytes than the large disk holds.
    put_all(&open, 100..150);
    assert_eq!(sizes(&open)[0].1, used, "pages of the stalled disk were evicted");
    assert!(counter(&open, "evicted_pages") - evicted > 300);
    schedule.heal();
    assert_eq!(outcome(&caught), (1, ""));
    assert_eq!(get(&open.store, &scope, &on_small).pages, on_small.len());

    // Puts use the small disk again, because it has free space. Syncs therefore include it.
    open.store.delete(&scope, &refs(&on_small)).unwrap();
    open.store.flush().unwrap();
    stall(Op::SyncData);
    let put = |name| outcome(&start_put(&open, &scope, &sequence(name, PAGES), SOON));
    let waits = counter(&open, "reclaim_waits");
    let refused = (150..400).map(put).find(|(pages, _)| *pages < PAGES);
    assert_eq!(refused.map(|(_, reason)| reason), Some("deadline"));
    assert!(counter(&open, "reclaim_waits") > waits, "the put did not wait for space");
    schedule.heal();
    put_all(&open, 400..420);
    assert_full(&open);
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.leases, stats.reservations, stats.reserved_bytes), (0, 0, 0));
    open.close();
}
