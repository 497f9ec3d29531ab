//! `ritornello doctor`: a trial of a store and checks of its machine, or checks of a remote.

mod backend;
mod disk;
mod finding;
mod limits;
mod trial;

use clap::Args;
use finding::{Finding, Level};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{json, print_stdout, table};
use ritornello_terminal::value::size;
use ritornello_terminal::{Context, open, progress};
use ritornello_tiers::remote::RemoteAddress;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writes pages, reads them back and compares every byte: in a temporary store inside DIR, or, if DIR
holds a store, in that store under a separate scope, which is dropped afterwards. Also examines
the I/O mode, huge pages, the file system, free space and limits, and recommends changes. Exit code
0: no fault, perhaps advice; 1: a fault.

With --backend the command checks that a remote's backend meets the requirements, and that the tier
over it loses only hits under faults: refusals, silence, truncated values, wrong bytes. The command
writes some MiB under separate object names.

Examples:
  ritornello doctor /nvme/kv
  ritornello doctor --backend s3://bucket/kv
  ritornello doctor /nvme --capacity 200GiB
  ritornello doctor /nvme/kv --json | jq '.findings[] | select(.level != \"fine\")'")]
pub struct DoctorArgs {
    /// A directory of a store, or for a future store
    #[arg(required_unless_present = "backend")]
    pub dir: Option<PathBuf>,
    /// Check a remote backend instead: its address, or MODULE:CLASS under Python
    #[arg(long, conflicts_with_all = ["dir", "capacity"])]
    pub backend: Option<RemoteAddress>,
    /// With --backend: timeout in seconds, 1 to 3600, of the conformance checks together, and of
    /// the check of each fault
    #[arg(long, default_value_t = 120, requires = "backend", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// With DIR: check whether a store of this capacity fits
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
}

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    /// Whether no finding is a fault; advice is allowed.
    healthy: bool,
    findings: &'a [Finding],
    /// Number of pages and transfer rates of the trial; `null` if the trial failed.
    trial: Option<trial::Rates>,
}

/// Examines a directory, or with `--backend` checks a remote.
///
/// # Errors
/// If the path is not a directory, if the manifest of its store cannot be read, or if the remote
/// cannot be opened.
pub fn run(context: &Context, args: &DoctorArgs) -> Result<Status, Failure> {
    match (&args.backend, &args.dir) {
        (Some(address), _) => backend::run(context, address, Duration::from_secs(args.timeout)),
        (None, Some(dir)) => directory(context, args, dir),
        (None, None) => Err(Failure::unusable("no directory to examine", "name a directory")),
    }
}

fn directory(context: &Context, args: &DoctorArgs, dir: &Path) -> Result<Status, Failure> {
    // Do not call `open::manifest` for a directory without a manifest: it refuses a directory with
    // other files, but the trial can make a temporary store there.
    let bare = dir.is_dir() && !dir.join("MANIFEST").exists();
    let manifest = if bare { None } else { open::manifest(dir)? };
    let bar = progress::steps(3);
    bar.set_message("examining the disk");
    let mut findings = disk::examine(dir, manifest.as_ref(), args.capacity);
    bar.inc(1);
    bar.set_message("examining limits");
    let segments = disk::segments(manifest.as_ref(), args.capacity);
    findings.extend(limits::examine(segments));
    bar.inc(1);
    bar.set_message("writing, reading, comparing");
    let trial = match trial::run(dir, manifest.is_some()) {
        Ok((rates, more)) => {
            findings.extend(more);
            Some(rates)
        }
        Err(failure) => {
            findings.push(Finding::wrong("trial", failure.line, failure.advice));
            None
        }
    };
    bar.finish_and_clear();
    let healthy = findings.iter().all(|finding| finding.level != Level::Wrong);
    if context.json {
        json(&Answer { dir, healthy, findings: &findings, trial });
    } else {
        print_stdout(&describe(healthy, &findings));
    }
    Ok(if healthy { Status::Fine } else { Status::Problems })
}

fn describe(healthy: bool, findings: &[Finding]) -> String {
    let mut out = table(&["", "what", "found"]);
    for finding in findings {
        let mark = match finding.level {
            Level::Fine => "ok",
            Level::Advice => "advice",
            Level::Wrong => "WRONG",
        };
        let mut found = finding.found.clone();
        if !finding.change.is_empty() {
            found = format!("{found}\n-> {}", finding.change);
        }
        out.add_row([mark, finding.what, &found]);
    }
    let verdict = if healthy { "nothing is wrong" } else { "something is wrong: see above" };
    format!("{out}\n{verdict}")
}
