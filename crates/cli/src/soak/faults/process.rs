//! A client's process, as the command sees it.

use super::client::UNHEARD;
use super::message::{Answer, Order, State, hear, tell};
use crate::Context;
use crate::exit::Failure;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks at a process or at what it said.
pub const LOOK: Duration = Duration::from_millis(10);

/// Everything reported by a client, over all its restarts.
#[derive(Debug, Default)]
pub struct Heard {
    /// Of its present life.
    pub state: State,
    /// Sequences that must be found.
    pub flushed: BTreeSet<u64>,
    /// The last answer to [`Order::Check`], until it is taken.
    pub checked: Option<(Vec<u64>, String)>,
    /// Of former lives.
    pub rounds: u64,
    pub bytes: u64,
    pub wrong_bytes: u64,
    pub slowest: u64,
}

/// One client, started again whenever it was ended.
pub struct Process<'a> {
    context: &'a Context,
    /// Tells its sequences from others'.
    pub number: u64,
    /// Identity of the store.
    store: String,
    words: Vec<OsString>,
    log: PathBuf,
    heard: Arc<Mutex<Heard>>,
    life: Option<Life>,
}

struct Life {
    child: Child,
    input: ChildStdin,
    listener: JoinHandle<()>,
}

impl<'a> Process<'a> {
    /// A client of the store with this identity, not started yet. It is started with `words`; its log
    /// goes to `log`.
    pub fn new(
        context: &'a Context,
        number: u64,
        store: String,
        words: Vec<OsString>,
        log: PathBuf,
    ) -> Self {
        Self { context, number, store, words, log, heard: Arc::default(), life: None }
    }

    /// Starts it, with this capacity and under this soft limit of open files.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&mut self, capacity: u64, open_files: Option<u64>) -> Result<(), Failure> {
        let Some((program, first)) = self.context.again.split_first() else {
            return Err(Failure::failed(
                "this command does not know how to start itself again",
                "",
            ));
        };
        let (from, live) = {
            let mut heard = self.heard();
            let state = std::mem::take(&mut heard.state);
            heard.rounds += state.rounds;
            heard.bytes += state.bytes;
            heard.wrong_bytes += state.wrong_bytes;
            heard.slowest = heard.slowest.max(state.slowest);
            heard.checked = None;
            // A life that ended before its first round has said no number.
            let last = heard.flushed.last().map_or(0, |last| last + 1);
            let from = state.next.max(last) + UNHEARD;
            heard.state.next = from;
            (from, heard.flushed.iter().copied().collect())
        };
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        let mut child = Command::new(program)
            .args(first)
            .arg("soak")
            .args(&self.words)
            .arg(format!("--client={}:{from}", self.number))
            .arg(format!("--capacity={capacity}"))
            .args(open_files.map(|soft| format!("--open-files={soft}")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::failed("a client has no pipes", ""));
        };
        tell(&mut input, &Order::Adopt { store: self.store.clone(), live });
        let heard = Arc::clone(&self.heard);
        let listener = std::thread::spawn(move || {
            for answer in hear::<Answer>(BufReader::new(output)) {
                let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                match answer {
                    Answer::State(state) => {
                        let next = state.next.max(heard.state.next);
                        heard.state = State { next, ..state };
                    }
                    Answer::Flushed(sequences) => heard.flushed.extend(sequences),
                    Answer::Deleting(sequences) => {
                        heard.flushed.retain(|number| !sequences.contains(number));
                    }
                    Answer::Checked { lost, why } => heard.checked = Some((lost, why)),
                }
            }
        });
        self.life = Some(Life { child, input, listener });
        Ok(())
    }

    /// The reports so far.
    pub fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an order. Does nothing if the client is not running.
    pub fn order(&mut self, order: &Order) {
        if let Some(life) = &mut self.life {
            tell(&mut life.input, order);
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(life) = &self.life {
            let _ = kill_process(Pid::from_child(&life.child), signal);
        }
    }

    /// Whether it runs.
    pub fn is_alive(&mut self) -> bool {
        self.life.as_mut().is_some_and(|life| matches!(life.child.try_wait(), Ok(None)))
    }

    /// Ends it at once. All that it said is heard then.
    pub fn kill(&mut self) {
        if let Some(mut life) = self.life.take() {
            let _ = life.child.kill();
            let _ = life.child.wait();
            let _ = life.listener.join();
        }
    }

    /// Lets it close the store and end. Returns whether it did in time.
    pub fn finish(&mut self, patience: Duration) -> bool {
        let Some(Life { mut child, input, listener }) = self.life.take() else { return true };
        drop(input);
        let until = Instant::now() + patience;
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status.success(),
                Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
                Ok(None) | Err(_) => break false,
            }
        };
        let _ = child.kill();
        let _ = child.wait();
        let _ = listener.join();
        ended
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(8)..].join("\n")
    }
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}
