//! Checks of every request before its route, and headers of every response.

use crate::answer::Shared;
use crate::limits::REQUEST_TIMEOUT;
use crate::problem::Problem;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// The address at which a request arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalAddress(pub(crate) SocketAddr);

/// Headers of every response. No response is a page, so a browser may load nothing for it, show it
/// in no frame, guess no other type, and keep no copy.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Path that answers also beyond the rate: a probe of health must not fail because of other
/// requests.
const LIVENESS: &str = "/livez";

/// Checks a request, answers it within a deadline, and adds headers to the response.
pub(crate) async fn guard(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match check(&shared, &request) {
        Ok(()) => match timeout(REQUEST_TIMEOUT, next.run(request)).await {
            Ok(response) => response,
            Err(_) => Problem::retry(format!(
                "the request was not answered within {} s: send it faster, or try again",
                REQUEST_TIMEOUT.as_secs()
            ))
            .into_response(),
        },
        Err(problem) => problem.into_response(),
    };
    add_headers(response.headers_mut());
    response
}

fn check(shared: &Shared, request: &Request) -> Result<(), Problem> {
    let local = request.extensions().get::<LocalAddress>();
    let local = local.map_or(shared.address, |local| local.0);
    shared.hosts.check(request.headers(), request.uri(), local)?;
    if request.uri().path() != LIVENESS && !shared.rate.admits(Instant::now()) {
        return Err(Problem::new(
            StatusCode::TOO_MANY_REQUESTS,
            "retry",
            "too many requests: send fewer per second",
        ));
    }
    Ok(())
}

fn add_headers(headers: &mut HeaderMap) {
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
