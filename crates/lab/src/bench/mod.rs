//! `ritornello bench`.
//!
//! Measurements are folders and files with the names of their commands; `part` is the hidden
//! command of their separate processes. They share:
//!
//! | module | contents |
//! |---|---|
//! | `child` | another process of this command |
//! | `content` | keys and bytes of pages |
//! | `disk` | the measured directory |
//! | `driver` | puts and gets of many pages |
//! | `quantile` | medians |
//! | `shape` | the pages of a measurement |

mod adaptive;
mod child;
mod clients;
mod codec;
mod content;
mod disk;
mod driver;
mod host;
mod index;
mod part;
mod quantile;
mod remote;
mod shape;
mod store;
mod table;

use adaptive::args::AdaptiveArgs;
use clap::{Args, Subcommand};
use clients::ClientsArgs;
use codec::CodecArgs;
use host::HostArgs;
use index::IndexArgs;
use part::PartArgs;
use remote::RemoteArgs;
use ritornello_terminal::Context;
use ritornello_terminal::exit::{Failure, Status};
use store::args::StoreArgs;
use table::TableArgs;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ritornello bench store --dir /nvme
  ritornello bench codec
  ritornello bench store --help")]
pub struct BenchArgs {
    /// The measurement.
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// The measurements.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Writes, reads, probes and restarts, against the raw limits of the disk
    Store(StoreArgs),
    /// A store in memory against memcpy
    Host(HostArgs),
    /// Walks of the page table against reads of memory
    Table(TableArgs),
    /// Size and speed of the codecs, and the effect of the lossy ones on attention
    Codec(CodecArgs),
    /// Index backends, measured under equal conditions
    Index(IndexArgs),
    /// The same store from another process, against the owner's own calls
    Clients(ClientsArgs),
    /// The controller of the index `lsm` over ten stages, against fixed settings
    Adaptive(AdaptiveArgs),
    /// The remote tier, against the plain client of its object store
    Remote(RemoteArgs),
    /// Runs one part of a measurement; `bench` starts it as a separate process
    #[command(hide = true)]
    Part(PartArgs),
}

/// Runs a measurement.
///
/// # Errors
/// If an argument is invalid, space is missing, a call fails, or wrong bytes are read.
pub fn run(context: &Context, args: &BenchArgs) -> Result<Status, Failure> {
    match &args.what {
        BenchCommand::Part(part) => part::run(&part.part),
        BenchCommand::Store(args) => store::run(context, args),
        BenchCommand::Index(args) => index::run(context, args),
        BenchCommand::Adaptive(args) => adaptive::run(context, args),
        BenchCommand::Clients(args) => clients::run(context, args),
        BenchCommand::Host(args) => host::run(context, args),
        BenchCommand::Table(args) => table::run(context, args),
        BenchCommand::Codec(args) => codec::run(context, args),
        BenchCommand::Remote(args) => remote::run(context, args),
    }
}
