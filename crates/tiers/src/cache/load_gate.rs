//! The load gate of a cache: the decision to load or to compute pages, with the clock, the
//! measured loads and the counters of one process.

use super::lookup::LookupOptions;
use super::stats::GateCounters;
use crate::gate::{Gate, LoadDecision, LoadQuery, TierSpan};
use parking_lot::Mutex;
use ritornello_format::residency::Tier;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct LoadGate {
    gate: Mutex<Gate>,
    /// Bytes and seconds of loads that this process measured since the last
    /// [`take_measured`](Self::take_measured), by tier.
    measured: Mutex<[(u64, f64); 4]>,
    opened: Instant,
    pub(super) counts: Arc<GateCounters>,
}

impl LoadGate {
    pub(super) fn new() -> Self {
        Self {
            gate: Mutex::default(),
            measured: Mutex::default(),
            opened: Instant::now(),
            counts: Arc::default(),
        }
    }

    /// Seconds since this gate was created: the clock of all times passed to [`Gate`].
    fn clock(&self) -> f64 {
        self.opened.elapsed().as_secs_f64()
    }

    pub(super) fn set_cap(&self, tier: Tier, bytes_per_second: u64) {
        self.gate.lock().set_cap(tier, bytes_per_second);
    }

    pub(super) fn record_load(&self, tier: Tier, bytes: u64, took: Duration) {
        self.record_other_load(tier, bytes, took);
        let kept = &mut self.measured.lock()[tier as usize];
        *kept = (kept.0 + bytes, kept.1 + took.as_secs_f64());
    }

    /// Records a load that another process measured.
    pub(super) fn record_other_load(&self, tier: Tier, bytes: u64, took: Duration) {
        self.gate.lock().record_load(tier, bytes, took, self.clock());
    }

    /// Returns the bytes and seconds of the loads that this process measured since the last call,
    /// by tier.
    pub(super) fn take_measured(&self) -> [(u64, f64); 4] {
        std::mem::take(&mut *self.measured.lock())
    }

    pub(super) fn record_prefill(&self, before: u64, tokens: u64, took: Duration) {
        self.gate.lock().record_prefill(before, tokens, took);
    }

    /// See [`Gate::prefill_time`].
    pub(super) fn prefill_time(&self, before: u64, tokens: u64) -> Option<Duration> {
        self.gate.lock().prefill_time(before, tokens)
    }

    /// Returns the number of leading pages that the engine has after the load, including pages that
    /// it already holds (zero if the decision is to load nothing), and the decision. Returns `None`
    /// if `options.page_tokens` is zero, `options.tokens` does not exceed `options.computed`, no
    /// prefill was recorded yet, or the engine already holds all pages of `found`. `page_bytes` is
    /// the length in bytes of a page in the scope of the lookup: a lower bound of the bytes to load
    /// per page, because `options` may count parts of the page in other scopes too. `queued` holds
    /// the bytes of the loads from each tier that are queued or running.
    pub(super) fn decide(
        &self,
        page_bytes: u64,
        found: &[TierSpan],
        options: &LookupOptions,
        queued: [u64; 4],
    ) -> Option<(usize, LoadDecision)> {
        if options.page_tokens == 0 || found.is_empty() {
            return None;
        }
        let skipped = options.computed_pages();
        let mut skip = skipped;
        let mut lacking = found.to_vec();
        for span in &mut lacking {
            let less = skip.min(span.pages);
            span.pages -= less;
            skip -= less;
        }
        lacking.retain(|span| span.pages > 0);
        let query = LoadQuery {
            found: &lacking,
            page_bytes: options.page_bytes.max(page_bytes),
            page_tokens: options.page_tokens,
            before: options.computed,
            tokens: options.tokens.max(options.computed),
            queued,
            mode: options.mode,
        };
        let decision = self.gate.lock().decide(&query, self.clock());
        let load = if decision.pages == 0 { 0 } else { skipped + decision.pages };
        let knows = !decision.recompute.is_zero() && !lacking.is_empty();
        knows.then_some((load, decision))
    }
}
