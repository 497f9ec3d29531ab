//! The share of a store that one client's leases can keep from other clients.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Error, ErrorKind, Scope};
use ritornello_store::{ClientId, LeaseNumber, Store};
use ritornello_volume::staging::Staging;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 32 << 10;
/// Capacity of the store, in MiB.
const MIB_ALL: u64 = 24;
/// Pages of a sequence that one put stores.
const PAGES: usize = 10;
const TTL: Duration = Duration::from_secs(600);

fn client(open: &Open, number: u64) -> Arc<Store> {
    let catalog = Arc::new(open.core.catalog_for(ClientId(number), &format!("client {number}")));
    Store::new(catalog, open.core.segments(), Staging::new(8 * MIB as usize).unwrap())
}

/// Fills a store, and leases pages for one client until the store refuses a lease. Returns the
/// leases, each with the number of its sequence, and the refusal.
fn hoard(open: &Open, hoarder: &Store) -> (Vec<(u64, LeaseNumber)>, Error) {
    let scope = chained(PAGE);
    let names = 0..MIB_ALL * MIB / (PAGE * PAGES as u64);
    for name in names.clone() {
        assert_eq!(put(&open.store, &scope, &sequence(name, PAGES), None).pages, PAGES);
    }
    let mut leases = Vec::new();
    for name in names.rev() {
        match hoarder.lease(&scope, &refs(&sequence(name, PAGES)), TTL) {
            Ok(leased) if leased.pages == PAGES => leases.push((name, leased.lease)),
            Ok(leased) => hoarder.release(leased.lease).unwrap(),
            Err(error) => return (leases, error),
        }
    }
    panic!("{} sequences are leased, and no lease was refused", leases.len());
}

/// Puts a sequence ten pages at a time.
fn put_in_runs(store: &Store, scope: &Scope, keys: &[Vec<u8>]) {
    for at in (0..keys.len()).step_by(PAGES) {
        let before = at.checked_sub(1).map(|before| keys[before].as_slice());
        assert_eq!(put(store, scope, &keys[at..at + PAGES], before).pages, PAGES);
    }
}

/// A client may guess the lease numbers of another client.
#[test]
fn lease_is_released_by_its_client_only() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), MIB_ALL);
    let (holder, other, scope) = (client(&open, 1), client(&open, 2), chained(PAGE));
    let keys = sequence(1, PAGES);
    put(&open.store, &scope, &keys, None);
    let lease = holder.lease(&scope, &refs(&keys), TTL).unwrap().lease;
    let leases = || open.store.stats().unwrap().catalog.leases;
    for stranger in [&other, &open.store] {
        stranger.release(lease).unwrap();
        assert_eq!(leases(), 1, "another client must not release the lease");
    }
    assert_eq!(open.store.stats().unwrap().catalog.counters["foreign_releases"], 2);
    holder.release(lease).unwrap();
    assert_eq!(leases(), 0);
}

#[test]
fn hoarded_leases_leave_space_for_puts() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), MIB_ALL);
    let (hoarder, other, scope) = (client(&open, 1), client(&open, 2), chained(PAGE));
    let (leases, refused) = hoard(&open, &hoarder);
    assert_eq!(refused.kind(), ErrorKind::Retry);
    assert!(refused.to_string().contains("release unneeded leases"), "{refused}");
    let leased = leases.len() as u64 * PAGES as u64 * PAGE;
    assert!(leased > MIB_ALL * MIB / 3 && leased < MIB_ALL * MIB / 2, "{leased}");
    // The following puts have three times as many bytes as the store holds.
    for name in 1000..1000 + 3 * MIB_ALL * MIB / (PAGE * PAGES as u64) {
        let outcome = put(&other, &scope, &sequence(name, PAGES), None);
        assert_eq!((outcome.pages, outcome.reason), (PAGES, ""), "{name}");
        let leased = other.lease(&scope, &refs(&sequence(name, PAGES)), TTL).unwrap();
        assert_eq!(leased.pages, PAGES, "a second client must be able to lease pages");
        other.release(leased.lease).unwrap();
    }
    for (name, lease) in leases {
        assert_eq!(get(&hoarder, &scope, &sequence(name, PAGES)).pages, PAGES);
        hoarder.release(lease).unwrap();
    }
    assert_eq!(put(&hoarder, &scope, &sequence(1, PAGES), None).pages, PAGES);
    open.close();
}

