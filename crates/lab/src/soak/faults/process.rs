//! A client of `soak --faults` in the process of the command, which starts, orders and kills the
//! client's own process.

use super::client::UNREPORTED_MAX;
use super::message::{Answer, Order, State, receive, send};
use ritornello_terminal::Context;
use ritornello_terminal::exit::Failure;
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

/// Interval at which a process and its reports are polled.
pub const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Reports of a client, over all its restarts.
#[derive(Debug, Default)]
pub struct Reports {
    /// State of the current process.
    pub state: State,
    /// Numbers of the flushed sequences, which must be found.
    pub flushed: BTreeSet<u64>,
    /// The last answer to [`Order::Check`], until it is taken: the numbers of the lost sequences,
    /// and why the last of them was lost.
    pub checked: Option<(Vec<u64>, String)>,
    /// Sums of the fields of [`State`] with the same names over earlier processes; `slowest` is the
    /// maximum over them.
    pub rounds: u64,
    pub bytes: u64,
    pub wrong_bytes: u64,
    pub slowest: u64,
}

/// A client, whose process can be started again after it ended.
pub struct Process<'a> {
    context: &'a Context,
    /// The client's number, which distinguishes its sequences from the sequences of other clients.
    pub number: u64,
    /// Identity of the store of the soak.
    store: String,
    words: Vec<OsString>,
    log: PathBuf,
    reports: Arc<Mutex<Reports>>,
    running: Option<Running>,
}

struct Running {
    child: Child,
    input: ChildStdin,
    listener: JoinHandle<()>,
}

impl<'a> Process<'a> {
    /// Returns a client, not started yet, of the store with this identity. The client's process
    /// gets the arguments `words`; its log goes to `log`.
    pub fn new(
        context: &'a Context,
        number: u64,
        store: String,
        words: Vec<OsString>,
        log: PathBuf,
    ) -> Self {
        Self { context, number, store, words, log, reports: Arc::default(), running: None }
    }

    /// Starts the process with this capacity of the store, and this soft limit of open files.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(&mut self, capacity: u64, open_files: Option<u64>) -> Result<(), Failure> {
        let Some((program, first)) = self.context.self_command.split_first() else {
            return Err(Failure::failed(
                "the path of this program is unknown",
                "this program by its full path",
            ));
        };
        let (from, live) = {
            let mut reports = self.reports();
            let state = std::mem::take(&mut reports.state);
            reports.rounds += state.rounds;
            reports.bytes += state.bytes;
            reports.wrong_bytes += state.wrong_bytes;
            reports.slowest = reports.slowest.max(state.slowest);
            reports.checked = None;
            // Let sequence numbers start after all numbers that earlier processes of this client
            // reported, or may have used after their last report.
            let last = reports.flushed.last().map_or(0, |last| last + 1);
            let from = state.next.max(last) + UNREPORTED_MAX;
            reports.state.next = from;
            (from, reports.flushed.iter().copied().collect())
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
            return Err(Failure::failed("a client process has no pipes", "report this"));
        };
        send(&mut input, &Order::Adopt { store: self.store.clone(), live });
        let reports = Arc::clone(&self.reports);
        let listener = std::thread::spawn(move || {
            for answer in receive::<Answer>(BufReader::new(output)) {
                let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
                match answer {
                    Answer::State(state) => {
                        let next = state.next.max(reports.state.next);
                        reports.state = State { next, ..state };
                    }
                    Answer::Flushed(sequences) => reports.flushed.extend(sequences),
                    Answer::Deleting(sequences) => {
                        reports.flushed.retain(|number| !sequences.contains(number));
                    }
                    Answer::Checked { lost, why } => reports.checked = Some((lost, why)),
                }
            }
        });
        self.running = Some(Running { child, input, listener });
        Ok(())
    }

    /// Returns the reports so far.
    pub fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an order. Does nothing if the client is not running.
    pub fn order(&mut self, order: &Order) {
        if let Some(running) = &mut self.running {
            send(&mut running.input, order);
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(running) = &self.running {
            let _ = kill_process(Pid::from_child(&running.child), signal);
        }
    }

    /// Returns whether the process runs.
    pub fn is_alive(&mut self) -> bool {
        self.running.as_mut().is_some_and(|running| matches!(running.child.try_wait(), Ok(None)))
    }

    /// Kills the process, and waits for its last reports.
    pub fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            let _ = running.child.kill();
            let _ = running.child.wait();
            let _ = running.listener.join();
        }
    }

    /// Lets the process close the store and end. Returns whether the process ended successfully
    /// within `timeout`; true if no process was running.
    pub fn finish(&mut self, timeout: Duration) -> bool {
        let Some(Running { mut child, input, listener }) = self.running.take() else { return true };
        drop(input);
        let until = Instant::now() + timeout;
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status.success(),
                Ok(None) if Instant::now() < until => std::thread::sleep(POLL_INTERVAL),
                Ok(None) | Err(_) => break false,
            }
        };
        let _ = child.kill();
        let _ = child.wait();
        let _ = listener.join();
        ended
    }

    /// Returns the last eight lines of the log.
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
