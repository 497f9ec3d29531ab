//! The permissions of a store.

use crate::error::OrRaise;
use pyo3::prelude::*;

/// The permissions in a store's policy file.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct StorePolicy(pub(crate) ritornello_store::StorePolicy);

#[pymethods]
impl StorePolicy {
    /// Whether keys may be made by a hash that does not resist collisions.
    #[getter]
    fn allow_weak_hashes(&self) -> bool {
        self.0.allow_weak_hashes
    }

    /// Whether requests may set the retention of their pages.
    #[getter]
    fn allow_request_retention(&self) -> bool {
        self.0.allow_request_retention
    }

    /// The calls that the store's owner refuses to other processes.
    #[getter]
    fn deny_clients(&self) -> Vec<&'static str> {
        self.0.deny_clients.iter().map(|call| call.word()).collect()
    }

    /// Raises InvalidError if the policy forbids keys made by `algorithm`.
    fn check_hash(&self, py: Python<'_>, algorithm: &str) -> PyResult<()> {
        self.0.check_hash(algorithm).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!(
            "StorePolicy(allow_weak_hashes={}, allow_request_retention={}, deny_clients={:?})",
            self.allow_weak_hashes(),
            self.allow_request_retention(),
            self.deny_clients()
        )
    }
}
