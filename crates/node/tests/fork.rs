//! A forked child cannot use its parent's handle, but can open the store again.
#![allow(unsafe_code, reason = "`fork` is an unsafe function")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Role, open};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

/// Runs `child` in a forked child of this process, which prints the result. Returns the child's
/// process id.
fn fork(child: impl FnOnce() -> String) -> i32 {
    // SAFETY: only the calling thread allocates at the fork; the store's threads are asleep, and
    // glibc makes its allocator usable in the child.
    match unsafe { libc::fork() } {
        0 => {
            let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            say(answer.unwrap_or_else(|_| "the child panicked".to_owned()));
            // SAFETY: ends the child without running cleanup code of the parent.
            unsafe { libc::_exit(0) }
        }
        pid => pid,
    }
}

fn own_command(node: &Arc<Node>, command: &str) -> String {
    let dir = node.path().to_owned();
    let handle = Arc::clone(node);
    match command {
        "fork-and-look" => {
            let pid = fork(move || {
                let refused = |error: ritornello_format::Error| {
                    assert_eq!(error.kind(), ErrorKind::Closed);
                    assert!(error.to_string().contains("open it again"), "{error}");
                };
                refused(put(handle.store(), 9, 1).unwrap_err());
                refused(probe(handle.store(), 1, 1).unwrap_err());
                refused(handle.store().flush().unwrap_err());
                refused(handle.store().stats().unwrap_err());
                handle.close().unwrap();
                drop(handle);
                let own = open(&options(&dir)).unwrap();
                assert_eq!(own.role(), Role::Client);
                assert_eq!(get(own.store(), 1, 5).unwrap(), 5);
                assert_eq!(put(own.store(), 2, 5).unwrap().pages, 5);
                own.close().unwrap();
                "the child was refused, then served".to_owned()
            });
            let mut status = 0;
            // SAFETY: `status` lives until `waitpid` returns.
            unsafe { libc::waitpid(pid, &mut status, 0) };
            format!("waited {status}")
        }
        // Forks 20 children while other threads put and get. Answers the number of children in
        // which the parent's handle refuses a probe and can be closed.
        "fork-while-busy" => {
            let busy = AtomicBool::new(true);
            let (store, busy) = (node.store(), &busy);
            std::thread::scope(|threads| {
                for thread in 0..3 {
                    threads.spawn(move || {
                        // All sequences fit into the store, so that no page is evicted.
                        for name in (0..200).cycle().map(|name| 1000 * (thread + 1) + name) {
                            let stored = put(store, name, 20).unwrap();
                            assert_eq!(stored.pages, 20, "{stored:?}");
                            assert_eq!(get(store, name, 20).unwrap(), 20);
                            if !busy.load(Ordering::Relaxed) {
                                break;
                            }
                        }
                    });
                }
                let mut well = 0;
                for _ in 0..20 {
                    std::thread::sleep(Duration::from_millis(10));
                    // SAFETY: the child takes no lock that another thread may have held: it checks
                    // whether the handle is its own, and ends.
                    let pid = unsafe { libc::fork() };
                    if pid == 0 {
                        let refused = probe(store, 1, 1)
                            .is_err_and(|error| error.kind() == ErrorKind::Closed)
                            && handle.close().is_ok();
                        // SAFETY: ends the child without running cleanup code of the parent.
                        unsafe { libc::_exit(i32::from(!refused)) }
                    }
                    let mut status = 0;
                    // SAFETY: `status` lives until `waitpid` returns.
                    unsafe { libc::waitpid(pid, &mut status, 0) };
                    well += usize::from(status == 0);
                }
                busy.store(false, Ordering::Relaxed);
                well.to_string()
            })
        }
        // The child stays alive with copies of everything that its parent had open.
        "fork-and-stay" => {
            fork(move || {
                std::thread::sleep(Duration::from_secs(20));
                drop(handle);
                "child ends".to_owned()
            });
            "forked".to_owned()
        }
        "fork-and-take-over" => {
            let pid = fork(move || {
                let own = open(&options(&dir)).unwrap();
                assert_eq!(own.role(), Role::Client);
                say("child is a client");
                // SAFETY: reads the parent's process id.
                while unsafe { libc::getppid() } != 1 && own.role() == Role::Client {
                    let _ = own.store().stats();
                    std::thread::sleep(Duration::from_millis(20));
                }
                if let Some(index) = options(&dir).index.filter(|index| index.word() == "lsm") {
                    eventually("the child is refused", || {
                        let refused = own.store().stats().map(drop).map_err(|e| e.to_string());
                        refused.is_err_and(|error| error.contains("forked child"))
                    });
                    return format!("child cannot use {}", index.word());
                }
                eventually("the child owns the store", || {
                    own.store().stats().is_ok() && own.role() == Role::Owner
                });
                // Dropping the copy of the parent's handle must not release the lock.
                drop(handle);
                say("child is the owner");
                std::thread::sleep(Duration::from_secs(20));
                String::new()
            });
            format!("forked {pid}")
        }
        other => panic!("unknown command: {other}"),
    }
}

