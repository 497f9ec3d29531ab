//! Space for prefetches on the first tier: prefetched pages use at most three quarters of the tier,
//! and are not evicted for another prompt before a lookup finds them. A slow tier or remote delays
//! a prefetch, and does not end it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::Scope;
use ritornello_medium::{Host, Throttled};
use ritornello_node::Options;
use ritornello_store::PutOptions;
use ritornello_tiers::cache::{Cache, Lookup, LookupOptions, PrefetchPolicy, Readiness, Settings};
use ritornello_tiers::gate::LoadMode;
use ritornello_tiers::remote::{Backend, MemoryBackend};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// Options for prompts of which each page is stored as two halves, one in each of two scopes. The
/// gate loads all found pages.
const HALVES: LookupOptions = LookupOptions {
    mode: LoadMode::Always,
    page_tokens: 16,
    page_bytes: 2 * PAGE as u64,
    computed: 0,
    tokens: 0,
};

fn half(name: &str) -> Arc<Scope> {
    Arc::new(Scope::opaque(name, PAGE as u64, true))
}

fn fill(remote_dir: &Path, scopes: &[Arc<Scope>], prompts: &[Vec<Vec<u8>>]) {
    let dir = tempdir().unwrap();
    let cache = open(&[&host(&dir, 64), &remote(remote_dir)]);
    for (scope, prompt) in scopes.iter().flat_map(|scope| prompts.iter().map(move |p| (scope, p))) {
        let pages: Vec<Vec<u8>> = prompt.iter().map(|key| page(key)).collect();
        let source = BorrowedPages::new(&refs(&pages));
        let (options, control) = (PutOptions::default(), Control::default());
        let put =
            cache.submit_put_copy(Arc::clone(scope), boxed(prompt), 0, &source, options, control);
        assert_eq!(put.unwrap().wait(Some(TTL)).unwrap().pages, prompt.len());
        cache.flush().unwrap();
    }
    assert_eq!(tier(&cache, "remote").dropped_pages, 0);
}

