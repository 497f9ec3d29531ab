//! Owners that die or close, and their clients.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Role, open};
use ritornello_store::{PutOptions, Store};
use ritornello_volume::page_memory::{BorrowedPages, Fragment, OwnedPages, PageSource};
use ritornello_volume::transfer::Control;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    match command.split_once(' ') {
        Some(("churn", first)) => churn(node, first.parse().unwrap()),
        _ => panic!("unknown command: {command}"),
    }
}

/// Puts and flushes the sequences `first`, `first + 1` and so on, and gets flushed sequences in
/// between; `get` panics on wrong bytes. Prints each flushed sequence with this process's role, and
/// `LOST` for a flushed sequence that is not read whole.
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
fn flushed_pages_survive_owner_kills_under_load() {
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
        // Listen until one helper reports that it is the owner. After the previous kill this may
        // take several passes over the helpers, which may notice the owner's death late.
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
    let figures = || node.store().stats().unwrap().catalog;
    // The space that the dead owner had free is withheld until it is drained in the background.
    let until = Instant::now() + Duration::from_secs(30);
    while figures().reserved_bytes > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let stats = figures();
    assert!(stats.owner_epoch > 5, "{stats:?}");
    assert_eq!((stats.reserved_bytes, stats.counters["evicted_pages"]), (0, 0));
    let lost: Vec<u64> = flushed
        .iter()
        .copied()
        .filter(|name| get(node.store(), *name, 12).unwrap() != 12)
        .collect();
    assert!(lost.is_empty(), "{lost:?} of {} are lost: {stats:?}", flushed.len());
}

/// Maximum number of sequences that a client puts. All sequences fit the store, so no flushed page
/// is evicted.
const WORK: usize = 200;

#[test]
fn client_takes_over_from_a_killed_owner() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let mut clients: Vec<Helper> = (0..3).map(|_| Helper::opened(dir.path())).collect();
    for (at, client) in clients.iter_mut().enumerate() {
        client.tell(&format!("work {} 4 {WORK}", at * 1_000_000));
    }
    let mut flushed = BTreeSet::new();
    let mut collect_flushed = |rounds| {
        for _ in 0..rounds {
            flushed.extend(clients.iter_mut().map(|one| one.listen().parse::<u64>().unwrap()));
        }
    };
    collect_flushed(50);
    owner.kill();
    // The clients continue, and one of them becomes the owner.
    collect_flushed(WORK - 100);
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    let stats = node.store().stats().unwrap().catalog;
    assert_eq!((stats.owner_epoch, stats.poisoned), (2, None));
    drop(node);
    for client in clients {
        flushed.extend(client.kill().iter().filter_map(|name| name.parse::<u64>().ok()));
    }
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Owner);
    let stats = node.store().stats().unwrap().catalog;
    // The three clients were killed one after another, and one of them was the owner. If the owner
    // was killed before another client, that client may have become the owner before its own kill.
    assert!((3..=5).contains(&stats.owner_epoch), "{stats:?}");
    // Space that dead processes may have been writing to is drained in the background.
    eventually("all space is free", || node.store().stats().unwrap().catalog.reserved_bytes == 0);
    let lost: Vec<u64> =
        flushed.iter().copied().filter(|name| get(node.store(), *name, 4).unwrap() != 4).collect();
    assert!(lost.is_empty(), "{lost:?} of {} are lost: {stats:?}", flushed.len());
}

#[test]
fn last_client_has_all_pages_after_kills() {
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
    assert_eq!(node.store().stats().unwrap().catalog.owner_epoch, 6);
}

#[test]
fn closing_owner_hands_over_without_failures() {
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
fn flush_reports_puts_of_a_dead_owner() {
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
    assert!(error.to_string().contains("repeat them"), "{error}");
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    node.store().flush().unwrap();
}

#[test]
fn flush_reports_deletes_that_died_with_the_owner() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let (store, keys) = (node.store(), keys(1, 4));
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    assert_eq!(store.delete(&scope(), &[&keys[0]]).unwrap(), 1);
    owner.kill();
    assert_eq!(store.flush().unwrap_err().kind(), ErrorKind::Miss);
    store.delete(&scope(), &[&keys[0]]).unwrap();
    store.flush().unwrap();
    assert_eq!(probe(store, 1, 4).unwrap(), 0);
}

/// Puts pages by `submit_put_copy`, which copies them before it returns. [`put`] does not copy.
fn put_copy(store: &Arc<Store>, name: u64, pages: usize) -> usize {
    let keys = keys(name, pages);
    let bytes: Vec<Vec<u8>> = keys.iter().map(|key| page(key)).collect();
    let slices: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
    let boxed = keys.iter().map(|key| key.as_slice().into()).collect();
    let (source, scope) = (BorrowedPages::new(&slices), Arc::new(scope()));
    let (terms, control) = (PutOptions::default(), Control::default());
    let ticket = store.submit_put_copy(scope, boxed, &source, terms, control).unwrap();
    ticket.wait(Some(Duration::from_secs(30))).unwrap().pages
}

