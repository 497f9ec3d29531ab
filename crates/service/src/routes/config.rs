//! The configuration of the service and its stores.

use super::query::StoreQuery;
use crate::answer::{Named, Shared, observe_all, state_word};
use crate::limits::{
    BODY_BYTES_MAX, CONNECTIONS_MAX, HEADERS_BYTES_MAX, REQUEST_TIMEOUT, REQUESTS_PER_SECOND,
};
use crate::problem::Problem;
use axum::extract::State;
use axum::response::Json;
use ritornello_node::Observed;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// The configuration of the service and its stores.
#[derive(Serialize, ToSchema)]
pub(super) struct Config {
    service: ServiceConfig,
    stores: Vec<StoreConfig>,
}

/// The configuration of the service.
#[derive(Serialize, ToSchema)]
struct ServiceConfig {
    /// Version of the service's build.
    version: &'static str,
    /// The address on which the service listens.
    address: String,
    /// Host names and addresses, besides `localhost` and the address of the service, under which
    /// clients may reach the service.
    host_names: Vec<String>,
    /// Whether the service has a token file.
    has_tokens: bool,
    /// Whether the service encrypts its connections.
    has_tls: bool,
    limits: LimitsConfig,
}

/// Limits of requests.
#[derive(Serialize, ToSchema)]
struct LimitsConfig {
    connections: usize,
    header_bytes: usize,
    body_bytes: usize,
    request_seconds: u64,
    requests_per_second: u32,
}

/// The configuration of a store.
#[derive(Serialize, ToSchema)]
struct StoreConfig {
    /// Directory of the store.
    store: String,
    /// `owned`, `poisoned`, `unowned` or `unavailable`, as in `/readyz`. All further fields are
    /// null if the store is unavailable.
    state: &'static str,
    /// Identity of the store.
    uuid: Option<String>,
    /// Maximum bytes of segments and metadata.
    capacity_bytes: Option<u64>,
    segment_bytes: Option<u64>,
    /// Backend of the index.
    index: Option<String>,
    /// Directories of the segments.
    paths: Option<Vec<String>>,
    /// `cache` or `durable`; null without an owner.
    durability: Option<String>,
    /// The eviction policy; null without an owner.
    eviction: Option<String>,
    /// The mode of admission; null without an owner.
    admission: Option<String>,
    /// Bytes that may be written per day; null without a budget or an owner.
    write_budget_bytes_per_day: Option<u64>,
    /// Memory ceiling of the index, zero for none; null without an owner.
    index_memory_max_bytes: Option<u64>,
}

impl From<Named> for StoreConfig {
    fn from(Named { store, observation }: Named) -> Self {
        let mut config = Self {
            store,
            state: state_word(&observation),
            uuid: None,
            capacity_bytes: None,
            segment_bytes: None,
            index: None,
            paths: None,
            durability: None,
            eviction: None,
            admission: None,
            write_budget_bytes_per_day: None,
            index_memory_max_bytes: None,
        };
        match &observation.observed {
            Ok(Observed::Owned(stats)) => {
                config.uuid = Some(stats.uuid.clone());
                config.capacity_bytes = Some(stats.capacity_bytes);
                config.segment_bytes = Some(stats.segment_bytes);
                config.index = Some(stats.index.clone());
                config.paths = Some(stats.paths.iter().map(|path| path.dir.clone()).collect());
                config.durability = Some(stats.durability.clone());
                config.eviction = Some(stats.eviction.policy.clone());
                config.admission = Some(stats.admission.mode.clone());
                config.write_budget_bytes_per_day = stats.admission.budget_bytes_per_day;
                config.index_memory_max_bytes = Some(stats.index_memory_max_bytes);
            }
            Ok(Observed::Unowned(stored)) => {
                config.uuid = Some(stored.uuid.clone());
                config.capacity_bytes = Some(stored.capacity_bytes);
                config.segment_bytes = Some(stored.segment_bytes);
                config.index = Some(stored.index.clone());
                config.paths = Some(stored.paths.iter().map(|path| path.dir.clone()).collect());
            }
            Err(_) => {}
        }
        config
    }
}

/// The configuration of the service and its stores
#[utoipa::path(
    get,
    path = "/v1/config",
    params(StoreQuery),
    responses((status = 200, body = Config)),
)]
pub(super) async fn config(
    State(shared): State<Arc<Shared>>,
    query: StoreQuery,
) -> Result<Json<Config>, Problem> {
    let observed = observe_all(shared.select(query.store.as_deref())?).await;
    let service = ServiceConfig {
        version: env!("CARGO_PKG_VERSION"),
        address: shared.address.to_string(),
        host_names: shared.host_names.clone(),
        has_tokens: shared.tokens.is_some(),
        has_tls: shared.certificate.is_some(),
        limits: LimitsConfig {
            connections: CONNECTIONS_MAX,
            header_bytes: HEADERS_BYTES_MAX,
            body_bytes: BODY_BYTES_MAX,
            request_seconds: REQUEST_TIMEOUT.as_secs(),
            requests_per_second: REQUESTS_PER_SECOND,
        },
    };
    Ok(Json(Config { service, stores: observed.into_iter().map(StoreConfig::from).collect() }))
}
