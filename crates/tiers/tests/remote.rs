//! The remote tier over working and faulty backends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use proptest::prelude::*;
use ritornello_format::{ErrorKind, Result, ScopeId};
use ritornello_tiers::remote::{
    Backend, BackendFault, CollectOptions, DirectoryBackend, FaultyBackend, Inventory, Listed,
    MemoryBackend, Prompt, RemoteOptions, RemoteTier, check_backend, collect, conformance, fsck,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SCOPE: ScopeId = ScopeId([9; 16]);

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Returns the keys of the first `pages` pages of prompt `number`, which begins with the first
/// `fork` pages of prompt 0.
fn keys(number: u8, fork: usize, pages: usize) -> Vec<Vec<u8>> {
    // A key commits to all pages before it, so the keys after the fork contain the fork's position.
    let own = |at: usize| if at < fork { [0; 2] } else { [number, fork as u8] };
    let key = |at: usize| [own(at).repeat(12), (at as u64).to_le_bytes().to_vec()].concat();
    (0..pages).map(key).collect()
}

fn refs(of: &[Vec<u8>]) -> Vec<&[u8]> {
    of.iter().map(Vec::as_slice).collect()
}

fn page(key: &[u8], bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| key[at % key.len()] ^ (at / key.len()) as u8).collect()
}

fn pages(keys: &[Vec<u8>], bytes: usize) -> Vec<Vec<u8>> {
    keys.iter().map(|key| page(key, bytes)).collect()
}

fn faulty() -> Arc<FaultyBackend> {
    Arc::new(FaultyBackend::new(Arc::new(MemoryBackend::default())))
}

fn put(tier: &RemoteTier, keys: &[Vec<u8>], bytes: usize, have: Range<usize>) -> usize {
    let (refs, pages) = (refs(keys), pages(keys, bytes));
    let prompt = Prompt { scope: &SCOPE, page_bytes: bytes as u64, chained: true, keys: &refs };
    tier.put(&prompt, have, |at| &pages[at], soon()).unwrap()
}

/// Reads pages of `bytes` bytes and checks them. Returns how many pages were read.
fn get(tier: &RemoteTier, keys: &[Vec<u8>], bytes: usize, range: Range<usize>) -> usize {
    let refs = refs(keys);
    let prompt = Prompt { scope: &SCOPE, page_bytes: bytes as u64, chained: true, keys: &refs };
    let mut out = vec![0; range.len() * bytes];
    let read = tier.get(&prompt, range.clone(), &mut out, soon()).unwrap();
    for (at, page_out) in range.zip(out.chunks(bytes)).take(read) {
        assert_eq!(page_out, page(&keys[at], bytes), "page {at}");
    }
    read
}

fn probe(tier: &RemoteTier, keys: &[Vec<u8>], bytes: usize) -> usize {
    let refs = refs(keys);
    let prompt = Prompt { scope: &SCOPE, page_bytes: bytes as u64, chained: true, keys: &refs };
    tier.probe(&prompt, soon()).unwrap()
}

#[test]
fn built_in_backends_conform() {
    let dir = tempfile::tempdir().unwrap();
    let directory = DirectoryBackend::new(dir.path(), "test");
    for backend in [&MemoryBackend::default() as &dyn Backend, &directory] {
        for check in conformance(backend, "try/") {
            assert_eq!(check.failure, None, "{backend:?}: {}", check.what);
        }
    }
    let left = std::fs::read_dir(dir.path().join("try")).unwrap();
    assert!(left.flatten().all(|entry| entry.path().is_dir()), "no unfinished file may stay");
}

#[test]
fn conformance_detects_faulty_backends() {
    for fault in
        [BackendFault::Unavailable, BackendFault::Short, BackendFault::Flipped, BackendFault::Gone]
    {
        let backend = faulty();
        backend.fail(fault);
        let failures =
            conformance(backend.as_ref(), "try/").iter().filter(|c| c.failure.is_some()).count();
        assert!(failures > 0, "{fault:?}");
    }
}

#[test]
fn cold_probe_of_256_pages_sends_at_most_12_queries() {
    for log in 0..=7_u32 {
        let bytes = (8 << 20) >> log;
        for present in [0, 1, 31, 32, 85, 127, 128, 170, 171, 200, 255, 256] {
            // A probe queries names only, so the values may be empty.
            let backend = faulty();
            let all = keys(1, 0, 256);
            let refs = refs(&all);
            for size in (0..=log).rev() {
                let size = 1_usize << size;
                for end in (size..=present).step_by(size) {
                    let name = object_name(refs[end - 1], size);
                    backend.set(&name, b"").unwrap();
                }
            }
            let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
            assert_eq!(probe(&tier, &all, bytes), present);
            let queries = backend.exists_calls();
            assert!(queries <= 12, "{queries} queries for {present} pages of {bytes} bytes");
            assert_eq!(probe(&tier, &all, bytes), present);
            assert_eq!(
                backend.exists_calls(),
                queries,
                "a second probe must use the cached answers"
            );
        }
    }
}

