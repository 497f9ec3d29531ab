//! `ritornello bench index`: index backends, measured under equal conditions.
//!
//! | module | contents |
//! |---|---|
//! | `limit` | lower bounds for any index |
//! | `load` | contents of an index |
//! | `part` | the work of a separate process |
//! | `report` | the rows |
//! | `chart` | charts of the rows |

mod chart;
mod limit;
pub mod load;
pub mod part;
mod report;

use super::child::self_command;
use super::disk::{self, Footprint, drop_page_cache};
use super::quantile::median;
use clap::Args;
use load::Workload;
use part::{Answer, IndexSpec};
use report::{Report, Row, Sync};
use ritornello_index::Backend;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::plot;
use ritornello_terminal::print::{json, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::value::{picture, size};
use ritornello_terminal::{Context, progress};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Arguments of `bench index`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Every backend is filled in a separate process, probed there, and killed; then other
processes reopen a backend that has files: after the kill, after a clean close, and with its files
out of the page cache. A last process removes old sequences, leaf first, while it inserts new
sequences.

Rates are pages per second. Write amplification is the kernel's count of bytes that the process
wrote to storage up to the last sync, divided by 40 bytes for each page put; the column `own` has
the same figure from the backend's own count. Each backend is measured with only a final sync (the
backend `run` also syncs whenever 32 MiB are unsynced), and with a sync after every 65,536 pages;
--durable adds a measurement with a sync after every run.

Examples:
  ritornello bench index --entries 100000,1000000
  ritornello bench index --backends run,memory --entries 1000000 --durable
  ritornello bench index --workload kv-events --json | jq '.rows[] | {backend, ingest_per_s}'")]
pub struct IndexArgs {
    /// Backends to measure [default: all that are compiled in]
    #[arg(long, value_delimiter = ',')]
    pub backends: Vec<String>,
    /// Numbers of pages, 1,000 to 100,000,000, each measured separately
    #[arg(long, value_delimiter = ',', default_value = "100000",
          value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    pub entries: Vec<u64>,
    /// Add a measurement with a sync after every run
    #[arg(long)]
    pub durable: bool,
    /// Sequences of pages to insert
    #[arg(long, value_enum, default_value = "chains")]
    pub workload: Workload,
    /// Memory for a backend's cache of its files
    #[arg(long, default_value = "128MiB", value_parser = size)]
    pub cache: u64,
    /// Write charts of the figures over the number of pages: an SVG file
    #[arg(long, value_parser = picture)]
    pub chart: Option<PathBuf>,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
}

/// Bytes of a page's record, the divisor of write amplification.
const RECORD_BYTES: u64 = 40;
/// Free disk space that a measurement needs, in bytes per page.
const DISK_BYTES_PER_PAGE: u64 = 4096;
/// Charts in one row.
const CHARTS_ABREAST: usize = 3;
/// Number of times that an index is opened after a clean close with its files in the page cache,
/// and again with its files out of the page cache. The report has the two medians.
const OPENINGS: usize = 5;

/// Measures all backends and prints the report.
///
/// # Errors
/// If a backend is unknown, space is missing, a process fails, or a file cannot be written.
pub fn run(context: &Context, args: &IndexArgs) -> Result<Status, Failure> {
    let backends = match &args.backends[..] {
        [] => Backend::compiled().collect(),
        names => names.iter().map(|name| name.parse()).collect::<Result<Vec<Backend>, _>>()?,
    };
    let largest = args.entries.iter().max().copied().unwrap_or(0);
    let dir = disk::choose(args.dir.as_deref(), largest * DISK_BYTES_PER_PAGE)?;
    let scratch = Scratch::new(&dir, "bench")?;
    let mut syncs = vec![Sync::Off, Sync::Group];
    if args.durable {
        syncs.push(Sync::Every);
    }
    let steps = progress::steps((args.entries.len() * syncs.len() * backends.len()) as u64);
    let limits = limit::measure(scratch.path())?;
    let mut report = Report { limits, rows: Vec::new() };
    for &entries in &args.entries {
        for &sync in &syncs {
            for &backend in &backends {
                steps.set_message(format!("{backend}, {entries} pages"));
                let dir = scratch.path().join(backend.name());
                let (workload, cache) = (args.workload, args.cache);
                let spec = IndexSpec { dir, backend, entries, workload, sync, cache };
                report.rows.push(measure(context, &spec)?);
                steps.inc(1);
            }
        }
    }
    steps.finish_and_clear();
    if let Some(path) = &args.chart {
        plot::write(path, &chart::panels(&report.rows), CHARTS_ABREAST)?;
    }
    if context.json {
        json(&report);
    } else {
        print_stdout(&report::show(&report));
    }
    Ok(Status::Fine)
}

