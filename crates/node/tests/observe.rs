//! Processes that ask for the state of a store without using the store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Observed, Role, decisions, explain, explain_request, observe, open};
use ritornello_store::{Answer, CatalogStats, Explanation, OwnerSilent, StoredStats};
use std::error::Error as _;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Time that the owner has to answer a question.
const WITHIN: Duration = Duration::from_secs(30);

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(_: &Arc<Node>, other: &str) -> String {
    panic!("unknown command: {other}")
}

fn owned(dir: &Path) -> CatalogStats {
    match observe(dir).unwrap() {
        Observed::Owned(stats) => *stats,
        Observed::Unowned(stored) => panic!("no process owns the store: {stored:?}"),
    }
}

fn unowned(dir: &Path) -> StoredStats {
    match observe(dir).unwrap() {
        Observed::Unowned(stored) => *stored,
        Observed::Owned(stats) => panic!("process {} owns the store", stats.owner_pid),
    }
}

/// Returns whether the last owner ended cleanly. Always true with the index `lsm`, because on a
/// busy machine the end of an owner with this index may be unclean.
fn ended_cleanly(stored: &StoredStats) -> bool {
    stored.clean || stored.index == "lsm"
}

fn names_of_clients(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("clients")).unwrap().count()
}

/// Sets a flag, which ends a thread's loop, at the end of the test, also if the test fails.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn owner_answers_observer_that_is_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Helper::opened(dir.path());
    assert_eq!(owner.ask("put 1 4"), "4");
    // An owner answers at most 8 observers at the same time, so each of these must free its
    // place when it ends.
    for _ in 0..40 {
        let stats = owned(dir.path());
        assert_eq!((stats.owner_pid as i32, stats.pages, stats.clients), (owner.pid(), 4, 0));
    }
    assert_eq!(names_of_clients(dir.path()), 0);
    assert_eq!(owner.ask("role"), "owner");
    owner.finish();
    assert!(ended_cleanly(&unowned(dir.path())));
}

/// The answer and the number of pages of each span.
fn answers(explanation: &Explanation) -> Vec<(Answer, u32)> {
    explanation.spans.iter().map(|span| (span.answer, span.pages)).collect()
}

#[test]
fn owner_explains_misses_to_process_that_never_owns() {
    let dir = tempfile::tempdir().unwrap();
    let (id, asked) = (scope().id(), keys(1, 6));
    let asked = refs(&asked);
    open(&options(dir.path())).unwrap().close().unwrap();
    assert_eq!(explain(dir.path(), id, &asked, WITHIN).unwrap(), None);
    let mut owner = Helper::opened(dir.path());
    assert_eq!((owner.ask("role"), owner.ask("put 1 4")), ("owner".into(), "4".into()));
    let explanation = explain(dir.path(), id, &asked, WITHIN).unwrap().unwrap();
    let expected = [(Answer::Hit, 4), (Answer::Unknown, 2)];
    assert_eq!((answers(&explanation), explanation.is_registered), (expected.to_vec(), true));
    // More keys than a message of an observer may have: `explain` asks as a client.
    let many = keys(1, 4096);
    let explanation = explain(dir.path(), id, &refs(&many), WITHIN).unwrap().unwrap();
    assert_eq!(answers(&explanation), [(Answer::Hit, 4), (Answer::Unknown, 4092)]);
    eventually("the clients of `explain` are removed", || owned(dir.path()).clients == 0);
    assert_eq!(names_of_clients(dir.path()), 0);
    // A client of the store asks through its own connection.
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    assert_eq!(answers(&node.store().explain(&scope(), &asked).unwrap()), expected);
    assert!(explain(dir.path(), id, &asked, WITHIN).unwrap_err().to_string().contains("open"));
    node.close().unwrap();
    owner.kill();
    assert_eq!(explain(dir.path(), id, &asked, WITHIN).unwrap(), None);
}

#[test]
fn owner_explains_request_to_process_that_never_owns() {
    let dir = tempfile::tempdir().unwrap();
    open(&options(dir.path())).unwrap().close().unwrap();
    assert_eq!(explain_request(dir.path(), "r-1", WITHIN).unwrap(), None);
    let mut owner = Helper::opened(dir.path());
    assert_eq!((owner.ask("put 1 4"), owner.ask("decide r-1 1 6")), ("4".into(), "decided".into()));
    let mut found = Vec::new();
    eventually("the owner's process has reported its decision", || {
        found = explain_request(dir.path(), "r-1", WITHIN).unwrap().unwrap().requests;
        !found.is_empty()
    });
    assert_eq!((found.len(), found[0].decisions[0].found), (1, 4));
    assert_eq!(answers(&found[0].explanation), [(Answer::Hit, 4), (Answer::Unknown, 2)]);
    assert!(explain_request(dir.path(), "r", WITHIN).unwrap().unwrap().requests.len() == 1);
    assert!(explain_request(dir.path(), "r-2", WITHIN).unwrap().unwrap().requests.is_empty());
    eventually("the clients of `explain_request` are removed", || owned(dir.path()).clients == 0);
    owner.finish();
}

