//! What can be typed.

use clap::{Args, Parser, Subcommand, ValueEnum};
use ritornello_format::parse_bytes;
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
  ritornello doctor /nvme/kv --capacity 200GiB
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64

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
    /// Try a directory out, and say what to change on this machine
    Doctor(DoctorArgs),
    /// Measure the store against the limits of this machine
    Bench(BenchArgs),
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

/// Of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writes some pages, reads them back and compares every byte: in a temporary store inside DIR, or, if
DIR holds a store, in that one under a scope of its own, which is dropped afterwards. Then looks at
the I/O mode, huge pages, the file system, free space and limits, and says what to change.
Exit code 0: all is well, perhaps with advice; 1: something is wrong.

Examples:
  ritornello doctor /nvme/kv
  ritornello doctor /nvme --capacity 200GiB
  ritornello doctor /nvme/kv --json | jq '.findings[] | select(.level != \"fine\")'")]
pub struct DoctorArgs {
    /// A store's directory, or one that is to hold a store
    pub dir: PathBuf,
    /// The capacity that a store here would be given: does it fit?
    #[arg(long, value_parser = size)]
    pub capacity: Option<u64>,
}

/// Of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ritornello bench store --dir /nvme
  ritornello bench store --help")]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// The measurements.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Writes, reads, probes and restarts, against the raw limits of the same disk
    Store(StoreArgs),
    /// One part of a measurement, in a process of its own
    #[command(hide = true)]
    Part(PartArgs),
}

/// Of `bench store`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Each of --runs rounds takes the raw limit and the store's figure one after the
other, in turns first: O_DIRECT writes (fdatasync included) of --total bytes into blocks never
written against put_batch + flush into a new store; the same over blocks already written against
put_batch + flush into a store that was filled and cleared; O_DIRECT reads against get_batch from a
store opened anew. The raw side uses the best operation size and depth of a small sweep; both sides
use huge-page buffers. Ratios are taken round by round; what is printed is the median. Every byte
got is compared with what was put, outside the time.

One put or get is one sequence of 4,096 tokens, cut to 256 pages and to 512 MiB where it is longer;
calls are blocking, from one thread, as the simplest caller would make them. Seconds of processor time are those of the whole process.

Probes ask for 256 pages in an index of --entries pages in 32-page runs, without payload: warm, the
same few sequences again and again; cold, a random one each time. Reopening is that of the whole
store. Memory a page is what a fresh process has resident with that index open, less what it has
with an empty one; beside it, the same of the whole store, which also keeps an order of eviction.

It needs about three times --total on the disk, and 1 GiB for the index; all of it is removed.

Examples:
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64 --total 2GiB
  ritornello bench store --dir /nvme --shape qwen2.5-0.5b --page-tokens 16 --json
  ritornello bench store --shape custom --layers 80 --kv-heads 8 --head-dim 128 --dtype fp8
  ritornello bench store --shape custom --page-bytes 1MiB --only data --runs 3")]
pub struct StoreArgs {
    /// The model whose pages are moved
    #[arg(long, value_enum, default_value = "llama3-8b")]
    pub shape: ShapeName,
    /// Tokens a page
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub page_tokens: u32,
    /// Bytes that each measurement moves
    #[arg(long, default_value = "2GiB", value_parser = size)]
    pub total: u64,
    /// A directory on the disk to measure [default: here, or a temporary one if this is memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Measure only a part
    #[arg(long, value_enum)]
    pub only: Option<Part>,
    /// Pages in the index that is probed
    #[arg(long, default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(256..=100_000_000))]
    pub entries: u64,
    /// An interpreter that has the ritornello package, for the probe from Python
    #[arg(long)]
    pub python: Option<PathBuf>,
    /// Custom shape: layers
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub layers: Option<u32>,
    /// Custom shape: KV heads
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub kv_heads: Option<u32>,
    /// Custom shape: numbers a head
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub head_dim: Option<u32>,
    /// Custom shape: number format
    #[arg(long)]
    pub dtype: Option<String>,
    /// Custom shape: bytes a page, instead of the above
    #[arg(long, value_parser = size,
          conflicts_with_all = ["layers", "kv_heads", "head_dim", "dtype"])]
    pub page_bytes: Option<u64>,
    /// Bytes a segment file
    #[arg(long, hide = true, value_parser = size)]
    pub segment_bytes: Option<u64>,
}

/// A part of `bench store`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Writes and reads
    Data,
    /// Probes, restart, memory
    Index,
}

/// Shapes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ShapeName {
    /// 32 layers, 8 KV heads of 128, bfloat16: 8 MiB at 64 tokens
    #[value(name = "llama3-8b")]
    Llama3,
    /// 24 layers, 2 KV heads of 64, bfloat16: 192 KiB at 16 tokens
    #[value(name = "qwen2.5-0.5b")]
    Qwen25,
    /// As the other options say
    Custom,
}

/// Of the hidden command that measures in a process of its own.
#[derive(Debug, Args)]
pub struct PartArgs {
    /// Which part.
    #[command(subcommand)]
    pub part: PartCommand,
}

/// The parts that need a process of their own.
#[derive(Debug, Subcommand)]
pub enum PartCommand {
    /// Fills a metadata-only store
    Fill {
        /// Its directory
        dir: PathBuf,
        /// Pages
        #[arg(long)]
        entries: u64,
        /// Pages a run
        #[arg(long)]
        run_pages: u32,
    },
    /// Opens a store and says what it takes
    Resident {
        /// Its directory
        dir: PathBuf,
    },
    /// Opens the index of a metadata-only store and says what it takes
    Index {
        /// The store's directory
        dir: PathBuf,
        /// Pages
        #[arg(long)]
        entries: u64,
        /// Pages a run
        #[arg(long)]
        run_pages: u32,
    },
    /// Probes as a client
    Probe {
        /// Its directory
        dir: PathBuf,
        /// Pages in it
        #[arg(long)]
        entries: u64,
    },
}

fn size(text: &str) -> Result<u64, String> {
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
