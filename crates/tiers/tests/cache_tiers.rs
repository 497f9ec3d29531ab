//! A cache over its tiers: pages that were put are found on every tier to which they moved.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_tiers::Tier;
use ritornello_tiers::cache::{LookupOptions, PrefetchPolicy, Readiness};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn put_pages_are_read_from_first_tier() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&[&host(&dir, 64), &disk(&dir, 128)]);
    let keys = keys(1, 0, 12);
    assert_eq!(put(&cache, &keys, 0), 12);
    let found = find(&cache, &keys);
    assert_eq!((found.readiness, found.load), (Readiness::Ready, 12));
    assert_eq!(spans(&found), [(Tier::Host, 12)]);
    release(&cache, &found);
    assert!(reads(&cache, &keys, 0));
    assert!(reads(&cache, &keys, 5));
    cache.flush().unwrap();
    let disk = tier(&cache, "disk");
    assert_eq!((disk.written_pages, disk.dropped_pages), (12, 0));
    cache.close().unwrap();
    assert!(cache.is_closed());
}

#[test]
fn pages_read_from_disk_are_promoted() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = keys(1, 0, 20);
    {
        let below = open(&[&disk(&dir, 128)]);
        assert_eq!(put(&below, &prompt, 0), 20);
    }
    let cache = open(&[&host(&dir, 64), &format!("{} write=none", disk(&dir, 128))]);
    // Put the first pages, and another continuation of the prompt, into the host tier.
    assert_eq!(put(&cache, &prompt[..5], 0), 5);
    let longer = [&prompt[..], &keys(2, 0, 24)[20..]].concat();
    assert_eq!(put(&cache, &longer, 20), 4);
    let found = find(&cache, &longer);
    assert_eq!(spans(&found), [(Tier::Host, 5), (Tier::Disk, 15), (Tier::Host, 4)]);
    release(&cache, &found);
    assert!(reads(&cache, &longer, 0));
    // Some pages may have been promoted before they were read.
    let (host, disk) = (tier(&cache, "host"), tier(&cache, "disk"));
    assert!(host.promoted_pages >= 15 && host.loaded_pages >= 9, "{host:?}");
    assert_eq!(host.loaded_pages + disk.loaded_pages, 24);
    let until = Instant::now() + Duration::from_secs(60);
    while spans(&find(&cache, &longer)) != [(Tier::Host, 24)] {
        assert!(Instant::now() < until, "pages read from disk are not on the host tier");
    }
}

/// A store counts each call that asks it for pages that it lacks, as misses.
#[test]
fn lookup_asks_the_disk_tier_once_for_pages_that_no_tier_has() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = keys(1, 0, 20);
    {
        let below = open(&[&disk(&dir, 128)]);
        assert_eq!(put(&below, &prompt[..12], 0), 12);
    }
    let cache = open(&[&host(&dir, 64), &format!("{} write=none", disk(&dir, 128))]);
    assert_eq!(put(&cache, &prompt[..5], 0), 5);
    let found = find_once(&cache, &prompt);
    assert_eq!(spans(&found), [(Tier::Host, 5), (Tier::Disk, 7)]);
    let below = ritornello_node::Options::new(dir.path().join("disk"));
    let below = ritornello_node::open(&below).unwrap();
    let counters = below.store().stats().unwrap().catalog.counters;
    let counts = ["probes", "probed_pages", "hit_pages", "missed_unknown"];
    assert_eq!(counts.map(|name| counters[name]), [1, 15, 7, 8]);
    release(&cache, &found);
}

#[test]
fn pages_found_on_disk_are_promoted_before_load() {
    for policy in ["best_effort", "wait_complete"] {
        let dir = tempfile::tempdir().unwrap();
        let prompt = keys(1, 0, 500);
        put(&open(&[&disk(&dir, 128)]), &prompt, 0);
        let policy = PrefetchPolicy::parse(policy).unwrap();
        let cache = open_with(&[&host(&dir, 64), &disk(&dir, 128)], policy);
        let found = find_once(&cache, &prompt);
        assert_eq!(
            (found.readiness, found.load),
            (Readiness::Ready, 500),
            "the lookup must not wait for the promotion"
        );
        until("pages are promoted", || tier(&cache, "host").promoted_pages == 500);
        release(&cache, &found);
        until("pages are found on the first tier", || {
            spans(&find_once(&cache, &prompt)) == [(Tier::Host, 500)]
        });
        assert!(reads(&cache, &prompt, 0));
        assert_eq!(
            (tier(&cache, "host").loaded_pages, tier(&cache, "disk").loaded_pages),
            (500, 0)
        );
        let host = tier(&cache, "host");
        assert_eq!((host.dropped_pages, host.written_pages, host.promoted_pages), (0, 0, 500));
    }
}

