//! `ritornello bench adaptive`: the controller of the index `lsm`
//! (`crates/index/src/lsm/controller.rs`), which adapts the shape of the LSM-tree (size ratio T,
//! runs per level K) to the load, against fixed settings.
//!
//! | module | contents |
//! |---|---|
//! | `args` | command-line arguments |
//! | `part` | one variant, in a separate process |
//! | `hits` | hit rates of replays without an index: store, a file for each page, memory |
//! | `report` | rows and tables |
//! | `chart` | charts |

pub mod args;
mod chart;
mod hits;
#[cfg(feature = "lsm")]
mod part;
mod report;

#[cfg(feature = "lsm")]
pub use part::run as run_part;

use super::child::self_command;
use super::disk;
use super::quantile::median;
use args::{AdaptiveArgs, SettingArg};
use report::{ADAPTIVE, Answer, Puts, Report, Row, Stage, Switch};
use ritornello_index::tuning::Setting;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::plot;
use ritornello_terminal::print::{json, print_stdout};
use ritornello_terminal::scratch::Scratch;
use ritornello_terminal::{Context, progress};
use std::path::Path;
use std::process::Stdio;

/// Charts in one row.
const CHARTS_ABREAST: usize = 2;
/// Settings between which the target alternates in the measurement of a switch.
const SWING_SETTINGS: [SettingArg; 2] =
    [SettingArg(Setting { ratio: 4, runs: 1 }), SettingArg(Setting { ratio: 6, runs: 5 })];
/// Bytes per page of a memtable that holds all pages.
const MEMTABLE_BYTES_PER_PAGE: u64 = 512;
/// Bytes of the small memtable, with which all variants are measured a second time unless
/// `--memtable` is given.
const SMALL_MEMTABLE_BYTES: u64 = 2 << 20;
/// Free disk space that a measurement needs, in bytes per page.
const DISK_BYTES_PER_PAGE: u64 = 2048;

/// Refuses to run a part, because the index `lsm` is not compiled in.
///
/// # Errors
/// Always.
#[cfg(not(feature = "lsm"))]
pub fn run_part(_: &args::AdaptivePart) -> Result<Status, Failure> {
    Err(not_compiled())
}

fn not_compiled() -> Failure {
    Failure::unusable(
        "`bench adaptive` measures the index `lsm`, which is not compiled in",
        "`make binary-lsm`, or the cargo feature `lsm` of ritornello-cli",
    )
}

/// Measures all variants and prints the report.
///
/// # Errors
/// If the index `lsm` is not compiled in, space is missing, a variant or the replay for the hit
/// rates fails, or the chart cannot be written.
pub fn run(context: &Context, args: &AdaptiveArgs) -> Result<Status, Failure> {
    if cfg!(not(feature = "lsm")) {
        return Err(not_compiled());
    }
    let memtables = match &args.memtable[..] {
        [] => vec![args.entries * MEMTABLE_BYTES_PER_PAGE, SMALL_MEMTABLE_BYTES],
        given => given.to_vec(),
    };
    let dir = disk::choose(args.dir.as_deref(), args.entries * DISK_BYTES_PER_PAGE)?;
    let scratch = Scratch::new(&dir, "bench")?;
    let bench = Bench { context, args, dir: scratch.path() };
    let variants = args.settings.len() + 1;
    let steps = (memtables.len() * variants + 1) * args.rounds as usize;
    let progress = progress::steps(steps as u64);
    let mut report = Report { entries: args.entries, rounds: args.rounds, ..Report::default() };
    let least = memtables.iter().min().copied().unwrap_or(SMALL_MEMTABLE_BYTES);
    for &memtable in &memtables {
        let mut answers = vec![Vec::new(); variants];
        for round in 0..args.rounds as usize {
            // Each round starts with another variant, so that a drift of the disk affects all
            // variants equally.
            for turn in 0..variants {
                let at = (turn + round) % variants;
                let setting = at.checked_sub(1).map(|at| args.settings[at]);
                progress.set_message(format!("{memtable} bytes, {}", name(setting)));
                answers[at].push(bench.ask(memtable, setting, None)?);
                progress.inc(1);
            }
        }
        report.rows.extend(rows(memtable, &args.settings, &answers));
    }
    let mut swings = Vec::new();
    for _ in 0..args.rounds {
        progress.set_message("a switch of the setting");
        swings.push(bench.ask(least, Some(SWING_SETTINGS[0]), Some(SWING_SETTINGS[1]))?);
        progress.inc(1);
    }
    report.switch = switch(&swings);
    report.hits = hits::measure(args)?;
    progress.finish_and_clear();
    if let Some(file) = &args.chart {
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.memtable == least).collect();
        plot::write(file, &chart::panels(&rows), CHARTS_ABREAST)?;
    }
    if context.json {
        json(&report);
    } else {
        print_stdout(&report::show(&report));
    }
    Ok(Status::Fine)
}

fn name(setting: Option<SettingArg>) -> String {
    setting.map_or_else(|| ADAPTIVE.to_owned(), |value| value.to_string())
}

struct Bench<'a> {
    context: &'a Context,
    args: &'a AdaptiveArgs,
    dir: &'a Path,
}

