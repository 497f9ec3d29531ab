//! Query parameters of requests.

use crate::problem::Problem;
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use serde::Deserialize;
use utoipa::IntoParams;

/// The stores that a request concerns.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StoreQuery {
    /// Directory of a store, as `/v1/config` lists it; without it the answer has all stores
    pub(crate) store: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for StoreQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let query = Query::<Self>::try_from_uri(&parts.uri)
            .map_err(|error| Problem::invalid(error.body_text()))?;
        Ok(query.0)
    }
}
