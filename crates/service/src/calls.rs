//! Calls of an open store, on separate threads.

use crate::limits::CALLS_MAX;
use crate::problem::Problem;
use axum::http::StatusCode;
use ritornello_format::Scope;
use ritornello_node::Node;
use std::sync::Arc;
use tokio::sync::{Semaphore, oneshot};

/// The limit of concurrent calls of one store. Each store has its own limit, so calls that wait for
/// the hanging disk of one store do not use up the limit of another store.
#[derive(Debug)]
pub(crate) struct Calls(Arc<Semaphore>);

impl Default for Calls {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(CALLS_MAX)))
    }
}

impl Calls {
    /// Runs `call` on a separate thread. If the request ends before the call, the call continues
    /// and still counts towards the limit.
    ///
    /// # Errors
    /// 503 if too many calls of the store are running, or no thread can be started; 500 if `call`
    /// panics; any error of `call`.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let Ok(place) = Arc::clone(&self.0).try_acquire_owned() else {
            return Err(Problem::retry(
                "too many calls of this store are running: send the request again later",
            ));
        };
        let (sender, answer) = oneshot::channel();
        // Do not use tokio's thread pool: it panics if its first thread cannot be started.
        std::thread::Builder::new()
            .name("ritornello-http-call".to_owned())
            .spawn(move || {
                let answered = call();
                drop(place);
                // The send fails if the request has ended.
                let _ = sender.send(answered);
            })
            .map_err(|error| {
                Problem::retry(format!(
                    "no thread can be started for the call: send the request again later ({error})"
                ))
            })?;
        answer.await.unwrap_or_else(|_| {
            Err(Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "fatal",
                "the call of the store ended unexpectedly: report the panic in the service's log",
            ))
        })
    }
}

/// Returns the scope with the identity `id`, in hexadecimal digits.
///
/// # Errors
/// 404 if the store has no such scope; errors of [`ritornello_store::Store::find_scope`].
pub(crate) fn find_scope(node: &Node, id: &str) -> Result<Scope, Problem> {
    let found = node.store().find_scope(|scope| scope.id().to_string() == id);
    found.map_err(|error| Problem::from(&error))?.ok_or_else(|| {
        Problem::new(
            StatusCode::NOT_FOUND,
            "not_found",
            "the store has no scope with this id: `GET /v1/scopes` lists the largest",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::RwLock;
    use tokio::runtime::Builder;

    #[test]
    fn calls_of_a_hung_store_take_no_place_of_another_store() {
        let (hung, other) = (Arc::new(Calls::default()), Calls::default());
        let disk = Arc::new(RwLock::new(()));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        let locked = disk.write();
        runtime.block_on(async {
            let mut waiting = Vec::new();
            for _ in 0..CALLS_MAX {
                let (calls, disk) = (Arc::clone(&hung), Arc::clone(&disk));
                let call = move || {
                    drop(disk.read());
                    Ok(())
                };
                waiting.push(tokio::spawn(async move { calls.run(call).await }));
            }
            tokio::task::yield_now().await;
            let refused = hung.run(|| Ok(())).await.unwrap_err();
            assert!(refused.message().contains("too many calls"), "{}", refused.message());
            assert_eq!(other.run(|| Ok(7)).await.unwrap(), 7);
            drop(locked);
            for call in waiting {
                call.await.unwrap().unwrap();
            }
        });
    }

    #[test]
    fn call_that_panics_is_an_error() {
        let runtime = Builder::new_current_thread().build().unwrap();
        let calls = Calls::default();
        let ended = runtime.block_on(calls.run(|| -> Result<(), Problem> { panic!("a defect") }));
        assert!(ended.unwrap_err().message().contains("unexpectedly"));
    }
}
