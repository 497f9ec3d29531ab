//! `/v1/explain`: why pages are hits or misses.

use super::body::Body;
use super::keys::{self, HexKey};
use crate::answer::Shared;
use crate::problem::Problem;
use crate::role::EXPLAIN;
use axum::extract::State;
use axum::response::Json;
use ritornello_format::{FieldDifference, ScopeId};
use ritornello_store::{Explanation, KeySpan, OtherScope};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// Pages to explain.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExplainRequest {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
    /// The scope's id, as in `/v1/scopes`; it may belong to a scope that is not registered
    #[schema(pattern = "^[0-9a-fA-F]{32}$")]
    scope: String,
    /// Keys of the pages in order
    #[schema(max_items = 4096)]
    keys: Vec<HexKey>,
}

/// Why pages are hits or misses.
#[derive(Serialize, ToSchema)]
pub(super) struct ExplainAnswer {
    /// The keys by answer, in their order; together they cover all keys.
    spans: Vec<KeySpanEntry>,
    /// The scopes that answers of `other_scope` name, at most four.
    other_scopes: Vec<OtherScopeEntry>,
    /// Whether the scope is registered: from its first put or its first settings until it is
    /// dropped.
    is_registered: bool,
    /// Seconds since the owner opened the store. It knows no eviction, removal, damage, refusal or
    /// abandoned put of an earlier time.
    remembered_seconds: u64,
}

/// Consecutive keys with the same answer.
#[derive(Serialize, ToSchema)]
struct KeySpanEntry {
    /// Position of the first key.
    at: u32,
    /// Number of keys.
    pages: u32,
    /// `hit`, `behind_missing`, `not_yet_visible`, `absent_volume`, `evicted`, `removed`, `damaged`,
    /// `refused`, `abandoned`, `other_scope` or `unknown`.
    answer: &'static str,
    /// The cause in one word, the absent directory or segment and why it is absent, or the id of the
    /// other scope; empty if there is none.
    detail: String,
    /// Seconds since the first page of the span was evicted, removed (also as damaged), refused or
    /// abandoned; null for other answers. Later pages of the span may have other ages.
    seconds_ago: Option<u64>,
}

/// A scope that has some of the keys.
#[derive(Serialize, ToSchema)]
struct OtherScopeEntry {
    /// Digest of the scope's identity, in hexadecimal digits.
    id: String,
    /// The model that the scope names.
    model: String,
    /// The fields that differ; null if only the id of the scope of the request is known.
    differs: Option<Vec<DifferenceEntry>>,
}

/// A field in which two scopes differ.
#[derive(Serialize, ToSchema)]
struct DifferenceEntry {
    /// Name of the field.
    field: String,
    /// The value in the scope of the request; `hidden` for a salt.
    asked: String,
    /// The value in the scope that has the keys.
    stored: String,
}

impl From<Explanation> for ExplainAnswer {
    fn from(explanation: Explanation) -> Self {
        Self {
            spans: explanation.spans.into_iter().map(KeySpanEntry::from).collect(),
            other_scopes: explanation.other_scopes.into_iter().map(OtherScopeEntry::from).collect(),
            is_registered: explanation.is_registered,
            remembered_seconds: explanation.remembered_seconds,
        }
    }
}

impl From<KeySpan> for KeySpanEntry {
    fn from(KeySpan { at, pages, answer, detail, seconds_ago }: KeySpan) -> Self {
        Self { at, pages, answer: answer.word(), detail, seconds_ago }
    }
}

impl From<OtherScope> for OtherScopeEntry {
    fn from(OtherScope { id, model, differs }: OtherScope) -> Self {
        let entry =
            |FieldDifference { field, asked, stored }| DifferenceEntry { field, asked, stored };
        Self { id, model, differs: differs.map(|all| all.into_iter().map(entry).collect()) }
    }
}

/// Explain hits and misses
///
/// Returns for each page why it is a hit or a miss. Counts as no lookup and no use.
#[utoipa::path(
    post,
    path = EXPLAIN,
    request_body = ExplainRequest,
    responses((status = 200, body = ExplainAnswer)),
)]
pub(super) async fn explain(
    State(shared): State<Arc<Shared>>,
    Body(request): Body<ExplainRequest>,
) -> Result<Json<ExplainAnswer>, Problem> {
    let keys = keys::parse(&request.keys)?;
    let id: ScopeId = request.scope.parse().map_err(|error| Problem::from(&error))?;
    let answer = shared.call(request.store.as_deref(), move |_, node| {
        let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let explained = node.store().explain_by_id(id, &slices);
        explained.map(ExplainAnswer::from).map_err(|error| Problem::from(&error))
    });
    answer.await.map(Json)
}
