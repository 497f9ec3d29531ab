//! `ritornello soak --faults`: two clients at work on one store, and one fault after another.
//!
//! ```text
//!   command ──orders──▶ client 0 ─╮
//!      │ ◀──answers──              ├── the store, opened as an engine's process opens it
//!      ╰─────────────▶ client 1 ─╯
//! ```
//!
//! A fault begins, lasts for a random time, and ends. Afterwards every client must complete a put
//! and a get that began after the end, and all flushed sequences must be found with their bytes.

mod client;
mod foreign;
mod kind;
mod message;
mod process;
mod sequence;

pub use client::run as client;

use super::args::{SEGMENT_BYTES, SoakArgs};
use super::work::CALL_TIMEOUT;
use crate::random::mix;
use kind::{Cluster, Fault, FaultKind};
use message::{Order, State, clock};
use process::{POLL_INTERVAL, Process};
use ritornello_store::Options;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::{Context, open, print, progress};
use serde::Serialize;
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// Shortest and longest duration of a fault, in milliseconds. The fault that moves the store's
/// directory away lasts at least until every client works on a new store at the directory's path.
const FAULT_MS: (u64, u64) = (300, 4_000);
/// Maximum time for a client to serve again, to work on a new store, or to answer a check.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Failed checks in a row after which a sequence counts as lost. One failed check does not suffice,
/// because the client may be deleting the sequence.
const CHECK_ATTEMPTS: u32 = 5;
/// Pause between two checks of a sequence that was not found.
const RECHECK_AFTER: Duration = Duration::from_millis(300);

/// Results of all faults of one kind.
#[derive(Debug, Serialize)]
struct Outcome {
    kind: FaultKind,
    times: u64,
    /// Longest time from the end of a fault until every client served again, in seconds.
    slowest_recovery: f64,
}

/// The report of `soak --faults`.
#[derive(Debug, Serialize)]
struct Report {
    minutes: f64,
    seed: u64,
    faults: u64,
    outcomes: Vec<Outcome>,
    rounds: u64,
    bytes: u64,
    wrong_bytes: u64,
    /// Number of flushed sequences that were looked for. A sequence counts once for each fault after
    /// which it was looked for.
    looked_for: u64,
    /// Number of flushed sequences that [`CHECK_ATTEMPTS`] checks in a row did not find.
    lost: u64,
    slowest_recovery: f64,
    /// Number of recoveries longer than `--within`.
    late: u64,
    /// Seconds of the slowest call of a client.
    slowest_call: f64,
    /// Why the soak ended early, or which client did not end cleanly; otherwise empty.
    trouble: String,
}

