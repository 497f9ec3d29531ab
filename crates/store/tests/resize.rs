//! Growing and shrinking a store in use.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{CapacityChange, Directory, Options, PutOptions};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const PAGE: u64 = 60_000;
const PAGES: usize = 6;

fn fill(open: &Open, from: u64, count: u64) {
    for name in from..from + count {
        put(&open.store, &chained(PAGE), &sequence(name, PAGES), None);
    }
}

/// Returns the complete sequences among `0..count`; `get` checks every byte.
fn whole(open: &Open, count: u64) -> Vec<u64> {
    let scope = chained(PAGE);
    (0..count)
        .filter(|&name| get(&open.store, &scope, &sequence(name, PAGES)).pages == PAGES)
        .collect()
}

fn stats(open: &Open) -> ritornello_store::CatalogStats {
    open.store.stats().unwrap().catalog
}

/// Returns the bytes that the file system counts for the files of a store.
fn blocks(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(found) if found.is_dir() => blocks(&entry.path()),
            Ok(found) => found.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

/// Returns the number of files, without RocksDB's files, whose number varies.
fn files(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().flatten().filter(|e| e.file_name() != "lsm");
    entries.map(|e| if e.path().is_dir() { files(&e.path()) } else { 1 }).sum()
}

#[test]
fn grown_store_holds_more() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 8);
    fill(&open, 0, 40);
    let before = whole(&open, 40).len();
    assert!(before < 40);
    open.store.resize(24 * MIB).unwrap();
    fill(&open, 0, 40);
    assert_eq!(whole(&open, 40).len(), 40);
    assert_eq!(stats(&open).capacity_bytes, 24 * MIB);
    assert!(stats(&open).segments > 8);
    open.close();
    let options = Options { capacity: None, ..options(dir.path(), 0) };
    let open = open_on(Arc::new(Host), &options).unwrap();
    assert_eq!(stats(&open).capacity_bytes, 24 * MIB);
    assert_eq!(whole(&open, 40).len(), 40);
    open.close();
}

#[test]
fn shrunk_store_keeps_recent_pages() {
    let dir = tempfile::tempdir().unwrap();
    let lru = Options { eviction: PolicyKind::Lru, ..options(dir.path(), 24) };
    let open = open_on(Arc::new(Host), &lru).unwrap();
    let scope = chained(PAGE);
    fill(&open, 0, 50);
    assert_eq!(whole(&open, 50).len(), 50);
    // Use sequences 0 to 11 last, so that the store keeps them when it shrinks.
    for name in 0..12 {
        assert_eq!(get(&open.store, &scope, &sequence(name, PAGES)).pages, PAGES);
    }
    open.store.resize(10 * MIB).unwrap();
    let stats = stats(&open);
    assert_eq!(stats.capacity_bytes, 10 * MIB);
    assert!(stats.segments <= stats.segments_max && stats.segments_max <= 9, "{stats:?}");
    assert!(stats.counters["runs_moved"] > 0 && stats.counters["segments_removed"] > 0);
    assert!(stats.counters["evicted_space"] > 0 && evictions_have_causes(&stats.counters));
    assert!(blocks(dir.path()) <= 10 * MIB, "{} bytes", blocks(dir.path()));
    assert!(files(dir.path()) <= 9 + 12);
    let left = whole(&open, 50);
    assert!(left.len() >= 12, "{left:?}");
    assert!(
        (0..12).all(|name| left.contains(&name)),
        "recently used sequences must stay: {left:?}"
    );
    open.close();
    let open = open_on(Arc::new(Host), &options(dir.path(), 10)).unwrap();
    assert_eq!(whole(&open, 50), left, "moved runs must be found after a restart");
    open.close();
}

