//! What came of it.

use crate::print::{bytes, count, table};
use ritornello_store::IndexDecision;
use serde::{Deserialize, Serialize};

/// Everything.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Pages after the last stage.
    pub entries: u64,
    /// Rounds.
    pub rounds: u32,
    /// By memtable and variant; the first of each memtable has the controller on.
    pub rows: Vec<Row>,
    /// Puts while the shape changes.
    pub switch: Switch,
    /// Hit rates, without an index.
    pub hits: Vec<HitRate>,
}

/// One variant with one memtable; medians of the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// `adaptive`, or T/K.
    pub name: String,
    /// Bytes of the memtable.
    pub memtable: u64,
    /// Processor seconds of the stages and of what compactions they owed.
    pub cost_s: f64,
    /// That of each round.
    pub costs_s: Vec<f64>,
    /// To that of the cheapest setting that stays.
    pub to_best_static: f64,
    /// Bytes written to storage in the stages.
    pub written_bytes: u64,
    /// Of the probes of all stages.
    pub probe_p50_us: f64,
    /// Likewise.
    pub probe_p99_us: f64,
    /// Of the puts of all stages: a put is a run of 32 pages.
    pub put_p50_us: f64,
    /// Likewise.
    pub put_p99_us: f64,
    /// Sorted runs, the mean over the stages.
    pub sorted_runs: f64,
    /// Bytes that compactions wrote over bytes that flushes wrote, from the first request on.
    pub rewrites: f64,
    /// The stages.
    pub stages: Vec<Stage>,
    /// The shape, of the round with the median cost.
    pub samples: Vec<Sample>,
    /// The decisions of that round.
    pub decisions: Vec<IndexDecision>,
    /// Nanoseconds that the index measured in that round.
    pub prices: Prices,
}

/// What an index found things to cost.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Prices {
    /// An entry written once more.
    pub rewrite_ns: f64,
    /// A filter asked.
    pub filter_ns: f64,
    /// A block fetched and searched.
    pub block_ns: f64,
    /// An iterator placed on a run.
    pub seek_ns: f64,
}

/// One stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Processor seconds, background included.
    pub cpu_s: f64,
    /// Seconds.
    pub wall_s: f64,
    /// Bytes to storage.
    pub written_bytes: u64,
    /// Requests.
    pub requests: u64,
    /// Microseconds of a probe.
    pub probe_p50_us: f64,
    /// Likewise.
    pub probe_p99_us: f64,
    /// Microseconds of a put.
    pub put_p50_us: f64,
    /// Likewise.
    pub put_p99_us: f64,
}

/// The shape at one moment.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Requests so far, the warm-up's too.
    pub request: u64,
    /// Sorted runs.
    pub sorted_runs: u64,
    /// Levels.
    pub levels: u32,
    /// Size ratio in force.
    pub ratio: u32,
    /// Runs a level in force.
    pub runs: u32,
    /// Whether a decision moved the target since the sample before.
    pub decided: bool,
}

/// What one process answers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    /// The stages.
    pub stages: Vec<Stage>,
    /// Processor seconds after the last one, until nothing was owed.
    pub owed_s: f64,
    /// Over all stages.
    pub probe_p50_us: f64,
    /// Likewise.
    pub probe_p99_us: f64,
    /// Likewise.
    pub put_p50_us: f64,
    /// Likewise.
    pub put_p99_us: f64,
    /// Bytes that compactions wrote over bytes that flushes wrote.
    pub rewrites: f64,
    /// Sorted runs, the mean over the stages.
    pub sorted_runs: f64,
    /// The shape.
    pub samples: Vec<Sample>,
    /// Decisions.
    pub decisions: Vec<IndexDecision>,
    /// Prices.
    pub prices: Prices,
    /// Puts on the way to another setting, and not.
    pub moving: Puts,
    /// Likewise.
    pub resting: Puts,
}

