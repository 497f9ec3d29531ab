//! The remote tier over real servers and faulty networks. `make test-remote` builds and runs these
//! tests.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "servers/clouds.rs"]
mod clouds;
mod common;

use common::proxy::{Proxy, ProxyFault};
use common::server::{BUCKET, Kind, Server};
use common::{PAGE, get, keys, long_deadline, probe, put};
use ritornello_format::{ErrorKind, RUN_MAGIC, RunHeader, SliceChecksum};
use ritornello_remote::open;
use ritornello_tiers::remote::{
    CollectOptions, Inventory, RemoteTier, check_backend, collect, fsck,
};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Pages of a prompt: two objects of 64 pages, and 22 further pages in smaller objects.
const PAGES: usize = 150;
/// Time that no call with a deadline of one second may take, even on a busy machine.
const FAR_TOO_LONG: Duration = Duration::from_secs(60);

fn address(port: u16, prefix: &str) -> String {
    format!("s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port}&profile=server")
}

fn tier(port: u16, prefix: &str) -> RemoteTier {
    open(&address(port, prefix)).unwrap().tier()
}

fn deadline_in(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

fn conforms(address: impl Fn(&str) -> String) {
    for address in [address(""), address("some/prefix")] {
        let backend = open(&address).unwrap().backend;
        for check in check_backend(&backend, "try/", Duration::from_secs(300)) {
            assert_eq!(check.failure, None, "{address}: {}", check.what);
        }
        let mut left = Vec::new();
        backend.list("", &mut |found| left.push(found.name)).unwrap();
        assert_eq!(left, Vec::<String>::new());
    }
}

#[test]
fn versitygw_passes_backend_checks() {
    let server = Server::start(Kind::VersityGw);
    conforms(|prefix| address(server.port, prefix));
}

#[test]
fn minio_passes_backend_checks() {
    let server = Server::start(Kind::MinIo);
    conforms(|prefix| address(server.port, prefix));
}

#[test]
fn network_faults_cost_hits_and_little_time() {
    let server = Server::start(Kind::VersityGw);
    let proxy = Proxy::start(server.port);
    let all = keys(1, PAGES);
    assert_eq!(put(&tier(proxy.port, "a"), &all, long_deadline()), PAGES);
    for fault in [
        ProxyFault::Status(500),
        ProxyFault::Status(503),
        ProxyFault::Status(403),
        ProxyFault::Slow(Duration::from_secs(20)),
        ProxyFault::Cut,
        ProxyFault::Half,
        ProxyFault::Flipped,
        ProxyFault::Reset,
    ] {
        let reader = tier(proxy.port, "a");
        assert_eq!(probe(&reader, &all, long_deadline()).unwrap(), PAGES, "{fault:?}");
        proxy.set(fault);
        for _ in 0..4 {
            let began = Instant::now();
            // `get` fails the test if a page that it reads has wrong bytes.
            let read = get(&reader, &all, 0..PAGES, deadline_in(1_000));
            assert!(read < PAGES, "{fault:?}");
            assert!(began.elapsed() < FAR_TOO_LONG, "{fault:?}: {:?}", began.elapsed());
        }
        // A put of another prompt stores nothing, unless the fault only changes bodies of answers.
        let others = keys(2, PAGES);
        let stored = put(&reader, &others, deadline_in(300));
        assert!(
            stored == 0
                || matches!(fault, ProxyFault::Cut | ProxyFault::Half | ProxyFault::Flipped),
            "{fault:?}"
        );
        let fresh = tier(proxy.port, "a");
        match (fault, probe(&fresh, &all, deadline_in(500))) {
            (ProxyFault::Status(403), Err(error)) => assert_eq!(error.kind(), ErrorKind::Fatal),
            (ProxyFault::Cut | ProxyFault::Half | ProxyFault::Flipped, _) => {}
            (_, answer) => assert_eq!(answer.unwrap_err().kind(), ErrorKind::Retry, "{fault:?}"),
        }
        proxy.set(ProxyFault::Nothing);
        assert_eq!(
            get(&tier(proxy.port, "a"), &all, 0..PAGES, long_deadline()),
            PAGES,
            "{fault:?}"
        );
    }
}

#[test]
fn server_restart_during_reads_costs_hits() {
    let mut server = Server::start(Kind::VersityGw);
    let address = address(server.port, "a");
    check_server_restart(&mut server, &address);
}

fn check_server_restart(server: &mut Server, address: &str) {
    let all = keys(1, PAGES);
    let reader = open(address).unwrap().tier();
    assert_eq!(put(&reader, &all, long_deadline()), PAGES);
    let (stop, reads, pages) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let wait_for = |more: usize| {
        let (until, target) =
            (Instant::now() + Duration::from_secs(120), reads.load(Relaxed) + more);
        while reads.load(Relaxed) < target {
            assert!(Instant::now() < until, "fewer than {more} reads ended within 120 s");
            thread::sleep(Duration::from_millis(20));
        }
    };
    thread::scope(|scope| {
        let _stops = Stops(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                pages.fetch_add(get(&reader, &all, 0..PAGES, deadline_in(5_000)), Relaxed);
                reads.fetch_add(1, Relaxed);
            }
        });
        for _ in 0..3 {
            wait_for(2);
            server.kill();
            wait_for(3);
            server.resume();
        }
        // The tier's circuit breaker may still be open: reads miss until a trial call succeeds.
        let (until, read) = (Instant::now() + Duration::from_secs(200), pages.load(Relaxed));
        while pages.load(Relaxed) < read + PAGES {
            assert!(
                Instant::now() < until,
                "fewer than {PAGES} pages were read after the restarts: {:?}",
                reader.stats()
            );
            thread::sleep(Duration::from_millis(100));
        }
    });
    assert!(reader.stats().pages_lost > 0);
}

