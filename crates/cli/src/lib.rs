//! The `ritornello` command.

use std::path::PathBuf;

/// Runs the command: `args` is its name and its arguments, `python` the interpreter for
/// measurements that need one. Returns the exit status.
#[must_use]
pub fn run(_args: Vec<String>, _python: Option<PathBuf>) -> i32 {
    2
}
