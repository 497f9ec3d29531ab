//! Records decisions about requests, and the prefill that loads avoided. Asks the owner for
//! decisions, and why pages are hits or misses.

use crate::decision::{
    Decision, DecisionListing, REQUEST_BYTES_MAX, RequestExplanation, bounded_text,
};
use crate::explanation::Explanation;
use crate::store::Store;
use crate::transfer_counts::TransferCounts;
use ritornello_format::{Result, Scope, ScopeId, check_keys};
use std::time::Duration;

impl Store {
    /// Explains for each of `keys`, of which there are at most
    /// [`EXPLAINED_KEYS_MAX`](crate::EXPLAINED_KEYS_MAX), why the page is a hit or a miss. Does not
    /// count as a lookup or a use.
    ///
    /// # Errors
    /// `Invalid` for malformed or too many keys, or if the owner's version does not explain;
    /// `Closed`; connection errors.
    pub fn explain(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Explanation> {
        self.explain_in(scope.id(), Some(scope), keys)
    }

    /// Like [`Store::explain`], for a scope of which only the id is known.
    ///
    /// # Errors
    /// Like `explain`.
    pub fn explain_by_id(&self, id: ScopeId, keys: &[&[u8]]) -> Result<Explanation> {
        self.explain_in(id, None, keys)
    }

    /// Records what this process decided about the pages of a request. Waits for nothing: decisions
    /// are buffered, and sent to the owner about every two seconds. A decision that does not fit
    /// the buffer is counted and dropped.
    pub fn note_decision(&self, decision: Decision) {
        // An error is ignored, because a lost decision affects no page.
        let _ = self.catalog.report_decisions(&[decision.bounded()], 0);
    }

    /// Counts a load for a request. `tokens`: the tokens that were loaded and not computed, zero if
    /// the load failed. `load`: the time that the load took. `prefill`: the estimated time to
    /// compute these tokens; if it is `None`, the tokens are counted, and neither time is. Waits
    /// for nothing: counts are sent to the owner about every two seconds.
    pub fn note_prefill_avoided(&self, tokens: u64, prefill: Option<Duration>, load: Duration) {
        self.count(&TransferCounts::prefill_avoided(tokens, prefill, load));
    }

    /// Returns the newest decisions of all processes that the owner remembers, without their keys:
    /// at most `limit`, and at most [`LISTED_DECISIONS_MAX`](crate::LISTED_DECISIONS_MAX).
    ///
    /// # Errors
    /// `Invalid` if the owner's version remembers no decisions; `Closed`; connection errors.
    pub fn decisions(&self, limit: usize) -> Result<DecisionListing> {
        self.catalog.decisions(u32::try_from(limit).unwrap_or(u32::MAX))
    }

    /// Returns the decisions about the request that `request` names, and explains why its pages are
    /// hits or misses now: see [`Catalog::explain_request`](crate::Catalog::explain_request).
    ///
    /// # Errors
    /// Errors of [`Store::decisions`]; `Invalid` if `request` is empty.
    pub fn explain_request(&self, request: &str) -> Result<RequestExplanation> {
        self.catalog.explain_request(&bounded_text(request, REQUEST_BYTES_MAX))
    }

    fn explain_in(
        &self,
        id: ScopeId,
        scope: Option<&Scope>,
        keys: &[&[u8]],
    ) -> Result<Explanation> {
        check_keys(keys)?;
        self.retry_stale(&[], || self.catalog.explain(id, scope, keys))
    }
}