/// Returns the name, as `docs/backends.md` describes it, of the object of `pages` pages whose last
/// page has the key `last`.
fn object_name(last: &[u8], pages: usize) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let hash = ritornello_format::PageHash::of(&SCOPE, last);
    format!("ritornello/3/{}/{}.{pages}", hex(&SCOPE.0), hex(&hash.0))
}

#[test]
fn second_writer_writes_no_object() {
    let backend = faulty();
    let all = keys(1, 0, 300);
    let one = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(put(&one, &all, 200, 0..300), 300);
    let sets = backend.set_calls();
    let two = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(put(&two, &all, 200, 0..300), 300);
    assert_eq!(put(&one, &all, 200, 0..300), 300);
    assert_eq!(backend.set_calls(), sets);
    assert_eq!((two.stats().pages_written, two.stats().pages_present), (0, 300));
}

#[test]
fn faults_cost_hits_and_deliver_no_wrong_byte() {
    for fault in BackendFault::ALL {
        let backend = faulty();
        let all = keys(1, 0, 100);
        let writer = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
        assert_eq!(put(&writer, &all, 64 << 10, 0..100), 100);
        let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
        // Find the pages before the fault begins, so that gets during the fault try to read them.
        assert_eq!(probe(&tier, &all, 64 << 10), 100);
        backend.fail(fault);
        let refs = refs(&all);
        let prompt = Prompt { scope: &SCOPE, page_bytes: 64 << 10, chained: true, keys: &refs };
        for _ in 0..20 {
            let mut out = vec![0; 100 * (64 << 10)];
            let deadline = Instant::now() + Duration::from_millis(20);
            let read = tier.get(&prompt, 0..100, &mut out, deadline).unwrap();
            for (key, out) in all.iter().zip(out.chunks(64 << 10)).take(read) {
                assert_eq!(out, page(key, 64 << 10), "{fault:?}");
            }
            assert!(read < 100, "{fault:?}");
        }
        assert!(tier.stats().pages_lost > 0, "{fault:?}: {:?}", tier.stats());
        if matches!(fault, BackendFault::Unavailable | BackendFault::Refused | BackendFault::Hangs)
        {
            assert!(tier.stats().calls.open, "{fault:?}: the breaker must be open");
            let fresh = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
            // A call that hangs lasts until its deadline, so this deadline is short. The other
            // faults get a long deadline, because a busy machine may answer late.
            let patience = if fault == BackendFault::Hangs { 20 } else { 20_000 };
            let deadline = Instant::now() + Duration::from_millis(patience);
            assert_eq!(
                fresh.probe(&prompt, deadline).unwrap_err().kind(),
                match fault {
                    BackendFault::Refused => ErrorKind::Fatal,
                    _ => ErrorKind::Retry,
                }
            );
        }
        backend.fail(BackendFault::None);
        let again = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
        assert_eq!(get(&again, &all, 64 << 10, 0..100), 100, "{fault:?}");
    }
}

#[test]
fn truncated_object_is_detected_by_read() {
    let backend = faulty();
    let all = keys(1, 0, 40);
    backend.fail(BackendFault::Short);
    let writer = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    put(&writer, &all, 300_000, 0..40);
    backend.fail(BackendFault::None);
    let reader = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(probe(&reader, &all, 300_000), 40);
    let read = get(&reader, &all, 300_000, 0..40);
    assert!(read < 40);
    assert_eq!(probe(&reader, &all, 300_000), 0, "the damaged object must be cached as missing");
}

