//! `ritornello convert-index`: converts the index of a store that no process uses.

use clap::Args;
use ritornello_store::{Conversion, parse_index};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::print::{bytes, count, json, print_stdout};
use ritornello_terminal::{Context, open, progress};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `convert-index`.
#[derive(Debug, Args)]
#[command(after_help = "\
run keeps the index in memory, with a journal and checkpoints on disk; its memory has a ceiling,
which `ritornello stat` shows while a process owns the store. lsm keeps the index in RocksDB, for
indexes larger than memory; it needs a build with the cargo feature `lsm`. The new index keeps all
consistent runs with their pages, places, recency and retentions; exit code 1: inconsistent runs
were dropped. Afterwards open the store with the new index, such as index=\"lsm\", or without
`index`.

The new index is built beside the old index, so the disk holds both until one rename switches to the
new index. After a kill the store has one complete index: run the command again. The command refuses
to run while a process owns the store.

Examples:
  ritornello convert-index /nvme/kv --to lsm
  ritornello convert-index /nvme/kv --to run:8GiB
  ritornello convert-index /nvme/kv --to run --json | jq .pages")]
pub struct ConvertArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// The new index: run, lsm, or run with a memory ceiling of at least 16MiB, such as run:8GiB
    #[arg(long)]
    pub to: String,
}

#[derive(Serialize)]
struct Answer<'a> {
    dir: &'a Path,
    #[serde(flatten)]
    conversion: &'a Conversion,
}

/// Converts the index of a store.
///
/// # Errors
/// If `--to` is invalid, no store exists, a process owns the store, or the store's index cannot be
/// converted (see [`ritornello_store::convert_index`]).
pub fn run(context: &Context, args: &ConvertArgs) -> Result<Status, Failure> {
    let (to, memory) = parse_index(&args.to).map_err(|error| Failure::unopened(&error))?;
    if open::manifest(&args.dir)?.is_none() {
        return Err(Failure::unusable(
            format!("there is no Ritornello store in {}", args.dir.display()),
            "name the directory that was given to Store.open",
        ));
    }
    let bar = progress::steps(0);
    bar.set_message("runs copied");
    let conversion = ritornello_node::convert_index(&args.dir, to, memory, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let conversion = conversion.map_err(|error| Failure::unopened(&error))?;
    if context.json {
        json(&Answer { dir: &args.dir, conversion: &conversion });
    } else {
        print_stdout(&describe(args, &conversion));
    }
    Ok(if conversion.runs_dropped == 0 { Status::Fine } else { Status::Problems })
}

fn describe(args: &ConvertArgs, c: &Conversion) -> String {
    let dir = args.dir.display();
    if c.from == c.to {
        return format!("the index of {dir} is `{}` already", c.to);
    }
    let mut text = format!(
        "the index of {dir} is `{}` now, and was `{}`: {} runs, {} pages, {} on disk (before: {}), in \
         {:.1} s",
        c.to,
        c.from,
        count(c.runs),
        count(c.pages),
        bytes(c.disk_bytes),
        bytes(c.disk_bytes_before),
        c.seconds
    );
    if c.runs_dropped > 0 {
        text += &format!("\n{} inconsistent runs were dropped", count(c.runs_dropped));
    }
    text
}