/// Threads put, get and resize at the same time: no byte is wrong, no call fails, and the files
/// never take more space than the largest capacity.
#[test]
fn store_is_resized_under_traffic() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    fill(&open, 0, 50);
    let (stop, most) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for lane in 0..2u64 {
            let (open, stop) = (&open, &stop);
            scope.spawn(move || {
                let mut name = lane;
                while !stop.load(Ordering::Relaxed) {
                    put(&open.store, &chained(PAGE), &sequence(100 + name % 60, PAGES), None);
                    get(&open.store, &chained(PAGE), &sequence(100 + (name + 7) % 60, PAGES));
                    get(&open.store, &chained(PAGE), &sequence(name % 50, PAGES));
                    name += 2;
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                most.fetch_max(blocks(dir.path()), Ordering::Relaxed);
            }
        });
        for mib in [9, 24, 6, 12] {
            open.store.resize(mib * MIB).unwrap();
            assert!(stats(&open).allocated_bytes <= mib * MIB);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(most.load(Ordering::Relaxed) <= 24 * MIB);
    assert!(blocks(dir.path()) <= 12 * MIB);
    open.close();
}

#[test]
fn shrink_below_pinned_space_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    let scope = chained(PAGE);
    let keys: Vec<_> = (0..24).map(|name| sequence(name, PAGES)).collect();
    fill(&open, 0, 24);
    let leases: Vec<_> = keys
        .iter()
        .map(|keys| open.store.lease(&scope, &refs(keys), Duration::from_secs(60)).unwrap())
        .collect();
    let error = open.store.resize(5 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("leased"), "{error}");
    let error = open.store.resize(2 * MIB).unwrap_err();
    assert!(error.to_string().contains("two segments"), "{error}");
    assert_eq!(stats(&open).capacity_bytes, 24 * MIB, "a refused shrink changed the capacity");
    for leased in leases {
        open.store.release(leased.lease).unwrap();
    }
    open.store.resize(5 * MIB).unwrap();
    assert!(stats(&open).allocated_bytes <= 5 * MIB);
    open.close();
}

#[test]
fn shrinking_keeps_retained_pages() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    let scope = chained(PAGE);
    let keep = (Options::new("").wall_clock)() + 3600;
    for name in 0..10 {
        let keys = sequence(name, PAGES);
        let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(&scope, key)).collect();
        let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
        let terms = PutOptions { retain_until: keep, ..PutOptions::default() };
        let source = BorrowedPages::new(&pages);
        open.store.put_batch(&scope, &refs(&keys), &source, &terms, &Control::default()).unwrap();
    }
    fill(&open, 10, 30);
    let retained = stats(&open).retained_bytes;
    assert!(retained > 3 * MIB, "{retained}");
    let error = open.store.resize(4 * MIB).unwrap_err();
    assert!(error.to_string().contains("retained"), "{error}");
    open.store.resize(12 * MIB).unwrap();
    let kept = whole(&open, 10);
    assert_eq!(kept.len(), 10, "{kept:?}");
    open.close();
}

/// A reader leases a run in a store that shrinks. The run is read before and after the lease ends,
/// and a repeated shrink completes after the lease has ended.
#[test]
fn leased_run_is_read_while_the_store_shrinks() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    let scope = chained(PAGE);
    fill(&open, 0, 50);
    let keys = sequence(49, PAGES);
    let leased = open.store.lease(&scope, &refs(&keys), Duration::from_secs(60)).unwrap();
    assert_eq!(leased.pages, PAGES);
    let shrunk =
        open.core.change_capacity(&CapacityChange::Capacity(8 * MIB), Duration::from_millis(500));
    if let Err(error) = &shrunk {
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
    }
    assert_eq!(get(&open.store, &scope, &keys).pages, PAGES);
    open.store.release(leased.lease).unwrap();
    open.store.resize(8 * MIB).unwrap();
    assert_eq!(get(&open.store, &scope, &keys).pages, PAGES);
    assert!(blocks(dir.path()) <= 8 * MIB);
    open.close();
}

#[test]
fn another_capacity_at_open_resizes() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    fill(&open, 0, 50);
    open.close();
    let open = open_on(Arc::new(Host), &options(dir.path(), 8)).unwrap();
    open.store.resize(8 * MIB).unwrap();
    assert_eq!(stats(&open).capacity_bytes, 8 * MIB);
    assert!(blocks(dir.path()) <= 8 * MIB);
    assert!(!whole(&open, 50).is_empty());
    open.close();
    let open = open_on(Arc::new(Host), &options(dir.path(), 24)).unwrap();
    fill(&open, 0, 50);
    assert_eq!(whole(&open, 50).len(), 50);
    open.close();
}

