//! Processes that are alive but do not respond: owners and clients that are stopped, a next owner
//! that does not listen, and an owner whose disk does not answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_node::{Node, Role, open, open_on};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    match command {
        "take-the-lock" => take_the_lock(node),
        // Occupies this client's only connection until the owner's disk answers.
        "flush-apart" => {
            let node = Arc::clone(node);
            std::thread::spawn(move || node.store().flush().unwrap());
            "begun".to_owned()
        }
        // Probes while this process can open no file and no socket.
        "probe-without-descriptors" => {
            let limit = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
            let probed = probe(node.store(), 1, 4);
            setrlimit(Resource::Nofile, limit).unwrap();
            format!("{} {probed:?}", node.role().word())
        }
        _ => panic!("unknown command: {command}"),
    }
}

fn take_the_lock(node: &Node) -> String {
    say("waiting");
    let lock = std::fs::File::options().write(true).open(node.path().join("LOCK")).unwrap();
    eventually("the lock is free", || {
        let how = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::fcntl_lock(&lock, how).is_ok()
    });
    std::mem::forget(lock);
    "held".to_owned()
}

fn unanswered(node: &Node) -> u64 {
    node.store().stats().unwrap().transfer.unanswered
}

#[test]
fn stopped_owner_delays_one_call_then_calls_miss() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    let keys = keys(1, 4);
    let held = store.lease(&scope(), &refs(&keys), Duration::from_secs(600)).unwrap();
    assert_eq!(held.pages, 4);
    owner.stop();
    let started = Instant::now();
    assert_eq!(probe(store, 1, 4).unwrap(), 0);
    let first = started.elapsed();
    let started = Instant::now();
    for name in 0..20 {
        assert_eq!(probe(store, 1, 4).unwrap(), 0);
        assert_eq!(get(store, 1, 4).unwrap(), 0);
        assert_eq!(store.exists(&scope(), &refs(&keys)).unwrap(), [false; 4]);
        assert_eq!(store.touch(&scope(), &refs(&keys)).unwrap(), 0);
        let leased = store.lease(&scope(), &refs(&keys), Duration::from_secs(60)).unwrap();
        assert_eq!(leased.pages, 0);
        let skipped = put(store, name, 4).unwrap();
        assert_eq!((skipped.pages, skipped.reason), (0, "owner_silent"));
    }
    assert!(started.elapsed() < first, "{:?} after {first:?}", started.elapsed());
    store.release(held.lease).unwrap();
    // The following calls must fail, because only the owner's answer can confirm a flush or a
    // removal, or give statistics.
    let failed = [
        store.flush(),
        store.delete(&scope(), &refs(&keys)).map(drop),
        store.drop_scope(&scope()),
        store.stats().map(drop),
    ];
    for error in failed.map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Retry);
        assert!(error.to_string().contains("does not answer"), "{error}");
    }
    owner.signal(libc::SIGCONT);
    eventually("the owner answers again", || probe(store, 1, 4).unwrap() == 4);
    assert_eq!((node.role(), get(store, 1, 4).unwrap()), (Role::Client, 4));
    assert_eq!(put(store, 2, 4).unwrap().pages, 4);
    // The counter of unanswered calls includes the first probe, the six calls of each pass of the
    // loop, and the probes after the loop that missed. Calls that failed are not counted.
    assert!(unanswered(&node) > 20 * 6);
    // The client sends the release that it deferred, and no lease is left.
    eventually("no lease is left", || store.stats().unwrap().catalog.leases == 0);
    drop(node);
    owner.finish();
}

