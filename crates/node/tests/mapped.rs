//! Stores in memory, mapped by several processes: the host tier.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_medium::{Host, Medium};
use ritornello_node::{Node, Options, Role, open};
use ritornello_store::CapacityChange;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// Environment variable with the directory on which [`full_tmpfs_stops_growth_only`] mounts a small
/// tmpfs; without it [`small_file_system_child`] does nothing.
const SMALL: &str = "RITORNELLO_TEST_SMALL_TMPFS";

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    match command {
        "io" => node.store().stats().unwrap().catalog.io.mode,
        // Reports how many removed segments this process still maps.
        "kept" => maps(std::process::id()).to_string(),
        _ => panic!("unknown command: {command}"),
    }
}

fn maps(process: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("/seg-") && line.ends_with("(deleted)")).count()
}

/// Makes a directory in `/dev/shm`; returns `None` if the machine has no `/dev/shm`.
fn memory() -> Option<TempDir> {
    let shm = Path::new("/dev/shm");
    shm.is_dir().then(|| tempfile::tempdir_in(shm).unwrap())
}

#[test]
fn mapped_pages_are_shared_and_outlive_processes() {
    let Some(dir) = memory() else { return };
    let mut line: Vec<Helper> = (0..4).map(|_| Helper::opened(dir.path())).collect();
    for (name, helper) in line.iter_mut().enumerate() {
        assert_eq!(helper.ask("io"), "mapped");
        assert_eq!(helper.ask(&format!("put {name} 50")), "50");
    }
    for helper in &mut line {
        for name in 0..4 {
            assert_eq!(helper.ask(&format!("get {name} 50")), "50");
        }
    }
    assert_eq!(line[0].ask("flush"), "flushed");
    line.into_iter().for_each(|helper| drop(helper.kill()));
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Owner);
    for name in 0..4 {
        assert_eq!(
            get(node.store(), name, 50).unwrap(),
            50,
            "the kill of all processes must lose no page"
        );
    }
    node.close().unwrap();
}

#[test]
fn owner_kill_loses_no_flushed_mapped_page() {
    let Some(dir) = memory() else { return };
    let owner = Helper::opened(dir.path());
    let mut clients: Vec<Helper> = (0..3).map(|_| Helper::opened(dir.path())).collect();
    for (at, client) in clients.iter_mut().enumerate() {
        client.tell(&format!("work {} 20 60", at * 1_000_000));
    }
    let mut flushed = BTreeSet::new();
    let mut collect_flushed = |rounds| {
        for _ in 0..rounds {
            flushed.extend(clients.iter_mut().map(|one| one.listen().parse::<u64>().unwrap()));
        }
    };
    collect_flushed(10);
    owner.kill();
    collect_flushed(20);
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    for name in flushed {
        assert_eq!(get(node.store(), name, 20).unwrap(), 20, "{name}");
    }
    drop(node);
    clients.into_iter().for_each(|client| drop(client.kill()));
}

#[test]
fn removing_mapped_segments_kills_no_process() {
    let Some(dir) = memory() else { return };
    let node = open(&options(dir.path())).unwrap();
    let store = node.store();
    let names = CAPACITY / (100 * PAGE) - 8;
    for name in 0..names {
        assert_eq!(put(store, name, 100).unwrap().pages, 100);
    }
    let mut clients: Vec<Helper> = (0..2).map(|_| Helper::opened(dir.path())).collect();
    for name in 0..names {
        clients.iter_mut().for_each(|client| client.tell(&format!("get {name} 100")));
    }
    store.change_capacity(&CapacityChange::Capacity(CAPACITY / 4)).unwrap();
    let mut heard = BTreeSet::new();
    for _ in 0..names {
        heard.extend(clients.iter_mut().map(Helper::listen));
    }
    assert!(heard.iter().all(|pages| pages.parse::<u64>().unwrap() <= 100), "{heard:?}");
    assert!(store.stats().unwrap().catalog.allocated_bytes <= CAPACITY / 4);
    // A process unmaps removed segments when it next puts or gets pages.
    let mut name = 1_000_000;
    for client in &mut clients {
        eventually("the memory is released", || {
            name += 1;
            assert_eq!(client.ask(&format!("put {name} 1")), "1");
            client.ask("kept") == "0"
        });
    }
    clients.into_iter().for_each(Helper::finish);
    node.close().unwrap();
}

