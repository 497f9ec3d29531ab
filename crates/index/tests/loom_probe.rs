//! A probe concurrent with a writer, in every order that the memory model allows.
//!
//! `cargo test -p ritornello-index --features loom --test loom_probe`
//!
//! With the feature `loom` a writer changes at most two pages each time it takes the lock, so that
//! it takes the lock twice for a run of four pages, and a probe may run in between. A table has
//! only two shards, so that a change of one slot may move the slots of other pages.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use loom::sync::Arc;
use loom::thread;
use ritornello_format::{PageHash, Place, ScopeSlot};
use ritornello_index::conformance::pages;
use ritornello_index::{NewRun, PrefixIndex, RunId, RunIndex, RunOptions};
use ritornello_medium::SimDisk;
use std::path::Path;

const SCOPE: ScopeSlot = ScopeSlot(1);

fn index() -> Arc<RunIndex> {
    open(&SimDisk::new(1 << 20))
}

fn open(disk: &SimDisk) -> Arc<RunIndex> {
    let disk = std::sync::Arc::new(disk.clone());
    Arc::new(RunIndex::open(disk, Path::new("/index"), RunOptions::default()).unwrap())
}

fn insert(index: &RunIndex, parent: Option<PageHash>, pages: &[PageHash]) -> RunId {
    let place = Place::default();
    let run = NewRun { scope: SCOPE, chained: true, parent, pages, place: &place, recency: 0 };
    index.insert(&run).unwrap()
}

/// Returns the number of pages that `walk` finds. Checks that the runs of the walk cover these
/// pages without gaps.
fn probe(index: &RunIndex, keys: &[PageHash]) -> usize {
    let steps = index.walk(SCOPE, &keys);
    let mut at = 0;
    for step in &steps {
        assert_eq!(step.at as usize, at);
        at += step.pages as usize;
    }
    at
}

#[test]
fn run_becomes_visible_as_a_whole() {
    loom::model(|| {
        let index = index();
        let keys = pages(1, 6);
        insert(&index, None, &keys[..2]);
        let writer = {
            let (index, keys) = (Arc::clone(&index), keys.clone());
            thread::spawn(move || insert(&index, Some(keys[1]), &keys[2..]))
        };
        let found = probe(&index, &keys);
        assert!(found == 2 || found == 6, "{found} of 6");
        let exists = index.exists(SCOPE, &&keys[4..6]);
        assert!(found == 2 || exists == [true, true], "pages that a probe has found must exist");
        writer.join().unwrap();
        assert_eq!(probe(&index, &keys), 6);
    });
}

#[test]
fn truncation_removes_leaves_before_parents() {
    loom::model(|| {
        let index = index();
        let keys = pages(1, 6);
        let root = insert(&index, None, &keys[..3]);
        insert(&index, Some(keys[2]), &keys[3..]);
        let writer = {
            let index = Arc::clone(&index);
            thread::spawn(move || {
                index.truncate(root, 1);
            })
        };
        let found = probe(&index, &keys);
        assert!([6, 3, 1].contains(&found), "{found} of 6");
        // `exists` looks both pages up under one hold of the lock, so it never shows a page without
        // the page before it.
        let exists = index.exists(SCOPE, &[keys[3], keys[2]]);
        assert!(!exists[0] || exists[1], "found a page without the page before it");
        let again = probe(&index, &keys);
        assert!(again <= found, "a second probe found {again} pages, the first {found}");
        writer.join().unwrap();
        assert_eq!(probe(&index, &keys), 1);
        assert_eq!(index.locate(SCOPE, keys[2]), None);
    });
}

#[test]
fn reused_record_is_not_taken_for_the_old_run() {
    loom::model(|| {
        let index = index();
        let (old, new) = (pages(1, 3), pages(2, 3));
        let run = insert(&index, None, &old);
        let writer = {
            let (index, new) = (Arc::clone(&index), new.clone());
            thread::spawn(move || {
                index.truncate(run, 0);
                insert(&index, None, &new)
            })
        };
        let found = probe(&index, &old);
        assert!(found == 0 || found == 3);
        if let Some((other, page)) = index.locate(SCOPE, new[1]) {
            assert_ne!(other, run);
            assert_eq!(page, 1);
            assert_eq!(
                probe(&index, &old),
                0,
                "the old run was removed before the new run was inserted"
            );
            assert!(index.run(run).is_none());
        }
        let other = writer.join().unwrap();
        assert_eq!((probe(&index, &old), probe(&index, &new)), (0, 3));
        assert_ne!(other, run);
    });
}

#[test]
fn touch_during_a_sync_is_durable_after_the_next() {
    loom::model(|| {
        let disk = SimDisk::new(1 << 20);
        let index = open(&disk);
        let keys = pages(1, 1);
        let run = insert(&index, None, &keys);
        index.touch(run, 3);
        let toucher = {
            let index = Arc::clone(&index);
            thread::spawn(move || index.touch(run, 7))
        };
        index.sync().unwrap();
        toucher.join().unwrap();
        index.sync().unwrap();
        let after = open(&disk.crash(1));
        let (run, _) = after.locate(SCOPE, keys[0]).unwrap();
        assert_eq!(after.run(run).map(|view| view.recency), Some(7));
    });
}
