//! A remote in a directory to which an untrusted user, without the key of the seals, can write.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_format::ScopeId;
use ritornello_tiers::remote::{
    Backend, CollectOptions, DirectoryBackend, Inventory, KeyRing, Prompt, RemoteOptions,
    RemoteTier, collect, fsck,
};
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

const HEX: &str = "0123456789abcdef0123456789abcdef";
const PAGE: usize = 4096;

fn sealed_tier(backend: Arc<DirectoryBackend>) -> RemoteTier {
    let keys = Arc::new(KeyRing::parse(&format!("a {}", "0a".repeat(32))).unwrap());
    RemoteTier::with_options(backend, RemoteOptions { zstd: None, keys: Some(keys) })
}

fn after(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

fn make_pipe(at: &Path) {
    std::fs::create_dir_all(at.parent().unwrap()).unwrap();
    assert!(Command::new("mkfifo").arg(at).status().unwrap().success());
}

/// Returns whether `run` ends within 10 seconds.
fn ends(run: impl FnOnce() + Send + 'static) -> bool {
    let (done, is_done) = channel();
    thread::spawn(move || {
        run();
        let _ = done.send(());
    });
    is_done.recv_timeout(Duration::from_secs(10)).is_ok()
}

#[test]
fn writer_does_not_follow_planted_links() {
    let (dir, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let target = home.path().join("authorized_keys");
    std::fs::write(&target, b"precious").unwrap();
    let scope = ScopeId([9; 16]);
    let inside = dir.path().join(format!("ritornello/4/{scope}"));
    std::fs::create_dir_all(&inside).unwrap();
    for number in 0..4 {
        symlink(&target, inside.join(format!(".new-host-77-{number}"))).unwrap();
    }
    let backend = Arc::new(DirectoryBackend::new(dir.path(), "host-77"));
    let (key, page) = ([7_u8; 32], [1_u8; PAGE]);
    let prompt = Prompt { scope: &scope, page_bytes: PAGE as u64, chained: true, keys: &[&key] };
    let put = sealed_tier(backend).put(&prompt, 0..1, |_| &page, after(20_000));
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    assert_eq!(put.unwrap(), 1, "planted links must not block the write");
}

#[test]
fn pipes_directories_and_links_are_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let backend = DirectoryBackend::new(dir.path(), "host-77");
    backend.set("a/object", b"1").unwrap();
    make_pipe(&dir.path().join("a/pipe"));
    std::fs::create_dir(dir.path().join("a/directory")).unwrap();
    symlink(dir.path().join("a/object"), dir.path().join("a/link")).unwrap();
    symlink("loop", dir.path().join("a/loop")).unwrap();
    for name in ["a/pipe", "a/directory", "a/link", "a/loop", "a/loop/x", "a/object/x"] {
        assert!(!backend.exists(name).unwrap(), "{name}");
    }
    assert!(ends(move || {
        for name in ["a/pipe", "a/directory", "a/link", "a/loop", "a/loop/x", "a/object/x"] {
            assert_eq!(backend.get(name, None).unwrap(), None, "{name}");
        }
        assert_eq!(backend.get("a/object", None).unwrap(), Some(b"1".to_vec()));
    }));
}

#[test]
fn fsck_does_not_wait_for_pipe() {
    let dir = tempfile::tempdir().unwrap();
    make_pipe(&dir.path().join(format!("ritornello/4/{HEX}/{HEX}.8")));
    let backend = DirectoryBackend::new(dir.path(), "host-77");
    let inventory = Inventory::take(&backend).unwrap();
    assert!(ends(move || {
        fsck(&backend, &inventory, None, false, &mut |_| {}).unwrap();
    }));
}

#[test]
fn gc_does_not_wait_for_pipe() {
    let dir = tempfile::tempdir().unwrap();
    make_pipe(&dir.path().join(format!("ritornello/4/{HEX}/{HEX}.8")));
    let backend = DirectoryBackend::new(dir.path(), "host-77");
    backend.set(&format!("ritornello/4/{HEX}/{}.8", HEX.replace('0', "f")), b"x").unwrap();
    let options =
        CollectOptions { max_age: None, budget: Some(0), grace: Duration::ZERO, dry_run: true };
    assert!(ends(move || {
        collect(&backend, &options, None, &mut |_| {}).unwrap();
    }));
}

#[test]
fn reader_keeps_its_threads_when_objects_become_pipes() {
    let dir = tempfile::tempdir().unwrap();
    let backend = Arc::new(DirectoryBackend::new(dir.path(), "host-77"));
    let tier = sealed_tier(Arc::clone(&backend));
    let page = [1_u8; PAGE];
    let all: Vec<(ScopeId, [u8; 32])> = (0..9).map(|n| (ScopeId([n; 16]), [n; 32])).collect();
    for (scope, key) in &all {
        let prompt = Prompt { scope, page_bytes: PAGE as u64, chained: true, keys: &[key] };
        assert_eq!(tier.put(&prompt, 0..1, |_| &page, after(20_000)).unwrap(), 1);
    }
    for object in Inventory::take(backend.as_ref()).unwrap().objects.iter().take(8) {
        let at = dir.path().join(&object.name);
        std::fs::remove_file(&at).unwrap();
        make_pipe(&at);
    }
    let read = |at: usize, until| {
        let (scope, key) = &all[at];
        let prompt = Prompt { scope, page_bytes: PAGE as u64, chained: true, keys: &[key] };
        tier.get(&prompt, 0..1, &mut [0; PAGE], until).unwrap()
    };
    for at in 0..8 {
        assert_eq!(read(at, after(300)), 0);
    }
    assert_eq!(read(8, after(20_000)), 1, "{:?}", tier.stats().calls);
}

#[test]
fn deep_directory_does_not_end_listing() {
    let dir = tempfile::tempdir().unwrap();
    let backend = DirectoryBackend::new(dir.path(), "host-77");
    backend.set(&format!("ritornello/4/{HEX}/{HEX}.8"), b"x").unwrap();
    let (name, open) = ("x".repeat(200), OFlags::DIRECTORY | OFlags::CLOEXEC);
    let mut at = openat(CWD, dir.path().join("ritornello"), open, Mode::empty()).unwrap();
    for _ in 0..30 {
        mkdirat(&at, name.as_str(), Mode::RWXU).unwrap();
        at = openat(&at, name.as_str(), open, Mode::empty()).unwrap();
    }
    assert_eq!(Inventory::take(&backend).unwrap().objects.len(), 1);
}
