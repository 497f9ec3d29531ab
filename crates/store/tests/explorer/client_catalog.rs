//! A client's connection to the owner: it ends with the client, and is renewed for each owner.

use crate::recording_medium::RecordingMedium;
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result, Scope, ScopeSettings, ScopeSlot};
use ritornello_store::{
    CapacityChange, Catalog, CatalogStats, Committed, KeyListing, LeaseNumber, Leased,
    LocalCatalog, Located, ReserveRequest, Reserved, ScopeListing, ScopeRef,
};
use std::time::Duration;

/// The catalog of one client process.
pub struct ClientCatalog {
    client: RecordingMedium,
    owner: Mutex<LocalCatalog>,
}

impl ClientCatalog {
    pub fn new(client: RecordingMedium, owner: LocalCatalog) -> Self {
        Self { client, owner: Mutex::new(owner) }
    }

    /// Connects to the next owner.
    pub fn connect(&self, owner: LocalCatalog) {
        *self.owner.lock() = owner;
    }

    /// Returns the owner's catalog; `Closed` if the client was killed.
    fn owner(&self) -> Result<LocalCatalog> {
        if self.client.is_dead() {
            return Err(Error::new(ErrorKind::Closed, "this client was killed"));
        }
        Ok(self.owner.lock().clone())
    }
}

impl Catalog for ClientCatalog {
    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        self.owner()?.resolve(scope, create)
    }
    fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()> {
        self.owner()?.configure(scope, settings)
    }
    fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.owner()?.probe(scope, keys)
    }
    fn lease(&self, scopes: &[ScopeRef], keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        self.owner()?.lease(scopes, keys, ttl)
    }
    fn release(&self, lease: LeaseNumber) -> Result<()> {
        self.owner()?.release(lease)
    }
    fn begin_read(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Located> {
        self.owner()?.begin_read(scope, keys)
    }
    fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.owner()?.exists(scope, keys)
    }
    fn reserve(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        request: &ReserveRequest,
    ) -> Result<Reserved> {
        self.owner()?.reserve(scope, keys, parent, request)
    }
    fn commit(&self, reservation: u64, written: &[Option<u64>]) -> Result<Committed> {
        self.owner()?.commit(reservation, written)
    }
    fn abort(&self, reservation: u64) -> Result<()> {
        self.owner()?.abort(reservation)
    }
    fn report_damage(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()> {
        self.owner()?.report_damage(scope, key, generation, reason)
    }
    fn touch(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.owner()?.touch(scope, keys)
    }
    fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.owner()?.delete(scope, keys)
    }
    fn drop_scope(&self, scope: ScopeRef) -> Result<()> {
        self.owner()?.drop_scope(scope)
    }
    fn scopes(&self, from: ScopeSlot) -> Result<Vec<ScopeListing>> {
        self.owner()?.scopes(from)
    }
    fn keys(&self, scope: ScopeRef, after: u64, limit: u32) -> Result<KeyListing> {
        self.owner()?.keys(scope, after, limit)
    }
    fn change_capacity(&self, change: &CapacityChange) -> Result<()> {
        self.owner()?.change_capacity(change)
    }
    fn clear(&self) -> Result<()> {
        self.owner()?.clear()
    }
    fn flush(&self) -> Result<()> {
        self.owner()?.flush()
    }
    fn stats(&self) -> Result<CatalogStats> {
        self.owner()?.stats()
    }
}
