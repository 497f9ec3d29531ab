//! Write policies, rate limits, promotions and prefetch policies of a cache.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_node::Options;
use ritornello_store::PutOptions;
use ritornello_tiers::Tier;
use ritornello_tiers::cache::{Cache, PrefetchPolicy, Settings, TierSpec};
use ritornello_volume::page_memory::{BorrowedPages, OwnedPagesMut};
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn on_disk(dir: &TempDir, policy: &str) -> Cache {
    open(&[&host(dir, 64), &format!("{} write={policy}", disk(dir, 128))])
}

fn written(cache: &Cache) -> u64 {
    tier(cache, "disk").written_pages
}

#[test]
fn selective_writes_pages_hit_often_enough() {
    let dir = tempfile::tempdir().unwrap();
    let cache = on_disk(&dir, "selective(2)");
    let (often, once) = (keys(1, 0, 10), keys(2, 0, 10));
    put(&cache, &often, 0);
    put(&cache, &once, 0);
    find(&cache, &often);
    find(&cache, &once);
    cache.flush().unwrap();
    assert_eq!(written(&cache), 0);
    find(&cache, &often[..7]);
    cache.flush().unwrap();
    assert_eq!(written(&cache), 7);
    find(&cache, &often[..7]);
    cache.flush().unwrap();
    assert_eq!(written(&cache), 7, "each page must be written once");
    cache.close().unwrap();
    let below = open(&[&disk(&dir, 128)]);
    assert_eq!(find(&below, &often).local, 7);
    assert!(reads(&below, &often[..7], 0));
}

#[test]
fn pages_lost_on_disk_are_written_again() {
    for policy in ["write_through", "selective(1)", "write_back"] {
        let dir = tempfile::tempdir().unwrap();
        let cache = on_disk(&dir, policy);
        let prompt = keys(1, 0, 10);
        for round in 1..3 {
            put(&cache, &prompt, 0);
            find(&cache, &prompt);
            cache.flush().unwrap();
            assert_eq!(written(&cache), 10 * round, "{policy}");
            let disk = Options::new(dir.path().join("disk"));
            let disk = ritornello_node::open(&disk).unwrap();
            assert_eq!(disk.store().delete(&scope(), &refs(&prompt)).unwrap(), 10);
            disk.close().unwrap();
        }
    }
}

