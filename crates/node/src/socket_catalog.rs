//! The owner's catalog, called over the socket: each call is one request and one response, except
//! the release of a lease, which has no response.

use crate::client::Client;
use ritornello_format::{Result, check_keys};
use ritornello_store::{Catalog, Keys, Request, Response};
use std::sync::Arc;
use std::time::Instant;

/// A client, and the deadline of one call.
#[derive(Debug)]
pub(crate) struct SocketCatalog<'a> {
    client: &'a Arc<Client>,
    until: Instant,
}

impl<'a> SocketCatalog<'a> {
    /// Creates a catalog whose calls go through `client` and fail at `until`.
    pub(crate) fn new(client: &'a Arc<Client>, until: Instant) -> Self {
        Self { client, until }
    }
}

impl Catalog for SocketCatalog<'_> {
    fn call(&self, request: &Request<'_>) -> Result<Response> {
        if let Some(Keys::Listed(keys)) = request.keys() {
            check_keys(keys)?;
        }
        if let Request::Release { .. } = request {
            return self.client.notify(request, self.until).map(|()| Response::Done);
        }
        self.client.call(request, self.until)
    }
}
