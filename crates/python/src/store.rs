//! The Python class of stores.

use crate::arguments::{
    Keys, budget_of, bytes_of, control, directories, duration, io_choice, put_options,
};
use crate::batch::{BatchMemory, Submission, ask};
use crate::decision::decision;
use crate::device::DevicePages;
use crate::error::{OrRaise, as_setting};
use crate::lease::LeasedPrefix;
use crate::log;
use crate::open::NodeHandle;
use crate::outcome::{Ticket, listed_keys, listed_scopes, stats_of};
use crate::policy::StorePolicy;
use crate::scope::Scope;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use ritornello_format::ScopeSettings;
use ritornello_store::admission::AdmissionMode;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{Decision, Durability, LeaseNumber, Options, parse_codec, parse_index};
use ritornello_tiers::gate::PrefillModel;
use ritornello_volume::transfer::Control;
use std::path::PathBuf;
use std::sync::Arc;

/// A store: the owner of its directory, or a client of the process that owns it.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Store {
    path: PathBuf,
    node: NodeHandle,
    /// Measured prefills of the engine.
    prefills: Mutex<PrefillModel>,
}

#[pymethods]
impl Store {
    /// Opens a store as owner of the directory, or as client of the process that owns it.
    /// `path` is a directory, or a list of directories, one per disk: the first has the metadata.
    /// `capacity` ("200GiB", or bytes) may be omitted for a directory that holds a store. A
    /// `SettingError` means that the value of an argument is invalid for every directory.
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
    // Python callers pass the arguments by name.
    #[allow(clippy::too_many_arguments)]
    fn open(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
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
        log::start(py)?;
        let read = || -> PyResult<Options> {
            let (dir, further_dirs) = directories(path)?;
            let index = index.map(parse_index).transpose().or_raise(py)?;
            Ok(Options {
                further_dirs,
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
                ..Options::new(dir)
            })
        };
        let options = read().map_err(|error| as_setting(py, error))?;
        let node = py.detach(|| ritornello_node::open(&options)).or_raise(py)?;
        let node = NodeHandle::new(node);
        Ok(Self { path: options.dir, node, prefills: Mutex::default() })
    }

