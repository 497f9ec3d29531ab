//! Asks the owner why pages are hits or misses.

use crate::explanation::Explanation;
use crate::store::Store;
use ritornello_format::{Result, Scope, ScopeId, check_keys};

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
