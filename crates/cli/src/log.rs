//! The log on standard error: of commands, and of processes that use the store as a library.

use ritornello_terminal::print;
use std::io::IsTerminal;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// The environment variable that chooses what is logged: a level, or levels by crate, such as
/// `warn,ritornello_store=debug`.
const VARIABLE: &str = "RITORNELLO_LOG";

/// Returns the levels in [`VARIABLE`]; `default` if the variable is unset or malformed. Prints a
/// line about a malformed value.
fn levels(default: LevelFilter) -> Targets {
    let Ok(value) = std::env::var(VARIABLE) else { return Targets::new().with_default(default) };
    value.parse().unwrap_or_else(|error| {
        print::print_stderr(&format!(
            "{VARIABLE}={value} was ignored ({error}): give a level, or levels by crate, such as \
             warn,ritornello_store=debug"
        ));
        Targets::new().with_default(default)
    })
}

/// Starts the log of a command: `default` and above, or the levels in [`VARIABLE`]. If the process
/// already has a logger, that logger stays in use.
pub(crate) fn start_in_command(default: LevelFilter) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time();
    let _ = tracing_subscriber::registry().with(lines.with_filter(levels(default))).try_init();
}

/// Starts the log of a process that uses the store as a library: warnings and errors, or the levels
/// in [`VARIABLE`]. If the process already has a logger, such as a command's logger, that logger
/// stays in use.
pub fn start_in_library() {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let lines = lines.with_filter(levels(LevelFilter::WARN));
    let _ = tracing_subscriber::registry().with(lines).try_init();
}
