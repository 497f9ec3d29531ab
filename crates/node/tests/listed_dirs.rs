//! Processes that open a store with a list of directories.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Options, Role, open};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

/// `list DIR...` opens the store again, with these further directories, and answers the number of
/// the store's directories that the owner reports.
fn own_command(node: &Arc<Node>, line: &str) -> String {
    let further: Vec<PathBuf> = line.split_whitespace().skip(1).map(PathBuf::from).collect();
    let again = open(&listed(node.path(), &further)).unwrap();
    let volumes = volumes(&again).to_string();
    again.close().unwrap();
    volumes
}

fn listed(dir: &Path, further: &[PathBuf]) -> Options {
    Options { further_dirs: Some(further.to_vec()), ..options(dir) }
}

fn volumes(node: &Node) -> usize {
    node.store().stats().unwrap().catalog.paths.len()
}

#[test]
fn new_store_is_made_in_all_directories_and_reopened_with_more() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let node = open(&listed(&at("a"), &[at("b"), at("c")])).unwrap();
    assert_eq!(volumes(&node), 3);
    assert_eq!(put(node.store(), 1, 40).unwrap().pages, 40);
    for further in ["b", "c"] {
        assert!(at(further).join("VOLUME").exists());
    }
    // A second handle of the process that owns the store adds directories too.
    let second = open(&listed(&at("a"), &[at("d")])).unwrap();
    assert_eq!(volumes(&second), 4);
    second.close().unwrap();
    node.close().unwrap();
    let node = open(&listed(&at("a"), &[at("b"), at("c"), at("e")])).unwrap();
    assert_eq!((volumes(&node), get(node.store(), 1, 40).unwrap()), (5, 40));
    node.close().unwrap();
    ritornello_node::destroy(&at("a")).unwrap();
    assert!(!["b", "c", "d", "e"].iter().any(|name| at(name).join("VOLUME").exists()));
}

#[test]
fn clients_add_the_same_directories_concurrently() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut owner = Helper::opened(&at("a"));
    let mut clients: Vec<Helper> = (0..3).map(|_| Helper::opened(&at("a"))).collect();
    let further = ["b", "c", "d"].map(|name| at(name).display().to_string()).join(" ");
    for client in &mut clients {
        client.tell(&format!("list {further}"));
    }
    for client in &mut clients {
        assert_eq!(client.listen(), "4");
        assert_eq!(client.ask("role"), "client");
    }
    assert_eq!(owner.ask("put 1 40"), "40");
    assert_eq!(clients[0].ask("get 1 40"), "40");
    clients.into_iter().chain([owner]).for_each(Helper::finish);
    let node = open(&Options::new(at("a"))).unwrap();
    assert_eq!((volumes(&node), get(node.store(), 1, 40).unwrap()), (4, 40));
}

/// The processes start at the same time, as the ranks of an engine do, and one of them creates the
/// store.
#[test]
fn processes_started_together_make_one_store() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut helpers: Vec<Helper> = (0..4).map(|_| Helper::start(&at("a"))).collect();
    let further = ["b", "c"].map(|name| at(name).display().to_string()).join(" ");
    for helper in &mut helpers {
        helper.tell("open");
        helper.tell(&format!("list {further}"));
    }
    let roles: Vec<String> = helpers.iter_mut().map(Helper::listen).collect();
    assert_eq!(roles.iter().filter(|role| *role == "owner").count(), 1, "{roles:?}");
    // The owner reports a directory shortly after the manifest names it, so the first answer to
    // `list` may be less than 3.
    let list = format!("list {further}");
    for helper in &mut helpers {
        helper.listen();
        eventually("the owner reports all directories", || helper.ask(&list) == "3");
    }
    helpers.into_iter().for_each(Helper::finish);
}

#[test]
fn client_that_may_not_add_directories_opens_without_them() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("a")).unwrap();
    std::fs::write(at("a").join("policy.toml"), "deny_clients = [\"change_capacity\"]\n").unwrap();
    let owner = Helper::opened(&at("a"));
    let node = open(&listed(&at("a"), &[at("b")])).unwrap();
    assert_eq!((node.role(), volumes(&node)), (Role::Client, 1));
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    assert!(!at("b").exists());
    // Only an opening adds directories, not a takeover.
    owner.finish();
    assert_eq!(node.ensure_owner().unwrap(), Role::Owner);
    assert_eq!((volumes(&node), get(node.store(), 1, 4).unwrap()), (1, 4));
    node.close().unwrap();
    let node = open(&listed(&at("a"), &[at("b")])).unwrap();
    assert_eq!(volumes(&node), 2);
}

#[test]
fn refused_list_makes_no_directory() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    open(&options(&at("other"))).unwrap().close().unwrap();
    let lists: [(&[PathBuf], &str); 4] = [
        (&[at("b"), at("b")], "listed twice"),
        (&[at("a/b")], "inside another"),
        (&[at("b"), at("other")], "another store"),
        (&[at("b"), at("other/segments/b")], "another store"),
    ];
    for (further, words) in lists {
        let error = open(&listed(&at("a"), further)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(words), "{error}");
        assert!(!at("a").exists() && !at("b").exists());
    }
}

/// The mount point of an unmounted disk is a directory of the root file system. Therefore a new
/// store is refused if only some of its directories are on the root file system, and an existing
/// store on another file system does not add a directory of the root file system.
#[test]
fn directory_on_the_root_file_system_counts_as_unmounted() {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| std::fs::metadata(path).map(|found| found.dev()).ok();
    let (here, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm"));
    let Ok(memory) = memory else { return };
    let root = device(Path::new("/"));
    if device(here.path()) != root || device(memory.path()) == root {
        return;
    }
    let (disk, mounted) = (here.path().join("kv"), memory.path().join("kv"));
    for (first, further) in [(&mounted, &disk), (&disk, &mounted)] {
        let error = open(&listed(first, std::slice::from_ref(further))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Retry);
        assert!(error.to_string().contains("mount the disk"), "{error}");
        assert!(!disk.exists() && !mounted.exists());
    }
    open(&options(&mounted)).unwrap().close().unwrap();
    let node = open(&listed(&mounted, std::slice::from_ref(&disk))).unwrap();
    assert_eq!(volumes(&node), 1);
    assert!(!disk.exists());
}
