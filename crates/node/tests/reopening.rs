//! Owners whose disk fails temporarily: the store is reopened automatically, for all processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{
    DiskChange, Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, Watch, Watched,
};
use ritornello_node::{Durability, Node, Options, Role, open_on};
use ritornello_store::{AbsentSpace, CapacityChange, CatalogStats, PutOptions};
use ritornello_volume::page_memory::{Fragment, OwnedPages, PageSource};
use ritornello_volume::transfer::Control;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    match command {
        "problem" => node.problem().is_some().to_string(),
        "epoch" => node.store().stats().unwrap().catalog.owner_epoch.to_string(),
        _ => panic!("unknown command: {command}"),
    }
}

/// An owner in this process, whose disk fails on schedule.
fn owner(dir: &Path) -> (Schedule, Arc<Node>) {
    owner_with(&options(dir))
}

fn owner_with(options: &Options) -> (Schedule, Arc<Node>) {
    let schedule = Schedule::new();
    let medium = Faulty::new(Arc::new(Host), schedule.clone());
    let node = open_on(Arc::new(medium), options).unwrap();
    assert_eq!(node.role(), Role::Owner);
    (schedule, node)
}

/// Returns whether the index does its I/O through the medium, where the tests inject faults.
/// RocksDB does its own I/O.
fn index_is_on_the_medium() -> bool {
    options(Path::new("/")).index.is_none_or(|index| index.word() != "lsm")
}

fn stats(node: &Node) -> CatalogStats {
    node.store().stats().unwrap().catalog
}

/// Makes one sync of a segment fail: puts the sequence `name` and flushes. Returns the error of the
/// flush.
fn poison(schedule: &Schedule, node: &Node, name: u64) -> ritornello_format::Error {
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData).at("seg-"));
    assert_eq!(put(node.store(), name, 4).unwrap().pages, 4);
    let error = node.store().flush().unwrap_err();
    assert_eq!(schedule.injected(), 1);
    error
}

/// Fails all changes of some directories with an error. Reads succeed, also of a volume's marker,
/// as on a file system that is remounted read-only after an error.
#[derive(Debug, Default)]
struct FailedWrites {
    dirs: Mutex<Vec<PathBuf>>,
    errno: AtomicI32,
    failed: AtomicU64,
}

impl FailedWrites {
    /// Makes each change in `dirs` fail with `errno`, and no longer in the directories of an
    /// earlier call. No change fails if `dirs` is empty.
    fn fail(&self, dirs: &[PathBuf], errno: i32) {
        let mut failing = self.dirs.lock().unwrap();
        self.errno.store(errno, Ordering::Relaxed);
        *failing = dirs.to_vec();
    }
}

impl Watch for FailedWrites {
    fn before(&self, change: &DiskChange<'_>) -> io::Result<()> {
        let path = match *change {
            DiskChange::Open(_, access) if !access.write => return Ok(()),
            DiskChange::Open(path, _)
            | DiskChange::Rename(_, path)
            | DiskChange::Remove(path)
            | DiskChange::SyncDir(path)
            | DiskChange::Write(path, ..)
            | DiskChange::SyncData(path)
            | DiskChange::Allocate(path, _)
            | DiskChange::SetLen(path, _) => path,
        };
        if self.dirs.lock().unwrap().iter().any(|dir| path.starts_with(dir)) {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(self.errno.load(Ordering::Relaxed)));
        }
        Ok(())
    }
}

/// An owner of a store in `home` over the volumes `a` and `b`, both of which hold some of the
/// flushed sequences 1 to 8.
fn owner_of_two_volumes(dir: &Path) -> (Arc<FailedWrites>, Arc<Node>) {
    let writes = Arc::new(FailedWrites::default());
    // `Faulty` gives out no file descriptors, so every write passes through `FailedWrites`.
    let simulated = Arc::new(Faulty::new(Arc::new(Host), Schedule::new()));
    let medium = Watched::new(simulated, Arc::clone(&writes) as Arc<dyn Watch>);
    (writes, two_volumes_on(Arc::new(medium), dir))
}

fn two_volumes_on(medium: Arc<dyn Medium>, dir: &Path) -> Arc<Node> {
    let paths = vec![dir.join("a"), dir.join("b")];
    let node = open_on(medium, &Options { paths, ..options(&dir.join("home")) }).unwrap();
    for name in 1..=8 {
        assert_eq!(put(node.store(), name, 4).unwrap().pages, 4);
    }
    node.store().flush().unwrap();
    let segments: Vec<u64> = stats(&node).paths.iter().map(|path| path.segments).collect();
    assert!(segments.len() == 2 && !segments.contains(&0), "{segments:?}");
    node
}

