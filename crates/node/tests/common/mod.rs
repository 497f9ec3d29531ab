//! Helper processes: the test binary, run again, executes commands from its standard input.
#![allow(dead_code, reason = "each test file uses its own part")]

use ritornello_format::{Result, Scope};
use ritornello_node::{Node, Observed, Options, observe, open};
use ritornello_store::{Decision, DecisionOutcome, IndexKind, Outcome, PutOptions, Store};
use ritornello_volume::page_memory::{BorrowedPages, BorrowedPagesMut};
use ritornello_volume::transfer::Control;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
pub const PAGE: u64 = 4 << 10;
pub const CAPACITY: u64 = 64 * MIB;

const MARK: &str = "helper> ";
const VARIABLE: &str = "RITORNELLO_TEST_HELPER";

/// Returns the options of a test's store. The environment variable `RITORNELLO_TEST_INDEX` names
/// the index.
pub fn options(dir: &Path) -> Options {
    let index = std::env::var("RITORNELLO_TEST_INDEX").ok();
    Options {
        capacity: Some(CAPACITY),
        segment_bytes: Some(MIB),
        index: index.map(|word| IndexKind::parse(&word).unwrap()),
        ..Options::new(dir)
    }
}

pub fn scope() -> Scope {
    Scope::opaque("node tests", PAGE, true)
}

/// Returns the keys of the leading `pages` pages of a sequence: a test's prompt, which `name`
/// identifies.
pub fn keys(name: u64, pages: usize) -> Vec<Vec<u8>> {
    (0..pages as u64)
        .map(|n| [name.to_le_bytes(), n.to_le_bytes(), [7; 8], [9; 8]].concat())
        .collect()
}

pub fn refs(keys: &[Vec<u8>]) -> Vec<&[u8]> {
    keys.iter().map(Vec::as_slice).collect()
}

pub fn page(key: &[u8]) -> Vec<u8> {
    let mut x = key
        .iter()
        .fold(1u64, |x, b| x.rotate_left(9).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(*b));
    let word = |_| {
        x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(23) ^ 0x94d0_49bb_1331_11eb;
        x.to_le_bytes()
    };
    (0..PAGE / 8).map(word).collect::<Vec<_>>().into_flattened()
}

pub fn put(store: &Store, name: u64, pages: usize) -> Result<Outcome> {
    let keys = keys(name, pages);
    let bytes: Vec<Vec<u8>> = keys.iter().map(|key| page(key)).collect();
    let slices: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&slices);
    store.put_batch(&scope(), &refs(&keys), &source, &PutOptions::default(), &Control::default())
}

/// Gets the leading `pages` pages of the sequence `name`, and panics on wrong bytes. Returns the
/// number of leading pages read.
pub fn get(store: &Store, name: u64, pages: usize) -> Result<usize> {
    let keys = keys(name, pages);
    let mut bytes = vec![vec![0xEE; PAGE as usize]; pages];
    let mut slices: Vec<&mut [u8]> = bytes.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let outcome = store.get_batch(&scope(), &refs(&keys), &target, &Control::default())?;
    drop(target);
    for (at, key) in keys.iter().enumerate() {
        assert!(!outcome.ok[at] || bytes[at] == page(key), "WRONG BYTES in {name}, page {at}");
    }
    Ok(outcome.pages)
}

pub fn probe(store: &Store, name: u64, pages: usize) -> Result<usize> {
    store.probe(&scope(), &refs(&keys(name, pages)))
}

/// Looks up pages, and records for the request `id` the decision to load the found pages, or a miss
/// if no page is found.
pub fn decide(store: &Store, id: &str, name: u64, pages: usize) {
    let keys = keys(name, pages);
    let found = store.probe(&scope(), &refs(&keys)).unwrap() as u32;
    let outcome = if found > 0 { DecisionOutcome::Loaded } else { DecisionOutcome::Missed };
    let decision = Decision::now(id, scope().id(), outcome).with_pages(&refs(&keys));
    store.note_decision(Decision { found, loaded: found, ..decision });
}

