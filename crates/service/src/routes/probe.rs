//! `/v1/probe`: looks up pages.

use super::body::Body;
use super::keys::{self, HexKey};
use crate::answer::Shared;
use crate::calls::find_scope;
use crate::problem::Problem;
use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// Pages to look up.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ProbeRequest {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
    /// The scope's id, as in `/v1/scopes`
    #[schema(pattern = "^[0-9a-f]{32}$")]
    scope: String,
    /// Keys of the pages in order
    #[schema(max_items = 4096)]
    keys: Vec<HexKey>,
}

/// The leading pages that are present.
#[derive(Serialize, ToSchema)]
pub(super) struct ProbeAnswer {
    /// Number of leading pages that are present; zero also if the owner does not respond.
    pages: usize,
    /// Number of keys.
    requested: usize,
}

/// Look up pages
///
/// Returns how many leading pages are present. The owner counts the lookup as it counts an
/// engine's.
#[utoipa::path(
    post,
    path = "/v1/probe",
    request_body = ProbeRequest,
    responses((status = 200, body = ProbeAnswer)),
)]
pub(super) async fn probe(
    State(shared): State<Arc<Shared>>,
    Body(request): Body<ProbeRequest>,
) -> Result<Json<ProbeAnswer>, Problem> {
    let keys = keys::parse(&request.keys)?;
    let answer = shared.call(request.store.as_deref(), move |_, node| {
        let scope = find_scope(node, &request.scope)?;
        let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let pages = node.store().probe(&scope, &slices).map_err(|error| Problem::from(&error))?;
        Ok(ProbeAnswer { pages, requested: keys.len() })
    });
    answer.await.map(Json)
}
