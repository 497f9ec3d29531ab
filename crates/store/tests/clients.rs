//! Guarantees of an owner to its clients, and effects of one client on another that the owner
//! prevents.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_medium::SimDisk;
use ritornello_store::{Catalog, ClientId, LocalCatalog, ReserveRequest, Reserved, StoreCore};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

fn reserve(catalog: &LocalCatalog, pages: usize) -> Result<Reserved> {
    let scope = catalog.resolve(&chained(4096), true)?.unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..ReserveRequest::default() };
    catalog.reserve(scope, &refs(&sequence(1, pages)), None, &request)
}

fn refused<T: std::fmt::Debug>(result: Result<T>) {
    let error: Error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("another client's"), "{error}");
}

#[test]
fn other_clients_cannot_end_a_reservation() {
    // The liveness check reports every client as alive, so a disconnected client's reservations
    // stay withheld.
    let disk = Arc::new(SimDisk::new(64 << 20));
    let core =
        StoreCore::open(disk, &options(Path::new("/store"), 24), Arc::new(|_| true)).unwrap();
    let catalog = |id, name| core.catalog_for(ClientId(id), name);
    let (one, two) = (catalog(1, "one"), catalog(2, "two"));
    let reserved = reserve(&one, 4).unwrap();
    refused(two.commit(reserved.id, &[Some(7)]));
    refused(two.abort(reserved.id));
    refused(core.catalog_for(ClientId::LOCAL, "").abort(reserved.id));
    assert_eq!(one.commit(reserved.id, &[Some(7)]).unwrap().stored, 4);
    // The abort of a reservation that was committed succeeds without effect.
    two.abort(reserved.id).unwrap();
    // A disconnected client's reservation is aborted by a client with its name, or by the owner.
    for name in ["three", "owner"] {
        let three = catalog(3, "three");
        let scope = three.resolve(&chained(4096), true).unwrap().unwrap();
        let request =
            ReserveRequest { timeout: Duration::from_secs(5), ..ReserveRequest::default() };
        let keys = sequence(9, 4);
        let reserved = three.reserve(scope, &refs(&keys), None, &request).unwrap();
        core.client_left(ClientId(3));
        refused(two.abort(reserved.id));
        assert!(two.commit(reserved.id, &[Some(7)]).is_err());
        assert!(core.stats().unwrap().reserved_bytes > 0);
        match name {
            "three" => catalog(4, "three").abort(reserved.id).unwrap(),
            _ => core.catalog_for(ClientId::LOCAL, "").abort(reserved.id).unwrap(),
        }
        assert_eq!(core.stats().unwrap().reserved_bytes, 0);
    }
    core.close().unwrap();
}

#[test]
fn hoarding_client_leaves_space_for_others() {
    let open =
        open_on(Arc::new(SimDisk::new(64 << 20)), &options(Path::new("/store"), 24)).unwrap();
    let hoarder = open.core.catalog_for(ClientId(1), "hoarder");
    let scope = hoarder.resolve(&chained(4096), true).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::from_secs(5), ..ReserveRequest::default() };
    let mut refused = None;
    for name in 0..1000 {
        let keys = sequence(name, 64);
        let reserved = hoarder.reserve(scope, &refs(&keys), None, &request).unwrap();
        refused = reserved.refused;
        if refused.is_some() {
            break;
        }
    }
    assert_eq!(refused.map(|refusal| refusal.word()), Some("no_space"));
    let stats = open.core.stats().unwrap();
    assert!(stats.reserved_bytes * 2 <= stats.capacity_bytes, "{}", stats.reserved_bytes);
    assert_eq!(try_put(&open.store, &chained(4096), &sequence(5000, 64), None).unwrap().pages, 64);
    open.close();
}

#[test]
fn hoarding_client_leaves_memory_for_others() {
    let open =
        open_on(Arc::new(SimDisk::new(512 << 20)), &options(Path::new("/store"), 256)).unwrap();
    let scope = unchained(4096);
    let stored = sequence(1, 8000);
    assert_eq!(try_put(&open.store, &scope, &stored, None).unwrap().pages, 8000);
    let hoarder = open.core.catalog_for(ClientId(1), "hoarder");
    let resolved = hoarder.resolve(&scope, true).unwrap().unwrap();
    let request = ReserveRequest::default();
    // Each reservation takes the space of one page, and the memory of 8001 hashes.
    let refused = (0..400).find_map(|name| {
        let new = sequence(1000 + name, 1);
        let keys = [refs(&stored), refs(&new)].concat();
        hoarder.reserve(resolved, &keys, None, &request).unwrap().refused
    });
    assert_eq!(refused.map(|refusal| refusal.word()), Some("no_space"));
    assert!(open.core.stats().unwrap().reserved_bytes < 16 << 20);
    assert_eq!(try_put(&open.store, &scope, &sequence(9, 64), None).unwrap().pages, 64);
    open.close();
}
