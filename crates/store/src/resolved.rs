//! Scopes that were resolved lately: what a call on one of them need not ask the catalog.

use crate::catalog::ScopeRef;
use parking_lot::RwLock;
use ritornello_format::Scope;

/// Scopes that are remembered: those of a few models, split over heads and stages.
const KNOWN: usize = 128;

/// Scopes and their references, newest last. Found by comparing descriptions, which is cheaper than
/// their digest, and an equal description needs no further check.
#[derive(Debug, Default)]
pub(crate) struct Resolved(RwLock<Vec<(ScopeRef, Scope)>>);

impl Resolved {
    /// The references of `scopes`, `None` for one that is not known. Those of one model are resolved
    /// in the order in which they are asked for: each is looked for first behind the one before.
    pub(crate) fn find(&self, scopes: &[&Scope], mut each: impl FnMut(Option<ScopeRef>)) {
        let known = self.0.read();
        let mut next = 0;
        for scope in scopes {
            let (before, behind) = known.split_at(next);
            let is = |(_, known): &(ScopeRef, Scope)| known == *scope;
            let at = behind.iter().position(is).map(|at| next + at);
            let at = at.or_else(|| before.iter().position(is));
            each(at.map(|at| known[at].0));
            next = at.map_or(next, |at| at + 1);
        }
    }

    /// Remembers a scope, in place of the one that came first if there are many.
    pub(crate) fn note(&self, reference: ScopeRef, scope: &Scope) {
        let mut known = self.0.write();
        if known.len() >= KNOWN {
            known.remove(0);
        }
        known.push((reference, scope.clone()));
    }

    /// Has the catalog asked again about all.
    pub(crate) fn clear(&self) {
        self.0.write().clear();
    }

    /// Has the catalog asked again.
    pub(crate) fn forget(&self, scopes: &[&Scope]) {
        self.0.write().retain(|(_, known)| !scopes.contains(&known));
    }
}