/// Makes all writes to the volumes `dirs` fail while both volumes have unsynced pages, which
/// poisons the store.
fn poison_by_volumes(writes: &FailedWrites, node: &Node, dirs: &[PathBuf], errno: i32) {
    for name in 11..=14 {
        assert_eq!(put(node.store(), name, 4).unwrap().pages, 4);
    }
    writes.fail(dirs, errno);
    assert_eq!(node.store().flush().unwrap_err().kind(), ErrorKind::Retry);
}

/// Number of the sequences 1 to 8 that are read whole.
fn sequences_read(node: &Node) -> usize {
    (1..=8).filter(|name| get(node.store(), *name, 4).unwrap() == 4).count()
}

/// Whether no space is absent and no run is hidden. A volume that returns leaves the list of absent
/// space shortly before lookups find its runs.
fn is_whole(node: &Node) -> bool {
    stats(node).absent_space == AbsentSpace::default()
}

fn reopened(node: &Node) -> bool {
    node.problem().is_none() && stats(node).counters["reopenings"] > 0
}

#[test]
fn owner_reopens_after_failed_sync() {
    let dir = tempfile::tempdir().unwrap();
    let (schedule, node) = owner(dir.path());
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    let error = poison(&schedule, &node, 2);
    assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
    eventually("the store is reopened", || reopened(&node));
    let stats = stats(&node);
    assert_eq!((stats.poisoned, stats.owner_epoch, stats.counters["reopenings"]), (None, 2, 1));
    assert_eq!(get(store, 1, 4).unwrap(), 4, "pages flushed before the failure must be present");
    assert_eq!(
        store.flush().unwrap_err().kind(),
        ErrorKind::Miss,
        "the flush must report that puts may be lost"
    );
    assert_eq!(put(store, 2, 4).unwrap().pages, 4);
    store.flush().unwrap();
    node.close().unwrap();
    let node = ritornello_node::open(&options(dir.path())).unwrap();
    assert_eq!((get(node.store(), 1, 4).unwrap(), get(node.store(), 2, 4).unwrap()), (4, 4));
}

#[test]
fn clients_find_the_reopened_owner() {
    let dir = tempfile::tempdir().unwrap();
    let (schedule, node) = owner(dir.path());
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("put 1 4"), "4");
    assert_eq!(client.ask("flush"), "flushed");
    assert_eq!(client.ask("put 3 4"), "4");
    poison(&schedule, &node, 2);
    eventually("the store is reopened", || reopened(&node));
    eventually("the client is served", || client.ask("get 1 4") == "4");
    assert_eq!(client.ask("role"), "client", "the owner must keep its lock");
    let flushed = client.ask("flush");
    assert!(flushed.contains("repeat them"), "{flushed}");
    assert_eq!(client.ask("put 3 4"), "4");
    assert_eq!(client.ask("flush"), "flushed");
    assert_eq!((client.ask("problem"), client.ask("epoch")), ("false".into(), "2".into()));
    assert_eq!(get(node.store(), 3, 4).unwrap(), 4);
    client.finish();
}

#[test]
fn poisoned_store_still_serves_reads() {
    let dir = tempfile::tempdir().unwrap();
    let (schedule, node) = owner(dir.path());
    let mut client = Helper::opened(dir.path());
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData));
    assert_eq!(put(store, 2, 4).unwrap().pages, 4);
    assert!(store.flush().is_err());
    let before = schedule.injected();
    eventually("two attempts to reopen failed", || schedule.injected() >= before + 2);
    assert_eq!(get(store, 1, 4).unwrap(), 4);
    assert_eq!(client.ask("get 1 4"), "4");
    assert_eq!(put(store, 3, 4).unwrap_err().kind(), ErrorKind::Retry);
    let refused = client.ask("put 3 4");
    assert!(refused.contains("until the owner reopens the store"), "{refused}");
    assert_eq!(store.flush().unwrap_err().kind(), ErrorKind::Retry);
    assert!(node.problem().is_some() && stats(&node).poisoned.is_some());
    assert_eq!(client.ask("problem"), "true");
    schedule.heal();
    eventually("the store is reopened", || reopened(&node));
    assert_eq!(put(store, 3, 4).unwrap().pages, 4);
    eventually("the client puts", || client.ask("put 4 4") == "4");
    client.finish();
}

