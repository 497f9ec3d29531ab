//! `ritornello soak`: a small store under concurrent load, reconfiguration and kills.

pub mod args;
mod faults;
mod peer;
mod reconfigurer;
mod resources;
mod work;

use args::{SEGMENT_BYTES, SoakArgs};
use peer::Peer;
use reconfigurer::Reconfigurer;
use resources::Resources;
use ritornello_node::Node;
use ritornello_store::Options;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::{Context, open, print, progress};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use work::{CALL_TIMEOUT, LONG_PAGE_BYTES, Totals, Workers};

/// Maximum time for which a cycle works on the open store. A cycle opens the store, works on it,
/// and closes it.
const CYCLE_MAX: Duration = Duration::from_secs(20);
/// Minimum time for which a cycle works on the open store.
const CYCLE_MIN: Duration = Duration::from_millis(700);
/// Bytes scrubbed per second; under load the store scrubs at an eighth of this rate.
const SCRUB_RATE: u64 = 128 << 20;

/// The role of the peer process in a cycle, and how the peer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cycle {
    /// The peer is a client and closes the store.
    Clean,
    /// The peer is a client and is killed.
    ClientKilled,
    /// The peer is the owner and is killed.
    OwnerKilled,
}

/// The report of `soak`.
#[derive(Debug, Serialize)]
struct Report {
    minutes: f64,
    seed: u64,
    operations: u64,
    bytes: u64,
    wrong_bytes: u64,
    /// Damaged pages that the final verification lists: at most 10,000.
    damaged_pages: usize,
    /// Failed calls that do not end the soak: see `Totals::retries` in `work.rs`.
    retries: u64,
    /// Number of successful changes of capacity, directories, codecs and quotas.
    changes: u64,
    /// Number of times the store was reopened, or taken over from a killed owner.
    restarts: u64,
    /// Processes killed under load.
    kills: u64,
    fd_growth: i64,
    thread_growth: i64,
    memory_growth_bytes: i64,
    /// The first error after which the soak had to end; empty without such an error. Wrong bytes
    /// end the soak too, and are not reported here.
    trouble: String,
}