/// Waits until `done` returns true. Fails after 30 seconds; the failure names the expected state,
/// `what`.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < until, "timed out; expected: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that opens a store and executes commands.
pub struct Helper {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts a helper; the test binary must have a test `helper` that calls [`serve_as_helper`].
    pub fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "helper", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// Starts a helper that has the store open.
    pub fn opened(dir: &Path) -> Self {
        let mut helper = Self::start(dir);
        let role = helper.ask("open");
        assert!(role == "owner" || role == "client", "{role}");
        helper
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
        self.input.flush().unwrap();
    }

    /// Returns the helper's next answer; an empty string if the helper is dead.
    pub fn listen(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap_or(0) > 0 {
            if let Some((_, answer)) = line.split_once(MARK) {
                return answer.trim_end().to_owned();
            }
            line.clear();
        }
        String::new()
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.listen()
    }

    pub fn signal(&self, signal: i32) {
        let status = Command::new("kill")
            .args([format!("-{signal}"), self.pid().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    /// Sends SIGSTOP, and waits until all threads of the helper have stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.pid());
        let is_stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        };
        eventually("all threads of the process have stopped", || {
            std::fs::read_dir(&tasks).unwrap().flatten().all(is_stopped)
        });
    }

    /// Sends SIGKILL, and waits until the helper is dead. Returns its answers that were not read.
    pub fn kill(mut self) -> Vec<String> {
        self.child.kill().unwrap();
        let said =
            std::iter::from_fn(|| Some(self.listen()).filter(|said| !said.is_empty())).collect();
        self.child.wait().unwrap();
        said
    }

    pub fn finish(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}

pub fn say(what: impl std::fmt::Display) {
    println!("{MARK}{what}");
    std::io::stdout().flush().unwrap();
}

/// The main loop of a helper process; does nothing in the test process itself.
pub fn serve_as_helper() {
    let Some(dir) = std::env::var_os(VARIABLE) else { return };
    let mut node: Option<Arc<Node>> = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let answer: Result<String> = (|| {
            if words[0] == "open" {
                let opened = open(&options(Path::new(&dir)))?;
                let role = opened.role().word().to_owned();
                node = Some(opened);
                return Ok(role);
            }
            if words[0] == "observe" {
                return Ok(match observe(Path::new(&dir))? {
                    Observed::Owned(stats) => {
                        let is_poisoned = stats.poisoned.is_some();
                        format!("{}, poisoned: {is_poisoned}", stats.owner_pid)
                    }
                    Observed::Unowned(_) => "unowned".to_owned(),
                });
            }
            let node = node.as_ref().unwrap();
            let store = node.store();
            Ok(match words[0] {
                "role" => node.role().word().to_owned(),
                "close" => node.close().map(|()| "closed".to_owned())?,
                "put" => put(store, number(1), number(2) as usize)?.pages.to_string(),
                "get" => get(store, number(1), number(2) as usize)?.to_string(),
                "probe" => probe(store, number(1), number(2) as usize)?.to_string(),
                "decide" => {
                    decide(store, words[1], number(2), number(3) as usize);
                    "decided".to_owned()
                }
                "flush" => store.flush().map(|()| "flushed".to_owned())?,
                "lease" => {
                    let keys = keys(number(1), number(2) as usize);
                    let ttl = Duration::from_secs(600);
                    store.lease(&scope(), &refs(&keys), ttl)?.pages.to_string()
                }
                "work" => work(store, number(1), number(2) as usize, number(3)),
                _ => crate::own_command(node, &line),
            })
        })();
        say(answer.unwrap_or_else(|error| format!("{error:?}")));
    }
    if let Some(node) = node {
        node.close().unwrap();
    }
}

/// Puts and flushes `count` sequences with the names `first`, `first + 1` and so on. Prints the
/// name of each flushed sequence, and idles after the last sequence.
fn work(store: &Store, first: u64, pages: usize, count: u64) -> ! {
    for name in first..first + count {
        match put(store, name, pages) {
            Ok(outcome) if outcome.pages == pages => match store.flush() {
                Ok(()) => say(name),
                Err(error) => eprintln!("flush of {name}: {error:?}"),
            },
            Ok(outcome) => eprintln!(
                "put of {name}: {} of {pages} pages, then {}",
                outcome.pages, outcome.reason
            ),
            Err(error) => eprintln!("put of {name}: {error:?}"),
        }
    }
    loop {
        std::thread::park();
    }
}
