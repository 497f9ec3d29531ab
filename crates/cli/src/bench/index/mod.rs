//! `ritornello bench index`: backends of the index, measured alike.
//!
//! | module | noun |
//! |---|---|
//! | `limit` | what no index can beat |
//! | `load` | what an index is filled with |
//! | `part` | what is done in a process of its own |
//! | `report` | the rows |
//! | `chart` | the rows as a picture |

mod chart;
mod limit;
pub mod load;
pub mod part;
mod report;

pub use load::Workload;
pub use part::{ContestPart, run as run_part};

use super::parts;
use super::place::{self, Footprint, forget_pages};
use super::report::median;
use crate::args::IndexArgs;
use crate::exit::{Failure, Status};
use crate::print::{json, say};
use crate::scratch::Scratch;
use crate::{Context, plot, progress};
use part::{Answer, Subject};
use report::{Report, Row, Sync};
use ritornello_index::Backend;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Bytes of a page's record: what write amplification is taken over.
const RECORD: u64 = 40;
/// Bytes of disk a page that the hungriest backend may need.
const NEEDED_A_PAGE: u64 = 4096;
/// Charts beside each other.
const CHARTS_ABREAST: usize = 3;
/// Times an index is opened for each figure.
const OPENINGS: usize = 5;

/// Measures.
///
/// # Errors
/// For a backend that is not there; where there is no room, or something fails.
pub fn run(context: &Context, args: &IndexArgs) -> Result<Status, Failure> {
    let backends = match &args.backends[..] {
        [] => Backend::compiled().collect(),
        names => names.iter().map(|name| name.parse()).collect::<Result<Vec<Backend>, _>>()?,
    };
    let largest = args.entries.iter().max().copied().unwrap_or(0);
    let dir = place::choose(args.dir.as_deref(), largest * NEEDED_A_PAGE)?;
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
                let subject = Subject { dir, backend, entries, workload, sync, cache };
                report.rows.push(measure(context, &subject)?);
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
        say(&report::show(&report));
    }
    Ok(Status::Fine)
}

fn measure(context: &Context, subject: &Subject) -> Result<Row, Failure> {
    std::fs::create_dir(&subject.dir)?;
    let filled = ask(context, "fill", subject, true)?;
    let persistent = subject.backend.is_persistent();
    let per_entry = |bytes: u64| bytes as f64 / subject.entries as f64;
    let amplification = |bytes: u64| bytes as f64 / (filled.puts * RECORD) as f64;
    let mut row = Row {
        backend: subject.backend.to_string(),
        entries: subject.entries,
        workload: subject.workload,
        sync: subject.sync,
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
        row.disk_bytes_per_entry = Some(per_entry(Footprint::of(&subject.dir)?.bytes));
        row.recovery_killed_ms = Some(reopen(context, subject)?);
        let times = (0..OPENINGS).map(|_| reopen(context, subject));
        row.recovery_ms = Some(median(&times.collect::<Result<Vec<_>, _>>()?));
        let times = (0..OPENINGS).map(|_| {
            forget_pages(&subject.dir)?;
            reopen(context, subject)
        });
        row.recovery_cold_ms = Some(median(&times.collect::<Result<Vec<_>, Failure>>()?));
    }
    let churned = ask(context, "churn", subject, false)?;
    row.removes_per_s = churned.removed as f64 / churned.churn_s;
    std::fs::remove_dir_all(&subject.dir)?;
    Ok(row)
}

/// Opens the index in a process of its own, which must find everything.
fn reopen(context: &Context, subject: &Subject) -> Result<f64, Failure> {
    let opened = ask(context, "open", subject, false)?;
    if opened.pages == subject.entries {
        return Ok(opened.open_ms);
    }
    let line = format!("{} of {} pages were there again", opened.pages, subject.entries);
    Err(Failure::failed(line, "report this"))
}

/// Does a part in a process of its own, which is killed once it has answered, or ends by itself.
fn ask(context: &Context, part: &str, subject: &Subject, kill: bool) -> Result<Answer, Failure> {
    let mut command: Command = parts::again(context)?;
    command.arg("contest").args(part::words(part, subject));
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
        let line = format!("{} failed: {part}", subject.backend);
        return Err(Failure::failed(line, "what it said above"));
    }
    serde_json::from_str(&line)
        .map_err(|error| Failure::failed(format!("{} said nothing: {error}", subject.backend), ""))
}
