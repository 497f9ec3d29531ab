//! Owners that die or leave, and what becomes of their clients.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_node::{Node, Role, open};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    match command.split_once(' ') {
        Some(("churn", first)) => churn(node, first.parse().unwrap()),
        _ => panic!("what is {command}?"),
    }
}

/// Puts sequence after sequence and gets those that were flushed again and again. Says after each
/// flush which one it was, and what this process is. (`get` ends it if bytes are wrong.)
fn churn(node: &Node, first: u64) -> ! {
    let store = node.store();
    let mut flushed = Vec::new();
    for name in first.. {
        if put(store, name, 12).is_ok_and(|put| put.pages == 12) && store.flush().is_ok() {
            flushed.push(name);
            say(format!("{name} {}", node.role().word()));
        }
        let until = Instant::now() + Duration::from_millis(60);
        while Instant::now() < until {
            let Some(known) = flushed.get(name as usize * 7 % flushed.len().max(1)) else { break };
            match get(store, *known, 12) {
                Ok(12) => {}
                other => say(format!("LOST {known}: {other:?}")),
            }
        }
    }
    unreachable!()
}

#[test]
fn owners_are_killed_one_after_the_other_under_load_and_nothing_flushed_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut started = 0;
    let mut start = || {
        started += 1;
        let mut helper = Helper::opened(dir.path());
        helper.tell(&format!("churn {}", started * 1_000_000));
        helper
    };
    let mut line: Vec<Helper> = (0..5).map(|_| start()).collect();
    let mut flushed = BTreeSet::new();
    let mut note = |said: &str| {
        let (name, role) = said.split_once(' ').unwrap_or_else(|| panic!("{said:?}"));
        flushed.insert(name.parse::<u64>().unwrap_or_else(|_| panic!("{said}")));
        role == "owner"
    };
    for _ in 0..5 {
        // All go on, whoever was killed; who owns may not have noticed yet.
        let mut owner = None;
        while owner.is_none() {
            for (at, helper) in line.iter_mut().enumerate() {
                (0..2).for_each(|_| {
                    if note(&helper.listen()) {
                        owner = Some(at);
                    }
                });
            }
        }
        for said in line.swap_remove(owner.unwrap()).kill() {
            note(&said);
        }
        line.push(start());
    }
    for helper in line {
        for said in helper.kill() {
            note(&said);
        }
    }
    let node = open(&options(dir.path())).unwrap();
    let stats = node.store().stats().unwrap().catalog;
    assert!(stats.epoch > 5, "{stats:?}");
    assert_eq!((stats.reserved_bytes, stats.counters["pages_evicted"]), (0, 0));
    let lost: Vec<u64> = flushed
        .iter()
        .copied()
        .filter(|name| get(node.store(), *name, 12).unwrap() != 12)
        .collect();
    assert!(lost.is_empty(), "{lost:?} of {} are gone: {stats:?}", flushed.len());
}

/// How many sequences each client puts at most: all of them fit, or what was flushed would be evicted.
const WORK: usize = 200;

#[test]
fn when_the_owner_is_killed_a_client_takes_over_and_what_was_flushed_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let mut clients: Vec<Helper> = (0..3).map(|_| Helper::opened(dir.path())).collect();
    for (at, client) in clients.iter_mut().enumerate() {
        client.tell(&format!("work {} 4 {WORK}", at * 1_000_000));
    }
    let mut flushed = BTreeSet::new();
    let mut hear = |rounds| {
        for _ in 0..rounds {
            flushed.extend(clients.iter_mut().map(|one| one.listen().parse::<u64>().unwrap()));
        }
    };
    hear(50);
    owner.kill();
    // They go on, one of them as the owner.
    hear(WORK - 100);
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    let stats = node.store().stats().unwrap().catalog;
    assert_eq!((stats.epoch, stats.poisoned), (2, None));
    drop(node);
    for client in clients {
        flushed.extend(client.kill().iter().filter_map(|name| name.parse::<u64>().ok()));
    }
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Owner);
    let stats = node.store().stats().unwrap().catalog;
    // When the owner among the clients is killed first, another may take over before its turn.
    assert!((3..=5).contains(&stats.epoch), "{stats:?}");
    assert_eq!(stats.reserved_bytes, 0);
    let lost: Vec<u64> =
        flushed.iter().copied().filter(|name| get(node.store(), *name, 4).unwrap() != 4).collect();
    assert!(lost.is_empty(), "{lost:?} of {} are gone: {stats:?}", flushed.len());
}

