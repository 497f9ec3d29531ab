//! Operations on tens of thousands of runs release the lock of the core's state between steps, so
//! that calls of other threads do not wait for the whole operation. The tests check the result, and
//! print the waits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Scope, ScopeSettings};
use ritornello_medium::SimDisk;
use ritornello_store::{
    Catalog, ClientId, LeaseNumber, LocalCatalog, Options, ReserveRequest, ScopeRef,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The smaller number of runs of a test.
const FEW: u64 = 4_000;
/// The larger number of runs of a test.
const MANY: u64 = 40_000;
/// The number of times that each longest wait is measured. The shortest of these waits is printed.
const ROUNDS: usize = 3;

fn open(wall_clock: fn() -> u64) -> (Open, LocalCatalog) {
    let opts =
        Options { background_threads: false, wall_clock, ..options(Path::new("/store"), 2048) };
    let opts = Options { segment_bytes: Some(64 * MIB), ..opts };
    let open = open_on(Arc::new(SimDisk::new(8 << 30)), &opts).unwrap();
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    (open, catalog)
}

/// Commits runs of one page each, whose bytes the test never reads.
fn commit_single_page_runs(
    catalog: &LocalCatalog,
    scope: &Scope,
    names: std::ops::Range<u64>,
    retain_until: u64,
) -> ScopeRef {
    let scope = catalog.resolve(scope, true).unwrap().unwrap();
    let request = ReserveRequest {
        retain_until,
        timeout: Duration::from_secs(60),
        ..ReserveRequest::default()
    };
    for name in names {
        let key = name.to_le_bytes();
        let reserved = catalog.reserve(scope, &[&key], None, &request).unwrap();
        assert_eq!(catalog.commit(reserved.id, &[Some(7)]).unwrap().stored, 1);
        if name % 10_000 == 0 {
            catalog.flush().unwrap();
        }
    }
    catalog.flush().unwrap();
    scope
}

/// Returns the longest time that another thread's call took while `work` ran.
fn longest_wait(catalog: &LocalCatalog, work: impl FnOnce()) -> Duration {
    let (started, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !done.load(Ordering::Acquire) {
                let called = Instant::now();
                catalog.release(LeaseNumber::default()).unwrap();
                longest = longest.max(called.elapsed());
                started.store(true, Ordering::Release);
            }
            longest
        });
        while !started.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        work();
        done.store(true, Ordering::Release);
        caller.join().unwrap()
    })
}

/// Measures `wait` with few and with many runs, and prints how long other threads waited. Asserts
/// no limit, because on a busy machine the scheduler decides.
fn compare(what: &str, mut wait: impl FnMut(u64) -> Duration) {
    let mut best = |runs| (0..ROUNDS).map(|_| wait(runs)).min().unwrap();
    let (few, many) = (best(FEW), best(MANY));
    println!("{what}: the longest wait is {few:.1?} with {FEW} runs, {many:.1?} with {MANY}");
}

#[test]
fn all_retentions_lapse_in_one_pass() {
    static TIME: AtomicU64 = AtomicU64::new(1000);
    let (open, catalog) = open(|| TIME.load(Ordering::Relaxed));
    let mut put = 0;
    compare("end of retentions", |runs| {
        let until = TIME.load(Ordering::Relaxed) + 10_000;
        commit_single_page_runs(&catalog, &unchained(64), put..put + runs, until);
        TIME.fetch_add(20_000, Ordering::Relaxed);
        put += runs;
        let wait = longest_wait(&catalog, || open.core.run_once());
        assert_eq!(catalog.stats().unwrap().counters["retentions_lapsed"], put);
        wait
    });
    open.close();
}

#[test]
fn zero_retention_limit_ends_all_retentions() {
    let (open, catalog) = open(|| 1000);
    let mut put = 0;
    compare("retention limit of zero", |runs| {
        let scope = commit_single_page_runs(&catalog, &unchained(64), put..put + runs, 50_000);
        put += runs;
        let none = ScopeSettings { retained_bytes: Some(0), ..Default::default() };
        let wait = longest_wait(&catalog, || catalog.configure(scope, &none).unwrap());
        assert_eq!(catalog.stats().unwrap().retained_bytes, 0);
        catalog.configure(scope, &ScopeSettings::default()).unwrap();
        wait
    });
    open.close();
}

