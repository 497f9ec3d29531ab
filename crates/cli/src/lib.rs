//! # ritornello-cli
//!
//! The `ritornello` command: `stat`, `explain`, `fsck`, `serve`, `resize`, `paths`, `convert-index`,
//! `destroy`, `doctor`, `simulate`, `remote` and `top` of [`ritornello_operations`], and `bench`
//! and `soak` of [`ritornello_lab`], for people at a terminal and, with `--json`, for programs.

#![forbid(unsafe_code)]

pub mod log;

use clap::{Parser, Subcommand};
use ritornello_lab::bench::{self, BenchArgs};
use ritornello_lab::soak::{self, args::SoakArgs};
use ritornello_operations::convert::{self, ConvertArgs};
use ritornello_operations::doctor::{self, DoctorArgs};
use ritornello_operations::explain::{self, ExplainArgs};
use ritornello_operations::fsck::{self, FsckArgs};
use ritornello_operations::remote::{self, RemoteArgs};
use ritornello_operations::serve::{self, ServeArgs};
use ritornello_operations::simulate::{self, args::SimulateArgs};
use ritornello_operations::space::{self, DestroyArgs, PathsArgs, ResizeArgs};
use ritornello_operations::stat::{self, StatArgs};
use ritornello_operations::top::{self, TopArgs};
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::{Context, print};
use std::path::PathBuf;
use tracing_subscriber::filter::LevelFilter;

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "ritornello",
    version,
    about = "The command of the Ritornello KV-cache store",
    after_help = "\
Exit codes:
  0  the command found no problem
  1  the command found a problem, or the store cannot be opened because its disk fails
  2  an argument is invalid, the store cannot be opened for another reason, or a remote refused a
     call
  3  the command failed

Examples:
  ritornello stat /nvme/kv
  ritornello explain /nvme/kv --request chatcmpl-8f6c2a
  ritornello fsck /nvme/kv --salvage
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello doctor /nvme/kv --capacity 200GiB
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64
  ritornello soak --minutes 10 --dir /nvme
  ritornello simulate traces/mooncake_conversation.jsonl.gz --chart hit-rates.svg
  ritornello top /nvme/kv
  ritornello remote stat s3://bucket/kv

RITORNELLO_LOG=info prints more on standard error, RITORNELLO_LOG=info,json as JSON."
)]
struct Cli {
    /// Print JSON on standard output instead of text: one object (serve: one object per event)
    #[arg(long, global = true)]
    json: bool,
    /// The command.
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Show the contents, the resources and the state of a store
    Stat(StatArgs),
    /// Explain why pages of a prompt are hits or misses
    Explain(ExplainArgs),
    /// Read and verify every page of a store that no process uses
    Fsck(FsckArgs),
    /// Own stores for other processes, or observe stores, until a signal ends the command
    Serve(ServeArgs),
    /// Change the capacity of a store, also while other processes use the store
    Resize(ResizeArgs),
    /// List, add, drain or forget directories of a store, or restore a lost first directory
    Paths(PathsArgs),
    /// Convert the index of a store that no process uses
    ConvertIndex(ConvertArgs),
    /// Remove a store that no process uses
    Destroy(DestroyArgs),
    /// Test a directory or a remote, and recommend changes to this machine
    Doctor(DoctorArgs),
    /// Measure the store against the limits of this machine
    Bench(BenchArgs),
    /// Load a small store while it is killed, restarted and changed, and check every byte read
    Soak(SoakArgs),
    /// Replay request traces through eviction policies, or model prefill after a loaded prefix
    Simulate(SimulateArgs),
    /// Inspect, verify or clean up a remote
    Remote(RemoteArgs),
    /// Watch a store: hit rate, space, eviction, leases
    Top(TopArgs),
}

/// Runs the command: `args` is its name and its arguments, `python` the interpreter with which
/// `bench store` measures probes from Python; without an interpreter that figure is left out.
/// Returns the exit status.
#[must_use]
pub fn run(args: Vec<String>, python: Option<PathBuf>) -> i32 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help goes to standard output, errors to standard error; a closed pipe is ignored.
            let _ = error.print();
            return if error.use_stderr() { Status::Unusable.code() } else { Status::Fine.code() };
        }
    };
    // `doctor` logs errors only, because it reports as findings what other commands log as
    // warnings.
    log::start_in_command(match cli.command {
        Command::Doctor(_) => LevelFilter::ERROR,
        Command::Serve(_) => LevelFilter::INFO,
        _ => LevelFilter::WARN,
    });
    let self_command = match &python {
        Some(python) => vec![python.clone(), "-m".into(), "ritornello".into()],
        None => std::env::current_exe().into_iter().collect(),
    };
    let context = Context { json: cli.json, python, self_command };
    let result = match &cli.command {
        Command::Stat(args) => stat::run(&context, args),
        Command::Explain(args) => explain::run(&context, args),
        Command::Fsck(args) => fsck::run(&context, args),
        Command::Serve(args) => serve::run(&context, args),
        Command::Resize(args) => space::resize(&context, args),
        Command::Paths(args) => space::paths(&context, args),
        Command::ConvertIndex(args) => convert::run(&context, args),
        Command::Destroy(args) => space::destroy(&context, args),
        Command::Doctor(args) => doctor::run(&context, args),
        Command::Bench(args) => bench::run(&context, args),
        Command::Soak(args) => soak::run(&context, args),
        Command::Simulate(args) => simulate::run(&context, args),
        Command::Remote(args) => remote::run(&context, args),
        Command::Top(args) => top::run(&context, args),
    };
    log::finish();
    result.unwrap_or_else(|failure| report(&context, &failure)).code()
}

fn report(context: &Context, failure: &Failure) -> Status {
    print::print_stderr(&format!("error: {}", failure.line));
    if !failure.advice.is_empty() {
        print::print_stderr(&format!("  try: {}", failure.advice));
    }
    if context.json {
        print::json(&serde_json::json!({
            "error": failure.line,
            "advice": failure.advice,
            "status": failure.status.code(),
        }));
    }
    failure.status
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_definitions_are_valid_and_have_examples() {
        Cli::command().debug_assert();
        let mut waiting = vec![Cli::command()];
        while let Some(mut command) = waiting.pop() {
            let help = command.render_help().to_string();
            assert!(help.contains("Examples:"), "{}", command.get_name());
            let inner = command.get_subcommands();
            waiting.extend(inner.filter(|c| !c.is_hide_set() && c.get_name() != "help").cloned());
        }
    }
}