#[test]
fn child_needs_its_own_handle() {
    let dir = tempfile::tempdir().unwrap();
    let mut parent = Helper::opened(dir.path());
    assert_eq!(parent.ask("put 1 5"), "5");
    assert_eq!(parent.ask("fork-and-look"), "the child was refused, then served");
    assert_eq!(parent.listen(), "waited 0");
    assert_eq!(parent.ask("get 2 5"), "5");
    assert_eq!(parent.ask("role"), "owner");
    // A child of a client needs its own handle too.
    let mut other = Helper::opened(dir.path());
    assert_eq!(other.ask("role"), "client");
    assert_eq!(other.ask("fork-and-look"), "the child was refused, then served");
    assert_eq!(other.listen(), "waited 0");
    assert_eq!(other.ask("get 2 5"), "5");
    other.finish();
    parent.finish();
}

#[test]
fn fork_during_puts_and_gets_is_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Helper::opened(dir.path());
    let mut client = Helper::opened(dir.path());
    owner.tell("fork-while-busy");
    client.tell("fork-while-busy");
    assert_eq!((owner.listen(), client.listen()), ("20".to_owned(), "20".to_owned()));
    assert_eq!(client.ask("put 1 5"), "5");
    assert_eq!((owner.ask("role"), client.ask("role")), ("owner".to_owned(), "client".to_owned()));
    client.finish();
    owner.finish();
}

#[test]
fn client_takes_over_from_dead_owner_with_live_child() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 5).unwrap().pages, 5);
    node.store().flush().unwrap();
    assert_eq!(owner.ask("fork-and-stay"), "forked");
    owner.signal(libc::SIGKILL);
    let started = std::time::Instant::now();
    assert_eq!(get(node.store(), 1, 5).unwrap(), 5);
    assert_eq!(node.role(), Role::Owner);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn dead_client_with_live_child_loses_leases() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 5).unwrap().pages, 5);
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("lease 1 5"), "5");
    assert_eq!(client.ask("fork-and-stay"), "forked");
    client.signal(libc::SIGKILL);
    eventually("the lease ends", || node.store().stats().unwrap().catalog.leases == 0);
}

#[test]
fn child_takes_over_and_keeps_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    let mut parent = Helper::opened(dir.path());
    parent.tell("fork-and-take-over");
    let said = [parent.listen(), parent.listen()];
    assert!(said.iter().any(|said| said == "child is a client"), "{said:?}");
    parent.signal(libc::SIGKILL);
    let said = parent.listen();
    let node = open(&options(dir.path())).unwrap();
    if said == "child cannot use lsm" {
        // RocksDB's threads do not exist in the child, so this process becomes the owner.
        assert_eq!(node.role(), Role::Owner);
    } else {
        assert_eq!(said, "child is the owner");
        assert_eq!(node.role(), Role::Client);
    }
    assert_eq!(put(node.store(), 1, 5).unwrap().pages, 5);
    node.close().unwrap();
}