fn measure(context: &Context, spec: &IndexSpec) -> Result<Row, Failure> {
    std::fs::create_dir(&spec.dir)?;
    let filled = run_part_process(context, "fill", spec, true)?;
    let persistent = spec.backend.is_persistent();
    let per_entry = |bytes: u64| bytes as f64 / spec.entries as f64;
    let amplification = |bytes: u64| bytes as f64 / (filled.puts * RECORD_BYTES) as f64;
    let mut row = Row {
        backend: spec.backend.to_string(),
        entries: spec.entries,
        workload: spec.workload,
        sync: spec.sync,
        puts: filled.puts,
        ingest_per_s: filled.puts as f64 / filled.ingest_s,
        last_sync_s: filled.sync_s,
        probe_p50_us: filled.probes.first().map_or(0.0, |method| method.p50_us),
        probe_p99_us: filled.probes.first().map_or(0.0, |method| method.p99_us),
        probe_warm_p50_us: filled.probe_warm_p50_us,
        probes: filled.probes,
        lookup_p50_us: filled.lookup_p50_us,
        range_p50_us: filled.range_p50_us,
        write_amplification: persistent.then(|| amplification(filled.written)),
        own_write_amplification: persistent.then(|| amplification(filled.own_written)),
        recovery_ms: None,
        recovery_cold_ms: None,
        recovery_killed_ms: None,
        disk_bytes_per_entry: None,
        memory_bytes_per_entry: per_entry(filled.memory.unsigned_abs()),
        removes_per_s: 0.0,
        cpu_s: filled.cpu_s,
    };
    if persistent {
        row.disk_bytes_per_entry = Some(per_entry(Footprint::of(&spec.dir)?.bytes));
        row.recovery_killed_ms = Some(reopen(context, spec)?);
        let times = (0..OPENINGS).map(|_| reopen(context, spec));
        row.recovery_ms = Some(median(&times.collect::<Result<Vec<_>, _>>()?));
        let times = (0..OPENINGS).map(|_| {
            drop_page_cache(&spec.dir)?;
            reopen(context, spec)
        });
        row.recovery_cold_ms = Some(median(&times.collect::<Result<Vec<_>, Failure>>()?));
    }
    let churned = run_part_process(context, "churn", spec, false)?;
    row.removes_per_s = churned.removed as f64 / churned.churn_s;
    std::fs::remove_dir_all(&spec.dir)?;
    Ok(row)
}

/// Opens the index in a separate process, which must find all pages. Returns milliseconds.
fn reopen(context: &Context, spec: &IndexSpec) -> Result<f64, Failure> {
    let opened = run_part_process(context, "open", spec, false)?;
    if opened.pages == spec.entries {
        return Ok(opened.open_ms);
    }
    let line = format!("{} of {} pages were found after reopening", opened.pages, spec.entries);
    Err(Failure::failed(line, "report this"))
}

/// Runs a part in a separate process. After its answer the process is killed if `kill` is set;
/// otherwise it exits.
fn run_part_process(
    context: &Context,
    part: &str,
    spec: &IndexSpec,
    kill: bool,
) -> Result<Answer, Failure> {
    let mut command: Command = self_command(context)?;
    command.arg("index-backend").args(part::part_args(part, spec));
    command.stdin(if kill { Stdio::piped() } else { Stdio::null() }).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line)?;
    }
    if kill && !line.is_empty() {
        child.kill()?;
        child.wait()?;
    } else if !child.wait()?.success() {
        let line = format!("the process for `{part}` of backend {} failed", spec.backend);
        return Err(Failure::failed(line, "the output above, which names the cause"));
    }
    serde_json::from_str(&line).map_err(|error| {
        let line =
            format!("the process for `{part}` of backend {} gave no valid answer", spec.backend);
        Failure::failed(format!("{line}: {error}"), "the output above, which names the cause")
    })
}
