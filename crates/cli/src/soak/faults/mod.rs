//! `ritornello soak --faults`: two clients at work on one store, and one fault after another.
//!
//! ```text
//!   command ──orders──▶ client 0 ─╮
//!      │ ◀──answers──              ├── the store, opened as an engine's process opens it
//!      ╰─────────────▶ client 1 ─╯
//! ```
//!
//! A fault is made, lasts for some seconds, and is ended. Then every client must complete a put and a get
//! that began after its end, and everything that a flush has covered must be found, with its bytes.

mod client;
mod foreign;
mod kind;
mod message;
mod process;
mod sequence;

pub use client::run as client;

use super::args::SoakArgs;
use super::work::mix;
use super::{HANG, SEGMENT_BYTES};
use crate::exit::{Failure, Status};
use crate::scratch::Scratch;
use crate::{Context, open, print, progress};
use kind::{Fault, Kind, Scene};
use message::{Order, State, clock};
use process::{LOOK, Process};
use ritornello_store::Options;
use serde::Serialize;
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// Shortest and longest duration of a fault, in milliseconds.
const LENGTH: (u64, u64) = (300, 4_000);
/// A client that does not serve by then never will.
const PATIENCE: Duration = Duration::from_secs(120);
/// A sequence counts as lost if it is not found this often in a row: it may have been deleted just then.
const LOOKS: u32 = 5;
/// Between those.
const LOOK_AGAIN: Duration = Duration::from_millis(300);

/// Results of all faults of one kind.
#[derive(Debug, Serialize)]
struct Outcome {
    kind: Kind,
    times: u64,
    /// From the end of a fault until every client served again: the longest, in seconds.
    slowest_recovery: f64,
}

/// The answer.
#[derive(Debug, Serialize)]
struct Report {
    minutes: f64,
    seed: u64,
    faults: u64,
    outcomes: Vec<Outcome>,
    rounds: u64,
    bytes: u64,
    wrong_bytes: u64,
    /// Sequences that a flush had covered and that were looked for, in all looks.
    looked_for: u64,
    /// Of them, those that were not found.
    lost: u64,
    slowest_recovery: f64,
    /// Recoveries that lasted longer than `--within`.
    late: u64,
    /// Seconds that the slowest call of a client lasted.
    slowest_call: f64,
    /// What ended the soak early; "" if nothing did.
    trouble: String,
}

/// Runs the command.
///
/// # Errors
/// Where the store cannot be made, or a fault cannot.
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
    let scene =
        Scene { store: dir.clone(), capacity: args.capacity, clients: vec![join(0), join(1)] };
    let mut soak =
        Soak { scene, dice: mix(args.seed), looked_for: 0, lost: 0, trouble: String::new() };
    let mut outcomes: Vec<Outcome> =
        Kind::ALL.iter().map(|&kind| Outcome { kind, times: 0, slowest_recovery: 0.0 }).collect();
    let total = Duration::from_secs_f64(args.minutes * 60.0);
    let started = Instant::now();
    let bar = progress::steps(total.as_secs());
    soak.scene.start_all()?;
    soak.recover(clock())?;
    let (mut late, mut at) = (0, 0);
    // Every kind once at least.
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
    for client in &mut soak.scene.clients {
        if !client.finish(HANG) && soak.trouble.is_empty() {
            soak.trouble = format!("client {} did not end as it should", client.number);
        }
        let heard = client.heard();
        report.rounds += heard.rounds + heard.state.rounds;
        report.bytes += heard.bytes + heard.state.bytes;
        report.wrong_bytes += heard.wrong_bytes + heard.state.wrong_bytes;
        let slowest = heard.slowest.max(heard.state.slowest) as f64 / 1000.0;
        report.slowest_call = report.slowest_call.max(slowest);
    }
    report.trouble = soak.trouble;
    if context.json {
        print::json(&report)
    } else {
        show(&report, args.within)
    }
    if !report.trouble.is_empty() {
        for client in &soak.scene.clients {
            print::complain(&format!("client {}:\n{}", client.number, client.log_tail()));
        }
    }
    let well =
        report.wrong_bytes == 0 && report.lost == 0 && late == 0 && report.trouble.is_empty();
    Ok(if well { Status::Fine } else { Status::Problems })
}

struct Soak<'a> {
    scene: Scene<'a>,
    dice: u64,
    looked_for: u64,
    lost: u64,
    /// Why it cannot go on.
    trouble: String,
}

