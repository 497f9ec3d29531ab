//! The figures of index backends that `bench index` prints.

use super::limit::Limits;
use super::load::Workload;
use clap::ValueEnum;
use ritornello_terminal::print::{bytes, count, table};
use serde::{Deserialize, Serialize};

/// When an index is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sync {
    /// Once, at the end; the backend `run` also whenever 32 MiB are unsynced
    Off,
    /// After every 65,536 pages
    Group,
    /// After every run
    Every,
}

/// A method by which the backend probes, and the latencies of probes by this method.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Method {
    /// The backend's name for the method.
    pub method: String,
    /// Median in microseconds.
    pub p50_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
}

/// The figures of one backend with one number of pages and one sync mode; `null` where a figure
/// does not apply.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the backend.
    pub backend: String,
    /// Number of pages.
    pub entries: u64,
    /// Sequences of pages that were inserted.
    pub workload: Workload,
    /// When the index was synced.
    pub sync: Sync,
    /// Pages put; for `one-prompt`, including pages that the index had already.
    pub puts: u64,
    /// Pages put per second; the time includes all syncs but the last.
    pub ingest_per_s: f64,
    /// Duration of the last sync, in seconds.
    pub last_sync_s: f64,
    /// Median duration of a probe by the backend's first method, in microseconds.
    pub probe_p50_us: f64,
    /// 99th percentile of the durations of probes by the backend's first method, in microseconds.
    pub probe_p99_us: f64,
    /// Median duration of a probe by the backend's first method, repeated for the same four
    /// sequences, in microseconds.
    pub probe_warm_p50_us: f64,
    /// Figures of all probe methods.
    pub probes: Vec<Method>,
    /// Median duration of a lookup of one page, in microseconds.
    pub lookup_p50_us: f64,
    /// Median duration of a read of all pages of a run, in microseconds.
    pub range_p50_us: f64,
    /// Bytes written to storage, divided by 40 bytes for each page put.
    pub write_amplification: Option<f64>,
    /// Bytes that the backend counted as written, divided by 40 bytes for each page put.
    pub own_write_amplification: Option<f64>,
    /// Median milliseconds to open the index after a clean close, with its files in the page cache.
    pub recovery_ms: Option<f64>,
    /// Median milliseconds to open the index after a clean close, without its files in the page
    /// cache.
    pub recovery_cold_ms: Option<f64>,
    /// Milliseconds to open the index after SIGKILL of its process.
    pub recovery_killed_ms: Option<f64>,
    /// Bytes of the index files' allocated blocks, per page.
    pub disk_bytes_per_entry: Option<f64>,
    /// Increase of the process's resident memory by filling, in bytes per page.
    pub memory_bytes_per_entry: f64,
    /// Pages removed per second from a full index, while new sequences are inserted.
    pub removes_per_s: f64,
    /// Processor seconds of filling the index.
    pub cpu_s: f64,
}

/// The report of `bench index`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Lower bounds of the durations of any index's operations on this machine.
    pub limits: Limits,
    /// Rows by number of pages, sync mode and backend.
    pub rows: Vec<Row>,
}

/// Formats the rows as a table.
#[must_use]
pub fn show(report: &Report) -> String {
    let mut out = table(&[
        "backend",
        "entries",
        "sync",
        "put/s",
        "probe p50 us",
        "p99 us",
        "warm p50 us",
        "lookup us",
        "run us",
        "write amp.",
        "own",
        "reopen ms",
        "cold ms",
        "killed ms",
        "disk B/page",
        "memory B/page",
        "removes/s",
        "CPU s",
    ]);
    let some = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in &report.rows {
        let sync = row.sync.to_possible_value();
        out.add_row([
            row.backend.clone(),
            count(row.entries),
            sync.map_or_else(String::new, |sync| sync.get_name().to_owned()),
            count(row.ingest_per_s as u64),
            format!("{:.2}", row.probe_p50_us),
            format!("{:.2}", row.probe_p99_us),
            format!("{:.2}", row.probe_warm_p50_us),
            format!("{:.3}", row.lookup_p50_us),
            format!("{:.2}", row.range_p50_us),
            some(row.write_amplification, 2),
            some(row.own_write_amplification, 2),
            some(row.recovery_ms, 1),
            some(row.recovery_cold_ms, 1),
            some(row.recovery_killed_ms, 1),
            some(row.disk_bytes_per_entry, 1),
            format!("{:.0}", row.memory_bytes_per_entry),
            count(row.removes_per_s as u64),
            format!("{:.2}", row.cpu_s),
        ]);
    }
    let mut more = String::new();
    for row in report.rows.iter().filter(|row| row.probes.len() > 1) {
        for other in &row.probes[1..] {
            more += &format!(
                "\n{}, {} pages: probe by {}: p50 {:.2} us, p99 {:.2} us",
                row.backend,
                count(row.entries),
                other.method,
                other.p50_us,
                other.p99_us
            );
        }
    }
    let Limits { memory_access_ns, append_sync_us } = report.limits;
    format!(
        "{out}{more}\nwrite amp.: bytes written to storage, divided by {} for each page put; own: by the backend's count\n\
        reopen: after a clean close; cold: without files in the page cache; killed: after SIGKILL\n\
        limits: a read from memory {memory_access_ns:.0} ns, 4 KiB appended and synced \
         {append_sync_us:.0} us",
        bytes(40)
    )
}
