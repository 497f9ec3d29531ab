//! The Python class of a lookup's result.

use pyo3::prelude::*;
use ritornello_tiers::cache::{self, tier_name};
use std::time::Duration;

/// The result of a lookup. For a scope whose keys do not chain, all numbers count pages anywhere in
/// the keys instead of leading pages.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Lookup(pub(crate) cache::Lookup);

#[pymethods]
impl Lookup {
    /// "ready", "querying" or "loading". Unless it is "ready", the caller repeats the lookup later.
    #[getter]
    fn state(&self) -> &'static str {
        self.0.readiness.word()
    }
    /// The tiers that hold the leading pages, in the order of the pages, each with the number of
    /// pages that it holds.
    #[getter]
    fn spans(&self) -> Vec<(&'static str, usize)> {
        self.0.spans.iter().map(|span| (tier_name(span.tier), span.pages)).collect()
    }
    /// Number of leading pages that tiers of this machine hold; fewer if the limit on the leases of
    /// a process was reached.
    #[getter]
    fn local(&self) -> usize {
        self.0.local
    }
    /// Number of leading pages that the engine should have after the load: it loads the pages among
    /// them that it lacks. Zero if the gate chose to load nothing.
    #[getter]
    fn load(&self) -> usize {
        self.0.load
    }
    /// Pages fetched from the remote for this prompt, so far. The first lookup after the end of the
    /// fetch reports them for the last time.
    #[getter]
    fn fetched(&self) -> usize {
        self.0.fetched
    }
    /// While the state is "loading": pages that have arrived from the remote, and pages to fetch in
    /// all.
    #[getter]
    fn progress(&self) -> (usize, usize) {
        self.0.progress
    }
    /// The gate's estimates in seconds: of the load, of computing the remaining tokens, and of
    /// computing all tokens that the engine lacks, without a load. `None` while the lookup is not
    /// "ready", and if the lookup skipped the gate, no prefill was recorded yet, the engine lacks
    /// no tokens of the prompt, or no page was found that the engine lacks.
    #[getter]
    fn estimate(&self) -> Option<(f64, f64, f64)> {
        let seconds = |took: Duration| took.as_secs_f64();
        let decision = self.0.decision.as_ref()?;
        Some((seconds(decision.load), seconds(decision.compute), seconds(decision.recompute)))
    }
    /// The gate's estimates in seconds of the time until all tokens are loaded or computed: with a
    /// load, and without. If the gate chose to load nothing, the first is of the best load. `None`
    /// when `estimate` is `None`.
    #[getter]
    fn alternatives(&self) -> Option<(f64, f64)> {
        let decision = self.0.decision.as_ref()?;
        Some((decision.with_load.as_secs_f64(), decision.recompute.as_secs_f64()))
    }
    /// Leases on the pages to load. `Cache.release` ends each lease, in the process that looked up.
    #[getter]
    fn leases(&self) -> Vec<(&'static str, u64)> {
        self.0.leases.iter().map(|lease| (tier_name(lease.tier), lease.lease.0)).collect()
    }
    fn __repr__(&self) -> String {
        format!("Lookup({}, {:?}, load={})", self.state(), self.spans(), self.0.load)
    }
}
