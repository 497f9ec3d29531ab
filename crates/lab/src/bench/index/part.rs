//! The parts of `bench index`, each in a separate process, so that memory, processor time and bytes
//! written belong to one backend.

use super::load::{Load, SLOT, Workload};
use super::report::{Method, Sync};
use crate::bench::content::scattered;
use crate::bench::quantile::{median, quantile};
use clap::{Args, Subcommand};
use ritornello_index::{Backend, OpenOptions, PrefixIndex, RunOptions};
use ritornello_medium::Host;
use ritornello_terminal::exit::{Failure, Status};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of the parts of `bench index`.
#[derive(Debug, Args)]
pub struct IndexPartArgs {
    /// The part.
    #[command(subcommand)]
    pub part: IndexPart,
}

/// Sequences that warm probes alternate between.
const WARM_SEQUENCES: u32 = 4;
/// Pages between two syncs of [`Sync::Group`].
const GROUP_SYNC_PAGES: u64 = 1 << 16;
/// Unsynced bytes at which the backend `run` is synced in the mode [`Sync::Off`].
const PENDING_BYTES_MAX: u64 = 32 << 20;
/// Number of timed probes by each method. [`WARM_UP`] untimed probes come before them.
const PROBES: usize = 4000;
const WARM_UP: usize = 400;
/// Maximum number of lookups that are timed together, because reading the clock takes about the
/// time of one lookup. The number is smaller for a sequence of fewer pages.
const LOOKUPS: usize = 64;
/// Maximum time of the churn, which ends earlier when it has removed a tenth of the pages, or no
/// old sequence is left.
const CHURN_TIME: Duration = Duration::from_secs(10);

/// Parameters of one measured index.
#[derive(Clone, Debug, clap::Args)]
pub struct IndexSpec {
    /// Directory of the index
    pub dir: PathBuf,
    /// Backend of the index
    #[arg(long)]
    pub backend: Backend,
    /// Number of pages
    #[arg(long)]
    pub entries: u64,
    /// Sequences of pages to insert
    #[arg(long, value_enum)]
    pub workload: Workload,
    /// When the index is synced
    #[arg(long, value_enum)]
    pub sync: Sync,
    /// Memory for the backend's cache of its files
    #[arg(long)]
    pub cache: u64,
}

/// The parts of `bench index`.
#[derive(Clone, Debug, Subcommand)]
pub enum IndexPart {
    /// Fills and probes the index, prints the answer, and waits to be killed
    Fill(IndexSpec),
    /// Opens the index, reports the time and the number of pages, and closes the index
    Open(IndexSpec),
    /// Removes old sequences while it inserts new sequences
    Churn(IndexSpec),
}

/// The answer of a part.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    pub ingest_s: f64,
    pub sync_s: f64,
    pub probes: Vec<Method>,
    pub probe_warm_p50_us: f64,
    pub lookup_p50_us: f64,
    pub range_p50_us: f64,
    pub written: u64,
    pub own_written: u64,
    pub memory: i64,
    pub cpu_s: f64,
    pub open_ms: f64,
    pub pages: u64,
    pub puts: u64,
    pub removed: u64,
    pub churn_s: f64,
}

/// Runs a part.
///
/// # Errors
/// Index errors; I/O errors of `/proc/self` and standard output; a failure if a probe misses pages.
pub fn run(part: &IndexPart) -> Result<Status, Failure> {
    match part {
        IndexPart::Fill(spec) => {
            let (index, answer) = fill(spec)?;
            answer.print_stdout()?;
            // The parent kills this process while it waits here with the index open. If the parent
            // ends first, the index is closed.
            let _ = std::io::stdin().read_line(&mut String::new());
            drop(index);
        }
        IndexPart::Open(spec) => {
            let load = Load::new(spec.workload, spec.entries)?;
            let started = Instant::now();
            let index = open(spec, load.run_pages())?;
            let open_ms = started.elapsed().as_secs_f64() * 1e3;
            let pages = index.stats().pages;
            drop(index);
            Answer { open_ms, pages, ..Answer::default() }.print_stdout()?;
        }
        IndexPart::Churn(spec) => churn(spec)?.print_stdout()?,
    }
    Ok(Status::Fine)
}

impl Answer {
    fn print_stdout(&self) -> Result<(), Failure> {
        let line = serde_json::to_string(self).map_err(std::io::Error::other)?;
        let mut out = std::io::stdout();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }
}

