//! Processes of different builds on one store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_format::ErrorKind;
use ritornello_node::{Node, Observed, Role, explain, explain_request, observe, open};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Recorded messages of a client and an owner that support only version 7 of the protocol.
const CLIENT_7: &[u8] = include_bytes!("recorded/client-7.bin");
const OWNER_7: &[u8] = include_bytes!("recorded/owner-7.bin");
/// First bytes of a hello and of its reply in version 7.
const GREETING_7: &[u8] = b"RTRN\x07\0\0\0";
/// First bytes after the greeting in a reply to a hello: of `Granted`, and of `Refused` with an
/// error of kind `Invalid`.
const GRANTED: u8 = 0;
const REFUSED: &[u8] = b"\x02\0";
/// Number of the request `Release`, which has no response.
const RELEASE: u8 = 3;
/// Byte positions of the client's name and of the format number in a recorded hello, counted from
/// the start of the 4-byte length that precedes the hello.
const NAME: std::ops::Range<usize> = 14..46;
const FORMAT: usize = 12;

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(_: &Arc<Node>, other: &str) -> String {
    panic!("unknown command: {other}")
}

fn frames(mut recorded: &[u8]) -> Vec<&[u8]> {
    let mut frames = Vec::new();
    while let Some(length) = recorded.first_chunk() {
        let (frame, rest) = recorded.split_at(4 + u32::from_le_bytes(*length) as usize);
        frames.push(frame);
        recorded = rest;
    }
    frames
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Reads a message. Returns its bytes without the length that precedes them; no bytes if the peer
/// closed the connection.
fn read_message(stream: &mut UnixStream) -> Vec<u8> {
    let mut length = [0; 4];
    if stream.read_exact(&mut length).is_err() {
        return Vec::new();
    }
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut message).unwrap();
    message
}

/// Listens at the path of the owner's socket. Answers each hello with the result of `answer`;
/// relays the connection to the owner if the result is `None`. Returns the number of hellos
/// received, which a thread keeps up to date.
fn listen_before_owner(
    dir: &Path,
    answer: impl Fn(&[u8]) -> Option<Vec<u8>> + Send + 'static,
) -> Arc<AtomicUsize> {
    let (socket, owners) = (dir.join("owner.sock"), dir.join("owner.sock.moved"));
    std::fs::rename(&socket, &owners).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let hellos = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&hellos);
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let mut near = near.unwrap();
            let hello = read_message(&mut near);
            counted.fetch_add(1, Ordering::Relaxed);
            if let Some(answer) = answer(&hello) {
                let _ = near.write_all(&framed(&answer));
                continue;
            }
            let mut far = UnixStream::connect(&owners).unwrap();
            far.write_all(&framed(&hello)).unwrap();
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            std::thread::spawn(move || std::io::copy(&mut far, &mut near));
        }
    });
    hellos
}

fn restore_owner_socket(dir: &Path) {
    std::fs::rename(dir.join("owner.sock.moved"), dir.join("owner.sock")).unwrap();
}

/// The recorded hello names format 0, which the owner refuses, so the test changes it to format 1.
#[test]
fn recorded_client_of_version_7_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let (mut client, recorded) = (frames(CLIENT_7), frames(OWNER_7));
    let name = std::str::from_utf8(&client[0][NAME]).unwrap();
    let lock = std::fs::File::create(dir.path().join("clients").join(name)).unwrap();
    rustix::fs::fcntl_lock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let mut hello = client[0].to_vec();
    hello[FORMAT] = 1;
    client[0] = &hello;
    let mut stream = connect(&dir.path().join("owner.sock"));
    let mut answers = Vec::new();
    for frame in client {
        stream.write_all(frame).unwrap();
        if frame[4] != RELEASE {
            answers.push(read_message(&mut stream));
        }
    }
    let welcome = &answers[0];
    assert_eq!((&welcome[..8], welcome[8]), (GREETING_7, GRANTED));
    // Each response has the same kind as the recorded response of an owner of version 7.
    let kinds = |answers: &[Vec<u8>]| answers[1..].iter().map(|body| body[0]).collect::<Vec<u8>>();
    let expected: Vec<_> = recorded.iter().map(|frame| frame[4..].to_vec()).collect();
    assert_eq!(kinds(&answers), kinds(&expected));
    owner.finish();
}

#[test]
fn client_of_another_format_is_told_both_formats() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let mut stream = connect(&dir.path().join("owner.sock"));
    stream.write_all(frames(CLIENT_7)[0]).unwrap();
    let answer = read_message(&mut stream);
    let said = String::from_utf8_lossy(&answer);
    assert!(said.contains("different formats") && said.contains("format=1, yours=0"), "{said}");
    assert!(read_message(&mut stream).is_empty(), "the owner must close the connection");
    owner.finish();
}

#[test]
fn owner_of_version_7_serves_a_client() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let refused = [GREETING_7, REFUSED, b"\x0fanother version"].concat();
    let hellos = listen_before_owner(dir.path(), move |hello| {
        (!hello.starts_with(GREETING_7)).then(|| refused.clone())
    });
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(node.role(), Role::Client);
    assert_eq!(hellos.load(Ordering::Relaxed), 2);
    std::thread::scope(|threads| {
        for name in 0..4 {
            let store = node.store();
            threads.spawn(move || {
                assert_eq!(put(store, name, 5).unwrap().pages, 5);
                assert_eq!(get(store, name, 5).unwrap(), 5);
            });
        }
    });
    // The first connection took two hellos, one per version. At most three connections were added
    // for the four threads, with one hello each: they begin with the version agreed on before.
    assert!(hellos.load(Ordering::Relaxed) <= 2 + 3);
    drop(node);
    restore_owner_socket(dir.path());
    owner.finish();
}