#[test]
fn reads_and_puts_may_exceed_the_lease_share() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), MIB_ALL);
    let (hoarder, scope) = (client(&open, 1), chained(PAGE));
    let (leases, _) = hoard(&open, &hoarder);
    let keys = sequence(5000, 2 * PAGES);
    assert_eq!(put(&hoarder, &scope, &keys[..PAGES], None).pages, PAGES);
    // The put leases the pages that are present, and stores the pages after them.
    assert_eq!(put(&hoarder, &scope, &keys, None).pages, 2 * PAGES);
    assert_eq!(get(&hoarder, &scope, &keys).pages, 2 * PAGES);
    assert!(hoarder.lease(&scope, &refs(&keys), TTL).is_err());
    assert_eq!(hoarder.touch(&scope, &refs(&keys)).unwrap(), 2 * PAGES);
    // A client that has used its share may lease again the pages that it has leased. To lease other
    // pages it must first release leases.
    let again = hoarder.lease(&scope, &refs(&sequence(leases[0].0, PAGES)), TTL).unwrap();
    assert_eq!(again.pages, PAGES);
    for (_, lease) in &leases[leases.len() - 3..] {
        hoarder.release(*lease).unwrap();
    }
    assert_eq!(hoarder.lease(&scope, &refs(&keys), TTL).unwrap().pages, 2 * PAGES);
    open.close();
}

#[test]
fn oversized_prefix_is_leased_in_part() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), MIB_ALL);
    let (store, scope) = (client(&open, 1), chained(PAGE));
    // The sequence fills 17 of the store's 24 MiB, in runs of ten pages.
    let keys = sequence(1, 54 * PAGES);
    put_in_runs(&store, &scope, &keys);
    let stats = || open.store.stats().unwrap().catalog;
    let leased = store.lease(&scope, &refs(&keys), TTL).unwrap();
    assert!(leased.pages > 20 * PAGES && leased.pages < 40 * PAGES, "{leased:?}");
    assert_eq!((leased.pages % PAGES, stats().counters["leases_shortened"]), (0, 1));
    assert_eq!(get(&store, &scope, &keys).pages, keys.len());
    // The leased pages stay while other pages are evicted.
    for name in 1000..1100 {
        assert_eq!(put(&open.store, &scope, &sequence(name, PAGES), None).pages, PAGES);
    }
    assert!(get(&store, &scope, &keys).pages >= leased.pages);
    store.release(leased.lease).unwrap();
    assert_eq!(stats().leases, 0);
    open.close();
}

#[test]
fn shortened_lease_covers_the_same_pages_of_each_scope() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), MIB_ALL);
    let store = client(&open, 1);
    let scopes = [chained(PAGE), unchained(PAGE)];
    let keys = sequence(1, 30 * PAGES);
    scopes.iter().for_each(|scope| put_in_runs(&store, scope, &keys));
    let all: Vec<_> = scopes.iter().collect();
    let leased = store.lease_all(&all, &refs(&keys), TTL).unwrap();
    assert!(leased.pages > 10 * PAGES && leased.pages < 20 * PAGES, "{leased:?}");
    for name in 1000..1100 {
        assert_eq!(put(&open.store, &scopes[0], &sequence(name, PAGES), None).pages, PAGES);
    }
    for scope in &scopes {
        assert!(get(&store, scope, &keys).pages >= leased.pages, "a leased page is missing");
    }
    // Another client can lease the pages that the first client has leased, although the first
    // client has used its share.
    let other = client(&open, 2);
    assert_eq!(other.lease_all(&all, &refs(&keys[..PAGES]), TTL).unwrap().pages, PAGES);
    assert!(store.lease(&scopes[0], &refs(&sequence(1099, PAGES)), TTL).is_err());
    open.close();
}
