//! `ritornello soak`: a small store under everything at once, for as long as wanted.

pub mod args;
mod faults;
mod health;
mod partner;
mod shaper;
mod work;

use crate::exit::{Failure, Status};
use crate::scratch::Scratch;
use crate::{Context, open, print, progress};
use args::SoakArgs;
use health::Health;
use partner::Partner;
use ritornello_node::Node;
use ritornello_store::Options;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use shaper::Shaper;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use work::{Crew, Tally};

/// A call that lasts longer than this hangs.
const HANG: Duration = Duration::from_secs(120);
/// The longest time between two restarts.
const SHIFT_MAX: Duration = Duration::from_secs(20);
/// The shortest.
const SHIFT_MIN: Duration = Duration::from_millis(700);
/// Small segments: there are some even in a small store.
const SEGMENT_BYTES: u64 = 4 << 20;
/// Bytes a second that are scrubbed, an eighth of it while others are at work.
const SCRUB_RATE: u64 = 128 << 20;

/// What a shift does to the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shift {
    /// It is a client, and leaves as it should.
    Clean,
    /// It is a client, and is killed.
    ClientKilled,
    /// It is the owner, and is killed.
    OwnerKilled,
}

/// The answer.
#[derive(Debug, Serialize)]
struct Report {
    minutes: f64,
    seed: u64,
    operations: u64,
    bytes: u64,
    wrong_bytes: u64,
    /// Pages that the last look at everything did not believe.
    damaged_pages: usize,
    /// Calls that were told to try again.
    retries: u64,
    /// Changes of capacity, directories, codecs and quotas.
    changes: u64,
    /// How often the store was opened anew, or taken over from an owner that was killed.
    restarts: u64,
    /// Processes killed at work.
    kills: u64,
    fd_growth: i64,
    thread_growth: i64,
    memory_growth_bytes: i64,
    /// Why the store could not go on; empty.
    trouble: String,
}

/// Runs `ritornello soak`.
///
/// # Errors
/// Where the store cannot be opened, or a call hangs.
pub fn run(context: &Context, args: &SoakArgs) -> Result<Status, Failure> {
    let options = |dir: &Path| Options { scrub_rate: SCRUB_RATE, ..Options::new(dir) };
    if let (Some(dir), Some((number, from))) = (&args.join, args.client) {
        limit_open_files(args.open_files)?;
        let options = Options {
            capacity: Some(args.capacity),
            segment_bytes: Some(SEGMENT_BYTES),
            ..Options::new(dir)
        };
        return Ok(faults::client(options, number, from));
    }
    if args.faults {
        return faults::run(context, args);
    }
    if let Some(dir) = &args.join {
        return partner::join(&options(dir), args.capacity, args.seed);
    }
    let scratch = Scratch::new(&args.dir, "soak")?;
    let dir = scratch.path().join("store");
    let new = Options {
        capacity: Some(args.capacity),
        index: Some(args.index),
        segment_bytes: Some(SEGMENT_BYTES),
        ..options(&dir)
    };
    open::with(&new)?.close()?;
    let mut soak = Soak {
        context,
        options: options(&dir),
        capacity: args.capacity,
        tally: Arc::new(Tally::default()),
        restarts: 0,
        kills: 0,
    };
    let total = Duration::from_secs_f64(args.minutes * 60.0);
    let shift = (total / 9).clamp(SHIFT_MIN, SHIFT_MAX);
    let bar = progress::steps(total.as_secs());
    // Its own length is no growth.
    let mut history = Vec::with_capacity((total.as_secs() / 20) as usize + 64);
    let started = Instant::now();
    let kinds = [Shift::Clean, Shift::ClientKilled, Shift::OwnerKilled];
    for (number, kind) in (0u64..).zip(kinds.into_iter().cycle()) {
        soak.shift(kind, shift, args.seed.wrapping_add(number << 32))?;
        history.push(Health::now());
        bar.set_position(started.elapsed().as_secs());
        let counted = soak.tally.operations.load(Ordering::Relaxed);
        bar.set_message(format!(
            "{} operations, {} restarts",
            print::count(counted),
            soak.restarts
        ));
        if started.elapsed() >= total || soak.failed() {
            break;
        }
    }
    bar.finish_and_clear();
    let damaged_pages = soak.verify()?;
    let growth = Health::growth(&history);
    let tally = &soak.tally;
    let report = Report {
        minutes: started.elapsed().as_secs_f64() / 60.0,
        seed: args.seed,
        operations: tally.operations.load(Ordering::Relaxed),
        bytes: tally.bytes.load(Ordering::Relaxed),
        wrong_bytes: tally.wrong_bytes.load(Ordering::Relaxed),
        damaged_pages,
        retries: tally.retries.load(Ordering::Relaxed),
        changes: tally.changes.load(Ordering::Relaxed),
        restarts: soak.restarts,
        kills: soak.kills,
        fd_growth: growth.fds,
        thread_growth: growth.threads,
        memory_growth_bytes: growth.memory,
        trouble: tally
            .fatal
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .unwrap_or_default(),
    };
    if context.json {
        print::json(&report)
    } else {
        show(&report)
    }
    let well = report.wrong_bytes == 0 && damaged_pages == 0 && report.trouble.is_empty();
    Ok(if well { Status::Fine } else { Status::Problems })
}

