//! The scopes of stores.

use super::query::StoreQuery;
use crate::answer::{Named, Shared, observe_all, state_word};
use crate::limits::SCOPES_MAX;
use crate::problem::Problem;
use axum::extract::State;
use axum::response::Json;
use ritornello_node::Observed;
use ritornello_store::{ScopeUsage, StoredScope};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// The scopes of stores.
#[derive(Serialize, ToSchema)]
pub(super) struct Scopes {
    stores: Vec<StoreScopes>,
}

/// The scopes of a store.
#[derive(Serialize, ToSchema)]
struct StoreScopes {
    /// Directory of the store.
    store: String,
    /// `owned`, `poisoned`, `unowned` or `unavailable`, as in `/readyz`.
    state: &'static str,
    /// Number of all registered scopes; null if it is unknown.
    scopes_total: Option<u64>,
    /// At most 16 scopes: the largest by bytes on disk, or, without an owner, the first that were
    /// registered.
    scopes: Vec<ScopeEntry>,
}

/// A scope. Without an owner only its id, its model and its quota are known; the other fields are
/// null.
#[derive(Serialize, ToSchema)]
struct ScopeEntry {
    /// Digest of the scope's identity, in hexadecimal digits.
    id: String,
    /// The model that the scope names.
    model: String,
    /// Codec with which puts encode the scope's pages.
    codec: Option<String>,
    /// Number of pages.
    pages: Option<u64>,
    /// Bytes on disk, with headers and padding.
    bytes: Option<u64>,
    /// Maximum bytes on disk; null without a quota.
    quota_bytes: Option<u64>,
    /// Bytes on disk of retained pages.
    retained_bytes: Option<u64>,
    /// Maximum bytes on disk of retained pages.
    retained_bytes_max: Option<u64>,
}

impl From<&ScopeUsage> for ScopeEntry {
    fn from(scope: &ScopeUsage) -> Self {
        Self {
            id: scope.id.clone(),
            model: scope.model.clone(),
            codec: Some(scope.codec.clone()),
            pages: Some(scope.pages),
            bytes: Some(scope.bytes),
            quota_bytes: scope.quota_bytes,
            retained_bytes: Some(scope.retained_bytes),
            retained_bytes_max: Some(scope.retained_bytes_max),
        }
    }
}

impl From<&StoredScope> for ScopeEntry {
    fn from(scope: &StoredScope) -> Self {
        Self {
            id: scope.id.clone(),
            model: scope.model.clone(),
            codec: None,
            pages: None,
            bytes: None,
            quota_bytes: scope.quota_bytes,
            retained_bytes: None,
            retained_bytes_max: None,
        }
    }
}

impl From<Named> for StoreScopes {
    fn from(Named { store, observation }: Named) -> Self {
        let state = state_word(&observation);
        let (scopes_total, scopes) = match &observation.observed {
            Ok(Observed::Owned(stats)) => {
                let shown = stats.largest_scopes.iter().take(SCOPES_MAX);
                (Some(stats.scopes), shown.map(ScopeEntry::from).collect())
            }
            Ok(Observed::Unowned(stored)) => {
                let shown = stored.first_scopes.iter().take(SCOPES_MAX);
                (stored.scopes, shown.map(ScopeEntry::from).collect())
            }
            Err(_) => (None, Vec::new()),
        };
        Self { store, state, scopes_total, scopes }
    }
}

/// The scopes of stores
#[utoipa::path(
    get,
    path = "/v1/scopes",
    params(StoreQuery),
    responses((status = 200, body = Scopes)),
)]
pub(super) async fn scopes(
    State(shared): State<Arc<Shared>>,
    query: StoreQuery,
) -> Result<Json<Scopes>, Problem> {
    let observed = observe_all(shared.select(query.store.as_deref())?).await;
    Ok(Json(Scopes { stores: observed.into_iter().map(StoreScopes::from).collect() }))
}
