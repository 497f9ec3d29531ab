//! Retained pages stay stored until their retention ends, also after restarts and power loss. The
//! retained bytes stay within their share of the capacity.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Scope, ScopeSettings};
use ritornello_medium::{Host, Medium, SimDisk};
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{Options, Outcome, PutOptions, Store};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: u64 = 64 << 10;

macro_rules! clock {
    ($name:ident, $start:expr) => {{
        static $name: AtomicU64 = AtomicU64::new($start);
        (&$name, (|| $name.load(Ordering::Relaxed)) as fn() -> u64)
    }};
}

fn put_until(store: &Store, scope: &Scope, keys: &[Vec<u8>], terms: PutOptions) -> Outcome {
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&pages);
    store.put_batch(scope, &refs(keys), &source, &terms, &Control::default()).unwrap()
}

fn until(retain_until: u64) -> PutOptions {
    PutOptions { retain_until, ..PutOptions::default() }
}

/// Puts 30 MiB of pages, two and a half times the store's capacity.
fn overfill(open: &Open, scope: &Scope, first: u64) {
    for name in first..first + 60 {
        assert_eq!(put(&open.store, scope, &sequence(name, 8), None).pages, 8, "sequence {name}");
    }
}

fn present_pages(open: &Open, scope: &Scope, name: u64) -> usize {
    get(&open.store, scope, &sequence(name, 8)).pages
}

fn counter(open: &Open, name: &str) -> u64 {
    open.store.stats().unwrap().catalog.counters[name]
}

fn retained(open: &Open) -> u64 {
    open.store.stats().unwrap().catalog.retained_bytes
}

/// Waits until `what` returns true, for example because the store's periodic thread has read the
/// clock. Fails after 60 seconds.
fn wait_for(what: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !what() {
        assert!(Instant::now() < deadline, "periodic maintenance did not run");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns options with the policy LRU: newer pages evict a page, however often it was used.
fn options_at(dir: &Path, wall_clock: fn() -> u64) -> Options {
    Options { wall_clock, eviction: PolicyKind::Lru, ..options(dir, 12) }
}

fn open_at(dir: &Path, wall_clock: fn() -> u64) -> Open {
    open_on(Arc::new(Host), &options_at(dir, wall_clock)).unwrap()
}

/// A put of a retained run counts as a further retention (`runs_retained`) only if it retains the
/// run until a later moment.
#[test]
fn only_later_end_counts_as_retention() {
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), || 1000);
    let scope = chained(PAGE);
    let keys = sequence(1, 8);
    for end in [2, 4, 6, 8] {
        put_until(&open.store, &scope, &keys[..end], until(50_000));
    }
    assert_eq!(counter(&open, "runs_retained"), 4);
    for terms in [PutOptions::default(), until(50_000), until(40_000)] {
        assert_eq!(put_until(&open.store, &scope, &keys, terms).pages, 8);
    }
    assert_eq!(counter(&open, "runs_retained"), 4);
    put_until(&open.store, &scope, &keys[..4], until(60_000));
    assert_eq!(counter(&open, "runs_retained"), 6, "a later end must count as a further retention");
    open.close();
}

#[test]
fn retained_pages_stay_under_pressure_until_their_end() {
    let (time, clock) = clock!(TIME, 1000);
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), clock);
    let scope = chained(PAGE);
    put_until(&open.store, &scope, &sequence(1000, 8), until(50_000));
    put(&open.store, &scope, &sequence(1001, 8), None);
    overfill(&open, &scope, 0);
    assert_eq!((present_pages(&open, &scope, 1000), present_pages(&open, &scope, 1001)), (8, 0));
    assert!(retained(&open) >= 8 * PAGE);
    time.store(60_000, Ordering::Relaxed);
    wait_for(|| counter(&open, "retentions_lapsed") == 1);
    assert_eq!(retained(&open), 0);
    overfill(&open, &scope, 100);
    assert_eq!(present_pages(&open, &scope, 1000), 0);
    // This put asks for a retention that ends now: the put stores the pages without retention.
    assert_eq!(put_until(&open.store, &scope, &sequence(1002, 8), until(60_000)).pages, 8);
    assert_eq!(retained(&open), 0);
    open.close();
}

