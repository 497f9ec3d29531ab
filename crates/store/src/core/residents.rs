//! The stored runs, as eviction, quotas and retention count them.

use super::absence::hidden::Hidden;
use super::limits::retained_runs::Retention;
use super::limits::usage::Usage;
use super::waiting_children::WaitingChildren;
use crate::eviction::{
    Demand, Eviction, EvictionContext, EvictionStats, PolicyKind, RecencyClock, Resident, Used,
    Victim,
};
use crate::lease::LeaseTable;
use ritornello_format::{PageHash, Place, ScopeSlot};
use ritornello_index::{PrefixIndex, Removed, RunId};

/// The stored runs, and the order of their eviction.
///
/// Invariant: `eviction` orders every run that `usage` counts, and no other run. `retention` holds
/// some of these runs.
pub(crate) struct Residents {
    /// Gives each use of pages the next number. The index stores the number as a run's recency; at
    /// the next open, eviction policies receive the runs in this order.
    pub(super) clock: RecencyClock,
    eviction: Box<dyn Eviction>,
    pub(super) usage: Usage,
    pub(super) retention: Retention,
    pub(super) waiting_children: WaitingChildren,
}

impl Residents {
    pub(super) fn new(
        clock: RecencyClock,
        eviction: Box<dyn Eviction>,
        usage: Usage,
        retention: Retention,
    ) -> Self {
        Self { clock, eviction, usage, retention, waiting_children: WaitingChildren::default() }
    }

    /// Adds a run with `pages` stored pages in `units` units.
    pub(super) fn admit(&mut self, slot: ScopeSlot, resident: &Resident, pages: u64, units: u64) {
        self.eviction.admit(resident);
        self.usage.admit(slot, resident, pages, units);
    }

    /// Records that the run `child` follows page `page` of the run `parent`.
    pub(super) fn link(&mut self, slot: ScopeSlot, child: RunId, parent: RunId, page: u32) {
        self.eviction.link(child, parent, page);
        self.usage.link(slot, child, parent, page);
    }

    pub(super) fn hit(&mut self, slot: ScopeSlot, path: &[Used]) {
        self.eviction.hit(path);
        self.usage.hit(slot, path);
    }

    /// Reports to the eviction policy the pages that a read found or a put must store, in order,
    /// each by the low half of its hash. `after`: the page before them, if any. The policy
    /// `adaptive` simulates the policies that it may follow on these pages; other policies ignore
    /// the report.
    pub(super) fn demanded(
        &mut self,
        demand: Demand,
        after: Option<PageHash>,
        pages: impl Iterator<Item = PageHash>,
    ) {
        self.eviction.demanded(demand, after.map(PageHash::low), &mut pages.map(PageHash::low));
    }

    pub(super) fn remove(&mut self, gone: &Removed) {
        self.usage.remove(gone);
        if gone.whole {
            self.eviction.remove(gone.run);
            self.retention.release(gone.run);
        } else {
            self.eviction.shrink(gone.run, gone.pages);
            let units = gone.extents.iter().map(|extent| u64::from(extent.units)).sum();
            self.retention.shrink(gone.run, if gone.pages > 0 { units } else { 0 });
        }
    }

    /// Chooses victims of at least `units` units in total, or fewer if the policy finds no more.
    /// Considers the runs of the scope in `slot`, or of the store if `slot` is `None`, except
    /// `spared` runs. Returns no victims for a scope without a quota, because such a scope has no
    /// policy.
    pub(super) fn victims(
        &mut self,
        slot: Option<ScopeSlot>,
        units: u64,
        leases: &LeaseTable,
        hidden: &Hidden,
        index: &dyn PrefixIndex,
        spared: Spared<'_>,
    ) -> Vec<Victim> {
        let Self { eviction, usage, retention, .. } = self;
        let eviction = match slot {
            None => Some(eviction),
            Some(slot) => usage.eviction(slot),
        };
        let held = ProtectedRuns { leases, retention, hidden, index, spared };
        eviction.map_or_else(Vec::new, |eviction| eviction.victims(units, &held))
    }