/// The store never reuses the number of a removed segment: a client that has the old file open
/// would write to the old file instead of the new file, and the bytes would be lost.
#[test]
fn removed_segment_number_is_never_reused() {
    let dir = tempfile::tempdir().unwrap();
    let mut open = open(dir.path(), 16);
    let numbers = || -> Vec<String> {
        let names = std::fs::read_dir(dir.path().join("segments")).unwrap().flatten();
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    fill(&open, 0, 50);
    let mut removed: Vec<String> = Vec::new();
    for round in 0..3 {
        let before = numbers();
        open.store.resize(6 * MIB).unwrap();
        let after = numbers();
        removed.extend(before.into_iter().filter(|name| !after.contains(name)));
        assert!(!removed.is_empty());
        if round == 1 {
            open.close();
            open = open_on(Arc::new(Host), &options(dir.path(), 6)).unwrap();
        }
        open.store.resize(16 * MIB).unwrap();
        fill(&open, 50 * (round + 1), 50);
        assert!(numbers().iter().all(|name| !removed.contains(name)));
    }
    open.close();
}

/// Power is lost at a point of a shrink that the seed selects. Flushed pages that were not evicted
/// are present, no byte is wrong, and the next owner finishes the shrink.
#[test]
fn power_loss_while_shrinking_keeps_flushed_pages() {
    let mut moved = 0;
    for seed in 0..24u64 {
        let disk = SimDisk::new(64 << 20);
        let opts = Options { background_threads: false, ..options(Path::new("/store"), 14) };
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        fill(&open, 0, 30);
        open.store.flush().unwrap();
        let crashed = AtomicBool::new(false);
        let snapshot = std::thread::scope(|scope| {
            let shrinking = scope.spawn(|| {
                let done = open
                    .core
                    .change_capacity(&CapacityChange::Capacity(6 * MIB), Duration::from_secs(60));
                crashed.store(true, Ordering::Relaxed);
                done
            });
            // Record the disk at several points of the shrink; `seed` selects one of them.
            let mut at = Vec::new();
            while !crashed.load(Ordering::Relaxed) {
                at.push((whole_by_probe(&open, 30), disk.crash(seed), whole_by_probe(&open, 30)));
                if at.len() as u64 > seed {
                    break;
                }
            }
            shrinking.join().unwrap().unwrap();
            at.pop()
        });
        moved += stats(&open).counters["runs_moved"];
        open.forget();
        let Some((before, disk, after)) = snapshot else { continue };
        let open = open_on(Arc::new(disk), &Options { capacity: None, ..opts }).unwrap();
        let present = whole(&open, 30);
        for name in before.iter().filter(|name| after.contains(name)) {
            assert!(present.contains(name), "seed {seed}: sequence {name} was lost");
        }
        open.core.run_once();
        let s = stats(&open);
        assert!(s.segments <= s.segments_max, "{} segments, limit {}", s.segments, s.segments_max);
        assert!(s.allocated_bytes <= s.capacity_bytes);
        whole(&open, 30);
        open.close();
    }
    assert!(moved > 0);
}

fn whole_by_probe(open: &Open, count: u64) -> Vec<u64> {
    let scope = chained(PAGE);
    let hit = |name: &u64| open.store.probe(&scope, &refs(&sequence(*name, PAGES))).unwrap();
    (0..count).filter(|name| hit(name) == PAGES).collect()
}

/// An owner ends before it begins to shrink. The next owner shrinks the store, and empties the
/// emptiest segments first.
#[test]
fn resumed_shrink_removes_emptiest_segments() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    fill(&open, 0, 40);
    let scope = chained(PAGE);
    for name in 4..40 {
        open.store.delete(&scope, &refs(&sequence(name, PAGES))).unwrap();
    }
    open.close();
    let directory = Directory::new(Arc::new(Host), dir.path());
    let mut manifest = directory.manifest().unwrap().unwrap();
    manifest.capacity = 12 * MIB;
    directory.write_manifest(&manifest).unwrap();
    let again = Options { capacity: None, background_threads: false, ..options(dir.path(), 0) };
    let open = open_on(Arc::new(Host), &again).unwrap();
    assert!(stats(&open).health.sealed_bytes > 0);
    open.core.run_once();
    assert_eq!(stats(&open).health.sealed_bytes, 0);
    assert_eq!(stats(&open).counters["runs_moved"], 0, "runs in segments that stay must not move");
    assert_eq!(whole(&open, 4).len(), 4);
    open.close();
}

