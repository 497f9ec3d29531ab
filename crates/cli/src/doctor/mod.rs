//! `ritornello doctor`.

mod backend;
mod disk;
mod finding;
mod limits;
mod trial;

use crate::args::DoctorArgs;
use crate::exit::{Failure, Status};
use crate::print::{json, print_stdout, table};
use crate::{Context, open, progress};
use finding::{Finding, Level};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    /// Whether nothing is wrong; advice is allowed.
    healthy: bool,
    findings: &'a [Finding],
    /// Figures of the trial, if it ran to its end.
    trial: Option<trial::Rates>,
}

/// Examines a directory.
///
/// # Errors
/// If the path is not a directory, or holds other files.
pub fn run(context: &Context, args: &DoctorArgs) -> Result<Status, Failure> {
    match (&args.backend, &args.dir) {
        (Some(address), _) => backend::run(context, address, Duration::from_secs(args.timeout)),
        (None, Some(dir)) => directory(context, args, dir),
        (None, None) => Err(Failure::unusable("no directory to examine", "name a directory")),
    }
}

fn directory(context: &Context, args: &DoctorArgs, dir: &Path) -> Result<Status, Failure> {
    // A directory with other files can hold a temporary store.
    let bare = dir.is_dir() && !dir.join("MANIFEST").exists();
    let manifest = if bare { None } else { open::manifest(dir)? };
    let bar = progress::steps(3);
    bar.set_message("examining the disk");
    let mut findings = disk::examine(dir, manifest.as_ref(), args.capacity);
    bar.inc(1);
    bar.set_message("looking at limits");
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
