//! Sends messages of the socket to a small store, without a socket.

use ritornello_format::Scope;
use ritornello_medium::SimDisk;
use ritornello_node::fuzzing;
use ritornello_store::{Catalog, ClientId, LocalCatalog, Options, ScopeRef, StoreCore};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Number of messages after which a new store replaces the store, in which scopes and leases have
/// accumulated.
const REQUESTS_MAX: u32 = 2000;

thread_local! {
    static STORE: RefCell<Option<(u32, LocalCatalog, ScopeRef)>> = const { RefCell::new(None) };
}

/// Opens a small store in memory. Returns its catalog for a client in a different process, and its
/// only scope.
fn open() -> (LocalCatalog, ScopeRef) {
    let options = Options {
        capacity: Some(8 * MIB),
        segment_bytes: Some(MIB),
        background_threads: false,
        ..Options::new(Path::new("/store"))
    };
    let disk = Arc::new(SimDisk::new(64 * MIB));
    let engine = StoreCore::open(disk, &options, Arc::new(|_| true)).unwrap();
    let catalog = engine.catalog_for(ClientId(1), "0123456789abcdef");
    let known = catalog.resolve(&scope(), true).unwrap().unwrap();
    (catalog, known)
}

fn scope() -> Scope {
    Scope::opaque("fuzz", 70_000, true)
}

pub fn messages() -> Vec<Vec<u8>> {
    fuzzing::messages(&scope(), open().1)
}

pub fn requests() -> Vec<Vec<u8>> {
    messages().into_iter().filter(|message| send(message)).collect()
}

pub fn send(message: &[u8]) -> bool {
    STORE.with_borrow_mut(|store| {
        let (sent, catalog, known) = store.get_or_insert_with(|| {
            let (catalog, known) = open();
            (0, catalog, known)
        });
        let is_request = fuzzing::ask(catalog, message);
        *sent += 1;
        // Replace a store that has lost its scope, because it would refuse every request that names
        // the scope.
        if *sent == REQUESTS_MAX || catalog.probe(*known, &[]).is_err() {
            *store = None;
        }
        is_request
    })
}
