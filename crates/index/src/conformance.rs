//! A suite of the guarantees of every [`PrefixIndex`]: `run_all(&|| Box::new(MyIndex::new()))`
//! panics at the first guarantee that is broken. Needs the feature `conformance`. [`run_durable`]
//! checks across power losses that no record is durable before the data that it names.
//!
//! [`contents`] makes any two indexes comparable: it is independent of the names of runs.

mod durable;
mod residency;
mod scenarios;

pub use durable::PersistentIndex;
pub use residency::run_residency;

use crate::{PrefixIndex, Removed, RunId};
use ritornello_format::{Extent, PageHash, Place, ScopeSlot, SegmentId};
use std::collections::{BTreeMap, BTreeSet};

/// Creates an empty index.
pub type Make<'a> = &'a dyn Fn() -> Box<dyn PrefixIndex>;

/// A run, identified by the generation of its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Scope of the run.
    pub scope: ScopeSlot,
    /// Whether the scope is chained.
    pub chained: bool,
    /// Generation of the parent run, and the page of that run which precedes this run.
    pub parent: Option<(u64, u32)>,
    /// Hashes of the run's pages; [`PageHash::NONE`] where a page was removed alone.
    pub pages: Vec<PageHash>,
    /// Place of the run.
    pub place: Place,
    /// Units of 4 KiB that the run's header and live pages occupy, each as its segment and its
    /// position there.
    pub units: BTreeSet<(SegmentId, u32)>,
    /// Last use of the run, in ticks of the store's recency clock.
    pub recency: u64,
    /// End of the run's retention, in seconds of the store's clock; zero without a retention.
    pub retain_until: u64,
}

/// All contents of an index, by generation. Generations must be distinct.
///
/// # Panics
/// If the index's lookups or statistics disagree with [`PrefixIndex::for_each`].
#[must_use]
pub fn contents(index: &dyn PrefixIndex) -> BTreeMap<u64, Content> {
    let mut runs = Vec::new();
    let mut names = BTreeMap::new();
    index.for_each(&mut |run, view| {
        assert_eq!(index.run(run).as_ref(), Some(&view), "run() agrees with for_each()");
        let parent = view.parent.map(|(parent, _)| parent);
        assert_eq!(index.parent(run), parent, "parent() agrees with run()");
        assert_eq!(index.place(run).as_ref(), Some(&view.place), "place() agrees with for_each()");
        names.insert(run, view.place.generation);
        runs.push((run, view));
    });
    let mut children = BTreeSet::new();
    let mut all = BTreeMap::new();
    for (run, view) in &runs {
        children.extend(view.parent.map(|(parent, _)| parent));
        for (at, page) in view.pages.iter().enumerate() {
            if *page != PageHash::NONE {
                let located = index.locate(view.scope, *page);
                assert_eq!(located, Some((*run, at as u32)), "every page is located in its run");
            }
        }
        let parent = view.parent.map(|(parent, page)| (names[&parent], page));
        let content = Content {
            scope: view.scope,
            chained: view.chained,
            parent,
            pages: view.pages.clone(),
            place: view.place.clone(),
            units: units(&view.live_extents()),
            recency: view.recency,
            retain_until: view.retain_until,
        };
        assert!(all.insert(view.place.generation, content).is_none(), "generations are distinct");
    }
    for (run, _) in &runs {
        assert_eq!(index.has_children(*run), children.contains(run), "has_children() of {run:?}");
    }
    let live = |content: &Content| content.pages.iter().filter(|p| **p != PageHash::NONE).count();
    let stats = index.stats();
    assert_eq!(stats.runs, all.len() as u64, "stats count runs");
    assert_eq!(stats.pages, all.values().map(live).sum::<usize>() as u64, "stats count pages");
    all
}

/// The units of extents; no unit may occur twice.
#[must_use]
pub fn units(extents: &[Extent]) -> BTreeSet<(SegmentId, u32)> {
    let mut units = BTreeSet::new();
    for extent in extents {
        for unit in extent.start..extent.end() {
            assert!(units.insert((extent.segment, unit)), "two extents must not share a unit");
        }
    }
    units
}

/// Totals of removals: the units that become free, the number of removed pages, and the runs that
/// were removed as a whole.
///
/// # Panics
/// If a removal names its pages, and not as many as it counts; if two extents share a unit.
#[must_use]
pub fn sum(removed: &[Removed]) -> (BTreeSet<(SegmentId, u32)>, u32, BTreeSet<RunId>) {
    let extents: Vec<Extent> = removed.iter().flat_map(|r| r.extents.iter().copied()).collect();
    let whole = removed.iter().filter(|r| r.whole).map(|r| r.run).collect();
    for gone in removed.iter().filter(|gone| !gone.hashes.is_empty()) {
        let named = gone.hashes.iter().filter(|hash| **hash != PageHash::NONE).count();
        assert_eq!(named, gone.pages as usize, "{gone:?}");
    }
    (units(&extents), removed.iter().map(|r| r.pages).sum(), whole)
}

/// A place for `pages` pages of two units each and a header of one unit, in a separate segment per
/// generation.
#[must_use]
pub fn place(generation: u64, pages: u32) -> Place {
    let segment = SegmentId(generation as u32);
    // Two extents, so that one page is split if `pages` is odd.
    let first = 1 + pages;
    Place {
        generation,
        header_checksum: !generation,
        header_units: 1,
        page_units: 2,
        extents: vec![
            Extent { segment, start: 10, units: first },
            Extent { segment, start: 1 << 20, units: pages },
        ],
    }
}

/// The hash of page `number` of a family: a made-up sequence of pages. Different families have
/// different hashes.
#[must_use]
pub fn page(family: u64, number: u64) -> PageHash {
    let low = crate::synthetic::mix(family << 32 | number);
    let high = crate::synthetic::mix(low);
    PageHash((u128::from(high) << 64 | u128::from(low | 1)).to_le_bytes())
}

/// The hashes of pages `0..count` of a family.
#[must_use]
pub fn pages(family: u64, count: u64) -> Vec<PageHash> {
    (0..count).map(|number| page(family, number)).collect()
}

/// Runs the checks for every index: all of this suite except [`run_durable`] and
/// [`run_residency`].
pub fn run_all(make: Make<'_>) {
    scenarios::malformed_runs_are_refused_without_change(make);
    scenarios::prefix_spans_runs_and_branches(make);
    scenarios::scopes_are_isolated(make);
    scenarios::run_links_when_parent_is_known(make);
    scenarios::truncation_removes_descendants(make);
    scenarios::deep_and_wide_chains_are_removed(make);
    scenarios::ring_of_runs_is_removable(make);
    scenarios::holes_free_their_own_space_once(make);
    scenarios::dropping_a_scope_removes_all_its_runs(make);
    scenarios::scope_of_many_short_chains_is_dropped(make);
    scenarios::run_moves_and_keeps_its_name(make);
    scenarios::hashes_that_share_bits_are_distinguished(make);
    scenarios::recency_only_grows(make);
    scenarios::latest_retention_applies(make);
    scenarios::run_names_are_not_reused(make);
    scenarios::long_runs_behave_like_short_runs(make);
    scenarios::sequences_of_any_length_are_found(make);
    scenarios::sync_calls_sync_data_and_returns_its_error(make);
}

/// Runs the checks for indexes whose records become durable only after the data that they name: the
/// backend `run`.
pub fn run_durable(make: &dyn Fn() -> PersistentIndex) {
    durable::changes_during_data_sync_wait_for_next_sync(&make());
    durable::failed_data_sync_withholds_records(&make());
    durable::sync_may_nest_in_data_sync(&make());
}
