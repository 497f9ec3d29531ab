//! The figures of `bench store --paths`, as `--json` prints them, and their tables.

use crate::bench::quantile::median;
use crate::bench::store::report::Moved;
use ritornello_terminal::print::{bytes, table};
use ritornello_volume::baseline::Rate;
use serde::Serialize;

/// All figures.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Name of the shape.
    pub shape: String,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Number of rounds.
    pub runs: u32,
    /// Maximum bytes per second of each directory; `null` without `--throttle`.
    pub throttle_bytes_per_s: Option<u64>,
    /// Names of the directories' file systems.
    pub file_system: String,
    /// I/O mode of the store.
    pub io: String,
    /// Warnings about the I/O of the store, such as why no better mode is used; empty without
    /// warnings.
    pub io_why: String,
    /// Kind of memory of the buffers.
    pub buffers: String,
    /// Raw limits of each directory alone.
    pub directories: Vec<RawRates>,
    /// Raw limit of all directories at the same time.
    pub sum: RawRates,
    /// Figures by length of a call.
    pub calls: Vec<Calls>,
    /// Pages that the timed puts evicted: more than 0 with `--full`.
    pub evicted_pages: u64,
    /// Duration of the measurement in seconds.
    pub seconds: f64,
}

/// Raw limits, the rates of I/O without a store, of one directory or of all directories at the same
/// time: medians of the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RawRates {
    /// The directory; empty for all directories.
    pub dir: String,
    /// Rate of overwriting blocks, `fdatasync` included.
    pub write_gib_s: f64,
    /// Rate of reading blocks.
    pub read_gib_s: f64,
    /// Processor seconds per GiB of overwriting.
    pub write_cpu_s_per_gib: f64,
    /// Processor seconds per GiB of reading.
    pub read_cpu_s_per_gib: f64,
}

impl RawRates {
    /// Returns the medians of the rounds.
    #[must_use]
    pub fn of(dir: String, rounds: &[Passes]) -> Self {
        let medians =
            |of: &dyn Fn(&Passes) -> f64| median(&rounds.iter().map(of).collect::<Vec<_>>());
        Self {
            dir,
            write_gib_s: medians(&|round| round.write.gib_s()),
            read_gib_s: medians(&|round| round.read.gib_s()),
            write_cpu_s_per_gib: medians(&|round| round.write.cpu_s_per_gib()),
            read_cpu_s_per_gib: medians(&|round| round.read.cpu_s_per_gib()),
        }
    }
}

/// The rates of writing and of reading in one round.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    /// Rate of raw writes, or of put and flush.
    pub write: Rate,
    /// Rate of raw reads, or of get.
    pub read: Rate,
}

/// Figures of calls of one length. Ratios are to the rate of raw I/O in all directories at the same
/// time, in the same round.
#[derive(Clone, Debug, Serialize)]
pub struct Calls {
    /// Payload bytes per put and per get.
    pub call_bytes: u64,
    /// Pages per put and per get.
    pub call_pages: u32,
    /// Puts, and gets, per round.
    pub calls: u32,
    /// Rates of put and flush over blocks that were written before.
    pub put: Moved,
    /// Rates of get from a newly opened store.
    pub get: Moved,
}

/// Formats the report as tables.
#[must_use]
pub fn tables(report: &Report) -> String {
    let limit = report.throttle_bytes_per_s;
    let limit =
        limit.map_or_else(String::new, |rate| format!(", each limited to {}/s", bytes(rate)));
    let mut text = format!(
        "{}: pages of {}, in {} directories{limit}\n{}, {}, buffers in {} pages",
        report.shape,
        bytes(report.page_bytes),
        report.directories.len(),
        report.file_system,
        report.io,
        report.buffers
    );
    if report.evicted_pages > 0 {
        text += &format!("\na full store: the timed puts evicted {} pages", report.evicted_pages);
    }
    if !report.io_why.is_empty() {
        text += &format!("\nnote: {}", report.io_why);
    }
    let mut raw = table(&["raw", "write GiB/s", "read GiB/s"]);
    for rates in report.directories.iter().chain([&report.sum]) {
        let name = if rates.dir.is_empty() { "all at once" } else { &rates.dir };
        let [write, read] = [rates.write_gib_s, rates.read_gib_s].map(|rate| format!("{rate:.2}"));
        raw.add_row([name, &write, &read]);
    }
    let mut calls = table(&["calls", "", "GiB/s", "ratio to raw, all at once", "CPU s/GiB"]);
    for row in &report.calls {
        for (what, moved) in [("put + flush", &row.put), ("cold get", &row.get)] {
            calls.add_row([
                format!("{} of {}", row.calls, bytes(row.call_bytes)),
                what.to_owned(),
                format!("{:.2}", moved.gib_s),
                format!("{:.2}", moved.ratio),
                format!("{:.3}", moved.cpu_s_per_gib),
            ]);
        }
    }
    let (seconds, runs) = (report.seconds, report.runs);
    format!("{text}\n{raw}\n{calls}\n{seconds:.0} s in all; medians of {runs} rounds")
}
