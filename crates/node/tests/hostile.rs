//! Peers that violate the protocol. This process is the owner.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::*;
use ritornello_node::{Node, open};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The first bytes of a hello in protocol version 7.
const GREETING: &[u8] = b"RTRN\x07\0\0\0";

/// No test: the process of a [`Helper`].
#[test]
fn helper() {
    serve_as_helper();
}

/// The request for statistics: it has no fields, so its encoding is the number of its variant.
const STATS: &[u8] = b"\x13";

/// Runs one command as a client that speaks the protocol by hand, in a helper process. `command`
/// may end with a number, by default 1, which is `count` below. The connections of the commands
/// `unauthenticated`, `names`, `connections`, `unread` and `slow` stay open afterwards.
fn own_command(node: &Arc<Node>, command: &str) -> String {
    let dir = node.path();
    let (what, count) = command.split_once(' ').unwrap_or((command, "1"));
    let count: usize = count.parse().unwrap();
    let mut kept: Vec<UnixStream> = Vec::new();
    let said = match what {
        "unauthenticated" => {
            kept.extend((0..count).map(|_| connect(dir)));
            "connected".to_owned()
        }
        // Registers under up to `count` new names, until the owner refuses a name.
        "names" => {
            let raw = || std::mem::ManuallyDrop::new(Raw::new(dir));
            refusal((0..count).map(|_| raw().enter(dir, true)), &mut kept)
        }
        // Opens up to `count` further connections under one name, until the owner refuses one.
        "connections" => {
            let raw = std::mem::ManuallyDrop::new(Raw::new(dir));
            kept.push(raw.enter(dir, true).unwrap());
            refusal((0..count).map(|_| raw.enter(dir, false)), &mut kept)
        }
        // Sends requests endlessly on `count` connections, and reads no response.
        "unread" => {
            for _ in 0..count {
                let raw = Raw::new(dir);
                let mut stream = raw.enter(dir, true).unwrap();
                std::mem::forget(raw);
                let question = framed(STATS).repeat(1000);
                std::thread::spawn(move || while stream.write_all(&question).is_ok() {});
            }
            "asking".to_owned()
        }
        // Announces a message of 16 MiB on each of `count` connections, and sends it byte by byte.
        "slow" => {
            for _ in 0..count {
                let raw = Raw::new(dir);
                let mut stream = raw.enter(dir, true).unwrap();
                std::mem::forget(raw);
                stream.write_all(&(16u32 << 20).to_le_bytes()).unwrap();
                std::thread::spawn(move || {
                    while stream.write_all(b"x").is_ok() {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                });
            }
            "dripping".to_owned()
        }
        // Sends one long message byte by byte until the owner closes the connection. The whole
        // message would take days.
        "drip" => {
            let raw = Raw::new(dir);
            let mut stream = raw.enter(dir, true).unwrap();
            stream.write_all(&(16u32 << 20).to_le_bytes()).unwrap();
            let hung_up_on = (0..2000).any(|_| {
                std::thread::sleep(Duration::from_millis(100));
                stream.write_all(b"x").is_err()
            });
            hung_up_on.to_string()
        }
        // Sends a malformed message of maximum length.
        "long" => {
            let raw = Raw::new(dir);
            let mut stream = raw.enter(dir, true).unwrap();
            stream.write_all(&framed(&vec![0xFF; 16 << 20])).unwrap();
            // The response may contain a newline byte, which would end the helper's answer.
            String::from_utf8_lossy(&read_message(&mut stream)).replace('\n', " ")
        }
        // Sends three requests before it reads the first response.
        "in-a-row" => {
            let raw = Raw::new(dir);
            let mut stream = raw.enter(dir, true).unwrap();
            stream.write_all(&framed(STATS).repeat(3)).unwrap();
            (0..3).filter(|_| read_message(&mut stream).len() > 100).count().to_string()
        }
        _ => panic!("unknown command: {command}"),
    };
    std::mem::forget(kept);
    said
}

/// Opens connections until the owner refuses one. Returns the number of connections in `kept`, and
/// the owner's error.
fn refusal(
    entered: impl Iterator<Item = Result<UnixStream, String>>,
    kept: &mut Vec<UnixStream>,
) -> String {
    for entered in entered {
        match entered {
            Ok(stream) => kept.push(stream),
            Err(why) => return format!("{} {why}", kept.len()),
        }
    }
    "no end".to_owned()
}

/// A client's name with its locked file, for connections on which a test speaks the protocol by
/// hand.
struct Raw {
    name: String,
    _lock: std::fs::File,
}

impl Raw {
    fn new(dir: &Path) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{:016x}{number:016x}", std::process::id());
        let lock = std::fs::File::create(dir.join("clients").join(&name)).unwrap();
        let how = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::fcntl_lock(&lock, how).unwrap();
        Self { name, _lock: lock }
    }

    /// Sends a hello, which says whether the connection is the `first` of the client. Returns the
    /// connection, or the refusal.
    fn enter(&self, dir: &Path, first: bool) -> Result<UnixStream, String> {
        let mut stream = connect(dir);
        // A hello is the greeting, format 1, a name of 32 digits, pid 1, and whether the connection
        // is the client's first.
        let hello = [GREETING, b"\x01\x20", self.name.as_bytes(), &[1, u8::from(first)]].concat();
        stream.write_all(&framed(&hello)).unwrap();
        let answer = read_message(&mut stream);
        // The byte after the greeting is 0 if the owner grants the connection.
        if answer.get(8) == Some(&0) {
            return Ok(stream);
        }
        Err(String::from_utf8_lossy(&answer).into_owned())
    }
}

