//! What a store permits.

use crate::error::OrRaise;
use pyo3::prelude::*;

/// The permissions in a store's policy file.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct StorePolicy(pub(crate) ritornello_store::StorePolicy);

#[pymethods]
impl StorePolicy {
    /// Whether keys may be made by a hash for which collisions can be made.
    #[getter]
    fn allow_weak_hashes(&self) -> bool {
        self.0.allow_weak_hashes
    }

    /// Raises InvalidError where keys that `algorithm` made may not be used.
    fn check_hash(&self, py: Python<'_>, algorithm: &str) -> PyResult<()> {
        self.0.check_hash(algorithm).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("StorePolicy(allow_weak_hashes={})", self.allow_weak_hashes())
    }
}
