//! Directories and options that `open` refuses, with its errors, and options that it overrides with
//! the stored settings.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Durability, IndexKind, Node, Options, Role, open};
use rustix::fs::Mode;
use std::path::Path;
use std::sync::Arc;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(_: &Arc<Node>, other: &str) -> String {
    panic!("unknown command: {other}")
}

fn refused(options: &Options, words: &str) {
    let error = open(options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn file_is_rejected_as_directory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"precious").unwrap();
    refused(&options(&file), "name a directory");
    refused(&options(&file.join("below")), "name a directory");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn foreign_directory_is_left_unchanged() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(dir.path().join("thesis.tex"), b"precious").unwrap();
    refused(&options(dir.path()), "not a Ritornello store");
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["thesis.tex"]);
    assert_eq!(std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777, 0o755);
}

/// LevelDB's lock file has the same name as the lock file of a store.
#[test]
fn directory_with_lock_of_another_program_is_left_unchanged() {
    use std::os::unix::fs::PermissionsExt;
    for other in ["CURRENT", "MANIFEST"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(dir.path().join("LOCK"), b"").unwrap();
        std::fs::write(dir.path().join(other), b"precious").unwrap();
        refused(&options(dir.path()), "not a Ritornello");
        assert!(!dir.path().join("clients").exists());
        let mode = std::fs::metadata(dir.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }
}

#[test]
fn without_capacity_no_store_is_created() {
    let dir = tempfile::tempdir().unwrap();
    refused(&Options::new(dir.path()), "capacity");
    refused(&Options::new(dir.path().join("below")), "capacity");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn too_small_capacity_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    refused(&Options { capacity: Some(MIB), ..options(dir.path()) }, "capacity");
    open(&options(dir.path())).unwrap();
}

fn capacity(node: &Node) -> u64 {
    node.store().stats().unwrap().catalog.capacity_bytes
}

#[test]
fn owner_with_another_capacity_resizes() {
    let dir = tempfile::tempdir().unwrap();
    open(&options(dir.path())).unwrap().close().unwrap();
    let node = open(&Options { capacity: Some(2 * CAPACITY), ..options(dir.path()) }).unwrap();
    assert_eq!(capacity(&node), 2 * CAPACITY);
    node.close().unwrap();
    let node = open(&Options { capacity: None, ..options(dir.path()) }).unwrap();
    assert_eq!(capacity(&node), 2 * CAPACITY);
    // The capacity that a second handle is given has no effect while the store is open in this
    // process.
    let second = open(&options(dir.path())).unwrap();
    assert_eq!((capacity(&second), second.role()), (2 * CAPACITY, Role::Owner));
    node.store().resize(CAPACITY).unwrap();
    assert_eq!(capacity(&node), CAPACITY);
}

#[test]
fn owner_with_an_impossible_capacity_keeps_the_stored_capacity() {
    let dir = tempfile::tempdir().unwrap();
    open(&options(dir.path())).unwrap().close().unwrap();
    let node = open(&Options { capacity: Some(MIB), ..options(dir.path()) }).unwrap();
    assert_eq!((capacity(&node), node.role()), (CAPACITY, Role::Owner));
    assert_eq!(put(node.store(), 1, 3).unwrap().pages, 3);
}

#[test]
fn client_takes_over_with_stored_settings() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let others = Options {
        capacity: Some(2 * CAPACITY),
        segment_bytes: Some(2 * MIB),
        index: Some(IndexKind::Memory),
        paths: vec![dir.path().join("elsewhere")],
        durability: Durability::Durable,
        ..options(dir.path())
    };
    let node = open(&others).unwrap();
    assert_eq!((capacity(&node), node.role()), (CAPACITY, Role::Client));
    assert_eq!(put(node.store(), 1, 3).unwrap().pages, 3);
    owner.finish();
    assert_eq!(get(node.store(), 1, 3).unwrap(), 3);
    assert_eq!((capacity(&node), node.role()), (CAPACITY, Role::Owner));
    let stats = node.store().stats().unwrap().catalog;
    assert_eq!((stats.segment_bytes, stats.paths.len()), (MIB, 1));
    assert!(!dir.path().join("elsewhere").exists());
}

#[test]
fn unwritable_directory_is_refused() {
    // No user can create a directory in `/proc`, not even root.
    let error = open(&options(Path::new("/proc/ritornello"))).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Retry), "{error:?}");
}

/// Another user's directory is rejected before anything in it is read. The test puts pipes in the
/// place of the store's files, because reading a pipe would return another error.
#[test]
fn directory_of_another_user_is_not_read() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["MANIFEST", "MANIFEST.copy", "policy.toml"] {
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join(name), Mode::RWXU).unwrap();
    }
    std::os::unix::fs::chown(dir.path(), Some(12_345), None).unwrap();
    refused(&options(dir.path()), "another user");
}

#[test]
fn store_opens_with_either_manifest_copy() {
    let dir = tempfile::tempdir().unwrap();
    open(&options(dir.path())).unwrap().close().unwrap();
    let copies = [dir.path().join("MANIFEST"), dir.path().join("MANIFEST.copy")];
    let damage = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[20] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    for copy in &copies {
        damage(copy);
        open(&options(dir.path())).unwrap().close().unwrap();
        // Opening the store rewrites both copies of the manifest.
        assert_eq!(std::fs::read(&copies[0]).unwrap(), std::fs::read(&copies[1]).unwrap());
    }
    let good = std::fs::read(&copies[0]).unwrap();
    copies.iter().for_each(|copy| damage(copy));
    let error = open(&options(dir.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fatal);
    let said = error.to_string();
    let files_and_remedy = ["MANIFEST", "MANIFEST.copy", "restore one of them"];
    assert!(files_and_remedy.iter().all(|part| said.contains(part)), "{said}");
    assert_eq!(said.matches(&*dir.path().to_string_lossy()).count(), 1, "{said}");
    std::fs::write(&copies[1], good).unwrap();
    open(&options(dir.path())).unwrap();
}