impl Answer {
    /// Processor seconds of the stages and of what they owed.
    #[must_use]
    pub fn cost(&self) -> f64 {
        self.stages.iter().map(|stage| stage.cpu_s).sum::<f64>() + self.owed_s
    }
}

/// Puts, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Puts {
    /// How many.
    pub puts: u64,
    /// TracePart are faster.
    pub p50_us: f64,
    /// One in a hundred is slower.
    pub p99_us: f64,
}

/// Puts while the setting changes, medians of the rounds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Switch {
    /// While the tree was on its way.
    pub moving: Puts,
    /// While it was not.
    pub resting: Puts,
    /// p99 of the one over that of the other, round by round.
    pub p99_ratio: f64,
}

/// Hits of one way to keep pages.
#[derive(Clone, Debug, Serialize)]
pub struct HitRate {
    /// Which.
    pub name: &'static str,
    /// Pages that fit.
    pub pages: u64,
    /// Hits a page asked for, in the stages.
    pub hit_rate: f64,
}

/// As tables.
#[must_use]
pub fn show(report: &Report) -> String {
    let mut out = table(&[
        "memtable",
        "T/K",
        "CPU s",
        "to best static",
        "written",
        "probe p50",
        "p99 us",
        "put p50",
        "p99 us",
        "runs",
        "rewrites",
    ]);
    for row in &report.rows {
        out.add_row([
            bytes(row.memtable),
            row.name.clone(),
            format!("{:.2}", row.cost_s),
            format!("{:.3}", row.to_best_static),
            bytes(row.written_bytes),
            format!("{:.1}", row.probe_p50_us),
            format!("{:.1}", row.probe_p99_us),
            format!("{:.1}", row.put_p50_us),
            format!("{:.1}", row.put_p99_us),
            format!("{:.1}", row.sorted_runs),
            format!("{:.2}", row.rewrites),
        ]);
    }
    let mut stages =
        table(&["memtable", "T/K", "stage", "CPU ms a request", "probe p50", "put p50", "p99 us"]);
    for row in &report.rows {
        for (number, stage) in row.stages.iter().enumerate() {
            stages.add_row([
                bytes(row.memtable),
                row.name.clone(),
                (number + 1).to_string(),
                format!("{:.2}", stage.cpu_s * 1e3 / stage.requests.max(1) as f64),
                format!("{:.1}", stage.probe_p50_us),
                format!("{:.1}", stage.put_p50_us),
                format!("{:.1}", stage.put_p99_us),
            ]);
        }
    }
    let mut decisions =
        table(&["memtable", "operations", "because", "writes", "T/K", "ns before", "ns"]);
    for row in report.rows.iter().filter(|row| row.name == super::ADAPTIVE) {
        for made in &row.decisions {
            decisions.add_row([
                bytes(row.memtable),
                count(made.at),
                made.reason.clone(),
                format!("{:.2}", made.writes),
                format!("{}/{} -> {}/{}", made.ratio_from, made.runs_from, made.ratio, made.runs),
                format!("{:.0}", made.cost_from_ns),
                format!("{:.0}", made.cost_ns),
            ]);
        }
    }
    let mut hits = table(&["kept in", "pages that fit", "hit rate"]);
    for row in &report.hits {
        hits.add_row([row.name.to_owned(), count(row.pages), format!("{:.3}", row.hit_rate)]);
    }
    let Switch { moving, resting, p99_ratio } = report.switch;
    format!(
        "{stages}\n\n{decisions}\n\n{out}\n\nputs while the setting changes: p50 {:.1} us, p99 {:.1} us of {}; \
         otherwise p50 {:.1} us, p99 {:.1} us of {}; p99 to p99 {p99_ratio:.3}\n\n{hits}",
        moving.p50_us,
        moving.p99_us,
        count(moving.puts),
        resting.p50_us,
        resting.p99_us,
        count(resting.puts),
    )
}
