//! Lookups of scopes for explanations of misses (`core/explain.rs`). These lookups do not mark a
//! scope as used, so they do not keep an empty scope from being dropped.

use super::Scopes;
use crate::catalog::ScopeRef;
use ritornello_format::{Scope, ScopeId};
use std::sync::Arc;

impl Scopes {
    /// The registered scope with this id.
    pub(crate) fn by_id(&self, id: ScopeId) -> Option<(ScopeRef, Arc<Scope>)> {
        let live = self.live.read();
        live.by_id.get(&id).map(|(reference, scope)| (*reference, Arc::clone(scope)))
    }

    /// Returns at most `most` scopes, the last registered first. Lists them under the lock of the
    /// registry, and takes the lock of the live scopes, which lookups of pages need, only for one
    /// scope at a time.
    pub(crate) fn newest(&self, most: usize) -> Vec<(ScopeRef, Arc<Scope>)> {
        let registry = self.registry.lock();
        let newest = registry.table.scopes.iter().rev().take(most);
        let newest: Vec<_> = newest.map(|(slot, scope)| (*slot, Arc::clone(scope))).collect();
        drop(registry);
        let live = newest.into_iter().map(|(slot, scope)| Some((self.by_slot(slot)?, scope)));
        live.flatten().collect()
    }
}
