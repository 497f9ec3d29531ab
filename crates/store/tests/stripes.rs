//! Puts and gets over four volumes: which volumes a put uses, and what the loss of a volume costs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::items::Item;
use common::*;
use ritornello_format::Scope;
use ritornello_medium::{Host, SimDisk, Throttled};
use ritornello_store::{Catalog, ClientId, Options};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const VOLUMES: usize = 4;
const PAGE: u64 = 2 * MIB;

fn four_volumes(dir: &Path, capacity_mib: u64) -> Options {
    let paths = (0..VOLUMES).map(|at| dir.join(format!("disk{at}"))).collect();
    let segment_bytes = Some(32 * MIB);
    Options { paths, segment_bytes, ..options(&dir.join("home"), capacity_mib) }
}

/// Returns the bytes of a sequence's pages on each volume, and the number of their runs.
fn placed(open: &Open, scope: &Scope, keys: &[Vec<u8>]) -> (Vec<u64>, usize) {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(scope, false).unwrap().unwrap();
    let located = catalog.begin_read(reference, &refs(keys)).unwrap();
    catalog.release(located.lease).unwrap();
    let mut bytes = vec![0; VOLUMES];
    for extent in located.runs.iter().flat_map(|run| &run.place.extents) {
        bytes[usize::from(extent.segment.volume())] += extent.bytes();
    }
    (bytes, located.runs.len())
}

fn assert_even(bytes: &[u64], slack: u64) {
    let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
    assert!(most - least <= slack, "{bytes:?}");
}

#[test]
fn one_put_uses_every_volume_equally() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = open_on(Arc::new(Host), &four_volumes(dir.path(), 512)).unwrap();
    for scope in [chained(PAGE), unchained(PAGE)] {
        // The put of 64 MiB is larger than the 32 MiB that one call keeps in flight
        // (`SegmentsConfig::IN_FLIGHT_BYTES`).
        let keys = sequence(1, 32);
        assert_eq!(put(&open.store, &scope, &keys, None).pages, 32);
        let (bytes, runs) = placed(&open, &scope, &keys);
        assert_eq!(runs, VOLUMES, "the put must be runs of 16 MiB");
        assert_even(&bytes, MIB);
        assert_eq!(get(&open.store, &scope, &keys).pages, 32);
        // The put of 16 MiB makes four runs of two pages.
        let keys = sequence(2, 8);
        put(&open.store, &scope, &keys, None);
        let (bytes, runs) = placed(&open, &scope, &keys);
        assert_eq!(runs, VOLUMES);
        assert_even(&bytes, MIB);
    }
    open.close();
}

/// The explorer sets the option `long_page_bytes`, so that its short pages are divided as long pages
/// are.
#[test]
fn page_above_a_smaller_threshold_is_on_both_volumes() {
    const SHORT: u64 = 800 << 10;
    let volumes_used = |long_page_bytes| {
        let paths = ["/a", "/b"].map(PathBuf::from).to_vec();
        let base = options(Path::new("/store"), 24);
        let options = Options { paths, background_threads: false, long_page_bytes, ..base };
        let open = open_on(Arc::new(SimDisk::new(64 * MIB)), &options).unwrap();
        let (scope, keys) = (unchained(SHORT), sequence(1, 1));
        assert_eq!(put(&open.store, &scope, &keys, None).pages, 1);
        let (bytes, _) = placed(&open, &scope, &keys);
        assert_eq!(get(&open.store, &scope, &keys).pages, 1);
        open.close();
        bytes.into_iter().filter(|bytes| *bytes > 0).count()
    };
    assert_eq!((volumes_used(16 * MIB), volumes_used(768 << 10)), (1, 2));
}

#[test]
fn one_long_page_uses_every_volume_equally() {
    const LONG: u64 = 40 * MIB + 4000;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = open_on(Arc::new(Host), &four_volumes(dir.path(), 512)).unwrap();
    let (scope, keys) = (unchained(LONG), sequence(3, 2));
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 2);
    for page in keys.chunks(1) {
        let (bytes, runs) = placed(&open, &scope, page);
        assert_eq!(runs, 1);
        assert_even(&bytes, MIB);
    }
    assert_eq!(get(&open.store, &scope, &keys).pages, 2);
    open.close();
}

/// Puts `pages` pages of `page_bytes`, then `more` pages, into a new store on two volumes, of 256
/// and 32 MiB/s: the first put uses both about equally, and the store measures their speeds.
/// Returns the bytes of the second put on each volume.
fn second_put_on_unequal_volumes(page_bytes: u64, pages: usize, more: usize) -> (u64, u64) {
    const SLOW: u64 = 32 * MIB;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths = ["fast", "slow"].map(|name| dir.path().join(name));
    let fast = Throttled::new(Arc::new(Host), &paths[..1], 8 * SLOW);
    let medium = Throttled::new(Arc::new(fast), &paths[1..], SLOW);
    let segment_bytes = Some(32 * MIB);
    let options = options(&dir.path().join("home"), 1024);
    let options = Options { paths: paths.to_vec(), segment_bytes, ..options };
    let open = open_on(Arc::new(medium), &options).unwrap();
    // The speed of a volume is measured once 128 MiB were written to it.
    assert!(page_bytes * pages as u64 >= 2 * (128 + 16) * MIB);
    let first = Item::new("first", 1, page_bytes, true, pages);
    assert_eq!(first.put(&open.store).unwrap().pages, pages);
    assert_even(&placed(&open, &first.scope, &first.keys).0[..2], 17 * MIB);
    let second = Item::new("second", 2, page_bytes, true, more);
    assert_eq!(second.put(&open.store).unwrap().pages, more);
    let (bytes, _) = placed(&open, &second.scope, &second.keys);
    open.close();
    (bytes[0], bytes[1])
}

