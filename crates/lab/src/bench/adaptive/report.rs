//! The report of `bench adaptive`, and the answers of the processes that measure one variant each.

use ritornello_store::IndexDecision;
use ritornello_terminal::print::{bytes, count, table};
use serde::{Deserialize, Serialize};

/// The name of the variant whose controller is on.
pub const ADAPTIVE: &str = "adaptive";

/// The report of `bench adaptive`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Pages in the index after all ten stages.
    pub entries: u64,
    /// Number of rounds.
    pub rounds: u32,
    /// Rows by memtable and variant; the first of each memtable has the controller on.
    pub rows: Vec<Row>,
    /// Latencies of puts in a variant whose target setting alternates.
    pub switch: Switch,
    /// Hit rates of the store and of two other ways to keep pages, from replays without an index.
    pub hits: Vec<HitRate>,
}

/// Figures of one variant with one memtable size: medians of the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// `adaptive`, or a fixed setting as T/K: size ratio and sorted runs per level.
    pub name: String,
    /// Bytes of the memtable.
    pub memtable: u64,
    /// Processor seconds of the stages, and of the compactions that were still due after the last
    /// stage.
    pub cost_s: f64,
    /// `cost_s` of each round.
    pub costs_s: Vec<f64>,
    /// `cost_s` divided by the `cost_s` of the cheapest fixed setting with the same memtable.
    pub to_best_static: f64,
    /// Bytes written to storage in the stages, and by the compactions that were still due after the
    /// last stage.
    pub written_bytes: u64,
    /// Median duration of a probe in all stages, in microseconds.
    pub probe_p50_us: f64,
    /// 99th percentile of the durations of probes in all stages, in microseconds.
    pub probe_p99_us: f64,
    /// Median duration of a put in all stages, in microseconds: a put is a run of at most 32 pages.
    pub put_p50_us: f64,
    /// 99th percentile of the durations of puts in all stages, in microseconds.
    pub put_p99_us: f64,
    /// Mean number of sorted runs over the stages.
    pub sorted_runs: f64,
    /// Bytes that compactions wrote divided by bytes that flushes wrote, since the first request.
    pub rewrites: f64,
    /// The stages.
    pub stages: Vec<Stage>,
    /// Samples of the tree's shape in the round with the median cost.
    pub samples: Vec<Sample>,
    /// Decisions of the controller in the round with the median cost.
    pub decisions: Vec<IndexDecision>,
    /// Costs that the index measured in the round with the median cost.
    pub prices: Prices,
}

/// Costs of operations as the index measured them, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Prices {
    /// Cost of rewriting an entry in a compaction.
    pub rewrite_ns: f64,
    /// Cost of checking the Bloom filter of one sorted run for one key.
    pub filter_ns: f64,
    /// Cost of fetching and searching a block.
    pub block_ns: f64,
    /// Cost of positioning an iterator on one sorted run.
    pub seek_ns: f64,
}

/// Figures of one stage of the workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Processor seconds, background threads included.
    pub cpu_s: f64,
    /// Elapsed seconds.
    pub wall_s: f64,
    /// Bytes written to storage; in the last stage, also by the compactions that were still due
    /// after it.
    pub written_bytes: u64,
    /// Number of requests in the stage.
    pub requests: u64,
    /// Median duration of a probe in microseconds.
    pub probe_p50_us: f64,
    /// 99th percentile of the durations of probes in microseconds.
    pub probe_p99_us: f64,
    /// Median duration of a put in microseconds.
    pub put_p50_us: f64,
    /// 99th percentile of the durations of puts in microseconds.
    pub put_p99_us: f64,
}

/// The shape of the LSM-tree at one moment.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Requests so far, including the warm-up.
    pub request: u64,
    /// Number of sorted runs in the column family of page hashes.
    pub sorted_runs: u64,
    /// Number of levels of an LSM-tree of this size with the applied setting, computed instead of
    /// counted; zero while all entries fit the memtable.
    pub levels: u32,
    /// Size ratio that was applied last.
    pub ratio: u32,
    /// Maximum sorted runs per level that was applied last.
    pub runs: u32,
    /// Whether the controller changed the target setting since the previous sample.
    pub decided: bool,
}

/// The answer of one variant's process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    /// The stages.
    pub stages: Vec<Stage>,
    /// Processor seconds of the process from the end of the last stage to the end of its
    /// compactions.
    pub owed_s: f64,
    /// Median duration of a probe over all stages, in microseconds.
    pub probe_p50_us: f64,
    /// 99th percentile of the durations of probes over all stages, in microseconds.
    pub probe_p99_us: f64,
    /// Median duration of a put over all stages, in microseconds.
    pub put_p50_us: f64,
    /// 99th percentile of the durations of puts over all stages, in microseconds.
    pub put_p99_us: f64,
    /// Bytes that compactions wrote divided by bytes that flushes wrote.
    pub rewrites: f64,
    /// Mean number of sorted runs over the stages.
    pub sorted_runs: f64,
    /// Samples of the tree's shape.
    pub samples: Vec<Sample>,
    /// Decisions of the controller.
    pub decisions: Vec<IndexDecision>,
    /// Costs that the index measured.
    pub prices: Prices,
    /// Puts while the tree moves to another setting.
    pub moving: Puts,
    /// Puts while the tree has its target setting.
    pub resting: Puts,
}

impl Answer {
    /// Returns the processor seconds of the stages, and of the compactions that were still due
    /// after the last stage.
    #[must_use]
    pub fn cost(&self) -> f64 {
        self.stages.iter().map(|stage| stage.cpu_s).sum::<f64>() + self.owed_s
    }
}

/// Latencies of puts, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Puts {
    /// Number of puts.
    pub puts: u64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

/// Latencies of puts in a variant whose target setting alternates; medians of the rounds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Switch {
    /// Puts while the tree moves to another setting.
    pub moving: Puts,
    /// Puts while the tree has its target setting.
    pub resting: Puts,
    /// 99th percentile of `moving` divided by the 99th percentile of `resting`: the median of the
    /// rounds' quotients.
    pub p99_ratio: f64,
}

/// Hit rate of one way to keep pages.
#[derive(Clone, Debug, Serialize)]
pub struct HitRate {
    /// Name of the way to keep pages.
    pub name: &'static str,
    /// Number of pages that fit in the bytes that each way may use.
    pub pages: u64,
    /// Pages hit divided by pages requested, in the stages.
    pub hit_rate: f64,
}

/// Formats the report as tables.
#[must_use]
pub fn show(report: &Report) -> String {
    let mut out = table(&[
        "memtable",
        "T/K",
        "CPU s",
        "to best static",
        "written",
        "probe p50 us",
        "probe p99 us",
        "put p50 us",
        "put p99 us",
        "sorted runs",
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
    let mut stages = table(&[
        "memtable",
        "T/K",
        "stage",
        "CPU ms per request",
        "probe p50 us",
        "put p50 us",
        "put p99 us",
    ]);
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
        table(&["memtable", "operations", "because", "writes", "T/K", "ns/op before", "ns/op"]);
    for row in report.rows.iter().filter(|row| row.name == ADAPTIVE) {
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
        "{stages}\n\n{decisions}\n\n{out}\n\nputs while the setting changes: p50 {:.1} us, p99 {:.1} us of {} puts; \
        other puts: p50 {:.1} us, p99 {:.1} us of {} puts; ratio of the p99 {p99_ratio:.3}\n\n\
        {hits}",
        moving.p50_us,
        moving.p99_us,
        count(moving.puts),
        resting.p50_us,
        resting.p99_us,
        count(resting.puts),
    )
}
