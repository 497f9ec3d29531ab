//! # ritornello-terminal
//!
//! The parts that all commands of `ritornello` share: opening stores and remotes with advice for a
//! failure, progress, tables, JSON and charts, temporary directories, and exit codes.
//!
//! **Promises.** Standard output carries the result only; progress and warnings go to standard
//! error. A command removes its temporary directory when it ends, also after SIGINT (Ctrl-C),
//! SIGTERM and SIGHUP; after SIGKILL the directory stays.
//!
//! **Must not know** any command: the crates that implement commands (`operations`, `lab`, `cli`)
//! use this crate.

#![forbid(unsafe_code)]

pub mod exit;
pub mod open;
pub mod plot;
pub mod print;
pub mod progress;
pub mod scratch;
pub mod value;

use std::path::PathBuf;

/// Context of every command.
#[derive(Clone, Debug)]
pub struct Context {
    /// Whether to print JSON instead of text.
    pub json: bool,
    /// Path of a Python interpreter, for measurements that need one.
    pub python: Option<PathBuf>,
    /// Program and first arguments that start this command in another process.
    pub self_command: Vec<PathBuf>,
}