/// Sets a flag that stops other threads when this value is dropped, also by a panic.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn server_down_at_start_is_used_later() {
    let mut server = Server::start(Kind::VersityGw);
    server.kill();
    let all = keys(1, 70);
    let early = tier(server.port, "a");
    assert_eq!(probe(&early, &all, deadline_in(500)).unwrap_err().kind(), ErrorKind::Retry);
    assert_eq!(put(&early, &all, deadline_in(500)), 0);
    server.resume();
    let until = Instant::now() + Duration::from_secs(200);
    while put(&early, &all, deadline_in(10_000)) < 70 {
        assert!(Instant::now() < until, "{:?}", early.stats());
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(get(&tier(server.port, "a"), &all, 0..70, long_deadline()), 70);
}

#[test]
fn configuration_errors_come_with_advice() {
    let server = Server::start(Kind::VersityGw);
    let proxy = Proxy::start(server.port);
    let error_of = |address: &str| {
        let (tier, all) = (open(address).unwrap().tier(), keys(1, 3));
        let error = probe(&tier, &all, long_deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fatal, "{error}");
        assert_eq!(put(&tier, &all, deadline_in(1_000)), 0);
        error.to_string()
    };
    let endpoint = |port: u16| format!("endpoint=http://127.0.0.1:{port}");
    let missing = error_of(&format!("s3://nowhere?profile=server&{}", endpoint(server.port)));
    assert!(missing.contains("make it") && missing.contains("s3://nowhere"), "{missing}");
    for profile in ["wrong", "nobody"] {
        let wrong = error_of(&format!("s3://{BUCKET}?profile={profile}&{}", endpoint(server.port)));
        assert!(wrong.contains("AWS_SECRET_ACCESS_KEY"), "{wrong}");
        assert!(
            !wrong.contains("something-else") && !wrong.contains("ritornello-secret"),
            "{wrong}"
        );
    }
    proxy.set(ProxyFault::Skewed);
    let skewed = error_of(&format!("s3://{BUCKET}?profile=server&{}", endpoint(proxy.port)));
    assert!(skewed.contains("clock"), "{skewed}");
    let error = open(&format!("s3://{BUCKET}?profile=none")).unwrap_err().to_string();
    assert!(error.contains("~/.aws/credentials"), "{error}");
    // TLS is used unless the endpoint begins with http://.
    let tls =
        open(&format!("s3://{BUCKET}?profile=server&endpoint=https://127.0.0.1:{}", server.port));
    assert!(probe(&tls.unwrap().tier(), &keys(1, 3), long_deadline()).is_err());
}

#[test]
fn foreign_and_damaged_objects_are_reported() {
    let server = Server::start(Kind::VersityGw);
    let all = keys(1, PAGES);
    assert_eq!(put(&tier(server.port, ""), &all, long_deadline()), PAGES);
    let backend = open(&address(server.port, "")).unwrap().backend;
    backend.set("ritornello/5/some/thing", b"new").unwrap();
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    assert_eq!((inventory.pages(), inventory.others["5"]), (PAGES as u64, (1, 3)));
    // Change one object's header to a newer format, and flip a bit of another object.
    let by_end = |pages: u32| inventory.objects.iter().filter(move |object| object.pages == pages);
    let (newer, damaged) = (by_end(16).next().unwrap(), by_end(4).next().unwrap());
    for (object, at) in [(newer, 8), (damaged, 5 << 14)] {
        let file = server.data().join(BUCKET).join(&object.name);
        let mut value = std::fs::read(&file).unwrap();
        value[at] ^= 64;
        std::fs::write(&file, value).unwrap();
    }
    // The objects of the prompt have 64, 64, 16, 4 and 2 pages: a read ends before the object of 16
    // pages, whose header is of a newer format.
    assert_eq!(get(&tier(server.port, ""), &all, 0..PAGES, long_deadline()), 128);
    let found = fsck(backend.as_ref(), &inventory, None, true, &mut |_| {}).unwrap();
    assert_eq!((found.damaged.len(), found.removed), (2, 2));
    assert_eq!(put(&tier(server.port, ""), &all, long_deadline()), PAGES);
    assert_eq!(get(&tier(server.port, ""), &all, 0..PAGES, long_deadline()), PAGES);
}

