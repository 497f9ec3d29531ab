//! Warns about scopes that differ from a registered scope only in the arrangement of their pages:
//! layout, page bytes, or whether keys are chained. Neither scope finds the other's pages, so the
//! difference is probably a wrong setting.

use ritornello_format::{Scope, ScopeSlot};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// If this number of registered scopes or more differ from a new scope only in arrangement, no
/// warning is logged: the caller, such as LMCache with a serde, may use a different page size for
/// every object.
const REARRANGED_MAX: usize = 8;
/// Maximum log lines per owner, because requests choose salts, and each salt could cause a line.
const LINES_MAX: u32 = 64;

/// The registered scopes, by a digest of all fields except the arrangement of pages.
#[derive(Debug, Default)]
pub(crate) struct Arrangements {
    slots: BTreeSet<([u8; 16], ScopeSlot)>,
    lines: u32,
}

impl Arrangements {
    pub(crate) fn note(&mut self, slot: ScopeSlot, scope: &Scope) {
        self.slots.insert((scope.content_digest(), slot));
    }

    pub(crate) fn drop_scope(&mut self, slot: ScopeSlot, scope: &Scope) {
        self.slots.remove(&(scope.content_digest(), slot));
    }

    /// Warns if `scope`, before its registration, differs from a registered scope only in
    /// arrangement.
    pub(crate) fn warn(&mut self, stored: &BTreeMap<ScopeSlot, Arc<Scope>>, scope: &Scope) {
        let Some((other, differences)) = self.newest(stored, scope) else { return };
        if self.lines >= LINES_MAX {
            return;
        }
        self.lines += 1;
        let last = if self.lines == LINES_MAX { "; later scopes are not logged" } else { "" };
        tracing::warn!(
            scope = %scope.id(), other = %other.id(), model = %scope.model,
            "a new scope differs from a registered scope in {differences} only, and neither finds \
             the other's pages; to share pages, make these settings the same{last}"
        );
    }

    /// The newest scope that differs from `scope` only in the arrangement of its pages, and the
    /// differences. `None` if no scope differs, or [`REARRANGED_MAX`] or more scopes differ.
    fn newest(
        &self,
        stored: &BTreeMap<ScopeSlot, Arc<Scope>>,
        scope: &Scope,
    ) -> Option<(Arc<Scope>, String)> {
        let digest = scope.content_digest();
        let slots = self.slots.range((digest, ScopeSlot(0))..=(digest, ScopeSlot(u32::MAX)));
        let newest_first = slots.rev().take(REARRANGED_MAX).filter_map(|(_, slot)| {
            let other = stored.get(slot)?;
            Some((Arc::clone(other), scope.rearranged(other)?))
        });
        let found: Vec<_> = newest_first.collect();
        if found.len() == REARRANGED_MAX { None } else { found.into_iter().next() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(name: &str, bytes: u64) -> Scope {
        Scope::opaque(name, bytes, true)
    }

    fn registered(scopes: impl IntoIterator<Item = Scope>) -> BTreeMap<ScopeSlot, Arc<Scope>> {
        (0..).map(ScopeSlot).zip(scopes.into_iter().map(Arc::new)).collect()
    }

    fn noted(stored: &BTreeMap<ScopeSlot, Arc<Scope>>) -> Arrangements {
        let mut arrangements = Arrangements::default();
        stored.iter().for_each(|(slot, scope)| arrangements.note(*slot, scope));
        arrangements
    }

    #[test]
    fn newest_differing_arrangement_is_named_unless_many() {
        let stored = registered((1..8).map(|bytes| sized("a", bytes)));
        let mut arrangements = noted(&stored);
        let (other, differences) = arrangements.newest(&stored, &sized("a", 99)).unwrap();
        assert_eq!((other.page_bytes, differences.as_str()), (Some(7), "page_bytes 99 and 7"));
        assert!(arrangements.newest(&stored, &sized("b", 99)).is_none());
        let stored = registered((1..9).map(|bytes| sized("a", bytes)));
        arrangements = noted(&stored);
        assert!(arrangements.newest(&stored, &sized("a", 99)).is_none());
        arrangements.drop_scope(ScopeSlot(7), &sized("a", 8));
        assert!(arrangements.newest(&stored, &sized("a", 99)).is_some());
    }

    #[test]
    fn log_lines_are_limited() {
        let names: Vec<String> = (0..2 * LINES_MAX).map(|n| n.to_string()).collect();
        let stored = registered(names.iter().map(|name| sized(name, 1)));
        let mut arrangements = noted(&stored);
        names.iter().for_each(|name| arrangements.warn(&stored, &sized(name, 2)));
        assert_eq!(arrangements.lines, LINES_MAX);
    }
}