#[test]
fn load_does_not_wait_for_a_promotion() {
    let dir = tempfile::tempdir().unwrap();
    let (promoted, loaded) = (keys(1, 0, 400), keys(2, 0, 5));
    let on_disk = open(&[&disk(&dir, 64)]);
    put(&on_disk, &promoted, 0);
    put(&on_disk, &loaded, 0);
    drop(on_disk);
    // At this rate the promotion takes four seconds.
    let cache = open(&[&host(&dir, 64), &format!("{} rate=2MB", disk(&dir, 64))]);
    assert_eq!(spans(&find(&cache, &promoted)), [(Tier::Disk, 400)]);
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    assert!(reads(&cache, &loaded, 0));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[test]
fn tier_with_write_policy_none_is_only_read() {
    let dir = tempfile::tempdir().unwrap();
    let (theirs, ours) = (keys(1, 0, 10), keys(2, 0, 10));
    put(&open(&[&disk(&dir, 128)]), &theirs, 0);
    let cache = on_disk(&dir, "none");
    put(&cache, &ours, 0);
    cache.flush().unwrap();
    assert_eq!(written(&cache), 0);
    assert_eq!(spans(&find(&cache, &theirs)), [(Tier::Disk, 10)]);
}

#[test]
fn write_back_waits_until_host_tier_is_nearly_full() {
    let dir = tempfile::tempdir().unwrap();
    // 60 prompts of 20 pages take 23.7 MiB with padding and headers. The host tier keeps 5 % of its
    // 24 MiB free, so it evicts pages.
    let list = [&host(&dir, 24)[..], &format!("{} write=write_back", disk(&dir, 128))];
    let cache = open(&list);
    put(&cache, &keys(0, 0, 20), 0);
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(written(&cache), 0);
    for number in 1..60 {
        assert_eq!(put(&cache, &keys(number, 0, 20), 0), 20, "{number}");
        if number % 10 == 0 {
            // The pause lets the cache check how full the tier is.
            std::thread::sleep(Duration::from_millis(1200));
        }
    }
    until("old pages are written", || written(&cache) > 0);
    // More than half of the prompts that the host tier no longer holds completely are found
    // completely on the host and disk tiers.
    let evicted = |number: &u8| spans(&find(&cache, &keys(*number, 0, 20))) != [(Tier::Host, 20)];
    let left: Vec<u8> = (0..60).filter(evicted).collect();
    assert!(!left.is_empty());
    let kept = left.iter().filter(|number| find(&cache, &keys(**number, 0, 20)).local == 20);
    assert!(kept.count() * 2 > left.len(), "{left:?}");
    for number in 0..60 {
        get(&cache, &keys(number, 0, 20), 0);
    }
}

#[test]
fn flush_writes_all_dirty_pages_back() {
    let prompts: Vec<_> = (0..8).map(|number| keys(number, 9, 30)).collect();
    for queued_pages in [10, 1_000] {
        let dir = tempfile::tempdir().unwrap();
        let remote_dir = tempfile::tempdir().unwrap();
        let list = [host(&dir, 64), format!("{} write=write_back", remote(remote_dir.path()))];
        let settings = Settings { write_queue: queued_pages * PAGE as u64, ..Settings::default() };
        let list = TierSpec::list(&list).unwrap();
        let cache = Cache::open(&list, &settings, open_remote).unwrap();
        for prompt in &prompts {
            put(&cache, prompt, 0);
        }
        assert_eq!(tier(&cache, "remote").written_pages, 0);
        cache.flush().unwrap();
        let stats = tier(&cache, "remote");
        assert_eq!((stats.dropped_pages, stats.lost_pages), (0, 0), "{queued_pages}");
        drop(cache);
        let other = tempfile::tempdir().unwrap();
        let cache = open(&[&host(&other, 64), &remote(remote_dir.path())]);
        for prompt in &prompts {
            assert_eq!(find(&cache, prompt).local, 30, "{queued_pages}");
            assert!(reads(&cache, prompt, 0));
        }
    }
}

#[test]
fn flush_drops_dirty_pages_longer_than_the_queue() {
    let dir = tempfile::tempdir().unwrap();
    let list = [host(&dir, 64), format!("{} write=write_back", disk(&dir, 64))];
    let settings = Settings { write_queue: PAGE as u64 - 1, ..Settings::default() };
    let cache = Cache::open(&TierSpec::list(&list).unwrap(), &settings, open_remote).unwrap();
    put(&cache, &keys(1, 0, 10), 0);
    cache.flush().unwrap();
    assert_eq!((written(&cache), tier(&cache, "disk").dropped_pages), (0, 10));
}

#[test]
fn pages_extended_by_another_cache_are_written_back() {
    let dir = tempfile::tempdir().unwrap();
    let list = [&host(&dir, 64)[..], &format!("{} write=write_back", disk(&dir, 64))];
    let prompt = keys(1, 0, 20);
    let (ours, theirs) = (open(&list), open(&list[..1]));
    put(&ours, &prompt[..10], 0);
    put(&theirs, &prompt, 10);
    assert_eq!(find(&ours, &prompt).local, 20);
    ours.flush().unwrap();
    assert_eq!((written(&ours), tier(&ours, "disk").lost_pages), (10, 0));
    assert_eq!(spans(&find(&open(&[&disk(&dir, 64)]), &prompt)), [(Tier::Disk, 10)]);
}

#[test]
fn spilled_pages_go_to_the_next_tier() {
    for policy in ["write_through", "write_back"] {
        let (dir, remote_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // 200 pages take 3.9 MiB with padding, and the first tier keeps 5 % of its 4 MiB free. A
        // lease keeps the first 40 pages on the first tier, so it cannot evict them to make room.
        let prompt = keys(1, 0, 200);
        let disk = format!("{} write={policy}", disk(&dir, 64));
        let cache = open(&[&host(&dir, 4), &disk, &remote(remote_dir.path())]);
        assert_eq!(put(&cache, &prompt[..40], 0), 40);
        let found = find(&cache, &prompt[..40]);
        assert_eq!(found.local, 40);
        assert!(put(&cache, &prompt, 40) < 160, "the first tier must lack space for some pages");
        cache.flush().unwrap();
        cache.flush().unwrap();
        release(&cache, &found);
        assert_eq!(find(&cache, &prompt).local, 200, "{policy}: {:#?}", cache.stats().unwrap());
        assert!(reads(&cache, &prompt, 0));
        cache.close().unwrap();
        let below = open(&[&self::disk(&dir, 64)]);
        assert_eq!(find(&below, &prompt).local, 200, "{policy}");
        assert!(reads(&below, &prompt, 0));
    }
}

#[test]
fn spilled_pages_go_to_the_remote() {
    let (dir, remote_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let prompt = keys(1, 0, 200);
    let cache = open(&[&host(&dir, 4), &remote(remote_dir.path())]);
    assert!(put(&cache, &prompt, 0) < 200);
    cache.flush().unwrap();
    let remote_stats = tier(&cache, "remote");
    assert_eq!(
        (remote_stats.written_pages, remote_stats.lost_pages, remote_stats.dropped_pages),
        (200, 0, 0)
    );
    let other = tempfile::tempdir().unwrap();
    let cache = open(&[&host(&other, 64), &remote(remote_dir.path())]);
    assert_eq!(find(&cache, &prompt).local, 200);
    assert!(reads(&cache, &prompt, 0));
}

#[test]
fn writes_of_unchained_pages_are_not_merged() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&[&host(&dir, 4), &format!("{} rate=4MB", disk(&dir, 64))]);
    // The host tier is full, and `begin_read` leases its pages, so it stays full. At its rate, the
    // disk is busy with these pages for a second.
    let full = keys(1, 0, 200);
    let taken = put(&cache, &full, 0);
    assert!(taken < 200);
    let reading = begin_read(&dir.path().join("host"), &full[..taken]);
    let apart = std::sync::Arc::new(ritornello_format::Scope::opaque("apart", PAGE as u64, false));
    let name = |name: u8| vec![name; 32];
    let put = |keys: &[u8], first: usize| {
        let pages: Vec<_> = keys[first..].iter().map(|key| page(&name(*key))).collect();
        let source = BorrowedPages::new(&refs(&pages));
        let keys = keys.iter().map(|key| name(*key).into()).collect();
        let (scope, options) = (std::sync::Arc::clone(&apart), PutOptions::default());
        cache.submit_put_copy(scope, keys, first, &source, options, Control::default()).unwrap()
    };
    for ticket in [put(b"abc", 0), put(b"xycd", 3)] {
        assert_eq!(
            ticket.wait(Some(TTL)).unwrap().pages,
            0,
            "the full host tier must take no page"
        );
    }
    cache.flush().unwrap();
    drop(reading);
    let all = b"abcdxy".map(name);
    let present = cache.exists(&apart, &refs(&all)).unwrap();
    assert_eq!(present, [true, true, true, true, false, false]);
}

#[test]
fn growing_prompt_is_found_on_the_remote() {
    let (dir, remote_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cache = open(&[&host(&dir, 64), &remote(remote_dir.path())]);
    let prompt = keys(1, 0, 60);
    for end in 1..=60 {
        put(&cache, &prompt[..end], end - 1);
    }
    cache.flush().unwrap();
    let other = tempfile::tempdir().unwrap();
    let reader = open(&[&host(&other, 64), &remote(remote_dir.path())]);
    assert_eq!(find(&reader, &prompt).local, 60);
    assert!(reads(&reader, &prompt, 0));
}

#[test]
fn reads_from_rate_limited_tier_are_slowed() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = keys(1, 0, 20);
    put(&open(&[&disk(&dir, 128)]), &prompt, 0);
    let cache = open(&[&format!("{} rate=2MB", disk(&dir, 128))]);
    let begun = Instant::now();
    assert!(reads(&cache, &prompt, 0));
    assert!(begun.elapsed() >= Duration::from_millis(190), "{:?}", begun.elapsed());
}

#[test]
fn puts_of_stored_pages_take_no_time_of_the_tier() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&[&format!("{} rate=2MB", disk(&dir, 128))]);
    // At this rate the first put takes a second.
    let prompt = keys(1, 0, 100);
    let begun = Instant::now();
    assert_eq!(put(&cache, &prompt, 0), 100);
    std::thread::sleep(Duration::from_secs(1).saturating_sub(begun.elapsed()));
    for _ in 0..30 {
        assert_eq!(put(&cache, &prompt, 0), 100);
    }
    let deadline = Some(Instant::now() + Duration::from_secs(10));
    let target = Arc::new(OwnedPagesMut::new(vec![vec![0; PAGE]; 5]));
    let control = Control { deadline, ..Control::default() };
    let ticket = cache.submit_get(scope(), boxed(&prompt[..5]), None, target, control).unwrap();
    assert_eq!(ticket.wait(None).unwrap().pages, 5);
}