#[test]
fn ancestors_are_retained_and_counted() {
    let (_, clock) = clock!(TIME, 1000);
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), clock);
    let scope = chained(PAGE);
    let keys = sequence(1000, 8);
    put(&open.store, &scope, &keys[..3], None);
    let options = PutOptions { parent: Some(keys[2].clone().into()), retain_until: 9000 };
    put_until(&open.store, &scope, &keys[3..6], options);
    // A retention also protects pages that precede the retained pages in their chain, even if these
    // pages are stored later.
    let other = sequence(1001, 8);
    let options = PutOptions { parent: Some(other[3].clone().into()), retain_until: 9000 };
    put_until(&open.store, &scope, &other[4..], options);
    put(&open.store, &scope, &other[..4], None);
    overfill(&open, &scope, 0);
    assert_eq!((present_pages(&open, &scope, 1000), present_pages(&open, &scope, 1001)), (6, 8));
    assert!(retained(&open) >= 14 * PAGE);
    open.close();
}

#[test]
fn branches_stored_before_their_stem_retain_it() {
    let (_, clock) = clock!(TIME, 1000);
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), clock);
    let scope = chained(PAGE);
    let stem = sequence(1000, 4);
    let branch = |name| [&stem[..], &sequence(name, 4)].concat();
    let after_stem = || PutOptions::after(Some(&stem[3]));
    let options = PutOptions { retain_until: 9000, ..after_stem() };
    put_until(&open.store, &scope, &branch(1001)[4..], options);
    put_until(&open.store, &scope, &branch(1002)[4..], after_stem());
    put(&open.store, &scope, &stem, None);
    overfill(&open, &scope, 0);
    assert_eq!(get(&open.store, &scope, &branch(1001)).pages, 8);
    assert_eq!(get(&open.store, &scope, &branch(1002)).pages, 4);
    open.close();
}

#[test]
fn retention_end_never_moves_earlier() {
    let (time, clock) = clock!(TIME, 1000);
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), clock);
    let scope = unchained(PAGE);
    let keys = sequence(1000, 8);
    put(&open.store, &scope, &keys, None);
    for end in [3000, 90_000, 5000] {
        assert_eq!(put_until(&open.store, &scope, &keys, until(end)).pages, 8);
    }
    assert_eq!(counter(&open, "runs_retained"), 2);
    time.store(80_000, Ordering::Relaxed);
    put_until(&open.store, &scope, &sequence(1001, 8), until(80_010));
    time.store(80_020, Ordering::Relaxed);
    wait_for(|| counter(&open, "retentions_lapsed") == 1);
    overfill(&open, &scope, 0);
    assert_eq!((present_pages(&open, &scope, 1000), present_pages(&open, &scope, 1001)), (8, 0));
    open.close();
}

#[test]
fn earliest_retention_is_released_at_the_limit() {
    let (_, clock) = clock!(TIME, 1000);
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), clock);
    let scope = chained(PAGE);
    // The following puts retain all pages for as long as the store allows, 366 days, but the store
    // retains at most a quarter of its capacity by default.
    for name in 0..60 {
        let keys = sequence(name, 8);
        assert_eq!(put_until(&open.store, &scope, &keys, until(u64::MAX - name)).pages, 8);
        assert!(retained(&open) <= 12 * MIB / 4);
    }
    assert!(counter(&open, "retentions_displaced") > 0);
    // A setting cannot raise the limit above half of the store.
    let most = ScopeSettings { retained_bytes: Some(1 << 40), ..ScopeSettings::default() };
    open.store.configure(&scope, &most).unwrap();
    for name in 60..120 {
        let keys = sequence(name, 8);
        assert_eq!(put_until(&open.store, &scope, &keys, until(5000 + name)).pages, 8);
        assert!(retained(&open) <= 12 * MIB / 2);
    }
    // The limit is now half of the store. The retentions of the first 60 puts end last, so the
    // store releases no more of them, and retains pages of the next 60 puts besides.
    assert_eq!(present_pages(&open, &scope, 119), 8);
    assert!(retained(&open) > 12 * MIB / 4);
    // When the limit is lowered, the store releases the excess immediately.
    let none = ScopeSettings { retained_bytes: Some(0), ..ScopeSettings::default() };
    open.store.configure(&scope, &none).unwrap();
    assert_eq!(retained(&open), 0);
    put_until(&open.store, &scope, &sequence(500, 8), until(9000));
    assert_eq!(retained(&open), 0);
    open.close();
}

