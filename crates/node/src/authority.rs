//! What a server needs of the engine behind it.

use ritornello_store::{Catalog, ClientId, Engine};
use std::sync::Arc;

/// Who answers the clients: an [`Engine`], or something simpler in a test.
pub(crate) trait Authority: Send + Sync {
    /// Identity of the store.
    fn store(&self) -> [u8; 16];
    /// A catalog for one client.
    fn session(&self, client: ClientId, name: &str) -> Arc<dyn Catalog>;
    /// The last connection of a client is gone.
    fn left(&self, client: ClientId);
}

impl Authority for Arc<Engine> {
    fn store(&self) -> [u8; 16] {
        self.manifest().uuid
    }

    fn session(&self, client: ClientId, name: &str) -> Arc<dyn Catalog> {
        Arc::new(Engine::session(self, client, name))
    }

    fn left(&self, client: ClientId) {
        self.client_left(client);
    }
}
