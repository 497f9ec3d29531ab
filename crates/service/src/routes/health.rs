//! Probes of health.

use crate::answer::{Shared, observe_all, state_word};
use crate::guard::Caller;
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// Whether the process answers
#[utoipa::path(
    get,
    path = "/livez",
    responses((status = 200, body = String, content_type = "text/plain")),
)]
pub(super) async fn livez() -> &'static str {
    "ok\n"
}

/// The health of the stores.
#[derive(Serialize, ToSchema)]
pub(super) struct Readiness {
    /// Whether every store can be used.
    ready: bool,
    /// The stores; empty if the request gives no role.
    stores: Vec<StoreHealth>,
}

/// The health of a store.
#[derive(Serialize, ToSchema)]
struct StoreHealth {
    /// Directory of the store.
    store: String,
    /// `owned`; `unowned`: no process owns the store, and as far as its files tell, the next process
    /// can open it; `poisoned`: the owner reopens the store after a failed write or sync;
    /// `unavailable`.
    state: &'static str,
    /// Why the store is poisoned or unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Whether every store can be used
///
/// A store that no process owns can be used: the next process that opens it becomes its owner.
#[utoipa::path(
    get,
    path = "/readyz",
    responses((status = 200, body = Readiness), (status = 503, body = Readiness)),
)]
pub(super) async fn readyz(
    State(shared): State<Arc<Shared>>,
    Extension(Caller(role)): Extension<Caller>,
) -> (StatusCode, Json<Readiness>) {
    let observed = observe_all(shared.observers.clone()).await;
    let stores: Vec<_> = observed
        .into_iter()
        .map(|named| {
            let observation = &named.observation;
            let reason = match &observation.observed {
                Ok(ritornello_node::Observed::Owned(stats)) => stats.poisoned.clone(),
                Ok(ritornello_node::Observed::Unowned(_)) => None,
                Err(problem) => Some(problem.message().to_owned()),
            };
            StoreHealth { state: state_word(observation), store: named.store, reason }
        })
        .collect();
    let ready = stores.len() == shared.observers.len()
        && stores.iter().all(|store| matches!(store.state, "owned" | "unowned"));
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let stores = if role.is_some() { stores } else { Vec::new() };
    (status, Json(Readiness { ready, stores }))
}
