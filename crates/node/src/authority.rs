//! What a server needs of the engine behind it.

use ritornello_format::Result;
use ritornello_store::{Catalog, ClientId, StoreCore};
use std::sync::Arc;

/// Who answers the clients: an [`StoreCore`], or something simpler in a test.
pub(crate) trait Authority: Send + Sync {
    /// Whether clients are let in.
    ///
    /// # Errors
    /// `Miss`, with what failed, while the store is reopened.
    fn admit(&self) -> Result<()> {
        Ok(())
    }
    /// A catalog for one client.
    ///
    /// # Errors
    /// As of [`Authority::admit`].
    fn catalog_for(&self, client: ClientId, name: &str) -> Result<Arc<dyn Catalog>>;
    /// The last connection of a client is gone.
    fn client_disconnected(&self, client: ClientId);
}

impl Authority for Arc<StoreCore> {
    fn catalog_for(&self, client: ClientId, name: &str) -> Result<Arc<dyn Catalog>> {
        Ok(Arc::new(StoreCore::catalog_for(self, client, name)))
    }

    fn client_disconnected(&self, client: ClientId) {
        StoreCore::client_left(self, client);
    }
}