/// A client puts 8 pages, this process puts the same pages by `put_again`, and the owner is killed.
/// The next flush of this process must report that the pages may be lost.
fn flush_after_deduplicated_put(put_again: impl Fn(&Arc<Store>) -> usize) {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let mut third = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(third.ask("put 1 8"), "8");
    assert_eq!(put_again(store), 8);
    owner.kill();
    let error = store.flush().unwrap_err();
    assert_eq!((node.role(), error.kind()), (Role::Owner, ErrorKind::Miss), "{error}");
    store.flush().unwrap();
    // This process now owns the store, so its flush makes durable the pages that its put
    // acknowledges.
    assert_eq!(third.ask("put 1 8"), "8");
    assert_eq!(put_again(store), 8);
    store.flush().unwrap();
    assert_eq!(get(store, 1, 8).unwrap(), 8);
    third.finish();
}

#[test]
fn flush_reports_lost_pages_that_put_found_present() {
    flush_after_deduplicated_put(|store| put(store, 1, 8).unwrap().pages);
}

#[test]
fn flush_reports_lost_pages_that_copied_put_found_present() {
    flush_after_deduplicated_put(|store| put_copy(store, 1, 8));
}

/// A source of the pages of sequence 1. Calls `then` before the bytes of a page are accessed.
struct Interrupted<F> {
    pages: OwnedPages,
    then: F,
}

// SAFETY: all fragments belong to `pages`.
unsafe impl<F: Fn() + Send + Sync> PageSource for Interrupted<F> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        (self.then)();
        self.pages.fragments(page, out);
    }
}

#[test]
fn put_waiting_across_takeover_acknowledges_nothing_lost() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let mut third = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(third.ask("put 1 8"), "8");
    // The put calls `then` when it copies its pages: after the probe, which the owner answers, and
    // before the reservation.
    let owner = Mutex::new(Some(owner));
    let then = || drop(owner.lock().unwrap().take().map(Helper::kill));
    let pages = OwnedPages::new(keys(1, 9).iter().map(|key| page(key)).collect());
    let source = Interrupted { pages, then };
    let keys = keys(1, 9).iter().map(|key| key.as_slice().into()).collect();
    let (terms, control, scope) = (PutOptions::default(), Control::default(), Arc::new(scope()));
    let ticket = store.submit_put_copy(scope, keys, &source, terms, control).unwrap();
    let outcome = ticket.wait(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(get(store, 1, 9).unwrap(), outcome.pages, "{outcome:?}");
    store.flush().unwrap();
    third.finish();
}

#[test]
fn flush_after_clean_close_succeeds() {
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
fn put_that_loses_its_owner_leaks_no_space() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let owner = Helper::opened(dir.path());
        let mut worker = Helper::opened(dir.path());
        let node = open(&options(dir.path())).unwrap();
        worker.tell(&format!("work {} 300 1000000", (round + 1) * 1_000_000));
        let reserved = || node.store().stats().unwrap().catalog.reserved_bytes;
        eventually("a reservation exists", || reserved() > 0);
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
fn dead_owners_socket_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    owner.kill();
    assert!(dir.path().join("owner.sock").exists());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Owner);
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
}

#[test]
fn takeover_in_a_moved_directory_fails() {
    let root = tempfile::tempdir().unwrap();
    let (dir, old) = (root.path().join("store"), root.path().join("old"));
    let owner = Helper::opened(&dir);
    let node = open(&options(&dir)).unwrap();
    std::fs::rename(&dir, &old).unwrap();
    owner.kill();
    let error = flush(&node).unwrap_err().to_string();
    assert!(error.contains("moved or replaced"), "{error}");
    assert!(
        !Path::new(&dir).exists(),
        "a directory was created in the place of the moved directory"
    );
}

#[test]
fn recreated_store_opens_beside_old_handles() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let (first, second) =
        (open(&options(dir.path())).unwrap(), open(&options(dir.path())).unwrap());
    assert_eq!(put(first.store(), 1, 4).unwrap().pages, 4);
    owner.kill();
    for entry in std::fs::read_dir(dir.path()).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }
            .unwrap();
    }
    let mut owner = Helper::opened(dir.path());
    assert_eq!(owner.ask("put 2 4"), "4");
    let error = probe(first.store(), 1, 4).unwrap_err();
    assert!(error.to_string().contains("another store"), "{error}");
    first.close().unwrap();
    // The old handle still exists. Calls of the old handle fail, and do not disturb the new store.
    let anew = open(&options(dir.path())).unwrap();
    assert_eq!((anew.role(), get(anew.store(), 2, 4).unwrap()), (Role::Client, 4));
    assert_eq!(probe(second.store(), 1, 4).unwrap_err().kind(), ErrorKind::Closed);
    second.close().unwrap();
    assert_eq!(get(anew.store(), 2, 4).unwrap(), 4);
    owner.finish();
    assert_eq!((get(anew.store(), 2, 4).unwrap(), anew.role()), (4, Role::Owner));
}

fn flush(node: &Node) -> ritornello_format::Result<()> {
    node.store().flush()
}
