//! Services, their clients, and processes that own stores; each such process runs the test binary
//! again.
#![allow(dead_code, reason = "each test file uses a part")]

use ritornello_format::Scope;
use ritornello_node::{Node, Options, open};
use ritornello_service::{Service, Settings, StoreAccess, Tokens};
use ritornello_store::{Decision, DecisionOutcome, PutOptions};
use ritornello_volume::page_memory::BorrowedPages;
use ritornello_volume::transfer::Control;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const PAGE: u64 = 4 << 10;
pub const PAGES: usize = 6;
/// The request about which each [`Owner`] notes a decision.
pub const REQUEST: &str = "cmpl-1-0-5d41402a";
const VARIABLE: &str = "RITORNELLO_TEST_OWNER";

pub fn options(dir: &Path) -> Options {
    Options { capacity: Some(64 << 20), segment_bytes: Some(1 << 20), ..Options::new(dir) }
}

pub fn scope(model: &str) -> Scope {
    Scope::opaque(model, PAGE, true)
}

pub fn keys() -> Vec<[u8; 16]> {
    (0..PAGES).map(|page| [page as u8 + 1; 16]).collect()
}

/// Puts [`PAGES`] pages in the scope of `model`. Looks up these pages, and the same number of pages
/// that are not stored.
pub fn fill(node: &Node, model: &str) {
    let keys = keys();
    let bytes: Vec<Vec<u8>> = (0..PAGES).map(|page| vec![page as u8; PAGE as usize]).collect();
    let slices: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
    let refs: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    let source = BorrowedPages::new(&slices);
    let (scope, options) = (scope(model), PutOptions::default());
    let store = node.store();
    let put = store.put_batch(&scope, &refs, &source, &options, &Control::default()).unwrap();
    assert_eq!(put.pages, PAGES, "{put:?}");
    let absent: Vec<[u8; 16]> = (0..PAGES).map(|page| [page as u8 + 100; 16]).collect();
    let all: Vec<&[u8]> = keys.iter().chain(&absent).map(<[u8; 16]>::as_slice).collect();
    assert_eq!(store.probe(&scope, &all).unwrap(), PAGES);
}

/// A process that has a store open, with pages of scope `model`.
pub struct Owner {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub role: String,
}