#[test]
fn store_reopens_without_a_volume_that_fails_writes() {
    for errno in [libc::EIO, libc::EROFS] {
        let dir = tempfile::tempdir().unwrap();
        let (writes, node) = owner_of_two_volumes(dir.path());
        let mut client = Helper::opened(&dir.path().join("home"));
        poison_by_volumes(&writes, &node, &[dir.path().join("b")], errno);
        eventually("the store is reopened", || reopened(&node));
        for name in 21..=28 {
            assert_eq!(put(node.store(), name, 4).unwrap().pages, 4, "{errno}: {name}");
        }
        let absent = stats(&node).absent_space.reasons;
        assert!(absent.len() == 1 && absent[0].contains("/b: "), "{errno}: {absent:?}");
        eventually("the client puts", || client.ask("put 31 4") == "4");
        let read = sequences_read(&node);
        assert!((1..8).contains(&read), "{errno}: {read} of 8 sequences are read without b");
        let _ = node.store().flush();
        node.store().flush().unwrap();

        writes.fail(&[], 0);
        eventually("the volume returns", || is_whole(&node));
        assert_eq!(sequences_read(&node), 8, "{errno}");
        assert_eq!(client.ask("get 31 4"), "4");
        assert_eq!(stats(&node).counters["reopenings"], 1, "{errno}");
        client.finish();
        node.close().unwrap();
    }
}

/// The segments of the volume `b` cannot be synced; the volume's other files can.
#[test]
fn store_reopens_without_a_volume_that_fails_syncs() {
    let dir = tempfile::tempdir().unwrap();
    let schedule = Schedule::new();
    let medium = Faulty::new(Arc::new(Host), schedule.clone());
    let node = two_volumes_on(Arc::new(medium), dir.path());
    for name in 11..=14 {
        assert_eq!(put(node.store(), name, 4).unwrap().pages, 4);
    }
    schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData).at("/b/seg-"));
    assert_eq!(node.store().flush().unwrap_err().kind(), ErrorKind::Retry);
    let began = Instant::now();
    eventually("the store is reopened", || reopened(&node));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let absent = stats(&node).absent_space.reasons;
    assert!(absent.len() == 1 && absent[0].contains("/b: a sync failed"), "{absent:?}");
    for name in 21..=28 {
        assert_eq!(put(node.store(), name, 4).unwrap().pages, 4, "{name}");
    }
    let read = sequences_read(&node);
    assert!((1..8).contains(&read), "{read} of 8 sequences are read without the volume b");
    let _ = node.store().flush();
    node.store().flush().unwrap();
    // The owner tries to use the volume again every two seconds. Failed attempts do not poison the
    // store.
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!((stats(&node).absent_space.reasons.len(), node.problem()), (1, None));

    schedule.heal();
    eventually("the volume returns", || is_whole(&node));
    assert_eq!((sequences_read(&node), stats(&node).counters["reopenings"]), (8, 1));
    node.close().unwrap();
}

/// If the segments of no volume can be synced, the poisoned core stays, because it still serves
/// reads.
#[test]
fn store_is_not_reopened_while_all_volumes_fail_syncs() {
    let dir = tempfile::tempdir().unwrap();
    let schedule = Schedule::new();
    let medium = Faulty::new(Arc::new(Host), schedule.clone());
    let node = two_volumes_on(Arc::new(medium), dir.path());
    assert_eq!(put(node.store(), 11, 4).unwrap().pages, 4);
    schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData).at("/seg-"));
    assert_eq!(node.store().flush().unwrap_err().kind(), ErrorKind::Retry);
    let before = schedule.injected();
    eventually("two attempts to reopen failed", || schedule.injected() >= before + 4);
    assert_eq!((sequences_read(&node), stats(&node).owner_epoch), (8, 1));
    schedule.heal();
    eventually("the store is reopened", || reopened(&node));
    node.close().unwrap();
}

#[test]
fn volume_that_fails_writes_can_be_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let (writes, node) = owner_of_two_volumes(dir.path());
    let b = dir.path().join("b");
    poison_by_volumes(&writes, &node, std::slice::from_ref(&b), libc::EROFS);
    eventually("the store is reopened", || reopened(&node));
    let forget = CapacityChange::ForgetVolume(b.to_str().unwrap().to_owned());
    node.store().change_capacity(&forget).unwrap();
    let absent = stats(&node).absent_space.reasons;
    assert!(absent.is_empty(), "{absent:?}");
    for name in 21..=28 {
        assert_eq!(put(node.store(), name, 4).unwrap().pages, 4, "{name}");
    }
    node.close().unwrap();
}

