//! `ritornello paths restore`: restores a store whose first directory is lost.

use clap::Args;
use ritornello_store::Restored;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{count, json, print_stdout};
use ritornello_terminal::{Context, progress};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `paths restore`.
#[derive(Debug, Args)]
#[command(after_help = "\
For a store over several disks whose first directory, with the manifest and the index, is on a disk
that is lost. The other directories have copies of the manifest and the scopes; the pages in these
directories are found by their headers. Every byte is read and verified, so the command takes as
long as reading the disks.

Stop all processes of the store first. Never use the lost directory again if its disk comes back.
If the command is interrupted, run it again. A policy.toml in the lost directory is not restored:
write it again.

Examples:
  ritornello paths restore /nvme0/kv /nvme1/kv /nvme2/kv
  ritornello paths restore /nvme0/kv /nvme1/kv --json | jq .pages_salvaged")]
pub struct RestoreArgs {
    /// The store's new directory, which is new or empty, or holds an interrupted restore of the
    /// store: usually the lost directory's path, on a new disk
    pub dir: PathBuf,
    /// The store's other directories
    #[arg(required = true)]
    pub others: Vec<PathBuf>,
}

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    #[serde(flatten)]
    restored: &'a Restored,
}

/// Restores a store.
///
/// # Errors
/// If the directory has files that are not of an interrupted restore of the store, the other
/// directories are not of one store or have no intact copy of the manifest and the scopes, the
/// store's index is `memory` or not compiled in, a process uses the store, or a disk fails.
pub(crate) fn run(context: &Context, args: &RestoreArgs) -> Result<Status, Failure> {
    let bar = progress::bar("salvaging");
    let restored = ritornello_node::restore(&args.dir, &args.others, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done.min(total));
    });
    bar.finish_and_clear();
    let restored = restored.map_err(|error| Failure::unopened(&error))?;
    if context.json {
        json(&Answer { dir: &args.dir, restored: &restored });
    } else {
        print_stdout(&describe(args, &restored));
    }
    Ok(if restored.absent.is_empty() { Status::Fine } else { Status::Problems })
}

fn describe(args: &RestoreArgs, restored: &Restored) -> String {
    let (dir, found) = (args.dir.display(), &restored.verification);
    let mut lines = vec![format!(
        "the store is restored in {dir}: {} pages of {} scopes salvaged in {:.1} s",
        count(found.pages_salvaged),
        count(restored.scopes),
        found.seconds
    )];
    if found.pages_behind_lost > 0 {
        lines.push(format!(
            "{} of them follow a page that is lost, and are hits again after that page is put",
            count(found.pages_behind_lost)
        ));
    }
    for (reason, pages) in &found.not_salvaged {
        let reason = match reason.as_str() {
            "scope" => "of a scope that was dropped, or registered after the last copy",
            "overwritten" => "of evicted runs, whose space was used again, or damaged",
            "unreadable" => "partly on the lost disk, or unreadable",
            "space" => "in space that a later run uses",
            "index" => "for which the index has no room",
            other => other,
        };
        lines.push(format!("{} pages not salvaged: {reason}", count(*pages)));
    }
    for absent in &restored.absent {
        lines.push(format!(
            "{absent} is absent: mount its disk, and run `ritornello fsck {dir} --salvage` to find \
             its pages, or `ritornello paths forget {dir} {absent}` if it is lost too"
        ));
    }
    lines.push(format!("next: start the store's processes, with {dir} as the first directory"));
    lines.join("\n")
}
