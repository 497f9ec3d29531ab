//! `/v1/flush`: makes puts and deletes durable on request.

use super::body::Body;
use crate::answer::Shared;
use crate::problem::Problem;
use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;
use utoipa::ToSchema;

/// The store to flush.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FlushRequest {
    /// Directory of the store; may be omitted if the service has one store
    store: Option<String>,
}

/// The result of a flush that has ended.
#[derive(Serialize, ToSchema)]
pub(super) struct FlushAnswer {
    /// Duration of the flush in seconds.
    seconds: f64,
}

/// Make all earlier puts and deletes durable
#[utoipa::path(
    post,
    path = "/v1/flush",
    request_body = FlushRequest,
    responses((status = 200, body = FlushAnswer)),
)]
pub(super) async fn flush(
    State(shared): State<Arc<Shared>>,
    Body(request): Body<FlushRequest>,
) -> Result<Json<FlushAnswer>, Problem> {
    let answer = shared.call(request.store.as_deref(), |_, node| {
        let started = Instant::now();
        node.store().flush().map_err(|error| Problem::from(&error))?;
        Ok(FlushAnswer { seconds: started.elapsed().as_secs_f64() })
    });
    answer.await.map(Json)
}
