//! A small store filled by several processes: which leases and puts of these processes keep space
//! from reuse. The tests need the index `run`, because the files of `lsm` do not fit a small store
//! full of small pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_node::{Node, open};
use std::sync::Arc;
use std::time::Duration;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    let millis = command.strip_prefix("lease-for ").unwrap().parse().unwrap();
    let keys = keys(1, 10);
    let leased = node.store().lease(&scope(), &refs(&keys), Duration::from_millis(millis));
    leased.unwrap().pages.to_string()
}

#[test]
fn expired_lease_of_a_stopped_client_frees_space() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    let catalog = || store.stats().unwrap().catalog;
    assert_eq!(put(store, 1, 10).unwrap().pages, 10);
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("lease-for 1500"), "10");
    client.stop();
    assert_eq!(store.delete(&scope(), &refs(&keys(1, 10))).unwrap(), 10);
    assert!(catalog().deferred_bytes > 0, "deleted pages with a lease must keep their space");
    eventually("the lease runs out", || catalog().leases == 0);
    assert_eq!((catalog().deferred_bytes, catalog().clients), (0, 1));
    // The expired lease holds no space: puts of twice the store's capacity succeed.
    for name in 2..2 + 2 * CAPACITY / (100 * PAGE) {
        assert_eq!(put(store, name, 100).unwrap().pages, 100);
    }
    client.signal(libc::SIGCONT);
    assert_eq!(client.ask("put 1 10"), "10");
    client.finish();
}

#[test]
fn full_lease_share_leaves_space_for_puts() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    let mut leases = Vec::new();
    let refused = loop {
        let name = leases.len() as u64;
        assert_eq!(put(store, name, 100).unwrap().pages, 100);
        let keys = keys(name, 100);
        match store.lease(&scope(), &refs(&keys), Duration::from_secs(600)) {
            Ok(leased) => leases.push(leased),
            Err(error) => break error,
        }
        assert!(name * 100 * PAGE < CAPACITY, "leases exceed the capacity");
    };
    assert!(refused.to_string().contains("release unneeded leases"), "{refused}");
    let held = leases.iter().map(|leased| leased.pages as u64 * PAGE).sum::<u64>();
    assert!(held > CAPACITY / 3 && held < CAPACITY / 2, "{held}");
    // The processes put and evict further pages while the leased pages stay.
    for name in 1000..1000 + 2 * CAPACITY / (100 * PAGE) {
        assert_eq!(put(store, name, 100).unwrap().pages, 100);
    }
    assert_eq!(owner.ask("put 5000 100"), "100");
    for (name, leased) in (0..).zip(&leases) {
        assert_eq!(get(store, name, 100).unwrap(), 100, "leased pages must be present");
        store.release(leased.lease).unwrap();
    }
    drop(node);
    owner.finish();
}
