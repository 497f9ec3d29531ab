//! Checked-in stores of earlier builds still open: `examples/make_fixture.rs` made them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::Host;
use ritornello_store::Options;
use std::path::PathBuf;
use std::sync::Arc;

/// Unpacks and opens a checked-in store.
fn unpacked(name: &str) -> (tempfile::TempDir, Open) {
    let packed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::open(packed).unwrap();
    tar::Archive::new(flate2::read::GzDecoder::new(file)).unpack(dir.path()).unwrap();
    let open = open_on(Arc::new(Host), &Options::new(dir.path())).unwrap();
    (dir, open)
}

#[test]
fn format_0_store_opens_with_its_pages() {
    let (_dir, open) = unpacked("v0.tar.gz");
    assert_eq!(get(&open.store, &chained(20_000), &sequence(1, 8)).pages, 8);
    let present = open.store.exists(&unchained(4096), &refs(&sequence(2, 4))).unwrap();
    assert_eq!(present, [true, false, true, true]);
    assert_eq!(get(&open.store, &unchained(4096), &sequence(2, 4)[2..]).pages, 2);
    let report = open.core.verify(false, &mut |_, _| {}).unwrap();
    assert_eq!((report.pages, report.findings.len()), (11, 0));
    open.close();
}

/// In earlier builds a scope's id did not cover the arrangement of its pages, so none of these
/// pages verifies under this build's ids. Opening drops the scopes with all pages: no page counts
/// as damaged, and no space is withheld.
#[test]
fn scopes_with_old_ids_are_dropped() {
    let (_dir, open) = unpacked("v0-identity-0.tar.gz");
    let scope = chained(20_000);
    assert_eq!(get(&open.store, &scope, &sequence(1, 8)).pages, 0);
    let report = open.core.verify(false, &mut |_, _| {}).unwrap();
    assert_eq!((report.pages, report.findings.len()), (0, 0));
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.scopes, stats.pages, stats.quarantined_bytes), (0, 0, 0));
    assert_eq!(put(&open.store, &scope, &sequence(1, 8), None).pages, 8);
    assert_eq!(get(&open.store, &scope, &sequence(1, 8)).pages, 8);
    open.close();
}
