//! `/v1/explain`: why pages are hits or misses.

use super::body::Body;
use super::decisions::DecisionEntry;
use super::keys::{self, HexKey};
use crate::answer::Shared;
use crate::limits::QUESTION_TIMEOUT;
use crate::problem::Problem;
use crate::role::EXPLAIN;
use crate::store_access::Source;
use axum::extract::State;
use axum::response::Json;
use ritornello_format::{FieldDifference, ScopeId};
use ritornello_store::{ExplainedRequest, Explanation, KeySpan, OtherScope, RequestExplanation};
use serde::{Deserialize, Deserializer, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

// serde parses requests as `ExplainFields`, because of `try_from`. The other serde attributes of
// `ExplainRequest` and its two questions are for utoipa, which describes these types in the OpenAPI
// document.
/// A question about pages, or about a request.
#[derive(Deserialize, ToSchema)]
#[serde(untagged, try_from = "ExplainFields")]
pub(super) enum ExplainRequest {
    Pages(PagesQuestion),
    Request(RequestQuestion),
}

/// Pages to explain.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PagesQuestion {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
    /// The scope's id, as in `/v1/scopes`; it may belong to a scope that is not registered
    #[schema(pattern = "^[0-9a-fA-F]{32}$")]
    scope: String,
    /// Keys of the pages in order
    #[schema(max_items = 4096)]
    keys: Vec<HexKey>,
}

/// A request to explain.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RequestQuestion {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
    /// The id that the engine returned, or the engine's own id of the request
    #[schema(min_length = 1)]
    request_id: String,
}

/// The fields of both questions. Errors in an untagged enum would not name the invalid field.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainFields {
    store: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    scope: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    keys: Option<Vec<HexKey>>,
    #[serde(default, deserialize_with = "not_null")]
    request_id: Option<String>,
}

fn not_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

impl TryFrom<ExplainFields> for ExplainRequest {
    type Error = &'static str;

    fn try_from(
        ExplainFields { store, scope, keys, request_id }: ExplainFields,
    ) -> Result<Self, Self::Error> {
        match (scope, keys, request_id) {
            (Some(scope), Some(keys), None) => {
                Ok(Self::Pages(PagesQuestion { store, scope, keys }))
            }
            (None, None, Some(request_id)) => {
                Ok(Self::Request(RequestQuestion { store, request_id }))
            }
            _ => Err("send `scope` and `keys`, or `request_id`"),
        }
    }
}

/// The explanation of pages, or of a request.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ExplainAnswer {
    Pages(PagesAnswer),
    Request(RequestAnswer),
}

/// The decisions about a request, and why its pages are hits or misses now.
#[derive(Serialize, ToSchema)]
pub(super) struct RequestAnswer {
    /// One entry for each of the engine's requests and each scope, made from the 16 decisions that
    /// arrived last; the entry with the newest decision first.
    requests: Vec<RequestEntry>,
    /// Seconds since the owner opened the store, or since it received the newest decision that it
    /// has forgotten.
    remembered_seconds: u64,
    /// Number of decisions that the owner has forgotten, because its memory for decisions is
    /// limited.
    forgotten: u64,
    /// Number of decisions that processes could not report, because their buffers were full.
    dropped: u64,
}

/// The decisions about one request in one scope.
#[derive(Serialize, ToSchema)]
struct RequestEntry {
    /// The engine's own id of the request.
    request_id: String,
    /// Id of the scope in which the pages were looked up.
    scope: String,
    /// The newest decision first.
    decisions: Vec<DecisionEntry>,
    /// Why the pages of the newest decision are hits or misses now.
    explanation: PagesAnswer,
}

/// Why pages are hits or misses.
#[derive(Serialize, ToSchema)]
pub(super) struct PagesAnswer {
    /// Spans of consecutive keys with the same answer, in the order of the keys. The spans cover
    /// all keys.
    spans: Vec<KeySpanEntry>,
    /// The scopes that answers of `other_scope` name, at most four.
    other_scopes: Vec<OtherScopeEntry>,
    /// Whether the scope is registered: from its first put or its first settings until it is
    /// dropped.
    is_registered: bool,
    /// Seconds since the owner opened the store. The owner knows no eviction, removal, damage,
    /// refusal or abandoned put of an earlier time.
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
    /// For `hit`: `host` if the store is in memory, else `disk`. For `evicted`, `removed`,
    /// `damaged` and `refused`: the cause; for `evicted`, except for the cause `segment`, then
    /// ` by ` and the eviction policy. For `unknown`: `not_offered` or `forgotten`. For
    /// `absent_volume`: the absent directory or segment, and why it is absent. For `other_scope`:
    /// the id of the other scope. Empty for other answers, or if there is none.
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

impl From<RequestExplanation> for RequestAnswer {
    fn from(RequestExplanation { requests, memory }: RequestExplanation) -> Self {
        Self {
            requests: requests.into_iter().map(RequestEntry::from).collect(),
            remembered_seconds: memory.remembered_seconds,
            forgotten: memory.forgotten,
            dropped: memory.dropped,
        }
    }
}

impl From<ExplainedRequest> for RequestEntry {
    fn from(entry: ExplainedRequest) -> Self {
        Self {
            request_id: entry.request,
            scope: entry.scope.to_string(),
            decisions: entry.decisions.into_iter().map(DecisionEntry::from).collect(),
            explanation: entry.explanation.into(),
        }
    }
}

impl From<Explanation> for PagesAnswer {
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
/// Returns for each page why it is a hit or a miss. With `request_id`: the decisions about the
/// request, and why each of its pages is a hit or a miss. Counts as no lookup and no use.
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
    let answer = match request {
        ExplainRequest::Pages(question) => {
            ExplainAnswer::Pages(explain_pages(&shared, question).await?)
        }
        ExplainRequest::Request(question) => {
            ExplainAnswer::Request(explain_request(&shared, question).await?)
        }
    };
    Ok(Json(answer))
}

async fn explain_pages(
    shared: &Shared,
    PagesQuestion { store, scope, keys }: PagesQuestion,
) -> Result<PagesAnswer, Problem> {
    let keys = keys::parse(&keys)?;
    let id: ScopeId = scope.parse().map_err(|error| Problem::from(&error))?;
    let answer = shared.ask(store.as_deref(), move |source| {
        let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        match source {
            Source::Open(node) => node.store().explain_by_id(id, &slices).map(Some),
            Source::Directory(dir) => ritornello_node::explain(dir, id, &slices, QUESTION_TIMEOUT),
        }
    });
    answer.await.map(PagesAnswer::from)
}

async fn explain_request(
    shared: &Shared,
    RequestQuestion { store, request_id }: RequestQuestion,
) -> Result<RequestAnswer, Problem> {
    let answer = shared.ask(store.as_deref(), move |source| match source {
        Source::Open(node) => node.store().explain_request(&request_id).map(Some),
        Source::Directory(dir) => {
            ritornello_node::explain_request(dir, &request_id, QUESTION_TIMEOUT)
        }
    });
    answer.await.map(RequestAnswer::from)
}
