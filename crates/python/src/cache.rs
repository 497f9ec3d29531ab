//! The Python class of a cache over several tiers.

use crate::arguments::{bytes_of, duration, put_options};
use crate::batch::{Submission, ask};
use crate::decision::decision;
use crate::error::{OrRaise, as_setting, invalid, raise};
use crate::log;
use crate::lookup::Lookup;
use crate::open::close_cache_at_exit;
use crate::outcome::{Ticket, listed_keys, listed_scopes, stats_of};
use crate::policy::StorePolicy;
use crate::scope::Scope;
use parking_lot::RwLock;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use ritornello_format::residency::Tier;
use ritornello_format::{Error, ErrorKind};
use ritornello_store::{Decision, LeaseNumber};
use ritornello_tiers::cache::{
    self, LookupOptions, PrefetchPolicy, Settings, TierLease, TierSpec, tier_name,
};
use ritornello_tiers::gate::LoadMode;
use ritornello_volume::transfer::Control;
use std::sync::Arc;

/// A cache over several tiers: memory, disks and remotes. Looks up, loads and puts pages.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Cache {
    /// Tiers as given, without the options and user information of an address.
    tiers: Vec<String>,
    cache: RwLock<Option<Arc<cache::Cache>>>,
}

#[pymethods]
impl Cache {
    /// Opens a list of tiers, fastest first: "host 8GiB", "disk /nvme/kv 200GiB",
    /// "s3://bucket/prefix".
    #[staticmethod]
    #[pyo3(signature = (tiers, *, prefetch="timeout", write_queue=None))]
    fn open(
        py: Python<'_>,
        tiers: Vec<String>,
        prefetch: &str,
        write_queue: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        log::start(py)?;
        let read = || -> PyResult<_> {
            let mut settings = Settings {
                prefetch: PrefetchPolicy::parse(prefetch).or_raise(py)?,
                ..Settings::default()
            };
            if let Some(given) = &write_queue {
                settings.write_queue = bytes_of("write_queue", given)?;
            }
            Ok((TierSpec::list(&tiers).or_raise(py)?, settings))
        };
        let (list, settings) = read().map_err(|error| as_setting(py, error))?;
        let cache = py
            .detach(|| {
                cache::Cache::open(&list, &settings, |address| {
                    Ok(ritornello_remote::open_deferred(address)?.tier())
                })
            })
            .or_raise(py)?;
        let cache = Arc::new(cache);
        close_cache_at_exit(&cache);
        let tiers = tiers.iter().map(|tier| TierSpec::shown(tier)).collect();
        Ok(Self { tiers, cache: RwLock::new(Some(cache)) })
    }