impl Soak<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.dice = mix(self.dice);
        self.dice % bound
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }

    /// Makes one fault, ends it, and sees to it that all is as before. Returns how long that took.
    fn fault(&mut self, kind: Kind) -> Result<Duration, Failure> {
        let fault = self.scene.begin(kind)?;
        let length = LENGTH.0 + self.below(LENGTH.1 - LENGTH.0);
        std::thread::sleep(Duration::from_millis(length));
        if matches!(fault, Fault::Moved { .. }) {
            self.wait_for_work_below()?;
        }
        self.scene.end(fault)?;
        let took = self.recover(clock())?;
        for number in 0..self.scene.clients.len() {
            self.look(number)?;
        }
        Ok(took)
    }

    /// Waits until every client works on the store that was made while the other one was away.
    fn wait_for_work_below(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        let works_below = |state: &State| state.rounds > 0 && !state.is_home;
        while !self.scene.clients.iter().all(|client| works_below(&client.heard().state)) {
            if Instant::now() > until {
                return Err(Failure::failed("no store was made where the disk is late", ""));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits until every client has completed a round on the store that began after `ended`.
    fn recover(&mut self, ended: u64) -> Result<Duration, Failure> {
        let since = Instant::now();
        loop {
            let mut waiting = None;
            for client in &mut self.scene.clients {
                let is_alive = client.is_alive();
                let heard = client.heard();
                if heard.state.began < ended || !heard.state.is_home {
                    waiting = Some(format!(
                        "client {} {}: {}",
                        client.number,
                        if is_alive { "does not serve" } else { "has ended" },
                        heard.state.trouble
                    ));
                }
                if !is_alive || Duration::from_millis(heard.state.present) > HANG {
                    drop(heard);
                    self.trouble = format!("client {} ended or hangs", client.number);
                    return Ok(since.elapsed());
                }
            }
            let Some(waiting) = waiting else { return Ok(since.elapsed()) };
            if since.elapsed() > PATIENCE {
                self.trouble = waiting;
                return Ok(since.elapsed());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Has another client look for everything that a client's flushes have covered.
    fn look(&mut self, number: usize) -> Result<(), Failure> {
        let reader = (number + 1) % self.scene.clients.len();
        let mut missing: Vec<u64> =
            self.scene.clients[number].heard().flushed.iter().copied().collect();
        self.looked_for += missing.len() as u64;
        let mut said = String::new();
        for _ in 0..LOOKS {
            if missing.is_empty() || !self.trouble.is_empty() {
                return Ok(());
            }
            let client = self.scene.clients[number].number;
            let sequences = std::mem::take(&mut missing);
            self.scene.clients[reader].order(&Order::Check { client, sequences });
            let until = Instant::now() + PATIENCE;
            let (lost, why) = loop {
                if let Some(checked) = self.scene.clients[reader].heard().checked.take() {
                    break checked;
                }
                if Instant::now() > until {
                    self.trouble = format!("client {reader} does not answer");
                    return Ok(());
                }
                std::thread::sleep(LOOK);
            };
            if !lost.is_empty() {
                std::thread::sleep(LOOK_AGAIN);
            }
            let heard = self.scene.clients[number].heard();
            missing = lost.into_iter().filter(|number| heard.flushed.contains(number)).collect();
            said = why;
        }
        if !missing.is_empty() {
            self.lost += missing.len() as u64;
            self.trouble = format!("flushed and not found: {missing:?} of client {number}: {said}");
        }
        Ok(())
    }
}

fn show(report: &Report, within: f64) {
    let mut faults = print::table(&["fault", "times", "served again within"]);
    for outcome in &report.outcomes {
        faults.add_row([
            outcome.kind.text().to_owned(),
            print::count(outcome.times),
            format!("{:.1} s", outcome.slowest_recovery),
        ]);
    }
    print::say(&faults.to_string());
    let mut table = print::table(&["", ""]);
    for (what, value) in [
        ("time", format!("{:.1} minutes", report.minutes)),
        ("faults", print::count(report.faults)),
        ("rounds of put and get", print::count(report.rounds)),
        ("moved", print::bytes(report.bytes)),
        ("wrong bytes", print::count(report.wrong_bytes)),
        ("flushed sequences looked for", print::count(report.looked_for)),
        ("not found", print::count(report.lost)),
        ("recoveries that took longer than allowed", print::count(report.late)),
        ("allowed", format!("{within:.0} s")),
        ("slowest call", format!("{:.1} s", report.slowest_call)),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    print::say(&table.to_string());
    if !report.trouble.is_empty() {
        print::complain(&format!("ended early: {}", report.trouble));
    }
}
