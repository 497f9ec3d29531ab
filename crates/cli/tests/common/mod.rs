//! Makes a small store, and runs the command on it.
#![allow(dead_code)] // Each test file uses a part of this module.

use ritornello_format::Scope;
use ritornello_node::Node;
use ritornello_store::{IndexKind, Options, PutOptions};
use ritornello_volume::BorrowedPages;
use ritornello_volume::transfer::Control;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

pub const PAGE: usize = 64 << 10;
pub const PAGES: usize = 24;

/// Makes a temporary directory on the disk of the build folder: `/tmp` may be in memory, where
/// there is no direct I/O to test.
pub fn scratch() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Returns the index that `RITORNELLO_TEST_INDEX` names, or `None` if it is not set.
pub fn index() -> Option<IndexKind> {
    let word = std::env::var("RITORNELLO_TEST_INDEX").ok()?;
    Some(IndexKind::parse(&word).unwrap())
}

pub fn options(dir: &Path) -> Options {
    let mut options = Options::new(dir);
    options.capacity = Some(16 << 20);
    options.segment_bytes = Some(1 << 20);
    options.index = index();
    options
}

pub fn scope() -> Scope {
    Scope::opaque("cli tests", PAGE as u64, true)
}

pub fn keys() -> Vec<[u8; 16]> {
    (0..PAGES).map(|page| [page as u8 + 1; 16]).collect()
}

/// Creates a store of [`PAGES`] pages and leaves it open.
pub fn open_filled(dir: &Path) -> Arc<Node> {
    let node = ritornello_node::open(&options(dir)).unwrap();
    let keys = keys();
    // Each put of eight pages makes one run, so the store has three runs.
    for first in (0..PAGES).step_by(8) {
        let pages: Vec<Vec<u8>> = (first..first + 8).map(|page| vec![page as u8; PAGE]).collect();
        let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
        let batch: Vec<&[u8]> = keys[first..first + 8].iter().map(<[u8; 16]>::as_slice).collect();
        let parent = first.checked_sub(1).map(|before| keys[before].as_slice());
        let source = BorrowedPages::new(&pages);
        let outcome = node
            .store()
            .put_batch(&scope(), &batch, &source, &PutOptions::after(parent), &Control::default())
            .unwrap();
        assert_eq!(outcome.pages, 8, "{outcome:?}");
    }
    node.store().flush().unwrap();
    node
}

/// Creates a store of [`PAGES`] pages and closes it.
pub fn filled(dir: &Path) {
    open_filled(dir).close().unwrap();
}

/// Opens the store in `dir`, and returns how many leading pages of [`keys`] it has.
pub fn probe(dir: &Path) -> usize {
    let node = ritornello_node::open(&Options::new(dir)).unwrap();
    let keys = keys();
    let keys: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    let found = node.store().probe(&scope(), &keys).unwrap();
    node.close().unwrap();
    found
}

pub struct Answer {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.out, self.err))
    }
}

pub fn ritornello(words: &[&str]) -> Answer {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ritornello"));
    let Output { status, stdout, stderr } = command.args(words).output().unwrap();
    Answer {
        code: status.code().unwrap(),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Arguments that let `serve` answer over HTTP on a free port.
pub const HTTP: [&str; 2] = ["--http", "127.0.0.1:0"];

/// Reads the line `listening on http://ADDRESS` of `serve`, and returns the address.
pub fn listening(served: &mut Served) -> SocketAddr {
    let line = served.says();
    line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}")).parse().unwrap()
}

/// Returns status and body of the answer of the service.
pub fn get(address: SocketAddr, target: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let request = format!("GET {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

pub fn stats(address: SocketAddr) -> Value {
    let (status, body) = get(address, "/v1/stats");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// A process of `ritornello serve`.
pub struct Served {
    pub child: Child,
    out: Lines<BufReader<ChildStdout>>,
}

impl Served {
    pub fn start(dir: &Path, more: &[&str]) -> Self {
        Self::spawn(&mut Self::command(dir, more))
    }

    /// Starts the process as systemd does, which then listens on `socket`.
    pub fn notifying(dir: &Path, more: &[&str], socket: &Path) -> Self {
        Self::spawn(Self::command(dir, more).env("NOTIFY_SOCKET", socket))
    }

    fn command(dir: &Path, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ritornello"));
        command.args(["serve", text(dir)]).args(more);
        command
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, out }
    }

    pub fn says(&mut self) -> String {
        self.out.next().unwrap().unwrap()
    }

    /// Reads the next event of `serve --json`. Panics with all further output if the next line is
    /// not JSON.
    pub fn event(&mut self) -> Value {
        let said = self.says();
        serde_json::from_str(&said).unwrap_or_else(|_| {
            let rest: Vec<String> = self.out.by_ref().map_while(Result::ok).collect();
            panic!("no event: {said}{}", rest.join(""))
        })
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn end(mut self, signal: Signal) -> (Option<i32>, Vec<String>) {
        self.signal(signal);
        let said = self.out.by_ref().map(Result::unwrap).collect();
        (self.child.wait().unwrap().code(), said)
    }
}

/// Returns `dir`, and every file and directory below `dir`, with contents (of files) and with the
/// times at which contents and inode were last changed.
pub fn snapshot(dir: &Path) -> BTreeMap<PathBuf, (Vec<u8>, [i64; 4])> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![dir.to_owned()];
    while let Some(path) = waiting.pop() {
        let data = std::fs::symlink_metadata(&path).unwrap();
        let mut bytes = Vec::new();
        if data.is_dir() {
            waiting.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if data.is_file() {
            bytes = std::fs::read(&path).unwrap();
        }
        let times = [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()];
        found.insert(path, (bytes, times));
    }
    found
}
