//! A client's connection to the owner. The connection ends when the client is killed, and moves to
//! each new owner.

use crate::recording_medium::RecordingMedium;
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_store::{Catalog, LocalCatalog, Request, Response};

pub struct ClientCatalog {
    client: RecordingMedium,
    owner: Mutex<LocalCatalog>,
}

impl ClientCatalog {
    pub fn new(client: RecordingMedium, owner: LocalCatalog) -> Self {
        Self { client, owner: Mutex::new(owner) }
    }

    pub fn connect(&self, owner: LocalCatalog) {
        *self.owner.lock() = owner;
    }

    /// Returns the owner's catalog, or the error `Closed` if the client was killed.
    fn owner(&self) -> Result<LocalCatalog> {
        if self.client.is_dead() {
            return Err(Error::new(ErrorKind::Closed, "this client was killed"));
        }
        Ok(self.owner.lock().clone())
    }
}

impl Catalog for ClientCatalog {
    fn call(&self, request: &Request<'_>) -> Result<Response> {
        self.owner()?.call(request)
    }
}
