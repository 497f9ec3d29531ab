//! The Python class of a lease on a prefix.

use crate::error::OrRaise;
use pyo3::prelude::*;
use ritornello_format::ErrorKind;
use ritornello_node::Node;
use ritornello_store::{LeaseNumber, Leased};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// A leased prefix: the longest stored prefix of the keys, or fewer of its leading pages if the
/// limit on the leases of a process permits no more. The pages stay readable until `release()`,
/// until the lease expires, until this process loses its connection to the store's owner, or until
/// the owner ends or reopens the store.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct LeasedPrefix {
    pages: usize,
    lease: LeaseNumber,
    node: Weak<Node>,
    released: AtomicBool,
}

impl LeasedPrefix {
    /// The prefix that `node` has leased.
    pub(crate) fn new(leased: Leased, node: &Arc<Node>) -> Self {
        let Leased { pages, lease } = leased;
        Self { pages, lease, node: Arc::downgrade(node), released: AtomicBool::new(false) }
    }
}

#[pymethods]
impl LeasedPrefix {
    /// Number of leading pages that are stored and leased.
    #[getter]
    fn pages(&self) -> usize {
        self.pages
    }

    /// The lease's number, for `Store.release` in this process; zero if no page was leased.
    #[getter]
    fn lease(&self) -> u64 {
        self.lease.0
    }

    /// Ends the lease. Does nothing after the store was closed, or in a second call, even if the
    /// first call failed.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        if self.released.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let Some(node) = self.node.upgrade() else { return Ok(()) };
        match py.detach(|| node.store().release(self.lease)) {
            Err(error) if error.kind() == ErrorKind::Closed => Ok(()),
            answer => answer.or_raise(py),
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        format!("LeasedPrefix(pages={}, lease={})", self.pages, self.lease.0)
    }
}
