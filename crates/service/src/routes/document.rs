//! The parts of the OpenAPI document that are equal for all routes: errors, and the token.

use crate::guard::HEALTH;
use crate::role::{DECISIONS, EXPLAIN};
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, ContentBuilder, OpenApi, Ref, ResponseBuilder};

/// The name of the document's security scheme for tokens.
const TOKEN: &str = "token";

/// Errors that any request may have: the status, and its description.
const ALL: [(&str, &str); 4] = [
    ("400", "the request is malformed"),
    ("408", "the request was not sent in time"),
    ("421", "the Host header names another service"),
    ("503", "a limit of time or calls is reached, or the store cannot answer now"),
];
/// Further errors of probes of health, which need no token and have no limit of their rate.
const OF_HEALTH: [(&str, &str); 1] = [("401", "the token is unknown")];
/// Further errors of every request besides probes of health.
const WITH_TOKEN: [(&str, &str); 2] =
    [("401", "there is no token, or an unknown token"), ("429", "there are too many requests")];
/// Further errors of requests that name a store or a scope.
const WITH_NAME: [(&str, &str); 1] = [("404", "the store or the scope does not exist")];
/// Further errors of requests with a body.
const WITH_BODY: [(&str, &str); 3] = [
    ("403", "the role of the token does not permit the request"),
    ("413", "the body is too long"),
    ("415", "the body is not JSON"),
];
/// Further errors of requests that need an open store or an owner: requests with a body, and
/// [`DECISIONS`].
const WITH_CALL: [(&str, &str); 2] = [
    (
        "409",
        "the store is not open in this process or has no owner, or the call is running already",
    ),
    ("500", "the store failed"),
];

/// Adds errors and the token to all operations.
pub(super) fn complete(document: &mut OpenApi) {
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    let components = document.components.take().unwrap_or_else(|| ComponentsBuilder::new().build());
    document.components =
        Some(ComponentsBuilder::from(components).security_scheme(TOKEN, scheme).build());
    for (path, item) in &mut document.paths.paths {
        let is_health = HEALTH.contains(&path.as_str());
        for operation in operations(item) {
            add(operation, &ALL);
            add(operation, if is_health { &OF_HEALTH } else { &WITH_TOKEN });
            // On a loopback address a request without a token may read. A probe of health needs
            // none on any address, and `/readyz` names the stores to a request with a token.
            let token = SecurityRequirement::new(TOKEN, [""; 0]);
            operation.security = Some(vec![token, SecurityRequirement::default()]);
            if path.starts_with("/v1/") {
                add(operation, &WITH_NAME);
            }
            if operation.request_body.is_some() {
                add(operation, &WITH_BODY);
            }
            if operation.request_body.is_some() || path == DECISIONS {
                add(operation, &WITH_CALL);
            }
            if operation.request_body.is_some() && path != EXPLAIN {
                operation.security = Some(vec![SecurityRequirement::new(TOKEN, [""; 0])]);
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.post, &mut item.put].into_iter().flatten()
}

/// Adds errors that the operation does not describe itself.
fn add(operation: &mut Operation, errors: &[(&str, &str)]) {
    for (status, description) in errors {
        let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
        let response = ResponseBuilder::new()
            .description(*description)
            .content("application/json", content)
            .build();
        let responses = &mut operation.responses.responses;
        responses.entry((*status).to_owned()).or_insert_with(|| response.into());
    }
}
