//! Errors as HTTP responses.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use ritornello_format::{Error, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

/// Why a request failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Problem {
    #[serde(skip)]
    status: StatusCode,
    /// The class of errors, by the client's reaction: `invalid` (change the request), `retry` (the
    /// same request may succeed later), `miss`, `fatal`, `closed`, `denied` (another token),
    /// `not_found`.
    kind: &'static str,
    /// The error, its context, and the remedy.
    message: String,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into() }
    }

    /// The request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    /// The same request may succeed later: for example, a wait has reached its deadline, a limit is
    /// reached, or no thread can be started.
    pub(crate) fn retry(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "retry", message)
    }

    /// The error, its context, and the remedy.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl From<&Error> for Problem {
    fn from(error: &Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Retry | ErrorKind::Closed | ErrorKind::Miss => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            ErrorKind::Fatal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.kind().word(), error.to_string())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(&self)).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}