fn open(spec: &IndexSpec, run_pages: u32) -> Result<Box<dyn PrefixIndex>, Failure> {
    let runs = spec.entries.div_ceil(u64::from(run_pages)) + 1;
    let metadata_bytes_max = match spec.backend {
        // Allow one and a half times the bytes that the runs need, because the churn inserts a new
        // sequence before it removes the runs of an old sequence.
        Backend::Run => RunOptions::metadata_bytes_for(runs, run_pages, 1) * 3 / 2,
        _ => 1 << 50,
    };
    let options = OpenOptions {
        metadata_bytes_max,
        cache_bytes: spec.cache,
        durable: spec.sync == Sync::Every,
        ..OpenOptions::default()
    };
    Ok(spec.backend.open(Arc::new(Host), &spec.dir, &options)?)
}

/// Syncs an index when a sync is due.
struct Syncer<'a> {
    index: &'a dyn PrefixIndex,
    backend: Backend,
    sync: Sync,
    waiting: u64,
}

impl<'a> Syncer<'a> {
    fn new(spec: &IndexSpec, index: &'a dyn PrefixIndex) -> Self {
        Self { index, backend: spec.backend, sync: spec.sync, waiting: 0 }
    }

    fn note(&mut self, pages: u64) -> Result<(), Failure> {
        self.waiting += pages;
        let due = match self.sync {
            // The index refuses inserts above a limit of unsynced bytes, so sync it below this
            // limit.
            Sync::Off => {
                self.backend == Backend::Run && self.index.stats().pending_bytes > PENDING_BYTES_MAX
            }
            Sync::Group => self.waiting >= GROUP_SYNC_PAGES,
            Sync::Every => true,
        };
        if due {
            self.waiting = 0;
            self.index.sync()?;
            self.index.maintain()?;
        }
        Ok(())
    }
}

fn ingest(spec: &IndexSpec, index: &dyn PrefixIndex, load: &Load) -> Result<(), Failure> {
    let mut left = load.entries;
    let mut syncer = Syncer::new(spec, index);
    for number in 0..load.sequences {
        left -= load.insert(index, number, left, |pages| syncer.note(pages))?;
    }
    Ok(())
}

fn fill(spec: &IndexSpec) -> Result<(Box<dyn PrefixIndex>, Answer), Failure> {
    let load = Load::new(spec.workload, spec.entries)?;
    let (memory, written, cpu) = (resident()?, written()?, processor_seconds());
    let index = open(spec, load.run_pages())?;
    let started = Instant::now();
    ingest(spec, index.as_ref(), &load)?;
    let ingest_s = started.elapsed().as_secs_f64();
    let started = Instant::now();
    index.sync()?;
    let sync_s = started.elapsed().as_secs_f64();
    let stats = index.stats();
    let mut answer = Answer {
        ingest_s,
        sync_s,
        written: self::written()? - written,
        own_written: stats.written_bytes,
        memory: resident()? - memory,
        cpu_s: processor_seconds() - cpu,
        pages: stats.pages,
        puts: load.offers(),
        ..Answer::default()
    };
    for method in index.probe_methods() {
        answer.probes.push(probe(index.as_ref(), &load, method, whole(&load))?);
    }
    if let Some(method) = index.probe_methods().first() {
        let few = WARM_SEQUENCES.min(whole(&load));
        answer.probe_warm_p50_us = probe(index.as_ref(), &load, method, few)?.p50_us;
    }
    answer.lookup_p50_us = lookup(index.as_ref(), &load);
    answer.range_p50_us = range(index.as_ref(), &load);
    Ok((index, answer))
}

/// Returns the number of leading sequences that are inserted completely, so that probes find all
/// their pages.
fn whole(load: &Load) -> u32 {
    u32::try_from(load.whole()).unwrap_or(u32::MAX)
}

/// Times probes by `method` for sequences among the first `among`.
fn probe(
    index: &dyn PrefixIndex,
    load: &Load,
    method: &str,
    among: u32,
) -> Result<Method, Failure> {
    let mut times = Vec::with_capacity(PROBES);
    for at in 0..WARM_UP + PROBES {
        let (pages, _) = load.sequence(scattered(at, among).into());
        let started = Instant::now();
        let found = black_box(index.probe_by(method, SLOT, black_box(&pages)));
        let took = started.elapsed().as_secs_f64() * 1e6;
        if found != pages.len() {
            let line = format!("a probe by {method} found {found} of {} pages", pages.len());
            return Err(Failure::failed(line, "report this"));
        }
        if at >= WARM_UP {
            times.push(took);
        }
    }
    let p99_us = quantile(&times, 0.99);
    Ok(Method { method: method.to_owned(), p50_us: median(&times), p99_us })
}

