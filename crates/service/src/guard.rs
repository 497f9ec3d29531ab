//! Checks of every request before its route, and headers of every response.

use crate::answer::Shared;
use crate::limits::REQUEST_TIMEOUT;
use crate::problem::Problem;
use crate::rate::RateLimit;
use crate::reread::Reread;
use crate::role::Role;
use crate::tokens::Tokens;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// The service's address and port to which the connection of a request was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalAddress(pub(crate) SocketAddr);

/// The role of a request; `None` if the request gives no role. Only probes of health are answered
/// without a role.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller(pub(crate) Option<Role>);

/// Headers of every response. No response is a web page, so these headers forbid a browser to load
/// resources for it, frame it, guess its type, send a referrer, share it across origins, or cache
/// it.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Paths of probes of health. These paths answer without a token, because a kubelet has none, and
/// above the limit of requests per second, because other requests must not make a probe fail.
pub(crate) const HEALTH: [&str; 2] = ["/livez", "/readyz"];

/// Checks a request, answers it within a deadline, and adds headers to the response.
pub(crate) async fn guard(
    State(shared): State<Arc<Shared>>,
    mut request: Request,
    next: Next,
) -> Response {
    let mut response = match check(&shared, &request) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            match timeout(REQUEST_TIMEOUT, next.run(request)).await {
                Ok(response) => response,
                Err(_) => late().into_response(),
            }
        }
        Err(problem) => problem.into_response(),
    };
    add_headers(response.headers_mut());
    response
}

fn late() -> Problem {
    Problem::retry(format!(
        "the request was not answered within {} s: send its body faster, or retry when the \
         store's disk answers; work that the store has begun continues",
        REQUEST_TIMEOUT.as_secs()
    ))
}

fn check(shared: &Shared, request: &Request) -> Result<Caller, Problem> {
    let local = request.extensions().get::<LocalAddress>();
    let local = local.map_or(shared.address, |local| local.0);
    shared.hosts.check(request.headers(), request.uri(), local)?;
    let path = request.uri().path();
    let tokens = shared.tokens.as_ref().map(Reread::current);
    let authenticated = authenticate(shared, tokens.as_deref(), request.headers());
    // Requests without a known token share a limit, so they use up no limit of a token.
    let token_rate = authenticated.as_ref().ok().and_then(|sender| sender.token_rate);
    let rate = token_rate.unwrap_or(&shared.rate);
    if !HEALTH.contains(&path) && !rate.admits(Instant::now()) {
        return Err(Problem::new(
            StatusCode::TOO_MANY_REQUESTS,
            "retry",
            "too many requests: send fewer per second",
        ));
    }
    let Sender { role, .. } = authenticated?;
    let required = Role::required_by(request.method(), path);
    match role {
        Some(role) if role >= required => Ok(Caller(Some(role))),
        None if HEALTH.contains(&path) && required == Role::Read => Ok(Caller(None)),
        Some(role) if token_rate.is_some() => Err(denied(role, required)),
        _ if shared.tokens.is_none() => Err(unauthenticated(
            "the request needs a token and the service has none: start it with --tokens FILE",
        )),
        _ => Err(unauthenticated(&format!(
            "the request needs a token of the role {}: send `Authorization: Bearer TOKEN`",
            required.word()
        ))),
    }
}

/// The sender of a request, as its token identifies it.
struct Sender<'a> {
    /// The limit of the rate of requests with the request's token; `None` without a token.
    token_rate: Option<&'a RateLimit>,
    role: Option<Role>,
}

/// Returns the sender of a request: the role of its token, and the limit of the rate of requests
/// with this token. Without a token there is no such limit; the role is then `read` if the service
/// listens on a loopback address, otherwise none.
fn authenticate<'a>(
    shared: &Shared,
    tokens: Option<&'a Tokens>,
    headers: &HeaderMap,
) -> Result<Sender<'a>, Problem> {
    let mut given = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = given.next() else {
        let role = shared.address.ip().is_loopback().then_some(Role::Read);
        return Ok(Sender { token_rate: None, role });
    };
    let token = value.to_str().ok().and_then(bearer).filter(|_| given.next().is_none());
    let Some(token) = token else {
        return Err(unauthenticated("send one header `Authorization: Bearer TOKEN`"));
    };
    let found = tokens.and_then(|tokens| tokens.find(token));
    let sender = found.map(|(role, rate)| Sender { token_rate: Some(rate), role: Some(role) });
    sender.ok_or_else(|| unauthenticated("the service does not know this token"))
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

fn unauthenticated(message: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "denied", message)
}

fn denied(role: Role, required: Role) -> Problem {
    let message = format!(
        "the request needs the role {}, and its token gives the role {}: send another token",
        required.word(),
        role.word()
    );
    Problem::new(StatusCode::FORBIDDEN, "denied", message)
}

fn add_headers(headers: &mut HeaderMap) {
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
