//! Removing a store, and only a store that nobody uses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Options, destroy, open};
use std::sync::Arc;

#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(_: &Arc<Node>, other: &str) -> String {
    panic!("what is {other}?")
}

#[test]
fn a_store_goes_with_its_directories_and_what_is_not_its_own_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (home, other) = (dir.path().join("home"), dir.path().join("other"));
    std::fs::create_dir(&home).unwrap();
    let options = Options { paths: vec![other.clone()], ..options(&home) };
    open(&options).unwrap().close().unwrap();
    std::fs::write(other.join("thesis.tex"), "years of work").unwrap();
    std::fs::write(other.join("seg-mine"), "mine").unwrap();
    destroy(&home).unwrap();
    assert!(!home.exists());
    let mut left: Vec<_> =
        std::fs::read_dir(&other).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["seg-mine", "thesis.tex"]);
    // And a new one can be made in its place.
    open(&options).unwrap();
}

#[test]
fn a_store_in_use_and_what_is_no_store_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let refused = |word: &str| {
        let error = destroy(&home).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused("no store");
    let node = open(&options(&home)).unwrap();
    refused("this process");
    node.close().unwrap();
    let owner = Helper::opened(&home);
    refused("a process owns");
    owner.finish();
    std::fs::write(home.join("notes.txt"), "keep").unwrap();
    destroy(&home).unwrap();
    assert_eq!(std::fs::read_dir(&home).unwrap().count(), 1, "what is not the store's stays");
    let error = destroy(&home).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