fn lookup(index: &dyn PrefixIndex, load: &Load) -> f64 {
    let times: Vec<f64> = (0..PROBES / 8)
        .map(|at| {
            let (pages, _) = load.sequence(scattered(at, whole(load)).into());
            let started = Instant::now();
            let mut lookups = 0;
            for page in pages.iter().step_by(pages.len().div_ceil(LOOKUPS).max(1)) {
                black_box(index.locate(SLOT, *page));
                lookups += 1;
            }
            started.elapsed().as_secs_f64() * 1e6 / f64::from(lookups)
        })
        .collect();
    median(&times)
}

fn range(index: &dyn PrefixIndex, load: &Load) -> f64 {
    let times: Vec<f64> = (0..PROBES)
        .filter_map(|at| {
            let (pages, _) = load.sequence(scattered(at, whole(load)).into());
            let (run, _) = index.locate(SLOT, *pages.last()?)?;
            let started = Instant::now();
            black_box(index.run(run)?);
            Some(started.elapsed().as_secs_f64() * 1e6)
        })
        .collect();
    median(&times)
}

/// Measures removals from a full index. For every sequence inserted, removes the runs of an old
/// sequence, the last run first, up to a run that has children.
fn churn(spec: &IndexSpec) -> Result<Answer, Failure> {
    let load = Load::new(spec.workload, spec.entries)?;
    let index = open(spec, load.run_pages())?;
    if !spec.backend.is_persistent() {
        ingest(spec, index.as_ref(), &load)?;
    }
    let mut syncer = Syncer::new(spec, index.as_ref());
    let (mut removed, target) = (0, load.entries / 10);
    let started = Instant::now();
    for number in 0..load.sequences {
        if removed >= target || started.elapsed() > CHURN_TIME {
            break;
        }
        load.insert(index.as_ref(), load.sequences + number, u64::MAX, |pages| syncer.note(pages))?;
        let (pages, _) = load.sequence(number);
        let mut runs = index.walk(SLOT, &pages);
        while let Some(last) = runs.pop() {
            let mut gone = 0;
            if !index.has_children(last.run) {
                gone = index.truncate(last.run, 0).iter().map(|run| u64::from(run.pages)).sum();
            }
            if gone == 0 {
                break;
            }
            removed += gone;
            syncer.note(gone)?;
        }
    }
    index.sync()?;
    let churn_s = started.elapsed().as_secs_f64();
    Ok(Answer { removed, churn_s, ..Answer::default() })
}

fn resident() -> Result<i64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<i64>().ok());
    let pages = pages
        .ok_or_else(|| Failure::failed("/proc/self/statm has no resident size", "report this"))?;
    Ok(pages * rustix::param::page_size() as i64)
}

/// Returns the bytes that this process wrote to storage, dirty pages included.
///
/// # Errors
/// If the kernel does not count these bytes.
pub fn written() -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/self/io")?;
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().parse::<u64>().ok()
    };
    let sent = field("write_bytes:").zip(field("cancelled_write_bytes:"));
    let sent = sent.map(|(sent, cancelled)| sent.saturating_sub(cancelled));
    sent.ok_or_else(|| {
        Failure::failed("/proc/self/io has no byte counts", "a kernel with task I/O accounting")
    })
}

/// Returns the processor seconds of all threads of this process.
#[must_use]
pub fn processor_seconds() -> f64 {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    clock.tv_sec as f64 + clock.tv_nsec as f64 / 1e9
}

/// Returns the arguments that start a part.
#[must_use]
pub fn part_args(part: &str, spec: &IndexSpec) -> Vec<String> {
    let workload = spec.workload;
    let name = |value: Option<clap::builder::PossibleValue>| {
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    };
    use clap::ValueEnum;
    vec![
        part.to_owned(),
        path(&spec.dir),
        "--backend".to_owned(),
        spec.backend.to_string(),
        "--entries".to_owned(),
        spec.entries.to_string(),
        "--workload".to_owned(),
        name(workload.to_possible_value()),
        "--sync".to_owned(),
        name(spec.sync.to_possible_value()),
        "--cache".to_owned(),
        spec.cache.to_string(),
    ]
}

fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
