//! One request in, one response out: the owner's side of [`crate::socket_catalog`].

use crate::permissions::ClientPermissions;
use crate::protocol::RESERVE_TIMEOUT_MAX;
use ritornello_store::{Catalog, Request, Response};

/// Calls `catalog`, if `permissions` allow the request to a client. Returns `None` for requests
/// without a response.
pub(crate) fn answer(
    catalog: &dyn Catalog,
    permissions: &ClientPermissions,
    mut request: Request<'_>,
) -> Option<Response> {
    if let Request::Reserve { reserve_request, .. } = &mut request
        && reserve_request.timeout > RESERVE_TIMEOUT_MAX
    {
        reserve_request.to_mut().timeout = RESERVE_TIMEOUT_MAX;
    }
    let called = permissions.check(&request).and_then(|()| catalog.call(&request));
    let is_answered = !matches!(request, Request::Release { .. });
    is_answered.then(|| called.unwrap_or_else(|error| Response::Failed(error.into())))
}
