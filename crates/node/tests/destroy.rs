//! Destroying and converting stores, both of which are refused for a store in use. The policy file,
//! which every process reads and `destroy` removes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{IndexKind, Node, Options, Role, convert_index, destroy, open};
use std::sync::Arc;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(_: &Arc<Node>, other: &str) -> String {
    panic!("unknown command: {other}")
}

#[test]
fn destroy_removes_only_the_stores_files() {
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
    open(&options).unwrap();
}

#[test]
fn destroy_removes_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let policy = home.join(ritornello_store::POLICY_FILE);
    // A policy may be written before the store exists.
    std::fs::write(&policy, "allow_weak_hashes = true").unwrap();
    let node = open(&options(&home)).unwrap();
    assert!(node.policy().allow_weak_hashes);
    node.close().unwrap();
    destroy(&home).unwrap();
    assert!(!home.exists());
    // Destroying the store also removed its policy.
    let node = open(&options(&home)).unwrap();
    assert!(!node.policy().allow_weak_hashes);
    node.close().unwrap();
}

#[test]
fn every_process_reads_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let policy = dir.path().join(ritornello_store::POLICY_FILE);
    std::fs::write(&policy, "allow_weak_hashes = true").unwrap();
    let client = open(&options(dir.path())).unwrap();
    assert_eq!((client.role(), client.policy().allow_weak_hashes), (Role::Client, true));
    client.close().unwrap();
    std::fs::write(&policy, "allow_weak_hash = true").unwrap();
    let error = open(&options(dir.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("unknown field `allow_weak_hash`"), "{error}");
    owner.finish();
}

#[test]
fn destroy_refuses_a_store_in_use() {
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
    std::fs::write(home.join("clients/README"), "keep").unwrap();
    std::fs::write(home.join("clients/0123456789abcdef0123456789abcdef"), "").unwrap();
    destroy(&home).unwrap();
    assert_eq!(
        std::fs::read_dir(&home).unwrap().count(),
        2,
        "files that do not belong to the store must stay"
    );
    assert!(home.join("clients/README").exists());
    let error = destroy(&home).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[test]
fn store_in_use_is_not_converted() {
    let dir = tempfile::tempdir().unwrap();
    let convert = || convert_index(dir.path(), IndexKind::Run, None, &mut |_, _| ());
    let refused = |word: &str| {
        let error = convert().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused("no store");
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "a refused conversion must create no file"
    );
    let memory = Options { index: Some(IndexKind::Memory), ..options(dir.path()) };
    let node = open(&memory).unwrap();
    refused("this process");
    node.close().unwrap();
    let mut owner = Helper::opened(dir.path());
    refused("a process owns");
    // A client uses the owner's index, even if its options name a different index.
    let client = open(&Options { index: Some(IndexKind::Run), ..options(dir.path()) }).unwrap();
    let owned = options(dir.path()).index.unwrap_or(IndexKind::Memory);
    assert_eq!(client.store().stats().unwrap().catalog.index, owned.word());
    client.close().unwrap();
    assert_eq!(owner.ask("role"), "owner");
    owner.finish();
    let done = convert().unwrap();
    assert_eq!((done.to.as_str(), done.runs), ("run", 0));
    let node = open(&Options { index: None, ..options(dir.path()) }).unwrap();
    assert_eq!(
        (node.role(), node.store().stats().unwrap().catalog.index),
        (Role::Owner, "run".into())
    );
}

/// The default volume directory of one store is a link to the volume of another store.
#[test]
fn destroy_leaves_a_foreign_default_directory_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    for home in [&one, &two] {
        std::fs::create_dir(home).unwrap();
        open(&options(home)).unwrap().close().unwrap();
    }
    std::fs::write(two.join("segments/seg-000000"), "pages of the other store").unwrap();
    std::fs::remove_dir_all(one.join("segments")).unwrap();
    std::os::unix::fs::symlink(two.join("segments"), one.join("segments")).unwrap();
    destroy(&one).unwrap();
    assert!(two.join("segments/seg-000000").exists(), "another store's segment was removed");
}
