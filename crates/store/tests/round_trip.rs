//! Gets return the pages put, also after a restart.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::{ErrorKind, Scope};
use ritornello_store::{IndexKind, Options};

#[test]
fn pages_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let shapes = [4096, 100, 65_536, 196_608, 300_000, 786_432];
    {
        let open = open(dir.path(), 64);
        for (at, bytes) in shapes.into_iter().enumerate() {
            for scope in [chained(bytes), unchained(bytes)] {
                let scope = ritornello_format::Scope { part: at as u32, ..scope };
                let keys = sequence(at as u64, 7);
                assert_eq!(put(&open.store, &scope, &keys, None).pages, 7, "{bytes}");
                assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), 7);
                assert_eq!(get(&open.store, &scope, &keys).pages, 7);
            }
        }
        open.close();
    }
    let open =
        open_on(std::sync::Arc::new(ritornello_medium::Host), &Options::new(dir.path())).unwrap();
    for (at, bytes) in shapes.into_iter().enumerate() {
        for scope in [chained(bytes), unchained(bytes)] {
            let scope = ritornello_format::Scope { part: at as u32, ..scope };
            assert_eq!(get(&open.store, &scope, &sequence(at as u64, 7)).pages, 7, "{bytes}");
        }
    }
    let stats = open.store.stats().unwrap();
    assert_eq!(stats.catalog.pages, shapes.len() as u64 * 2 * 7);
    assert_eq!(stats.catalog.owner_epoch, 2);
    open.close();
}

#[test]
fn put_writes_only_missing_pages() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (chained(8192), sequence(1, 10));
    assert_eq!(put(&open.store, &scope, &keys[..4], None).pages, 4);
    let again = put(&open.store, &scope, &keys, None);
    assert_eq!((again.pages, again.bytes), (10, 6 * 8192));
    let whole = put(&open.store, &scope, &keys, None);
    assert_eq!((whole.pages, whole.bytes, whole.reason), (10, 0, ""));
    assert_eq!(get(&open.store, &scope, &keys).pages, 10);
    open.close();
}

#[test]
fn orphan_run_joins_its_late_parent() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (chained(4096), sequence(1, 9));
    put(&open.store, &scope, &keys[6..], None);
    put(&open.store, &scope, &keys[3..6], None);
    assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), 0);
    assert_eq!(open.store.probe(&scope, &refs(&keys[3..])).unwrap(), 6);
    put(&open.store, &scope, &keys[..3], None);
    assert_eq!(get(&open.store, &scope, &keys).pages, 9);
    // A put of all pages links the runs, so that a delete of the head then deletes the tails.
    put(&open.store, &scope, &keys, None);
    assert_eq!(open.store.delete(&scope, &refs(&keys[2..3])).unwrap(), 1);
    assert_eq!(
        open.store.exists(&scope, &refs(&keys)).unwrap(),
        [vec![true; 2], vec![false; 7]].concat()
    );
    open.close();
}

#[test]
fn tail_committed_first_is_linked_to_its_head() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (chained(4096), sequence(1, 6));
    assert_eq!(put(&open.store, &scope, &keys[3..], Some(&keys[2])).pages, 3);
    assert_eq!(put(&open.store, &scope, &keys[..3], None).pages, 3);
    assert_eq!(get(&open.store, &scope, &keys).pages, 6);
    assert_eq!(open.store.delete(&scope, &refs(&keys[2..3])).unwrap(), 1);
    let present = open.store.exists(&scope, &refs(&keys)).unwrap();
    assert_eq!(present, [true, true, false, false, false, false]);
    open.close();
}

#[test]
fn unchained_pages_are_independent() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (unchained(5000), sequence(1, 6));
    put(&open.store, &scope, &keys, None);
    assert_eq!(open.store.delete(&scope, &refs(&keys[2..3])).unwrap(), 1);
    let present = open.store.exists(&scope, &refs(&keys)).unwrap();
    assert_eq!(present, [true, true, false, true, true, true]);
    assert_eq!(get(&open.store, &scope, &keys).pages, 2);
    assert_eq!(get(&open.store, &scope, &keys[3..]).pages, 3);
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 6);
    assert_eq!(get(&open.store, &scope, &keys).pages, 6);
    open.close();
}

#[test]
fn dropped_scope_stays_dropped_after_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (scope, other, keys) = (chained(4096), unchained(4096), sequence(1, 5));
    let forgotten = {
        let open = open(dir.path(), 16);
        put(&open.store, &scope, &keys, None);
        put(&open.store, &other, &keys, None);
        open.store.flush().unwrap();
        open.store.drop_scope(&scope).unwrap();
        assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), 0);
        open.forget()
    };
    let open = open(dir.path(), 16);
    assert_eq!(open.store.probe(&scope, &refs(&keys)).unwrap(), 0);
    assert_eq!(get(&open.store, &other, &keys).pages, 5);
    // After a close the index no longer has the dropped pages. After a kill it still has them, and
    // the next opening removes and counts them.
    let dropped = forgotten.then_some(&5);
    assert_eq!(open.store.stats().unwrap().catalog.dropped_at_open.get("dropped_scope"), dropped);
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 5);
    open.store.clear().unwrap();
    assert_eq!(open.store.stats().unwrap().catalog.pages, 0);
    assert_eq!(open.store.stats().unwrap().catalog.used_bytes, 0);
    open.close();
}