#[test]
fn backend_check_detects_faulty_backends() {
    let failed_checks = |backend: Arc<dyn Backend>| {
        let checks = check_backend(&backend, "try/", Duration::from_secs(60));
        checks
            .into_iter()
            .filter(|check| check.failure.is_some())
            .map(|check| check.what)
            .collect::<Vec<_>>()
    };
    let memory = Arc::new(MemoryBackend::default());
    assert_eq!(failed_checks(Arc::clone(&memory) as Arc<dyn Backend>), Vec::<&str>::new());
    let mut left = 0;
    memory.list("", &mut |_| left += 1).unwrap();
    assert_eq!(left, 0);
    for fault in
        [BackendFault::Unavailable, BackendFault::Short, BackendFault::Flipped, BackendFault::Gone]
    {
        let backend = faulty();
        backend.fail(fault);
        assert!(!failed_checks(backend).is_empty(), "{fault:?}");
    }
    let backend = faulty();
    backend.fail(BackendFault::Hangs);
    let checks = check_backend(
        &(Arc::clone(&backend) as Arc<dyn Backend>),
        "try/",
        Duration::from_millis(50),
    );
    assert!(
        checks
            .iter()
            .all(|check| check.failure.as_ref().is_some_and(|why| why.contains("no answer")))
    );
    backend.fail(BackendFault::None);
}

#[test]
fn compressed_pages_are_read_by_range() {
    for bytes in [3_000, 300_000] {
        let backend = Arc::new(MemoryBackend::default());
        let zstd = RemoteOptions { zstd: Some(1), keys: None };
        let writer = RemoteTier::with_options(Arc::clone(&backend) as Arc<dyn Backend>, zstd);
        let all = keys(1, 0, 77);
        assert_eq!(put(&writer, &all, bytes, 0..77), 77);
        let inventory = Inventory::take(backend.as_ref()).unwrap();
        assert!(inventory.bytes() < 77 * bytes as u64 / 2, "{}", inventory.bytes());
        for range in [0..77, 0..1, 3..9, 16..77, 40..41, 76..77] {
            let reader = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
            assert_eq!(get(&reader, &all, bytes, range.clone()), range.len(), "{range:?}");
        }
        let checked = fsck(backend.as_ref(), &inventory, None, false, &mut |_| {}).unwrap();
        assert_eq!((checked.pages, checked.damaged.len()), (77, 0));
    }
}

/// A memory backend with a clock that the test sets, which gives the objects' times of writing.
#[derive(Debug, Default)]
struct Aged {
    inner: MemoryBackend,
    written: parking_lot::Mutex<std::collections::HashMap<String, u64>>,
    now: std::sync::atomic::AtomicU64,
}

