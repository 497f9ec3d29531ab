//! A full store: the store stays within its capacity, keeps recent pages, and does not evict leased
//! pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Scope, UNIT};
use ritornello_medium::Host;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{LEASE_PAGES_MAX, Options};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn capacity_holds_and_recent_pages_stay() {
    let dir = tempfile::tempdir().unwrap();
    let lru = Options { eviction: PolicyKind::Lru, ..options(dir.path(), 12) };
    let open = open_on(Arc::new(Host), &lru).unwrap();
    let scope = chained(64 << 10);
    for name in 0..60 {
        let keys = sequence(name, 8);
        assert_eq!(put(&open.store, &scope, &keys, None).pages, 8, "sequence {name}");
        assert_eq!(get(&open.store, &scope, &keys).pages, 8);
        let stats = open.store.stats().unwrap().catalog;
        assert!(stats.allocated_bytes <= stats.capacity_bytes, "{stats:?}");
        assert!(stats.segments <= stats.segments_max);
    }
    let stats = open.store.stats().unwrap().catalog;
    assert!(stats.counters["evicted_pages"] > 0, "{stats:?}");
    assert!(stats.counters["evicted_space"] > 0 && evictions_have_causes(&stats.counters));
    let alive = |name| open.store.probe(&scope, &refs(&sequence(name, 8))).unwrap();
    assert_eq!((56..60).map(alive).sum::<usize>(), 32);
    assert_eq!(alive(0), 0);
    open.close();
}

#[test]
fn used_sequence_stays_and_others_keep_prefixes() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = chained(64 << 10);
    let hot = sequence(999, 16);
    for part in hot.chunks(4) {
        let before = hot.iter().position(|key| *key == part[0]).unwrap().checked_sub(1);
        put(&open.store, &scope, part, before.map(|at| hot[at].as_slice()));
    }
    for name in 0..80 {
        put(&open.store, &scope, &sequence(name, 8), None);
        assert_eq!(open.store.touch(&scope, &refs(&hot)).unwrap(), 16, "after {name}");
    }
    assert_eq!(get(&open.store, &scope, &hot).pages, 16);
    for name in 0..80 {
        let present = open.store.exists(&scope, &refs(&sequence(name, 8))).unwrap();
        let prefix = present.iter().take_while(|present| **present).count();
        assert!(present[prefix..].iter().all(|present| !present), "{present:?}");
    }
    open.close();
}

#[test]
fn one_lease_covers_several_scopes() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 24);
    let scopes = [0, 1, 2].map(|part| Scope { part, ..chained(64 << 10) });
    let [long, short, none] = &scopes;
    let keys = sequence(1, 8);
    put(&open.store, long, &keys, None);
    put(&open.store, short, &keys[..5], None);
    let ttl = Duration::from_secs(60);
    let all = |scopes: &[&Scope]| open.store.lease_all(scopes, &refs(&keys), ttl).unwrap();
    let leases = || open.store.stats().unwrap().catalog.leases;
    for missing in [&[none, long][..], &[long, none], &[]] {
        assert_eq!((all(missing).pages, leases()), (0, 0), "{missing:?}");
    }
    put(&open.store, none, &sequence(2, 1), None);
    assert_eq!((all(&[long, none, short]).pages, leases()), (0, 0));
    let leased = all(&[long, short]);
    assert_eq!((leased.pages, leases()), (5, 1));
    for name in 3..80 {
        put(&open.store, long, &sequence(name, 8), None);
    }
    assert_eq!(get(&open.store, long, &keys[..5]).pages, 5);
    assert_eq!(get(&open.store, short, &keys[..5]).pages, 5);
    open.store.release(leased.lease).unwrap();
    assert_eq!(leases(), 0);
    open.store.drop_scope(short).unwrap();
    assert_eq!(all(&[long, short]).pages, 0);
    open.close();
}

#[test]
fn oversized_lease_calls_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = chained(64 << 10);
    let keys = sequence(1, 8);
    put(&open.store, &scope, &keys, None);
    let many = vec![&scope; LEASE_PAGES_MAX / 8 + 1];
    let error = open.store.lease_all(&many, &refs(&keys), Duration::from_secs(60)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(open.store.stats().unwrap().catalog.leases, 0);
    open.close();
}

#[test]
fn leased_pages_stay_readable() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scope = chained(64 << 10);
    let keys = sequence(1, 8);
    put(&open.store, &scope, &keys, None);
    let leased = open.store.lease(&scope, &refs(&keys), Duration::from_secs(60)).unwrap();
    assert_eq!(leased.pages, 8);
    for name in 2..60 {
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    assert_eq!(get(&open.store, &scope, &keys).pages, 8, "leased pages were evicted");
    open.store.delete(&scope, &refs(&keys)).unwrap();
    assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), 0);
    let deferred = open.store.stats().unwrap().catalog.deferred_bytes;
    assert!(deferred >= 8 * (64 << 10), "{deferred}");
    open.store.release(leased.lease).unwrap();
    assert_eq!(open.store.stats().unwrap().catalog.deferred_bytes, 0);
    open.close();
}

#[test]
fn put_is_refused_while_all_pages_are_leased() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 8);
    let scope = chained(64 << 10);
    let mut leases = Vec::new();
    for name in 0..40 {
        let keys = sequence(name, 8);
        let outcome = put(&open.store, &scope, &keys, None);
        if outcome.pages < 8 {
            assert_eq!(outcome.reason, "no_space");
        }
        leases.push(begin_read(&open, &scope, &keys));
    }
    assert!(open.store.stats().unwrap().catalog.counters["refused_pages"] > 0);
    for lease in leases {
        open.store.release(lease).unwrap();
    }
    assert_eq!(put(&open.store, &scope, &sequence(99, 8), None).pages, 8);
    open.close();
}

/// Puts small pages, and large pages that are not split and of which a segment holds few, so that
/// the free space is fragmented.
#[test]
fn fragmented_free_space_is_reclaimed() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 8);
    let part = |part, scope| Scope { part, ..scope };
    let small = part(1, unchained(4096));
    let large = part(2, chained(248 << 10));
    for name in 0..200 {
        let keys = sequence(name, 1 + (name % 3) as usize);
        assert_eq!(put(&open.store, &small, &keys, None).reason, "", "small {name}");
        if name % 4 == 0 {
            let keys = sequence(name, 2);
            assert_eq!(put(&open.store, &large, &keys, None).reason, "", "large {name}");
        }
    }
    open.close();
}

#[test]
fn many_puts_and_deletes_leak_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let part = |part, scope| Scope { part, ..scope };
    let scopes = [
        part(0, chained(4096)),
        part(1, unchained(20_000)),
        part(2, chained(196_608)),
        part(3, chained(400_000)),
    ];
    for round in 0..120u64 {
        let scope = &scopes[(round % 4) as usize];
        let keys = sequence(round / 3, 1 + (round % 5) as usize);
        put(&open.store, scope, &keys, None);
        if round % 7 == 0 {
            open.store.delete(scope, &refs(&keys[..1])).unwrap();
        }
    }
    open.store.clear().unwrap();
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!(stats.free_bytes, stats.segments * stats.segment_bytes);
    assert_eq!(stats.free_bytes % UNIT, 0);
    assert_eq!((stats.limbo_bytes, stats.deferred_bytes, stats.reserved_bytes), (0, 0, 0));
    open.close();
}
