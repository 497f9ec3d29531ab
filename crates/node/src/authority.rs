//! What a server needs of the engine behind it.

use ritornello_store::{Catalog, ClientId, Engine};
use std::sync::Arc;

/// Who answers the clients: an [`Engine`], or something simpler in a test.
pub(crate) trait Authority: Send + Sync {
    /// A catalog for one client.
    fn session(&self, client: ClientId, name: &str) -> Arc<dyn Catalog>;
    /// The last connection of a client is gone.
    fn left(&self, client: ClientId);
}

impl Authority for Arc<Engine> {
    fn session(&self, client: ClientId, name: &str) -> Arc<dyn Catalog> {
        Arc::new(Engine::session(self, client, name))
    }

    fn left(&self, client: ClientId) {
        self.client_left(client);
    }
}
