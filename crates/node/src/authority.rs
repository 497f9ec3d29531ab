//! The interface between the server of a socket and the core that answers its clients.

use ritornello_format::Result;
use ritornello_store::{Catalog, CatalogStats, ClientId, StoreCore};
use std::sync::Arc;

/// Answers clients: a [`StoreCore`], the refusal of all clients while the store is reopened
/// ([`crate::reopening`]), or a stub in a test.
pub(crate) trait Authority: Send + Sync {
    /// Checks that clients are admitted. By default they are.
    ///
    /// # Errors
    /// The refusal of all clients; see [`crate::reopening`].
    fn admit(&self) -> Result<()> {
        Ok(())
    }
    /// Returns a catalog for one client.
    ///
    /// # Errors
    /// Any error of [`Authority::admit`].
    fn catalog_for(&self, client: ClientId, name: &str) -> Result<Arc<dyn Catalog>>;
    /// Returns the statistics that an observer asks for.
    ///
    /// # Errors
    /// None at present.
    fn stats(&self) -> Result<CatalogStats>;
    /// Called when the last connection of a client is closed.
    fn client_disconnected(&self, client: ClientId);
}

impl Authority for Arc<StoreCore> {
    fn catalog_for(&self, client: ClientId, name: &str) -> Result<Arc<dyn Catalog>> {
        Ok(Arc::new(StoreCore::catalog_for(self, client, name)))
    }

    fn stats(&self) -> Result<CatalogStats> {
        StoreCore::stats(self)
    }

    fn client_disconnected(&self, client: ClientId) {
        StoreCore::client_left(self, client);
    }
}