/// Runs `ritornello soak`.
///
/// # Errors
/// If the store cannot be opened, verified or closed, a call hangs, or another process cannot be
/// started, does not open the store or does not end cleanly.
pub fn run(context: &Context, args: &SoakArgs) -> Result<Status, Failure> {
    let options = |dir: &Path| Options {
        scrub_rate: SCRUB_RATE,
        long_page_bytes: LONG_PAGE_BYTES,
        ..Options::new(dir)
    };
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
        return peer::join(&options(dir), args.capacity, args.seed);
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
        totals: Arc::new(Totals::default()),
        restarts: 0,
        kills: 0,
    };
    let total = Duration::from_secs_f64(args.minutes * 60.0);
    let cycle = (total / 9).clamp(CYCLE_MIN, CYCLE_MAX);
    let bar = progress::steps(total.as_secs());
    // Allocate `history` in full, so that its growth does not count as growth of the store's
    // memory.
    let mut history = Vec::with_capacity((total.as_secs() / 20) as usize + 64);
    let started = Instant::now();
    let kinds = [Cycle::Clean, Cycle::ClientKilled, Cycle::OwnerKilled];
    for (number, kind) in (0u64..).zip(kinds.into_iter().cycle()) {
        soak.cycle(kind, cycle, args.seed.wrapping_add(number << 32))?;
        history.push(Resources::now());
        bar.set_position(started.elapsed().as_secs());
        let counted = soak.totals.operations.load(Ordering::Relaxed);
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
    let growth = Resources::growth(&history);
    let totals = &soak.totals;
    let report = Report {
        minutes: started.elapsed().as_secs_f64() / 60.0,
        seed: args.seed,
        operations: totals.operations.load(Ordering::Relaxed),
        bytes: totals.bytes.load(Ordering::Relaxed),
        wrong_bytes: totals.wrong_bytes.load(Ordering::Relaxed),
        damaged_pages,
        retries: totals.retries.load(Ordering::Relaxed),
        changes: totals.changes.load(Ordering::Relaxed),
        restarts: soak.restarts,
        kills: soak.kills,
        fd_growth: growth.fds,
        thread_growth: growth.threads,
        memory_growth_bytes: growth.memory,
        trouble: totals
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
    let passed = report.wrong_bytes == 0 && damaged_pages == 0 && report.trouble.is_empty();
    Ok(if passed { Status::Fine } else { Status::Problems })
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
    totals: Arc<Totals>,
    restarts: u64,
    kills: u64,
}

impl Soak<'_> {
    fn failed(&self) -> bool {
        let fatal = self.totals.fatal.lock().unwrap_or_else(PoisonError::into_inner);
        fatal.is_some() || self.totals.wrong_bytes.load(Ordering::Relaxed) > 0
    }

    /// Opens the store, works on it for `length`, and closes it.
    fn cycle(&mut self, kind: Cycle, length: Duration, seed: u64) -> Result<(), Failure> {
        let start = || Peer::start(self.context, &self.options.dir, self.capacity, !seed);
        let (node, mut peer) = if kind == Cycle::OwnerKilled {
            let mut peer = start()?;
            ready(&mut peer)?;
            (open::with(&self.options)?, peer)
        } else {
            let node = open::with(&self.options)?;
            let mut peer = start()?;
            ready(&mut peer)?;
            (node, peer)
        };
        self.restarts += 1;
        let workers = Workers::start(node.store(), &self.totals, self.capacity, seed, 2, 3)?;
        let dir = self.options.dir.parent().unwrap_or(&self.options.dir);
        let reconfigurer =
            Reconfigurer::start(node.store(), &self.totals, dir, self.capacity, seed)?;
        wait_without_hang(&workers, length / 2)?;
        if kind != Cycle::Clean {
            peer.kill();
            self.kills += 1;
            self.restarts += u64::from(kind == Cycle::OwnerKilled);
        }
        wait_without_hang(&workers, length / 2)?;
        // Stop the workers before the reconfigurer: its last change of capacity may wait until the
        // workers' leases are released.
        if !workers.stop(CALL_TIMEOUT) || !reconfigurer.stop(CALL_TIMEOUT) {
            return Err(call_timed_out());
        }
        if kind == Cycle::Clean && !peer.finish(CALL_TIMEOUT) {
            let line = "the peer process did not close the store and end without an error";
            return Err(Failure::failed(line, "again with RITORNELLO_LOG=info"));
        }
        peer.add_totals(&self.totals);
        node.close()?;
        Ok(())
    }

    /// Verifies every page. Returns the number of damaged pages, at most 10,000.
    fn verify(&self) -> Result<usize, Failure> {
        let node: Arc<Node> = open::with(&self.options)?;
        let engine = node.core().ok_or_else(|| {
            Failure::failed("a process still owns the soak's store", "report this")
        })?;
        let found = engine.verify(false, &mut |_, _| {})?;
        node.close()?;
        Ok(found.findings.len())
    }
}

fn ready(peer: &mut Peer) -> Result<(), Failure> {
    if peer.wait_ready(CALL_TIMEOUT) {
        return Ok(());
    }
    Err(Failure::failed(
        "the peer process did not open the store",
        "again with RITORNELLO_LOG=info",
    ))
}

/// Waits for `length`, and fails as soon as a call of `workers` hangs.
fn wait_without_hang(workers: &Workers, length: Duration) -> Result<(), Failure> {
    let until = Instant::now() + length;
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        std::thread::sleep(left.min(Duration::from_millis(100)));
        if workers.slowest() > CALL_TIMEOUT {
            return Err(call_timed_out());
        }
    }
    Ok(())
}

fn call_timed_out() -> Failure {
    Failure::failed(
        format!(
            "a call has not returned for {} seconds, or its thread panicked",
            CALL_TIMEOUT.as_secs()
        ),
        "`ritornello doctor DIR`; a stack trace of this process shows details",
    )
}

fn show(report: &Report) {
    let mut table = print::table(&["", ""]);
    for (what, value) in [
        ("time", format!("{:.1} minutes", report.minutes)),
        ("operations", print::count(report.operations)),
        ("put and read", print::bytes(report.bytes)),
        ("wrong bytes", print::count(report.wrong_bytes)),
        ("damaged pages at the end", print::count(report.damaged_pages as u64)),
        ("restarts", print::count(report.restarts)),
        ("processes killed", print::count(report.kills)),
        ("calls that may be retried", print::count(report.retries)),
        ("changes of space and settings", print::count(report.changes)),
        ("growth of open files", report.fd_growth.to_string()),
        ("growth of threads", report.thread_growth.to_string()),
        ("growth of memory", print::bytes(report.memory_growth_bytes.unsigned_abs())),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    print::print_stdout(&table.to_string());
    if !report.trouble.is_empty() {
        print::print_stderr(&format!("the soak ended early: {}", report.trouble));
    }
}
