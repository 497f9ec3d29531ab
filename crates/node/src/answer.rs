//! One request in, one response out: the owner's side of [`crate::socket_catalog`].

use crate::permissions::ClientPermissions;
use crate::protocol::{RESERVE_TIMEOUT_MAX, Request, Response};
use ritornello_format::Result;
use ritornello_store::Catalog;

/// Calls `catalog` as `request` says, if `permissions` allow it to a client. Returns `None` for
/// requests without a response.
pub(crate) fn answer(
    catalog: &dyn Catalog,
    permissions: &ClientPermissions,
    request: Request<'_>,
) -> Option<Response> {
    let is_answered = !matches!(request, Request::Release { .. });
    let permitted = permissions.check(&request).and_then(|()| ask(catalog, request));
    let response = permitted.unwrap_or_else(|error| Response::Failed(error.into()));
    is_answered.then_some(response)
}

fn ask(catalog: &dyn Catalog, request: Request<'_>) -> Result<Response> {
    let done = |()| Response::Done;
    match request {
        Request::Resolve { scope, create } => catalog.resolve(&scope, create).map(Response::Scope),
        Request::Probe { scope, keys } => catalog.probe(scope, &keys.split()?).map(Response::Count),
        Request::Lease { scopes, keys, ttl } => {
            catalog.lease(&scopes, &keys.split()?, ttl).map(Response::Leased)
        }
        Request::Release { lease } => catalog.release(lease).map(done),
        Request::BeginRead { scope, keys } => {
            catalog.begin_read(scope, &keys.split()?).map(Response::Located)
        }
        Request::Exists { scope, keys } => {
            catalog.exists(scope, &keys.split()?).map(Response::Exists)
        }
        Request::Reserve { scope, keys, parent, reserve_request } => {
            let mut reserve_request = reserve_request.into_owned();
            reserve_request.timeout = reserve_request.timeout.min(RESERVE_TIMEOUT_MAX);
            catalog.reserve(scope, &keys.split()?, parent, &reserve_request).map(Response::Reserved)
        }
        Request::Commit { reservation, written } => {
            catalog.commit(reservation, &written).map(Response::Committed)
        }
        Request::Abort { reservation } => catalog.abort(reservation).map(done),
        Request::ReportCorruption { scope, key, generation, reason } => {
            catalog.report_damage(scope, key, generation, reason).map(done)
        }
        Request::Touch { scope, keys } => catalog.touch(scope, &keys.split()?).map(Response::Count),
        Request::Delete { scope, keys } => {
            catalog.delete(scope, &keys.split()?).map(Response::Count)
        }
        Request::DropScope { scope } => catalog.drop_scope(scope).map(done),
        Request::Configure { scope, settings } => catalog.configure(scope, &settings).map(done),
        Request::Scopes { from } => catalog.scopes(from).map(Response::Scopes),
        Request::Keys { scope, after, limit } => {
            catalog.keys(scope, after, limit).map(Response::Keys)
        }
        Request::ChangeCapacity { change } => catalog.change_capacity(&change).map(done),
        Request::Clear => catalog.clear().map(done),
        Request::Flush => catalog.flush().map(done),
        Request::Stats => catalog.stats().map(Box::new).map(Response::Stats),
    }
}