#[test]
fn owner_after_owner_is_killed_and_the_last_client_still_has_everything() {
    let dir = tempfile::tempdir().unwrap();
    let mut line: Vec<Helper> = (0..5).map(|_| Helper::opened(dir.path())).collect();
    let node = loop {
        let roles: Vec<String> = line.iter_mut().map(|helper| helper.ask("role")).collect();
        let at = roles.iter().position(|role| role == "owner").unwrap();
        let mut owner = line.swap_remove(at);
        let name = line.len() as u64;
        assert_eq!(owner.ask(&format!("put {name} 9")), "9");
        assert_eq!(owner.ask("flush"), "flushed");
        if line.is_empty() {
            owner.kill();
            break open(&options(dir.path())).unwrap();
        }
        owner.kill();
        for client in &mut line {
            assert_eq!(client.ask(&format!("get {name} 9")), "9");
        }
    };
    for name in 0..5 {
        assert_eq!(get(node.store(), name, 9).unwrap(), 9);
    }
    assert_eq!(node.store().stats().unwrap().catalog.epoch, 6);
}

#[test]
fn an_owner_that_closes_hands_over_without_a_failed_call() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 0, 4).unwrap().pages, 4);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let store = node.store();
                scope.spawn(move || {
                    let until = Instant::now() + Duration::from_millis(800);
                    while Instant::now() < until {
                        assert_eq!(probe(store, 0, 5).unwrap(), 4);
                        assert_eq!(get(store, 0, 4).unwrap(), 4);
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        owner.finish();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert_eq!(node.role(), Role::Owner);
}

#[test]
fn a_flush_does_not_cover_up_for_an_owner_that_died() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 0, 4).unwrap().pages, 4);
    node.store().flush().unwrap();
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    owner.kill();
    assert_eq!(probe(node.store(), 0, 4).unwrap(), 4);
    let error = node.store().flush().unwrap_err();
    assert_eq!(error.kind(), ritornello_format::ErrorKind::Miss);
    assert!(error.to_string().contains("put them again"), "{error}");
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    node.store().flush().unwrap();
}

#[test]
fn a_flush_after_an_owner_that_closed_has_nothing_to_report() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let mut third = Helper::opened(dir.path());
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    assert_eq!(third.ask("put 2 4"), "4");
    owner.finish();
    assert_eq!(third.ask("flush"), "flushed");
    node.store().flush().unwrap();
    assert_eq!(get(node.store(), 1, 4).unwrap(), 4);
    assert_eq!(get(node.store(), 2, 4).unwrap(), 4);
    third.finish();
}

#[test]
fn a_put_that_loses_its_owner_leaves_no_space_behind() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let owner = Helper::opened(dir.path());
        let mut worker = Helper::opened(dir.path());
        let node = open(&options(dir.path())).unwrap();
        worker.tell(&format!("work {} 300 1000000", (round + 1) * 1_000_000));
        let reserved = || node.store().stats().unwrap().catalog.reserved_bytes;
        eventually("a reservation", || reserved() > 0);
        owner.kill();
        for _ in 0..3 {
            assert!(!worker.listen().is_empty());
        }
        worker.kill();
        eventually("all space is free", || reserved() == 0);
        node.close().unwrap();
    }
}

#[test]
fn a_dead_owners_socket_is_no_owner() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    owner.kill();
    assert!(dir.path().join("owner.sock").exists());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Owner);
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
}

#[test]
fn a_directory_that_was_replaced_is_not_taken_for_the_old_one() {
    let root = tempfile::tempdir().unwrap();
    let (dir, old) = (root.path().join("store"), root.path().join("old"));
    let owner = Helper::opened(&dir);
    let node = open(&options(&dir)).unwrap();
    std::fs::rename(&dir, &old).unwrap();
    owner.kill();
    let error = probe_known(&node).unwrap_err().to_string();
    assert!(error.contains("moved or replaced"), "{error}");
    assert!(!Path::new(&dir).exists(), "nothing was made in its place");
}

fn probe_known(node: &Node) -> ritornello_format::Result<()> {
    node.store().flush()
}
