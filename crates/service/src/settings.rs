//! Settings of the service that its caller chooses.

use crate::certificate::Certificate;
use crate::host::is_host;
use crate::limits::STORES_MAX;
use crate::store_access::StoreAccess;
use crate::tokens::Tokens;
use ritornello_format::{Error, Result};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

/// Settings of a service.
#[derive(Debug)]
pub struct Settings {
    /// Address to listen on. Port 0 lets the kernel choose a port.
    pub address: SocketAddr,
    /// Host names and addresses, without port, under which clients may reach the service besides
    /// `localhost` and the address to which they connect.
    pub host_names: Vec<String>,
    /// Tokens, and the roles that they give; `None` permits reading only.
    pub tokens: Option<Tokens>,
    /// Encrypts all connections with TLS; `None` leaves them unencrypted.
    pub certificate: Option<Certificate>,
    /// The stores to answer about.
    pub stores: Vec<Arc<StoreAccess>>,
}

impl Settings {
    /// Checks the settings.
    ///
    /// # Errors
    /// `Invalid` if there are no stores, too many, or two with the same directory, if a host name
    /// is malformed, or if other machines can reach `address` and there are no tokens.
    pub(crate) fn check(&self) -> Result<()> {
        if self.stores.is_empty() {
            return Err(Error::invalid("the service has no stores: name at least one directory"));
        }
        if self.stores.len() > STORES_MAX {
            return Err(Error::invalid(
                "too many stores for one service: start a second service for the rest",
            )
            .with("stores", self.stores.len())
            .with("max", STORES_MAX));
        }
        let mut names = BTreeSet::new();
        for store in &self.stores {
            if !names.insert(store.name()) {
                return Err(Error::invalid("a directory is named twice: name it once")
                    .with("dir", store.name()));
            }
        }
        if let Some(name) = self.host_names.iter().find(|name| !is_host(name)) {
            return Err(Error::invalid(
                "a host name is a name or an address: leave out the scheme and the port",
            )
            .with("name", name));
        }
        if !self.address.ip().is_loopback() && self.tokens.is_none() {
            return Err(Error::invalid(
                "other machines can reach this address: name a token file with --tokens, or listen \
                 on a loopback address, such as 127.0.0.1:7007",
            )
            .with("address", self.address));
        }
        Ok(())
    }
}
