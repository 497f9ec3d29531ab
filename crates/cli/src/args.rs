//! What can be typed.

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
  0  all is well
  1  the command did its work and found something wrong
  2  the command was not understood, or the store cannot be opened
  3  something failed on the way

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

RUST_LOG=info says more on standard error."
)]
pub struct Cli {
    /// Print one JSON object on standard output instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what a store holds, what it costs and how it is doing
    Stat(StatArgs),
    /// Read and verify every page of a store that nobody is using
    Fsck(FsckArgs),
    /// Own a store for others: keep it open until told to stop
    Serve(ServeArgs),
    /// Make a store larger or smaller while it is in use
    Resize(ResizeArgs),
    /// List, add or drain the directories of a store while it is in use
    Paths(PathsArgs),
    /// Give a store that nobody uses another index
    ConvertIndex(ConvertArgs),
    /// Remove a store that nobody uses
    Destroy(DestroyArgs),
    /// Try a directory out, and say what to change on this machine
    Doctor(DoctorArgs),
    /// Measure the store against the limits of this machine
    Bench(BenchArgs),
    /// Work a small store hard for a long time, kill and restart it, and check every byte
    Soak(SoakArgs),
    /// Replay request traces through the eviction policies: hit rates, writes, the bound
    Simulate(SimulateArgs),
    /// What a remote holds, whether it is whole, and what may go
    Remote(RemoteArgs),
    /// Watch a store: hit rate, space, eviction, leases
    Top(TopArgs),
}

/// Of `stat`.
#[derive(Debug, Args)]
#[command(after_help = "\
A store that a running process owns is asked through its socket. Otherwise the store is opened for
the moment it takes, by the same user that made it.

Examples:
  ritornello stat /nvme/kv
  ritornello stat /nvme/kv --json | jq .pages")]
pub struct StatArgs {
    /// The store's directory
    pub dir: PathBuf,
}

/// Of `top`.
#[derive(Debug, Args)]
#[command(after_help = "\
Refreshed each second until q, Esc or Ctrl-C. Where standard output is no terminal, it is printed
once. A store that nobody owns is opened by this command, and is its own until it ends.

Examples:
  ritornello top /nvme/kv
  ritornello top /nvme/kv --once
  ritornello top /nvme/kv --json | jq .hit_rate")]
pub struct TopArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Print it once and end; so does --json
    #[arg(long)]
    pub once: bool,
}

/// Of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
A store needs no service: the first process that opens it owns it, and when that one ends another one
takes over. With this command the owner is a process that outlives engines, and whose memory and
limits are its own.

If another process owns the store, this one waits, and takes over when that one ends; with --must-own
it fails instead, with exit code 2. SIGTERM, SIGINT and SIGHUP end it: clients' calls finish, everything is made
durable, and one of the clients takes over. A line on standard output says what it is: `ready`,
`waiting`, `closed`; with --json one object a line.

Examples:
  ritornello serve /nvme/kv --capacity 200GiB
  ritornello serve /nvme/kv --must-own
  ritornello serve /nvme/kv --json")]
pub struct ServeArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// The store's capacity: one is made where there is none, and an old one is resized
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
    /// When a put is done: cache (when it is visible) or durable
    #[arg(long, default_value = "cache")]
    pub durability: String,
    /// The index: run, lsm, or run with a memory ceiling, as in run:8GiB
    #[arg(long)]
    pub index: Option<String>,
    /// How pages are encoded: raw, split, zstd, int8 or int4
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Fail if another process owns the store
    #[arg(long)]
    pub must_own: bool,
}

/// Of `fsck`.
#[derive(Debug, Args)]
#[command(after_help = "\
What cannot be believed is taken out of the index and listed; it would have been a miss when
somebody asked for it. Nothing else is changed. Exit code 0: every page verified; 1: some did not.

--salvage then looks through all segments for pages that the index has lost (a damaged or deleted
index) and takes back in those that verify. Dropped scopes stay dropped.

Examples:
  ritornello fsck /nvme/kv
  ritornello fsck /nvme/kv --salvage
  ritornello fsck /nvme/kv --json | jq '.findings[] | .reason'")]
pub struct FsckArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Also bring back pages that lie in the segments and that the index does not know
    #[arg(long)]
    pub salvage: bool,
}

/// Of `resize`.
#[derive(Debug, Args)]
#[command(after_help = "\
A smaller store keeps what was used last: it is moved out of the segments that go, and the rest is
evicted. The files that are not needed any more are removed. What is leased or retained must fit.
Ends when it is done; interrupted, the store's owner goes on with it.

Give Store.open the new capacity, too, or none: an owner resizes the store to what it is given.

