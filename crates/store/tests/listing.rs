//! Lookups with gaps between the stored pages, lists of scopes and of keys, and several tickets on
//! one completion queue.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::Scope;
use ritornello_store::{CompletionQueue, Options, PutOptions};
use ritornello_volume::page_memory::OwnedPages;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 8192;

#[test]
fn unchained_pages_are_found_after_a_gap() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (unchained(PAGE), sequence(1, 9));
    put(&open.store, &scope, &keys[1..3], None);
    put(&open.store, &scope, &keys[4..8], None);
    open.store.delete(&scope, &refs(&keys[5..6])).unwrap();
    let present = [false, true, true, false, true, false, true, true, false];
    let got = get(&open.store, &scope, &keys);
    assert_eq!((got.pages, got.ok.as_slice(), got.reason), (0, present.as_slice(), "not_found"));
    assert_eq!(got.bytes, 5 * PAGE);
    let reversed: Vec<Vec<u8>> = keys.iter().rev().cloned().collect();
    let got = get(&open.store, &scope, &reversed);
    assert!(got.ok.iter().eq(present.iter().rev()));
    assert_eq!(open.store.probe(&scope, &refs(&keys[1..])).unwrap(), 2);
    open.close();
}

#[test]
fn chained_prefix_ends_at_the_first_gap() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (chained(PAGE), sequence(1, 6));
    put(&open.store, &scope, &keys[..2], None);
    put(&open.store, &scope, &keys[4..], None);
    let got = get(&open.store, &scope, &keys);
    assert_eq!((got.pages, got.bytes), (2, 2 * PAGE));
    assert_eq!(got.ok, [true, true, false, false, false, false]);
    open.close();
}

#[test]
fn unchained_lease_covers_all_present_pages() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, filler, keys) = (unchained(PAGE), unchained(256 << 10), sequence(1, 5));
    let filler = Scope { part: 1, ..filler };
    put(&open.store, &scope, &keys[..1], None);
    put(&open.store, &scope, &keys[3..], None);
    let leased = open.store.lease(&scope, &refs(&keys), Duration::from_secs(60)).unwrap();
    assert_eq!(leased.pages, 1, "a lease must count only the pages before a missing page");
    for name in 10..40 {
        try_put(&open.store, &filler, &sequence(name, 6), None).unwrap();
    }
    let present = open.store.exists(&scope, &refs(&keys)).unwrap();
    assert_eq!(present, [true, false, false, true, true]);
    open.store.release(leased.lease).unwrap();
    open.close();
}

#[test]
fn scopes_and_keys_are_listed_after_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (unchained(PAGE), chained(PAGE));
    let keys = sequence(1, 20);
    {
        let open = open(dir.path(), 16);
        for run in keys.chunks(7) {
            put(&open.store, &one, run, None);
        }
        put(&open.store, &other, &sequence(2, 3), None);
        open.store.delete(&one, &refs(&keys[3..5])).unwrap();
        open.store.flush().unwrap();
        open.close();
    }
    let open = open_on(Arc::new(ritornello_medium::Host), &Options::new(dir.path())).unwrap();
    let listed: Vec<(Scope, u64)> = open
        .store
        .scopes()
        .unwrap()
        .into_iter()
        .map(|listed| (listed.scope, listed.pages))
        .collect();
    assert_eq!(listed, [(one.clone(), 18), (other.clone(), 3)]);
    for limit in [1, 5, 12, 1000] {
        let (mut seen, mut after) = (Vec::new(), 0);
        loop {
            let listed = open.store.keys(&one, after, limit).unwrap();
            assert!(listed.keys.len() as u32 >= limit || listed.last == 0);
            seen.extend(listed.keys);
            after = listed.last;
            if after == 0 {
                break;
            }
        }
        let left: Vec<Vec<u8>> = [&keys[..3], &keys[5..]].concat();
        assert_eq!(seen, left, "{limit}");
    }
    assert!(open.store.keys(&Scope::opaque("unknown", PAGE, false), 0, 9).unwrap().keys.is_empty());
    open.close();
}

#[test]
fn many_scopes_are_listed_in_batches() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    let scopes: Vec<Scope> = (0..300).map(|part| Scope { part, ..unchained(512) }).collect();
    for scope in &scopes {
        put(&open.store, scope, &sequence(1, 1), None);
    }
    let listed = open.store.scopes().unwrap();
    assert!(listed.iter().map(|listed| &listed.scope).eq(&scopes));
    assert!(listed.windows(2).all(|pair| pair[0].slot < pair[1].slot));
    for scope in [&scopes[0], &scopes[299]] {
        let found = open.store.find_scope(|found| found.id() == scope.id()).unwrap();
        assert_eq!(found.as_ref(), Some(scope));
    }
    assert_eq!(open.store.find_scope(|_| false).unwrap(), None);
    open.close();
}

#[test]
fn completion_queue_names_every_ticket_once() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, queue) = (unchained(PAGE), CompletionQueue::new().unwrap());
    let ticket = |name: u64| {
        let keys = sequence(name, 2);
        let source = Arc::new(OwnedPages::new(keys.iter().map(|key| page(&scope, key)).collect()));
        let keys = keys.into_iter().map(Vec::into_boxed_slice).collect();
        let scope = Arc::new(scope.clone());
        let (terms, control) = (PutOptions::default(), Control::default());
        open.store.submit_put(scope, keys, source, terms, control).unwrap()
    };
    let tickets: Vec<_> = (0..10).map(ticket).collect();
    for (name, ticket) in tickets.iter().enumerate() {
        ticket.notify(&queue, name as u64);
    }
    for ticket in &tickets {
        assert_eq!(ticket.wait(None).unwrap().pages, 2);
    }
    let mut completed = queue.take();
    // A ticket sets its outcome before it pushes its name, so names may arrive after the last
    // `wait` has returned.
    while completed.len() < tickets.len() {
        std::thread::yield_now();
        completed.extend(queue.take());
    }
    completed.sort_unstable();
    assert!(completed.into_iter().eq(0..10));
    // `notify` on a finished ticket pushes the name immediately.
    tickets[3].notify(&queue, 77);
    assert_eq!(queue.take(), [77]);
    open.close();
}