#[test]
fn stopped_owner_delays_waiting_calls_no_longer_than_one_call() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let timed_probe = || {
        let started = Instant::now();
        assert_eq!(probe(node.store(), 1, 4).unwrap(), 0);
        started.elapsed()
    };
    owner.stop();
    let first = timed_probe();
    owner.signal(libc::SIGCONT);
    eventually("the owner answers again", || put(node.store(), 2, 4).unwrap().pages == 4);
    // A client has 16 connections, so at least 32 of these calls wait for one.
    owner.stop();
    let slowest = std::thread::scope(|threads| {
        let calls: Vec<_> = (0..48).map(|_| threads.spawn(timed_probe)).collect();
        calls.into_iter().map(|call| call.join().unwrap()).max().unwrap()
    });
    assert!(slowest < 3 * first, "{slowest:?}, and {first:?} for one call");
    owner.signal(libc::SIGCONT);
    drop(node);
    owner.finish();
}

#[test]
fn puts_through_a_stopped_owner_leak_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    for round in 0..3 {
        std::thread::scope(|threads| {
            let workers: Vec<_> = (0..6)
                .map(|worker| {
                    threads.spawn(move || {
                        let until = Instant::now() + Duration::from_secs(5);
                        let mut name = 1_000_000 * (worker + 10 * round);
                        while Instant::now() < until {
                            // Both calls may miss. `get` panics if it reads wrong bytes.
                            let _ = put(store, name, 100);
                            let _ = get(store, name, 100);
                            name += 1;
                        }
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(200));
            owner.stop();
            std::thread::sleep(Duration::from_millis(3600));
            owner.signal(libc::SIGCONT);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
        eventually("the owner answers puts again", || put(store, round, 3).unwrap().pages == 3);
        let catalog = || store.stats().unwrap().catalog;
        eventually("all space is free", || catalog().reserved_bytes == 0);
        eventually("no lease is left", || catalog().leases == 0);
        assert_eq!(catalog().clients, 1);
    }
    assert!(unanswered(&node) > 0);
    drop(node);
    owner.finish();
}

#[test]
fn client_takes_over_from_stopped_owner_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    node.store().flush().unwrap();
    owner.stop();
    assert_eq!(probe(node.store(), 1, 4).unwrap(), 0);
    assert_eq!(node.role(), Role::Client, "no client may take over from a live owner");
    owner.kill();
    assert_eq!(get(node.store(), 1, 4).unwrap(), 4);
    assert_eq!(node.role(), Role::Owner);
    assert_eq!(put(node.store(), 2, 4).unwrap().pages, 4);
}

#[test]
fn client_closes_despite_a_stopped_owner() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    owner.stop();
    assert_eq!(get(node.store(), 1, 4).unwrap(), 0);
    node.close().unwrap();
    owner.signal(libc::SIGCONT);
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(get(node.store(), 1, 4).unwrap(), 4);
    eventually("the closed client is removed", || {
        node.store().stats().unwrap().catalog.clients == 1
    });
    drop(node);
    owner.finish();
}

#[test]
fn resumed_client_gets_its_responses() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    let mut client = Helper::opened(dir.path());
    for _ in 0..3 {
        client.tell("get 1 4");
        client.stop();
        std::thread::sleep(Duration::from_millis(1200));
        client.signal(libc::SIGCONT);
        assert_eq!(client.listen(), "4");
    }
    client.finish();
}

#[test]
fn client_without_descriptors_keeps_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let node = open_on(medium, &options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    assert_eq!(client.ask("lease 1 4"), "4");
    schedule.add(Rule::always(MediumFault::Stall).on(Op::SyncData).at("seg-"));
    assert_eq!(client.ask("flush-apart"), "begun");
    eventually("the flush waits for the disk", || schedule.injected() > 0);
    let probed = client.ask("probe-without-descriptors");
    schedule.heal();
    assert!(probed.starts_with("client Err") && probed.contains("limit of open files"), "{probed}");
    assert_eq!(client.ask("get 1 4"), "4");
    eventually("the lease of the get ends, and the first lease stays", || {
        let catalog = node.store().stats().unwrap().catalog;
        (catalog.clients, catalog.leases) == (1, 1)
    });
    client.finish();
}

#[test]
#[ignore = "long: waits for the timeout of a call, 30 seconds"]
fn next_owner_that_never_listens_delays_one_call() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    // After the kill, the helper `heir` takes the owner's lock, as the next owner does before it
    // recovers the store, but never listens on the socket.
    let mut heir = Helper::opened(dir.path());
    assert_eq!(heir.ask("take-the-lock"), "waiting");
    owner.kill();
    assert_eq!(heir.listen(), "held");
    let started = Instant::now();
    assert_eq!(probe(store, 1, 4).unwrap(), 0);
    let first = started.elapsed();
    let started = Instant::now();
    for name in 2..12 {
        assert_eq!(get(store, 1, 4).unwrap(), 0);
        assert_eq!(put(store, name, 4).unwrap().reason, "owner_silent");
    }
    assert!(started.elapsed() < first / 2, "{:?} after {first:?}", started.elapsed());
    heir.kill();
    eventually("the store has an owner", || get(store, 1, 4).unwrap() == 4);
    assert_eq!(node.role(), Role::Owner);
}

