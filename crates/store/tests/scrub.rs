//! Scrubbing: in the background, and by one pass on request.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::Host;
use ritornello_store::{CatalogStats, Options};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u64 = 60_000;

fn open_scrubbing(dir: &Path, rate: u64) -> Open {
    open_on(Arc::new(Host), &Options { scrub_rate: rate, ..options(dir, 12) }).unwrap()
}

fn stats(open: &Open) -> CatalogStats {
    open.store.stats().unwrap().catalog
}

fn wait_for(open: &Open, what: impl Fn(&CatalogStats) -> bool) -> CatalogStats {
    let patience = Instant::now() + Duration::from_secs(60);
    loop {
        let now = stats(open);
        if what(&now) || Instant::now() > patience {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn scrub_removes_damaged_pages() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_scrubbing(dir.path(), 0);
    for name in 0..8 {
        put(&open.store, &chained(PAGE), &sequence(name, 5), None);
    }
    open.close();
    let segment = dir.path().join("segments/seg-000000");
    let file = std::fs::OpenOptions::new().write(true).open(segment).unwrap();
    file.write_at(&[0xA5; 4096], 100 * 4096).unwrap();
    let open = open_scrubbing(dir.path(), 1 << 30);
    let seen = wait_for(&open, |s| s.counters["scrub_damaged_pages"] > 0);
    assert!(seen.counters["scrub_damaged_pages"] >= 1 && seen.counters["scrubbed_bytes"] > 0);
    assert!(seen.counters["damaged_pages"] >= 1 && seen.quarantined_bytes > 0);
    let hit = |name| open.store.probe(&chained(PAGE), &refs(&sequence(name, 5))).unwrap();
    assert!((0..8).any(|name| hit(name) < 5) && (0..8).any(|name| hit(name) == 5));
    for name in 0..8 {
        assert_eq!(get(&open.store, &chained(PAGE), &sequence(name, 5)).pages, hit(name));
    }
    open.close();
}

#[test]
fn scrub_pass_reads_every_run_and_removes_damaged_pages() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_scrubbing(dir.path(), 0);
    for name in 0..8 {
        put(&open.store, &chained(PAGE), &sequence(name, 5), None);
    }
    let core = Arc::clone(&open.core);
    let mut seen = Vec::new();
    let clean = core
        .scrub_pass(&mut |found, total| {
            seen.push((found.runs, total));
            true
        })
        .unwrap();
    assert_eq!(seen, (1..=8).map(|run| (run, 8)).collect::<Vec<_>>());
    assert_eq!((clean.runs, clean.pages, clean.findings.len()), (8, 40, 0));
    let early = core.scrub_pass(&mut |found, _| found.runs < 3).unwrap();
    assert_eq!(early.runs, 3);
    let segment = dir.path().join("segments/seg-000000");
    let file = std::fs::OpenOptions::new().write(true).open(segment).unwrap();
    file.write_at(&[0xA5; 4096], 100 * 4096).unwrap();
    let damaged = core.scrub_pass(&mut |_, _| true).unwrap();
    assert!(damaged.findings.len() == 1 && damaged.pages_dropped >= 1, "{damaged:?}");
    let counters = stats(&open).counters;
    assert_eq!((counters["scrubbed_runs"], counters["scrub_damaged_pages"]), (8 + 3 + 8, 1));
    assert_eq!(core.scrub_pass(&mut |_, _| true).unwrap().findings.len(), 0);
    open.close();
    assert_eq!(core.scrub_pass(&mut |_, _| true).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn scrub_reads_every_run_repeatedly() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_scrubbing(dir.path(), 1 << 40);
    for name in 0..6 {
        put(&open.store, &chained(PAGE), &sequence(name, 5), None);
    }
    let runs = stats(&open).runs;
    let seen = wait_for(&open, |s| s.counters["scrubbed_runs"] >= 2 * runs);
    assert!(seen.counters["scrubbed_runs"] >= 2 * runs, "{:?}", seen.counters);
    assert_eq!(seen.counters["scrub_damaged_pages"], 0);
    open.close();
}

#[test]
fn zero_rate_scrubs_nothing_and_slow_scrub_delays_no_close() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_scrubbing(dir.path(), 0);
    put(&open.store, &chained(PAGE), &sequence(0, 5), None);
    assert_eq!(stats(&open).counters["scrubbed_runs"], 0);
    open.close();
    // At one byte per second the scrub reads a run days after the previous run. The close does not
    // wait for the next run.
    let open = open_scrubbing(dir.path(), 1);
    let started = Instant::now();
    open.close();
    assert!(started.elapsed() < Duration::from_secs(3600));
}
