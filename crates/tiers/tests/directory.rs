//! A remote in a directory: missing and unreadable entries.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_tiers::remote::{Backend, DirectoryBackend};

#[test]
fn listing_skips_unreadable_directories() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let remote = DirectoryBackend::new(dir.path(), "test");
    for name in ["ritornello/1/a/x", "ritornello/1/b/y", "ritornello/2/z", "lost/w"] {
        remote.set(name, b"1").unwrap();
    }
    let list = |prefix: &str| {
        let mut names = Vec::new();
        let listed = remote.list(prefix, &mut |found| names.push(found.name));
        names.sort();
        listed.map(|()| names)
    };
    assert_eq!(list("ritornello/1/b").unwrap(), ["ritornello/1/b/y"]);
    assert_eq!(list("rit").unwrap().len(), 3);
    assert!(list("ritornello/3/").unwrap().is_empty());
    let allow = |name: &str, mode: u32| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(dir.path().join(name), mode).unwrap();
    };
    allow("lost", 0);
    allow("ritornello/1/b", 0);
    // The superuser can read every directory, so the check runs only for other users.
    if std::fs::read_dir(dir.path().join("lost")).is_err() {
        assert_eq!(list("ritornello/").unwrap(), ["ritornello/1/a/x", "ritornello/2/z"]);
        assert!(list("ritornello/1/b/").is_err());
    }
    allow("lost", 0o700);
    allow("ritornello/1/b", 0o700);
}

#[test]
fn root_that_is_no_directory_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("kv");
    let remote = DirectoryBackend::new(&root, "test");
    let refused = |error: ritornello_format::Error| {
        assert_eq!(error.kind(), ritornello_format::ErrorKind::Fatal);
        assert!(error.to_string().contains("mount or make it"), "{error}");
    };
    for is_file in [false, true] {
        if is_file {
            std::fs::write(&root, b"no directory").unwrap();
        }
        refused(remote.get("a", None).unwrap_err());
        refused(remote.exists("a").unwrap_err());
        refused(remote.set("a/b", b"1").unwrap_err());
        refused(remote.list("", &mut |_| {}).unwrap_err());
        assert!(!root.is_dir());
    }
    std::fs::remove_file(&root).unwrap();
    std::fs::create_dir(&root).unwrap();
    remote.set("a/b", b"1").unwrap();
    assert_eq!(remote.get("a/b", None).unwrap(), Some(vec![1 + b'0']));
    assert!(!remote.exists("a/c").unwrap());
}
