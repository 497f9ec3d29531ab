//! `bench store --paths`: one store over several directories, compared with the raw limit: the rate
//! of direct I/O in all directories at the same time, without a store.

mod raw;
mod report;

use super::args::StoreArgs;
use super::report::Moved;
use crate::bench::disk::{self, capacity_for, drop_page_cache};
use crate::bench::driver::LoadDriver;
use crate::bench::shape::Shape;
use clap::ValueEnum;
use indicatif::ProgressBar;
use raw::{Direction, RawLimits};
use report::{Calls, Passes, RawRates, Report};
use ritornello_medium::{Host, Medium, Throttled};
use ritornello_node::Node;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{Budget, Options, SEGMENT_BYTES};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stderr, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::{Context, progress};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Number of the set of sequences that fill the store before the first round.
const FILL: u32 = 0;
/// With `--full`: capacity of the store as a multiple of `--total`, and bytes written before the
/// first round as a multiple of the capacity.
const FULL_TOTALS: u32 = 2;
const FULL_CAPACITIES: u32 = 4;
/// Bytes that each directory needs besides segments and the raw file's share: rounding of the raw
/// file, and the small files that the store makes in each directory.
const OTHER_BYTES: u64 = 16 << 20;

/// Measures and prints the report.
///
/// # Errors
/// If an argument is invalid, space is missing, a call fails, or wrong bytes are read.
pub fn run(context: &Context, args: &StoreArgs) -> Result<Status, Failure> {
    let started = Instant::now();
    let shapes: Vec<Shape> =
        args.call_bytes.iter().map(|&bytes| args.call_shape(bytes)).collect::<Result<_, _>>()?;
    let segment_bytes = args.segment_bytes.unwrap_or(SEGMENT_BYTES);
    let totals = if args.full { FULL_TOTALS } else { 1 };
    let capacity = capacity(&shapes, totals, segment_bytes, args.paths.len() as u64)?;
    let dirs = directories(args, capacity + args.total)?;
    let scratches =
        dirs.iter().map(|dir| Scratch::new(dir, "bench")).collect::<Result<Vec<_>, _>>()?;
    // The store's metadata is in a separate directory, which the throttle does not limit. Otherwise
    // syncs of the journal, of some KiB each, would wait behind the throttled I/O of segments.
    let metadata = Scratch::new(&dirs[0], "bench")?;
    let limited: Vec<PathBuf> = scratches.iter().map(|scratch| scratch.path().to_owned()).collect();
    let medium: Arc<dyn Medium> = match args.throttle {
        Some(rate) => Arc::new(Throttled::new(Arc::new(Host), &limited, rate)),
        None => Arc::new(Host),
    };
    let mut options = Options::new(metadata.path().join("store"));
    options.capacity = Some(capacity);
    options.segment_bytes = Some(segment_bytes);
    if args.full {
        // Other policies may evict the pages that were put last, which a round reads.
        options.eviction = PolicyKind::Lru;
    }
    options.paths = limited.iter().map(|dir| dir.join("segments")).collect();

    let steps = progress::steps(2 + u64::from(args.runs) * (1 + shapes.len() as u64));
    steps.set_message("trying sizes and depths on the raw disks");
    let limits = RawLimits::prepare(&medium, &limited, args.total)?;
    steps.inc(1);
    let drivers = shapes.iter().map(LoadDriver::new).collect::<Result<Vec<_>, _>>()?;
    let (full, evicted_pages) = (args.full, 0);
    let mut bench = Bench { medium, options, limits, shapes, drivers, steps, full, evicted_pages };
    let mut report = bench.fill()?;
    let rounds: Vec<Round> =
        (0..args.runs).map(|round| bench.round(round)).collect::<Result<_, _>>()?;
    bench.steps.finish_and_clear();
    summarise(&bench.shapes, &dirs, &rounds, &mut report);
    report.evicted_pages = bench.evicted_pages;
    drop(bench);
    let name = args.shape.to_possible_value();
    report.shape = name.map_or_else(String::new, |name| name.get_name().to_owned());
    report.runs = args.runs;
    report.throttle_bytes_per_s = args.throttle;
    report.seconds = started.elapsed().as_secs_f64();
    if context.json {
        json(&report);
    } else {
        print_stdout(&report::tables(&report));
    }
    Ok(Status::Fine)
}