fn limit_open_files(soft: Option<u64>) -> Result<(), Failure> {
    let Some(soft) = soft else { return Ok(()) };
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(soft), ..limit })
        .map_err(|error| std::io::Error::from(error).into())
}

struct Soak<'a> {
    context: &'a Context,
    options: Options,
    capacity: u64,
    tally: Arc<Tally>,
    restarts: u64,
    kills: u64,
}

impl Soak<'_> {
    fn failed(&self) -> bool {
        let fatal = self.tally.fatal.lock().unwrap_or_else(PoisonError::into_inner);
        fatal.is_some() || self.tally.wrong_bytes.load(Ordering::Relaxed) > 0
    }

    /// Opens the store, works on it for `length`, and closes it.
    fn shift(&mut self, kind: Shift, length: Duration, seed: u64) -> Result<(), Failure> {
        let start = || Partner::start(self.context, &self.options.dir, self.capacity, !seed);
        let (node, mut partner) = if kind == Shift::OwnerKilled {
            let mut partner = start()?;
            ready(&mut partner)?;
            (open::with(&self.options)?, partner)
        } else {
            let node = open::with(&self.options)?;
            let mut partner = start()?;
            ready(&mut partner)?;
            (node, partner)
        };
        self.restarts += 1;
        let crew = Crew::start(node.store(), &self.tally, self.capacity, seed, 2, 3)?;
        let dir = self.options.dir.parent().unwrap_or(&self.options.dir);
        let shaper = Shaper::start(node.store(), &self.tally, dir, self.capacity, seed)?;
        watch(&crew, length / 2)?;
        if kind != Shift::Clean {
            partner.kill();
            self.kills += 1;
            self.restarts += u64::from(kind == Shift::OwnerKilled);
        }
        watch(&crew, length / 2)?;
        // In this order: what is retained or leased holds a change up for as long as they work.
        if !crew.stop(HANG) || !shaper.stop(HANG) {
            return Err(hang());
        }
        if kind == Shift::Clean && !partner.finish(HANG) {
            return Err(Failure::failed("the other process did not end as it should", ""));
        }
        partner.settle(&self.tally);
        node.close()?;
        Ok(())
    }

    /// Looks at every page there is. Returns how many were not believed.
    fn verify(&self) -> Result<usize, Failure> {
        let node: Arc<Node> = open::with(&self.options)?;
        let engine = node
            .core()
            .ok_or_else(|| Failure::failed("another process owns the store of this soak", ""))?;
        let found = engine.verify(false, &mut |_, _| {})?;
        node.close()?;
        Ok(found.findings.len())
    }
}

fn ready(partner: &mut Partner) -> Result<(), Failure> {
    if partner.wait_ready(HANG) {
        return Ok(());
    }
    Err(Failure::failed("the other process did not open the store", "RUST_LOG=info says more"))
}

/// Waits, and sees to it that nobody hangs.
fn watch(crew: &Crew, length: Duration) -> Result<(), Failure> {
    let until = Instant::now() + length;
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        std::thread::sleep(left.min(Duration::from_millis(100)));
        if crew.slowest() > HANG {
            return Err(hang());
        }
    }
    Ok(())
}

fn hang() -> Failure {
    Failure::failed(
        format!("a call has not come back for {} seconds", HANG.as_secs()),
        "`ritornello doctor DIR`; a stack trace of this process tells more",
    )
}

fn show(report: &Report) {
    let mut table = print::table(&["", ""]);
    for (what, value) in [
        ("time", format!("{:.1} minutes", report.minutes)),
        ("operations", print::count(report.operations)),
        ("moved", print::bytes(report.bytes)),
        ("wrong bytes", print::count(report.wrong_bytes)),
        ("damaged pages at the end", print::count(report.damaged_pages as u64)),
        ("restarts", print::count(report.restarts)),
        ("processes killed", print::count(report.kills)),
        ("told to try again", print::count(report.retries)),
        ("changes of the store", print::count(report.changes)),
        ("more open files", report.fd_growth.to_string()),
        ("more threads", report.thread_growth.to_string()),
        ("more memory", print::bytes(report.memory_growth_bytes.unsigned_abs())),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    print::say(&table.to_string());
    if !report.trouble.is_empty() {
        print::complain(&format!("the store could not go on: {}", report.trouble));
    }
}