#[test]
fn new_quota_keeps_the_last_put_pages() {
    let (open, catalog) = open(|| 1000);
    let mut put = 0;
    let quota = |quota_bytes| ScopeSettings { quota_bytes, ..ScopeSettings::default() };
    let mut tenant = None;
    compare("setting of a quota", |runs| {
        let scope = commit_single_page_runs(&catalog, &unchained(64), put..put.max(runs), 0);
        put = put.max(runs);
        tenant = Some(scope);
        let wait = longest_wait(&catalog, || {
            catalog.configure(scope, &quota(Some(1 << 40))).unwrap();
        });
        catalog.configure(scope, &quota(None)).unwrap();
        wait
    });
    // Pages are evicted in order of use: the page that was put first is evicted first.
    let (tenant, kept) = (tenant.unwrap(), MANY / 2);
    catalog.configure(tenant, &quota(Some(kept * 8192))).unwrap();
    let keys: Vec<[u8; 8]> = (0..MANY).map(u64::to_le_bytes).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let present = catalog.exists(tenant, &keys).unwrap();
    assert_eq!(present.iter().filter(|present| **present).count() as u64, kept);
    assert!(present[(MANY - kept) as usize..].iter().all(|present| *present));
    open.close();
}

#[test]
fn dropped_scope_leaves_no_pages() {
    let (open, catalog) = open(|| 1000);
    compare("drop of a scope", |runs| {
        let scope = commit_single_page_runs(&catalog, &unchained(64), 0..runs, 0);
        let wait = longest_wait(&catalog, || {
            catalog.drop_scope(scope).unwrap();
            catalog.flush().unwrap();
        });
        assert_eq!(catalog.stats().unwrap().pages, 0);
        wait
    });
    open.close();
}

/// A quota gives its scope an eviction policy, which is built in steps. Uses, puts and deletions of
/// another thread, which may come between the steps, take effect in this policy.
#[test]
fn quota_set_under_traffic_holds() {
    let (open, catalog) = open(|| 1000);
    let tenant = commit_single_page_runs(&catalog, &unchained(64), 0..8000, 0);
    let quota = |quota_bytes| ScopeSettings { quota_bytes, ..ScopeSettings::default() };
    let hot: Vec<[u8; 8]> = (0..100).map(u64::to_le_bytes).collect();
    let hot: Vec<&[u8]> = hot.iter().map(|key| &key[..]).collect();
    for key in &hot {
        catalog.touch(tenant, &[key]).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for name in 0.. {
                if done.load(Ordering::Acquire) {
                    break;
                }
                for key in &hot {
                    catalog.touch(tenant, &[key]).unwrap();
                }
                commit_single_page_runs(
                    &catalog,
                    &unchained(64),
                    1_000_000 + name..1_000_001 + name,
                    0,
                );
                let deleted = (4000 + name % 4000).to_le_bytes();
                catalog.delete(tenant, &[&deleted]).unwrap();
            }
        });
        for _ in 0..20 {
            catalog.configure(tenant, &quota(Some(6000 * 8192))).unwrap();
            catalog.configure(tenant, &quota(None)).unwrap();
        }
        catalog.configure(tenant, &quota(Some(1000 * 8192))).unwrap();
        done.store(true, Ordering::Release);
    });
    let stats = catalog.stats().unwrap();
    assert!(stats.largest_scopes[0].bytes <= 1000 * 8192, "{:?}", stats.largest_scopes);
    let present = catalog.exists(tenant, &hot).unwrap();
    assert!(present.iter().all(|present| *present), "pages in use were evicted: {present:?}");
    catalog.configure(tenant, &quota(Some(0))).unwrap();
    assert_eq!(catalog.stats().unwrap().pages, 0, "a run is missing in the eviction order");
    open.close();
}
