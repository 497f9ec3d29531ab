//! `PUT /v1/scopes/{id}`: changes or drops a scope.

use super::body::{Body, byte_count};
use crate::answer::Shared;
use crate::calls::find_scope;
use crate::problem::Problem;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Json;
use ritornello_format::{Result as StoreResult, Scope, ScopeSettings};
use ritornello_store::{Store, parse_codec};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// The settings of a scope. Omitted settings return to the store's default.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ScopeRequest {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
    /// Maximum bytes on disk; if the scope has more, pages are evicted immediately
    #[serde(default, deserialize_with = "byte_count")]
    quota_bytes: Option<u64>,
    /// Maximum bytes on disk of retained pages, at most the quota
    #[serde(default, deserialize_with = "byte_count")]
    retained_bytes: Option<u64>,
    /// Codec with which puts encode the scope's pages
    #[schema(pattern = "^(raw|split|zstd|int8|int4)$")]
    codec: Option<String>,
    /// Drop the scope with all its pages; excludes all settings
    #[serde(default)]
    drop: bool,
}

/// The scope after the change.
#[derive(Serialize, ToSchema)]
pub(super) struct ScopeAnswer {
    /// The scope's id.
    id: String,
    /// Whether the scope was dropped.
    dropped: bool,
}

enum Change {
    Configure(ScopeSettings),
    Drop,
}

impl ScopeRequest {
    fn change(&self) -> Result<Change, Problem> {
        let codec = self.codec.as_deref().map(parse_codec).transpose();
        let codec = codec.map_err(|error| Problem::from(&error))?;
        let (quota_bytes, retained_bytes) = (self.quota_bytes, self.retained_bytes);
        let has_settings = codec.is_some() || quota_bytes.is_some() || retained_bytes.is_some();
        match (self.drop, has_settings) {
            (true, true) => Err(Problem::invalid("a scope is dropped or configured, not both")),
            (true, false) => Ok(Change::Drop),
            (false, _) => Ok(Change::Configure(ScopeSettings {
                codec: codec.map(|codec| codec.number()),
                quota_bytes,
                retained_bytes,
            })),
        }
    }
}

/// Set quota, retention and codec of a scope, or drop it
///
/// The change is durable when the request is answered. It may be denied by the store's policy if
/// another process owns the store.
#[utoipa::path(
    put,
    path = "/v1/scopes/{id}",
    params(("id" = String, Path, description = "The scope's id", pattern = "^[0-9a-f]{32}$")),
    request_body = ScopeRequest,
    responses((status = 200, body = ScopeAnswer)),
)]
pub(super) async fn change(
    State(shared): State<Arc<Shared>>,
    path: Result<Path<String>, PathRejection>,
    Body(request): Body<ScopeRequest>,
) -> Result<Json<ScopeAnswer>, Problem> {
    let Path(id) =
        path.map_err(|error| Problem::new(error.status(), "invalid", error.body_text()))?;
    let store = request.store.clone();
    let answer = shared.call(store.as_deref(), move |_, node| {
        let scope = find_scope(node, &id)?;
        let change = request.change()?;
        apply(node.store(), &scope, &change).map_err(|error| Problem::from(&error))?;
        Ok(ScopeAnswer { id, dropped: matches!(change, Change::Drop) })
    });
    answer.await.map(Json)
}

fn apply(store: &Store, scope: &Scope, change: &Change) -> StoreResult<()> {
    match change {
        Change::Configure(settings) => store.configure(scope, settings),
        Change::Drop => store.drop_scope(scope),
    }
}