    /// Removes `run`, which the index does not have, from the policy that chose it as a victim:
    /// otherwise the policy would choose it again.
    pub(super) fn forget_victim(&mut self, slot: Option<ScopeSlot>, run: RunId) {
        let eviction = match slot {
            None => Some(&mut self.eviction),
            Some(slot) => self.usage.eviction(slot),
        };
        eviction.into_iter().for_each(|eviction| eviction.remove(run));
    }

    /// The policy by which [`Residents::victims`] chooses victims now.
    pub(super) fn followed_policy(&mut self, slot: Option<ScopeSlot>) -> Option<PolicyKind> {
        let eviction = match slot {
            None => Some(&mut self.eviction),
            Some(slot) => self.usage.eviction(slot),
        };
        eviction.and_then(|eviction| PolicyKind::named(eviction.followed()))
    }

    /// Statistics of the store's eviction policy.
    pub(super) fn eviction_stats(&self) -> EvictionStats {
        self.eviction.measured()
    }
}

/// Selects the runs that an eviction leaves in place because it would free no usable space there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spared<'a> {
    /// Volumes that puts avoid. Runs that are only on these volumes are spared.
    pub(super) volumes: &'a [u8],
    /// Whether these runs are spared even if they follow an evictable run on another volume, which
    /// can be evicted only after them.
    pub(super) followers: bool,
}

/// Maximum ancestors of a run that are examined to find an evictable run that it follows.
const ANCESTORS_MAX: usize = 16;

/// Answers an eviction policy's queries about runs.
struct ProtectedRuns<'a> {
    leases: &'a LeaseTable,
    retention: &'a Retention,
    /// The hidden runs. Runs in absent space are protected, because their pages are to be hits
    /// again when the space returns.
    hidden: &'a Hidden,
    index: &'a dyn PrefixIndex,
    spared: Spared<'a>,
}

impl ProtectedRuns<'_> {
    fn is_spared(&self, run: RunId) -> bool {
        self.is_on_spared(run) && (self.spared.followers || !self.follows_evictable(run))
    }

    fn is_on_spared(&self, run: RunId) -> bool {
        let volumes = self.spared.volumes;
        let is_on_spared = |place: &Place| {
            place.extents.iter().all(|extent| volumes.contains(&extent.segment.volume()))
        };
        !volumes.is_empty() && self.index.place(run).as_ref().is_some_and(is_on_spared)
    }

    /// Whether an ancestor of `run` is on a volume that is not spared, and neither this ancestor
    /// nor a run between the two is kept.
    fn follows_evictable(&self, run: RunId) -> bool {
        let parent = |run: &RunId| self.index.parent(*run);
        let ancestors = std::iter::successors(parent(&run), parent).take(ANCESTORS_MAX);
        let mut evictable = ancestors.take_while(|run| !self.is_kept(*run));
        evictable.any(|run| !self.is_on_spared(run))
    }

    /// Whether no eviction may remove `run` now.
    fn is_kept(&self, run: RunId) -> bool {
        self.leases.is_leased(run) || self.retention.is_retained(run) || self.hidden.is_absent(run)
    }
}

impl EvictionContext for ProtectedRuns<'_> {
    fn is_protected(&self, run: RunId) -> bool {
        self.is_kept(run) || self.is_spared(run)
    }
    fn page_key(&self, run: RunId, page: u32) -> u64 {
        self.index.page(run, page).map_or(0, |page| page.low())
    }
}

/// Describes a run to an eviction policy.
pub(super) fn resident(
    run: RunId,
    parent: Option<(RunId, u32)>,
    pages: &[PageHash],
    place: &Place,
) -> Resident {
    Resident {
        run,
        key: pages.first().map_or(0, |page| page.low()),
        parent,
        pages: pages.len() as u32,
        page_units: place.page_units,
        header_units: place.header_units,
    }
}
