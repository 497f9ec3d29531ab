//! # ritornello-cli
//!
//! The `ritornello` command: `stat`, `top`, `serve`, `fsck`, `resize`, `paths`, `convert-index`,
//! `destroy`, `doctor`, `bench`, `soak`, `simulate` and `remote`, for people at a terminal and,
//! with `--json`, for programs.
//!
//! **Promises.** Standard output carries the result only; progress and warnings go to standard
//! error. [`exit::Status`] lists the exit codes. Files of a measurement are removed when it
//! ends, also by Ctrl-C.
//!
//! **May not know** how a store works: it opens stores and prints their answers.

#![forbid(unsafe_code)]

mod args;
mod convert;
mod doctor;
mod fsck;
mod remote;
mod serve;
mod simulate;
mod space;
mod stat;
mod top;

use args::{Cli, Command};
use clap::Parser;
use ritornello_terminal::exit::{Failure, Status};
use ritornello_terminal::{Context, print};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Runs the command: `args` is its name and its arguments, `python` the interpreter for
/// measurements that need Python. Returns the exit status.
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
    // Warnings of other commands are findings of `doctor`.
    log_to_stderr(match cli.command {
        Command::Doctor(_) => "error",
        Command::Serve(_) => "info",
        _ => "warn",
    });
    let self_command = match &python {
        Some(python) => vec![python.clone(), "-m".into(), "ritornello".into()],
        None => std::env::current_exe().into_iter().collect(),
    };
    let context = Context { json: cli.json, python, self_command };
    let result = match &cli.command {
        Command::Stat(args) => stat::run(&context, args),
        Command::Fsck(args) => fsck::run(&context, args),
        Command::Serve(args) => serve::run(&context, args),
        Command::Resize(args) => space::resize(&context, args),
        Command::Paths(args) => space::paths(&context, args),
        Command::ConvertIndex(args) => convert::run(&context, args),
        Command::Destroy(args) => space::destroy(&context, args),
        Command::Doctor(args) => doctor::run(&context, args),
        Command::Bench(args) => ritornello_lab::bench::run(&context, args),
        Command::Soak(args) => ritornello_lab::soak::run(&context, args),
        Command::Simulate(args) => simulate::run(&context, args),
        Command::Remote(args) => remote::run(&context, args),
        Command::Top(args) => top::run(&context, args),
    };
    result.unwrap_or_else(|failure| report(&context, &failure)).code()
}

/// Logs `level` and above, or as `RUST_LOG` requires. Keeps the process's logger if it has a logger.
fn log_to_stderr(level: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .try_init();
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
