//! Pages longer than a segment: the store keeps a page in several pieces, visible and evicted as a
//! whole.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::log_lines::log_lines;
use common::*;
use ritornello_format::{ErrorKind, PAGE_BYTES_MAX, Place, Scope, UNIT};
use ritornello_medium::Host;
use ritornello_store::{Catalog, ClientId, Options, Refusal, ReserveRequest};
use ritornello_volume::segments::Segments;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Length of a page: more than 17 segments, and not a multiple of the unit.
const PAGE: u64 = 17 * MIB + 100;

/// Two directories with segments of 1 MiB.
fn two_paths(dir: &Path) -> Options {
    let paths = vec![dir.join("a"), dir.join("b")];
    Options { paths, ..options(&dir.join("home"), 160) }
}

/// The place of the run that holds the first page.
fn place(open: &Open, scope: &Scope, keys: &[Vec<u8>]) -> Place {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(scope, false).unwrap().unwrap();
    let located = catalog.begin_read(reference, &refs(keys)).unwrap();
    catalog.release(located.lease).unwrap();
    located.runs[0].place.clone()
}

#[test]
fn long_pages_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let check = |open: &Open| {
        for scope in [chained(PAGE), unchained(PAGE)] {
            assert_eq!(get(&open.store, &scope, &sequence(1, 2)).pages, 2);
        }
    };
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    for scope in [chained(PAGE), unchained(PAGE)] {
        assert_eq!(put(&open.store, &scope, &sequence(1, 2), None).pages, 2);
    }
    check(&open);
    open.close();
    let again = Options { capacity: None, paths: Vec::new(), ..two_paths(dir.path()) };
    let open = open_on(Arc::new(Host), &again).unwrap();
    check(&open);
    open.close();
}

#[test]
fn long_pages_replace_short_pages_and_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    let (short, long) = (unchained(300_000), unchained(PAGE));
    for name in 0..80 {
        put(&open.store, &short, &sequence(name, 8), None);
    }
    assert!(
        open.store.stats().unwrap().catalog.counters["evicted_pages"] > 0,
        "the store is not full"
    );
    for name in 0..20 {
        let keys = sequence(name, 1);
        assert_eq!(put(&open.store, &long, &keys, None).pages, 1, "page {name}");
        assert_eq!(get(&open.store, &long, &keys).pages, 1, "page {name}");
    }
    let is_present = |name: &u64| get(&open.store, &long, &sequence(*name, 1)).pages == 1;
    let present: Vec<u64> = (0..20).filter(is_present).collect();
    assert!((2..=9).contains(&present.len()), "{} of 20 long pages are present", present.len());
    for name in 0..80 {
        open.store.delete(&short, &refs(&sequence(name, 8))).unwrap();
    }
    let placed = present.iter().map(|name| place(&open, &long, &sequence(*name, 1)).units() * UNIT);
    let used = open.store.stats().unwrap().catalog.used_bytes;
    assert_eq!(used, placed.sum::<u64>(), "a piece of an evicted page still takes space");
    open.close();
}

#[test]
fn damage_in_any_piece_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_on(Arc::new(Host), &two_paths(dir.path())).unwrap();
    let (scope, keys) = (unchained(PAGE), sequence(1, 1));
    put(&open.store, &scope, &keys, None);
    open.store.flush().unwrap();
    let place = place(&open, &scope, &keys);
    assert!(place.extents.len() > 17);
    let last = place.extents.last().unwrap();
    let segments = open.core.segments();
    let file = segments.dir(last.segment.volume()).unwrap().join(Segments::file_name(last.segment));
    let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(b"other bytes", last.offset()).unwrap();
    let outcome = get(&open.store, &scope, &keys);
    assert_eq!((outcome.pages, outcome.reason), (0, "checksum"));
    open.close();
}

