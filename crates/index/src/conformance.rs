//! What every [`PrefixIndex`] must do, as a suite: `conformance::run_all(&|| Box::new(MyIndex::new()))`
//! panics, naming the promise, where one is broken. Behind the feature `conformance`. [`run_durable`]
//! has the promises of those that survive power loss.
//!
//! [`contents`] makes any two indexes comparable: what is in them, without the names of runs.

mod durable;
mod residency;
mod scenarios;

pub use durable::Kept;
pub use residency::run_residency;

use crate::{PrefixIndex, Removed, RunId};
use ritornello_format::{Extent, PageHash, Place, ScopeSlot, SegmentId};
use std::collections::{BTreeMap, BTreeSet};

/// Makes an empty index.
pub type Make<'a> = &'a dyn Fn() -> Box<dyn PrefixIndex>;

/// A run, named by the generation of its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Its scope.
    pub scope: ScopeSlot,
    /// Whether it is chained.
    pub chained: bool,
    /// Generation and page of the parent.
    pub parent: Option<(u64, u32)>,
    /// Its pages.
    pub pages: Vec<PageHash>,
    /// Where it lies.
    pub place: Place,
    /// The units it holds.
    pub units: BTreeSet<(SegmentId, u32)>,
    /// When it was last used.
    pub recency: u64,
    /// When its retention ends.
    pub retain_until: u64,
}

/// Everything in an index. Generations must be distinct.
#[must_use]
pub fn contents(index: &dyn PrefixIndex) -> BTreeMap<u64, Content> {
    let mut runs = Vec::new();
    let mut names = BTreeMap::new();
    index.for_each(&mut |run, view| {
        assert_eq!(index.run(run).as_ref(), Some(&view), "run() says what for_each() says");
        assert_eq!(index.place(run).as_ref(), Some(&view.place), "so does place()");
        names.insert(run, view.place.generation);
        runs.push((run, view));
    });
    let mut children = BTreeSet::new();
    let mut all = BTreeMap::new();
    for (run, view) in &runs {
        children.extend(view.parent.map(|(parent, _)| parent));
        for (at, page) in view.pages.iter().enumerate() {
            if *page != PageHash::NONE {
                let there = index.locate(view.scope, *page);
                assert_eq!(there, Some((*run, at as u32)), "every page is where its run is");
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

/// The units of extents; each must be there once.
#[must_use]
pub fn units(extents: &[Extent]) -> BTreeSet<(SegmentId, u32)> {
    let mut units = BTreeSet::new();
    for extent in extents {
        for unit in extent.start..extent.end() {
            assert!(units.insert((extent.segment, unit)), "a unit is given back once");
        }
    }
    units
}

/// What a removal gave back: units and pages in all, and the runs that went whole.
#[must_use]
pub fn sum(removed: &[Removed]) -> (BTreeSet<(SegmentId, u32)>, u32, BTreeSet<RunId>) {
    let extents: Vec<Extent> = removed.iter().flat_map(|r| r.extents.iter().copied()).collect();
    let whole = removed.iter().filter(|r| r.whole).map(|r| r.run).collect();
    (units(&extents), removed.iter().map(|r| r.pages).sum(), whole)
}

/// A place for `pages` pages of two units and a header of one, in a segment of its own.
#[must_use]
pub fn place(generation: u64, pages: u32) -> Place {
    let segment = SegmentId(generation as u32);
    // Two pieces, so that some page is split.
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

/// Page `number` of a family; other families, other hashes.
#[must_use]
pub fn page(family: u64, number: u64) -> PageHash {
    let low = crate::synthetic::mix(family << 32 | number);
    let high = crate::synthetic::mix(low);
    PageHash((u128::from(high) << 64 | u128::from(low | 1)).to_le_bytes())
}

/// Pages `0..count` of a family.
#[must_use]
pub fn pages(family: u64, count: u64) -> Vec<PageHash> {
    (0..count).map(|number| page(family, number)).collect()
}

/// Runs the whole suite.
pub fn run_all(make: Make<'_>) {
    scenarios::what_is_malformed_is_refused_and_changes_nothing(make);
    scenarios::a_prefix_is_found_across_runs_and_branches(make);
    scenarios::scopes_do_not_see_each_other(make);
    scenarios::a_run_links_once_its_parent_is_known(make);
    scenarios::truncation_closes_over_what_is_behind(make);
    scenarios::chains_of_any_depth_and_width_go_at_once(make);
    scenarios::a_ring_of_runs_can_be_removed(make);
    scenarios::holes_give_back_their_own_space_once(make);
    scenarios::a_scope_goes_whole(make);
    scenarios::a_run_moves_and_keeps_its_name(make);
    scenarios::hashes_that_share_their_bits_are_told_apart(make);
    scenarios::recency_only_grows(make);
    scenarios::a_retention_is_what_was_said_last(make);
    scenarios::names_are_not_reused(make);
    scenarios::long_runs_are_like_short_ones(make);
    scenarios::a_sequence_has_one_page_or_a_hundred_thousand(make);
    scenarios::sync_makes_data_durable_first(make);
}

/// Runs the suite of indexes that survive power loss.
pub fn run_durable(make: &dyn Fn() -> Kept) {
    durable::what_comes_while_data_is_synced_waits_for_the_next_sync(&make());
    durable::data_that_cannot_be_synced_keeps_its_records_back(&make());
    durable::a_sync_within_the_sync_of_data_is_no_trouble(&make());
}