fn answer(
    cache: &Cache,
    scope: &Arc<Scope>,
    prompt: &[Vec<u8>],
    options: &LookupOptions,
) -> Lookup {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let found = cache.lookup(scope, &refs(prompt), TTL, options).unwrap();
        if found.readiness == Readiness::Ready {
            return found;
        }
        assert!(Instant::now() < until, "the lookup stays pending");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn only_one_of_two_large_prompts_is_prefetched() {
    let remote_dir = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left"), half("right")]);
    // The pages of one prompt take 14 MB. Prefetched pages may fill 24 MiB, three quarters of the
    // first tier's 32 MiB: enough for one prompt and not for both.
    let prompts = [keys(1, 0, 350), keys(2, 0, 350)];
    fill(remote_dir.path(), &scopes, &prompts);
    let cache = open(&[&host(&dir, 32), &remote(remote_dir.path())]);
    for prompt in &prompts {
        for scope in &scopes {
            cache.lookup(scope, &refs(prompt), TTL, &HALVES).unwrap();
        }
    }
    let found_on_host = |prompt: &[Vec<u8>]| {
        scopes.each_ref().map(|scope| answer(&cache, scope, prompt, &HALVES).local)
    };
    let mut both = [found_on_host(&prompts[0]), found_on_host(&prompts[1])];
    both.sort_unstable();
    assert_eq!(both, [[0, 0], [350, 350]]);
    let prefetch = cache.stats().unwrap().prefetch;
    assert_eq!((prefetch.completed, prefetch.not_worthwhile, prefetch.failed), (2, 2, 0));
}

#[test]
fn unchained_prefetches_with_equal_last_keys_take_separate_space() {
    let (one, two, remote) = (tempdir().unwrap(), tempdir().unwrap(), FaultyRemote::default());
    let (remote, scope) = (Arc::new(remote), Arc::new(Scope::opaque("apart", PAGE as u64, false)));
    let over = |list: &[&str]| {
        let settings = Settings { prefetch: PrefetchPolicy::WaitComplete, ..Settings::default() };
        open_over(list, &settings, Arc::clone(&remote) as Arc<dyn Backend>)
    };
    // The pages of one lookup take 14 MB of the 24 MiB for prefetched pages. The key lists of the
    // two lookups end with the same key.
    let last = keys(3, 0, 1);
    let lists = [1, 2].map(|number| [keys(number, 0, 700), last.clone()].concat());
    {
        let cache = over(&[&host(&one, 64), "memory:"]);
        for list in &lists {
            let pages: Vec<Vec<u8>> = list.iter().map(|key| page(key)).collect();
            let source = BorrowedPages::new(&refs(&pages));
            let (options, control) = (PutOptions::default(), Control::default());
            let scope = Arc::clone(&scope);
            let put = cache.submit_put_copy(scope, boxed(list), 0, &source, options, control);
            assert_eq!(put.unwrap().wait(Some(TTL)).unwrap().pages, list.len());
            cache.flush().unwrap();
        }
    }
    let cache = over(&[&host(&two, 32), "memory:"]);
    let options = LookupOptions::default();
    remote.set_fault(BackendFault::Hangs);
    for list in &lists {
        cache.lookup(&scope, &refs(list), TTL, &options).unwrap();
    }
    remote.set_fault(BackendFault::None);
    let mut found = lists.each_ref().map(|list| answer(&cache, &scope, list, &options).local);
    found.sort_unstable();
    assert!(found[0] <= 1 && found[1] == 701, "{found:?}");
    let prefetch = cache.stats().unwrap().prefetch;
    assert_eq!((prefetch.completed, prefetch.not_worthwhile, prefetch.failed), (1, 1, 0));
}

/// Runs `action` after a prompt was prefetched, then puts almost four times the capacity of the
/// first tier. Returns the number of prefetched pages that remain.
fn prefetched_pages_left(action: impl FnOnce(&Cache, &Arc<Scope>, &[&[u8]])) -> usize {
    let remote_dir = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let prompts = [keys(1, 0, 400)];
    fill(remote_dir.path(), &scopes, &prompts);
    let cache = open(&[&host(&dir, 32), &remote(remote_dir.path())]);
    let options = LookupOptions { page_bytes: 0, ..HALVES };
    cache.lookup(&scopes[0], &refs(&prompts[0]), TTL, &options).unwrap();
    until("the prefetch is complete", || cache.stats().unwrap().prefetch.completed == 1);
    action(&cache, &scopes[0], &refs(&prompts[0]));
    for number in 2..18 {
        put(&cache, &keys(number, 0, 400), 0);
    }
    let never = LookupOptions { mode: LoadMode::Never, ..options };
    answer(&cache, &scopes[0], &prompts[0], &never).local
}

#[test]
fn prefetched_pages_stay_until_looked_up() {
    assert_eq!(prefetched_pages_left(|_, _, _| {}), 400);
}

#[test]
fn cancelling_a_complete_prefetch_frees_its_space() {
    let left = prefetched_pages_left(|cache, scope, prompt| {
        assert!(
            !cache.cancel(scope, prompt).unwrap(),
            "a complete prefetch is not queued or running"
        );
    });
    assert!(left < 400);
}

#[test]
fn lookup_waits_for_expected_long_fetch() {
    let remote_dir = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let prompt = [keys(1, 0, 50)];
    fill(remote_dir.path(), &scopes, &prompt);
    let policy = PrefetchPolicy::parse("timeout(0.05, 0)").unwrap();
    let slow = format!("{} rate=2MB", remote(remote_dir.path()));
    let cache = open_with(&[&host(&dir, 64), &slow], policy);
    cache.record_prefill(0, 640, Duration::from_secs(60));
    let options = LookupOptions { page_bytes: 0, tokens: 801, ..HALVES };
    let found = answer(&cache, &scopes[0], &prompt[0], &options);
    assert_eq!((found.load, found.fetched), (50, 50));
    assert!(found.decision.unwrap().recompute >= Duration::from_secs(60));
}

/// The put of a fetched page takes two seconds, twice the minimum timeout of such a put.
#[test]
fn long_page_is_fetched_to_a_slow_first_tier() {
    const LONG: u64 = 96 << 20;
    const CAPACITY: u64 = 256 << 20;
    let (dir, over) = (tempdir().unwrap(), Arc::new(MemoryBackend::default()));
    let settings = Settings { prefetch: PrefetchPolicy::WaitComplete, ..Settings::default() };
    let address = remote(dir.path());
    let (scope, prompt) = (Arc::new(Scope::opaque("long", LONG, true)), keys(1, 0, 1));
    {
        let backend = Arc::clone(&over) as Arc<dyn Backend>;
        let cache = open_over(&[&host(&dir, 256), &address], &settings, backend);
        let long = vec![7; LONG as usize];
        let source = BorrowedPages::new(&[&long]);
        let (options, control) = (PutOptions::default(), Control::default());
        let put =
            cache.submit_put_copy(Arc::clone(&scope), boxed(&prompt), 0, &source, options, control);
        assert_eq!(put.unwrap().wait(Some(TTL)).unwrap().pages, 1);
        cache.flush().unwrap();
    }
    let volume = dir.path().join("slow");
    let slow = Throttled::new(Arc::new(Host), std::slice::from_ref(&volume), LONG / 2);
    let first = Options {
        capacity: Some(CAPACITY),
        segment_bytes: Some(CAPACITY / 16),
        paths: vec![volume],
        ..Options::new(dir.path().join("disk"))
    };
    // The cache gets a second handle on this store, and so uses its throttled medium.
    let node = ritornello_node::open_on(Arc::new(slow), &first).unwrap();
    let cache = open_over(&[&disk(&dir, 256), &address], &settings, over);
    let options = LookupOptions { page_bytes: 0, ..HALVES };
    let found = answer(&cache, &scope, &prompt, &options);
    assert_eq!((found.load, found.fetched), (1, 1));
    cache.close().unwrap();
    drop(node);
}

/// Without a rate limit, a prefetch fetches 512 pages in one step. At this remote's limit such a
/// step would take 51 seconds, and a transfer may wait for only 30 seconds.
#[test]
fn slow_remote_is_loaded_in_short_steps() {
    let remote_dir = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let prompt = [keys(1, 0, 1000)];
    fill(remote_dir.path(), &scopes, &prompt);
    let slow = format!("{} rate=200KB", remote(remote_dir.path()));
    let cache = open(&[&host(&dir, 64), &slow]);
    let options = LookupOptions { page_bytes: 0, ..HALVES };
    cache.lookup(&scopes[0], &refs(&prompt[0]), TTL, &options).unwrap();
    until("the first step is complete", || cache.stats().unwrap().prefetch.pages > 0);
    let never = LookupOptions { mode: LoadMode::Never, ..options };
    assert!(
        cache.cancel(&scopes[0], &refs(&prompt[0])).unwrap(),
        "the prefetch must still run after its first step"
    );
    assert!(answer(&cache, &scopes[0], &prompt[0], &never).local >= 8);
}

#[test]
fn lookup_that_forbids_loads_starts_no_prefetch() {
    let remote_dir = tempdir().unwrap();
    let (dir, scopes) = (tempdir().unwrap(), [half("left")]);
    let prompt = [keys(1, 0, 40)];
    fill(remote_dir.path(), &scopes, &prompt);
    let cache = open(&[&host(&dir, 64), &remote(remote_dir.path())]);
    put(&cache, &keys(2, 0, 40), 0);
    let never = LookupOptions { mode: LoadMode::Never, ..HALVES };
    let found = cache.lookup(&scopes[0], &refs(&prompt[0]), TTL, &never).unwrap();
    assert_eq!((found.readiness, found.local, found.load), (Readiness::Ready, 0, 0));
    let here = cache.lookup(&scope(), &refs(&keys(2, 0, 40)), TTL, &never).unwrap();
    assert_eq!((here.local, here.load), (40, 0));
    assert!(here.leases.is_empty());
    assert_eq!(cache.stats().unwrap().prefetch.started, 0);
}