#[test]
fn a_page_larger_than_half_of_the_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    let error = try_put(&open.store, &unchained(PAGE), &sequence(1, 1), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let line = error.to_string();
    assert!(line.contains("raise the capacity") && line.contains("at_most"), "{line}");
    let error = unchained(PAGE_BYTES_MAX + 1).resolved_page_bytes().unwrap_err();
    assert!(error.to_string().contains(&PAGE_BYTES_MAX.to_string()), "{error}");
    open.close();
}

#[test]
fn pages_as_long_as_a_segment_are_placed() {
    for segment_mib in [1, 2, 16] {
        let dir = tempfile::tempdir().unwrap();
        let options =
            Options { segment_bytes: Some(segment_mib * MIB), ..options(dir.path(), 160) };
        let open = open_on(Arc::new(Host), &options).unwrap();
        for page_bytes in [segment_mib * MIB, 16 * MIB] {
            let scope = unchained(page_bytes);
            assert_eq!(put(&open.store, &scope, &sequence(1, 2), None).pages, 2, "{page_bytes}");
            assert_eq!(get(&open.store, &scope, &sequence(1, 2)).pages, 2, "{page_bytes}");
        }
        assert_eq!(open.store.stats().unwrap().catalog.counters["evicted_pages"], 0);
        open.close();
    }
}

/// Whether a line warns that pages of a scope no longer fit the store.
fn is_advice(line: &&String) -> bool {
    line.starts_with("WARN") && line.contains("raise the capacity")
}

#[test]
fn a_page_too_long_for_the_shrunk_store_evicts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    let (short, long) = (unchained(300_000), unchained(PAGE));
    assert_eq!(put(&open.store, &long, &sequence(1, 1), None).pages, 1);
    open.store.resize(16 * MIB).unwrap();
    put(&open.store, &short, &sequence(2, 8), None);
    let lines = log_lines(|| {
        for name in 3..6 {
            assert_eq!(put(&open.store, &long, &sequence(name, 1), None).reason, "no_space");
        }
    });
    assert_eq!(lines.iter().filter(is_advice).count(), 1, "not one line for the scope: {lines:?}");
    assert_eq!(get(&open.store, &short, &sequence(2, 8)).pages, 8);
    open.close();
}

/// Such a page would be refused if its scope were new.
#[test]
fn page_longer_than_half_of_the_shrunk_store_replaces_other_pages() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    let (short, long) = (unchained(300_000), unchained(PAGE));
    assert_eq!(put(&open.store, &long, &sequence(1, 1), None).pages, 1);
    open.store.resize(24 * MIB).unwrap();
    put(&open.store, &short, &sequence(2, 8), None);
    for name in 2..5 {
        let keys = sequence(name, 1);
        assert_eq!(put(&open.store, &long, &keys, None).pages, 1, "page {name}");
        assert_eq!(get(&open.store, &long, &keys).pages, 1, "page {name}");
        assert_eq!(get(&open.store, &long, &sequence(name - 1, 1)).pages, 0, "page {name}");
    }
    // Two such pages do not fit, so a page cannot be replaced while it is being read.
    let lease = begin_read(&open, &long, &sequence(4, 1));
    assert_eq!(put(&open.store, &long, &sequence(5, 1), None).reason, "no_space");
    open.core.catalog_for(ClientId::LOCAL, "").release(lease).unwrap();
    assert_eq!(put(&open.store, &long, &sequence(5, 1), None).pages, 1);
    // A client may reserve half of the store, so its puts of such pages are refused.
    let client = open.core.catalog_for(ClientId(7), "0123456789abcdef0123456789abcdef");
    let scope = client.resolve(&long, false).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..Default::default() };
    let lines = log_lines(|| {
        for name in 6..8 {
            let keys = sequence(name, 1);
            let reserved = client.reserve(scope, &refs(&keys), None, &request).unwrap();
            assert_eq!(reserved.refused, Some(Refusal::NoSpace));
        }
    });
    assert_eq!(lines.iter().filter(is_advice).count(), 1, "not one line for the scope: {lines:?}");
    assert_eq!(get(&open.store, &long, &sequence(5, 1)).pages, 1, "nothing may be evicted");
    open.close();
}