#[test]
fn invalid_put_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (chained(4096), sequence(1, 3));
    put(&open.store, &scope, &keys, None);
    let invalid = |result: ritornello_format::Result<ritornello_store::Outcome>, word: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    let twice = vec![keys[0].clone(), keys[1].clone(), keys[0].clone()];
    invalid(try_put(&open.store, &scope, &twice, None), "twice");
    invalid(try_put(&open.store, &scope, &[vec![1; 7]], None), "8 to 64");
    invalid(try_put(&open.store, &scope, &[vec![1; 65]], None), "8 to 64");
    assert_eq!(get(&open.store, &scope, &keys).pages, 3);
    assert_eq!(open.store.stats().unwrap().catalog.pages, 3);
    open.close();
}

#[test]
fn other_length_chaining_or_layout_is_another_scope() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (chained(4096), sequence(1, 3));
    put(&open.store, &scope, &keys, None);
    for other in [
        Scope { page_bytes: Some(8192), ..scope.clone() },
        Scope { chained: false, ..scope.clone() },
        Scope { layout: "opaque/mine".to_owned(), ..scope.clone() },
    ] {
        assert_eq!(open.store.probe(&other, &refs(&keys)).unwrap(), 0);
        assert_eq!(put(&open.store, &other, &keys, None).pages, 3);
        assert_eq!(get(&open.store, &other, &keys).pages, 3);
        assert_eq!(get(&open.store, &scope, &keys).pages, 3);
    }
    assert_eq!(open.store.stats().unwrap().catalog.scopes, 4);
    open.close();
}

#[test]
fn descriptions_of_the_same_bytes_share_a_scope() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 16);
    let (scope, keys) = (numbers("page_first", None), sequence(1, 3));
    put(&open.store, &scope, &keys, None);
    let given = scope.resolved_page_bytes().unwrap();
    for same in [numbers("layer_first", None), numbers("page_first", Some(given))] {
        assert_eq!(get(&open.store, &same, &keys).pages, 3);
    }
    assert_eq!(open.store.stats().unwrap().catalog.scopes, 1);
    open.store.drop_scope(&scope).unwrap();
    assert_eq!(open.store.probe(&numbers("layer_first", None), &refs(&keys)).unwrap(), 0);
    assert_eq!(put(&open.store, &numbers("layer_first", None), &keys, None).pages, 3);
    assert_eq!(get(&open.store, &scope, &keys).pages, 3);
    open.close();
}

fn numbers(layout: &str, page_bytes: Option<u64>) -> Scope {
    Scope {
        dtype: "float16".to_owned(),
        page_tokens: 4,
        layers: (0, 2),
        kv_heads: (0, 2),
        head_dim: 32,
        layout: layout.to_owned(),
        page_bytes,
        ..Scope::opaque("numbers", 1, true)
    }
}

#[test]
fn store_opens_with_its_stored_options() {
    let dir = tempfile::tempdir().unwrap();
    let host = || std::sync::Arc::new(ritornello_medium::Host);
    let refused = |options: &Options, word: &str| {
        let Err(error) = open_on(host(), options) else { panic!("opened") };
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(&Options::new(dir.path()), "capacity");
    refused(&Options { capacity: Some(3 << 20), ..options(dir.path(), 3) }, "two segments");
    open(dir.path(), 16).close();
    refused(&Options { index: Some(IndexKind::Memory), ..Options::new(dir.path()) }, "index");
    // Options that are fixed when a store is created keep their stored values although the caller
    // gives other values, and the store opens.
    let others = Options {
        segment_bytes: Some(2 << 20),
        paths: vec![dir.path().join("elsewhere")],
        ..Options::new(dir.path())
    };
    let kept = open_on(host(), &others).unwrap();
    let stats = kept.core.stats().unwrap();
    assert_eq!((stats.segment_bytes, stats.paths.len()), (1 << 20, 1));
    assert!(!dir.path().join("elsewhere").exists());
    kept.close();

    let foreign = tempfile::tempdir().unwrap();
    std::fs::write(foreign.path().join("thesis.tex"), "x").unwrap();
    refused(&options(foreign.path(), 16), "thesis.tex");
    let file = foreign.path().join("thesis.tex");
    refused(&options(&file, 16), "directory");
}

#[test]
fn segments_spread_over_all_paths() {
    let dir = tempfile::tempdir().unwrap();
    let disks = [dir.path().join("a"), dir.path().join("b")];
    let opts = Options { paths: disks.to_vec(), ..options(&dir.path().join("store"), 16) };
    let host = || std::sync::Arc::new(ritornello_medium::Host);
    let scope = chained(200_000);
    let opened = open_on(host(), &opts).unwrap();
    for name in 0..8 {
        assert_eq!(put(&opened.store, &scope, &sequence(name, 4), None).pages, 4);
    }
    opened.close();
    for disk in &disks {
        assert!(std::fs::read_dir(disk).unwrap().count() >= 2, "{}", disk.display());
    }
    let opened = open_on(host(), &Options::new(dir.path().join("store"))).unwrap();
    for name in 0..8 {
        assert_eq!(get(&opened.store, &scope, &sequence(name, 4)).pages, 4);
    }
    opened.close();
}
