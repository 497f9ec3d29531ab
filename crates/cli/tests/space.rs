//! `resize`, `paths`, `convert-index` and `destroy`.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{filled, open_filled, ritornello, scratch, text};
use ritornello_node::{Options, open};

#[test]
fn store_is_resized_drained_and_destroyed() {
    let dir = scratch();
    let (home, second) = (dir.path().join("home"), dir.path().join("second"));
    std::fs::create_dir(&home).unwrap();
    filled(&home);
    let answer = ritornello(&["resize", text(&home), "32MiB", "--json"]);
    assert_eq!((answer.code, &answer.json()["capacity_bytes"]), (0, &(32 << 20).into()));
    let answer = ritornello(&["paths", "add", text(&home), text(&second), "--json"]);
    assert_eq!(answer.json()["paths"].as_array().unwrap().len(), 2, "{}", answer.err);
    let answer = ritornello(&["paths", "drain", text(&home), "segments"]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    assert!(answer.out.contains("second") && !answer.out.contains("draining"), "{}", answer.out);
    let answer = ritornello(&["paths", "list", text(&home), "--json"]);
    let paths = answer.json()["paths"].clone();
    assert_eq!((paths.as_array().unwrap().len(), paths[0]["dir"].as_str()), (1, second.to_str()));
    let answer = ritornello(&["fsck", text(&home), "--json"]);
    assert_eq!((answer.code, &answer.json()["pages"]), (0, &common::PAGES.into()));
    let node = open(&Options::new(&home)).unwrap();
    assert!(ritornello(&["stat", text(&home)]).out.contains("extents per run"));
    node.close().unwrap();

    let answer = ritornello(&["resize", text(&home), "1MiB"]);
    assert_eq!((answer.code, answer.err.contains("two segments")), (2, true), "{}", answer.err);
    let answer = ritornello(&["paths", "drain", text(&home), text(&second)]);
    assert_eq!((answer.code, answer.err.contains("last")), (2, true), "{}", answer.err);
    let answer = ritornello(&["destroy", text(&home)]);
    assert_eq!(
        (answer.code, home.exists()),
        (2, true),
        "without --yes the store must stay: {}",
        answer.err
    );
    let answer = ritornello(&["destroy", text(&home), "--yes"]);
    assert_eq!((answer.code, home.exists(), second.exists()), (0, false, false), "{}", answer.err);
}

#[test]
fn index_converts_only_in_unused_store() {
    let dir = scratch();
    let node = open_filled(dir.path());
    let answer = ritornello(&["convert-index", text(dir.path()), "--to", "run"]);
    assert_eq!((answer.code, answer.err.contains("owns")), (2, true), "{}", answer.err);
    node.close().unwrap();
    // If `RITORNELLO_TEST_INDEX` names another index, this call converts the store's index.
    assert_eq!(ritornello(&["convert-index", text(dir.path()), "--to", "run"]).code, 0);
    let answer = ritornello(&["convert-index", text(dir.path()), "--to", "run"]);
    assert_eq!((answer.code, answer.out.contains("`run` already")), (0, true), "{}", answer.err);
    for wrong in ["memory", "tree", "run:4KiB"] {
        let answer = ritornello(&["convert-index", text(dir.path()), "--to", wrong]);
        assert_eq!((answer.code, answer.out.is_empty()), (2, true), "{wrong}: {}", answer.err);
    }
    let answer = ritornello(&["convert-index", text(dir.path()), "--to", "lsm", "--json"]);
    if cfg!(feature = "lsm") {
        assert_eq!((answer.code, &answer.json()["pages"]), (0, &common::PAGES.into()));
        let answer = ritornello(&["convert-index", text(dir.path()), "--to", "run:64MiB"]);
        assert!(answer.out.contains("is `run` now, and was `lsm`"), "{}{}", answer.out, answer.err);
    } else {
        assert_eq!(
            (answer.code, answer.err.contains("cargo feature")),
            (2, true),
            "{}",
            answer.err
        );
    }
    let node = open(&Options::new(dir.path())).unwrap();
    let answer = ritornello(&["stat", text(dir.path())]);
    node.close().unwrap();
    assert!(
        answer.out.contains("memory ceiling") && answer.out.contains("as lsm"),
        "{}",
        answer.out
    );
    assert_eq!(common::probe(dir.path()), common::PAGES);
}

#[test]
fn owner_resizes_store_for_client() {
    let dir = scratch();
    let node = open_filled(dir.path());
    let answer = ritornello(&["resize", text(dir.path()), "24MiB"]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    assert_eq!(node.store().stats().unwrap().catalog.capacity_bytes, 24 << 20);
    let answer = ritornello(&["destroy", text(dir.path()), "--yes"]);
    assert_eq!((answer.code, answer.err.contains("owns")), (2, true), "{}", answer.err);
    node.close().unwrap();
}