/// Runs `soak --faults`.
///
/// # Errors
/// If the store cannot be created, a client cannot be started, a fault cannot be injected or ended,
/// or a client does not begin to work on a new store at the path of the moved directory in time.
pub fn run(context: &Context, args: &SoakArgs) -> Result<Status, Failure> {
    let scratch = Scratch::new(&args.dir, "soak")?;
    let dir = scratch.path().join("store");
    let new = Options {
        capacity: Some(args.capacity),
        index: Some(args.index),
        segment_bytes: Some(SEGMENT_BYTES),
        ..Options::new(&dir)
    };
    let made = open::with(&new)?;
    let store = made.store().stats()?.catalog.uuid;
    made.close()?;
    let join = |number: u64| {
        let words: Vec<OsString> = vec!["--faults".into(), "--join".into(), dir.clone().into()];
        let log = scratch.path().join(format!("client-{number}.log"));
        Process::new(context, number, store.clone(), words, log)
    };
    let cluster =
        Cluster { store: dir.clone(), capacity: args.capacity, clients: vec![join(0), join(1)] };
    let mut soak =
        Soak { cluster, random: mix(args.seed), looked_for: 0, lost: 0, trouble: String::new() };
    let mut outcomes: Vec<Outcome> = FaultKind::ALL
        .iter()
        .map(|&kind| Outcome { kind, times: 0, slowest_recovery: 0.0 })
        .collect();
    let total = Duration::from_secs_f64(args.minutes * 60.0);
    let started = Instant::now();
    let bar = progress::steps(total.as_secs());
    soak.cluster.start_all()?;
    soak.recover(clock())?;
    let (mut late, mut at) = (0, 0);
    // The soak ends after its time, if every kind of fault was injected at least once.
    while soak.trouble.is_empty() && (started.elapsed() < total || at < outcomes.len()) {
        if at % outcomes.len() == 0 {
            soak.shuffle(&mut outcomes);
        }
        let now = at % outcomes.len();
        let outcome = &mut outcomes[now];
        at += 1;
        bar.set_position(started.elapsed().as_secs());
        bar.set_message(format!("{} faults, now: {}", at, outcome.kind.text()));
        let recovery = soak.fault(outcome.kind)?.as_secs_f64();
        outcome.times += 1;
        outcome.slowest_recovery = outcome.slowest_recovery.max(recovery);
        late += u64::from(recovery > args.within);
    }
    bar.finish_and_clear();
    outcomes.sort_by_key(|outcome| outcome.kind.text());
    let mut report = Report {
        minutes: started.elapsed().as_secs_f64() / 60.0,
        seed: args.seed,
        faults: at as u64,
        slowest_recovery: outcomes.iter().map(|o| o.slowest_recovery).fold(0.0, f64::max),
        outcomes,
        rounds: 0,
        bytes: 0,
        wrong_bytes: 0,
        looked_for: soak.looked_for,
        lost: soak.lost,
        late,
        slowest_call: 0.0,
        trouble: String::new(),
    };
    for client in &mut soak.cluster.clients {
        if !client.finish(CALL_TIMEOUT) && soak.trouble.is_empty() {
            soak.trouble = format!("client {} did not end cleanly", client.number);
        }
        let reports = client.reports();
        report.rounds += reports.rounds + reports.state.rounds;
        report.bytes += reports.bytes + reports.state.bytes;
        report.wrong_bytes += reports.wrong_bytes + reports.state.wrong_bytes;
        let slowest = reports.slowest.max(reports.state.slowest) as f64 / 1000.0;
        report.slowest_call = report.slowest_call.max(slowest);
    }
    report.trouble = soak.trouble;
    if context.json {
        print::json(&report)
    } else {
        show(&report, args.within)
    }
    if !report.trouble.is_empty() {
        for client in &soak.cluster.clients {
            print::print_stderr(&format!("client {}:\n{}", client.number, client.log_tail()));
        }
    }
    let passed =
        report.wrong_bytes == 0 && report.lost == 0 && late == 0 && report.trouble.is_empty();
    Ok(if passed { Status::Fine } else { Status::Problems })
}

struct Soak<'a> {
    cluster: Cluster<'a>,
    random: u64,
    looked_for: u64,
    lost: u64,
    /// Why the soak must end; empty while the soak continues.
    trouble: String,
}

