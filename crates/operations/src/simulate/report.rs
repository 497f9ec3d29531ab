//! Tables of hit rates: a policy per line, a capacity per column.

use ritornello_sim::Row;
use ritornello_terminal::print::{bytes, count, table};
use serde::Serialize;

/// The sizes of a replayed trace, and the defects found in its lines.
#[derive(Serialize)]
pub struct Summary {
    pub trace: String,
    pub requests: usize,
    pub block_references: usize,
    pub footprint_blocks: usize,
    pub block_bytes: u64,
    pub skipped_lines: Vec<u64>,
    pub clock_jumps: u64,
}

/// Formats a table for each trace; `rows` holds the same number of rows for each trace, in the
/// order of `traces`.
#[must_use]
pub fn tables(traces: &[Summary], rows: &[Row]) -> String {
    let each = rows.chunks((rows.len() / traces.len().max(1)).max(1));
    traces.iter().zip(each).map(|(trace, rows)| one(trace, rows)).collect::<Vec<_>>().join("\n\n")
}

fn one(trace: &Summary, rows: &[Row]) -> String {
    let mut capacities: Vec<f64> = Vec::new();
    let mut policies: Vec<&str> = Vec::new();
    for row in rows {
        if !capacities.contains(&row.capacity_fraction) {
            capacities.push(row.capacity_fraction);
        }
        if !policies.contains(&row.policy) {
            policies.push(row.policy);
        }
    }
    let columns = capacities.iter().map(|capacity| format!("{} %", percent(*capacity)));
    let header: Vec<String> = std::iter::once("hit rate %".to_owned()).chain(columns).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut out = table(&header);
    for policy in policies {
        let at = |capacity: &f64| {
            let row = rows.iter().find(|r| r.policy == policy && r.capacity_fraction == *capacity);
            row.map_or_else(String::new, |row| {
                format!("{:.1} ({:.2})", row.hit_rate * 100.0, row.writes_per_unique)
            })
        };
        out.add_row(std::iter::once(policy.to_owned()).chain(capacities.iter().map(at)));
    }
    let amplification = rows.iter().map(|row| row.write_amplification).fold(0.0, f64::max);
    let warm_up = rows.first().map_or(0.0, |row| row.warm_up);
    let seconds: f64 = rows.iter().map(|row| row.seconds).sum();
    let references = trace.block_references as f64 * rows.len() as f64;
    format!(
        "{}: {} requests, {} references to {} blocks of {}\n{out}\n\
         hit rates in % leave out the first {} % of the requests; in brackets: blocks written per \
         distinct block\n\
         bytes written / bytes admitted, maximum of the table: {amplification:.4}\n\
         simulated in {:.1} s, {} million block references per second",
        trace.trace,
        count(trace.requests as u64),
        count(trace.block_references as u64),
        count(trace.footprint_blocks as u64),
        bytes(trace.block_bytes),
        percent(warm_up),
        seconds,
        (references / seconds.max(1e-9) / 1e5).round() / 10.0
    )
}

/// Converts a share to percent, rounded to four decimal places.
#[must_use]
pub fn percent(share: f64) -> f64 {
    (share * 1e6).round() / 1e4
}
