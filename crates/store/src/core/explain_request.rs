//! Decisions about a request, and why its pages are hits or misses now.

use super::StoreCore;
use crate::decision::{
    Decision, DecisionListing, EXPLAINED_DECISIONS_MAX, ExplainedRequest, LISTED_DECISIONS_MAX,
    REQUEST_BYTES_MAX, RequestExplanation, bounded_text,
};
use ritornello_format::{Error, Result};

impl StoreCore {
    /// The newest decisions: see [`Catalog::decisions`](crate::catalog::Catalog::decisions).
    pub(super) fn list_decisions(&self, limit: usize) -> Result<DecisionListing> {
        self.lifecycle.check_open()?;
        let newest = self.decisions.newest(limit.min(LISTED_DECISIONS_MAX), |_| true);
        let decisions = newest.iter().map(|decision| decision.without_keys()).collect();
        Ok(DecisionListing { decisions, memory: self.decisions.memory() })
    }

    /// Explains a request: see
    /// [`Catalog::explain_request`](crate::catalog::Catalog::explain_request).
    pub(super) fn explain_request(&self, request: &str) -> Result<RequestExplanation> {
        self.lifecycle.check_open()?;
        if request.is_empty() {
            return Err(Error::invalid(
                "the id of a request is empty: pass the id that the engine returned",
            ));
        }
        let id = bounded_text(request, REQUEST_BYTES_MAX);
        let newest = |of: &dyn Fn(&Decision) -> bool| {
            self.decisions.newest(EXPLAINED_DECISIONS_MAX, |decision| of(decision))
        };
        let mut found = newest(&|decision| decision.request == id);
        if found.is_empty() {
            found = newest(&|decision| decision.matches_id(&id));
        }
        let mut requests: Vec<ExplainedRequest> = Vec::new();
        for decision in found {
            let shown = decision.without_keys();
            let known = requests
                .iter_mut()
                .find(|entry| (&entry.request, entry.scope) == (&decision.request, decision.scope));
            if let Some(entry) = known {
                entry.decisions.push(shown);
                continue;
            }
            let keys: Vec<&[u8]> = decision.keys.iter().collect();
            requests.push(ExplainedRequest {
                request: decision.request.clone(),
                scope: decision.scope,
                explanation: self.explain(decision.scope, None, &keys)?,
                decisions: vec![shown],
            });
        }
        Ok(RequestExplanation { requests, memory: self.decisions.memory() })
    }
}