Examples:
  ritornello resize /nvme/kv 400GiB
  ritornello resize /nvme/kv 100GiB --json | jq .allocated_bytes")]
pub struct ResizeArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Its new capacity
    #[arg(value_parser = size)]
    pub capacity: u64,
}

/// Of `paths`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ritornello paths list /nvme/kv
  ritornello paths add /nvme/kv /nvme2/kv-segments
  ritornello paths drain /nvme/kv segments
  ritornello paths forget /nvme/kv /nvme3/dead-disk")]
pub struct PathsArgs {
    /// What to do.
    #[command(subcommand)]
    pub what: PathsCommand,
}

/// What can be done with directories.
#[derive(Debug, Subcommand)]
pub enum PathsCommand {
    /// Show the directories, and what is in them
    #[command(after_help = "Examples:\n  ritornello paths list /nvme/kv --json")]
    List {
        /// The store's directory
        dir: PathBuf,
    },
    /// Add a directory; it takes what the capacity still allows, so resize the store as well
    #[command(after_help = "Examples:\n  ritornello paths add /nvme/kv /nvme2/kv-segments")]
    Add {
        /// The store's directory
        dir: PathBuf,
        /// The directory to add: new or empty; or one of the store's whose marker VOLUME was lost
        path: PathBuf,
    },
    /// Take a directory out: what is there moves, or is evicted, and its files are removed
    #[command(after_help = "Examples:\n  ritornello paths drain /nvme/kv /nvme2/kv-segments")]
    Drain {
        /// The store's directory
        dir: PathBuf,
        /// The directory to drain, as `paths list` shows it
        path: PathBuf,
    },
    /// Give up a directory that is away for good, with the pages that lie there
    #[command(after_help = "\
A directory whose file system is not mounted is away: its pages are misses until it is back, and
nothing is lost. Forget it when its disk is dead. A directory that is here is drained instead.

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

/// Of `convert-index`.
#[derive(Debug, Args)]
#[command(after_help = "\
run keeps the index in memory, with a journal and checkpoints on disk; its memory has a ceiling, which
`ritornello stat` shows. lsm keeps it in RocksDB, for catalogues larger than memory; it is there in
builds with the cargo feature `lsm`. Everything the index knows is kept: pages, places, recency,
retentions. Afterwards open the store with index=\"lsm\" or without naming an index.

The new index is made beside the old one, which takes its space again for a while; then one rename
makes it count. Killed at any moment, the store has one of the two whole: run it again. Refuses while
a process owns the store.

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

/// Of `destroy`.
#[derive(Debug, Args)]
#[command(after_help = "\
Removes the files of the store in all its directories, and nothing else. Refuses while a process
owns the store.

Examples:
  ritornello destroy /nvme/kv
  ritornello destroy /nvme/kv --yes")]
pub struct DestroyArgs {
    /// The store's directory
    pub dir: PathBuf,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

/// Of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writes some pages, reads them back and compares every byte: in a temporary store inside DIR, or, if
DIR holds a store, in that one under a scope of its own, which is dropped afterwards. Then looks at
the I/O mode, huge pages, the file system, free space and limits, and says what to change.
Exit code 0: all is well, perhaps with advice; 1: something is wrong.

With --backend a remote is put through what every backend must do, and the tier over it through
faults: refusals, silence, half values, wrong bytes. It writes some MiB under names of its own.

Examples:
  ritornello doctor /nvme/kv
  ritornello doctor --backend s3://bucket/kv
  ritornello doctor /nvme --capacity 200GiB
  ritornello doctor /nvme/kv --json | jq '.findings[] | select(.level != \"fine\")'")]
pub struct DoctorArgs {
    /// A store's directory, or one that is to hold a store
    #[arg(required_unless_present = "backend")]
    pub dir: Option<PathBuf>,
    /// Try a remote's backend out instead: its address, or MODULE:CLASS where this is Python
    #[arg(long, conflicts_with_all = ["dir", "capacity"])]
    pub backend: Option<RemoteAddress>,
    /// Of --backend: seconds that a check may take
    #[arg(long, default_value_t = 120, requires = "backend", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub patience: u64,
    /// The capacity that a store here would be given: does it fit?
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
}

fn codec(word: &str) -> Result<Codec, String> {
    ritornello_store::parse_codec(word).map_err(|error| error.to_string())
}

/// A file to draw to.
pub fn picture(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg")) {
        return Ok(path);
    }
    Err("charts are drawn as SVG: name a file that ends in .svg".to_owned())
}

/// A size for a command.
pub fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound_and_every_command_has_examples() {
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
