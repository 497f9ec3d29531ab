//! A cache of the references of recently resolved scopes, so that a call on them does not resolve
//! them through the catalog first.

use crate::catalog::ScopeRef;
use parking_lot::RwLock;
use ritornello_format::Scope;

/// Maximum scopes cached: enough for a few models, split over heads and stages.
const KNOWN: usize = 128;

/// Scopes and their references, newest last. A lookup compares descriptions: this is cheaper than
/// hashing, and equal descriptions need no further check.
#[derive(Debug, Default)]
pub(crate) struct Resolved(RwLock<Vec<(ScopeRef, Scope)>>);

impl Resolved {
    /// Passes the reference of each of `scopes` to `each`, or `None` for a scope not cached. Each
    /// search starts after the previous hit, because the scopes of a model are usually requested in
    /// the order of their resolution.
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

    /// Adds a scope; above [`KNOWN`] scopes the oldest is removed.
    pub(crate) fn note(&self, reference: ScopeRef, scope: &Scope) {
        let mut known = self.0.write();
        if known.len() >= KNOWN {
            known.remove(0);
        }
        known.push((reference, scope.clone()));
    }

    pub(crate) fn clear(&self) {
        self.0.write().clear();
    }

    pub(crate) fn invalidate(&self, scopes: &[&Scope]) {
        self.0.write().retain(|(_, known)| !scopes.contains(&known));
    }
}