    /// Looks up a prompt, starting at its first page. Leases, for `ttl` seconds, the pages on this
    /// machine that are to be loaded.
    #[pyo3(signature = (
        scope, keys, *, ttl=60.0, gate="auto", page_tokens=0, page_bytes=0, computed=0, tokens=0
    ))]
    // Python callers pass the arguments by name.
    #[allow(clippy::too_many_arguments)]
    fn lookup(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        ttl: f64,
        gate: &str,
        page_tokens: u64,
        page_bytes: u64,
        computed: u64,
        tokens: u64,
    ) -> PyResult<Lookup> {
        let (cache, ttl) = (self.cache(py)?, duration(py, "ttl", ttl)?);
        let mode = LoadMode::parse(gate).or_raise(py)?;
        let options = LookupOptions { mode, page_tokens, page_bytes, computed, tokens };
        ask(keys, |keys| cache.lookup(&scope.inner, keys, ttl, &options)).map(Lookup)
    }

    /// Returns the seconds to allow for a get of `nbytes`, or with `put` for a put of `nbytes`: at
    /// least `least`.
    #[pyo3(signature = (nbytes, least, *, put=false))]
    fn time_limit(&self, py: Python<'_>, nbytes: u64, least: f64, put: bool) -> PyResult<f64> {
        let least = duration(py, "least", least)?;
        Ok(self.cache(py)?.time_limit(nbytes, least, put).as_secs_f64())
    }

    /// Marks the leading pages as used on each tier of this machine; in a scope whose keys do not
    /// chain, every page present. Returns the largest number of leading pages that one tier has.
    fn touch(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let cache = self.cache(py)?;
        ask(keys, |keys| cache.touch(&scope.inner, keys))
    }

    /// Ends a lease of this process. A lease that is unknown, or of another process, is ignored.
    fn release(&self, py: Python<'_>, lease: (String, u64)) -> PyResult<()> {
        let (cache, tier) = (self.cache(py)?, tier_of(py, &lease.0)?);
        let lease = TierLease { tier, lease: LeaseNumber(lease.1) };
        py.detach(|| cache.release(lease)).or_raise(py)
    }

    /// Returns for each page whether a tier of this machine has it, even if an earlier page is
    /// missing.
    fn exists(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<bool>> {
        let cache = self.cache(py)?;
        ask(keys, |keys| cache.exists(&scope.inner, keys))
    }

    /// Returns the number of leading pages on tiers of this machine. Leases no page and queries no
    /// remote.
    fn probe(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let cache = self.cache(py)?;
        ask(keys, |keys| cache.probe(&scope.inner, keys))
    }

    /// Removes pages from the tiers of this machine, in chained scopes with all pages after them.
    /// Returns how many of `keys` were on at least one of these tiers. Pages on a remote stay.
    fn delete(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let cache = self.cache(py)?;
        ask(keys, |keys| cache.delete(&scope.inner, keys))
    }

    /// Drops a scope and its pages from the tiers of this machine, durably on return. Pages on a
    /// remote stay.
    fn drop_scope(&self, py: Python<'_>, scope: &Scope) -> PyResult<()> {
        let cache = self.cache(py)?;
        py.detach(|| cache.drop_scope(&scope.inner)).or_raise(py)
    }

    /// Returns the scopes of the lowest tier of this machine in order of registration: each with
    /// its number of pages and their bytes on disk.
    fn scopes(&self, py: Python<'_>) -> PyResult<Vec<(Scope, u64, u64)>> {
        let cache = self.cache(py)?;
        listed_scopes(py, py.detach(|| cache.scopes()).or_raise(py)?)
    }

    /// Returns keys of a scope on the lowest tier of this machine, as `Store.keys` does.
    #[pyo3(signature = (scope, *, after=0, limit=1000))]
    fn keys<'py>(
        &self,
        py: Python<'py>,
        scope: &Scope,
        after: u64,
        limit: u32,
    ) -> PyResult<(Vec<Bound<'py, PyBytes>>, u64)> {
        let cache = self.cache(py)?;
        let keys = py.detach(|| cache.keys(&scope.inner, after, limit)).or_raise(py)?;
        Ok(listed_keys(py, &keys))
    }

    /// Cancels prefetches and promotions of a prompt whose request has ended. Returns whether any
    /// were queued or running.
    fn cancel(&self, py: Python<'_>, scope: &Scope, keys: &Bound<'_, PyAny>) -> PyResult<bool> {
        let cache = self.cache(py)?;
        ask(keys, |keys| cache.cancel(&scope.inner, keys))
    }

    /// Starts to read pages. `out` belongs to the cache until the ticket is done. With `staged`,
    /// pages on a disk are read into staging memory and copied, not read directly into `out`.
    #[pyo3(signature = (
        scope, keys, out, *, parent=None, staged=false, sections=None, timeout=None
    ))]
    // Python callers pass the arguments by name.
    #[allow(clippy::too_many_arguments)]
    fn submit_get(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        parent: Option<&[u8]>,
        staged: bool,
        sections: Option<Vec<u64>>,
        timeout: Option<f64>,
    ) -> PyResult<Ticket> {
        let (cache, parent) = (self.cache(py)?, parent.map(Into::into));
        let get = Submission::get(scope, keys, out, sections, timeout)?;
        let target = Arc::clone(&get.memory.0);
        let control = Control { through_staging: staged, ..get.control };
        let submit = || cache.submit_get(get.scope, get.keys, parent, target, control);
        Ok(Ticket::new(py.detach(submit).or_raise(py)?, Some(get.memory)))
    }

    /// Starts to put the pages of a prompt, starting at page `first`. With `copy`, the bytes are
    /// copied before the call returns, and pages for which staging has no space are skipped.
    /// Without `copy`, the memory must not change until the ticket is done.
    #[pyo3(signature = (
        scope, keys, pages, *, first=0, parent=None, copy=true, retain_until=None, timeout=None
    ))]
    // Python callers pass the arguments by name.
    #[allow(clippy::too_many_arguments)]
    fn submit_put(
        &self,
        py: Python<'_>,
        scope: &Scope,
        keys: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        first: usize,
        parent: Option<&[u8]>,
        copy: bool,
        retain_until: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Ticket> {
        let options = put_options(parent, retain_until.as_ref())?;
        let cache = self.cache(py)?;
        let put = Submission::put(scope, keys, pages, first, timeout)?;
        let (scope, keys, control) = (put.scope, put.keys, put.control);
        if copy {
            let source = put.memory.0.as_ref();
            let submit = || cache.submit_put_copy(scope, keys, first, source, options, control);
            return Ok(Ticket::new(put.memory.finish(py, py.detach(submit))?, None));
        }
        let source = Arc::clone(&put.memory.0);
        let ticket = py.detach(|| cache.submit_put(scope, keys, first, source, options, control));
        Ok(Ticket::new(ticket.or_raise(py)?, Some(put.memory)))
    }

    /// Records that the engine computed `tokens` tokens in `seconds`, after `before` earlier
    /// tokens.
    fn record_prefill(
        &self,
        py: Python<'_>,
        before: u64,
        tokens: u64,
        seconds: f64,
    ) -> PyResult<()> {
        let took = duration(py, "seconds", seconds)?;
        self.cache(py)?.record_prefill(before, tokens, took);
        Ok(())
    }

    /// Records that another process loaded `bytes` from a tier in `seconds`.
    fn record_load(&self, py: Python<'_>, tier: &str, bytes: u64, seconds: f64) -> PyResult<()> {
        let (tier, took) = (tier_of(py, tier)?, duration(py, "seconds", seconds)?);
        self.cache(py)?.record_load(tier, bytes, took);
        Ok(())
    }

    /// Returns the loads of this process since the last call: for each tier, their total bytes and
    /// seconds. Another process can pass them to `record_load`.
    fn take_loads(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, u64, f64)>> {
        let loads = self.cache(py)?.take_loads();
        Ok(loads.into_iter().map(|(tier, bytes, took)| (tier_name(tier), bytes, took)).collect())
    }

    /// Records that the load which the gate decided on in the lookup `found` took `seconds`.
    /// Statistics compare this time with the gate's estimates. Does nothing if the gate made no
    /// decision.
    fn record_outcome(&self, py: Python<'_>, found: &Lookup, seconds: f64) -> PyResult<()> {
        let took = duration(py, "seconds", seconds)?;
        let cache = self.cache(py)?;
        if let Some(decision) = &found.0.decision {
            cache.record_outcome(took, decision.compute, decision.recompute);
        }
        Ok(())
    }

    /// Records what the caller decided about the pages of a request, as `Store.note_decision` does,
    /// for the lowest tier of this machine.
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
        let cache = self.cache(py)?;
        let made = decision(request, scope, keys, outcome, estimate)?;
        let detail = detail.to_owned();
        cache.note_decision(Decision { found, loaded, detail, ..made }).or_raise(py)
    }

    /// Counts tokens that were loaded and not computed, as `Store.note_prefill_avoided` does, for
    /// the lowest tier of this machine.
    fn note_prefill_avoided(
        &self,
        py: Python<'_>,
        before: u64,
        tokens: u64,
        load_seconds: f64,
    ) -> PyResult<()> {
        let load = duration(py, "load_seconds", load_seconds)?;
        self.cache(py)?.note_prefill_avoided(before, tokens, load).or_raise(py)
    }

    /// Returns statistics of the cache and its tiers.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let cache = self.cache(py)?;
        let stats = py.detach(|| cache.stats()).or_raise(py)?;
        stats_of(py, &stats)
    }

    /// Writes all dirty pages to lower tiers, waits for all queued writes, and makes the tiers of
    /// this machine durable.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.cache(py)?;
        py.detach(|| cache.flush()).or_raise(py)
    }

    /// Stops background work and closes the tiers. Discards queued writes: call `flush` first. A
    /// second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(cache) = self.cache.write().take() else { return Ok(()) };
        py.detach(|| {
            let closed = cache.close();
            drop(cache);
            closed
        })
        .or_raise(py)
    }

    /// Whether the cache was closed, was opened before a fork, or has closed a tier whose path no
    /// longer leads to the tier's store.
    #[getter]
    fn closed(&self) -> bool {
        self.cache.read().as_ref().is_none_or(|cache| cache.is_closed())
    }

    /// The permissions of the lowest tier of this machine when the tier was opened.
    #[getter]
    fn policy(&self, py: Python<'_>) -> PyResult<StorePolicy> {
        Ok(StorePolicy(self.cache(py)?.policy().or_raise(py)?))
    }

    /// Capacity of the lowest tier of this machine, in bytes.
    #[getter]
    fn capacity_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        let cache = self.cache(py)?;
        py.detach(|| cache.capacity_bytes()).or_raise(py)
    }

    /// "owner" if this process owns all tiers of this machine at present, else "client".
    #[getter]
    fn role(&self, py: Python<'_>) -> PyResult<&'static str> {
        let cache = self.cache(py)?;
        Ok(py.detach(|| cache.role()).or_raise(py)?.word())
    }

    /// Whether this process owns all tiers of this machine, and their indexes are in memory, so that
    /// lookups in these tiers wait for nothing.
    #[getter]
    fn answers_at_once(&self, py: Python<'_>) -> PyResult<bool> {
        self.cache(py)?.answers_at_once().or_raise(py)
    }

    /// The problem that limits the use of a tier of this machine; "" if none is limited.
    #[getter]
    fn problem(&self, py: Python<'_>) -> PyResult<String> {
        let cache = self.cache(py)?;
        Ok(py.detach(|| cache.problem()).or_raise(py)?.unwrap_or_default())
    }

    /// The list of tiers as given, without the options and user information of an address.
    #[getter]
    fn tiers(&self) -> Vec<String> {
        self.tiers.clone()
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

    fn __repr__(&self) -> String {
        format!("Cache({:?}{})", self.tiers, if self.closed() { ", closed" } else { "" })
    }
}

impl Cache {
    fn cache(&self, py: Python<'_>) -> PyResult<Arc<cache::Cache>> {
        if let Some(cache) = self.cache.read().as_ref() {
            return Ok(Arc::clone(cache));
        }
        Err(raise(py, &Error::new(ErrorKind::Closed, "the cache is closed: open it again")))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Attaching fails while the interpreter ends; the kernel then releases files and locks.
        let _ = Python::try_attach(|py| self.close(py));
    }
}

fn tier_of(py: Python<'_>, word: &str) -> PyResult<Tier> {
    let found = Tier::ALL.into_iter().find(|tier| tier_name(*tier) == word);
    found.ok_or_else(|| invalid(py, format!("a tier is host, disk or remote, not {word:?}")))
}
