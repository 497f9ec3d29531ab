//! `ritornello bench host`: a store in memory against memcpy. The module `report` defines and
//! prints the figures.

mod report;

use super::disk::in_memory;
use super::driver::LoadDriver;
use super::quantile::median;
use super::shape::Shape;
use clap::Args;
use report::{Machine, Report, Row};
use ritornello_codec::Codec;
use ritornello_format::Scope;
use ritornello_store::{Options, SEGMENT_BYTES};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, open, progress};
use ritornello_volume::baseline::{Rate, copy_threads};
use std::path::PathBuf;

/// Arguments of `bench host`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Each of --runs rounds creates a store in memory, puts --total bytes into it, clears
it, puts --total bytes again over the same memory, reopens it and gets them twice; and copies
--total bytes with memcpy, page by page, from private memory, in huge pages where the machine has
them, to the target of the gets, with as many threads as a get. Every second round begins with
memcpy, all other rounds end with it. A ratio is the rate of a put or get divided by memcpy's rate
in the same round; the report has medians over the rounds. A put or get is 64 pages. Every byte read
is compared with the byte put; the comparison is not timed.

Examples:
  ritornello bench host
  ritornello bench host --page-bytes 192KiB --total 1GiB --json | jq '.get.ratio'")]
pub struct HostArgs {
    /// A directory in memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Bytes per page
    #[arg(long, default_value = "2MiB", value_parser = size)]
    pub page_bytes: u64,
    /// Bytes of each measurement of put, get and memcpy, rounded down to whole calls of 64 pages,
    /// at least two calls
    #[arg(long, default_value = "512MiB", value_parser = size)]
    pub total: u64,
    /// Number of rounds; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
}

/// Pages per put and per get.
const CALL_PAGES: u32 = 64;

fn shape(args: &HostArgs) -> Shape {
    let scope = Scope::opaque("ritornello bench host", args.page_bytes, true);
    let (page_bytes, sequence_pages) = (args.page_bytes, CALL_PAGES);
    let sequences = (args.total / page_bytes / u64::from(CALL_PAGES)).clamp(2, 1 << 20) as u32;
    Shape { scope, codec: Codec::Raw, page_bytes, sequence_pages, sequences }
}

/// Rates of one round: a put into unused memory, a put over used memory, a get without mapped
/// segments, a second get, and a copy.
struct Round {
    fresh: Rate,
    put: Rate,
    first: Rate,
    get: Rate,
    copy: Rate,
}

/// Measures and prints the report.
///
/// # Errors
/// If the directory is not in memory, memory does not suffice, a call fails, or wrong bytes are
/// read.
pub fn run(context: &Context, args: &HostArgs) -> Result<Status, Failure> {
    let shape = shape(args);
    if !in_memory(&args.dir) {
        return Err(Failure::unusable(
            format!("{} is not in memory", args.dir.display()),
            "--dir with a directory on tmpfs, such as /dev/shm",
        ));
    }
    let steps = progress::steps(u64::from(args.runs));
    let mut driver = LoadDriver::new(&shape)?;
    let from = driver.allocate_like_window()?;
    let (mut rounds, mut machine) = (Vec::new(), Machine::default());
    for round in 0..args.runs {
        steps.set_message("putting, getting, copying");
        // Copy first in every second round, otherwise last, so that a drift of the machine affects
        // the copies and the store's transfers equally.
        let before = (round % 2 == 0).then(|| driver.copy(&from));
        let scratch = Scratch::new(&args.dir, "host")?;
        let mut options = Options::new(scratch.path().join("store"));
        options.capacity = Some(shape.capacity(SEGMENT_BYTES)?);
        let node = open::with(&options)?;
        let fresh = driver.put(node.store(), 0, shape.sequences)?;
        node.store().clear()?;
        node.store().flush()?;
        let put = driver.put(node.store(), 1, shape.sequences)?;
        node.close()?;
        // Open the store anew, as a starting engine does: no segment is mapped.
        let node = open::with(&options)?;
        let first = driver.get(node.store(), 1, shape.sequences)?;
        let get = driver.get(node.store(), 1, shape.sequences)?;
        let io = node.store().stats()?.catalog.io;
        machine = Machine {
            dir: args.dir.display().to_string(),
            io: io.mode,
            warnings: io.warnings,
            threads: copy_threads(CALL_PAGES as usize, u64::from(CALL_PAGES) * shape.page_bytes),
        };
        node.close()?;
        drop(scratch);
        let copy = before.unwrap_or_else(|| driver.copy(&from));
        rounds.push(Round { fresh, put, first, get, copy });
        steps.inc(1);
    }
    steps.finish_and_clear();
    let row = |of: &dyn Fn(&Round) -> Rate| {
        let ratios: Vec<f64> =
            rounds.iter().map(|round| of(round).gib_s() / round.copy.gib_s()).collect();
        let middle = |what: &dyn Fn(Rate) -> f64| {
            median(&rounds.iter().map(|round| what(of(round))).collect::<Vec<_>>())
        };
        Row {
            gib_s: middle(&|rate| rate.gib_s()),
            cpu_s_per_gib: middle(&|rate| rate.cpu_s_per_gib()),
            ratio: median(&ratios),
            ratios,
        }
    };
    let report = Report {
        machine,
        page_bytes: shape.page_bytes,
        call_pages: CALL_PAGES,
        total: shape.total(),
        runs: args.runs,
        memcpy: row(&|round| round.copy),
        get: row(&|round| round.get),
        get_first: row(&|round| round.first),
        put: row(&|round| round.put),
        put_fresh: row(&|round| round.fresh),
    };
    if context.json {
        json(&report);
    } else {
        print_stdout(&report.show());
    }
    Ok(Status::Fine)
}
