//! The owner's catalog, called over the socket: each call is one request and one response, except
//! the release of a lease, which has no response.

use crate::client::Client;
use crate::keys::Flattened;
use crate::protocol::{Request, Response};
use ritornello_format::{Error, Result, Scope, ScopeSettings, ScopeSlot};
use ritornello_store::{
    CapacityChange, Catalog, CatalogStats, Committed, KeyListing, LeaseNumber, Leased, Located,
    ReserveRequest, Reserved, ScopeListing, ScopeRef,
};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A client, and the deadline of one call.
#[derive(Debug)]
pub(crate) struct SocketCatalog<'a> {
    client: &'a Arc<Client>,
    until: Instant,
}

/// Extracts one kind of answer from a response.
macro_rules! expect {
    ($response:expr, $pattern:pat => $answer:expr) => {
        match $response {
            $pattern => Ok($answer),
            _ => Err(out_of_place()),
        }
    };
}

impl<'a> SocketCatalog<'a> {
    /// Creates a catalog whose calls go through `client` and fail at `until`.
    pub(crate) fn new(client: &'a Arc<Client>, until: Instant) -> Self {
        Self { client, until }
    }

    fn call(&self, request: &Request<'_>) -> Result<Response> {
        self.client.call(request, self.until)
    }

    fn send_for_done(&self, request: &Request<'_>) -> Result<()> {
        expect!(self.call(request)?, Response::Done => ())
    }

    fn count(&self, request: &Request<'_>) -> Result<usize> {
        expect!(self.call(request)?, Response::Count(count) => count)
    }
}

fn out_of_place() -> Error {
    Error::fatal("the store's owner answered another request: report this")
}

impl Catalog for SocketCatalog<'_> {
    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        let request = Request::Resolve { scope: Cow::Borrowed(scope), create };
        expect!(self.call(&request)?, Response::Scope(scope) => scope)
    }

    fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let keys = Flattened::new(keys)?;
        self.count(&Request::Probe { scope, keys: keys.as_keys() })
    }

    fn lease(&self, scopes: &[ScopeRef], keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        let keys = Flattened::new(keys)?;
        let request = Request::Lease { scopes: Cow::Borrowed(scopes), keys: keys.as_keys(), ttl };
        expect!(self.call(&request)?, Response::Leased(leased) => leased)
    }

    fn release(&self, lease: LeaseNumber) -> Result<()> {
        self.client.notify(&Request::Release { lease }, self.until)
    }

    fn begin_read(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Located> {
        let keys = Flattened::new(keys)?;
        let request = Request::BeginRead { scope, keys: keys.as_keys() };
        expect!(self.call(&request)?, Response::Located(located) => located)
    }

    fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>> {
        let asked = keys.len();
        let keys = Flattened::new(keys)?;
        let request = Request::Exists { scope, keys: keys.as_keys() };
        match self.call(&request)? {
            Response::Exists(there) if there.len() == asked => Ok(there),
            _ => Err(out_of_place()),
        }
    }

    fn reserve(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        reserve_request: &ReserveRequest,
    ) -> Result<Reserved> {
        let keys = Flattened::new(keys)?;
        let reserve_request = Cow::Borrowed(reserve_request);
        let request = Request::Reserve { scope, keys: keys.as_keys(), parent, reserve_request };
        expect!(self.call(&request)?, Response::Reserved(reserved) => reserved)
    }

    fn commit(&self, reservation: u64, written: &[Option<u64>]) -> Result<Committed> {
        let request = Request::Commit { reservation, written: Cow::Borrowed(written) };
        expect!(self.call(&request)?, Response::Committed(committed) => committed)
    }

    fn abort(&self, reservation: u64) -> Result<()> {
        self.send_for_done(&Request::Abort { reservation })
    }

    fn report_damage(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()> {
        self.send_for_done(&Request::ReportCorruption { scope, key, generation, reason })
    }

    fn touch(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let keys = Flattened::new(keys)?;
        self.count(&Request::Touch { scope, keys: keys.as_keys() })
    }

    fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let keys = Flattened::new(keys)?;
        self.count(&Request::Delete { scope, keys: keys.as_keys() })
    }

    fn drop_scope(&self, scope: ScopeRef) -> Result<()> {
        self.send_for_done(&Request::DropScope { scope })
    }

    fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()> {
        self.send_for_done(&Request::Configure { scope, settings: *settings })
    }

    fn scopes(&self, from: ScopeSlot) -> Result<Vec<ScopeListing>> {
        expect!(self.call(&Request::Scopes { from })?, Response::Scopes(scopes) => scopes)
    }

    fn keys(&self, scope: ScopeRef, after: u64, limit: u32) -> Result<KeyListing> {
        expect!(self.call(&Request::Keys { scope, after, limit })?, Response::Keys(keys) => keys)
    }

    fn change_capacity(&self, change: &CapacityChange) -> Result<()> {
        self.send_for_done(&Request::ChangeCapacity { change: Cow::Borrowed(change) })
    }

    fn clear(&self) -> Result<()> {
        self.send_for_done(&Request::Clear)
    }

    fn flush(&self) -> Result<()> {
        self.send_for_done(&Request::Flush)
    }

    fn stats(&self) -> Result<CatalogStats> {
        expect!(self.call(&Request::Stats)?, Response::Stats(stats) => *stats)
    }
}
