//! `/v1/decisions`: decisions of engines about the pages of requests.

use super::query::DecisionsQuery;
use crate::answer::Shared;
use crate::limits::{DECISIONS_DEFAULT, QUESTION_TIMEOUT};
use crate::problem::Problem;
use crate::role::DECISIONS;
use crate::store_access::Source;
use axum::extract::State;
use axum::response::Json;
use ritornello_store::{Decision, DecisionListing};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// Decisions that the owner remembers.
#[derive(Serialize, ToSchema)]
pub(super) struct Decisions {
    /// The decision that the owner received last is first.
    decisions: Vec<DecisionEntry>,
    /// Seconds since the owner opened the store, or since it received the newest decision that it
    /// has forgotten.
    remembered_seconds: u64,
    /// Decisions that the owner has forgotten because its memory for decisions is limited.
    forgotten: u64,
    /// Decisions that processes could not report, because their buffers were full.
    dropped: u64,
}

/// A decision of a process after its lookup of a prompt's pages, or instead of a lookup.
#[derive(Serialize, ToSchema)]
pub(super) struct DecisionEntry {
    /// The engine's own id of the request, at most 128 bytes.
    request_id: String,
    /// Time of the decision, in seconds since 1970.
    unix_seconds: f64,
    /// Id of the scope in which the pages were looked up.
    scope: String,
    /// `loaded`, `declined` (by the gate), `missed`, `not_needed`, `too_short`, `waiting`,
    /// `not_cacheable` or `failed`.
    outcome: &'static str,
    /// The reason in the words of the process; empty if there is none.
    detail: String,
    /// Pages of the prompt.
    pages: u32,
    /// Leading pages of the prompt that were found.
    found: u32,
    /// Pages to load.
    loaded: u32,
    /// Estimated seconds until the prompt is computed, with a load; null if unknown.
    seconds_with_load: Option<f64>,
    /// Estimated seconds until the prompt is computed, without a load; null if unknown.
    seconds_without_load: Option<f64>,
}

impl From<Decision> for DecisionEntry {
    fn from(decision: Decision) -> Self {
        let seconds = |micros: u64| micros as f64 / 1e6;
        let estimate = decision.estimate;
        Self {
            request_id: decision.request,
            unix_seconds: decision.unix_millis as f64 / 1e3,
            scope: decision.scope.to_string(),
            outcome: decision.outcome.word(),
            detail: decision.detail,
            pages: decision.pages,
            found: decision.found,
            loaded: decision.loaded,
            seconds_with_load: estimate.map(|times| seconds(times.with_load_micros)),
            seconds_without_load: estimate.map(|times| seconds(times.without_load_micros)),
        }
    }
}

impl From<DecisionListing> for Decisions {
    fn from(DecisionListing { decisions, memory }: DecisionListing) -> Self {
        Self {
            decisions: decisions.into_iter().map(DecisionEntry::from).collect(),
            remembered_seconds: memory.remembered_seconds,
            forgotten: memory.forgotten,
            dropped: memory.dropped,
        }
    }
}

/// Decisions about the pages of requests
///
/// Returns the newest decisions that the owner received, from all processes. Processes send their
/// decisions about every two seconds.
#[utoipa::path(
    get,
    path = DECISIONS,
    params(DecisionsQuery),
    responses((status = 200, body = Decisions)),
)]
pub(super) async fn decisions(
    State(shared): State<Arc<Shared>>,
    query: DecisionsQuery,
) -> Result<Json<Decisions>, Problem> {
    let limit = query.limit.unwrap_or(DECISIONS_DEFAULT);
    let answer = shared.ask(query.store.as_deref(), move |source| match source {
        Source::Open(node) => node.store().decisions(limit as usize).map(Some),
        Source::Directory(dir) => ritornello_node::decisions(dir, limit, QUESTION_TIMEOUT),
    });
    answer.await.map(|listed| Json(listed.into()))
}
