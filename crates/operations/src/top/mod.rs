//! `ritornello top`.

mod screen;
mod snapshot;

use clap::Args;
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::open;
use ritornello_terminal::print::{json, print_stdout, table};
use snapshot::{Sample, Snapshot};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Arguments of `top`.
#[derive(Debug, Args)]
#[command(after_help = "\
Refreshes each second until q, Esc or Ctrl-C. Prints once if standard output is not a terminal. If
no process owns the store, this command owns it until it ends.

Examples:
  ritornello top /nvme/kv
  ritornello top /nvme/kv --once
  ritornello top /nvme/kv --json | jq .hit_rate")]
pub struct TopArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Print once and end; implied by --json
    #[arg(long)]
    pub once: bool,
}

/// Shows the figures of a store, refreshed each second on a terminal.
///
/// # Errors
/// If the store cannot be opened or does not answer, or the terminal cannot be drawn on.
pub fn run(context: &Context, args: &TopArgs) -> Result<Status, Failure> {
    let node = open::existing(&args.dir)?;
    let sample = || Sample::of(&node);
    if context.json {
        json(&Snapshot::between(None, &sample()?));
    } else if args.once || !std::io::stdout().is_terminal() {
        print_stdout(&plain(&Snapshot::between(None, &sample()?)));
    } else {
        screen::watch(&sample)?;
    }
    node.close()?;
    Ok(Status::Fine)
}

fn plain(snapshot: &Snapshot) -> String {
    let mut out = table(&[]);
    for (name, value) in snapshot.lines() {
        out.add_row([name.to_owned(), value]);
    }
    out.to_string()
}
