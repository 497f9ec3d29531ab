//! `ritornello stat`.

mod unowned;

use crate::savings::{Savings, parse_price};
use clap::Args;
use ritornello_node::Observed;
use ritornello_store::eviction::EvictionStats;
use ritornello_store::{CatalogStats, IndexDecision, IndexTuning, PiecePercentiles};
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::open;
use ritornello_terminal::print::{bytes, count, json, percent, print_stdout, table};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Arguments of `stat`.
#[derive(Debug, Args)]
#[command(after_help = "\
If a running process owns the store, the command asks it through its socket, also while an engine
uses the store. Otherwise the command reads the store's manifest, scopes and newest checkpoint, and
says so. The command never owns the store and changes none of its files. It must run as the user
that created the store.

Fields of --json with and without an owner: dir, uuid, owner_epoch, index, capacity_bytes,
segment_bytes, segments, paths, scopes, and owner_pid, which is null without an owner. Without an
owner there are also clean, last_owner, first_scopes, checkpoint, journal_bytes and problems; all
other fields exist only with an owner.

Savings are tokens that engines loaded and did not compute, since the owner opened the store, with
an estimate of the time to compute them (field `savings`). PRICE is the price of an hour of all GPUs
of one engine, in any currency; the money is an estimate.

Exit code 1: a directory is absent, the store is poisoned (a write or sync of its owner failed), or
files of a store without an owner are damaged or unreadable. Exit code 2: no store, or the owner
does not answer.

Examples:
  ritornello stat /nvme/kv
  ritornello stat /nvme/kv --gpu-hour 2.5
  ritornello stat /nvme/kv --json | jq '.pages // .checkpoint.pages'")]
pub struct StatArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Price the saved time: the price of an hour of an engine's GPUs
    #[arg(long, value_name = "PRICE", value_parser = parse_price)]
    pub gpu_hour: Option<f64>,
}

/// Advice for a poisoned store.
pub const REOPENS: &str =
    "check the disk (dmesg); the owner reopens the store when the disk takes writes again";
/// Maximum number of decisions about the shape of the index `lsm` (its size ratio and its runs per
/// level) in text output; `--json` may have more.
const DECISIONS: usize = 8;

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    #[serde(flatten)]
    stats: &'a CatalogStats,
    savings: Option<&'a Savings>,
}

/// Prints the contents and the state of a store.
///
/// # Errors
/// If there is no store, its owner does not answer, or its files cannot be read.
pub fn run(context: &Context, args: &StatArgs) -> Result<Status, Failure> {
    let observed = open::observed(&args.dir)?;
    let dir = &std::fs::canonicalize(&args.dir)?;
    let stats = match &observed {
        Observed::Owned(stats) => stats,
        Observed::Unowned(stored) => {
            return Ok(unowned::show(context, dir, stored, args.gpu_hour.is_some()));
        }
    };
    let savings = &Savings::of(&stats.counters, args.gpu_hour);
    if context.json {
        json(&Answer { dir, stats, savings: savings.as_ref() });
    } else {
        print_stdout(&describe(dir, stats, savings.as_ref(), args.gpu_hour.is_some()));
    }
    let problems = !stats.absent_space.reasons.is_empty() || stats.poisoned.is_some();
    Ok(if problems { Status::Problems } else { Status::Fine })
}