/// Returns one capacity that suffices for `totals` sets of each of the shapes. Each of the
/// `directories` gets the same number of segments.
fn capacity(
    shapes: &[Shape],
    totals: u32,
    segment_bytes: u64,
    directories: u64,
) -> Result<u64, Failure> {
    let mut most = 0;
    for shape in shapes {
        let sequences = shape.sequences.saturating_mul(totals);
        most = most.max(Shape { sequences, ..shape.clone() }.capacity(segment_bytes)?);
    }
    let budget = Budget::divide(most, segment_bytes)?;
    let segments = u64::from(budget.segments_max).next_multiple_of(directories.max(1));
    capacity_for(segments, segment_bytes, budget.index_bytes)
}

/// Returns the directories to measure in, each with room for its share of `needed` bytes.
fn directories(args: &StoreArgs, needed: u64) -> Result<Vec<PathBuf>, Failure> {
    let share = needed.div_ceil(args.paths.len().max(1) as u64) + OTHER_BYTES;
    let mut by_device: BTreeMap<u64, u64> = BTreeMap::new();
    for dir in &args.paths {
        // A directory that does not exist counts as device 0 here; `choose` reports it later.
        let device = std::fs::metadata(dir).map_or(0, |found| found.dev());
        *by_device.entry(device).or_default() += share;
    }
    let mut dirs: Vec<PathBuf> = Vec::new();
    for dir in &args.paths {
        let device = std::fs::metadata(dir).map_or(0, |found| found.dev());
        let dir = disk::choose(Some(dir), by_device.get(&device).copied().unwrap_or(share))?;
        if dirs.contains(&dir) {
            return Err(Failure::unusable(
                format!("{} is named twice", dir.display()),
                "--paths with each directory once",
            ));
        }
        dirs.push(dir);
    }
    if args.throttle.is_none() && by_device.len() < dirs.len() {
        print_stderr(
            "warning: some directories are on one file system, so they share the rate of one disk: \
             name directories on different disks, or limit each with --throttle",
        );
    }
    Ok(dirs)
}

/// The rates of one round.
struct Round {
    /// Rates of raw I/O in each directory, measured alone.
    alone: Vec<Passes>,
    /// Rates of raw I/O in all directories at the same time.
    sum: Passes,
    /// Rates of puts and gets, by shape of the calls.
    calls: Vec<Passes>,
}

struct Bench {
    medium: Arc<dyn Medium>,
    options: Options,
    limits: RawLimits,
    shapes: Vec<Shape>,
    drivers: Vec<LoadDriver>,
    steps: ProgressBar,
    /// Whether the store stays full, so that puts evict.
    full: bool,
    /// Pages that the timed puts evicted.
    evicted_pages: u64,
}

impl Bench {
    fn open(&self) -> Result<Arc<Node>, Failure> {
        let opened = ritornello_node::open_on(Arc::clone(&self.medium), &self.options);
        opened.map_err(|error| Failure::unopened(&error))
    }

    /// Makes the store, and puts until every block has been written, so that all rounds overwrite.
    /// Then clears the store, unless it is to be full. Returns a report on the store.
    fn fill(&mut self) -> Result<Report, Failure> {
        self.steps.set_message("writing every block once");
        let node = self.open()?;
        let stats = node.store().stats()?.catalog;
        let mut report = Report {
            file_system: stats.io.file_system,
            io: stats.io.mode,
            io_why: stats.io.warnings.join("; "),
            ..Report::default()
        };
        // Fill with the shortest calls, because each call must fit into the store's free space.
        let pairs = self.shapes.iter().zip(&mut self.drivers);
        if let Some((shape, driver)) = pairs.min_by_key(|(shape, _)| shape.sequence_pages) {
            let capacity = self.options.capacity.unwrap_or(0);
            let sequences = shape.sequences_to_fill(capacity, stats.segment_bytes, 0)?;
            let times = if self.full { FULL_CAPACITIES } else { 1 };
            driver.put(node.store(), FILL, sequences.saturating_mul(times))?;
            report.page_bytes = shape.page_bytes;
            report.buffers = driver.backing().word().to_owned();
        }
        self.end(&node)?;
        Ok(report)
    }