/// If no volume takes writes, the poisoned core stays, because it still serves reads.
#[test]
fn store_is_not_reopened_while_all_volumes_fail_writes() {
    let dir = tempfile::tempdir().unwrap();
    let (writes, node) = owner_of_two_volumes(dir.path());
    let dirs = ["a", "b"].map(|name| dir.path().join(name));
    poison_by_volumes(&writes, &node, &dirs, libc::EIO);
    let before = writes.failed.load(Ordering::Relaxed);
    // Each attempt to reopen the store fails to write the markers of both volumes, so four failures
    // are two attempts.
    eventually("two attempts to reopen failed", || {
        writes.failed.load(Ordering::Relaxed) >= before + 4
    });
    assert_eq!((sequences_read(&node), stats(&node).owner_epoch), (8, 1));
    writes.fail(&[], 0);
    eventually("the store is reopened", || reopened(&node));
    assert_eq!(sequences_read(&node), 8);
    node.close().unwrap();
}

/// Replaces the segment files by copies while all syncs fail, so that the open descriptors no
/// longer lead to the files at the paths, as after a new mount.
#[test]
fn reopening_reopens_segment_files() {
    let dir = tempfile::tempdir().unwrap();
    let (schedule, node) = owner(dir.path());
    let mut client = Helper::opened(dir.path());
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    assert_eq!(client.ask("put 4 4"), "4");
    store.flush().unwrap();
    schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData));
    assert_eq!(put(store, 2, 4).unwrap().pages, 4);
    assert!(store.flush().is_err());
    for found in std::fs::read_dir(dir.path().join("segments")).unwrap() {
        let segment = found.unwrap().path();
        let copy = segment.with_extension("copy");
        std::fs::copy(&segment, &copy).unwrap();
        std::fs::rename(&copy, &segment).unwrap();
    }
    schedule.heal();
    eventually("the store is reopened", || reopened(&node));
    let _ = store.flush();
    assert_eq!(put(store, 3, 4).unwrap().pages, 4);
    eventually("the client puts", || client.ask("put 5 4") == "4");
    store.flush().unwrap();
    client.finish();
    node.close().unwrap();
    let node = ritornello_node::open(&options(dir.path())).unwrap();
    for name in [1, 3, 4, 5] {
        assert_eq!(get(node.store(), name, 4).unwrap(), 4, "{name}");
    }
}

#[test]
fn calls_miss_until_takeover_on_a_failing_disk_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let (schedule, medium) = (Schedule::new(), Arc::new(Host));
    let medium = Arc::new(Faulty::new(medium, schedule.clone()));
    let node = open_on(medium, &options(dir.path())).unwrap();
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData));
    owner.kill();
    let failed = schedule.injected();
    for _ in 0..3 {
        assert_eq!((probe(store, 1, 4).unwrap(), get(store, 1, 4).unwrap()), (0, 0));
        assert_eq!(put(store, 2, 4).unwrap().reason, "reopening");
    }
    assert!(schedule.injected() > failed, "no takeover was attempted on the failing disk");
    assert!(node.problem().is_some());
    schedule.heal();
    eventually("the client took over", || get(store, 1, 4).unwrap() == 4);
    assert_eq!((node.role(), node.problem()), (Role::Owner, None));
}

/// Makes all syncs of the index fail: the poisoned core is closed, and the next core cannot open
/// the index.
#[test]
fn lookups_and_puts_miss_immediately_while_reopening() {
    if !index_is_on_the_medium() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (schedule, node) = owner(dir.path());
    let mut client = Helper::opened(dir.path());
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    store.flush().unwrap();
    schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData).at("/index/"));
    assert_eq!(put(store, 2, 4).unwrap().pages, 4);
    assert!(store.flush().is_err());
    eventually("the core is closed", || node.core().is_none());
    let began = Instant::now();
    assert_eq!((get(store, 1, 4).unwrap(), probe(store, 1, 4).unwrap()), (0, 0));
    let skipped = put(store, 3, 4).unwrap();
    assert_eq!((skipped.pages, skipped.reason), (0, "reopening"));
    assert_eq!(store.flush().unwrap_err().kind(), ErrorKind::Retry);
    assert!(stats(&node).poisoned.is_some() && node.problem().is_some());
    eventually("a get of the client misses", || client.ask("get 1 4") == "0");
    for _ in 0..20 {
        assert_eq!((client.ask("put 3 4"), client.ask("probe 1 4")), ("0".into(), "0".into()));
    }
    assert_eq!(client.ask("problem"), "true");
    let mut observer = Helper::start(dir.path());
    let seen = |is_poisoned| format!("{}, poisoned: {is_poisoned}", std::process::id());
    assert_eq!(observer.ask("observe"), seen(true));
    assert_eq!((client.ask("role"), node.role()), ("client".into(), Role::Owner));
    assert!(began.elapsed() < Duration::from_secs(20), "calls waited for the owner");
    schedule.heal();
    eventually("the store is reopened", || reopened(&node));
    assert_eq!(get(store, 1, 4).unwrap(), 4);
    eventually("the client is served", || client.ask("get 1 4") == "4");
    assert_eq!(client.ask("put 3 4"), "4");
    assert_eq!(observer.ask("observe"), seen(false));
    observer.finish();
    client.finish();
}

