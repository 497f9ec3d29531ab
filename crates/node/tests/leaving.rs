//! Stores that are moved while they are open. If another store is then at the path, every process
//! closes the moved store. Processes reach the moved store's files through the descriptor of its
//! directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_node::{Node, Role, open, open_on};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    match command {
        "replaced" => node.is_replaced().to_string(),
        _ => panic!("unknown command: {command}"),
    }
}

/// A store that this process owns, until `replace` puts a store of another process at its path.
struct Moved {
    _root: tempfile::TempDir,
    dir: PathBuf,
    away: PathBuf,
    schedule: Schedule,
    node: Arc<Node>,
}

impl Moved {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let (dir, away) = (root.path().join("store"), root.path().join("away"));
        let schedule = Schedule::new();
        let medium = Arc::new(Faulty::new(Arc::new(Host), schedule.clone()));
        let node = open_on(medium, &options(&dir)).unwrap();
        assert_eq!(node.role(), Role::Owner);
        assert_eq!(put(node.store(), 1, 4).unwrap().pages, 4);
        node.store().flush().unwrap();
        Self { _root: root, dir, away, schedule, node }
    }

    /// Delays each sync of file data after this call by `pause`.
    fn slow_syncs(&self, pause: Duration) {
        self.schedule.add(Rule::always(MediumFault::Slow(pause)).on(Op::SyncData));
    }

    /// Moves the store to the path `away`. Starts a process that makes a new store at the old path,
    /// and puts the sequence 3 into the new store.
    fn replace(&self) -> Helper {
        std::fs::rename(&self.dir, &self.away).unwrap();
        let mut other = Helper::opened(&self.dir);
        assert_eq!((other.ask("role"), other.ask("put 3 4")), ("owner".into(), "4".into()));
        assert_eq!(other.ask("flush"), "flushed");
        other
    }

    /// Waits until the store rejects calls. The store may still be closing when this returns.
    fn wait_for_rejection(&self) {
        eventually("calls are rejected", || {
            probe(self.node.store(), 1, 4).is_err_and(|error| error.kind() == ErrorKind::Closed)
        });
    }
}

#[test]
fn processes_leave_store_whose_path_leads_to_another() {
    for fails in [true, false] {
        let moved = Moved::new();
        let node = &moved.node;
        if fails {
            moved.schedule.add(Rule::always(MediumFault::Io).on(Op::SyncData));
            assert_eq!(put(node.store(), 2, 4).unwrap().pages, 4);
            assert!(node.store().flush().is_err());
        }
        let mut client = Helper::opened(&moved.dir);
        let other = moved.replace();
        moved.schedule.heal();
        eventually("the owner left", || node.is_replaced());
        assert_eq!(probe(node.store(), 1, 4).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(node.ensure_owner().unwrap_err().kind(), ErrorKind::Closed);
        eventually("the client left", || client.ask("replaced") == "true");
        let _ = node.close();
        client.finish();
        other.kill();
        for (place, here, there) in [(&moved.dir, 3, 1), (&moved.away, 1, 3)] {
            let node = open(&options(place)).unwrap();
            let found = (get(node.store(), here, 4).unwrap(), get(node.store(), there, 4).unwrap());
            assert_eq!(found, (4, 0), "{}", place.display());
        }
    }
}

#[test]
fn moved_store_has_one_owner_while_closing() {
    let moved = Moved::new();
    assert_eq!(put(moved.node.store(), 2, 4).unwrap().pages, 4);
    moved.slow_syncs(Duration::from_millis(500));
    let other = moved.replace();
    moved.wait_for_rejection();
    let began = Instant::now();
    let again = loop {
        match open(&options(&moved.away)) {
            Ok(again) => break again,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Retry, "{error}"),
        }
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "the moved store was not closed within 30 seconds"
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(again.role(), Role::Owner);
    moved.node.close().unwrap();
    let mut client = Helper::opened(&moved.away);
    assert_eq!((client.ask("role"), client.ask("put 4 4")), ("client".into(), "4".into()));
    assert_eq!(client.ask("flush"), "flushed");
    client.finish();
    drop(again);
    other.kill();
    let node = open(&options(&moved.away)).unwrap();
    for name in [1, 2, 4] {
        assert_eq!(get(node.store(), name, 4).unwrap(), 4, "{name}");
    }
}

#[test]
fn close_waits_until_moved_store_is_closed() {
    let moved = Moved::new();
    assert_eq!(put(moved.node.store(), 2, 4).unwrap().pages, 4);
    moved.slow_syncs(Duration::from_millis(500));
    let other = moved.replace();
    moved.wait_for_rejection();
    moved.node.close().unwrap();
    let mut next = Helper::opened(&moved.away);
    assert_eq!(next.ask("role"), "owner");
    assert_eq!(next.ask("get 2 4"), "4");
    next.finish();
    other.kill();
}

#[test]
fn overlapping_flushes_do_not_keep_a_moved_store_open() {
    let moved = Moved::new();
    moved.slow_syncs(Duration::from_millis(300));
    let store = moved.node.store();
    let flush_on = |name: u64| {
        (name..)
            .step_by(4)
            .take_while(|name| put(store, *name, 4).is_ok() && store.flush().is_ok())
            .count()
    };
    std::thread::scope(|scope| {
        let flushing: Vec<_> = (10..14).map(|name| scope.spawn(move || flush_on(name))).collect();
        let other = moved.replace();
        eventually("the owner left", || moved.node.is_replaced());
        assert!(flushing.into_iter().all(|thread| thread.join().is_ok()));
        other.kill();
    });
}

#[test]
fn open_fails_with_retry_if_the_directory_is_replaced() {
    let moved = Moved::new();
    moved.slow_syncs(Duration::from_millis(500));
    assert_eq!(put(moved.node.store(), 2, 4).unwrap().pages, 4);
    let (dir, away): (&Path, &Path) = (&moved.dir, &moved.away);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| moved.node.close());
        // `close` now holds this process's entry for the directory, for which `open` waits.
        std::thread::sleep(Duration::from_millis(100));
        let opening = scope.spawn(|| open(&options(dir)).map(|node| node.role()));
        std::thread::sleep(Duration::from_millis(100));
        std::fs::rename(dir, away).unwrap();
        std::fs::create_dir(dir).unwrap();
        let _ = closing.join().unwrap();
        let error = opening.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
    });
    assert_eq!(open(&options(dir)).unwrap().role(), Role::Owner);
}

