//! A cache whose remote is slow, unreachable or faulty: the fault costs only hits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_tiers::Tier;
use ritornello_tiers::cache::{Cache, LookupOptions, PrefetchPolicy, Readiness, Settings};
use ritornello_tiers::gate::LoadMode;
use ritornello_tiers::remote::Backend;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time that all calls of one test take together while the remote hangs.
const BOUND: Duration = Duration::from_secs(30);

fn over(list: &[&str], settings: &Settings, remote: &Arc<FaultyRemote>) -> Cache {
    open_over(list, settings, Arc::clone(remote) as Arc<dyn Backend>)
}

fn settings(prefetch: PrefetchPolicy) -> Settings {
    Settings { prefetch, ..Settings::default() }
}

fn filled(prompt: &[Vec<u8>]) -> Arc<FaultyRemote> {
    let (dir, remote) = (tempfile::tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    let cache = over(&[&host(&dir, 64), "memory:"], &Settings::default(), &remote);
    put(&cache, prompt, 0);
    cache.flush().unwrap();
    assert_eq!(tier(&cache, "remote").dropped_pages, 0);
    remote
}

#[test]
fn calls_end_while_the_remote_hangs() {
    let (theirs, ours) = (keys(1, 0, 40), keys(2, 0, 40));
    let remote = filled(&theirs);
    let dir = tempfile::tempdir().unwrap();
    let policy = PrefetchPolicy::parse("timeout(0.2, 0)").unwrap();
    let cache = over(&[&host(&dir, 64), "memory:"], &settings(policy), &remote);
    remote.set_fault(BackendFault::Hangs);
    let begun = Instant::now();
    assert_eq!(put(&cache, &ours, 0), 40);
    assert!(reads(&cache, &ours, 0));
    assert_eq!(find_once(&cache, &theirs).readiness, Readiness::Querying);
    assert_eq!(find(&cache, &theirs).local, 0);
    assert_eq!(find(&cache, &ours).local, 40);
    cache.close().unwrap();
    assert!(begun.elapsed() < BOUND);
    remote.set_fault(BackendFault::None);
}

#[test]
fn writes_beyond_queue_are_dropped_and_counted() {
    let (dir, remote) = (tempfile::tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    let few = Settings { write_queue: 30 * PAGE as u64, ..Settings::default() };
    let cache = over(&[&host(&dir, 64), "memory:"], &few, &remote);
    remote.set_fault(BackendFault::Hangs);
    for number in 0..10 {
        assert_eq!(put(&cache, &keys(number, 0, 20), 0), 20);
    }
    let stats = tier(&cache, "remote");
    assert!(stats.queued_bytes <= 30 * PAGE as u64, "{stats:?}");
    assert!(stats.dropped_pages >= 200 - 30 - 20, "{stats:?}");
    remote.set_fault(BackendFault::None);
    cache.flush().unwrap();
    let stats = tier(&cache, "remote");
    assert_eq!(stats.queued_bytes, 0);
    assert_eq!(stats.dropped_pages + stats.written_pages + stats.lost_pages, 200, "{stats:?}");
}

#[test]
fn waiting_writes_keep_no_file_open() {
    let (dir, remote) = (tempfile::tempdir().unwrap(), Arc::new(FaultyRemote::default()));
    let cache = over(&[&host(&dir, 128), "memory:"], &Settings::default(), &remote);
    let prompts: Vec<_> = (0..100).map(|number| keys(number, 0, 30)).collect();
    remote.set_fault(BackendFault::Hangs);
    for end in 1..=30 {
        for prompt in &prompts {
            assert_eq!(put(&cache, &prompt[..end], end - 1), 1);
        }
    }
    let stats = tier(&cache, "remote");
    assert_eq!((stats.queued_bytes, stats.dropped_pages), (3_000 * PAGE as u64, 0), "{stats:?}");
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let target =
        |file: std::io::Result<std::fs::DirEntry>| std::fs::read_link(file.ok()?.path()).ok();
    let events = files.filter_map(target).filter(|file| file.ends_with("anon_inode:[eventfd]"));
    // Other tests of this process have a few tickets.
    assert!(events.count() < 200);
    remote.set_fault(BackendFault::None);
    cache.flush().unwrap();
    assert_eq!(tier(&cache, "remote").lost_pages, 0);
}

#[test]
fn writes_too_slow_for_their_deadline_are_dropped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    // At this rate the first 8 MiB of the write exceed the deadline, which ends the write job.
    let cache = open(&[&host(&dir, 64), &format!("{} rate=100KiB", disk(&dir, 64))]);
    assert_eq!(put(&cache, &keys(1, 0, 500), 0), 500);
    cache.flush().unwrap();
    let stats = tier(&cache, "disk");
    assert_eq!((stats.dropped_pages, stats.written_pages, stats.lost_pages), (500, 0, 0));
}

#[test]
fn pages_of_failing_remote_miss() {
    let prompt = keys(1, 0, 40);
    let remote = filled(&prompt);
    for fault in [BackendFault::Fails, BackendFault::Short] {
        let dir = tempfile::tempdir().unwrap();
        let cache =
            over(&[&host(&dir, 64), "memory:"], &settings(PrefetchPolicy::WaitComplete), &remote);
        remote.set_fault(fault);
        let found = find(&cache, &prompt);
        assert!(found.local < 40, "{fault:?}");
        get(&cache, &prompt, 0);
        assert_eq!(cache.stats().unwrap().prefetch.failed, 1);
        remote.set_fault(BackendFault::None);
    }
}

#[test]
fn unmounted_remote_costs_hits_and_is_counted() {
    let (dir, prompt) = (tempfile::tempdir().unwrap(), keys(1, 0, 10));
    let absent = remote(&dir.path().join("not/mounted"));
    let cache = open(&[&host(&dir, 64), &disk(&dir, 64), &absent]);
    put(&cache, &prompt, 0);
    cache.flush().unwrap();
    assert_eq!(find(&cache, &keys(2, 0, 10)).local, 0);
    assert_eq!(find(&cache, &prompt).local, 10);
    assert!(reads(&cache, &prompt, 0));
    let calls = tier(&cache, "remote").remote.unwrap();
    assert!(calls.open && calls.failures > 0, "{calls:?}");
    assert_eq!(tier(&cache, "remote").dropped_pages, 10);
    assert!(!dir.path().join("not").exists());
}

/// The owner of the lowest local tier counts the gate's decisions, the calls of the remote and their
/// durations, and the openings and open time of its circuit breaker. The counts remain after the
/// cache ended. The cache's own statistics have the same bytes and openings.
#[test]
fn owner_counts_gate_remote_and_breaker() {
    let prompt = keys(1, 0, 40);
    let (remote, dir) = (filled(&prompt), tempfile::tempdir().unwrap());
    let list = [&host(&dir, 64), &disk(&dir, 64), "memory:"];
    let cache = over(&list, &settings(PrefetchPolicy::WaitComplete), &remote);
    let lowest = dir.path().join("disk");
    let node = ritornello_node::open(&ritornello_node::Options::new(&lowest)).unwrap();
    let count = |name: &str| node.store().stats().unwrap().catalog.counters[name];

    let found = find(&cache, &prompt);
    assert_eq!(found.local, 40);
    let read = count("remote_read_bytes");
    assert!(read > 40 * PAGE as u64 && read < 41 * PAGE as u64, "{read}");
    assert!(count("remote_calls_get") > 0 && count("remote_calls_exists") > 0);
    assert_eq!((count("remote_calls_put"), count("remote_calls_failures")), (0, 0));
    let timed = || [count("remote_gets"), count("remote_puts")];
    let reads = count("remote_calls_get");
    assert_eq!(timed(), [reads, 0]);
    assert_eq!(count("remote_put_micros"), 0);
    put(&cache, &keys(2, 0, 8), 0);
    cache.flush().unwrap();
    let written = count("remote_written_bytes");
    assert!(written > 8 * PAGE as u64 && written < 9 * PAGE as u64, "{written}");
    let writes = count("remote_calls_put");
    assert!(writes > 0);
    assert_eq!(timed(), [reads, writes]);
    let own = tier(&cache, "remote").remote.unwrap();
    assert_eq!((own.read_bytes, own.written_bytes), (read, written));
    assert_eq!((own.breaker_openings, own.breaker_open_seconds), (0, 0.0));

    cache.record_prefill(0, 640, Duration::from_millis(100));
    let auto = LookupOptions { page_tokens: 16, tokens: 640, ..LookupOptions::default() };
    for options in [auto, LookupOptions { mode: LoadMode::Never, ..auto }] {
        let found = cache.lookup(&scope(), &refs(&prompt), TTL, &options).unwrap();
        release(&cache, &found);
    }
    cache.record_outcome(
        Duration::from_millis(300),
        Duration::from_millis(20),
        Duration::from_millis(100),
    );
    let decided = ["all", "some", "none"].map(|pages| count(&format!("gate_decisions_{pages}")));
    assert_eq!(decided, [1, 0, 1]);
    assert_eq!((count("gate_load_micros"), count("gate_regret_micros")), (300_000, 220_000));

    assert_eq!((count("remote_breaker_openings"), count("remote_breaker_open_micros")), (0, 0));
    remote.set_fault(BackendFault::Fails);
    for number in 3.. {
        if count("remote_breaker_openings") > 0 {
            break;
        }
        assert_eq!(find(&cache, &keys(number, 0, 8)).local, 0);
    }
    find(&cache, &keys(100, 0, 8));
    assert!(count("remote_calls_failures") >= 5 && count("remote_calls_spared") > 0);
    let open = count("remote_breaker_open_micros");
    std::thread::sleep(Duration::from_millis(20));
    let more = count("remote_breaker_open_micros") - open;
    assert!(more >= 20_000, "the open time must grow without calls: by {more} us");
    let opened = cache.stats().unwrap();
    drop(cache);
    let calls = opened.tiers[2].remote.clone().unwrap();
    assert!(count("remote_calls_failures") >= calls.failures);
    assert_eq!((count("remote_breaker_openings"), calls.breaker_openings), (1, 1));
    assert!(calls.breaker_open_seconds >= 0.02, "{calls:?}");
}

#[test]
fn prefetch_delivers_pages_before_a_truncated_object() {
    // A prefetch reads this prompt in more than one batch of objects.
    let prompt = keys(1, 0, 700);
    let remote = filled(&prompt);
    let dir = tempfile::tempdir().unwrap();
    let cache =
        over(&[&host(&dir, 64), "memory:"], &settings(PrefetchPolicy::WaitComplete), &remote);
    // The probe finds all objects. After the first pages were fetched, reads return half of the
    // bytes.
    assert_eq!(find_once(&cache, &prompt).readiness, Readiness::Querying);
    until("pages are fetched", || cache.stats().unwrap().prefetch.pages > 0);
    remote.set_fault(BackendFault::Short);
    let found = find(&cache, &prompt);
    let prefetch = cache.stats().unwrap().prefetch;
    assert_eq!(prefetch.failed + prefetch.completed, 1);
    assert_eq!(prefetch.pages as usize, found.local);
    assert!(reads(&cache, &prompt[..found.local], 0));
}

#[test]
fn lookup_waits_briefly_for_hanging_remote() {
    let prompt = keys(1, 0, 40);
    let remote = filled(&prompt);
    let dir = tempfile::tempdir().unwrap();
    let policy = PrefetchPolicy::parse("timeout(0.5, 1000)").unwrap();
    let cache = over(&[&host(&dir, 64), "memory:"], &settings(policy), &remote);
    remote.set_fault(BackendFault::Hangs);
    let options = LookupOptions { page_tokens: 16, tokens: 641, ..LookupOptions::default() };
    let find = || cache.lookup(&scope(), &refs(&prompt), TTL, &options).unwrap();
    assert_eq!(find().readiness, Readiness::Querying);
    until("the lookup is ready", || find().readiness == Readiness::Ready);
    assert_eq!(cache.stats().unwrap().prefetch.failed, 0, "the prefetch must outlast the lookup");
    remote.set_fault(BackendFault::None);
}

#[test]
fn cancelled_prefetch_lets_new_lookup_prefetch() {
    let prompt = keys(1, 0, 700);
    let remote = filled(&prompt);
    let dir = tempfile::tempdir().unwrap();
    let cache =
        over(&[&host(&dir, 64), "memory:"], &settings(PrefetchPolicy::WaitComplete), &remote);
    assert!(!cache.cancel(&scope(), &refs(&prompt)).unwrap());
    remote.set_fault(BackendFault::Hangs);
    assert_eq!(find_once(&cache, &prompt).readiness, Readiness::Querying);
    assert!(cache.cancel(&scope(), &refs(&prompt)).unwrap());
    remote.set_fault(BackendFault::None);
    until("the cancellation is counted", || cache.stats().unwrap().prefetch.cancelled == 1);
    assert_eq!(cache.stats().unwrap().prefetch.pages, 0);
    // A new lookup starts a new prefetch, even while the cancelled prefetch still reads.
    assert_eq!(find_once(&cache, &prompt).readiness, Readiness::Querying);
    until("the new prefetch reads", || {
        cache.stats().unwrap().prefetch.pages > 0 || find(&cache, &prompt).local == 700
    });
    cache.cancel(&scope(), &refs(&prompt)).unwrap();
    assert_eq!(find(&cache, &prompt).local, 700);
    assert_eq!(spans(&find(&cache, &prompt)), [(Tier::Host, 700)]);
}

#[test]
fn shared_prefix_is_fetched_once() {
    let (a, b) = (keys(1, 300, 320), keys(2, 300, 320));
    let (dir, remote) = (tempfile::tempdir().unwrap(), filled(&a));
    {
        let other = tempfile::tempdir().unwrap();
        let cache = over(&[&host(&other, 64), "memory:"], &Settings::default(), &remote);
        put(&cache, &b, 0);
        cache.flush().unwrap();
    }
    let cache =
        over(&[&host(&dir, 64), "memory:"], &settings(PrefetchPolicy::WaitComplete), &remote);
    find_once(&cache, &a);
    find_once(&cache, &b);
    assert_eq!((find(&cache, &a).local, find(&cache, &b).local), (320, 320));
    assert!(reads(&cache, &a, 0) && reads(&cache, &b, 0));
    // The 300 pages that the prompts share were fetched once, except that at most ten of them were
    // fetched for both prompts. 20 further pages were fetched for each prompt.
    let pages = cache.stats().unwrap().prefetch.pages;
    assert!((340..=350).contains(&pages), "{pages}");
}

/// Returns a remote that holds a prompt, except the object whose pages end before page `hole`.
fn without(prompt: &[Vec<u8>], hole: usize) -> Arc<FaultyRemote> {
    let remote = filled(prompt);
    let last = ritornello_format::PageHash::of(&scope().id(), &prompt[hole - 1]);
    let last = last.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let object = objects(&remote).into_iter().find(|name| name.contains(&last)).unwrap();
    remote.inner.delete(&object).unwrap();
    remote
}

fn objects(remote: &FaultyRemote) -> Vec<String> {
    let mut objects = Vec::new();
    remote.inner.list("", &mut |found| objects.push(found.name)).unwrap();
    objects
}

#[test]
fn put_also_writes_earlier_missing_object() {
    // The prompt has ten full objects. A probe searches for the last of them without querying the
    // first.
    let prompt = keys(1, 0, 1310);
    for hole in [128, 256, 1280, 1296] {
        let remote = without(&prompt[..1300], hole);
        let dir = tempfile::tempdir().unwrap();
        put(&open(&[&host(&dir, 64)]), &prompt[..1300], 0);
        let cache = over(&[&host(&dir, 64), "memory:"], &Settings::default(), &remote);
        put(&cache, &prompt, 1300);
        cache.flush().unwrap();
        let stats = tier(&cache, "remote");
        assert_eq!((stats.lost_pages, stats.dropped_pages), (0, 0));
        let wait = settings(PrefetchPolicy::WaitComplete);
        let other = tempfile::tempdir().unwrap();
        let cache = over(&[&host(&other, 64), "memory:"], &wait, &remote);
        assert_eq!(find(&cache, &prompt).local, 1310, "{hole}");
        assert!(reads(&cache, &prompt, 0));
    }
}

#[test]
fn missing_object_without_local_pages_stops_writes() {
    let prompt = keys(1, 0, 1310);
    let remote = without(&prompt[..1300], 128);
    let before = objects(&remote);
    let dir = tempfile::tempdir().unwrap();
    let cache = over(&[&host(&dir, 64), "memory:"], &Settings::default(), &remote);
    put(&cache, &prompt, 1300);
    cache.flush().unwrap();
    assert_eq!(objects(&remote), before);
    assert!(tier(&cache, "remote").lost_pages > 0);
}
