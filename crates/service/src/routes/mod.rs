//! The routes, and the document that lists them.

mod body;
mod config;
mod decisions;
mod document;
mod explain;
mod flush;
mod health;
mod keys;
mod probe;
mod query;
mod scope_settings;
mod scopes;
mod scrub;
mod stats;

use crate::answer::{Shared, observe_all};
use crate::guard;
use crate::limits::BODY_BYTES_MAX;
use crate::metrics;
use crate::problem::Problem;
use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

#[derive(OpenApi)]
#[openapi(info(
    title = "Ritornello node service",
    description = "The state of the stores of a machine. Answers of several requests within a \
                   second may come from one observation of a store.",
))]
struct Document;

/// The routes, behind [`guard::guard`], which checks every request.
pub(crate) fn router(shared: &Arc<Shared>) -> Router {
    let (router, mut document) = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health::livez))
        .routes(routes!(health::readyz))
        .routes(routes!(metrics_text))
        .routes(routes!(openapi))
        .routes(routes!(stats::stats))
        .routes(routes!(scopes::scopes))
        .routes(routes!(config::config))
        .routes(routes!(decisions::decisions))
        .routes(routes!(probe::probe))
        .routes(routes!(explain::explain))
        .routes(routes!(flush::flush))
        .routes(routes!(scrub::begin, scrub::progress))
        .routes(routes!(scope_settings::change))
        .split_for_parts();
    document::complete(&mut document);
    let text = document.to_json().unwrap_or_default();
    // The cell is empty: the document is made once per service.
    let _ = shared.document.set(text);
    router
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(Arc::clone(shared), guard::guard))
        .with_state(Arc::clone(shared))
}

async fn no_route() -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "not_found",
        "there is no such route: /openapi.json lists all routes",
    )
}

async fn no_method() -> Problem {
    Problem::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid",
        "the route does not have this method: /openapi.json lists all routes",
    )
}

/// Metrics of all stores, in the text format of OpenMetrics
#[utoipa::path(
    get,
    path = "/metrics",
    responses((
        status = 200,
        body = String,
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8",
    )),
)]
async fn metrics_text(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let observed = observe_all(shared.observers.clone()).await;
    let text = metrics::encode(&observed)?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

/// This document
#[utoipa::path(
    get,
    path = "/openapi.json",
    responses((status = 200, body = Object, content_type = "application/json")),
)]
async fn openapi(State(shared): State<Arc<Shared>>) -> Response {
    let text = shared.document.get().cloned().unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}