fn read_message(stream: &mut UnixStream) -> Vec<u8> {
    let mut length = [0; 4];
    let mut message = Vec::new();
    if stream.read_exact(&mut length).is_ok() {
        let length = u64::from(u32::from_le_bytes(length));
        let _ = stream.take(length).read_to_end(&mut message);
    }
    message
}

fn connect(dir: &Path) -> UnixStream {
    let stream = UnixStream::connect(dir.join("owner.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

/// Sends `bytes`, and returns what the owner sends until it closes the connection.
fn answer_to(dir: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(dir);
    // The owner may have closed the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn malformed_message_costs_its_connection_only() {
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
fn unlocked_name_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    // A hello is the greeting, format 1, a name of 32 digits, pid 1, and a 1 for the client's first
    // connection.
    let hello = [GREETING, b"\x01\x20", b"0123456789abcdef0123456789abcdef", b"\x01\x01"];
    let answer = answer_to(dir.path(), &framed(&hello.concat()));
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("not locked"), "{text}");
}

#[test]
fn observer_may_ask_for_statistics_only() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    assert_eq!(put(node.store(), 1, 5).unwrap().pages, 5);
    let samples = include_str!("recorded/messages-8.txt").lines();
    let samples: Vec<(&str, Vec<u8>)> = samples
        .filter_map(|line| line.split_once(' '))
        .map(|(name, hex)| (name, bytes(hex)))
        .collect();
    let hello = samples.iter().find(|(name, _)| *name == "Hello::observer").unwrap();
    let hello = framed(&hello.1);
    let mut refused = 0;
    for (name, request) in samples.iter().filter(|(name, _)| name.starts_with("Request::")) {
        let answer = answer_to(dir.path(), &[&hello[..], &framed(request)].concat());
        let text = String::from_utf8_lossy(&answer);
        if *name == "Request::Stats" {
            assert!(text.contains("cache"), "the answer must name the durability: {text}");
        } else {
            assert!(text.contains("statistics only"), "{name}: {text}");
            refused += 1;
        }
    }
    assert!(refused > 20, "{refused}");
    assert_eq!(probe(node.store(), 1, 5).unwrap(), 5);
    assert_eq!(node.store().stats().unwrap().catalog.clients, 0);
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digits).collect()
}