#[test]
#[ignore = "long: waits for the timeout of a call, 30 seconds"]
fn slow_takeover_delays_one_other_call() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let node = open_on(medium, &options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    schedule.add(Rule::always(MediumFault::Stall).on(Op::Write).at("MANIFEST"));
    owner.kill();
    std::thread::scope(|threads| {
        let recovering = threads.spawn(|| probe(store, 1, 4).unwrap());
        eventually("a call recovers the store", || schedule.injected() > 0);
        let timed_probe = || {
            let started = Instant::now();
            let _ = probe(store, 1, 4);
            started.elapsed()
        };
        let (first, second) = (timed_probe(), timed_probe());
        let skipped = put(store, 2, 4);
        // Let the recovery end before any assertion fails.
        schedule.heal();
        assert_eq!(recovering.join().unwrap(), 4);
        assert!(second < first / 10, "{second:?} after {first:?}");
        assert_eq!(skipped.unwrap().reason, "reopening");
    });
    assert_eq!((node.role(), get(store, 1, 4).unwrap()), (Role::Owner, 4));
}

/// A close that cannot sync fails, and keeps the store from other owners until the disk has
/// answered.
#[test]
#[ignore = "long: waits for the time limit of a close, a minute"]
fn close_ends_while_a_disk_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let schedule = Schedule::new();
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let node = open_on(medium, &options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    schedule.add(Rule::always(MediumFault::Stall).on(Op::SyncData).at("seg-"));
    let error = node.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Retry);
    assert!(error.to_string().contains("close again later"), "{error}");
    schedule.heal();
    node.close().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!((node.role(), get(node.store(), 1, 4).unwrap()), (Role::Owner, 4));
    node.close().unwrap();
}

/// An owner whose socket cannot be created keeps the store from other owners until its disk has
/// answered.
#[test]
#[ignore = "long: waits for the time limit of a close, a minute"]
fn failed_open_ends_after_its_last_write() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    node.close().unwrap();
    // The socket's file cannot replace a directory.
    let obstacle = dir.path().join("owner.sock");
    std::fs::create_dir(&obstacle).unwrap();
    let schedule = Schedule::new();
    schedule.add(Rule::always(MediumFault::Stall).on(Op::SyncData).at("seg-"));
    let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
    let options = options(dir.path());
    std::thread::scope(|threads| {
        let opening = threads.spawn(|| open_on(medium, &options).map(drop));
        eventually("a sync waits for the disk", || schedule.injected() > 0);
        let until = Instant::now() + Duration::from_secs(70);
        while !opening.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(100));
        }
        let ended_early = opening.is_finished();
        schedule.heal();
        let error = opening.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("socket cannot be created"), "{error}");
        assert!(!ended_early, "the opening must not end while the disk has a sync in flight");
    });
    std::fs::remove_dir(&obstacle).unwrap();
    let node = open(&options).unwrap();
    assert_eq!((node.role(), get(node.store(), 1, 4).unwrap()), (Role::Owner, 4));
    node.close().unwrap();
}
