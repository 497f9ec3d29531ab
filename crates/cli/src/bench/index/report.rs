//! What backends came to.

use super::limit::Limits;
use super::load::Workload;
use crate::print::{bytes, count, table};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// When an index is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sync {
    /// Once, at the end
    Off,
    /// After every 65,536 pages
    Group,
    /// After every run
    Every,
}

/// A way to probe.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Method {
    /// As the backend calls it.
    pub method: String,
    /// Microseconds.
    pub p50_us: f64,
    /// Microseconds.
    pub p99_us: f64,
}

/// One backend at one size. `null` where it makes no sense.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub backend: String,
    /// Pages.
    pub entries: u64,
    /// Where they came from.
    pub workload: Workload,
    /// When it was synced.
    pub sync: Sync,
    /// Pages put in all, with those that were there already.
    pub puts: u64,
    /// Pages put a second, syncs included but the last.
    pub ingest_per_s: f64,
    /// Seconds of the last sync.
    pub last_sync_s: f64,
    /// Of the method that the backend uses.
    pub probe_p50_us: f64,
    /// The same, the slowest in a hundred.
    pub probe_p99_us: f64,
    /// The same for four sequences in turn, p50.
    pub probe_warm_p50_us: f64,
    /// All methods.
    pub probes: Vec<Method>,
    /// One page.
    pub lookup_p50_us: f64,
    /// All pages of a run.
    pub range_p50_us: f64,
    /// Bytes to storage over 40 bytes a page put.
    pub write_amplification: Option<f64>,
    /// Bytes that the backend says it wrote, over the same.
    pub own_write_amplification: Option<f64>,
    /// Opening after a clean close, files in the page cache.
    pub recovery_ms: Option<f64>,
    /// The same, files not in the page cache.
    pub recovery_cold_ms: Option<f64>,
    /// Opening after SIGKILL.
    pub recovery_killed_ms: Option<f64>,
    /// Allocated blocks.
    pub disk_bytes_per_entry: Option<f64>,
    /// Resident after filling.
    pub memory_bytes_per_entry: f64,
    /// Pages removed a second at a full catalogue, as many being inserted meanwhile.
    pub removes_per_s: f64,
    /// Processor seconds of filling.
    pub cpu_s: f64,
}

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What no index can beat here.
    pub limits: Limits,
    /// By size, sync and backend.
    pub rows: Vec<Row>,
}

/// The rows as a table.
#[must_use]
pub fn show(report: &Report) -> String {
    let mut out = table(&[
        "backend",
        "entries",
        "sync",
        "ingest/s",
        "probe p50",
        "p99 us",
        "warm us",
        "lookup us",
        "run us",
        "write amp.",
        "own",
        "reopen ms",
        "cold",
        "killed",
        "disk B",
        "memory B",
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
                "\n{} at {}: probe by {} p50 {:.2} us, p99 {:.2} us",
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
        "{out}{more}\na record is {}; write amplification counts bytes to storage\n\
         limits: a read from memory {memory_access_ns:.0} ns, 4 KiB appended and synced \
         {append_sync_us:.0} us",
        bytes(40)
    )
}