/// While another thread rewrites the index's files, a shrink waits and evicts no page to make the
/// files smaller: only their size after the rewrite shows whether evictions are needed.
#[test]
fn index_rewrite_causes_no_eviction() {
    let schedule = Schedule::new();
    let disk = SimDisk::new(4 << 30);
    let medium = Faulty::new(Arc::new(disk), schedule.clone());
    let opts = Options { background_threads: false, ..options(Path::new("/store"), 1024) };
    let open = open_on(Arc::new(medium), &opts).unwrap();
    let scope = unchained(64);
    for round in 0..1500 {
        let keys = sequence(round % 8, 64);
        open.store.delete(&scope, &refs(&keys)).unwrap();
        put(&open.store, &scope, &keys, None);
        if round % 256 == 0 {
            open.store.flush().unwrap();
        }
    }
    open.store.flush().unwrap();
    assert!(stats(&open).index_disk_bytes > MIB + MIB / 2, "{}", stats(&open).index_disk_bytes);
    let before = stats(&open).pages;
    let slow = MediumFault::Slow(Duration::from_millis(300));
    schedule.add(Rule::always(slow).on(Op::Write).at("checkpoint-"));
    std::thread::scope(|scope| {
        let writes = schedule.count(Op::Write);
        let resize = scope.spawn(|| {
            open.core
                .change_capacity(&CapacityChange::Capacity(40 * MIB), Duration::from_secs(60))
                .unwrap();
        });
        while schedule.count(Op::Write) == writes && !resize.is_finished() {
            std::thread::yield_now();
        }
        open.core.run_once();
    });
    assert!(stats(&open).index_disk_bytes <= 40 * MIB / 32);
    assert_eq!((stats(&open).pages, stats(&open).counters["evicted_pages"]), (before, 0));
    open.close();
}

/// A put evicts until space is free in a segment that stays: space in the segments that the shrink
/// removes does not count.
#[test]
fn put_finds_space_during_a_large_shrink() {
    let dir = tempfile::tempdir().unwrap();
    let lru = Options { eviction: PolicyKind::Lru, ..options(dir.path(), 96) };
    let open = open_on(Arc::new(Host), &lru).unwrap();
    let scope = chained(PAGE);
    fill(&open, 0, 220);
    // Delete pages of the sequences that were put first: their segments, which hold the least
    // recently used pages, then are the emptiest, and a shrink removes the emptiest first.
    for name in 0..190 {
        open.store.delete(&scope, &refs(&sequence(name, PAGES)[PAGES - 1..])).unwrap();
    }
    open.close();
    let directory = Directory::new(Arc::new(Host), dir.path());
    let mut manifest = directory.manifest().unwrap().unwrap();
    manifest.capacity = 10 * MIB;
    directory.write_manifest(&manifest).unwrap();
    let again = Options { capacity: None, background_threads: false, ..lru };
    let open = open_on(Arc::new(Host), &again).unwrap();
    assert!(stats(&open).health.sealed_bytes > 60 * MIB);
    for name in 1000..1020 {
        assert_eq!(put(&open.store, &scope, &sequence(name, PAGES), None).pages, PAGES, "{name}");
    }
    assert_eq!(stats(&open).counters["refused_pages"], 0);
    open.close();
}
