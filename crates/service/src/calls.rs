//! Calls of an open store, on separate threads.

use crate::limits::CALLS_MAX;
use crate::problem::Problem;
use axum::http::StatusCode;
use ritornello_format::{Error, Scope};
use ritornello_node::Node;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The limit of calls at a time.
#[derive(Debug)]
pub(crate) struct Calls(Arc<Semaphore>);

impl Calls {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(CALLS_MAX)))
    }

    /// Runs `call` on a separate thread. If the request ends before the call, the call continues
    /// and keeps its place.
    ///
    /// # Errors
    /// 503 if too many calls are running; any error of `call`.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let Ok(place) = Arc::clone(&self.0).try_acquire_owned() else {
            return Err(Problem::retry(
                "too many calls of stores are running: send it again later",
            ));
        };
        let answer = tokio::task::spawn_blocking(move || {
            let _place = place;
            call()
        });
        answer.await.unwrap_or_else(|error| {
            Err(Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "fatal",
                format!("the call ended unexpectedly: report this ({error})"),
            ))
        })
    }
}

/// Returns the scope with the identity `id`, in hexadecimal digits.
///
/// # Errors
/// 404 if the store has no such scope; errors of [`ritornello_store::Store::scopes`].
pub(crate) fn find_scope(node: &Node, id: &str) -> Result<Scope, Problem> {
    let listed = node.store().scopes().map_err(|error: Error| Problem::from(&error))?;
    let found = listed.into_iter().find(|listing| listing.scope.id().to_string() == id);
    found.map(|listing| listing.scope).ok_or_else(|| {
        Problem::new(
            StatusCode::NOT_FOUND,
            "not_found",
            "the store has no scope with this id: `GET /v1/scopes` lists the largest",
        )
    })
}