#[test]
fn cancelled_promotion_stops() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = keys(1, 0, 500);
    put(&open(&[&disk(&dir, 128)]), &prompt, 0);
    // At this rate a promotion of 500 pages takes five seconds, and can be cancelled midway.
    let cache = open(&[&host(&dir, 64), &format!("{} rate=2MB", disk(&dir, 128))]);
    find_once(&cache, &prompt);
    assert!(tier(&cache, "host").queued_bytes > 0);
    assert!(cache.cancel(&scope(), &refs(&prompt)).unwrap());
    until("the promotion has stopped", || tier(&cache, "host").queued_bytes == 0);
    assert!(tier(&cache, "host").promoted_pages < 500);
    assert!(!cache.cancel(&scope(), &refs(&prompt)).unwrap());
}

#[test]
fn local_tiers_keep_pages_when_reopened() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (keys(1, 0, 10), keys(2, 0, 10));
    {
        let cache = open(&[&host(&dir, 64), &disk(&dir, 128)]);
        put(&cache, &a, 0);
        put(&cache, &b, 0);
        cache.flush().unwrap();
    }
    {
        let cache = open(&[&host(&dir, 64), &disk(&dir, 128)]);
        assert_eq!(spans(&find(&cache, &a)), [(Tier::Host, 10)]);
        assert!(reads(&cache, &a, 0));
    }
    // Remove the host tier, as a restart of the machine does.
    fs::remove_dir_all(dir.path().join("host")).unwrap();
    let cache = open(&[&host(&dir, 64), &disk(&dir, 128)]);
    assert_eq!(spans(&find(&cache, &b)), [(Tier::Disk, 10)]);
    assert!(reads(&cache, &b, 0));
}

/// Makes directories for two machines and for the remote that they share.
fn machines() -> (tempfile::TempDir, tempfile::TempDir, tempfile::TempDir) {
    let new = || tempfile::tempdir().unwrap();
    (new(), new(), new())
}

#[test]
fn other_machine_finds_pages_through_remote() {
    let (one, two, remote_dir) = machines();
    let prompt = keys(1, 0, 150);
    {
        let cache = open(&[&host(&one, 64), &remote(remote_dir.path())]);
        put(&cache, &prompt[..100], 0);
        put(&cache, &prompt, 100);
        cache.flush().unwrap();
        assert_eq!(tier(&cache, "remote").dropped_pages, 0);
    }
    let cache = open(&[&host(&two, 64), &disk(&two, 64), &remote(remote_dir.path())]);
    assert_eq!(find_once(&cache, &prompt).readiness, Readiness::Querying);
    let found = find(&cache, &prompt);
    assert_eq!((spans(&found), found.fetched), (vec![(Tier::Host, 150)], 150));
    assert!(reads(&cache, &prompt, 0));
    // Prefetched pages are written to the disk as well.
    cache.flush().unwrap();
    assert_eq!(tier(&cache, "disk").written_pages, 150);
    let prefetch = cache.stats().unwrap().prefetch;
    assert_eq!((prefetch.started, prefetch.completed, prefetch.pages), (1, 1, 150));
}

#[test]
fn best_effort_prefetch_serves_a_later_lookup() {
    let (one, two, remote_dir) = machines();
    let prompt = keys(1, 0, 40);
    {
        let cache = open(&[&host(&one, 64), &remote(remote_dir.path())]);
        put(&cache, &prompt, 0);
        cache.flush().unwrap();
    }
    let cache =
        open_with(&[&host(&two, 64), &remote(remote_dir.path())], PrefetchPolicy::BestEffort);
    let until = Instant::now() + Duration::from_secs(60);
    let mut lookups = 0;
    loop {
        let found = find_once(&cache, &prompt);
        assert_eq!(found.readiness, Readiness::Ready);
        lookups += 1;
        if found.local == 40 {
            break;
        }
        assert!(Instant::now() < until);
    }
    assert!(lookups > 1, "the first lookup must not wait for the pages");
    assert!(reads(&cache, &prompt, 0));
}

