//! A Python store's hold on its node: closed once, at exit at the latest.

use crate::error::raise;
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_node::Node;
use std::mem;
use std::sync::{Arc, Weak};

/// Nodes opened and perhaps not closed, with the process that opened them.
static OPEN: Mutex<Vec<(u32, Weak<Node>)>> = Mutex::new(Vec::new());

/// A node until it is closed.
pub(crate) struct Handle {
    node: RwLock<Option<Arc<Node>>>,
    process: u32,
}

impl Handle {
    pub(crate) fn new(node: Arc<Node>) -> Self {
        let process = std::process::id();
        let mut open = OPEN.lock();
        open.retain(|(_, node)| node.strong_count() > 0);
        open.push((process, Arc::downgrade(&node)));
        Self { node: RwLock::new(Some(node)), process }
    }

    /// The node.
    pub(crate) fn node(&self, py: Python<'_>) -> PyResult<Arc<Node>> {
        let message = if std::process::id() != self.process {
            "this store was opened before a fork: open it again in the child"
        } else if let Some(node) = self.node.read().as_ref() {
            return Ok(Arc::clone(node));
        } else {
            "the store is closed: open it again"
        };
        Err(raise(py, &Error::new(ErrorKind::Closed, message)))
    }

    pub(crate) fn closed(&self) -> bool {
        self.node.read().is_none() || std::process::id() != self.process
    }

    /// Closes, the first time, with the interpreter detached: tickets that run are waited for.
    ///
    /// # Errors
    /// Those of [`Node::close`]; after `Retry` closing is due again.
    pub(crate) fn close(&self, py: Python<'_>) -> Result<()> {
        let node = self.node.write().take();
        let Some(node) = node else { return Ok(()) };
        let closed = py.detach(|| node.close());
        if matches!(&closed, Err(error) if error.kind() == ErrorKind::Retry) {
            *self.node.write() = Some(node);
        } else {
            py.detach(|| drop(node));
        }
        closed
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // At the end of the interpreter there is nothing to attach to; the system cleans up. What
        // fails here the node has logged.
        let _ = Python::try_attach(|py| self.close(py));
    }
}

/// Closes what is still open: the last writes become durable before the threads are stopped.
#[pyfunction]
fn _close_all(py: Python<'_>) {
    let open = mem::take(&mut *OPEN.lock());
    let me = std::process::id();
    let mine = open.into_iter().filter(|(process, _)| *process == me);
    let nodes: Vec<Arc<Node>> = mine.filter_map(|(_, node)| node.upgrade()).collect();
    py.detach(|| {
        for error in nodes.iter().filter_map(|node| node.close().err()) {
            tracing::error!(%error, "a store could not be closed at exit");
        }
    });
}

/// Registers the above with `atexit`.
pub(crate) fn close_at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(_close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (close_all,))?;
    Ok(())
}
