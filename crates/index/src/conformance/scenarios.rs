//! The scenarios of [`super::run_all`].

#![allow(clippy::panic, reason = "a suite panics where a promise is broken")]

use super::{Make, contents, page, pages, place, sum, units};
use crate::{NewRun, PrefixIndex, Removed, RunId};
use ritornello_format::{Error, ErrorKind, PageHash, Place, ScopeSlot};
use std::collections::BTreeSet;

const A: ScopeSlot = ScopeSlot(1);
const B: ScopeSlot = ScopeSlot(2);

struct Bench {
    index: Box<dyn PrefixIndex>,
    generation: std::cell::Cell<u64>,
}

impl Bench {
    fn new(make: Make<'_>) -> Self {
        Self { index: make(), generation: std::cell::Cell::new(1) }
    }

    fn try_insert(
        &self,
        scope: ScopeSlot,
        chained: bool,
        parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> ritornello_format::Result<RunId> {
        let generation = self.generation.replace(self.generation.get() + 1);
        let place = place(generation, pages.len() as u32);
        self.index.insert(&NewRun { scope, chained, parent, pages, place: &place, recency: 5 })
    }

    fn insert(&self, chained: bool, parent: Option<PageHash>, pages: &[PageHash]) -> RunId {
        match self.try_insert(A, chained, parent, pages) {
            Ok(run) => run,
            Err(error) => panic!("a valid run was refused: {error}"),
        }
    }

    fn prefix(&self, keys: &[PageHash]) -> usize {
        let found = self.index.probe(A, &keys);
        let matched = self.index.walk(A, &keys);
        let mut at = 0;
        for run in &matched {
            assert_eq!(run.at, at, "matched runs are consecutive");
            for offset in 0..run.pages {
                let key = keys[(at + offset) as usize];
                assert_eq!(self.index.locate(A, key), Some((run.run, run.first + offset)));
            }
            at += run.pages;
        }
        assert_eq!(at as usize, found, "walk() and probe() agree");
        found
    }
}

pub(super) fn malformed_runs_are_refused_without_change(make: Make<'_>) {
    let bench = Bench::new(make);
    let keys = pages(1, 8);
    bench.insert(true, None, &keys[..4]);
    let before = contents(bench.index.as_ref());
    let refused = |scope, parent, pages: &[PageHash], why: &str| {
        let kind = bench.try_insert(scope, true, parent, pages).map_err(|error| error.kind());
        assert_eq!(kind, Err(ErrorKind::Invalid), "{why}");
    };
    refused(A, None, &[], "no page");
    refused(A, None, &keys[3..5], "a present page");
    refused(A, None, &[keys[4], keys[5], keys[4]], "a page twice");
    refused(A, None, &[keys[4], PageHash::NONE], "the hash of no page");
    refused(A, Some(keys[7]), &keys[4..6], "an unknown parent");
    refused(B, Some(keys[3]), &keys[4..6], "a parent in another scope");
    refused(A, None, &pages(9, 65_536), "too many pages");
    let mut many = pages(9, 40);
    many[39] = many[0];
    refused(A, None, &many, "a page twice, far apart");
    let short = Place { extents: vec![], ..place(90, 4) };
    let wrong = Place { header_units: 2, ..place(91, 4) };
    let new = |place| NewRun {
        scope: A,
        chained: true,
        parent: None,
        pages: &keys[4..8],
        place,
        recency: 0,
    };
    assert!(bench.index.insert(&new(&wrong)).is_err(), "an inconsistent place is refused");
    assert_eq!(contents(bench.index.as_ref()), before);
    assert!(bench.index.insert(&new(&short)).is_ok(), "a place without extents is accepted");
}

pub(super) fn prefix_spans_runs_and_branches(make: Make<'_>) {
    let bench = Bench::new(make);
    let trunk = pages(1, 40);
    bench.insert(true, None, &trunk[..10]);
    bench.insert(true, Some(trunk[9]), &trunk[10..20]);
    bench.insert(true, Some(trunk[19]), &trunk[20..21]);
    bench.insert(true, Some(trunk[20]), &trunk[21..40]);
    for length in 0..=40 {
        assert_eq!(bench.prefix(&trunk[..length]), length);
    }
    let mut off = trunk.clone();
    for at in 0..40 {
        // Two chains have no equal hashes after their first difference.
        off.truncate(at);
        off.extend((0..5).map(|number| page(100 + at as u64, number)));
        assert_eq!(
            bench.prefix(&off),
            at,
            "a prefix must end at page {at}, where the sequence leaves the trunk"
        );
        off = trunk.clone();
    }
    // Insert a branch from the middle of a run, and a branch from this branch.
    let branch = pages(2, 30);
    bench.insert(true, Some(trunk[4]), &branch[..7]);
    bench.insert(true, Some(branch[2]), &branch[7..9]);
    let along: Vec<PageHash> = trunk[..5].iter().chain(&branch[..7]).copied().collect();
    assert_eq!(bench.prefix(&along), 12);
    let twice: Vec<PageHash> =
        trunk[..5].iter().chain(&branch[..3]).chain(&branch[7..9]).copied().collect();
    assert_eq!(bench.prefix(&twice), 10);
    // A probe may start in the middle of a chain.
    assert_eq!(bench.prefix(&trunk[15..]), 25);
    assert_eq!(bench.prefix(&branch[9..]), 0);
    // Unchained pages match in any order.
    let loose = pages(3, 9);
    bench.insert(false, None, &loose);
    let jumbled = [loose[3], loose[4], loose[0], loose[8], page(4, 0), loose[1]];
    assert_eq!(bench.prefix(&jumbled), 4);
    let same_end = [loose[2], page(4, 1), loose[4]];
    assert_eq!(
        bench.prefix(&same_end),
        1,
        "a page in the middle must not imply the pages before it"
    );
    let exists = bench.index.exists(A, &jumbled);
    assert_eq!(exists, [true, true, true, true, false, true]);
    assert_eq!(bench.prefix(&[]), 0);
    assert_eq!(bench.prefix(&[PageHash::NONE]), 0);
}

pub(super) fn scopes_are_isolated(make: Make<'_>) {
    let bench = Bench::new(make);
    let keys = pages(1, 6);
    bench.insert(true, None, &keys);
    assert_eq!(bench.index.probe(B, &keys), 0);
    assert_eq!(bench.index.locate(B, keys[0]), None);
    // Pages with the same hashes may be inserted in another scope, which is not chained.
    assert!(bench.try_insert(B, false, None, &keys[2..5]).is_ok());
    assert_eq!(bench.index.probe(B, &&keys[2..]), 3);
    assert_eq!(bench.prefix(&keys), 6);
    bench.index.remove(B, &keys);
    assert_eq!((bench.prefix(&keys), bench.index.probe(B, &&keys[2..])), (6, 0));
}

pub(super) fn run_links_when_parent_is_known(make: Make<'_>) {
    let bench = Bench::new(make);
    let keys = pages(1, 30);
    let tail = bench.insert(true, None, &keys[20..]);
    let middle = bench.insert(true, None, &keys[10..20]);
    let head = bench.insert(true, None, &keys[..10]);
    let parent = |run| bench.index.run(run).and_then(|view| view.parent);
    bench.index.link(A, keys[9], keys[11]);
    assert_eq!(parent(middle), None, "only first pages are linked");
    bench.index.link(A, page(7, 7), keys[10]);
    bench.index.link(B, keys[9], keys[10]);
    bench.index.link(A, keys[14], keys[10]);
    assert_eq!(
        parent(middle),
        None,
        "a run must not follow an unknown page, another scope's page or itself"
    );
    bench.index.link(A, keys[9], keys[10]);
    assert_eq!(parent(middle), Some((head, 9)));
    bench.index.link(A, keys[3], keys[10]);
    assert_eq!(parent(middle), Some((head, 9)), "the first link stays");
    bench.index.link(A, keys[19], keys[20]);
    let (_, gone, whole) = sum(&bench.index.truncate(head, 9));
    assert_eq!((gone, whole), (21, BTreeSet::from([middle, tail])));
    let loose = pages(2, 4);
    let run = bench.insert(false, None, &loose[..2]);
    bench.insert(false, None, &loose[2..]);
    bench.index.link(A, loose[3], loose[0]);
    assert_eq!(parent(run), None, "unchained pages have no parents");
}

pub(super) fn truncation_removes_descendants(make: Make<'_>) {
    let bench = Bench::new(make);
    let trunk = pages(1, 10);
    let run = bench.insert(true, None, &trunk);
    let early = bench.insert(true, Some(trunk[3]), &pages(2, 3));
    let late = bench.insert(true, Some(trunk[6]), &pages(3, 3));
    let later = bench.insert(true, Some(page(3, 1)), &pages(4, 3));
    assert!(bench.index.truncate(run, 10).is_empty(), "a cut at the end removes nothing");
    assert!(
        bench.index.truncate(run, 70_000).is_empty(),
        "a cut far after the end removes nothing"
    );
    let place = bench.index.place(run).unwrap_or_default();
    let removed = bench.index.truncate(run, 6);
    let (freed, gone, whole) = sum(&removed);
    assert_eq!((gone, whole), (4 + 3 + 3, BTreeSet::from([late, later])));
    let own = removed.iter().find(|removed| removed.run == run).map(|r| r.extents.clone());
    assert_eq!(
        units(&own.unwrap_or_default()),
        units(&place.pages(6, 4)),
        "a truncated run frees the space of its removed pages"
    );
    assert!(units(&place.pages(6, 4)).is_subset(&freed));
    assert!(bench.index.run(early).is_some() && bench.index.run(late).is_none());
    assert_eq!(bench.prefix(&trunk), 6);
    let (freed, gone, whole) = sum(&bench.index.remove(A, &[trunk[0]]));
    assert_eq!((gone, whole), (9, BTreeSet::from([run, early])));
    assert!(units(&place.header()).is_subset(&freed), "a whole run frees its header");
    assert!(contents(bench.index.as_ref()).is_empty());
    assert!(bench.index.truncate(run, 0).is_empty(), "truncating an unknown run removes nothing");
}

pub(super) fn deep_and_wide_chains_are_removed(make: Make<'_>) {
    let bench = Bench::new(make);
    const DEEP: u64 = 100_000;
    let mut parent = None;
    let mut first = None;
    for number in 0..DEEP {
        let run = bench.insert(true, parent, &[page(1, number)]);
        first = first.or(Some(run));
        parent = Some(page(1, number));
    }
    assert_eq!(bench.prefix(&pages(1, 600)), 600);
    for number in 0..1000 {
        bench.insert(true, Some(page(1, 5)), &[page(2, number)]);
    }
    let removed = bench.index.truncate(first.unwrap_or(RunId(0)), 0);
    assert_eq!(sum(&removed).1 as u64, DEEP + 1000);
    assert_eq!(bench.index.stats().runs, 0);
}

pub(super) fn ring_of_runs_is_removable(make: Make<'_>) {
    for keep in 0..4 {
        let bench = Bench::new(make);
        let (a, b, c) = (pages(1, 4), pages(2, 4), pages(3, 4));
        let ring = bench.insert(true, None, &a);
        bench.insert(true, Some(a[2]), &b);
        bench.insert(true, Some(a[0]), &c);
        // Link two runs into a ring, which the hashes of real prompts never form.
        bench.index.link(A, b[1], a[0]);
        let (_, gone, _) = sum(&bench.index.truncate(ring, keep));
        let expected = if keep < 3 { 12 } else { 1 };
        assert_eq!(gone, expected, "kept {keep}");
        assert!(
            contents(bench.index.as_ref()).len() < 4,
            "runs after removed pages must be removed"
        );
        if keep < 3 {
            bench.insert(true, None, &a);
            bench.insert(true, Some(a[3]), &b);
            assert_eq!(contents(bench.index.as_ref()).len(), 2);
        }
    }
}

pub(super) fn holes_free_their_own_space_once(make: Make<'_>) {
    let bench = Bench::new(make);
    let keys = pages(1, 6);
    let run = bench.insert(false, None, &keys);
    let place = bench.index.place(run).unwrap_or_default();
    let all = units(&place.extents);
    let mut freed = BTreeSet::new();
    for at in [2, 3, 5] {
        let removed = bench.index.remove(A, &[keys[at]]);
        assert_eq!(removed.len(), 1);
        assert_eq!((removed[0].pages, removed[0].whole), (1, false));
        let (units, _, _) = sum(&removed);
        assert_eq!(units, super::units(&place.page(at as u32)));
        freed.extend(units);
        assert!(bench.index.remove(A, &[keys[at]]).is_empty(), "a hole is removed once");
    }
    let view = bench.index.run(run);
    let (held, pages) = view.map(|v| (units(&v.live_extents()), v.pages)).unwrap_or_default();
    assert_eq!(held, all.difference(&freed).copied().collect());
    assert_eq!(pages[2], PageHash::NONE);
    assert_eq!(bench.prefix(&keys), 2);
    assert_eq!(bench.index.exists(A, &keys), [true, true, false, false, true, false]);
    // Another run may insert a page that was removed from this run.
    bench.insert(false, None, &keys[2..3]);
    assert_eq!(bench.prefix(&keys), 3);
    // A cut returns the extents that the run still held, and none that holes freed before.
    let (units, gone, _) = sum(&bench.index.truncate(run, 1));
    assert_eq!((units, gone), (super::units(&[place.page(1), place.page(4)].concat()), 2));
    let (units, gone, whole) = sum(&bench.index.remove(A, &[keys[0]]));
    assert_eq!((gone, whole), (1, BTreeSet::from([run])));
    assert_eq!(units, super::units(&[place.header(), place.page(0)].concat()));
    // A cut that leaves only removed pages removes the run.
    let run = bench.insert(false, None, &pages_of(5));
    bench.index.remove(A, &&pages_of(5)[..2]);
    let (_, gone, whole) = sum(&bench.index.truncate(run, 2));
    assert_eq!((gone, whole), (3, BTreeSet::from([run])));
    assert_eq!(contents(bench.index.as_ref()).len(), 1);
}

fn pages_of(count: u64) -> Vec<PageHash> {
    pages(50, count)
}

pub(super) fn dropping_a_scope_removes_all_its_runs(make: Make<'_>) {
    let bench = Bench::new(make);
    let mut parent = None;
    for family in 0..400 {
        let keys = pages(family, 3);
        bench.insert(true, parent, &keys);
        parent = keys.last().copied().filter(|_| family % 7 != 0);
    }
    assert!(bench.try_insert(B, false, None, &pages(3, 3)).is_ok());
    let held: usize = contents(bench.index.as_ref())
        .values()
        .filter(|content| content.scope == A)
        .map(|content| content.units.len())
        .sum();
    let (units, gone, whole) = sum(&bench.index.drop_scope(A));
    assert_eq!((units.len(), gone, whole.len()), (held, 1200, 400));
    assert_eq!(bench.index.stats().runs, 1);
    assert!(bench.index.drop_scope(A).is_empty());
}

pub(super) fn scope_of_many_short_chains_is_dropped(make: Make<'_>) {
    let bench = Bench::new(make);
    // An index may drop this number of runs in several batches. Removing a run also removes its
    // descendants, so a later run of the same batch may not exist, and its record may be free,
    // before the index comes to it.
    const RUNS: u64 = 5000;
    let mut parent = None;
    for number in 0..RUNS {
        let key = page(1, number);
        bench.insert(true, parent, &[key]);
        parent = Some(key).filter(|_| number % 7 != 0);
    }
    assert_eq!(sum(&bench.index.drop_scope(A)).1 as u64, RUNS);
    assert_eq!(bench.index.stats().runs, 0);
}

pub(super) fn run_moves_and_keeps_its_name(make: Make<'_>) {
    let bench = Bench::new(make);
    let keys = pages(1, 5);
    let run = bench.insert(false, None, &keys);
    bench.index.remove(A, &[keys[1]]);
    let old = bench.index.run(run).map(|view| units(&view.live_extents())).unwrap_or_default();
    let (small, unknown) = (place(70, 4), RunId(u64::MAX));
    assert!(bench.index.relocate(run, &small).is_none(), "a place that is too small is refused");
    assert!(bench.index.relocate(unknown, &place(70, 5)).is_none(), "an unknown run is not moved");
    let moved = bench.index.relocate(run, &place(70, 5));
    let moved: Vec<Removed> = moved.into_iter().collect();
    assert_eq!(sum(&moved), (old, 0, BTreeSet::new()));
    assert_eq!(bench.index.place(run), Some(place(70, 5)));
    assert_eq!(bench.index.locate(A, keys[4]), Some((run, 4)));
    let (units, _, _) = sum(&bench.index.truncate(run, 0));
    let hole = super::units(&place(70, 5).page(1));
    let all = super::units(&place(70, 5).extents);
    assert_eq!(units, all.difference(&hole).copied().collect());
}

pub(super) fn hashes_that_share_bits_are_distinguished(make: Make<'_>) {
    let bench = Bench::new(make);
    // The hashes differ in one byte; every position of the byte occurs.
    for position in 0..16 {
        let family: Vec<PageHash> = (1..=200u8)
            .map(|value| {
                let mut hash = [0xee; 16];
                hash[position] = value;
                PageHash(hash)
            })
            .collect();
        bench.insert(true, None, &family[..100]);
        for (at, page) in family.iter().enumerate() {
            let found = bench.index.locate(A, *page).map(|(_, page)| page as usize);
            assert_eq!(found, (at < 100).then_some(at), "byte {position}");
        }
        assert_eq!(bench.index.probe(A, &&family[..]), 100);
        assert_eq!(sum(&bench.index.remove(A, &&family[..])).1, 100);
    }
}

pub(super) fn recency_only_grows(make: Make<'_>) {
    let bench = Bench::new(make);
    let run = bench.insert(true, None, &pages(1, 2));
    let recency = || bench.index.run(run).map(|view| view.recency);
    assert_eq!(recency(), Some(5));
    bench.index.touch(run, 9);
    bench.index.touch(run, 7);
    assert_eq!(recency(), Some(9));
    bench.index.touch(RunId(u64::MAX), 11);
}

pub(super) fn latest_retention_applies(make: Make<'_>) {
    let bench = Bench::new(make);
    let run = bench.insert(true, None, &pages(1, 2));
    let until = || bench.index.run(run).map(|view| view.retain_until);
    assert_eq!((until(), bench.index.clock()), (Some(0), 0));
    bench.index.retain(&[(RunId(u64::MAX), 4), (run, 9)], 5);
    assert_eq!((until(), bench.index.clock()), (Some(9), 5));
    bench.index.retain(&[(run, 7)], 3);
    bench.index.truncate(run, 1);
    assert_eq!((until(), bench.index.clock()), (Some(7), 5), "the clock never decreases");
    bench.index.retain(&[(run, 0)], 6);
    assert_eq!((until(), bench.index.clock()), (Some(0), 6));
    bench.index.retain(&[], 8);
    assert_eq!(bench.index.clock(), 8);
}

pub(super) fn run_names_are_not_reused(make: Make<'_>) {
    let bench = Bench::new(make);
    let mut names = BTreeSet::new();
    for _ in 0..50 {
        let run = bench.insert(true, None, &pages(1, 2));
        assert!(names.insert(run), "a name is assigned once");
        bench.index.truncate(run, 0);
        assert!(bench.index.run(run).is_none() && bench.index.truncate(run, 0).is_empty());
    }
}

pub(super) fn long_runs_behave_like_short_runs(make: Make<'_>) {
    let bench = Bench::new(make);
    let keys = pages(1, 65_535);
    let run = bench.insert(true, None, &keys);
    assert_eq!(bench.index.probe(A, &keys), 65_535);
    let mut off = keys.clone();
    off.truncate(40_000);
    off.extend(pages(2, 100));
    assert_eq!(bench.index.probe(A, &off), 40_000);
    assert_eq!(sum(&bench.index.truncate(run, 1)).1, 65_534);
    bench.insert(true, Some(keys[0]), &keys[1..]);
    assert_eq!(bench.index.probe(A, &keys), 65_535);
    let (_, gone, whole) = sum(&bench.index.truncate(run, 0));
    assert_eq!((gone, whole.len()), (65_535, 2));
}

pub(super) fn sequences_of_any_length_are_found(make: Make<'_>) {
    let bench = Bench::new(make);
    let one = pages(1, 1);
    bench.insert(true, None, &one);
    let keys = pages(2, 100_000);
    // The last run has one page, as in a sequence that grew by one page.
    let cuts: [usize; 5] = [0, 1, 60_000, 99_999, 100_000];
    for ends in cuts.windows(2) {
        let parent = ends[0].checked_sub(1).map(|before| keys[before]);
        bench.insert(true, parent, &keys[ends[0]..ends[1]]);
    }
    assert_eq!((bench.prefix(&one), bench.prefix(&keys)), (1, 100_000));
    let walked: Vec<(u32, u32)> =
        bench.index.walk(A, &keys).iter().map(|run| (run.at, run.pages)).collect();
    assert_eq!(walked, [(0, 1), (1, 59_999), (60_000, 39_999), (99_999, 1)]);
    assert_eq!(sum(&bench.index.remove(A, &[keys[70_000]])).1, 30_000);
    assert_eq!((bench.prefix(&one), bench.prefix(&keys)), (1, 70_000));
    assert_eq!(sum(&bench.index.remove(A, &keys)).1, 70_000);
    assert_eq!((bench.prefix(&one), bench.prefix(&keys)), (1, 0));
}

pub(super) fn sync_calls_sync_data_and_returns_its_error(make: Make<'_>) {
    let bench = Bench::new(make);
    let (first, second) = (pages(1, 3), pages(2, 3));
    bench.insert(true, None, &first);
    let data_syncs = std::cell::Cell::new(0);
    let sync_data = || {
        if data_syncs.replace(data_syncs.get() + 1) == 0 {
            bench.insert(true, None, &second);
        }
        Ok(())
    };
    assert!(bench.index.sync_after(&sync_data).is_ok());
    assert!(data_syncs.get() > 0, "a sync must call `sync_data`");
    assert_eq!(bench.prefix(&second), 3, "an insert in `sync_data` must succeed");
    let failed = bench.index.sync_after(&|| Err(Error::retry("not now")));
    assert_eq!(
        failed.map_err(|error| error.kind()),
        Err(ErrorKind::Retry),
        "the error of the data sync is returned"
    );
    assert!(bench.index.sync().is_ok(), "a failed data sync must not poison the index");
}