impl Bench<'_> {
    /// Runs a variant in a separate process and returns its answer.
    fn ask(
        &self,
        memtable: u64,
        setting: Option<SettingArg>,
        swing: Option<SettingArg>,
    ) -> Result<Answer, Failure> {
        let dir = self.dir.join("index");
        let mut command = self_command(self.context)?;
        command.arg("adaptive").arg(&dir);
        let mut word = |name: &str, value: String| {
            command.args([name, &value]);
        };
        word("--entries", self.args.entries.to_string());
        word("--stages", self.args.stages.to_string());
        word("--probes", self.args.probes.to_string());
        word("--memtable", memtable.to_string());
        if let Some(value) = setting {
            word("--setting", value.to_string());
        }
        if let Some(value) = swing {
            word("--swing", value.to_string());
        }
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        std::fs::remove_dir_all(&dir)?;
        let failed = |why: String| {
            let line = format!("the process of variant {} failed: {why}", name(setting));
            Failure::failed(line, "the output above, which names the cause")
        };
        if !output.status.success() {
            return Err(failed(output.status.to_string()));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))
    }
}

/// Returns a row for each variant: the medians of its rounds. The samples of the tree's shape, the
/// decisions of the controller and the costs that the index measured (`prices`) come from the round
/// whose cost is nearest to the median.
fn rows(memtable: u64, settings: &[SettingArg], answers: &[Vec<Answer>]) -> Vec<Row> {
    let costs: Vec<f64> = answers.iter().map(|of| middle(of, Answer::cost)).collect();
    let best = costs[1..].iter().copied().fold(f64::INFINITY, f64::min);
    let mut rows = Vec::new();
    for (at, of) in answers.iter().enumerate() {
        let cost_s = costs[at];
        let off = |answer: &&Answer| (answer.cost() - cost_s).abs();
        let usual = of.iter().min_by(|a, b| off(a).total_cmp(&off(b))).cloned().unwrap_or_default();
        rows.push(Row {
            name: name(at.checked_sub(1).map(|at| settings[at])),
            memtable,
            cost_s,
            costs_s: of.iter().map(Answer::cost).collect(),
            to_best_static: cost_s / best,
            written_bytes: middle(of, |answer| {
                answer.stages.iter().map(|stage| stage.written_bytes).sum::<u64>() as f64
            }) as u64,
            probe_p50_us: middle(of, |answer| answer.probe_p50_us),
            probe_p99_us: middle(of, |answer| answer.probe_p99_us),
            put_p50_us: middle(of, |answer| answer.put_p50_us),
            put_p99_us: middle(of, |answer| answer.put_p99_us),
            sorted_runs: middle(of, |answer| answer.sorted_runs),
            rewrites: middle(of, |answer| answer.rewrites),
            stages: stages(of),
            samples: usual.samples,
            decisions: usual.decisions,
            prices: usual.prices,
        });
    }
    rows
}

fn middle(answers: &[Answer], of: impl Fn(&Answer) -> f64) -> f64 {
    median(&answers.iter().map(of).collect::<Vec<_>>())
}

fn stages(answers: &[Answer]) -> Vec<Stage> {
    let count = answers.iter().map(|answer| answer.stages.len()).min().unwrap_or(0);
    let stage = |at: usize| {
        let of =
            |value: &dyn Fn(&Stage) -> f64| middle(answers, |answer| value(&answer.stages[at]));
        Stage {
            cpu_s: of(&|stage| stage.cpu_s),
            wall_s: of(&|stage| stage.wall_s),
            written_bytes: of(&|stage| stage.written_bytes as f64) as u64,
            requests: answers[0].stages[at].requests,
            probe_p50_us: of(&|stage| stage.probe_p50_us),
            probe_p99_us: of(&|stage| stage.probe_p99_us),
            put_p50_us: of(&|stage| stage.put_p50_us),
            put_p99_us: of(&|stage| stage.put_p99_us),
        }
    };
    (0..count).map(stage).collect()
}

fn switch(answers: &[Answer]) -> Switch {
    let puts = |of: &dyn Fn(&Answer) -> Puts| Puts {
        puts: middle(answers, |answer| of(answer).puts as f64) as u64,
        p50_us: middle(answers, |answer| of(answer).p50_us),
        p99_us: middle(answers, |answer| of(answer).p99_us),
    };
    Switch {
        moving: puts(&|answer| answer.moving),
        resting: puts(&|answer| answer.resting),
        p99_ratio: middle(answers, |answer| answer.moving.p99_us / answer.resting.p99_us.max(1e-9)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_relative_to_best_static_setting() {
        let answer = |cost: f64| Answer { owed_s: cost, ..Answer::default() };
        let answers = [[2.0, 2.2], [4.0, 4.0], [2.0, 2.0]].map(|of| of.map(answer).to_vec());
        let rows = rows(1 << 20, &SWING_SETTINGS, &answers);
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, [ADAPTIVE, "4/1", "6/5"]);
        assert_eq!(rows[0].to_best_static, 1.1);
        assert_eq!((rows[1].to_best_static, rows[2].to_best_static), (2.0, 1.0));
    }
}
