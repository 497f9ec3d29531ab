//! Command-line arguments.

mod bench;

pub use bench::*;

use crate::remote::RemoteArgs;
use crate::simulate::args::SimulateArgs;
use crate::soak::args::SoakArgs;
use clap::{Args, Parser, Subcommand};
use ritornello_codec::Codec;
use ritornello_format::parse_bytes;
use ritornello_tiers::remote::RemoteAddress;
use std::path::PathBuf;

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "ritornello",
    version,
    about = "The command of the Ritornello KV-cache store",
    after_help = "\
Exit codes:
  0  the command found no problem
  1  the command succeeded and found a problem
  2  the command line is invalid, or the store cannot be opened
  3  the command failed

Examples:
  ritornello stat /nvme/kv
  ritornello fsck /nvme/kv --salvage
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello doctor /nvme/kv --capacity 200GiB
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64
  ritornello soak --minutes 10 --dir /nvme
  ritornello simulate traces/mooncake_conversation.jsonl.gz --chart hit-rates.svg
  ritornello top /nvme/kv
  ritornello remote stat s3://bucket/kv

RUST_LOG=info prints more on standard error."
)]
pub struct Cli {
    /// Print one JSON object on standard output instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the contents, the resources and the state of a store
    Stat(StatArgs),
    /// Read and verify every page of a store that no process uses
    Fsck(FsckArgs),
    /// Own a store for other processes until a signal ends the command
    Serve(ServeArgs),
    /// Make a store larger or smaller while it is in use
    Resize(ResizeArgs),
    /// List, add or drain the directories of a store while it is in use
    Paths(PathsArgs),
    /// Convert the index of a store that no process uses
    ConvertIndex(ConvertArgs),
    /// Remove a store that no process uses
    Destroy(DestroyArgs),
    /// Test a directory, and recommend changes of this machine
    Doctor(DoctorArgs),
    /// Measure the store against the limits of this machine
    Bench(BenchArgs),
    /// Load a small store for a long time, kill and restart it, and check every byte
    Soak(SoakArgs),
    /// Replay request traces through eviction policies: hit rates, writes, the bound
    Simulate(SimulateArgs),
    /// Inspect, verify or clean up a remote
    Remote(RemoteArgs),
    /// Watch a store: hit rate, space, eviction, leases
    Top(TopArgs),
}

/// Arguments of `stat`.
#[derive(Debug, Args)]
#[command(after_help = "\
If a running process owns the store, the command asks it through its socket. Otherwise the command
opens the store for a moment; it must run as the user that created the store.

Examples:
  ritornello stat /nvme/kv
  ritornello stat /nvme/kv --json | jq .pages")]
pub struct StatArgs {
    /// The store's directory
    pub dir: PathBuf,
}

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

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
A store needs no service: the first process that opens it owns it, and when the owner ends another
process takes over. With this command the owner is a process that outlives engines, with separate
memory and limits.

If another process owns the store, this command waits, and takes over when the owner ends; with
--must-own it fails instead, with exit code 2. SIGTERM, SIGINT and SIGHUP end the command: clients'
calls finish, all puts are made durable, and a client takes over. If a disk is mounted over the
directory, or the directory is replaced by another store's, this command opens the directory at the
path again. Each change of its role is a line on standard output: `ready`, `waiting`, `failed`,
`reopening`, `closed`; with --json one object per line.

Examples:
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello serve /nvme/kv --must-own
  ritornello serve /nvme/kv --json")]
pub struct ServeArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// The store's capacity: creates a missing store, resizes an existing store
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
    /// When a put is complete: cache (once visible) or durable
    #[arg(long, default_value = "cache")]
    pub durability: String,
    /// The index: run, lsm, or run with a memory ceiling, such as run:8GiB
    #[arg(long)]
    pub index: Option<String>,
    /// Codec of pages: raw, split, zstd, int8 or int4
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Fail if another process owns the store
    #[arg(long)]
    pub must_own: bool,
}

/// Arguments of `fsck`.
#[derive(Debug, Args)]
#[command(after_help = "\
Pages that fail verification are removed from the index and listed; a get would have missed them.
Nothing else changes. Exit code 0: every page verified; 1: some pages failed verification.

--salvage then searches all segments for pages missing in the index (because it was damaged or
deleted) and restores the pages that verify. Dropped scopes stay dropped.

Examples:
  ritornello fsck /nvme/kv
  ritornello fsck /nvme/kv --salvage
  ritornello fsck /nvme/kv --json | jq '.findings[] | .reason'")]
pub struct FsckArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Restore pages that are in the segments but not in the index, after the verification
    #[arg(long)]
    pub salvage: bool,
}

/// Arguments of `resize`.
#[derive(Debug, Args)]
#[command(after_help = "\
A smaller store keeps the most recently used pages: they are moved out of the segments to be
removed, and all other pages are evicted. Leased and retained pages must fit. The command ends when
the files are removed; if it is interrupted, the store's owner continues.

Pass the new capacity to Store.open too, or no capacity: an owner resizes the store to the capacity
that it is given.

