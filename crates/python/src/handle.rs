//! A Python store's hold on its node: closed once, at exit at the latest.

use crate::error::raise;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use pyo3::prelude::*;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_node::Node;
use std::mem;
use std::sync::{Arc, Weak};

/// What may still have to be closed at exit.
static OPEN: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// A node that was opened and perhaps not closed, and the process that opened it.
struct Opened {
    process: u32,
    node: Weak<Node>,
    gate: Arc<Gate>,
}

/// Held for writing while a node is closed, and for reading by calls that stay attached to the
/// interpreter: so no such call ever waits for a closing store, which may take seconds.
type Gate = RwLock<()>;

/// A node until it is closed.
pub(crate) struct Handle {
    node: RwLock<Option<Arc<Node>>>,
    process: u32,
    gate: Arc<Gate>,
}

impl Handle {
    pub(crate) fn new(node: Arc<Node>) -> Self {
        let process = std::process::id();
        let gate = Arc::new(Gate::new(()));
        let mut open = OPEN.lock();
        open.retain(|opened| opened.node.strong_count() > 0);
        open.push(Opened { process, node: Arc::downgrade(&node), gate: Arc::clone(&gate) });
        Self { node: RwLock::new(Some(node)), process, gate }
    }

    /// `None` while the store is being closed. Until the guard is dropped, that does not begin.
    pub(crate) fn unless_closing(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.gate.try_read()
    }

    /// The node, unless its calls can only fail: so tickets are refused when they are submitted, and
    /// not one by one later.
    pub(crate) fn node(&self, py: Python<'_>) -> PyResult<Arc<Node>> {
        let message = if std::process::id() != self.process {
            "this store was opened before a fork: open it again in the child"
        } else if let Some(node) = self.node.read().as_ref() {
            if !node.is_replaced() {
                return Ok(Arc::clone(node));
            }
            "another store has taken this one's place: open it again"
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
        let closed = py.detach(|| {
            // In the child of a fork the gate may be held by a thread that is not there.
            let mine = self.process == std::process::id();
            let _closing = mine.then(|| self.gate.write());
            node.close()
        });
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
    let mine = open.into_iter().filter(|opened| opened.process == me);
    let nodes: Vec<_> =
        mine.filter_map(|opened| Some((opened.node.upgrade()?, opened.gate))).collect();
    py.detach(|| {
        crate::cache::close_all();
        for (node, gate) in &nodes {
            let _closing = gate.write();
            if let Err(error) = node.close() {
                tracing::error!(%error, "a store could not be closed at exit");
            }
        }
    });
}

/// Registers the above with `atexit`.
pub(crate) fn close_at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(_close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (close_all,))?;
    Ok(())
}