/// Returns the files of all objects of a remote in a directory.
fn objects(dir: &Path) -> Vec<std::path::PathBuf> {
    let (mut left, mut found) = (vec![dir.to_owned()], Vec::new());
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { left.push(path) } else { found.push(path) }
        }
    }
    found
}

#[test]
fn damaged_objects_are_misses() {
    let (one, two, remote_dir) = machines();
    let prompt = keys(1, 0, 30);
    {
        let cache = open(&[&host(&one, 64), &remote(remote_dir.path())]);
        put(&cache, &prompt, 0);
        cache.flush().unwrap();
    }
    let objects = objects(remote_dir.path());
    assert!(!objects.is_empty());
    for path in objects {
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let cache = open(&[&host(&two, 64), &remote(remote_dir.path())]);
    let found = find(&cache, &prompt);
    assert!(found.local < 30);
    get(&cache, &prompt, 0);
    assert_eq!(cache.stats().unwrap().prefetch.failed, 1);
}

#[test]
fn gate_skips_pages_slower_than_computing() {
    let (one, two, remote_dir) = machines();
    let prompt = keys(1, 0, 40);
    {
        let cache = open(&[&host(&one, 64), &remote(remote_dir.path())]);
        put(&cache, &prompt, 0);
        cache.flush().unwrap();
    }
    let cache = open(&[&host(&two, 64), &remote(remote_dir.path())]);
    put(&cache, &prompt[..10], 0);
    for _ in 0..60 {
        cache.record_prefill(0, 640, Duration::from_millis(10));
        cache.record_load(Tier::Host, 8 << 20, Duration::from_micros(100));
        cache.record_load(Tier::Remote, 8 << 20, Duration::from_secs(20));
    }
    let options = LookupOptions { page_tokens: 16, tokens: 641, ..LookupOptions::default() };
    let until = Instant::now() + Duration::from_secs(60);
    let found = loop {
        let found = cache.lookup(&scope(), &refs(&prompt), TTL, &options).unwrap();
        if found.readiness == Readiness::Ready {
            break found;
        }
        assert!(Instant::now() < until);
    };
    assert_eq!(spans(&found), [(Tier::Host, 10), (Tier::Remote, 30)]);
    assert_eq!((found.load, found.fetched), (10, 0));
    let stats = cache.stats().unwrap();
    assert_eq!((stats.prefetch.not_worthwhile, stats.prefetch.pages), (1, 0));
    // The gate also prefers computing to the host tier if the host tier is slow.
    for _ in 0..60 {
        cache.record_load(Tier::Host, 8 << 20, Duration::from_secs(20));
    }
    let found = cache.lookup(&scope(), &refs(&prompt), TTL, &options).unwrap();
    assert_eq!((found.local, found.load), (10, 0));
    assert!(found.leases.is_empty());
}

#[test]
fn pages_of_unchained_scope_are_found_separately() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&[&host(&dir, 64), &disk(&dir, 64), "memory:"]);
    let scope = std::sync::Arc::new(ritornello_format::Scope::opaque("apart", PAGE as u64, false));
    let keys = keys(1, 0, 6);
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(key)).collect();
    let source = ritornello_volume::page_memory::BorrowedPages::new(&refs(&pages[3..]));
    let ticket = cache.submit_put_copy(
        std::sync::Arc::clone(&scope),
        boxed(&keys[3..]),
        0,
        &source,
        ritornello_store::PutOptions::default(),
        ritornello_volume::transfer::Control::default(),
    );
    assert_eq!(ticket.unwrap().wait(Some(TTL)).unwrap().pages, 3);
    let present = cache.exists(&scope, &refs(&keys)).unwrap();
    assert_eq!(present, [false, false, false, true, true, true]);
    let found = cache.lookup(&scope, &refs(&keys[3..]), TTL, &LookupOptions::default()).unwrap();
    assert_eq!((found.readiness, found.local), (Readiness::Ready, 3));
    cache.flush().unwrap();
    assert_eq!(tier(&cache, "remote").written_pages, 3);
}