    /// Stores pages and returns the number of leading pages now stored, including pages stored
    /// earlier.
    #[pyo3(signature = (scope, keys, pages, *, parent=None, retain_until=None, timeout=None))]
    // Python callers pass the arguments by name.
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
        let (node, control) = (self.node.get(py)?, control(py, timeout)?);
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let memory = BatchMemory::source(pages, keys.len(), scope.page_bytes)?;
        let (store, source) = (node.store(), memory.0.as_ref());
        let put = || store.put_batch(&scope.inner, &keys, source, &terms, &control);
        Ok(memory.finish(py, py.detach(put))?.pages)
    }

    /// Sets the settings of a scope, durably: the codec of its pages, and the bytes that it may
    /// hold and retain. Omitted settings return to the store's default.
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
        self.node.call(py, |store| store.configure(&scope.inner, &settings))
    }

    /// Returns the number of leading pages available.
    fn probe(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let node = self.node.get(py)?;
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let probe = || node.store().probe(&scope.inner, &keys);
        // A probe of an index in this process's memory takes a microsecond, which is less than
        // detaching from the interpreter takes while other threads run. A call that stays attached
        // waits neither for another process nor for a disk nor for a closing store.
        let open = self.node.gate.try_read();
        let attached = open.is_some() && node.answers_at_once();
        let hit = if attached {
            probe()
        } else {
            drop(open);
            py.detach(probe)
        };
        hit.or_raise(py)
    }

    /// Like `probe`, with a lease that keeps the pages readable for `ttl` seconds, at most one
    /// hour, or until it is released. For several scopes: the leading pages that all scopes have.
    /// Leases fewer pages than `probe` counts if the rest exceeds this process's share of the space
    /// that leases may keep from eviction. Raises `RetryError` if not even the first run fits, or
    /// if the process has too many leases or leased runs.
    #[pyo3(signature = (scope, keys, *, ttl=60.0))]
    fn lease_prefix(
        &self,
        py: Python<'_>,
        scope: &Bound<'_, PyAny>,
        keys: &Bound<'_, PyAny>,
        ttl: f64,
    ) -> PyResult<LeasedPrefix> {
        let (node, ttl) = (self.node.get(py)?, duration(py, "ttl", ttl)?);
        let scopes = Scope::some(scope)?;
        let scopes: Vec<_> = scopes.iter().map(|scope| scope.get().inner.as_ref()).collect();
        let leased = ask(keys, |keys| node.store().lease_all(&scopes, keys, ttl))?;
        Ok(LeasedPrefix::new(leased, &node))
    }

    /// Ends a lease of this process by its number. A number that is unknown, or of another
    /// process's lease, is ignored.
    fn release(&self, py: Python<'_>, lease: u64) -> PyResult<()> {
        self.node.call(py, |store| store.release(LeaseNumber(lease)))
    }

    /// Returns, for each page separately, whether it is stored.
    fn exists(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<bool>> {
        let node = self.node.get(py)?;
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
        let (node, control) = (self.node.get(py)?, control(py, timeout)?);
        let held = Keys::of(keys)?;
        let keys = held.slices();
        let memory = BatchMemory::target(out, keys.len(), scope.page_bytes)?;
        let (store, target) = (node.store(), memory.0.as_ref());
        let get = || store.get_batch(&scope.inner, &keys, target, &control);
        Ok(memory.finish(py, py.detach(get))?.pages)
    }

    /// Starts a put. With `copy`, the bytes are copied into bounded staging before the call
    /// returns; the first page that does not fit and all later pages are skipped. Without `copy`,
    /// the memory must not change until the ticket is done. A put of `DevicePages` waits for the
    /// earlier work of stream `after`, and ignores `copy`; `Ticket.order` makes later work wait for
    /// the put.
    #[pyo3(
        signature = (
            scope, keys, pages, *, parent=None, copy=false, retain_until=None, timeout=None,
            after=None
        )
    )]
    // Python callers pass the arguments by name.
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
        after: Option<u64>,
    ) -> PyResult<Ticket> {
        let terms = put_options(parent, retain_until.as_ref())?;
        let node = self.node.get(py)?;
        if let Ok(pages) = pages.cast::<DevicePages>() {
            let (pages, control) = (pages.get(), control(py, timeout)?);
            let (scope, keys) = (Arc::clone(&scope.inner), Keys::of(keys)?.boxed());
            let saved = py.detach(|| pages.save(node.store(), scope, keys, terms, control, after));
            return saved.or_raise(py).map(|(ticket, fence)| Ticket::of_save(ticket, fence));
        }
        let (put, store) = (Submission::put(scope, keys, pages, 0, timeout)?, node.store());
        let (scope, keys, control) = (put.scope, put.keys, put.control);
        if copy {
            let source = put.memory.0.as_ref();
            let submit = || store.submit_put_copy(scope, keys, source, terms, control);
            return Ok(Ticket::new(put.memory.finish(py, py.detach(submit))?, None));
        }
        let source = Arc::clone(&put.memory.0);
        let ticket = py.detach(|| store.submit_put(scope, keys, source, terms, control));
        Ok(Ticket::new(ticket.or_raise(py)?, Some(put.memory)))
    }

    /// Starts a get. `out` belongs to the store until the ticket is done. With `staged`, the bytes
    /// pass through staging, into whose huge pages some disks transfer faster than into small
    /// pages. `sections` are the ends of consecutive sections of a page; the get reads the sections
    /// in order, and `Ticket.wait_section` waits for each. A get into `DevicePages` waits for the
    /// earlier work of stream `after`, and ignores `staged` and `sections`.
    #[pyo3(
        signature = (scope, keys, out, *, staged=false, sections=None, timeout=None, after=None)
    )]
    // Python callers pass the arguments by name.
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
        after: Option<u64>,
    ) -> PyResult<Ticket> {
        let node = self.node.get(py)?;
        if let Ok(pages) = out.cast::<DevicePages>() {
            let (pages, control) = (pages.get(), control(py, timeout)?);
            let (scope, keys) = (Arc::clone(&scope.inner), Keys::of(keys)?.boxed());
            let loaded = py.detach(|| pages.load(node.store(), scope, keys, control, after));
            return loaded.or_raise(py).map(|ticket| Ticket::new(ticket, None));
        }
        let get = Submission::get(scope, keys, out, sections, timeout)?;
        let (store, target) = (node.store(), Arc::clone(&get.memory.0));
        let control = Control { through_staging: staged, ..get.control };
        let ticket = py.detach(|| store.submit_get(get.scope, get.keys, target, control));
        Ok(Ticket::new(ticket.or_raise(py)?, Some(get.memory)))
    }

    /// Marks the leading pages as used; in a scope whose keys do not chain, every page present.
    /// Returns the number of leading pages.
    fn touch(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let node = self.node.get(py)?;
        ask(keys, |keys| node.store().touch(&scope.inner, keys))
    }

    /// Removes pages, in chained scopes with all pages after them; returns how many of `keys` were
    /// present.
    fn delete(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let node = self.node.get(py)?;
        ask(keys, |keys| node.store().delete(&scope.inner, keys))
    }

    /// Drops a scope and its pages, durably on return. The bytes stay on disk until overwritten.
    fn drop_scope(&self, py: Python<'_>, scope: &Scope) -> PyResult<()> {
        self.node.call(py, |store| store.drop_scope(&scope.inner))
    }

    /// Returns the scopes of the store in order of registration: each with its number of pages and
    /// their bytes on disk.
    fn scopes(&self, py: Python<'_>) -> PyResult<Vec<(Scope, u64, u64)>> {
        listed_scopes(py, self.node.call(py, |store| store.scopes())?)
    }

    /// Returns keys of a scope, earlier puts first, and the `after` of the next call, or zero at
    /// the end. Adds whole runs until there are at least `limit` keys; a `limit` above 16,384
    /// counts as 16,384.
    #[pyo3(signature = (scope, *, after=0, limit=1000))]
    fn keys<'py>(
        &self,
        py: Python<'py>,
        scope: &Scope,
        after: u64,
        limit: u32,
    ) -> PyResult<(Vec<Bound<'py, PyBytes>>, u64)> {
        let keys = self.node.call(py, |store| store.keys(&scope.inner, after, limit))?;
        Ok(listed_keys(py, &keys))
    }

    /// Returns the seconds to allow for a get of `nbytes`, or with `put` for a put of `nbytes`:
    /// four times what the slowest measured volume needs (at 64 MiB/s if none was measured), at
    /// most 60, but never less than `least`.
    #[pyo3(signature = (nbytes, least, *, put=false))]
    fn time_limit(&self, py: Python<'_>, nbytes: u64, least: f64, put: bool) -> PyResult<f64> {
        let least = duration(py, "least", least)?;
        Ok(self.node.get(py)?.store().time_limit(nbytes, least, put).as_secs_f64())
    }

    /// Records what the caller decided about the pages of a request, for `ritornello explain`.
    /// Waits for nothing.
    #[pyo3(signature = (
        request, scope, keys, outcome, *, found=0, loaded=0, detail="", estimate=None
    ))]
    // Python callers pass the arguments by name.
    #[allow(clippy::too_many_arguments)]
    fn note_decision(
        &self,
        py: Python<'_>,
        request: &str,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        outcome: &str,
        found: u32,
        loaded: u32,
        detail: &str,
        estimate: Option<(f64, f64)>,
    ) -> PyResult<()> {
        let node = self.node.get(py)?;
        let made = decision(request, scope, keys, outcome, estimate)?;
        let detail = detail.to_owned();
        node.store().note_decision(Decision { found, loaded, detail, ..made });
        Ok(())
    }

    /// Records that the engine computed `tokens` tokens of a prompt in `seconds`; `before` tokens
    /// of the prompt precede them.
    fn record_prefill(
        &self,
        py: Python<'_>,
        before: u64,
        tokens: u64,
        seconds: f64,
    ) -> PyResult<()> {
        let took = duration(py, "seconds", seconds)?;
        self.prefills.lock().record(before, tokens, took);
        Ok(())
    }

    /// Counts `tokens` tokens as loaded in `load_seconds` instead of computed; `before` tokens of
    /// their prompt precede them. Waits for nothing.
    fn note_prefill_avoided(
        &self,
        py: Python<'_>,
        before: u64,
        tokens: u64,
        load_seconds: f64,
    ) -> PyResult<()> {
        let load = duration(py, "load_seconds", load_seconds)?;
        let prefill = self.prefills.lock().estimate(before, tokens);
        self.node.get(py)?.store().note_prefill_avoided(tokens, prefill, load);
        Ok(())
    }

    /// Makes all earlier puts and deletes survive power loss.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.node.call(py, |store| store.flush())
    }

    /// Sets the capacity of the store while it is in use.
    fn resize(&self, py: Python<'_>, capacity: &Bound<'_, PyAny>) -> PyResult<()> {
        let (node, capacity) = (self.node.get(py)?, bytes_of("capacity", capacity)?);
        py.detach(|| node.store().resize(capacity)).or_raise(py)
    }

    /// Drops every scope.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.node.call(py, |store| store.clear())
    }

    /// Returns statistics of the store, and of the transfers of this process.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_of(py, &self.node.call(py, |store| store.stats())?)
    }

    /// Finishes running tickets and cancels queued tickets; as owner, makes all puts durable and
    /// releases the directory. The store stays open while this process has other handles on it. A
    /// second call does nothing. A `RetryError` means that calls or writes have not ended: call
    /// `close` again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.node.close(py).or_raise(py)
    }

    /// Whether the store was closed, or opened before a fork.
    #[getter]
    fn closed(&self) -> bool {
        self.node.is_closed()
    }

    /// The directory, as given.
    #[getter]
    fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// The permissions of the store when it was opened.
    #[getter]
    fn policy(&self, py: Python<'_>) -> PyResult<StorePolicy> {
        Ok(StorePolicy(self.node.get(py)?.policy().clone()))
    }

    /// "owner" or "client" at present: a client takes over when the owner dies or closes.
    #[getter]
    fn role(&self, py: Python<'_>) -> PyResult<&'static str> {
        let node = self.node.get(py)?;
        Ok(py.detach(|| node.role().word()))
    }

    /// Whether this process owns the store and the index is in memory, so that lookups wait for
    /// nothing. False while the store is being reopened or closed.
    #[getter]
    fn answers_at_once(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.node.get(py)?.answers_at_once())
    }

    /// The problem that limits the use of the store; "" if its use is not limited. A client asks
    /// the owner.
    #[getter]
    fn problem(&self, py: Python<'_>) -> PyResult<String> {
        let node = self.node.get(py)?;
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
        let state = self.node.get(py).map_or("closed", |node| py.detach(|| node.role().word()));
        format!("Store({:?}, {state})", self.path)
    }
}
