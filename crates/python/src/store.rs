//! The Python class of stores.

use crate::arguments::{
    BatchMemory, Keys, Submission, ask, budget_of, bytes_of, control, duration, io_choice,
    put_options,
};
use crate::error::{OrRaise, as_setting, raise};
use crate::exit::{CloseGate, close_node_at_exit};
use crate::lease::LeasedPrefix;
use crate::log;
use crate::outcome::Ticket;
use crate::policy::StorePolicy;
use crate::scope::Scope;
use parking_lot::RwLock;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use ritornello_format::{Error, ErrorKind, Result, ScopeSettings};
use ritornello_node::Node;
use ritornello_store::admission::AdmissionMode;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{Durability, LeaseNumber, Options, parse_codec, parse_index};
use ritornello_volume::transfer::Control;
use std::path::PathBuf;
use std::sync::Arc;

/// A store: the owner of its directory, or a client of the process that owns it.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Store {
    path: PathBuf,
    /// `None` once the store is closed.
    node: RwLock<Option<Arc<Node>>>,
    process: u32,
    gate: Arc<CloseGate>,
}

#[pymethods]
impl Store {
    /// Opens a store as owner of the directory, or as client of the process that owns it.
    /// `capacity` ("200GiB", or bytes) may be omitted for a directory that holds a store. A
    /// `SettingError` means that a word or a number is invalid, independent of the directory.
    #[staticmethod]
    #[pyo3(
        signature = (
            path, capacity=None, *, paths=Vec::new(), durability="cache", io="auto",
            eviction="adaptive", codec="raw", admission="auto", write_budget=None, index=None,
            segment_bytes=None,
        ),
        text_signature = "(path, capacity=None, *, paths=(), durability='cache', io='auto', \
                          eviction='adaptive', codec='raw', admission='auto', write_budget=None, \
                          index=None, segment_bytes=None)"
    )]
    // Python callers pass them by name.
    #[allow(clippy::too_many_arguments)]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        capacity: Option<Bound<'_, PyAny>>,
        paths: Vec<PathBuf>,
        durability: &str,
        io: &str,
        eviction: &str,
        codec: &str,
        admission: &str,
        write_budget: Option<Bound<'_, PyAny>>,
        index: Option<&str>,
        segment_bytes: Option<u64>,
    ) -> PyResult<Self> {
        log::start();
        let read = || -> PyResult<Options> {
            let index = index.map(parse_index).transpose().or_raise(py)?;
            Ok(Options {
                capacity: capacity.map(|given| bytes_of("capacity", &given)).transpose()?,
                paths,
                durability: Durability::parse(durability).or_raise(py)?,
                io: io_choice(py, io)?,
                eviction: PolicyKind::parse(eviction).or_raise(py)?,
                codec: parse_codec(codec).or_raise(py)?,
                admission: AdmissionMode::parse(admission).or_raise(py)?,
                write_budget: write_budget.as_ref().map(budget_of).transpose()?,
                index: index.map(|(kind, _)| kind),
                index_memory: index.and_then(|(_, memory)| memory),
                segment_bytes,
                ..Options::new(path.clone())
            })
        };
        let options = read().map_err(|error| as_setting(py, error))?;
        let node = py.detach(|| ritornello_node::open(&options)).or_raise(py)?;
        let (process, gate) = (std::process::id(), close_node_at_exit(&node));
        Ok(Self { path, node: RwLock::new(Some(node)), process, gate })
    }

    /// Stores pages and returns the number of leading pages now stored, including pages stored
    /// earlier.
    #[pyo3(signature = (scope, keys, pages, *, parent=None, retain_until=None, timeout=None))]
    // Python callers pass them by name.
    #[allow(clippy::too_many_arguments)]
    fn put_batch(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        parent: Option<&[u8]>,
        retain_until: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<usize> {
        let terms = put_options(parent, retain_until.as_ref())?;
        let (node, control) = (self.node(py)?, control(py, timeout)?);
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let batch = BatchMemory::source(pages, keys.len(), scope.page_bytes)?;
        let (store, source) = (node.store(), batch.as_source());
        let outcome = py.detach(|| store.put_batch(&scope.inner, &keys, source, &terms, &control));
        batch.release(py);
        Ok(outcome.or_raise(py)?.pages)
    }

    /// Sets the settings of a scope, durably: the codec of its pages, and the bytes that it may
    /// hold and retain. Omitted ones return to the store's default.
    #[pyo3(signature = (scope, *, codec=None, quota=None, retained=None))]
    fn configure(
        &self,
        py: Python<'_>,
        scope: &Scope,
        codec: Option<&str>,
        quota: Option<Bound<'_, PyAny>>,
        retained: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let settings = ScopeSettings {
            codec: codec.map(parse_codec).transpose().or_raise(py)?.map(|codec| codec.number()),
            quota_bytes: quota.map(|given| bytes_of("quota", &given)).transpose()?,
            retained_bytes: retained.map(|given| bytes_of("retained", &given)).transpose()?,
        };
        self.call(py, |store| store.configure(&scope.inner, &settings))
    }

    /// Returns the number of leading pages available.
    fn probe(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let node = self.node(py)?;
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let probe = || node.store().probe(&scope.inner, &keys);
        // Probing in memory takes a microsecond, less than detaching costs while other threads run.
        // An attached call never waits: neither for another process nor for a closing store.
        let open = self.gate.try_read();
        let attached = open.is_some() && node.answers_at_once();
        let hit = if attached {
            probe()
        } else {
            drop(open);
            py.detach(probe)
        };
        hit.or_raise(py)
    }

    /// Like `probe`, with a lease that keeps the pages readable for `ttl` seconds or until it is
    /// released. For several scopes: the leading pages that all scopes have.
    #[pyo3(signature = (scope, keys, *, ttl=60.0))]
    fn lease_prefix(
        &self,
        py: Python<'_>,
        scope: &Bound<'_, PyAny>,
        keys: &Bound<'_, PyAny>,
        ttl: f64,
    ) -> PyResult<LeasedPrefix> {
        let (node, ttl) = (self.node(py)?, duration(py, "ttl", ttl)?);
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let scopes = Scope::some(scope)?;
        let scopes: Vec<_> = scopes.iter().map(|scope| scope.get().inner.as_ref()).collect();
        let leased = py.detach(|| node.store().lease_all(&scopes, &keys, ttl)).or_raise(py)?;
        Ok(LeasedPrefix::new(leased, &node))
    }

    /// Ends a lease of this process by its number. An unknown one is ignored.
    fn release(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        self.call(py, |store| store.release(LeaseNumber(lease)))
    }

    /// Returns, for each page separately, whether it is stored.
    fn exists(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<bool>> {
        let node = self.node(py)?;
        ask(keys, |keys| node.store().exists(&scope.inner, keys))
    }

    /// Fills `out` and returns the number of leading pages filled and verified. `out` may be longer
    /// than `keys`. The contents of pages after the filled pages are unspecified.
    #[pyo3(signature = (scope, keys, out, *, timeout=None))]
    fn get_batch(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<usize> {
        let (node, control) = (self.node(py)?, control(py, timeout)?);
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let batch = BatchMemory::target(out, keys.len(), scope.page_bytes)?;
        let (store, target) = (node.store(), batch.as_target());
        let outcome = py.detach(|| store.get_batch(&scope.inner, &keys, target, &control));
        batch.release(py);
        Ok(outcome.or_raise(py)?.pages)
    }

    /// Starts a put. With `copy` the bytes are copied into bounded staging before the call returns,
    /// and pages that do not fit are skipped; without, the memory must not change until the ticket
    /// is done.
    #[pyo3(
        signature = (
            scope, keys, pages, *, parent=None, copy=false, retain_until=None, timeout=None
        )
    )]
    // Python callers pass them by name.
    #[allow(clippy::too_many_arguments)]
    fn submit_put(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        parent: Option<&[u8]>,
        copy: bool,
        retain_until: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Ticket> {
        let terms = put_options(parent, retain_until.as_ref())?;
        let node = self.node(py)?;
        let (put, store) = (Submission::put(scope, keys, pages, 0, timeout)?, node.store());
        let (scope, keys, control) = (put.scope, put.keys, put.control);
        if copy {
            let source = put.batch.as_source();
            let ticket = py.detach(|| store.submit_put_copy(scope, keys, source, terms, control));
            put.batch.release(py);
            return Ok(Ticket::new(ticket.or_raise(py)?, None));
        }
        let source = put.batch.to_source();
        let ticket = py.detach(|| store.submit_put(scope, keys, source, terms, control));
        Ok(Ticket::new(ticket.or_raise(py)?, Some(put.batch)))
    }

    /// Starts a get. `out` belongs to the store until the ticket is done. With `staged` the bytes
    /// pass through staging, into whose huge pages some disks transfer faster than into small
    /// pages. `sections` of the pages are read in order: `Ticket.wait_section`.
    #[pyo3(signature = (scope, keys, out, *, staged=false, sections=None, timeout=None))]
    // Python callers pass them by name.
    #[allow(clippy::too_many_arguments)]
    fn submit_get(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        staged: bool,
        sections: Option<Vec<u64>>,
        timeout: Option<f64>,
    ) -> PyResult<Ticket> {
        let node = self.node(py)?;
        let get = Submission::get(scope, keys, out, sections, timeout)?;
        let (store, target) = (node.store(), get.batch.to_target());
        let control = Control { through_staging: staged, ..get.control };
        let ticket = py.detach(|| store.submit_get(get.scope, get.keys, target, control));
        Ok(Ticket::new(ticket.or_raise(py)?, Some(get.batch)))
    }

    /// Marks the leading pages as used; returns their number.
    fn touch(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let node = self.node(py)?;
        ask(keys, |keys| node.store().touch(&scope.inner, keys))
    }

    /// Removes pages, in chained scopes with all pages after them; returns how many of `keys` were
    /// removed.
    fn delete(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let node = self.node(py)?;
        ask(keys, |keys| node.store().delete(&scope.inner, keys))
    }

    /// Drops a scope and its pages, durably on return. The bytes stay on disk until overwritten.
    fn drop_scope(&self, py: Python<'_>, scope: &Scope) -> PyResult<()> {
        self.call(py, |store| store.drop_scope(&scope.inner))
    }

    /// Returns the scopes of the store in order of registration: each with its number of pages and
    /// their bytes on disk.
    fn scopes(&self, py: Python<'_>) -> PyResult<Vec<(Scope, u64, u64)>> {
        let held = self.call(py, |store| store.scopes())?;
        let each = held.into_iter();
        each.map(|held| Ok((Scope::of(py, held.scope)?, held.pages, held.bytes))).collect()
    }

    /// Returns at most `limit` keys of a scope, earlier puts first, and the `after` of the next
    /// call, or zero at the end.
    #[pyo3(signature = (scope, *, after=0, limit=1000))]
    fn keys<'py>(
        &self,
        py: Python<'py>,
        scope: &Scope,
        after: u64,
        limit: u32,
    ) -> PyResult<(Vec<Bound<'py, PyBytes>>, u64)> {
        let held = self.call(py, |store| store.keys(&scope.inner, after, limit))?;
        Ok((held.keys.iter().map(|key| PyBytes::new(py, key)).collect(), held.last))
    }

    /// Makes all earlier puts survive power loss.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |store| store.flush())
    }

    /// Sets the capacity of the store while it is in use.
    fn resize(&self, py: Python<'_>, capacity: &Bound<'_, PyAny>) -> PyResult<()> {
        let (node, capacity) = (self.node(py)?, bytes_of("capacity", capacity)?);
        py.detach(|| node.store().resize(capacity)).or_raise(py)
    }

    /// Drops every scope.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |store| store.clear())
    }

    /// Returns figures of the store, and of the transfers of this process.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_of(py, &self.call(py, |store| store.stats())?)
    }

    /// Finishes running tickets, cancels queued tickets, makes all puts durable, and releases the
    /// directory. A second call does nothing. After a `RetryError` writes of this process are in
    /// flight: close again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.close_node(py).or_raise(py)
    }

    /// Whether the store was closed, or opened before a fork.
    #[getter]
    fn closed(&self) -> bool {
        self.node.read().is_none() || std::process::id() != self.process
    }

    /// The directory, as given.
    #[getter]
    fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// The permissions of the store when it was opened.
    #[getter]
    fn policy(&self, py: Python<'_>) -> PyResult<StorePolicy> {
        Ok(StorePolicy(self.node(py)?.policy().clone()))
    }

    /// "owner" or "client" at present: a client takes over when the owner dies.
    #[getter]
    fn role(&self, py: Python<'_>) -> PyResult<&'static str> {
        let node = self.node(py)?;
        Ok(py.detach(|| node.role().word()))
    }

    /// The problem that limits the use of the store; "" if it is not limited. A client asks its
    /// owner.
    #[getter]
    fn problem(&self, py: Python<'_>) -> PyResult<String> {
        let node = self.node(py)?;
        Ok(py.detach(|| node.problem()).unwrap_or_default())
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
        self.close(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = self.node(py).map_or("closed", |node| py.detach(|| node.role().word()));
        format!("Store({:?}, {state})", self.path)
    }
}

impl Store {
    /// Runs `action` on the store, detached from the interpreter.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        action: impl FnOnce(&ritornello_store::Store) -> Result<T> + Send,
    ) -> PyResult<T> {
        let node = self.node(py)?;
        py.detach(|| action(node.store())).or_raise(py)
    }

    /// Returns the node. Fails if all calls of the node would fail, so that a ticket is refused at
    /// its submission.
    fn node(&self, py: Python<'_>) -> PyResult<Arc<Node>> {
        let message = if std::process::id() != self.process {
            "this store was opened before a fork: open it again in the child"
        } else if let Some(node) = self.node.read().as_ref() {
            if !node.is_replaced() {
                return Ok(Arc::clone(node));
            }
            "another store has replaced this store: open it again"
        } else {
            "the store is closed: open it again"
        };
        Err(raise(py, &Error::new(ErrorKind::Closed, message)))
    }

    /// Closes the node once, detached from the interpreter, because running tickets are waited for.
    ///
    /// # Errors
    /// Errors of [`Node::close`]; after `Retry` the node must be closed again.
    fn close_node(&self, py: Python<'_>) -> Result<()> {
        let node = self.node.write().take();
        let Some(node) = node else { return Ok(()) };
        let closed = py.detach(|| {
            // In the child of a fork a thread of the parent may hold the gate forever.
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

impl Drop for Store {
    fn drop(&mut self) {
        // At the interpreter's end attaching fails; the system cleans up. The node has logged a
        // failure.
        let _ = Python::try_attach(|py| self.close_node(py));
    }
}

/// Converts figures to a dictionary.
pub(crate) fn stats_of<'py>(
    py: Python<'py>,
    stats: &impl serde::Serialize,
) -> PyResult<Bound<'py, PyDict>> {
    let text = serde_json::to_string(stats)
        .map_err(|error| Error::fatal("the figures cannot be written as JSON").because(error))
        .or_raise(py)?;
    Ok(py.import("json")?.call_method1("loads", (text,))?.cast_into()?)
}