impl Soak<'_> {
    fn random_below(&mut self, bound: u64) -> u64 {
        self.random = mix(self.random);
        self.random % bound
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.random_below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }

    /// Injects one fault, ends it, and checks the recovery. Returns the duration of the recovery.
    fn fault(&mut self, kind: FaultKind) -> Result<Duration, Failure> {
        let fault = self.cluster.begin(kind)?;
        let length = FAULT_MS.0 + self.random_below(FAULT_MS.1 - FAULT_MS.0);
        std::thread::sleep(Duration::from_millis(length));
        if matches!(fault, Fault::Moved { .. }) {
            self.wait_for_work_below()?;
        }
        self.cluster.end(fault)?;
        let took = self.recover(clock())?;
        for number in 0..self.cluster.clients.len() {
            self.check_flushed(number)?;
        }
        Ok(took)
    }

    /// Waits, after the soak's store was moved away, until every client works on the new store that
    /// the clients made at its path.
    fn wait_for_work_below(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + TIMEOUT;
        let works_below = |state: &State| state.rounds > 0 && !state.is_soak_store;
        while !self.cluster.clients.iter().all(|client| works_below(&client.reports().state)) {
            if Instant::now() > until {
                return Err(Failure::failed(
                    "a client did not begin to work on a new store at the path of the moved store",
                    "report this",
                ));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until every client has completed a round that began after `ended`, on the store of the
    /// soak. Returns the duration of the wait. Sets `trouble` if a client ends, hangs, or needs
    /// longer than [`TIMEOUT`].
    fn recover(&mut self, ended: u64) -> Result<Duration, Failure> {
        let since = Instant::now();
        loop {
            let mut waiting = None;
            for client in &mut self.cluster.clients {
                let is_alive = client.is_alive();
                let reports = client.reports();
                if reports.state.began < ended || !reports.state.is_soak_store {
                    waiting = Some(format!(
                        "client {} {}: {}",
                        client.number,
                        if is_alive { "does not serve" } else { "has ended" },
                        reports.state.trouble
                    ));
                }
                if !is_alive || Duration::from_millis(reports.state.present) > CALL_TIMEOUT {
                    drop(reports);
                    self.trouble = format!("client {} ended or hangs", client.number);
                    return Ok(since.elapsed());
                }
            }
            let Some(waiting) = waiting else { return Ok(since.elapsed()) };
            if since.elapsed() > TIMEOUT {
                self.trouble = waiting;
                return Ok(since.elapsed());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets another client read all flushed sequences of the client at position `number`. Adds to
    /// `lost` the number of sequences that [`CHECK_ATTEMPTS`] checks in a row did not find. Sets
    /// `trouble` if sequences are lost or a check has no answer.
    fn check_flushed(&mut self, number: usize) -> Result<(), Failure> {
        let reader = (number + 1) % self.cluster.clients.len();
        let mut missing: Vec<u64> =
            self.cluster.clients[number].reports().flushed.iter().copied().collect();
        self.looked_for += missing.len() as u64;
        let mut reason = String::new();
        for _ in 0..CHECK_ATTEMPTS {
            if missing.is_empty() || !self.trouble.is_empty() {
                return Ok(());
            }
            let client = self.cluster.clients[number].number;
            let sequences = std::mem::take(&mut missing);
            self.cluster.clients[reader].order(&Order::Check { client, sequences });
            let until = Instant::now() + TIMEOUT;
            let (lost, why) = loop {
                if let Some(checked) = self.cluster.clients[reader].reports().checked.take() {
                    break checked;
                }
                if Instant::now() > until {
                    self.trouble = format!("client {reader} does not answer a check");
                    return Ok(());
                }
                std::thread::sleep(POLL_INTERVAL);
            };
            if !lost.is_empty() {
                std::thread::sleep(RECHECK_AFTER);
            }
            let reports = self.cluster.clients[number].reports();
            missing = lost.into_iter().filter(|number| reports.flushed.contains(number)).collect();
            reason = why;
        }
        if !missing.is_empty() {
            self.lost += missing.len() as u64;
            self.trouble =
                format!("flushed sequences {missing:?} of client {number} are lost: {reason}");
        }
        Ok(())
    }
}

fn show(report: &Report, within: f64) {
    let mut faults = print::table(&["fault", "number of times", "longest recovery"]);
    for outcome in &report.outcomes {
        faults.add_row([
            outcome.kind.text().to_owned(),
            print::count(outcome.times),
            format!("{:.1} s", outcome.slowest_recovery),
        ]);
    }
    print::print_stdout(&faults.to_string());
    let mut table = print::table(&["", ""]);
    for (what, value) in [
        ("time", format!("{:.1} minutes", report.minutes)),
        ("faults", print::count(report.faults)),
        ("rounds of put and get", print::count(report.rounds)),
        ("put and read", print::bytes(report.bytes)),
        ("wrong bytes", print::count(report.wrong_bytes)),
        ("flushed sequences looked for", print::count(report.looked_for)),
        ("flushed sequences not found", print::count(report.lost)),
        ("recoveries longer than --within", print::count(report.late)),
        ("--within", format!("{within:.0} s")),
        ("slowest call", format!("{:.1} s", report.slowest_call)),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    print::print_stdout(&table.to_string());
    if !report.trouble.is_empty() {
        print::print_stderr(&format!("the soak failed: {}", report.trouble));
    }
}