#[test]
fn owner_answers_unknown_version_in_its_newest_version() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    for version in [1u8, 99] {
        let mut stream = connect(&dir.path().join("owner.sock"));
        stream.write_all(&framed(&[b"RTRN", &[version, 0, 0, 0][..], b"\0 xx"].concat())).unwrap();
        let answer = read_message(&mut stream);
        assert_eq!(&answer[..12], b"RTRN\x08\0\0\0\x07\0\0\0");
        let said = String::from_utf8_lossy(&answer[12..]);
        assert!(said.contains(&format!("theirs={version}")), "{said}");
        assert!(read_message(&mut stream).is_empty(), "the owner must close the connection");
    }
    node.close().unwrap();
}

#[test]
fn client_without_common_version_is_served_later() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let future = b"RTRN\x63\0\0\0\x62\0\0\0 something";
    listen_before_owner(dir.path(), |_| Some(future.to_vec()));
    let error = open(&options(dir.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
    let said = error.to_string();
    assert!(said.contains("restart this process with that version"), "{said}");
    assert!(said.contains("protocol=7 to 8") && said.contains("theirs=98 to 99"), "{said}");
    restore_owner_socket(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!((node.role(), put(node.store(), 1, 3).unwrap().pages), (Role::Client, 3));
    drop(node);
    owner.finish();
}

#[test]
fn client_survives_a_takeover_by_another_version() {
    let dir = tempfile::tempdir().unwrap();
    let old = Helper::opened(dir.path());
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 3).unwrap().pages, 3);
    node.store().flush().unwrap();
    old.kill();
    let new = Helper::opened(dir.path());
    let hellos = listen_before_owner(dir.path(), |_| Some(b"RTRN\x06\0\0\0".to_vec()));
    let started = std::time::Instant::now();
    for _ in 0..200 {
        let error = node.store().flush().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Retry, "{error}");
        assert!(error.to_string().contains("theirs=6"), "{error}");
    }
    // The client makes at most one attempt per second, for any number of calls.
    let most = 1 + started.elapsed().as_secs() as usize;
    assert!(hellos.load(Ordering::Relaxed) <= most, "{hellos:?}");
    restore_owner_socket(dir.path());
    eventually("the client is served", || probe(node.store(), 1, 3).is_ok_and(|pages| pages == 3));
    assert_eq!(node.role(), Role::Client);
    drop(node);
    new.finish();
}

#[test]
fn observer_is_a_client_of_an_owner_of_version_7() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let refused = [GREETING_7, REFUSED, b"\x0fanother version"].concat();
    let hellos = listen_before_owner(dir.path(), move |hello| {
        (!hello.starts_with(GREETING_7)).then(|| refused.clone())
    });
    let Observed::Owned(stats) = observe(dir.path()).unwrap() else {
        panic!("no process owns the store")
    };
    assert_eq!((stats.owner_pid as i32, stats.clients), (owner.pid(), 1));
    // `observe` said hello as an observer, in version 8, which was refused; then as a client, in
    // versions 8 and 7.
    assert_eq!(hellos.load(Ordering::Relaxed), 3);
    restore_owner_socket(dir.path());
    owner.finish();
}

#[test]
fn owner_of_version_7_is_not_asked_to_explain() {
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let refused = [GREETING_7, REFUSED, b"\x0fanother version"].concat();
    listen_before_owner(dir.path(), move |hello| {
        (!hello.starts_with(GREETING_7)).then(|| refused.clone())
    });
    let (asked, within) = (keys(1, 3), Duration::from_secs(30));
    let said = explain(dir.path(), scope().id(), &refs(&asked), within).unwrap_err();
    let of_request = explain_request(dir.path(), "r-1", within).unwrap_err();
    let node = open(&options(dir.path())).unwrap();
    let asks = node.store().explain(&scope(), &refs(&asked)).unwrap_err();
    decide(node.store(), "r-1", 1, 3);
    let lists = node.store().decisions(10).unwrap_err();
    for error in [said, asks, of_request, lists] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("explains no misses"), "{error}");
    }
    // The connection is still usable.
    assert_eq!((node.role(), put(node.store(), 1, 3).unwrap().pages), (Role::Client, 3));
    drop(node);
    restore_owner_socket(dir.path());
    owner.finish();
}

#[test]
fn refused_observer_does_not_become_a_client() {
    const KIND_RETRY: u8 = 1;
    let dir = tempfile::tempdir().unwrap();
    let owner = Helper::opened(dir.path());
    let hellos = listen_before_owner(dir.path(), |hello| {
        let text = b"too many commands";
        Some([&hello[..12], &[REFUSED[0], KIND_RETRY, text.len() as u8], text].concat())
    });
    let error = observe(dir.path()).unwrap_err();
    assert!(error.to_string().contains("too many commands"), "{error}");
    assert_eq!(hellos.load(Ordering::Relaxed), 1);
    restore_owner_socket(dir.path());
    owner.finish();
}