/// Formats how many free extents there are in each of the six largest size classes that have any.
fn extents(sizes: &BTreeMap<u64, u64>) -> String {
    let shown: Vec<String> = sizes
        .iter()
        .rev()
        .take(6)
        .map(|(least, number)| format!("{number} from {}", bytes(*least)))
        .collect();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

/// Formats percentiles of the number of extents that hold parts of a page (its pieces), for pages
/// up to 256 KiB and for longer pages. `None` if the store has no pages.
fn pieces(small: PiecePercentiles, large: PiecePercentiles) -> Option<String> {
    let kinds = [("up to 256 KiB", small), ("longer", large)];
    let there = kinds.into_iter().filter(|(_, of)| of.max > 0).map(|(kind, of)| {
        format!("{kind}: half in {}, 99 % in {}, all in {}", of.p50, of.p99, of.max)
    });
    let there: Vec<String> = there.collect();
    (!there.is_empty()).then(|| there.join("; "))
}

/// Formats the index's name, its memory, its bytes on disk, and its memory ceiling if it has one.
fn index(s: &CatalogStats) -> String {
    let mut text = format!(
        "{}: {} of memory, {} on disk",
        s.index,
        bytes(s.index_memory_bytes),
        bytes(s.index_disk_bytes)
    );
    if s.index_memory_max_bytes > 0 {
        let (percent, most) = (s.index_memory_percent, bytes(s.index_memory_max_bytes));
        text += &format!("; {percent} % full under its memory ceiling of {most}");
    }
    text
}

/// Formats the shape of an LSM-tree on one line.
fn shape(tuning: &IndexTuning) -> String {
    let moving = (tuning.ratio, tuning.runs) != (tuning.target_ratio, tuning.target_runs);
    let target = if moving {
        format!(", target {} and {}", tuning.target_ratio, tuning.target_runs)
    } else {
        String::new()
    };
    format!(
        "size ratio {}, at most {} runs per level{target}; {} levels, {} sorted runs now, \
         each byte rewritten {:.2} times{}",
        tuning.ratio,
        tuning.runs,
        tuning.levels,
        tuning.sorted_runs,
        tuning.rewrites,
        if tuning.adaptive { "" } else { "; fixed" }
    )
}

/// Formats the store's eviction policy, and the hit rates of the shadow caches of the policies that
/// it compares.
#[must_use]
pub fn eviction(stats: &EvictionStats) -> String {
    let mut text = stats.policy.clone();
    if !stats.following.is_empty() {
        text += &format!(" follows {} ({} changes)", stats.following, stats.switches);
    }
    let requested = stats.shadows.iter().filter(|shadow| shadow.requested > 0);
    let rates: Vec<String> = requested
        .map(|s| format!("{} {}", s.name, percent(s.hits as f64 / s.requested as f64)))
        .collect();
    if !rates.is_empty() {
        text += &format!("; would hit: {}", rates.join(", "));
    }
    text
}

/// Formats the latest decisions about the shape of the index `lsm`, newest first.
fn decisions(decided: &[IndexDecision]) -> impl std::fmt::Display {
    let header = [
        "operations",
        "because",
        "writes",
        "hits",
        "empty",
        "ranges",
        "T, K",
        "ns/op before",
        "ns/op",
    ];
    let mut out = table(&header);
    for made in decided.iter().rev().take(DECISIONS) {
        let share = |of: f64| format!("{:.0} %", of * 100.0);
        let to = format!("{}, {}", made.ratio, made.runs);
        let stays = (made.ratio, made.runs) == (made.ratio_from, made.runs_from);
        out.add_row([
            count(made.at),
            made.reason.clone(),
            share(made.writes),
            share(made.hits),
            share(made.empty),
            format!("{:.1} %", made.ranges * 100.0),
            if stays { to } else { format!("{}, {} -> {to}", made.ratio_from, made.runs_from) },
            format!("{:.0}", made.cost_from_ns),
            format!("{:.0}", made.cost_ns),
        ]);
    }
    out
}

/// Formats the text output for a store with an owner. `is_priced`: the caller named the price of an
/// hour of an engine's GPUs.
fn describe(dir: &Path, s: &CatalogStats, savings: Option<&Savings>, is_priced: bool) -> String {
    let mut out = table(&[]);
    let mut row = |name: &str, value: String| {
        out.add_row([name.to_owned(), value]);
    };
    row("store", format!("{}  {}", dir.display(), s.uuid));
    row("owned by", format!("process {}, {} clients", s.owner_pid, s.clients));
    row("pages", format!("{} in {} runs, {} scopes", count(s.pages), count(s.runs), s.scopes));
    row(
        "capacity",
        format!(
            "{} of {} allocated, {} in use",
            bytes(s.allocated_bytes),
            bytes(s.capacity_bytes),
            bytes(s.used_bytes)
        ),
    );
    row(
        "segments",
        format!(
            "{} of {} x {}, {} files",
            s.segments,
            s.segments_max,
            bytes(s.segment_bytes),
            s.files
        ),
    );
    row(
        "space",
        format!(
            "{} free, {} becoming free, {} removed but leased, {} being written, {} quarantined",
            bytes(s.free_bytes),
            bytes(s.limbo_bytes),
            bytes(s.deferred_bytes),
            bytes(s.reserved_bytes),
            bytes(s.quarantined_bytes)
        ),
    );
    let h = &s.health;
    row(
        "allocator",
        format!(
            "{} kept free, {} of padding, {:.2} extents per run, free extents: {}",
            bytes(h.reserve_bytes),
            bytes(h.padding_bytes),
            h.extents_per_run,
            extents(&s.free_extents)
        ),
    );
    if let Some(pieces) = pieces(h.small_pages, h.large_pages) {
        row("pieces per page", pieces);
    }
    row(
        "written",
        format!(
            "{} to segments for pages of {} ({:.3} times), {} by the index",
            bytes(h.written_bytes),
            bytes(h.admitted_bytes),
            h.write_amplification,
            bytes(s.index_written_bytes)
        ),
    );
    if h.sealed_bytes > 0 {
        row("shrinking", format!("{} of segments are being emptied", bytes(h.sealed_bytes)));
    }
    for path in s.paths.iter().filter(|path| s.paths.len() > 1 || path.draining) {
        let draining = if path.draining { ", draining" } else { "" };
        let used = bytes(path.used_bytes);
        row("path", format!("{}: {} segments, {used} in use{draining}", path.dir, path.segments));
    }
    row("index", index(s));
    if let Some(lsm) = &s.index_as_lsm {
        row(
            "as lsm",
            format!(
                "about {} of memory at most, {} on disk (estimated from {} pages and {} runs)",
                bytes(lsm.memory_bytes),
                bytes(lsm.disk_bytes),
                count(s.pages),
                count(s.runs)
            ),
        );
    }
    if let Some(tuning) = &s.index_tuning {
        row("index shape", shape(tuning));
    }
    row(
        "I/O",
        format!(
            "{}{}, staging in {} pages, {}",
            s.io.mode,
            match (s.io.direct, &*s.io.mode) {
                (true, _) => ", past the page cache",
                (false, "mapped") => "",
                (false, _) => ", through the page cache",
            },
            if s.io.huge_pages { "huge" } else { "small" },
            s.io.file_system
        ),
    );
    row("durability", s.durability.clone());
    let budget = s.admission.budget_bytes_per_day;
    let budget = budget.map(|bytes_a_day| {
        let left = bytes(s.admission.available_bytes.unwrap_or_default());
        format!(", budget {} per day, {left} of it available now", bytes(bytes_a_day))
    });
    row("admission", format!("{}{}", s.admission.policy, budget.unwrap_or_default()));
    row("eviction", eviction(&s.eviction));
    row("retained", bytes(s.retained_bytes));
    match savings {
        Some(savings) => row("savings", savings.line()),
        None if is_priced => row("savings", "unknown: the owner's build counts none".to_owned()),
        None => {}
    }
    row("opened in", format!("{:.1} ms, epoch {}", s.open_ms, s.owner_epoch));
    for (reason, pages) in &s.dropped_at_open {
        row("repaired at open", format!("{reason}: {}", count(*pages)));
    }
    if let Some(cause) = &s.poisoned {
        row("POISONED", format!("{cause}: {}", REOPENS));
    }
    for reason in &s.absent_space.reasons {
        row("DEGRADED", reason.clone());
    }
    if s.absent_space.runs > 0 {
        row(
            "absent space",
            format!("{} runs, misses until their space is present", count(s.absent_space.runs)),
        );
    }
    for warning in &s.io.warnings {
        row("warning", warning.clone());
    }
    let mut scopes = table(&["scope", "model", "codec", "pages", "bytes", "quota", "retained"]);
    for scope in &s.largest_scopes {
        scopes.add_row([
            scope.id.chars().take(8).collect(),
            scope.model.chars().take(32).collect(),
            scope.codec.clone(),
            count(scope.pages),
            bytes(scope.bytes),
            scope.quota_bytes.map_or_else(|| "none".to_owned(), bytes),
            format!("{} of {}", bytes(scope.retained_bytes), bytes(scope.retained_bytes_max)),
        ]);
    }
    let decided = s.index_tuning.as_ref().map(|tuning| &tuning.decisions[..]).unwrap_or_default();
    // Omit counters with `_within_` in their names, which are buckets of histograms of durations, and
    // the lengths of queues, which are not counted.
    let is_counted = |name: &str| {
        !name.contains("_within_") && !name.starts_with("queued_") && !name.starts_with("loading_")
    };
    let is_shown = |name: &str, value: u64| value > 0 && is_counted(name);
    let counted: Vec<_> =
        s.counters.iter().filter(|(name, value)| is_shown(name, **value)).collect();
    let mut text = out.to_string();
    if !s.largest_scopes.is_empty() {
        text = format!("{text}\n{scopes}");
    }
    if !decided.is_empty() {
        text = format!("{text}\n{}", decisions(decided));
    }
    if !counted.is_empty() {
        let mut counters = table(&["counted since open", ""]);
        for (name, value) in counted {
            counters.add_row([name.clone(), count(*value)]);
        }
        text = format!("{text}\n{counters}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuning_shows_target_and_newest_decisions() {
        let mut tuning = IndexTuning { ratio: 4, runs: 2, ..IndexTuning::default() };
        (tuning.target_ratio, tuning.target_runs) = (6, 5);
        assert!(shape(&tuning).contains("4, at most 2 runs per level, target 6 and 5"));
        assert!(shape(&tuning).ends_with("fixed"));
        let made = |at| IndexDecision { at, ratio_from: 4, ratio: 6, ..IndexDecision::default() };
        let text = decisions(&(0..20).map(made).collect::<Vec<_>>()).to_string();
        assert!(text.find("19").unwrap() < text.find("12").unwrap(), "{text}");
        assert!(!text.contains("11") && text.contains("4, 0 -> 6, 0"), "{text}");
    }

    #[test]
    fn piece_counts_are_omitted_without_pages() {
        let one = PiecePercentiles { p50: 1, p99: 2, max: 3 };
        let (none, line) = (PiecePercentiles::default(), "half in 1, 99 % in 2, all in 3");
        assert_eq!(pieces(none, none), None);
        assert_eq!(pieces(one, none), Some(format!("up to 256 KiB: {line}")));
        assert_eq!(pieces(none, one), Some(format!("longer: {line}")));
        let both = format!("up to 256 KiB: {line}; longer: {line}");
        assert_eq!(pieces(one, one), Some(both));
    }
}