#[test]
fn close_on_a_broken_disk_fails_and_releases_the_lock() {
    for closed_core in [false, true] {
        if closed_core && !index_is_on_the_medium() {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let (schedule, node) = owner(dir.path());
        assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
        node.store().flush().unwrap();
        let part = if closed_core { "/index/" } else { "" };
        schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData).at(part));
        assert_eq!(put(node.store(), 2, 4).unwrap().pages, 4);
        assert!(node.store().flush().is_err());
        let before = schedule.injected();
        eventually("the owner tries the disk again", || schedule.injected() > before);
        eventually("the core is closed", || !closed_core || node.core().is_none());
        assert_eq!(node.close().unwrap_err().kind(), ErrorKind::Fatal);
        // This process has released the lock, so another process takes the store over.
        let mut next = Helper::opened(dir.path());
        assert_eq!((next.ask("role"), next.ask("get 1 4")), ("owner".into(), "4".into()));
        next.finish();
    }
}

/// A source of pages. Each access sends a message to `reached`, then blocks until the sender of
/// `go` is dropped.
struct Halted {
    pages: OwnedPages,
    reached: Mutex<Sender<()>>,
    go: Mutex<Receiver<()>>,
}

// SAFETY: all fragments belong to `pages`.
unsafe impl PageSource for Halted {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        let _ = self.reached.lock().unwrap().send(());
        let _ = self.go.lock().unwrap().recv();
        self.pages.fragments(page, out);
    }
}

#[test]
fn reopening_waits_for_the_owners_put_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let (schedule, node) = owner(dir.path());
    let store = node.store();
    assert_eq!(put(store, 1, 4).unwrap().pages, 4);
    let ((reached, is_reached), (let_go, go)) = (channel(), channel());
    let keys = keys(9, 1);
    let source = Halted {
        pages: OwnedPages::new(vec![page(&keys[0])]),
        reached: Mutex::new(reached),
        go: Mutex::new(go),
    };
    std::thread::scope(|scope| {
        let put_slowly = scope.spawn(|| {
            let (terms, control) = (PutOptions::default(), Control::default());
            store.put_batch(&common::scope(), &refs(&keys), &source, &terms, &control)
        });
        is_reached.recv().unwrap();
        poison(&schedule, &node, 2);
        // Reopening waits for the write in flight. Until then the poisoned core stays: it serves
        // gets and refuses puts.
        let refused = |answer: ritornello_format::Result<ritornello_store::Outcome>| {
            answer.is_ok_and(|put| put.reason == "reopening")
        };
        eventually("an attempt to reopen began", || refused(put(store, 3, 1)));
        for _ in 0..100 {
            assert!(refused(put(store, 3, 1)), "the store was reopened during a write");
            assert_eq!((get(store, 1, 4).unwrap(), stats(&node).owner_epoch), (4, 1));
        }
        drop(let_go);
        let answer = put_slowly.join().unwrap();
        assert!(answer.as_ref().map_or(true, |put| put.pages == 0), "{answer:?}");
    });
    eventually("the store is reopened", || reopened(&node));
    for name in 10..40 {
        assert_eq!(put(store, name, 4).unwrap().pages, 4);
        assert_eq!(get(store, name, 4).unwrap(), 4);
    }
}

#[test]
fn failed_durable_put_can_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let durable = Options { durability: Durability::Durable, ..options(dir.path()) };
    let (schedule, node) = owner_with(&durable);
    assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
    schedule.add(Rule::nth(1, MediumFault::Io).on(Op::SyncData).at("seg-"));
    assert_eq!(put(node.store(), 2, 4).unwrap_err().kind(), ErrorKind::Retry);
    eventually("the store is reopened", || reopened(&node));
    assert_eq!(put(node.store(), 2, 4).unwrap().pages, 4);
    node.store().flush().unwrap();
    assert_eq!((get(node.store(), 1, 4).unwrap(), get(node.store(), 2, 4).unwrap()), (4, 4));
}
