//! Resolving, registering and configuring scopes.

use crate::budget::Budget;
use crate::catalog::ScopeRef;
use crate::client_id::ClientId;
use crate::core::StoreCore;
use ritornello_format::{
    Error, ErrorKind, RUN_HEADER_UNITS_MAX, Result, Scope, ScopeSettings, UNIT,
};
use ritornello_volume::space::RUN_EXTENTS_MAX;

impl StoreCore {
    pub(crate) fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        self.lifecycle.check_open()?;
        match self.scopes.find(scope)? {
            None if create => {
                self.check_fits(scope)?;
                self.register(scope).map(Some)
            }
            found => Ok(found),
        }
    }

    pub(crate) fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()> {
        self.lifecycle.check_writable()?;
        self.scopes.configure(scope, *settings)?;
        self.apply_quota(scope.slot);
        self.trim_retention(scope.slot);
        Ok(())
    }

    /// Checks that a page with its run header takes at most half of the store, so that a put can
    /// replace a page that is being read; and at most half of `RUN_EXTENTS_MAX` segments, because
    /// in fragmented space extents are shorter than segments, and a run needs more extents.
    fn check_fits(&self, scope: &Scope) -> Result<()> {
        let (page_bytes, budget) = (scope.resolved_page_bytes()?, self.shape.budget());
        if page_bytes <= page_bytes_max(&budget) {
            Ok(())
        } else {
            Err(too_large(page_bytes, &budget))
        }
    }

    /// Logs, once for each scope, that `client` can never store a page of the scope, because the
    /// store has shrunk since the scope was registered: the page exceeds the whole store, or the
    /// half of it that a client may reserve. `units` is the length of the page and its run header.
    pub(crate) fn warn_if_too_large(&self, client: ClientId, scope: ScopeRef, units: u64) {
        let budget = self.shape.budget();
        let whole = u64::from(budget.segments_max) * budget.segment_bytes;
        let most = if client == ClientId::LOCAL { whole } else { whole / 2 };
        if units * UNIT > most && self.scopes.is_first_too_large(scope.slot) {
            let error = too_large(scope.page_bytes, &budget);
            tracing::warn!(%error, scope = %scope.id, "pages of this scope are refused");
        }
    }

    fn register(&self, scope: &Scope) -> Result<ScopeRef> {
        let unsearched = self.shape.manifest().has_unsearched();
        match self.scopes.register(scope, &self.state, unsearched) {
            Ok((reference, dropped)) => {
                self.counters.scopes_dropped.add(dropped as u64);
                Ok(reference)
            }
            Err(error) => {
                if error.kind() == ErrorKind::Miss {
                    let refused = &self.counters.refused_scopes;
                    if refused.get() == 0 {
                        tracing::warn!(
                            %error,
                            "a new scope was refused; later refusals are only counted"
                        );
                    }
                    refused.add(1);
                }
                Err(self.lifecycle.retryable(error))
            }
        }
    }
}

/// Maximum length of the pages of a new scope, in bytes.
fn page_bytes_max(budget: &Budget) -> u64 {
    let segments = u64::from(budget.segments_max / 2).min(RUN_EXTENTS_MAX as u64 / 2);
    segments * budget.segment_bytes - u64::from(RUN_HEADER_UNITS_MAX) * UNIT
}

fn too_large(page_bytes: u64, budget: &Budget) -> Error {
    Error::invalid(
        "a page is too large for this store: raise the capacity, or store fewer tokens in a page",
    )
    .with("page_bytes", page_bytes)
    .with("at_most", page_bytes_max(budget))
}