#[test]
fn second_writer_writes_nothing_and_gc_keeps_starts_of_prompts() {
    let server = Server::start(Kind::VersityGw);
    let proxy = Proxy::start(server.port);
    let all = keys(1, 256);
    assert_eq!(put(&tier(server.port, "a"), &all, long_deadline()), 256);
    let second = tier(server.port, "a");
    assert_eq!(put(&second, &all, long_deadline()), 256);
    assert_eq!((second.stats().pages_written, second.stats().pages_present), (0, 256));

    let before = proxy.requests();
    assert_eq!(probe(&tier(proxy.port, "a"), &all, long_deadline()).unwrap(), 256);
    let requests = proxy.requests() - before;
    assert!((1..=12).contains(&requests), "{requests} requests");

    let backend = open(&address(server.port, "a")).unwrap().backend;
    let half = CollectOptions {
        max_age: None,
        budget: Some(129 * PAGE as u64),
        grace: Duration::ZERO,
        dry_run: false,
    };
    let collected = collect(backend.as_ref(), &half, None, &mut |_| {}).unwrap();
    assert_eq!((collected.objects, collected.removed_objects), (4, 2));
    assert_eq!(
        get(&tier(server.port, "a"), &all, 0..256, long_deadline()),
        128,
        "gc must remove the ends of prompts and keep their beginnings"
    );
    let young = CollectOptions { budget: Some(0), grace: Duration::from_secs(3600), ..half };
    assert_eq!(collect(backend.as_ref(), &young, None, &mut |_| {}).unwrap().removed_objects, 0);
}

/// Replaces a page of an object, and corrects the object's checksums, as a writer of the bucket
/// without the seal's key can do. Returns the forged object.
fn forged(mut object: Vec<u8>, page: usize) -> Vec<u8> {
    let at = object.windows(8).position(|eight| eight == RUN_MAGIC).unwrap();
    let (mut header, _) = RunHeader::decode(&object[at..]).unwrap();
    let begin = object.len() - header.keys.len() * PAGE + page * PAGE;
    object[begin..begin + PAGE].fill(66);
    let mut sum = SliceChecksum::new(&header.keys[page], 0, 0);
    sum.update(&object[begin..begin + PAGE]);
    header.slices[page].checksum = sum.finish();
    let (encoded, _) = header.encode().unwrap();
    object[at..at + encoded.len()].copy_from_slice(&encoded);
    object
}

#[test]
fn forged_object_is_rejected_and_rewritten() {
    let server = Server::start(Kind::VersityGw);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("a {}\n", "5a".repeat(32))).unwrap();
    let address = address(server.port, "a");
    let keyed = || open(&format!("{address}&key={}", file.path().display())).unwrap();
    let all = keys(1, PAGES);
    assert_eq!(put(&keyed().tier(), &all, long_deadline()), PAGES);
    assert_eq!(probe(&open(&address).unwrap().tier(), &all, long_deadline()).unwrap(), 0);

    // The objects of the prompt have 64, 64, 16, 4 and 2 pages: forge the object of 16.
    let backend = open(&address).unwrap().backend;
    let inventory = Inventory::take(backend.as_ref()).unwrap();
    let name = &inventory.objects.iter().find(|object| object.pages == 16).unwrap().name;
    let good = backend.get(name, None).unwrap().unwrap();
    backend.set(name, &forged(good.clone(), 3)).unwrap();
    let checked = |keys| fsck(backend.as_ref(), &inventory, keys, false, &mut |_| {}).unwrap();
    assert_eq!(checked(None).damaged.len(), 0, "the forged checksums must match");
    assert_eq!(checked(keyed().options.keys.as_deref()).damaged.len(), 1);

    let reader = keyed().tier();
    assert_eq!(get(&reader, &all, 0..PAGES, long_deadline()), 128);
    assert_eq!(reader.stats().rejected.wrong_tag, 1);
    assert_eq!(put(&reader, &all, long_deadline()), PAGES);
    assert_eq!(backend.get(name, None).unwrap().unwrap(), good);
    assert_eq!(get(&keyed().tier(), &all, 0..PAGES, long_deadline()), PAGES);
}
