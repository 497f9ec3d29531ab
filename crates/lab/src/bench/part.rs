//! `ritornello bench part`, hidden: a part of a measurement, in a separate process.

use super::adaptive::{self, args::AdaptivePart};
use super::clients::client::{self, ClientPart};
use super::index::part::{self as index, IndexPartArgs};
use super::store::part as store;
use clap::{Args, Subcommand};
use ritornello_terminal::exit::{Failure, Status};
use std::path::PathBuf;

/// Arguments of the hidden command that measures in a separate process.
#[derive(Debug, Args)]
pub struct PartArgs {
    /// The part.
    #[command(subcommand)]
    pub part: PartCommand,
}

/// The parts that need a separate process.
#[derive(Debug, Subcommand)]
pub enum PartCommand {
    /// Creates a store that has an index and no payload, and prints by how much the resident memory
    /// of this process grew
    Fill {
        /// Directory of the store
        dir: PathBuf,
        /// Number of pages
        #[arg(long)]
        entries: u64,
        /// Pages per run
        #[arg(long)]
        run_pages: u32,
    },
    /// Opens a store, and prints by how much the resident memory of this process grew
    Resident {
        /// Directory of the store
        dir: PathBuf,
    },
    /// Opens the index of a store that `fill` created, and prints by how much the resident memory
    /// of this process grew, and the time that the opening took
    OpenIndex {
        /// Directory of the store
        dir: PathBuf,
        /// Number of pages
        #[arg(long)]
        entries: u64,
        /// Pages per run
        #[arg(long)]
        run_pages: u32,
    },
    /// Runs a part of `bench index`
    IndexBackend(IndexPartArgs),
    /// Runs the stages of `bench adaptive` on the index `lsm`, with one variant of its settings
    Adaptive(AdaptivePart),
    /// Runs a client that reads commands from standard input
    Client(ClientPart),
    /// Probes a store as a client, and prints the median time of a probe
    Probe {
        /// Directory of the store
        dir: PathBuf,
        /// Pages in the store
        #[arg(long)]
        entries: u64,
    },
}

/// Runs a part, which prints each of its answers on one line.
///
/// # Errors
/// Errors of the part.
pub fn run(part: &PartCommand) -> Result<Status, Failure> {
    match part {
        PartCommand::Fill { dir, entries, run_pages } => store::fill(dir, *entries, *run_pages),
        PartCommand::Resident { dir } => store::resident(dir),
        PartCommand::OpenIndex { dir, entries, run_pages } => {
            store::open_index(dir, *entries, *run_pages)
        }
        PartCommand::IndexBackend(part) => index::run(&part.part),
        PartCommand::Adaptive(part) => adaptive::run_part(part),
        PartCommand::Client(part) => client::run(part),
        PartCommand::Probe { dir, entries } => store::probe(dir, *entries),
    }
}