Examples:
  ritornello resize /nvme/kv 400GiB
  ritornello resize /nvme/kv 100GiB --json | jq .allocated_bytes")]
pub struct ResizeArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// The store's new capacity
    #[arg(value_parser = size)]
    pub capacity: u64,
}

/// Arguments of `paths`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ritornello paths list /nvme/kv
  ritornello paths add /nvme/kv /nvme2/kv-segments
  ritornello paths drain /nvme/kv segments
  ritornello paths forget /nvme/kv /nvme3/dead-disk")]
pub struct PathsArgs {
    /// The operation.
    #[command(subcommand)]
    pub what: PathsCommand,
}

/// Operations on directories.
#[derive(Debug, Subcommand)]
pub enum PathsCommand {
    /// Show the directories and their segments
    #[command(after_help = "Examples:\n  ritornello paths list /nvme/kv --json")]
    List {
        /// The store's directory
        dir: PathBuf,
    },
    /// Add a directory; the capacity does not change, so resize the store as well
    #[command(after_help = "Examples:\n  ritornello paths add /nvme/kv /nvme2/kv-segments")]
    Add {
        /// The store's directory
        dir: PathBuf,
        /// The directory to add: new or empty; or one of this store that lost its marker VOLUME
        path: PathBuf,
    },
    /// Remove a directory: its pages are moved or evicted, and its files removed
    #[command(after_help = "Examples:\n  ritornello paths drain /nvme/kv /nvme2/kv-segments")]
    Drain {
        /// The store's directory
        dir: PathBuf,
        /// The directory to drain, as `paths list` shows it
        path: PathBuf,
    },
    /// Give up a directory that is lost, and its pages
    #[command(after_help = "\
A directory whose file system is not mounted is absent: its pages are misses until it is mounted
again, and no page is lost. Forget a directory whose disk is dead. Drain a directory that is
present.

Examples:
  ritornello paths list /nvme/kv
  ritornello paths forget /nvme/kv /nvme2/kv-segments")]
    Forget {
        /// The store's directory
        dir: PathBuf,
        /// The directory to give up, as `paths list` shows it
        path: PathBuf,
    },
}

/// Arguments of `convert-index`.
#[derive(Debug, Args)]
#[command(after_help = "\
run keeps the index in memory, with a journal and checkpoints on disk; its memory has a ceiling,
which `ritornello stat` shows. lsm keeps the index in RocksDB, for catalogs larger than memory; it
needs a build with the cargo feature `lsm`. The new index keeps all pages, places, recency and
retentions. Afterwards open the store with index=\"lsm\" or without naming an index.

The new index is built beside the old index, so the disk holds both until one rename switches to the
new index. After a kill the store has one complete index: run the command again. Refuses while a
process owns the store.

Examples:
  ritornello convert-index /nvme/kv --to lsm
  ritornello convert-index /nvme/kv --to run:8GiB
  ritornello convert-index /nvme/kv --to run --json | jq .pages")]
pub struct ConvertArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// run, lsm, or run with a memory ceiling
    #[arg(long)]
    pub to: String,
}

/// Arguments of `destroy`.
#[derive(Debug, Args)]
#[command(after_help = "\
Removes the files of the store in all its directories, and no other file. Refuses while a process
owns the store.

Examples:
  ritornello destroy /nvme/kv
  ritornello destroy /nvme/kv --yes")]
pub struct DestroyArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Skip the confirmation
    #[arg(long)]
    pub yes: bool,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writes pages, reads them back and compares every byte: in a temporary store inside DIR, or, if DIR
holds a store, in that store under a separate scope, which is dropped afterwards. Then examines
the I/O mode, huge pages, the file system, free space and limits, and recommends changes. Exit code
0: no fault, perhaps advice; 1: a fault.

With --backend it checks the requirements of a remote backend, and the tier over it under faults:
refusals, silence, truncated values, wrong bytes. It writes some MiB under separate object names.

Examples:
  ritornello doctor /nvme/kv
  ritornello doctor --backend s3://bucket/kv
  ritornello doctor /nvme --capacity 200GiB
  ritornello doctor /nvme/kv --json | jq '.findings[] | select(.level != \"fine\")'")]
pub struct DoctorArgs {
    /// A directory of a store, or for a future store
    #[arg(required_unless_present = "backend")]
    pub dir: Option<PathBuf>,
    /// Check a remote backend instead: its address, or MODULE:CLASS under Python
    #[arg(long, conflicts_with_all = ["dir", "capacity"])]
    pub backend: Option<RemoteAddress>,
    /// With --backend: timeout of each check in seconds
    #[arg(long, default_value_t = 120, requires = "backend", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Check whether a store of this capacity fits
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
}

fn codec(word: &str) -> Result<Codec, String> {
    ritornello_store::parse_codec(word).map_err(|error| error.to_string())
}

/// Parses the path of a chart.
pub fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg")) {
        return Ok(path);
    }
    Err("charts are drawn as SVG: name a file that ends in .svg".to_owned())
}

/// Parses a size in bytes.
pub fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
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
