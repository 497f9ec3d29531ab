//! Bodies of requests.

use crate::problem::Problem;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

/// The body of a request, parsed from JSON. Each type `T` refuses fields that it does not have.
pub(super) struct Body<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let media_type = request.headers().get(header::CONTENT_TYPE);
        let media_type = media_type.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let essence = media_type.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(Problem::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "invalid",
                "the body must be JSON: send `Content-Type: application/json`",
            ));
        }
        let bytes = Bytes::from_request(request, state).await.map_err(|error| {
            let remedy = match error.status() {
                StatusCode::PAYLOAD_TOO_LARGE => "shorten it",
                _ => "send the request again, with its whole body",
            };
            Problem::new(error.status(), "invalid", format!("{}: {remedy}", error.body_text()))
        })?;
        let parsed = serde_json::from_slice(&bytes);
        parsed.map(Self).map_err(|error| Problem::invalid(format!("the body is invalid: {error}")))
    }
}

/// Deserializes a number of bytes. JSON does not tell integers from other numbers, so `1e3` and
/// `1000.0` are accepted.
pub(super) fn byte_count<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    /// A double represents every integer from zero to this number.
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    let Some(number) = Option::<serde_json::Number>::deserialize(from)? else { return Ok(None) };
    let exact = number.as_u64();
    let double = number
        .as_f64()
        .filter(|number| number.fract() == 0.0 && (0.0..=EXACT_MAX).contains(number));
    let count = exact.or_else(|| double.map(|number| number as u64));
    count.map(Some).ok_or_else(|| D::Error::custom("a number of bytes is an integer from zero up"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Request {
        #[serde(default, deserialize_with = "byte_count")]
        bytes: Option<u64>,
    }

    #[test]
    fn whole_numbers_are_byte_counts() {
        let parse =
            |text: &str| serde_json::from_str::<Request>(text).map(|found| found.bytes).ok();
        assert_eq!(parse("{}"), Some(None));
        assert_eq!(parse("{\"bytes\": null}"), Some(None));
        for (text, bytes) in [("7", 7), ("38.0", 38), ("1e3", 1000), ("-0.0", 0)] {
            assert_eq!(parse(&format!("{{\"bytes\": {text}}}")), Some(Some(bytes)), "{text}");
        }
        assert_eq!(parse(&format!("{{\"bytes\": {}}}", u64::MAX)), Some(Some(u64::MAX)));
        for wrong in ["-1", "0.5", "1e300", "\"7\"", "true", "18446744073709551616"] {
            assert_eq!(parse(&format!("{{\"bytes\": {wrong}}}")), None, "{wrong}");
        }
    }
}
