//! A put above its scope's quota evicts pages of that scope only.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use proptest::prelude::*;
use ritornello_format::{ErrorKind, Scope, ScopeSettings};
use ritornello_medium::SimDisk;
use ritornello_store::{CatalogStats, ScopeUsage};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 64 << 10;

fn quota(bytes: u64) -> ScopeSettings {
    ScopeSettings { quota_bytes: Some(bytes), ..ScopeSettings::default() }
}

fn stats(open: &Open) -> CatalogStats {
    open.store.stats().unwrap().catalog
}

fn usage(open: &Open, scope: &Scope) -> ScopeUsage {
    let id = scope.id().to_string();
    stats(open).largest_scopes.into_iter().find(|usage| usage.id == id).unwrap_or_default()
}

#[test]
fn scope_over_quota_evicts_its_own_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let mut open = open(dir.path(), 12);
    let (tenant, other) = (chained(PAGE), unchained(PAGE));
    open.store.configure(&tenant, &quota(3 * MIB)).unwrap();
    for name in 0..4 {
        put(&open.store, &other, &sequence(name, 8), None);
    }
    let hot = sequence(999, 8);
    put(&open.store, &tenant, &hot, None);
    for name in 0..40 {
        assert_eq!(put(&open.store, &tenant, &sequence(name, 8), None).pages, 8);
        assert_eq!(open.store.touch(&tenant, &refs(&hot)).unwrap(), 8, "used pages must be kept");
        let used = usage(&open, &tenant);
        assert!(used.bytes <= 3 * MIB && used.quota_bytes == Some(3 * MIB), "{used:?}");
        if name == 20 {
            open.close();
            open = common::open(dir.path(), 12);
        }
    }
    assert!(usage(&open, &tenant).bytes > 2 * MIB, "most of the quota must be in use");
    let counters = stats(&open).counters;
    assert!(counters["evicted_quota"] > 0 && evictions_have_causes(&counters));
    let alive = |name| open.store.probe(&other, &refs(&sequence(name, 8))).unwrap();
    assert_eq!((0..4).map(alive).sum::<usize>(), 32);
    for name in 0..40 {
        let present = open.store.exists(&tenant, &refs(&sequence(name, 8))).unwrap();
        let prefix = present.iter().take_while(|present| **present).count();
        assert!(
            present[prefix..].iter().all(|present| !present),
            "a page was evicted before the pages after it: {present:?}"
        );
    }
    open.close();
}

#[test]
fn quota_full_of_leased_pages_refuses_puts() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = chained(PAGE);
    open.store.configure(&scope, &quota(MIB)).unwrap();
    put(&open.store, &scope, &sequence(1, 14), None);
    let lease = open.store.lease(&scope, &refs(&sequence(1, 14)), Duration::from_secs(60)).unwrap();
    assert_eq!(lease.pages, 14);
    let refused = put(&open.store, &scope, &sequence(2, 8), None);
    assert_eq!((refused.pages, refused.reason), (0, "quota"));
    assert_eq!(stats(&open).counters["refused_quota"], 8);
    assert_eq!(stats(&open).counters["refused_pages"], 8);
    open.store.release(lease.lease).unwrap();
    assert_eq!(put(&open.store, &scope, &sequence(2, 8), None).pages, 8);
    // The store keeps the beginning of a sequence that is longer than the quota, up to the quota.
    let long = put(&open.store, &scope, &sequence(3, 40), None);
    assert!(long.pages >= 14 && long.pages < 16 && long.reason == "quota", "{long:?}");
    open.close();
}

