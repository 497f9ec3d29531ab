//! The statistics of stores.

use super::query::StoreQuery;
use crate::answer::{Named, Shared, observe_all, state_word};
use crate::problem::Problem;
use axum::extract::State;
use axum::response::Json;
use ritornello_node::Observed;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use utoipa::ToSchema;

/// The statistics of stores.
#[derive(Serialize, ToSchema)]
pub(super) struct Stats {
    stores: Vec<StoreStats>,
}

/// The statistics of a store.
#[derive(Serialize, ToSchema)]
struct StoreStats {
    /// Directory of the store.
    store: String,
    /// `owned`, `poisoned`, `unowned` or `unavailable`, as in `/readyz`.
    state: &'static str,
    /// The statistics, with the fields of `ritornello stat --json` of a store with an owner; null
    /// without an owner.
    #[schema(value_type = Option<Object>)]
    owner: Option<Value>,
    /// The contents of the store's files, with the fields of `ritornello stat --json` of a store
    /// without an owner; null with an owner.
    #[schema(value_type = Option<Object>)]
    files: Option<Value>,
    /// Why the store is unavailable.
    problem: Option<Problem>,
}

impl From<Named> for StoreStats {
    fn from(Named { store, observation }: Named) -> Self {
        let state = state_word(&observation);
        let (owner, files, problem) = match &observation.observed {
            Ok(Observed::Owned(stats)) => (serde_json::to_value(stats).ok(), None, None),
            Ok(Observed::Unowned(stored)) => (None, serde_json::to_value(stored).ok(), None),
            Err(problem) => (None, None, Some(problem.clone())),
        };
        Self { store, state, owner, files, problem }
    }
}

/// The statistics of stores
#[utoipa::path(
    get,
    path = "/v1/stats",
    params(StoreQuery),
    responses((status = 200, body = Stats)),
)]
pub(super) async fn stats(
    State(shared): State<Arc<Shared>>,
    query: StoreQuery,
) -> Result<Json<Stats>, Problem> {
    let observed = observe_all(shared.select(query.store.as_deref())?).await;
    Ok(Json(Stats { stores: observed.into_iter().map(StoreStats::from).collect() }))
}
