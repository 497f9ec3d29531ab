//! Peers that do not keep to the protocol. (The owner is this process.)
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_node::{Node, open};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How this version's messages begin.
const GREETING: &[u8] = b"RTRN\x04\0\0\0";

#[test]
fn helper() {
    serve_as_helper();
}

fn own_command(_: &Arc<Node>, other: &str) -> String {
    panic!("what is {other}?")
}

fn connect(dir: &Path) -> UnixStream {
    let stream = UnixStream::connect(dir.join("owner.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

/// Sends, and reads until the owner hangs up.
fn answer_to(dir: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(dir);
    // The owner may have hung up before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn nonsense_costs_its_own_connection_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("put 1 5"), "5");
    let mut seed = 7u64;
    for round in 0..200 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = (seed >> 33) as usize % 300;
        let noise: Vec<u8> =
            (0..length).map(|at| (seed.rotate_left(at as u32 % 64)) as u8).collect();
        answer_to(dir.path(), &noise);
        answer_to(dir.path(), &framed(&noise));
        answer_to(dir.path(), &framed(&[GREETING, noise.as_slice()].concat()));
        if round % 50 == 0 {
            assert_eq!(client.ask("get 1 5"), "5");
        }
    }
    answer_to(dir.path(), &u32::MAX.to_le_bytes());
    answer_to(dir.path(), b"GET / HTTP/1.1\r\n\r\n");
    assert_eq!(client.ask("get 1 5"), "5");
    assert_eq!(node.store().stats().unwrap().catalog.clients, 1);
    client.finish();
    assert_eq!(put(node.store(), 2, 5).unwrap().pages, 5);
}

#[test]
fn another_version_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    let answer = answer_to(dir.path(), &framed(b"RTRN\x63\0\0\0 and whatever version 99 says"));
    assert_eq!(&answer[4..12], GREETING);
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("theirs=99"), "{text}");
}

#[test]
fn a_client_meets_an_owner_of_another_version() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Helper::opened(dir.path());
    // The owner keeps its lock, but somebody speaks for it who is of version 99.
    std::fs::remove_file(dir.path().join("owner.sock")).unwrap();
    let listener = UnixListener::bind(dir.path().join("owner.sock")).unwrap();
    let impostor = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut some = [0; 64];
        let _ = stream.read(&mut some).unwrap();
        stream.write_all(&framed(b"RTRN\x63\0\0\0 come in")).unwrap();
    });
    let error = open(&options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("another version") && error.contains("theirs=99"), "{error}");
    impostor.join().unwrap();
    assert_eq!(owner.ask("put 1 1"), "1");
    owner.finish();
}

#[test]
fn a_name_without_a_lock_gets_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    // Greeting, format 0, a name of 32 digits, pid 1, first.
    let hello = [GREETING, b"\0\x20", b"0123456789abcdef0123456789abcdef", b"\x01\x01"];
    let answer = answer_to(dir.path(), &framed(&hello.concat()));
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("not locked"), "{text}");
}

#[test]
fn a_connection_that_says_nothing_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let idle: Vec<UnixStream> = (0..50).map(|_| connect(dir.path())).collect();
    let mut half = connect(dir.path());
    half.write_all(&[200, 0, 0, 0, b'R']).unwrap();
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("put 1 5"), "5");
    client.finish();
    let started = std::time::Instant::now();
    node.close().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "closing waited for the idle");
    drop((idle, half));
}
