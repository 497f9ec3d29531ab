//! `ritornello bench`: measurements of the store, its parts and its remotes.
//!
//! The code of a measurement is in the module with the name of its subcommand. `part` is the hidden
//! subcommand that measurements run in separate processes. The measurements share:
//!
//! | module | contents |
//! |---|---|
//! | `child` | another process of this command |
//! | `content` | keys and bytes of pages |
//! | `disk` | the measured directory and its space |
//! | `driver` | puts and gets of many pages |
//! | `quantile` | medians and other quantiles |
//! | `shape` | sizes and numbers of the pages of a measurement |

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
    /// Writes, reads, probes and restarts of a store, compared with the raw limits of the disk
    Store(StoreArgs),
    /// Writes and reads of a store in memory, compared with memcpy
    Host(HostArgs),
    /// Walks of the page table, compared with reads of memory
    Table(TableArgs),
    /// Size and speed of codecs, and the effect of lossy codecs on attention
    Codec(CodecArgs),
    /// Index backends, measured under equal conditions
    Index(IndexArgs),
    /// Calls of a client process, compared with the owner's calls on the same store
    Clients(ClientsArgs),
    /// The controller of the index `lsm` over ten stages, compared with fixed settings
    Adaptive(AdaptiveArgs),
    /// The remote tier, compared with the plain client of its object store
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