#[test]
fn quota_can_be_lowered_to_zero_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = unchained(PAGE);
    for name in 0..10 {
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    open.store.configure(&scope, &quota(2 * MIB)).unwrap();
    assert!((1..=2 * MIB).contains(&usage(&open, &scope).bytes));
    open.store.configure(&scope, &quota(0)).unwrap();
    assert_eq!(usage(&open, &scope).bytes, 0);
    assert_eq!(put(&open.store, &scope, &sequence(1, 8), None).reason, "quota");
    open.store.configure(&scope, &ScopeSettings::default()).unwrap();
    assert_eq!(put(&open.store, &scope, &sequence(1, 8), None).pages, 8);
    let more = ScopeSettings { retained_bytes: Some(3 * MIB), ..quota(2 * MIB) };
    let error = open.store.configure(&scope, &more).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    // A scope that is registered again after a drop is a new scope, without settings.
    open.store.configure(&scope, &quota(0)).unwrap();
    open.store.drop_scope(&scope).unwrap();
    assert_eq!(put(&open.store, &scope, &sequence(1, 8), None).pages, 8);
    open.close();
}

/// An action. A `bool` selects the chained scope if true, otherwise the unchained scope. `Put`,
/// `Get` and `Delete` name a sequence; `Put` puts a number of its pages, and `Delete` deletes its
/// pages from an index on. `Configure` sets a quota in bytes, or removes the quota.
#[derive(Clone, Debug)]
enum Act {
    Put(bool, u64, usize),
    Get(bool, u64),
    Delete(bool, u64, usize),
    Configure(bool, Option<u64>),
    Drop(bool),
    Flush,
    Reopen,
    Crash(u64),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        10 => (any::<bool>(), 0..30u64, 1..10usize).prop_map(|(c, s, n)| Act::Put(c, s, n)),
        2 => (any::<bool>(), 0..30u64).prop_map(|(c, s)| Act::Get(c, s)),
        1 => (any::<bool>(), 0..30u64, 0..10usize).prop_map(|(c, s, n)| Act::Delete(c, s, n)),
        2 => (any::<bool>(), prop::option::of(0..3000u64))
            .prop_map(|(c, kib)| Act::Configure(c, kib.map(|kib| kib << 10))),
        1 => any::<bool>().prop_map(Act::Drop),
        1 => Just(Act::Flush),
        1 => Just(Act::Reopen),
        1 => any::<u64>().prop_map(Act::Crash),
    ];
    prop::collection::vec(act, 1..50)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// After every action, the bytes and pages of all scopes add up to the totals of the store, and
    /// no scope exceeds its quota.
    #[test]
    fn usage_is_exact_and_quotas_hold(acts in acts()) {
        let mut disk = SimDisk::new(64 * MIB);
        let opts = options(Path::new("/store"), 5);
        let mut open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        let scope = |chain: bool| if chain { chained(20_000) } else { unchained(20_000) };
        for act in acts {
            match act {
                Act::Put(c, name, pages) => {
                    put(&open.store, &scope(c), &sequence(name, pages), None);
                }
                Act::Get(c, name) => {
                    get(&open.store, &scope(c), &sequence(name, 10));
                }
                Act::Delete(c, name, from) => {
                    open.store.delete(&scope(c), &refs(&sequence(name, 10)[from..])).unwrap();
                }
                Act::Configure(c, quota_bytes) => {
                    let settings = ScopeSettings { quota_bytes, ..ScopeSettings::default() };
                    open.store.configure(&scope(c), &settings).unwrap();
                }
                Act::Drop(c) => open.store.drop_scope(&scope(c)).unwrap(),
                Act::Flush => open.store.flush().unwrap(),
                Act::Reopen => {
                    open.close();
                    open = open_on(Arc::new(disk.clone()), &opts).unwrap();
                }
                Act::Crash(seed) => {
                    disk = disk.crash(seed);
                    open.forget();
                    open = open_on(Arc::new(disk.clone()), &opts).unwrap();
                }
            }
            let stats = stats(&open);
            let bytes: u64 = stats.largest_scopes.iter().map(|scope| scope.bytes).sum();
            let pages: u64 = stats.largest_scopes.iter().map(|scope| scope.pages).sum();
            prop_assert_eq!((bytes, pages), (stats.used_bytes, stats.pages));
            for scope in &stats.largest_scopes {
                prop_assert!(scope.bytes <= scope.quota_bytes.unwrap_or(u64::MAX), "{:?}", scope);
            }
        }
        open.close();
    }
}
