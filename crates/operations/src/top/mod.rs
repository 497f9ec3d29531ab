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
Refreshes each second until q, Esc or Ctrl-C. Prints once if standard output is not a terminal. The
command never owns the store. While no process owns the store, a refreshing command waits for an
owner, and a command that prints once ends with exit code 2: use `ritornello stat`, which reads the
files of such a store.

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

/// Shows statistics of a store, refreshed each second on a terminal.
///
/// # Errors
/// If there is no store, its owner does not answer, no process owns it and the statistics are to be
/// printed once, or the terminal cannot be drawn on.
pub fn run(context: &Context, args: &TopArgs) -> Result<Status, Failure> {
    let first = Sample::of(&args.dir).map_err(|error| open::unobserved(&args.dir, &error))?;
    if first.is_none() {
        open::check_existing(&args.dir)?;
    }
    if !context.json && !args.once && std::io::stdout().is_terminal() {
        let dir = args.dir.clone();
        screen::watch(first, move || Sample::of(&dir))?;
        return Ok(Status::Fine);
    }
    let Some(sample) = first else {
        let dir = args.dir.display();
        return Err(Failure::unusable(
            format!("no process owns the store in {dir}, so it has no live figures"),
            format!("`ritornello stat {dir}`, or `ritornello serve {dir}` to own it"),
        ));
    };
    let snapshot = Snapshot::between(None, &sample);
    if context.json {
        json(&snapshot);
    } else {
        print_stdout(&plain(&snapshot));
    }
    Ok(Status::Fine)
}

fn plain(snapshot: &Snapshot) -> String {
    let mut out = table(&[]);
    for (name, value) in snapshot.lines() {
        out.add_row([name.to_owned(), value]);
    }
    out.to_string()
}