#[test]
fn store_of_killed_owner_can_be_observed() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Helper::opened(dir.path());
    assert_eq!((owner.ask("put 1 4"), owner.ask("flush")), ("4".into(), "flushed".into()));
    owner.kill();
    let stored = unowned(dir.path());
    assert_eq!((stored.clean, stored.owner_epoch, stored.scopes), (false, 1, Some(1)));
    assert_eq!(stored.capacity_bytes, CAPACITY);
    // The next owner recovers the store, and writes a checkpoint of the pages.
    let mut next = Helper::opened(dir.path());
    assert_eq!(next.ask("probe 1 4"), "4");
    assert_eq!(owned(dir.path()).owner_pid as i32, next.pid());
    // An owner that ends before the killed owner's writes are drained records no clean end.
    eventually("the space is drained", || owned(dir.path()).reserved_bytes == 0);
    next.finish();
    let stored = unowned(dir.path());
    assert!(ended_cleanly(&stored) && stored.owner_epoch == 2);
    if stored.index == "run" {
        assert_eq!(stored.checkpoint.map(|found| (found.runs, found.pages)), Some((1, 4)));
    }
}

#[test]
fn stopped_owner_is_silent_to_observers() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    owner.stop();
    let started = Instant::now();
    let error = observe(dir.path()).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert!(OwnerSilent::caused(&error) && error.to_string().contains("pid"), "{error}");
    owner.signal(libc::SIGCONT);
    assert_eq!(owned(dir.path()).owner_pid as i32, owner.pid());
    owner.finish();
}

#[test]
fn observer_gives_up_on_lock_holder_that_does_not_listen() {
    let dir = tempfile::tempdir().unwrap();
    open(&options(dir.path())).unwrap().close().unwrap();
    let mut owner = Helper::opened(dir.path());
    std::fs::remove_file(dir.path().join("owner.sock")).unwrap();
    let started = Instant::now();
    let error = observe(dir.path()).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    let text = error.to_string();
    assert!(error.kind() == ErrorKind::Retry && text.contains("does not listen"), "{text}");
    assert!(text.contains(&format!("pid={}", owner.pid())), "{text}");
    assert!(error.source().is_some(), "{text}");
    assert_eq!(owner.ask("role"), "owner");
    owner.finish();
}

/// Reads a message with the length that precedes it, and writes both.
fn relay_message(from: &mut UnixStream, to: &mut UnixStream) {
    let mut length = [0; 4];
    from.read_exact(&mut length).unwrap();
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut message).unwrap();
    to.write_all(&[&length[..], &message].concat()).unwrap();
}

/// Listens at the path of the owner's socket, and relays connections to the owner; of the first
/// connection only the handshake, so that a request on it has no answer. Sends to the returned
/// channel when this handshake is complete.
fn leave_first_request_unanswered(dir: &Path) -> Receiver<()> {
    let (socket, owners) = (dir.join("owner.sock"), dir.join("owner.sock.moved"));
    std::fs::rename(&socket, &owners).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let (sender, greeted) = mpsc::channel();
    std::thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let (mut near, mut far) = (near.unwrap(), UnixStream::connect(&owners).unwrap());
            if number == 0 {
                relay_message(&mut near, &mut far);
                relay_message(&mut far, &mut near);
                sender.send(()).unwrap();
                std::thread::spawn(move || {
                    let _ = near.read_to_end(&mut Vec::new());
                    drop(far);
                });
                continue;
            }
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            std::thread::spawn(move || std::io::copy(&mut far, &mut near));
        }
    });
    greeted
}

#[test]
fn slow_question_ends_before_observers_give_up() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let greeted = leave_first_request_unanswered(dir.path());
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| decisions(dir.path(), 10, Duration::from_secs(3)));
        greeted.recv_timeout(Duration::from_secs(30)).unwrap();
        // The question still waits for its answer. `observe` waits five seconds for its end.
        assert_eq!(owned(dir.path()).owner_pid as i32, owner.pid());
        let error = asking.join().unwrap().unwrap_err();
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Retry && !OwnerSilent::caused(&error), "{text}");
        assert!(text.contains("in time") && text.contains("try again later"), "{text}");
    });
    std::fs::rename(dir.path().join("owner.sock.moved"), dir.path().join("owner.sock")).unwrap();
    owner.finish();
}

#[test]
fn process_may_not_observe_its_open_store_and_keeps_its_lock() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let error = observe(dir.path()).unwrap_err();
    assert!(error.to_string().contains("has the store open"), "{error}");
    let mut other = Helper::opened(dir.path());
    assert_eq!((other.ask("role"), node.role()), ("client".into(), Role::Owner));
    other.finish();
    node.close().unwrap();
    assert!(ended_cleanly(&unowned(dir.path())));
}

#[test]
fn observers_see_owners_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    open(&options(dir.path())).unwrap().close().unwrap();
    let (seen, done) = ([0, 0].map(AtomicUsize::new), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                match observe(dir.path()) {
                    Ok(observed) => {
                        let is_owned = matches!(observed, Observed::Owned(_));
                        seen[usize::from(is_owned)].fetch_add(1, Ordering::Relaxed);
                    }
                    // On a busy machine an owner may take longer to start or stop than observers
                    // wait.
                    Err(error) => {
                        let is_late = error.kind() == ErrorKind::Retry;
                        assert!(is_late || OwnerSilent::caused(&error), "{error}");
                    }
                }
            }
        });
        let _end = SetAtEnd(&done);
        let sees = |is_owned: bool| {
            let count = || seen[usize::from(is_owned)].load(Ordering::Relaxed);
            let before = count();
            let expected =
                if is_owned { "observers see an owner" } else { "observers see no owner" };
            eventually(expected, || count() > before + 1);
        };
        for _ in 0..5 {
            sees(false);
            let owner = Helper::opened(dir.path());
            sees(true);
            owner.finish();
        }
    });
    let mut last = Helper::opened(dir.path());
    assert_eq!(last.ask("role"), "owner");
    last.finish();
}
