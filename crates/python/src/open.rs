//! The nodes and caches that Python has open, and their closing when the interpreter exits.

use crate::error::{OrRaise, raise};
use parking_lot::{Mutex, RwLock};
use pyo3::prelude::*;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_node::Node;
use ritornello_store::Store;
use ritornello_tiers::cache::Cache;
use std::mem;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum time that the interpreter's exit waits for stores that other threads are closing: with a
/// hung disk, closing a store may never end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Nodes to close at exit, each if this process opened it.
static NODES: Mutex<Vec<OpenNode>> = Mutex::new(Vec::new());
/// Caches to close at exit, before the nodes.
static CACHES: Mutex<Vec<Weak<Cache>>> = Mutex::new(Vec::new());

/// A node that may still be open, and the process that opened it.
struct OpenNode {
    process: u32,
    node: Weak<Node>,
    gate: Arc<CloseGate>,
}

/// Held for writing while a node is closed, which may take seconds. A call that stays attached to
/// the interpreter holds the gate for reading. A call that cannot take the gate immediately
/// detaches instead, so that no attached call waits for a closing store.
pub(crate) type CloseGate = RwLock<()>;

/// Handle of a node, usable until the node is closed, and only in the process that opened it.
pub(crate) struct NodeHandle {
    /// `None` once the node is closed.
    node: RwLock<Option<Arc<Node>>>,
    process: u32,
    pub(crate) gate: Arc<CloseGate>,
}

impl NodeHandle {
    pub(crate) fn new(node: Arc<Node>) -> Self {
        let (process, gate) = (std::process::id(), close_node_at_exit(&node));
        Self { node: RwLock::new(Some(node)), process, gate }
    }

    /// Whether the node was closed, or opened before a fork.
    pub(crate) fn is_closed(&self) -> bool {
        self.node.read().is_none() || std::process::id() != self.process
    }

    /// Returns the node. Fails if every call of the node would fail: the node is closed, was opened
    /// before a fork, or left its store because the path no longer leads to the store. Submissions
    /// of tickets call this function, so they raise the error immediately, not through the ticket.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<Node>> {
        let message = if std::process::id() != self.process {
            "this store was opened before a fork: open it again in the child"
        } else if let Some(node) = self.node.read().as_ref() {
            if !node.is_replaced() {
                return Ok(Arc::clone(node));
            }
            "the store's path no longer leads to this store: open it again"
        } else {
            "the store is closed: open it again"
        };
        Err(raise(py, &Error::new(ErrorKind::Closed, message)))
    }

    /// Runs `action` on the store, detached from the interpreter.
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&Store) -> Result<T> + Send,
    ) -> PyResult<T> {
        let node = self.get(py)?;
        py.detach(|| action(node.store())).or_raise(py)
    }

    /// Closes the node once, detached from the interpreter, because closing waits for running
    /// tickets.
    ///
    /// # Errors
    /// Errors of [`Node::close`]; after `Retry` the node must be closed again.
    pub(crate) fn close(&self, py: Python<'_>) -> Result<()> {
        let node = self.node.write().take();
        let Some(node) = node else { return Ok(()) };
        let closed = py.detach(|| {
            // Do not lock the gate in a forked child: a thread of the parent may have held it
            // during the fork.
            let is_opener = self.process == std::process::id();
            let _closing = is_opener.then(|| self.gate.write());
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

impl Drop for NodeHandle {
    fn drop(&mut self) {
        // Attaching fails while the interpreter ends; the kernel then releases files and locks. An
        // error is ignored, because a drop cannot raise it.
        let _ = Python::try_attach(|py| self.close(py));
    }
}

/// Registers `node` to be closed when the interpreter exits, unless it is dropped before. Returns
/// the node's gate.
fn close_node_at_exit(node: &Arc<Node>) -> Arc<CloseGate> {
    let gate = Arc::new(CloseGate::new(()));
    let mut nodes = NODES.lock();
    nodes.retain(|open_node| open_node.node.strong_count() > 0);
    let (process, node) = (std::process::id(), Arc::downgrade(node));
    nodes.push(OpenNode { process, node, gate: Arc::clone(&gate) });
    gate
}

/// Registers `cache` to be closed when the interpreter exits, unless it is dropped before.
pub(crate) fn close_cache_at_exit(cache: &Arc<Cache>) {
    let mut caches = CACHES.lock();
    caches.retain(|cache| cache.strong_count() > 0);
    caches.push(Arc::downgrade(cache));
}

/// Closes all caches and nodes that this process has open, so that earlier puts become durable
/// before the process's threads are stopped; writes that a cache has queued are discarded. Waits at
/// most [`EXIT_TIMEOUT`] for nodes that other threads are closing.
#[pyfunction]
fn _close_all(py: Python<'_>) {
    let open = mem::take(&mut *NODES.lock());
    let process = std::process::id();
    let own = open.into_iter().filter(|open_node| open_node.process == process);
    let nodes: Vec<_> =
        own.filter_map(|open_node| Some((open_node.node.upgrade()?, open_node.gate))).collect();
    py.detach(|| {
        let caches = mem::take(&mut *CACHES.lock());
        for cache in caches.iter().filter_map(Weak::upgrade) {
            if let Err(error) = cache.close() {
                tracing::error!(%error, "a cache could not be closed at exit");
            }
        }
        let until = Instant::now() + EXIT_TIMEOUT;
        for (node, gate) in &nodes {
            let Some(_closing) = gate.try_write_until(until) else {
                let dir = node.path().display();
                tracing::error!(%dir, "a store is still being closed at exit: its disk does not answer");
                continue;
            };
            if let Err(error) = node.close() {
                tracing::error!(%error, "a store could not be closed at exit");
            }
        }
        ritornello_cli::log::finish();
    });
}

/// Registers `_close_all` with `atexit`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(_close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (close_all,))?;
    Ok(())
}
