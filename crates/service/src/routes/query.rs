//! Query parameters of requests.

use crate::limits::DECISIONS_MAX;
use crate::problem::Problem;
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use utoipa::IntoParams;

/// The stores that a request concerns.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StoreQuery {
    /// Directory of a store, as `/v1/config` lists it; without it the answer has all stores
    pub(crate) store: Option<String>,
}

/// The decisions that a request asks for.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DecisionsQuery {
    /// Directory of the store; may be omitted if the service has one store
    pub(crate) store: Option<String>,
    /// Maximum number of decisions; 100 without it
    #[param(minimum = 1, maximum = 1024)]
    pub(crate) limit: Option<u32>,
}

fn parse<T: DeserializeOwned>(parts: &Parts) -> Result<T, Problem> {
    let query = Query::<T>::try_from_uri(&parts.uri);
    query.map(|query| query.0).map_err(|error| Problem::invalid(error.body_text()))
}

impl<S: Send + Sync> FromRequestParts<S> for StoreQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parse(parts)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for DecisionsQuery {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let query: Self = parse(parts)?;
        if query.limit.is_some_and(|limit| !(1..=DECISIONS_MAX).contains(&limit)) {
            return Err(Problem::invalid(format!("limit is a number from 1 to {DECISIONS_MAX}")));
        }
        Ok(query)
    }
}