#[test]
fn mapped_store_moves_within_memory_only() {
    let Some(dir) = memory() else { return };
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let node = open(&options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    for name in 0..20 {
        assert_eq!(client.ask(&format!("put {name} 50")), "50");
    }
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let refused =
        node.store().change_capacity(&CapacityChange::AddVolume(text(&disk.path().join("kv"))));
    assert!(refused.unwrap_err().to_string().contains("in memory"));
    let second = dir.path().join("second");
    node.store().change_capacity(&CapacityChange::AddVolume(text(&second))).unwrap();
    node.store().change_capacity(&CapacityChange::DrainVolume("segments".to_owned())).unwrap();
    for name in 0..20 {
        assert_eq!(client.ask(&format!("get {name} 50")), "50");
    }
    client.finish();
    node.close().unwrap();
}

#[test]
fn capacity_beyond_memory_is_refused() {
    let Some(dir) = memory() else { return };
    let home = dir.path().join("kv");
    let too_large = Options { capacity: Some(1 << 50), segment_bytes: None, ..options(&home) };
    let error = open(&too_large).unwrap_err().to_string();
    assert!(error.contains("MiB or less"), "{error}");
    let node = open(&options(&home)).unwrap();
    let grown =
        node.store().change_capacity(&CapacityChange::Capacity(1 << 50)).unwrap_err().to_string();
    assert!(grown.contains("MiB or less"), "{grown}");
    assert_eq!(put(node.store(), 1, 10).unwrap().pages, 10, "the store must stay usable");
    node.close().unwrap();
}

/// Runs only in the mount namespace that [`full_tmpfs_stops_growth_only`] makes; passes without
/// work elsewhere.
#[test]
fn small_file_system_child() {
    let Some(dir) = std::env::var_os(SMALL) else { return };
    let home = Path::new(&dir).join("kv");
    let small = Options { capacity: Some(24 * MIB), ..options(&home) };
    let node = open(&small).unwrap();
    let store = node.store();
    assert_eq!(store.stats().unwrap().catalog.io.mode, "mapped");
    assert_eq!(put(store, 0, 200).unwrap().pages, 200);
    // A filler file leaves less free space than one segment takes.
    let mut filler = Filler(std::fs::File::create(Path::new(&dir).join("filler")).unwrap(), 0);
    filler.leave(Path::new(&dir), MIB * 3 / 4);
    for name in 1..60 {
        let outcome = put(store, name, 50).unwrap();
        assert!(outcome.pages == 50 || !outcome.reason.is_empty());
        assert!(get(store, name, 50).unwrap() <= 50);
    }
    let stats = store.stats().unwrap().catalog;
    assert!(stats.segments < stats.segments_max, "{stats:?}");
    assert_eq!(put(store, 100, 50).unwrap().pages, 50, "the store must evict instead of growing");
    assert_eq!(get(store, 100, 50).unwrap(), 50);
    // The filler takes the last bytes too, so that the index cannot write either.
    filler.leave(Path::new(&dir), 0);
    for name in 100..110 {
        assert!(put(store, name, 50).is_ok_and(|put| put.pages <= 50) || name > 100);
        assert!(get(store, name, 50).is_ok_and(|pages| pages <= 50));
    }
    assert_eq!(get(store, 100, 50).unwrap(), 50, "stored pages must be readable");
}

/// A file that takes space in the store's file system, and its length.
struct Filler(std::fs::File, u64);

impl Filler {
    /// Grows the file until at most `left` bytes of the file system are free.
    fn leave(&mut self, dir: &Path, left: u64) {
        while Host.room(dir).unwrap().available > left {
            if self.0.write_all_at(&[1; 4096], self.1).is_err() {
                return;
            }
            self.1 += 4096;
        }
    }
}

#[test]
fn full_tmpfs_stops_growth_only() {
    let Some(dir) = memory() else { return };
    let script = "mount -t tmpfs -o size=32m none \"$0\" || exit 77; exec \"$@\"";
    let run = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(dir.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "small_file_system_child", "--nocapture", "--test-threads=1"])
        .env(SMALL, dir.path())
        .output();
    match run {
        // The test passes on a machine that lacks `unshare` or forbids namespaces.
        Err(_) => {}
        Ok(run) if matches!(run.status.code(), Some(77 | 1)) && run.stdout.is_empty() => {}
        Ok(run) => {
            let said = String::from_utf8_lossy(&run.stderr);
            assert!(run.status.success(), "{:?}: {said}", run.status);
        }
    }
}
