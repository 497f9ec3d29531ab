//! `/v1/probe`: looks up pages.

use super::body::Body;
use crate::answer::Shared;
use crate::calls::find_scope;
use crate::limits::PROBE_KEYS_MAX;
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

/// A key: 8 to 64 bytes, in hexadecimal digits.
#[derive(Deserialize, ToSchema)]
#[schema(pattern = "^([0-9a-fA-F]{2}){8,64}$")]
struct HexKey(String);

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
    if request.keys.len() > PROBE_KEYS_MAX {
        return Err(Problem::invalid(format!(
            "too many keys: send at most {PROBE_KEYS_MAX} in a request"
        )));
    }
    let keys: Option<Vec<Vec<u8>>> = request.keys.iter().map(|key| bytes(&key.0)).collect();
    let keys =
        keys.ok_or_else(|| Problem::invalid("a key is not an even number of hexadecimal digits"))?;
    let answer = shared.call(request.store.as_deref(), move |_, node| {
        let scope = find_scope(node, &request.scope)?;
        let slices: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let pages = node.store().probe(&scope, &slices).map_err(|error| Problem::from(&error))?;
        Ok(ProbeAnswer { pages, requested: keys.len() })
    });
    answer.await.map(Json)
}

/// Converts hexadecimal digits.
fn bytes(digits: &str) -> Option<Vec<u8>> {
    if !digits.len().is_multiple_of(2) || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pairs_of_digits_are_bytes() {
        assert_eq!(bytes("00fF10"), Some(vec![0, 255, 16]));
        assert_eq!(bytes(""), Some(Vec::new()));
        for wrong in ["0", "0g", "+1", "0x12", "\u{e9}\u{e9}", " 1"] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
    }
}
