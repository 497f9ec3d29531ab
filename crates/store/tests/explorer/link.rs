//! A client's connection to the owner: ends with the client, and is renewed for each owner.

use crate::watch::Watched;
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result, Scope, ScopeSettings, ScopeSlot};
use ritornello_store::{
    CapacityChange, Catalog, CatalogStats, Committed, KeyListing, LeaseNumber, Leased,
    LocalCatalog, Located, ReserveRequest, Reserved, ScopeListing, ScopeRef,
};
use std::time::Duration;

/// The catalog of one client process.
pub struct Link {
    client: Watched,
    owner: Mutex<LocalCatalog>,
}

impl Link {
    pub fn new(client: Watched, owner: LocalCatalog) -> Self {
        Self { client, owner: Mutex::new(owner) }
    }

    /// Connects to another owner.
    pub fn connect(&self, owner: LocalCatalog) {
        *self.owner.lock() = owner;
    }

    /// A dead client makes no calls.
    fn ask(&self) -> Result<LocalCatalog> {
        if self.client.is_dead() {
            return Err(Error::new(ErrorKind::Closed, "this client was killed"));
        }
        Ok(self.owner.lock().clone())
    }
}

impl Catalog for Link {
    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        self.ask()?.resolve(scope, create)
    }
    fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()> {
        self.ask()?.configure(scope, settings)
    }
    fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.ask()?.probe(scope, keys)
    }
    fn lease(&self, scopes: &[ScopeRef], keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        self.ask()?.lease(scopes, keys, ttl)
    }
    fn release(&self, lease: LeaseNumber) -> Result<()> {
        self.ask()?.release(lease)
    }
    fn begin_read(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Located> {
        self.ask()?.begin_read(scope, keys)
    }
    fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.ask()?.exists(scope, keys)
    }
    fn reserve(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        wanted: &ReserveRequest,
    ) -> Result<Reserved> {
        self.ask()?.reserve(scope, keys, parent, wanted)
    }
    fn commit(&self, reservation: u64, written: &[Option<u64>]) -> Result<Committed> {
        self.ask()?.commit(reservation, written)
    }
    fn abort(&self, reservation: u64) -> Result<()> {
        self.ask()?.abort(reservation)
    }
    fn report_damage(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()> {
        self.ask()?.report_damage(scope, key, generation, reason)
    }
    fn touch(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.ask()?.touch(scope, keys)
    }
    fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.ask()?.delete(scope, keys)
    }
    fn drop_scope(&self, scope: ScopeRef) -> Result<()> {
        self.ask()?.drop_scope(scope)
    }
    fn scopes(&self, from: ScopeSlot) -> Result<Vec<ScopeListing>> {
        self.ask()?.scopes(from)
    }
    fn keys(&self, scope: ScopeRef, after: u64, limit: u32) -> Result<KeyListing> {
        self.ask()?.keys(scope, after, limit)
    }
    fn change_capacity(&self, change: &CapacityChange) -> Result<()> {
        self.ask()?.change_capacity(change)
    }
    fn clear(&self) -> Result<()> {
        self.ask()?.clear()
    }
    fn flush(&self) -> Result<()> {
        self.ask()?.flush()
    }
    fn stats(&self) -> Result<CatalogStats> {
        self.ask()?.stats()
    }
}