#[test]
fn empty_name_is_refused_in_version_7() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    // A hello is the greeting, format 1, an empty name, pid 1, and a 1 for the first connection.
    let answer = answer_to(dir.path(), &framed(&[GREETING, b"\x01\0\x01\x01"].concat()));
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("not locked"), "{text}");
}

#[test]
fn silent_connection_delays_no_client() {
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
    assert!(started.elapsed() < Duration::from_secs(5), "closing waited for idle connections");
    drop((idle, half));
}

#[test]
fn unauthenticated_connections_block_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let mut crowd = Helper::opened(dir.path());
    for _ in 0..5 {
        assert_eq!(crowd.ask("unauthenticated 60"), "connected");
        let mut client = Helper::opened(dir.path());
        assert_eq!(client.ask("put 1 5"), "5");
        client.finish();
    }
    assert_eq!(put(node.store(), 2, 5).unwrap().pages, 5);
    crowd.kill();
}

#[test]
fn excess_names_and_connections_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let mut greedy = Helper::opened(dir.path());
    let said = greedy.ask("names 100");
    let admitted: usize = said.split(' ').next().unwrap().parse().unwrap();
    assert!(admitted < 10 && said.contains("too many names"), "{said}");
    let mut other = Helper::opened(dir.path());
    let said = other.ask("connections 100");
    let admitted: usize = said.split(' ').next().unwrap().parse().unwrap();
    assert!((16..40).contains(&admitted) && said.contains("too many connections"), "{said}");
    // The owner still serves a third client, and the two peers whose further names and connections
    // it refused.
    let mut third = Helper::opened(dir.path());
    for (name, helper) in [&mut greedy, &mut other, &mut third].into_iter().enumerate() {
        assert_eq!(helper.ask(&format!("put {name} 5")), "5");
    }
    greedy.kill();
    other.kill();
    eventually("the killed clients are removed", || {
        node.store().stats().unwrap().catalog.clients == 1
    });
    third.finish();
}

#[test]
fn unread_and_slow_connections_delay_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let node = open(&options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("put 1 5"), "5");
    let before = ritornello_volume::heap_bytes();
    let crowd: Vec<Helper> = ["unread 6", "slow 6"]
        .map(|what| {
            let mut rude = Helper::opened(dir.path());
            assert!(!rude.ask(what).is_empty());
            rude
        })
        .into_iter()
        .collect();
    for name in 2..60 {
        assert_eq!(client.ask(&format!("put {name} 5")), "5");
        assert_eq!(client.ask("get 1 5"), "5");
    }
    if let (Some(before), Some(after)) = (before, ritornello_volume::heap_bytes()) {
        let grown = after.wrapping_sub(before).cast_signed();
        assert!(grown < 32 << 20, "the owner's heap grew by {grown} bytes");
    }
    // A stopped peer, which reads no response, delays no client either.
    crowd[0].stop();
    assert_eq!(client.ask("put 60 5"), "5");
    let started = std::time::Instant::now();
    drop(client);
    crowd.into_iter().for_each(|rude| drop(rude.kill()));
    node.close().unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "closing waited for clients that break the protocol"
    );
}

#[test]
fn endless_slow_sender_is_disconnected() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    let mut rude = Helper::opened(dir.path());
    assert_eq!(rude.ask("drip"), "true");
    rude.kill();
}

#[test]
fn long_malformed_message_ends_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    assert!(client.ask("long").contains("malformed"));
    assert_eq!(client.ask("put 1 5"), "5");
    client.finish();
}

#[test]
fn pipelined_requests_are_all_answered() {
    let dir = tempfile::tempdir().unwrap();
    let _node = open(&options(dir.path())).unwrap();
    let mut client = Helper::opened(dir.path());
    assert_eq!(client.ask("in-a-row"), "3");
    client.finish();
}
