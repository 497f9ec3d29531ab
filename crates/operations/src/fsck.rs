//! `ritornello fsck`: reads and verifies the pages of a store that no process uses, except pages in
//! absent directories.

use clap::Args;
use ritornello_store::Verification;
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, count, json, print_stdout, table};
use ritornello_terminal::{open, progress};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Arguments of `fsck`.
#[derive(Debug, Args)]
#[command(after_help = "\
Pages that fail verification or cannot be read are listed, and removed from the index, in chained
scopes with the pages that follow them; gets never deliver them. Pages in absent directories are not
read, and stay. Exit code 0: clean; 1: some pages failed or could not be read, or opening the store
repaired damage.

--salvage then searches all segments for pages missing in the index (because it was damaged or
deleted) and restores the pages that verify. Dropped scopes stay dropped.

Examples:
  ritornello fsck /nvme/kv
  ritornello fsck /nvme/kv --salvage
  ritornello fsck /nvme/kv --json | jq '.findings[] | .reason'")]
pub struct FsckArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Restore pages that are in the segments but not in the index, after the verification
    #[arg(long)]
    pub salvage: bool,
}

/// Maximum number of findings in text output; `--json` lists the first 10,000.
const FINDINGS_SHOWN: usize = 20;
/// The key in `dropped_at_open` of pages of a scope that was dropped before a crash. The crash
/// undid their removal from the index, and opening the store removed them again: they are not
/// damage.
const HARMLESS: &str = "dropped_scope";

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    /// Whether no page failed verification, was unreadable or was dropped, and opening the store
    /// repaired no damage.
    clean: bool,
    #[serde(flatten)]
    verification: &'a Verification,
    /// Items that opening the store dropped or repaired, by reason: pages, but segments for
    /// `segments_cut_short`, and 1 for a damaged `scope_registry`.
    dropped_at_open: &'a BTreeMap<String, u64>,
}

/// Reads and verifies every page outside absent directories.
///
/// # Errors
/// If the store is in use, or cannot be opened, verified or closed.
pub fn run(context: &Context, args: &FsckArgs) -> Result<Status, Failure> {
    let node =
        if args.salvage { open::for_salvage(&args.dir)? } else { open::existing(&args.dir)? };
    let Some(core) = node.core() else {
        let pid = node.store().stats().map_or(0, |stats| stats.catalog.owner_pid);
        return Err(Failure::unusable(
            format!("process {pid} owns the store in {}", args.dir.display()),
            format!("stop process {pid} and run this again, or run `ritornello stat` instead"),
        ));
    };
    let bar = progress::bar("verifying");
    let verification = core.verify(args.salvage, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done.min(total));
    })?;
    bar.finish_and_clear();
    let dropped = core.stats()?.dropped_at_open;
    node.close()?;
    let damage = dropped.keys().any(|reason| reason != HARMLESS);
    let clean = verification.findings.is_empty() && verification.pages_dropped == 0 && !damage;
    if context.json {
        json(&Answer {
            dir: &args.dir,
            clean,
            verification: &verification,
            dropped_at_open: &dropped,
        });
    } else {
        print_stdout(&describe(args, clean, &verification, &dropped));
    }
    Ok(if clean { Status::Fine } else { Status::Problems })
}

fn describe(
    args: &FsckArgs,
    clean: bool,
    v: &Verification,
    dropped: &BTreeMap<String, u64>,
) -> String {
    let mut lines = vec![format!(
        "{} pages of {} runs read ({}) in {:.1} s",
        count(v.pages),
        count(v.runs),
        bytes(v.bytes),
        v.seconds
    )];
    for (reason, pages) in dropped {
        lines.push(format!("repaired at open: {reason}, {} items", count(*pages)));
    }
    if !v.findings.is_empty() {
        let mut findings = table(&["scope", "generation", "page", "what is wrong"]);
        for finding in v.findings.iter().take(FINDINGS_SHOWN) {
            findings.add_row([
                finding.scope.clone(),
                format!("{:#x}", finding.generation),
                finding.page.to_string(),
                finding.reason.clone(),
            ]);
        }
        lines.push(findings.to_string());
        if v.findings.len() > FINDINGS_SHOWN {
            lines
                .push(format!("and {} more: --json lists them", v.findings.len() - FINDINGS_SHOWN));
        }
    }
    if v.pages_dropped > 0 {
        lines.push(format!(
            "{} pages dropped: the listed pages, and the pages that follow them",
            count(v.pages_dropped)
        ));
    }
    if args.salvage {
        lines.push(format!("{} pages salvaged", count(v.pages_salvaged)));
    }
    lines.push(match (clean, args.salvage) {
        (true, _) => "clean".to_owned(),
        (false, true) => "not clean; the remaining pages verify".to_owned(),
        (false, false) => {
            "not clean; the remaining pages verify. --salvage looks for lost pages".to_owned()
        }
    });
    lines.join("\n")
}