#[test]
fn deleting_and_dropping_end_retention() {
    let (_, clock) = clock!(TIME, 1000);
    let dir = tempfile::tempdir().unwrap();
    let open = open_at(dir.path(), clock);
    let (scope, other) = (chained(PAGE), unchained(PAGE));
    for (scope, name) in [(&scope, 1), (&other, 2)] {
        put_until(&open.store, scope, &sequence(name, 8), until(9000));
    }
    let all = retained(&open);
    open.store.delete(&scope, &refs(&sequence(1, 8)[4..])).unwrap();
    assert_eq!(retained(&open), all - 4 * PAGE);
    open.store.delete(&scope, &refs(&sequence(1, 8))).unwrap();
    open.store.drop_scope(&other).unwrap();
    assert_eq!(retained(&open), 0);
    open.close();
}

#[test]
fn retention_survives_restart_with_a_reset_clock() {
    let (time, clock) = clock!(TIME, 1_000_000);
    let dir = tempfile::tempdir().unwrap();
    let scope = chained(PAGE);
    let open = open_at(dir.path(), clock);
    put_until(&open.store, &scope, &sequence(1000, 8), until(1_050_000));
    put_until(&open.store, &scope, &sequence(1001, 8), until(u64::MAX));
    let before = retained(&open);
    open.close();
    // The machine starts with its clock at 1970: the retention lasts as long as intended.
    time.store(0, Ordering::Relaxed);
    let open = open_at(dir.path(), clock);
    assert_eq!(retained(&open), before);
    overfill(&open, &scope, 0);
    assert_eq!((present_pages(&open, &scope, 1000), present_pages(&open, &scope, 1001)), (8, 8));
    time.store(60_000, Ordering::Relaxed);
    wait_for(|| counter(&open, "retentions_lapsed") == 1);
    overfill(&open, &scope, 100);
    assert_eq!((present_pages(&open, &scope, 1000), present_pages(&open, &scope, 1001)), (0, 8));
    open.close();
    // A retention ends at most 366 days after its put. A later opening does not extend it.
    time.store(3_000_000, Ordering::Relaxed);
    open_at(dir.path(), clock).close();
    time.store(1_000_000 + 367 * 86_400, Ordering::Relaxed);
    let open = open_at(dir.path(), clock);
    wait_for(|| counter(&open, "retentions_lapsed") == 1);
    open.close();
}

#[test]
fn flushed_retention_survives_power_loss() {
    let (_, clock) = clock!(TIME, 1000);
    let scope = chained(PAGE);
    let opts = || options_at(Path::new("/store"), clock);
    for seed in 0..12 {
        let disk = SimDisk::new(64 * MIB);
        let open = open_on(Arc::new(disk.clone()) as Arc<dyn Medium>, &opts()).unwrap();
        put(&open.store, &scope, &sequence(999, 8), None);
        put_until(&open.store, &scope, &sequence(1000, 8), until(9000));
        open.store.flush().unwrap();
        put_until(&open.store, &scope, &sequence(999, 8), until(9000));
        let after = disk.crash(seed);
        open.forget();
        let open = open_on(Arc::new(after), &opts()).unwrap();
        assert!(retained(&open) >= 8 * PAGE, "seed {seed}");
        overfill(&open, &scope, 0);
        assert_eq!(present_pages(&open, &scope, 1000), 8, "seed {seed}");
        open.close();
    }
}