impl Aged {
    fn at(&self, now: u64) {
        self.now.store(now, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Backend for Aged {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.inner.get(name, range)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.inner.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        let now = self.now.load(std::sync::atomic::Ordering::Relaxed);
        self.written.lock().insert(name.to_owned(), now);
        self.inner.set(name, value)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.inner.delete(name)
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed)) -> Result<()> {
        let written = self.written.lock();
        self.inner.list(prefix, &mut |mut found| {
            found.written = written[&found.name];
            each(found);
        })
    }
}

/// Makes objects of eight pages each: the first prompt, the second prompt, which continues the
/// first 16 pages of the first prompt and is written 8,000 s after it, and the third prompt.
fn aged() -> (Arc<Aged>, [Vec<Vec<u8>>; 3]) {
    let backend = Arc::new(Aged::default());
    let prompts = [keys(1, 32, 32), keys(2, 16, 32), keys(3, 0, 16)];
    for (at, prompt) in [(1_000, &prompts[0]), (2_000, &prompts[2]), (9_000, &prompts[1])] {
        backend.at(at);
        let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
        put(&tier, prompt, 1 << 20, 0..prompt.len());
    }
    backend.at(10_000);
    (backend, prompts)
}

fn present(backend: &Arc<Aged>, prompt: &[Vec<u8>]) -> usize {
    get(&RemoteTier::new(Arc::clone(backend) as Arc<dyn Backend>), prompt, 1 << 20, 0..prompt.len())
}

const KEEP: CollectOptions =
    CollectOptions { max_age: None, budget: None, grace: Duration::from_secs(100), dry_run: false };

#[test]
fn old_objects_are_removed_unless_continued_recently() {
    let (backend, [first, second, third]) = aged();
    let options =
        CollectOptions { max_age: Some(Duration::from_secs(5_000)), dry_run: true, ..KEEP };
    let would = collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!((would.objects, would.removed_objects, would.failed), (8, 4, 0));
    assert_eq!(present(&backend, &first), 32, "a dry run must remove no object");
    let options = CollectOptions { dry_run: false, ..options };
    assert_eq!(collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap(), would);
    assert_eq!([&first, &second, &third].map(|prompt| present(&backend, prompt)), [16, 32, 0]);
    let again = collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!((again.objects, again.removed_objects), (4, 0));
}

#[test]
fn budget_removes_ends_first_outside_grace() {
    let (backend, [first, second, third]) = aged();
    let all = Inventory::take(backend.as_ref()).unwrap().bytes();
    let options = CollectOptions { budget: Some(all - 1), ..KEEP };
    let one = collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!(one.removed_objects, 1);
    assert_eq!(present(&backend, &first), 24, "the first prompt must lose its last object");
    // The budget removes three more objects: the remaining object that only the first prompt uses,
    // and both objects of the third prompt.
    let options = CollectOptions { budget: Some(all * 9 / 16), ..KEEP };
    collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!([&first, &second, &third].map(|prompt| present(&backend, prompt)), [16, 32, 0]);
    let grace = Duration::from_secs(2_000);
    let nothing = CollectOptions { budget: Some(0), grace, ..KEEP };
    collect(backend.as_ref(), &nothing, None, &mut |_| {}).unwrap();
    assert_eq!(present(&backend, &second), 32, "objects within the grace period must stay");
    collect(backend.as_ref(), &CollectOptions { budget: Some(0), ..KEEP }, None, &mut |_| {})
        .unwrap();
    let mut left = 0;
    backend.list("", &mut |_| left += 1).unwrap();
    assert_eq!(left, 0, "the value that was written to read the clock must be removed too");
}

#[test]
fn future_write_time_ages_no_other_object() {
    let (backend, [first, ..]) = aged();
    backend.written.lock().insert(object_name(refs(&first)[7], 8), 1_000_000);
    let options = CollectOptions { max_age: Some(Duration::from_secs(9_500)), ..KEEP };
    let collected = collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!((collected.objects, collected.removed_objects), (8, 0));
}

#[test]
fn unfinished_files_are_removed_after_a_day() {
    let (backend, [first, ..]) = aged();
    for (at, name) in [(10_000, "3/.new-a-1"), (99_000, "3/.new-a-2"), (10_000, "clock-1")] {
        backend.at(at);
        backend.set(&format!("ritornello/{name}"), b"1").unwrap();
    }
    backend.at(100_000);
    let collected = collect(backend.as_ref(), &KEEP, None, &mut |_| {}).unwrap();
    assert_eq!((collected.objects, collected.removed_objects, collected.failed), (8, 0, 0));
    let left = Inventory::take(backend.as_ref()).unwrap().unfinished;
    assert_eq!(left.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["ritornello/3/.new-a-2"]);
    assert_eq!(present(&backend, &first), 32);
}

#[test]
fn orphans_are_removed_first() {
    let (backend, [first, second, _]) = aged();
    let beginning = object_name(refs(&first)[7], 8);
    backend.delete(&beginning).unwrap();
    let all = Inventory::take(backend.as_ref()).unwrap().bytes();
    let options = CollectOptions { budget: Some(all - 1), ..KEEP };
    let one = collect(backend.as_ref(), &options, None, &mut |_| {}).unwrap();
    assert_eq!((one.removed_objects, one.orphans), (1, 1));
    let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(
        put(&tier, &second, 1 << 20, 0..32),
        32,
        "the next put must write the removed objects again"
    );
    assert_eq!(present(&backend, &second), 32);
}

#[test]
fn collection_during_use_costs_hits_only() {
    let backend = Arc::new(MemoryBackend::default());
    let all = keys(1, 0, 64);
    let done = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..30 {
                        let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
                        put(&tier, &all, 100_000, 0..64);
                        get(&tier, &all, 100_000, 0..64);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let everything = CollectOptions { budget: Some(0), grace: Duration::ZERO, ..KEEP };
            while !done.load(relaxed) {
                collect(backend.as_ref(), &everything, None, &mut |_| {}).unwrap();
            }
        });
        for user in users {
            user.join().unwrap();
        }
        done.store(true, relaxed);
    });
    let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(put(&tier, &all, 100_000, 0..64), 64);
    assert_eq!(get(&tier, &all, 100_000, 0..64), 64);
}