impl Owner {
    /// Starts the process. The test binary must have a test `owner` that calls [`run_as_owner`].
    pub fn start(dir: &Path, model: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "owner", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, format!("{}\n{model}", dir.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut owner = Self { child, input, output, role: String::new() };
        owner.role = owner.hear("role ");
        owner
    }

    fn hear(&mut self, begin: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.trim_end().split_once(begin) {
                return rest.to_owned();
            }
            line.clear();
        }
        panic!("the owner ended before it printed `{begin}`")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets the process close its store and end.
    pub fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the process of [`Owner`], which notes a decision about [`REQUEST`], until its input ends;
/// returns immediately in the process of the tests.
pub fn run_as_owner() {
    let Ok(argument) = std::env::var(VARIABLE) else { return };
    let (dir, model) = argument.split_once('\n').unwrap();
    let node = open(&options(Path::new(dir))).unwrap();
    fill(&node, model);
    let keys = keys();
    let refs: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    let decision = Decision::now(REQUEST, scope(model).id(), DecisionOutcome::Loaded);
    node.store().note_decision(decision.with_pages(&refs));
    // A call for statistics first sends to the owner the decisions that this process has noted.
    node.store().stats().unwrap();
    println!("role {}", node.role().word());
    // A client takes over when the owner has ended.
    let waiting = Arc::clone(&node);
    std::thread::spawn(move || {
        while waiting.ensure_owner().is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    node.close().unwrap();
}

/// Starts a service that observes stores.
pub fn observing(dirs: &[&Path]) -> Service {
    let stores = dirs.iter().map(|dir| StoreAccess::new(dir)).collect();
    start("127.0.0.1:0", None, stores)
}

/// Starts a service of stores that this process has open, with [`TOKENS`].
pub fn operating(nodes: &[Arc<Node>]) -> Service {
    let stores = nodes.iter().map(|node| {
        let access = StoreAccess::new(node.path());
        access.set_open(Some(Arc::clone(node)));
        access
    });
    start("127.0.0.1:0", Some(tokens()), stores.collect())
}

pub fn start(address: &str, tokens: Option<Tokens>, stores: Vec<Arc<StoreAccess>>) -> Service {
    let address = address.parse().unwrap();
    let settings = Settings { address, host_names: Vec::new(), tokens, certificate: None, stores };
    Service::start(settings).unwrap()
}

/// A token of each role.
pub const TOKENS: [(&str, &str); 3] = [
    ("read", "read-0123456789abcdef0123456789"),
    ("operate", "operate-0123456789abcdef0123456789"),
    ("admin", "admin-0123456789abcdef0123456789"),
];

pub fn tokens() -> Tokens {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens");
    let lines: Vec<String> = TOKENS.iter().map(|(role, token)| format!("{role} {token}")).collect();
    std::fs::write(&path, lines.join("\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    Tokens::read(&path).unwrap()
}

/// The header with the token of a role.
pub fn authorization(role: &str) -> String {
    let token = TOKENS.iter().find(|(of, _)| *of == role).unwrap().1;
    format!("Authorization: Bearer {token}")
}

/// Sends a JSON body with the token of a role.
pub fn send_as(role: &str, address: SocketAddr, method: &str, target: &str, body: &str) -> Answer {
    let token = authorization(role);
    let headers = [&*host(address), &token, "Content-Type: application/json"];
    send(address, method, target, &headers, body)
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Parses the bytes of a response.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().unwrap();
        let header = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_ascii_lowercase(), value.trim().to_owned())
        };
        let headers: BTreeMap<_, _> = lines.map(header).collect();
        let is_chunked = headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked");
        let body = if is_chunked { dechunked(body) } else { body.to_owned() };
        Some(Self { status, headers, body })
    }
}

fn dechunked(mut text: &str) -> String {
    let mut body = String::new();
    while let Some((length, rest)) = text.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        body += &rest[..length];
        text = &rest[(length + 2).min(rest.len())..];
    }
    body
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Reads until the service closes the connection.
pub fn read_all(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// Sends a request with these header lines and body, and reads the answer.
pub fn send(
    address: SocketAddr,
    method: &str,
    target: &str,
    headers: &[&str],
    body: &str,
) -> Answer {
    let mut request = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\n");
    for header in headers {
        request += &format!("{header}\r\n");
    }
    if !body.is_empty() {
        request += &format!("Content-Length: {}\r\n", body.len());
    }
    let mut stream = connect(address);
    stream.write_all(format!("{request}\r\n{body}").as_bytes()).unwrap();
    let bytes = read_all(&stream);
    Answer::parse(&bytes).unwrap_or_else(|| panic!("no answer to {method} {target}"))
}

pub fn get(address: SocketAddr, target: &str) -> Answer {
    send(address, "GET", target, &[&host(address)], "")
}

/// Sends 400 requests on one connection, without waiting for answers. Returns how many were refused
/// because of the rate.
pub fn flood(address: SocketAddr, target: &str, headers: &[&str]) -> usize {
    let head = format!("GET {target} HTTP/1.1\r\n{}\r\n", headers.join("\r\n"));
    let stream = connect(address);
    let last = format!("{head}Connection: close\r\n\r\n");
    (&stream).write_all((format!("{head}\r\n").repeat(399) + &last).as_bytes()).unwrap();
    let text = String::from_utf8(read_all(&stream)).unwrap();
    assert_eq!(text.matches("HTTP/1.1 ").count(), 400);
    let refused = text.matches("HTTP/1.1 429").count();
    assert!(refused == 0 || text.contains("retry-after: 1"));
    refused
}

pub fn host(address: SocketAddr) -> String {
    format!("Host: {address}")
}

/// Returns the value of the series that begins with `series`.
pub fn metric(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(series))?;
    Some(line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

/// Waits until `done` returns true; fails after 30 seconds.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < until, "timed out; expected: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
