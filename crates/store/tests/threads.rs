//! Many concurrent threads, with blocking calls and tickets, under eviction.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_store::PutOptions;
use ritornello_volume::page_memory::OwnedPages;
use ritornello_volume::transfer::Control;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn concurrent_threads_read_right_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 12);
    let scopes = [chained(32 << 10), unchained(50_000)];
    std::thread::scope(|threads| {
        for worker in 0..6u64 {
            let (store, scopes) = (&open.store, &scopes);
            threads.spawn(move || {
                for round in 0..60u64 {
                    let name = (worker * 31 + round * 7) % 40;
                    let scope = &scopes[(name % 2) as usize];
                    let keys = sequence(name, 1 + (round % 9) as usize);
                    match (worker + round) % 5 {
                        0 | 1 => drop(put(store, scope, &keys, None)),
                        2 => drop(get(store, scope, &keys)),
                        3 => {
                            let lease =
                                store.lease(scope, &refs(&keys), Duration::from_secs(9)).unwrap();
                            let got = get(store, scope, &keys[..lease.pages]);
                            assert!(got.pages == lease.pages || got.reason == "not_found");
                            store.release(lease.lease).unwrap();
                        }
                        _ if round % 3 == 0 => {
                            store.delete(scope, &refs(&keys[..1])).unwrap();
                        }
                        _ => store.flush().unwrap(),
                    }
                }
            });
        }
    });
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.leases, stats.reservations, stats.deferred_bytes), (0, 0, 0));
    let report = open.core.verify(false, &mut |_, _| {}).unwrap();
    assert!(report.findings.is_empty(), "{report:?}");
    open.close();
}

#[test]
fn concurrent_growth_serves_all_threads() {
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let open = open(dir.path(), 64);
        let scope = chained(128 << 10);
        std::thread::scope(|threads| {
            for name in 0..8 {
                let (store, scope) = (&open.store, &scope);
                threads.spawn(move || {
                    assert_eq!(put(store, scope, &sequence(name, 24), None).reason, "")
                });
            }
        });
        open.close();
    }
}

#[test]
fn tickets_finish_with_their_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 32);
    let scope = Arc::new(chained(64 << 10));
    let boxed =
        |keys: &[Vec<u8>]| keys.iter().map(|k| k.clone().into_boxed_slice()).collect::<Vec<_>>();
    let tickets: Vec<_> = (0..12)
        .map(|name| {
            let keys = sequence(name, 4);
            let pages = keys.iter().map(|key| page(&scope, key)).collect();
            let source = Arc::new(OwnedPages::new(pages));
            let control = Control::default();
            open.store
                .submit_put(
                    Arc::clone(&scope),
                    boxed(&keys),
                    source,
                    PutOptions::default(),
                    control,
                )
                .unwrap()
        })
        .collect();
    for ticket in &tickets {
        let outcome = ticket.wait(Some(Duration::from_secs(30))).unwrap();
        assert_eq!((outcome.pages, outcome.reason), (4, ""));
        assert!(ticket.done());
    }
    for name in 0..12 {
        assert_eq!(get(&open.store, &scope, &sequence(name, 4)).pages, 4);
    }
    open.close();
}

#[test]
fn copied_put_needs_no_source_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    let scope = Arc::new(chained(64 << 10));
    let keys = sequence(1, 300);
    let mut pages: Vec<Vec<u8>> = keys.iter().map(|key| page(&scope, key)).collect();
    let boxed = keys.iter().map(|k| k.clone().into_boxed_slice()).collect();
    let ticket = {
        let slices: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
        let source = ritornello_volume::page_memory::BorrowedPages::new(&slices);
        open.store
            .submit_put_copy(
                Arc::clone(&scope),
                boxed,
                &source,
                PutOptions::default(),
                Control::default(),
            )
            .unwrap()
    };
    pages.iter_mut().for_each(|page| page.fill(0xAA));
    let outcome = ticket.wait(Some(Duration::from_secs(30))).unwrap();
    // Staging holds 8 MiB, and 300 pages have nearly 19 MiB.
    assert!(outcome.pages >= 16 && outcome.pages < 300, "{}", outcome.pages);
    assert_eq!((outcome.reason, outcome.ok.len()), ("staging_full", 300));
    assert_eq!(get(&open.store, &scope, &keys).pages, outcome.pages);
    open.close();
}

#[test]
fn expired_ticket_leaks_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 32);
    let scope = Arc::new(chained(64 << 10));
    let late = Control { deadline: Some(std::time::Instant::now()), ..Control::default() };
    let keys = sequence(1, 4);
    let boxed: Vec<Box<[u8]>> = keys.iter().map(|k| k.clone().into_boxed_slice()).collect();
    let source = Arc::new(OwnedPages::new(keys.iter().map(|key| page(&scope, key)).collect()));
    let ticket = open
        .store
        .submit_put(Arc::clone(&scope), boxed, source, PutOptions::default(), late)
        .unwrap();
    let outcome = ticket.wait(Some(Duration::from_secs(30))).unwrap();
    assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    assert_eq!(open.store.stats().unwrap().catalog.reserved_bytes, 0);
    open.close();
}

/// A source that panics during a put, as a defective source of a caller may.
struct Broken;

// SAFETY: `Broken` never hands out memory.
unsafe impl ritornello_volume::page_memory::PageSource for Broken {
    fn len(&self) -> usize {
        4
    }
    fn fragments(&self, _: usize, _: &mut Vec<ritornello_volume::page_memory::Fragment>) {
        panic!("a broken source");
    }
}

#[test]
fn panic_in_a_put_ends_its_ticket_only() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 32);
    let scope = Arc::new(chained(64 << 10));
    for name in 0..8 {
        let boxed = sequence(name, 4).into_iter().map(Vec::into_boxed_slice).collect();
        let source = Arc::new(Broken);
        let ticket = open
            .store
            .submit_put(
                Arc::clone(&scope),
                boxed,
                source,
                PutOptions::default(),
                Control::default(),
            )
            .unwrap();
        let outcome = ticket.wait(Some(Duration::from_secs(30))).unwrap();
        assert_eq!((outcome.pages, outcome.reason), (0, "panic"));
    }
    assert_eq!(put(&open.store, &scope, &sequence(9, 4), None).pages, 4);
    let stats = open.store.stats().unwrap().catalog;
    assert_eq!((stats.reserved_bytes, stats.reservations), (0, 0));
    open.close();
}
