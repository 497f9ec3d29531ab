//! Copies from `run` and `memory` to every compiled backend, and back to `memory`, have the same
//! contents.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Op, Pair, op};
use proptest::prelude::*;
use ritornello_format::{ErrorKind, ScopeSlot};
use ritornello_index::conformance::{contents, page, pages, place};
use ritornello_index::{
    Backend, Copied, MemoryIndex, NewRun, OpenOptions, PrefixIndex, RunIndex, RunOptions, copy,
};
use ritornello_medium::{Host, SimDisk};
use std::path::Path;
use std::sync::Arc;

fn empty(dir: &Path) -> Vec<(Backend, Box<dyn PrefixIndex>)> {
    let open = |backend: Backend| {
        let dir = dir.join(backend.name());
        (backend, backend.open(Arc::new(Host), &dir, &OpenOptions::default()).unwrap())
    };
    Backend::compiled().map(open).collect()
}

fn plain(from: &dyn PrefixIndex, to: &dyn PrefixIndex) -> Copied {
    copy(from, to, &|| Ok(()), &mut |_| ()).unwrap()
}

fn insert(
    index: &dyn PrefixIndex,
    generation: u64,
    chained: bool,
    parent: Option<u64>,
    numbers: std::ops::Range<u64>,
) {
    let pages: Vec<_> = numbers.map(|number| page(1, number)).collect();
    let place = place(generation, pages.len() as u32);
    let (scope, parent) = (ScopeSlot(u32::from(!chained)), parent.map(|number| page(1, number)));
    index
        .insert(&NewRun { scope, chained, parent, pages: &pages, place: &place, recency: 3 })
        .unwrap();
}

proptest! {
    #![proptest_config(common::cases(24))]
    #[test]
    fn copies_to_every_backend_are_equal(ops in prop::collection::vec(op(), 1..80)) {
        let mut pair = Pair::new();
        let calm = ops.iter().filter(|op| !matches!(op, Op::Crash { .. }));
        calm.for_each(|op| pair.apply(op));
        let expected = contents(&*pair.run);
        let dir = tempfile::tempdir().unwrap();
        for (backend, index) in empty(dir.path()) {
            let copied = plain(&*pair.run, &*index);
            prop_assert_eq!(copied.dropped, 0);
            prop_assert_eq!((copied.runs, copied.pages), (index.stats().runs, index.stats().pages));
            prop_assert_eq!(&contents(&*index), &expected, "{}", backend);
            prop_assert_eq!(index.clock(), pair.run.clock());
            let back = MemoryIndex::new();
            plain(&*index, &back);
            prop_assert_eq!(&contents(&back), &expected, "copied back from {}", backend);
        }
    }
}

#[test]
fn chains_linked_late_and_rings_are_copied() {
    // Insert the runs of a chain from the last to the first, link them afterwards, and add a
    // branch. Then make a ring, two runs that follow each other, which an intact index never has.
    let from = MemoryIndex::new();
    for run in (0..200).rev() {
        insert(&from, run + 1, true, None, run * 3..run * 3 + 3);
    }
    for run in 1..200 {
        from.link(ScopeSlot(0), page(1, run * 3 - 1), page(1, run * 3));
    }
    insert(&from, 500, true, Some(301), 1000..1004);
    insert(&from, 600, true, None, 2000..2002);
    insert(&from, 601, true, Some(2001), 2002..2004);
    insert(&from, 602, true, Some(2002), 2004..2006);
    from.link(ScopeSlot(0), page(1, 2003), page(1, 2000));
    let expected = contents(&from);
    assert_eq!(expected.values().filter(|run| run.parent.is_some()).count(), 199 + 1 + 3);
    let dir = tempfile::tempdir().unwrap();
    for (backend, index) in empty(dir.path()) {
        let mut seen = 0;
        let copied = copy(&from, &*index, &|| Ok(()), &mut |runs| {
            assert_eq!(runs, seen + 1, "progress counts every run");
            seen = runs;
        });
        assert_eq!(copied.unwrap(), Copied { runs: 204, pages: 610, dropped: 0 }, "{backend}");
        assert_eq!(contents(&*index), expected, "{backend}");
        let keys: Vec<_> = (0..600).map(|number| page(1, number)).collect();
        assert_eq!(index.probe(ScopeSlot(0), &keys), 600, "{backend}");
    }
}

#[test]
fn copy_is_durable_and_keeps_holes() {
    let from = MemoryIndex::new();
    for run in 0..40u64 {
        insert(&from, run + 1, false, None, run * 10..run * 10 + 10);
    }
    for run in 0..40u64 {
        // Remove the first, the last or a middle page of each run; then all pages but one of the
        // first run.
        from.remove(ScopeSlot(1), &[page(1, run * 10 + [0, 9, 4][run as usize % 3])]);
    }
    from.remove(ScopeSlot(1), &pages(1, 9));
    let named = |number| from.locate(ScopeSlot(1), page(1, number)).unwrap().0;
    from.touch(named(9), 77);
    from.retain(&[(named(9), 50), (named(15), 60)], 40);
    let disk = SimDisk::new(64 << 20);
    let to =
        RunIndex::open(Arc::new(disk.clone()), Path::new("/to"), RunOptions::default()).unwrap();
    let data_syncs = std::sync::atomic::AtomicU64::new(0);
    let sync_data = || {
        data_syncs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    };
    copy(&from, &to, &sync_data, &mut |_| ()).unwrap();
    assert!(data_syncs.into_inner() > 0);
    drop(to);
    let after = Arc::new(disk.crash(5));
    let to = RunIndex::open(after, Path::new("/to"), RunOptions::default()).unwrap();
    assert_eq!(contents(&to), contents(&from));
    assert_eq!(to.clock(), 40);
}

#[test]
fn refused_copy_returns_the_error() {
    let from = MemoryIndex::new();
    (0..2000).for_each(|run| insert(&from, run + 1, false, None, run..run + 1));
    let options = RunOptions { metadata_bytes_max: 100_000, ..RunOptions::default() };
    let to = RunIndex::open(Arc::new(SimDisk::new(64 << 20)), Path::new("/to"), options).unwrap();
    let refused = copy(&from, &to, &|| Ok(()), &mut |_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Retry);
}
