//! Directories and segments of other users: the store neither reads nor writes them, and reattaches
//! them once they belong to this user again. Checks that change a file's owner require root, and
//! are skipped without root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::volumes::{PAGES, SEQUENCES, found};
use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::Host;
use ritornello_store::{CapacityChange, Options};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const OTHER_USER: u32 = 12_345;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn give_to(path: &Path, user: u32) {
    chown(path, Some(user), None).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn with_paths(root: &Path) -> Options {
    let paths = vec![root.join("a"), root.join("b")];
    Options { paths, background_threads: false, ..options(&root.join("store"), 16) }
}

fn filled(root: &Path) {
    let open = open_on(Arc::new(Host), &with_paths(root)).unwrap();
    for name in 0..SEQUENCES {
        assert_eq!(put(&open.store, &chained(65_536), &sequence(name, 8), None).pages, 8);
    }
    open.store.flush().unwrap();
    open.close();
}

fn reopened(root: &Path) -> Open {
    let options = Options { background_threads: false, ..Options::new(root.join("store")) };
    open_on(Arc::new(Host), &options).unwrap()
}

fn reasons(open: &Open) -> String {
    open.store.stats().unwrap().catalog.absent_space.reasons.join("\n")
}

fn segment_in(dir: &Path) -> PathBuf {
    let mut names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    names.find(|path| path.to_str().unwrap().contains("seg-")).unwrap()
}

fn refused(change: ritornello_format::Result<()>, expected: &str) {
    let error = change.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn volume_of_another_user_is_absent() {
    if !is_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    let volume = root.path().join("b");
    give_to(&volume, OTHER_USER);
    let before = fs::read_dir(&volume).unwrap().count();
    let open = reopened(root.path());
    assert!((1..PAGES).contains(&found(&open)), "only the volume a must serve its pages");
    assert!(reasons(&open).contains("belongs to another user"), "{}", reasons(&open));
    assert_eq!(put(&open.store, &chained(65_536), &sequence(99, 4), None).pages, 4);
    assert_eq!(
        fs::read_dir(&volume).unwrap().count(),
        before,
        "a file was created in a foreign directory"
    );
    give_to(&volume, 0);
    open.core.run_once();
    assert_eq!((found(&open), reasons(&open)), (PAGES, String::new()));
    open.close();
}

#[test]
fn linked_or_foreign_segment_is_absent() {
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    let segment = segment_in(&root.path().join("b"));
    let elsewhere = root.path().join("elsewhere");
    let linked = (
        || {
            fs::rename(&segment, &elsewhere).unwrap();
            symlink(&elsewhere, &segment).unwrap();
        },
        || fs::rename(&elsewhere, &segment).unwrap(),
    );
    let given = (|| give_to(&segment, OTHER_USER), || give_to(&segment, 0));
    type Fault<'a> = (&'a dyn Fn(), &'a dyn Fn(), &'a str);
    let mut faults: Vec<Fault<'_>> = vec![(&linked.0, &linked.1, "link")];
    if is_root() {
        faults.push((&given.0, &given.1, "another user"));
    }
    for (fault, repair, why) in faults {
        fault();
        let open = reopened(root.path());
        assert!((1..PAGES).contains(&found(&open)), "{why}");
        assert!(reasons(&open).contains(why), "{}", reasons(&open));
        repair();
        open.core.run_once();
        assert_eq!(found(&open), PAGES, "{why}");
        open.close();
    }
}

#[test]
fn new_volume_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let (theirs, group) = (root.path().join("theirs"), root.path().join("group"));
    for (dir, rights) in [(&theirs, 0o777), (&group, 0o2775)] {
        fs::create_dir(dir).unwrap();
        fs::set_permissions(dir, Permissions::from_mode(rights)).unwrap();
        give_to(dir, OTHER_USER);
    }
    for (dir, expected) in [(&theirs, "another user"), (&group, "group/ritornello instead")] {
        let home = root.path().join("new");
        let new = Options { paths: vec![dir.clone()], ..options(&home, 8) };
        refused(open_on(Arc::new(Host), &new).map(Open::close), expected);
        let _ = fs::remove_dir_all(&home);
    }
    let open = open_on(Arc::new(Host), &with_paths(root.path())).unwrap();
    let add = |dir: &Path| {
        open.store.change_capacity(&CapacityChange::AddVolume(dir.to_str().unwrap().into()))
    };
    refused(add(&theirs), "another user");
    refused(add(&group), "group/ritornello instead");
    for dir in [&theirs, &group] {
        assert_eq!(
            fs::read_dir(dir).unwrap().count(),
            0,
            "a file was created in a foreign directory"
        );
    }
    add(&group.join("ritornello")).unwrap();
    open.close();
}

#[test]
fn volumes_are_closed_to_other_users() {
    let root = tempfile::tempdir().unwrap();
    let (a, more) = (root.path().join("a"), root.path().join("more"));
    for dir in [&a, &more] {
        fs::create_dir(dir).unwrap();
        fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    }
    let open = open_on(Arc::new(Host), &with_paths(root.path())).unwrap();
    assert_eq!(mode(&a), 0o700, "creating the store must revoke access");
    open.store.change_capacity(&CapacityChange::AddVolume(more.to_str().unwrap().into())).unwrap();
    assert_eq!(mode(&more), 0o700, "adding the directory must revoke access");
    open.close();
    fs::set_permissions(&a, Permissions::from_mode(0o755)).unwrap();
    reopened(root.path()).close();
    assert_eq!(mode(&a), 0o700, "each open must revoke access");
}

#[test]
fn store_is_created_beside_lost_and_found() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("lost+found")).unwrap();
    for _ in 0..2 {
        open(root.path(), 8).close();
    }
    assert!(root.path().join("lost+found").is_dir());
}