    /// Measures the raw limits, and puts and gets. Every other round is in the opposite order, so
    /// that a drift of the disks affects all measurements equally.
    fn round(&mut self, round: u32) -> Result<Round, Failure> {
        let is_even = round.is_multiple_of(2);
        let raw_before = if is_even { Some(self.raw()?) } else { None };
        let count = self.shapes.len();
        let mut calls = Vec::with_capacity(count);
        for at in 0..count {
            let at = if is_even { at } else { count - 1 - at };
            let set = FILL + 1 + round * count as u32 + at as u32;
            calls.push(self.calls(at, set)?);
        }
        if !is_even {
            calls.reverse();
        }
        let (alone, sum) = match raw_before {
            Some(raw) => raw,
            None => self.raw()?,
        };
        Ok(Round { alone, sum, calls })
    }

    /// Returns the rates of each directory alone, and of all at the same time.
    fn raw(&mut self) -> Result<(Vec<Passes>, Passes), Failure> {
        self.steps.set_message("raw: each directory alone, and all at the same time");
        let (writes, reads) =
            (self.limits.alone(Direction::Write)?, self.limits.alone(Direction::Read)?);
        let alone = writes.into_iter().zip(reads).map(|(write, read)| Passes { write, read });
        let write = self.limits.together(Direction::Write)?;
        let read = self.limits.together(Direction::Read)?;
        self.steps.inc(1);
        Ok((alone.collect(), Passes { write, read }))
    }

    /// Puts a set with calls of shape `at`, reopens the store, gets the set, and clears the store
    /// unless it is to be full.
    fn calls(&mut self, at: usize, set: u32) -> Result<Passes, Failure> {
        let (shape, count) = (&self.shapes[at], self.shapes[at].sequences);
        let bytes = ritornello_terminal::print::bytes(shape.total() / u64::from(count));
        self.steps.set_message(format!("the store: calls of {bytes}"));
        let mut node = self.open()?;
        let write = self.drivers[at].put(node.store(), set, count)?;
        let counters = node.store().stats()?.catalog.counters;
        let evicted = counters.get("evicted_pages").copied().unwrap_or(0);
        if self.full && evicted == 0 {
            let why = "the puts evicted nothing, so the store was not full";
            return Err(Failure::failed(why, "a larger --total"));
        }
        self.evicted_pages += evicted;
        node.close()?;
        drop(node);
        for dir in &self.options.paths {
            drop_page_cache(dir)?;
        }
        node = self.open()?;
        let read = self.drivers[at].get(node.store(), set, count)?;
        self.end(&node)?;
        Ok(Passes { write, read })
    }

    /// Clears the store unless it is to be full, and closes it.
    fn end(&self, node: &Node) -> Result<(), Failure> {
        if !self.full {
            node.store().clear()?;
        }
        node.close()?;
        self.steps.inc(1);
        Ok(())
    }
}

fn summarise(shapes: &[Shape], dirs: &[PathBuf], rounds: &[Round], report: &mut Report) {
    let of = |of: &dyn Fn(&Round) -> Passes| rounds.iter().map(of).collect::<Vec<_>>();
    report.sum = RawRates::of(String::new(), &of(&|round| round.sum));
    let alone = |(at, dir): (usize, &PathBuf)| {
        RawRates::of(dir.display().to_string(), &of(&|round| round.alone[at]))
    };
    report.directories = dirs.iter().enumerate().map(alone).collect();
    let calls = |(at, shape): (usize, &Shape)| {
        let put = rounds.iter().map(|round| (round.calls[at].write, round.sum.write));
        let get = rounds.iter().map(|round| (round.calls[at].read, round.sum.read));
        Calls {
            call_bytes: u64::from(shape.sequence_pages) * shape.page_bytes,
            call_pages: shape.sequence_pages,
            calls: shape.sequences,
            put: Moved::of(&put.collect::<Vec<_>>()),
            get: Moved::of(&get.collect::<Vec<_>>()),
        }
    };
    report.calls = shapes.iter().enumerate().map(calls).collect();
}
