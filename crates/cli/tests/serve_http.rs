//! `serve` that answers over HTTP: as the owner of one or several stores, and as an observer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{
    HTTP, PAGES, Served, filled, get, listening, ritornello, scratch, snapshot, stats, text,
};
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use serde_json::Value;
use std::fs::{Permissions, set_permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[test]
fn owner_answers_about_its_store() {
    let dir = scratch();
    filled(dir.path());
    let mut served = Served::start(dir.path(), &HTTP);
    let address = listening(&mut served);
    assert!(served.says().starts_with("ready"));
    let found = &stats(address)["stores"][0];
    assert_eq!(found["state"], "owned");
    assert_eq!(found["owner"]["owner_pid"], served.child.id());
    assert_eq!((&found["owner"]["pages"], &found["owner"]["clients"]), (&PAGES.into(), &0.into()));
    assert_eq!(get(address, "/readyz").0, 200);
    let closed = format!("closed: {}", text(dir.path()));
    assert_eq!(served.end(Signal::TERM), (Some(0), vec![closed]));
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn certificate_makes_the_address_https() {
    let dir = scratch();
    let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (chain, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    std::fs::write(&chain, issued.cert.pem()).unwrap();
    std::fs::write(&key, issued.signing_key.serialize_pem()).unwrap();
    set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    let tls = ["--tls-certificate", text(&chain), "--tls-key", text(&key), "--observe"];
    let mut served = Served::start(dir.path(), &[&HTTP[..], &tls].concat());
    let line = served.says();
    let address = line.strip_prefix("listening on https://").unwrap_or_else(|| panic!("{line}"));
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "a request that is not encrypted has no answer");
    assert_eq!(served.end(Signal::TERM).0, Some(0));
}

#[test]
fn observer_never_owns_and_changes_no_file() {
    let dir = scratch();
    filled(dir.path());
    let before = snapshot(dir.path());
    let more = [&HTTP[..], &["--observe"]].concat();
    let mut served = Served::start(dir.path(), &more);
    let address = listening(&mut served);
    assert_eq!(stats(address)["stores"][0]["state"], "unowned");
    assert_eq!(snapshot(dir.path()), before);
    let mut owner = Served::start(dir.path(), &["--must-own"]);
    assert!(owner.says().starts_with("ready"));
    let found = || stats(address)["stores"][0].clone();
    while found()["state"] != "owned" {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(found()["owner"]["owner_pid"], owner.child.id());
    assert_eq!(owner.end(Signal::TERM).0, Some(0));
    assert_eq!(served.end(Signal::TERM), (Some(0), Vec::new()));
}

#[test]
fn several_stores_are_owned_by_one_command() {
    let dirs = [scratch(), scratch()];
    for dir in &dirs {
        filled(dir.path());
    }
    let more = [&HTTP[..], &[text(dirs[1].path()), "--json"]].concat();
    let mut served = Served::start(dirs[0].path(), &more);
    let event = |line: String| serde_json::from_str::<Value>(&line).unwrap();
    let first = event(served.says());
    assert_eq!(first["event"], "listening");
    let address: SocketAddr = first["address"].as_str().unwrap().parse().unwrap();
    let mut ready = [event(served.says()), event(served.says())].map(|event| {
        assert_eq!(event["event"], "ready");
        event["dir"].as_str().unwrap().to_owned()
    });
    ready.sort();
    let mut expected = dirs.each_ref().map(|dir| text(dir.path()).to_owned());
    expected.sort();
    assert_eq!(ready, expected);
    for store in stats(address)["stores"].as_array().unwrap() {
        assert_eq!(store["owner"]["owner_pid"], served.child.id());
    }
    let (code, said) = served.end(Signal::TERM);
    assert_eq!((code, said.len()), (Some(0), 2), "{said:?}");
    assert!(said.iter().all(|line| line.contains("closed")), "{said:?}");
}

#[test]
fn failed_store_ends_the_command_and_closes_the_other_store() {
    let (dir, empty) = (scratch(), scratch());
    filled(dir.path());
    let answer = ritornello(&["serve", text(dir.path()), text(empty.path())]);
    assert_eq!(answer.code, 2, "{}", answer.err);
    assert!(answer.err.contains("capacity"), "{}", answer.err);
    let stat = ritornello(&["stat", text(dir.path()), "--json"]).json();
    // With the index `lsm`, an owner on a busy machine may close without recording a clean end.
    let is_clean = stat["clean"] == true || stat["index"] == "lsm";
    assert!(stat["owner_pid"].is_null() && is_clean, "{stat:#}");
}

#[test]
fn store_that_cannot_be_opened_is_reported_and_tried_again() {
    let dirs = [scratch(), scratch()];
    for dir in &dirs {
        filled(dir.path());
    }
    // The files of this store can be read, and a process that opens it refuses its policy.
    let policy = dirs[1].path().join("policy.toml");
    std::fs::write(&policy, "permit_all = true").unwrap();
    let more = [&HTTP[..], &[text(dirs[1].path()), "--json"]].concat();
    let mut served = Served::start(dirs[0].path(), &more);
    let address: SocketAddr = served.event()["address"].as_str().unwrap().parse().unwrap();
    let mut events = [served.event(), served.event()];
    events.sort_by_key(|event| event["event"].as_str().unwrap().to_owned());
    assert_eq!((&events[0]["event"], &events[1]["event"]), (&"ready".into(), &"reopening".into()));
    assert_eq!(events[1]["dir"], text(dirs[1].path()));
    assert!(events[1]["reason"].as_str().unwrap().contains("permit_all"), "{}", events[1]);

    let up = |dir: &Path| {
        let (status, metrics) = get(address, "/metrics");
        assert_eq!(status, 200, "{metrics}");
        let series = format!("ritornello_up{{store=\"{}\"}} ", text(dir));
        metrics.lines().find_map(|line| line.strip_prefix(&series).map(str::to_owned)).unwrap()
    };
    assert_eq!((&*up(dirs[0].path()), &*up(dirs[1].path())), ("1", "0"));
    let (status, body) = get(address, "/readyz");
    let health: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &health["stores"][0]["state"]), (503, &"owned".into()), "{health}");
    assert_eq!(health["stores"][1]["store"], text(dirs[1].path()));
    assert_eq!(health["stores"][1]["state"], "unavailable");
    assert!(health["stores"][1]["reason"].as_str().unwrap().contains("permit_all"), "{health}");

    std::fs::remove_file(policy).unwrap();
    let ready = served.event();
    assert_eq!((&ready["event"], &ready["dir"]), (&"ready".into(), &text(dirs[1].path()).into()));
    // The service answers from an observation until a second after its end, so the first answers
    // may describe the store before the opening.
    while get(address, "/readyz").0 != 200 {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(up(dirs[1].path()), "1");
    assert_eq!(served.end(Signal::TERM).0, Some(0));
}

#[test]
fn command_ends_when_all_its_stores_fail() {
    let dirs = [scratch(), scratch()];
    let words = ["serve", text(dirs[0].path()), text(dirs[1].path()), "--http", "127.0.0.1:0"];
    let answer = ritornello(&words);
    assert_eq!(answer.code, 2, "{}", answer.err);
    assert!(answer.err.contains("capacity"), "{}", answer.err);
}

#[test]
fn unusable_arguments_are_refused() {
    let dir = scratch();
    filled(dir.path());
    let refused = |more: &[&str], cause: &str| {
        let words = [&["serve", text(dir.path())], more].concat();
        let answer = ritornello(&words);
        assert_eq!(answer.code, 2, "{more:?}");
        assert!(answer.err.contains(cause), "{more:?}: {}", answer.err);
    };
    refused(&["--observe"], "--http");
    refused(&["--http", "127.0.0.1:0", "--tls-certificate", "none"], "--tls-key");
    refused(&["--http", "127.0.0.1:0", "--tls-key", "none"], "--tls-certificate");
    refused(&["--http-host", "name"], "--http");
    refused(&["--observe", "--http", "127.0.0.1:0", "--must-own"], "--must-own");
    refused(&["--http", "0.0.0.0:0"], "--tokens");
    refused(&["--tokens", "file"], "--http");
    refused(&["--http", "localhost"], "invalid");
    refused(&["/other", "--capacity", "1GiB"], "--capacity is for one directory, and 2 are named");
    refused(&["/other", "--index", "run"], "--index is for one directory");
    refused(&[text(dir.path()), "--http", "127.0.0.1:0"], "named twice");
    let same = format!("{}/", text(dir.path()));
    refused(&[&same, "--http", "127.0.0.1:0"], "named twice");
}

#[test]
fn token_file_permits_calls_of_the_store() {
    let dir = scratch();
    filled(dir.path());
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, "operate 0123456789abcdef0123456789abcdef\n").unwrap();
    set_permissions(&tokens, Permissions::from_mode(0o644)).unwrap();
    let more = ["--http", "0.0.0.0:0", "--tokens", text(&tokens)];
    let refused = ritornello(&[&["serve", text(dir.path())], &more[..]].concat());
    assert_eq!((refused.code, refused.err.contains("chmod 600")), (2, true), "{}", refused.err);
    set_permissions(&tokens, Permissions::from_mode(0o600)).unwrap();
    let mut served = Served::start(dir.path(), &more);
    let port = listening(&mut served).port();
    assert!(served.says().starts_with("ready"));
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    assert_eq!(get(address, "/v1/stats").0, 401);
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!(
        "POST /v1/flush HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Authorization: Bearer 0123456789abcdef0123456789abcdef\r\n\
         Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(served.end(Signal::TERM).0, Some(0));
}

/// The socket on which systemd would be notified.
struct Systemd {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Systemd {
    fn new(dir: &Path) -> Self {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { socket, path }
    }

    fn is_told(&self) -> String {
        let mut bytes = [0; 64];
        loop {
            match self.socket.recv(&mut bytes) {
                Ok(length) => return String::from_utf8(bytes[..length].to_vec()).unwrap(),
                // A signal may interrupt a receive that has a timeout: receive again.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn systemd_is_notified_when_the_store_is_open() {
    let dir = scratch();
    filled(dir.path());
    let systemd = Systemd::new(dir.path());
    let served = Served::notifying(dir.path(), &[], &systemd.path);
    assert_eq!(systemd.is_told(), "READY=1\n");
    let stat = ritornello(&["stat", text(dir.path()), "--json"]).json();
    assert_eq!(stat["owner_pid"], served.child.id());
    assert_eq!(served.end(Signal::TERM).0, Some(0));
    assert_eq!(systemd.is_told(), "STOPPING=1\n");
}

#[test]
fn systemd_is_notified_while_the_opening_of_one_store_hangs() {
    let (dirs, notify) = ([scratch(), scratch()], scratch());
    for dir in &dirs {
        filled(dir.path());
    }
    // The lock of the second store has a holder that does not listen: for a minute, its opening
    // waits for this owner.
    let lock = std::fs::File::options().write(true).open(dirs[1].path().join("LOCK")).unwrap();
    rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    let systemd = Systemd::new(notify.path());
    let more = [&HTTP[..], &[text(dirs[1].path()), "--json"]].concat();
    let mut served = Served::notifying(dirs[0].path(), &more, &systemd.path);
    let address: SocketAddr = served.event()["address"].as_str().unwrap().parse().unwrap();
    let ready = served.event();
    assert_eq!((&ready["event"], &ready["dir"]), (&"ready".into(), &text(dirs[0].path()).into()));
    assert_eq!(systemd.is_told(), "READY=1\n");
    let (status, body) = get(address, "/readyz");
    let health: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &health["stores"][0]["state"]), (503, &"owned".into()), "{health}");
    assert_eq!(health["stores"][1]["state"], "unavailable", "{health}");
    drop(lock);
    // The opening has neither failed nor ended before systemd was notified.
    let ready = served.event();
    assert_eq!((&ready["event"], &ready["dir"]), (&"ready".into(), &text(dirs[1].path()).into()));
    assert_eq!(served.end(Signal::TERM).0, Some(0));
    assert_eq!(systemd.is_told(), "STOPPING=1\n", "`READY=1` is sent once");
}
