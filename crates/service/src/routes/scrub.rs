//! `/v1/scrub`: verifies all pages of a store on request.

use super::body::Body;
use super::query::StoreQuery;
use crate::answer::Shared;
use crate::problem::Problem;
use crate::scrubs::ScrubProgress;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// The store to scrub.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ScrubRequest {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
}

/// Scrubs of stores.
#[derive(Serialize, ToSchema)]
pub(super) struct ScrubList {
    stores: Vec<StoreScrub>,
}

/// The scrub of a store.
#[derive(Serialize, ToSchema)]
pub(super) struct StoreScrub {
    /// Directory of the store.
    store: String,
    scrub: ScrubProgress,
}

/// Begin to verify every page of a store
///
/// Reads all pages at the speed of the disks and removes damaged pages; pages that the disk cannot
/// read stay. Only the owner scrubs.
#[utoipa::path(
    post,
    path = "/v1/scrub",
    request_body = ScrubRequest,
    responses((status = 202, body = StoreScrub, description = "the scrub has begun")),
)]
pub(super) async fn begin(
    State(shared): State<Arc<Shared>>,
    Body(request): Body<ScrubRequest>,
) -> Result<(StatusCode, Json<StoreScrub>), Problem> {
    let scrubs = Arc::clone(&shared);
    // Run as a call on a separate thread: `begin` may wait while the owner of the store changes.
    let begun = shared.call(request.store.as_deref(), move |store, node| {
        let scrub = scrubs.scrubs.begin(store, node)?;
        Ok(StoreScrub { store: store.to_owned(), scrub })
    });
    Ok((StatusCode::ACCEPTED, Json(begun.await?)))
}

/// The progress of scrubs
#[utoipa::path(
    get,
    path = "/v1/scrub",
    params(StoreQuery),
    responses((status = 200, body = ScrubList)),
)]
pub(super) async fn progress(
    State(shared): State<Arc<Shared>>,
    query: StoreQuery,
) -> Result<Json<ScrubList>, Problem> {
    let selected = shared.select(query.store.as_deref())?;
    let stores = selected.iter().map(|observer| {
        let store = observer.access().name().to_owned();
        StoreScrub { scrub: shared.scrubs.progress(&store), store }
    });
    Ok(Json(ScrubList { stores: stores.collect() }))
}
