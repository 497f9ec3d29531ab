//! The pages and space of each scope, and the eviction policies of scopes with a quota.

use crate::eviction::{Eviction, PolicyKind, Resident, Used};
use ritornello_format::ScopeSlot;
use ritornello_index::{Removed, RunId};
use std::collections::HashMap;

/// The pages and space of all scopes.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    scopes: HashMap<ScopeSlot, Holding>,
}

#[derive(Debug, Default)]
struct Holding {
    units: u64,
    pages: u64,
    /// Units promised to puts that have no reservation yet.
    promised: u64,
    /// The scope's own eviction policy, if it has a quota.
    eviction: Option<Box<dyn Eviction>>,
    /// Runs that were added, linked, used or shortened since the build of the policy began; `None`
    /// while no policy is being built. At its end, the build adds these runs again, in this order,
    /// with the pages that the index then has. Runs that the index no longer has are removed.
    pending: Option<Vec<RunId>>,
}

impl Holding {
    /// Returns whether a change or use of `run` can be applied to the scope's policy now. If the
    /// policy is being built, records the run for the end of the build and returns false.
    fn applies_now(&mut self, run: RunId) -> bool {
        match &mut self.pending {
            Some(pending) => pending.push(run),
            None => return true,
        }
        false
    }
}

impl Usage {
    /// Creates the table with an empty eviction policy for each scope in `limited`: the scopes with
    /// a quota.
    pub(crate) fn new(limited: Vec<ScopeSlot>) -> Self {
        let eviction = || Some(PolicyKind::Lru.build());
        let empty = |slot| (slot, Holding { eviction: eviction(), ..Holding::default() });
        Self { scopes: limited.into_iter().map(empty).collect() }
    }

    pub(crate) fn admit(&mut self, slot: ScopeSlot, resident: &Resident, pages: u64, units: u64) {
        let holding = self.scopes.entry(slot).or_default();
        holding.units += units;
        holding.pages += pages;
        if holding.applies_now(resident.run)
            && let Some(eviction) = &mut holding.eviction
        {
            eviction.admit(resident);
        }
    }

    pub(crate) fn link(&mut self, slot: ScopeSlot, child: RunId, parent: RunId, page: u32) {
        let Some(holding) = self.scopes.get_mut(&slot) else { return };
        if holding.applies_now(child)
            && let Some(eviction) = &mut holding.eviction
        {
            eviction.link(child, parent, page);
        }
    }

    pub(crate) fn hit(&mut self, slot: ScopeSlot, path: &[Used]) {
        let Some(holding) = self.scopes.get_mut(&slot) else { return };
        match (&mut holding.pending, &mut holding.eviction) {
            (Some(pending), _) => pending.extend(path.iter().map(|used| used.run)),
            (None, Some(eviction)) => eviction.hit(path),
            (None, None) => {}
        }
    }

    /// Subtracts removed pages. Does nothing for a moved run, whose units stay the same.
    pub(crate) fn remove(&mut self, gone: &Removed) {
        if gone.pages == 0 && !gone.whole {
            return;
        }
        let Some(holding) = self.scopes.get_mut(&gone.scope) else { return };
        let units = gone.extents.iter().map(|extent| u64::from(extent.units)).sum();
        holding.units = holding.units.saturating_sub(units);
        holding.pages = holding.pages.saturating_sub(u64::from(gone.pages));
        if (gone.whole || holding.applies_now(gone.run))
            && let Some(eviction) = &mut holding.eviction
        {
            if gone.whole {
                eviction.remove(gone.run)
            } else {
                eviction.shrink(gone.run, gone.pages)
            }
        }
        if holding.pages == 0 && holding.promised == 0 && holding.eviction.is_none() {
            self.scopes.remove(&gone.scope);
        }
    }

    /// Removes a dropped scope.
    pub(crate) fn drop_scope(&mut self, slot: ScopeSlot) {
        self.scopes.remove(&slot);
    }

    /// The numbers of pages and units that a scope holds.
    pub(crate) fn held(&self, slot: ScopeSlot) -> (u64, u64) {
        self.scopes.get(&slot).map_or((0, 0), |holding| (holding.pages, holding.units))
    }

    /// Whether a scope holds no page, and no put was promised space in it.
    pub(crate) fn is_empty(&self, slot: ScopeSlot) -> bool {
        let held = self.scopes.get(&slot);
        held.is_none_or(|held| held.pages == 0 && held.units == 0 && held.promised == 0)
    }

    /// The eviction policy of a scope with a quota.
    pub(crate) fn eviction(&mut self, slot: ScopeSlot) -> Option<&mut Box<dyn Eviction>> {
        self.scopes.get_mut(&slot)?.eviction.as_mut()
    }

    pub(super) fn take_eviction(&mut self, slot: ScopeSlot) -> Option<Box<dyn Eviction>> {
        self.scopes.get_mut(&slot)?.eviction.take()
    }

    /// Whether the scope has its own eviction policy, and the policy knows all runs of the scope.
    pub(super) fn is_built(&self, slot: ScopeSlot) -> bool {
        self.scopes.get(&slot).is_some_and(|held| held.eviction.is_some() && held.pending.is_none())
    }

    pub(super) fn units(&self, slot: ScopeSlot) -> u64 {
        self.scopes.get(&slot).map_or(0, |holding| holding.units + holding.promised)
    }

    pub(super) fn promise(&mut self, slot: ScopeSlot, units: u64) {
        self.scopes.entry(slot).or_default().promised += units;
    }

    /// Ends a promise of [`StoreCore::make_quota_space`](crate::core::StoreCore::make_quota_space),
    /// because a reservation counts the units now, or because no reservation was opened.
    pub(crate) fn release_promise(&mut self, slot: ScopeSlot, units: u64) {
        if let Some(holding) = self.scopes.get_mut(&slot) {
            holding.promised = holding.promised.saturating_sub(units);
        }
    }

    /// The `count` largest scopes by the units that they hold, with the numbers of their pages and
    /// units.
    pub(super) fn largest(&self, count: usize) -> Vec<(ScopeSlot, u64, u64)> {
        let held = self.scopes.iter().map(|(slot, held)| (*slot, held.pages, held.units));
        let mut scopes: Vec<_> = held.collect();
        let most = |held: &(ScopeSlot, u64, u64)| (std::cmp::Reverse(held.2), held.0);
        if scopes.len() > count {
            scopes.select_nth_unstable_by_key(count, most);
            scopes.truncate(count);
        }
        scopes.sort_unstable_by_key(most);
        scopes
    }

    /// Begins to build the scope's own eviction policy. Returns false if the scope has one.
    pub(super) fn begin_build(&mut self, slot: ScopeSlot) -> bool {
        let holding = self.scopes.entry(slot).or_default();
        let is_new = holding.eviction.is_none();
        if is_new {
            holding.eviction = Some(PolicyKind::Lru.build());
            holding.pending = Some(Vec::new());
        }
        is_new
    }

    /// The eviction policy being built for the scope, and the runs recorded since the build began.
    /// `None` if the scope was dropped, or its policy is complete.
    pub(super) fn build(
        &mut self,
        slot: ScopeSlot,
    ) -> Option<(&mut Box<dyn Eviction>, &mut Vec<RunId>)> {
        let holding = self.scopes.get_mut(&slot)?;
        holding.eviction.as_mut().zip(holding.pending.as_mut())
    }

    /// Ends a build: the policy applies each later event immediately.
    pub(super) fn end_build(&mut self, slot: ScopeSlot) {
        if let Some(holding) = self.scopes.get_mut(&slot) {
            holding.pending = None;
        }
    }
}