#[test]
fn put_with_parent_reaches_disk_not_remote() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&[&host(&dir, 64), &disk(&dir, 64), "memory:"]);
    let prompt = keys(1, 0, 10);
    put(&cache, &prompt[..5], 0);
    let pages: Vec<Vec<u8>> = prompt[5..].iter().map(|key| page(key)).collect();
    let source = BorrowedPages::new(&refs(&pages));
    let options = PutOptions::after(Some(&prompt[4]));
    let control = Control::default();
    let rest = boxed(&prompt[5..]);
    let ticket = cache.submit_put_copy(scope(), rest, 0, &source, options, control).unwrap();
    assert_eq!(ticket.wait(Some(TTL)).unwrap().pages, 5);
    cache.flush().unwrap();
    assert_eq!((written(&cache), tier(&cache, "remote").written_pages), (10, 5));
    assert_eq!(tier(&cache, "remote").dropped_pages, 5);
    assert_eq!(find(&cache, &prompt).local, 10);
    assert!(reads(&cache, &prompt, 0));
}

#[test]
fn host_tier_above_memory_limit_is_refused() {
    let Some(group) = ritornello_store::control_group() else { return };
    let dir = tempfile::tempdir().unwrap();
    let list = [format!("host {}B {}/host", group.limit + 1, dir.path().display())];
    let list = ritornello_tiers::cache::TierSpec::list(&list).unwrap();
    let error = Cache::open(&list, &Settings::default(), open_remote).unwrap_err().to_string();
    assert!(error.contains("control group"), "{error}");
    assert!(!dir.path().join("host").exists());
}

#[test]
fn only_waiting_policies_leave_lookups_pending() {
    let remote_dir = tempfile::tempdir().unwrap();
    for (policy, again) in [("best_effort", false), ("wait_complete", true), ("timeout", true)] {
        let dir = tempfile::tempdir().unwrap();
        let policy = PrefetchPolicy::parse(policy).unwrap();
        let cache = open_with(&[&host(&dir, 64), &remote(remote_dir.path())], policy);
        let found = find_once(&cache, &keys(1, 0, 5));
        assert_eq!(found.readiness != ritornello_tiers::cache::Readiness::Ready, again);
        assert_eq!(find(&cache, &keys(1, 0, 5)).local, 0);
    }
}