#[test]
fn damage_and_other_versions_are_distinguished() {
    let backend = Arc::new(MemoryBackend::default());
    let all = keys(1, 0, 20);
    let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    put(&tier, &all, 1 << 20, 0..20);
    backend.set("ritornello/5/new/shape", b"of things").unwrap();
    let refs = refs(&all);
    let (damaged, newer) = (object_name(refs[15], 8), object_name(refs[19], 4));
    for (name, at) in [(&damaged, 3 << 20), (&newer, 8)] {
        let mut value = backend.get(name, None).unwrap().unwrap();
        value[at] ^= 2;
        backend.set(name, &value).unwrap();
    }
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    assert_eq!(inventory.others["5"], (1, 9));
    let found = fsck(backend.as_ref(), &inventory, None, false, &mut |_| {}).unwrap();
    assert_eq!((found.objects, found.pages), (3, 20));
    let why = |name: &String| {
        found.damaged.iter().find(|(damaged, _)| damaged == name).unwrap().1.clone()
    };
    assert!(why(&damaged).contains("page 2 of 8"), "{}", why(&damaged));
    assert!(why(&newer).contains("another format"), "{}", why(&newer));
    let reader = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(get(&reader, &all, 1 << 20, 0..20), 10, "the read must end at the damaged object");
    assert_eq!(fsck(backend.as_ref(), &inventory, None, true, &mut |_| {}).unwrap().removed, 2);
    let reader = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(put(&reader, &all, 1 << 20, 0..20), 20);
    assert_eq!(get(&reader, &all, 1 << 20, 0..20), 20);
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    assert!(
        fsck(backend.as_ref(), &inventory, None, false, &mut |_| {}).unwrap().damaged.is_empty()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn put_pages_are_read_by_another_tier(
        puts in prop::collection::vec((1..4_u8, 0..90_usize, 1..150_usize), 1..8),
        log in 0..8_u32,
        reads in prop::collection::vec((0..150_usize, 0..150_usize), 1..6),
    ) {
        // A page of 9 MiB is an object alone. An object holds up to 128 pages of 40 to 280 bytes.
        let bytes = if log == 0 { 9 << 20 } else { 40 * log as usize };
        let puts: Vec<_> = if log == 0 {
            puts.into_iter().map(|(n, fork, pages)| (n, fork % 3, pages % 3 + 1)).take(2).collect()
        } else {
            puts
        };
        let backend = Arc::new(MemoryBackend::default());
        let writer = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
        for &(number, fork, pages) in &puts {
            prop_assert_eq!(put(&writer, &keys(number, fork, pages), bytes, 0..pages), pages);
        }
        for &(number, fork, pages) in &puts {
            let reader = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
            let all = keys(number, fork, pages);
            prop_assert_eq!(probe(&reader, &all, bytes), pages);
            for &(a, b) in &reads {
                let (a, b) = (a.min(b) % pages, a.max(b).min(pages));
                let range = a..b.max(a);
                prop_assert_eq!(get(&reader, &all, bytes, range.clone()), range.len());
            }
            let longer = keys(number, fork, pages + 50);
            prop_assert!(probe(&reader, &longer, bytes) <= pages + 50);
        }
    }
}

#[test]
fn highly_compressed_page_passes_fsck() {
    let backend = Arc::new(MemoryBackend::default());
    let zstd = RemoteOptions { zstd: Some(1), keys: None };
    let tier = RemoteTier::with_options(Arc::clone(&backend) as Arc<dyn Backend>, zstd);
    let (all, zeros) = (keys(1, 0, 1), vec![0; 8 << 20]);
    let refs = refs(&all);
    let prompt =
        Prompt { scope: &SCOPE, page_bytes: zeros.len() as u64, chained: true, keys: &refs };
    assert_eq!(tier.put(&prompt, 0..1, |_| &zeros, soon()).unwrap(), 1);
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    let checked = fsck(backend.as_ref(), &inventory, None, true, &mut |_| {}).unwrap();
    assert_eq!((checked.objects, checked.damaged), (1, Vec::new()));
}

#[test]
fn pages_after_failed_write_do_not_count() {
    let backend = Arc::new(FailsOnce::default());
    let all = keys(1, 0, 72);
    *backend.name.lock() = object_name(refs(&all)[15], 8);
    let tier = RemoteTier::new(Arc::clone(&backend) as Arc<dyn Backend>);
    assert_eq!(put(&tier, &all, 1 << 20, 0..72), 8);
    let stats = tier.stats();
    assert_eq!(stats.pages_written + stats.pages_dropped, 72, "{stats:?}");
    assert_eq!(put(&tier, &all, 1 << 20, 0..72), 72);
}

/// A memory backend that refuses the first write of one name.
#[derive(Debug, Default)]
struct FailsOnce {
    inner: MemoryBackend,
    name: parking_lot::Mutex<String>,
}

impl Backend for FailsOnce {
    fn get(&self, name: &str, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>> {
        self.inner.get(name, range)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.inner.exists(name)
    }

    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        let mut fails = self.name.lock();
        if *fails == name {
            fails.clear();
            return Err(ritornello_format::Error::invalid("a made-up fault: 400"));
        }
        self.inner.set(name, value)
    }
}