#[test]
fn policy_is_that_of_the_opened_store() {
    let root = tempfile::tempdir().unwrap();
    let [dir, away, next] = ["store", "away", "next"].map(|name| root.path().join(name));
    for (dir, policy) in [(&dir, "allow_weak_hashes = true"), (&next, "")] {
        open(&options(dir)).unwrap().close().unwrap();
        std::fs::write(dir.join("policy.toml"), policy).unwrap();
    }
    let schedule = Schedule::new();
    let (here, there) = (dir.clone(), away.clone());
    schedule.before(Op::Read, "policy.toml", move || {
        std::fs::rename(&here, &there).unwrap();
        std::fs::rename(&next, &here).unwrap();
    });
    let opened = open_on(Arc::new(Faulty::new(Arc::new(Host), schedule)), &options(&dir));
    assert!(away.exists(), "the hook that replaces the directory did not run");
    assert!(
        !opened.is_ok_and(|node| node.policy().allow_weak_hashes),
        "the policy of another store was used"
    );
    assert!(!open(&options(&dir)).unwrap().policy().allow_weak_hashes);
    assert!(open(&options(&away)).unwrap().policy().allow_weak_hashes);
}

#[test]
fn client_of_a_moved_store_makes_concurrent_calls() {
    let root = tempfile::tempdir().unwrap();
    let (dir, away) = (root.path().join("store"), root.path().join("away"));
    let mut owner = Helper::opened(&dir);
    let client = open(&options(&dir)).unwrap();
    assert_eq!(client.role(), Role::Client);
    assert_eq!(put(client.store(), 1, 4).unwrap().pages, 4);
    std::fs::rename(&dir, &away).unwrap();
    // Concurrent calls of a client take one connection each.
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8u64)
            .map(|thread| {
                let store = client.store();
                scope.spawn(move || {
                    for round in 0..20 {
                        put(store, 100 * (thread + 1) + round, 4)?;
                        probe(store, 1, 4)?;
                    }
                    store.flush()
                })
            })
            .collect();
        for call in calls {
            call.join().unwrap().unwrap();
        }
    });
    assert_eq!((client.role(), owner.ask("get 1 4")), (Role::Client, "4".into()));
    client.close().unwrap();
    owner.finish();
}

#[test]
fn answers_at_once_is_false_while_a_moved_store_closes() {
    let moved = Moved::new();
    let node = &moved.node;
    // Lookups in the index `lsm` may read files.
    let is_in_memory = options(node.path()).index.is_none_or(|index| index.word() != "lsm");
    assert_eq!(node.answers_at_once(), is_in_memory);
    assert_eq!(put(node.store(), 2, 4).unwrap().pages, 4);
    moved.slow_syncs(Duration::from_secs(3));
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| node.store().flush());
        let other = moved.replace();
        // `answers_at_once` must return false while an attempt to close the store is in progress:
        // if it waited until the attempt failed, it would return true.
        eventually("closing waits for the flush", || {
            assert!(!flush.is_finished(), "the flush ended before closing waited for it");
            !node.answers_at_once()
        });
        let _ = flush.join().unwrap();
        other.kill();
    });
}