/// A busy machine may slow the faster volume down, so the puts are tried up to three times. If the
/// owner did not use the measured speeds, both volumes would get equal shares each time.
fn assert_faster_volume_gets_more(page_bytes: u64, pages: usize, more: usize) {
    let has_larger_share = |_| {
        let (fast, slow) = second_put_on_unequal_volumes(page_bytes, pages, more);
        println!("{fast} bytes on the fast volume, {slow} on the slow volume");
        fast >= 2 * slow
    };
    assert!((0..3).any(has_larger_share));
}

/// One test, because two at the same time would slow down the fast volume of each other.
#[test]
fn faster_volume_gets_more_of_the_next_put() {
    assert_faster_volume_gets_more(8 * MIB, 36, 16);
    // Each page is on both volumes, so each lane of the transfer moves bytes of both.
    assert_faster_volume_gets_more(40 * MIB, 8, 3);
}

#[test]
fn one_volume_has_runs_of_64_mib() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let segment_bytes = Some(256 * MIB);
    let options = Options { segment_bytes, ..options(dir.path(), 1024) };
    let open = open_on(Arc::new(Host), &options).unwrap();
    let (scope, keys) = (chained(PAGE), sequence(1, 40));
    put(&open.store, &scope, &keys, None);
    assert_eq!(placed(&open, &scope, &keys).1, 2);
    open.close();
}

#[test]
fn full_store_spreads_sequences_over_volumes() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = open_on(Arc::new(Host), &four_volumes(dir.path(), 512)).unwrap();
    let scope = chained(PAGE);
    for name in 0..40 {
        assert_eq!(put(&open.store, &scope, &sequence(name, 16), None).pages, 16);
    }
    let counters = open.store.stats().unwrap().catalog.counters;
    assert!(counters["evicted_pages"] > 0, "the store is not full");
    let whole: Vec<_> = (0..40)
        .map(|name| sequence(name, 16))
        .filter(|keys| get(&open.store, &scope, keys).pages == 16)
        .collect();
    assert!(whole.len() >= 8, "only {} whole sequences are present", whole.len());
    let most = |keys: &Vec<Vec<u8>>| *placed(&open, &scope, keys).0.iter().max().unwrap() / MIB;
    let most: u64 = whole.iter().map(most).sum();
    let limit = 16 * whole.len() as u64;
    assert!(
        most <= limit,
        "the bytes of each sequence on its fullest volume add up to {most} MiB, above {limit} MiB"
    );
    open.close();
}

#[test]
fn lost_volume_costs_its_runs_and_the_pages_behind_them() {
    const LONG: u64 = 40 * MIB;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = four_volumes(dir.path(), 512);
    let open = open_on(Arc::new(Host), &options).unwrap();
    let (keys, long) = (sequence(1, 32), sequence(2, 2));
    for scope in [chained(PAGE), unchained(PAGE)] {
        put(&open.store, &scope, &keys, None);
    }
    put(&open.store, &unchained(LONG), &long, None);
    open.store.flush().unwrap();
    open.close();
    let again = Options { capacity: None, paths: Vec::new(), ..options };
    let mut in_chain = Vec::new();
    for lost in (0..VOLUMES).map(|at| dir.path().join(format!("disk{at}"))) {
        std::fs::rename(&lost, dir.path().join("elsewhere")).unwrap();
        let open = open_on(Arc::new(Host), &again).unwrap();
        let found = get(&open.store, &unchained(PAGE), &keys);
        let present = found.ok.iter().filter(|ok| **ok).count();
        assert_eq!(present, 24, "three of four runs must be present");
        in_chain.push(get(&open.store, &chained(PAGE), &keys).pages);
        let found = get(&open.store, &unchained(LONG), &long);
        assert_eq!(found.ok, [false; 2], "each long page has a piece on every volume");
        open.close();
        std::fs::rename(dir.path().join("elsewhere"), &lost).unwrap();
    }
    in_chain.sort_unstable();
    assert_eq!(
        in_chain,
        [0, 8, 16, 24],
        "an absent run must hide the runs behind it, and no other"
    );
    let open = open_on(Arc::new(Host), &again).unwrap();
    let pages = [chained(PAGE), unchained(PAGE)].map(|of| get(&open.store, &of, &keys).pages);
    assert_eq!(pages, [32; 2], "all pages must be found once the volumes return");
    assert_eq!(get(&open.store, &unchained(LONG), &long).pages, 2);
    open.close();
}
