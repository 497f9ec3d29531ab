//! What can be typed.

use crate::bench::adaptive::args::{AdaptiveArgs, AdaptivePart};
use crate::bench::contest::{ContestPart, Workload};
use crate::simulate::args::SimulateArgs;
use crate::soak::args::SoakArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use ritornello_codec::Codec;
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
  ritornello soak --minutes 10 --dir /nvme
  ritornello simulate traces/mooncake_conversation.jsonl.gz --chart hit-rates.svg
  ritornello top /nvme/kv

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
  ritornello paths drain /nvme/kv segments")]
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
        /// The directory to add: new or empty
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
  ritornello bench codec
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
    /// Size and speed of the codecs, and what the lossy ones do to attention
    Codec(CodecArgs),
    /// Backends of the index, measured alike
    Index(IndexArgs),
    /// The controller of the index `lsm` over ten stages, against settings that stay
    Adaptive(AdaptiveArgs),
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
got is compared with what was put, outside the time; bfloat16 pages hold normal noise, which lossless
codecs can shorten. Lossy codecs make it other bytes, so they are not compared.

One put or get is one sequence of 4,096 tokens, cut to 256 pages and to 512 MiB where it is longer;
calls are blocking, from one thread, as the simplest caller would make them. Seconds of processor time are those of the whole process.

Probes ask for 256 pages in an index of --entries pages in 32-page runs, without payload: warm, the
same few sequences again and again; cold, a random one each time. Reopening is that of the whole
store. Memory a page is what a fresh process has resident with that index open, less what it has
with an empty one; beside it, the same of the whole store, which also keeps an order of eviction.

It needs about three times --total on the disk, and 1 GiB for the index; all of it is removed.

--steady fills a store of --total bytes and writes four times as much again, with evictions, half of
the gets hitting; then takes the same figures from it and from fresh stores, in turns. Once with
pages of 192 KiB, once with pages of 16 KiB, 64 KiB, 192 KiB and 8 MiB mixed.

Examples:
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64 --total 2GiB
  ritornello bench store --dir /nvme --steady --total 1GiB --json
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
    /// Encode pages: split, zstd, int8 or int4. A store of raw pages is measured in the same rounds
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Measure a store that is full and evicts against a fresh one, in a capacity of --total
    #[arg(long, conflicts_with_all = ["only", "runs", "shape", "page_tokens", "codec"])]
    pub steady: bool,
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

/// Of `bench index`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Every backend is filled in a process of its own, probed there, and killed; then it
is opened again, in other processes: after the kill, after a clean close, and with its files out of
the page cache. A last process removes old sequences, leaf first, while it inserts new ones.

Rates are pages a second. Write amplification is what the kernel counts as written to storage by the
process, after a sync, over 40 bytes a page; beside it, what the backend says of itself. Each is
measured without syncs but the last, and with one after every 65,536 pages; --durable adds one after
every run.

Examples:
  ritornello bench index --entries 100000,1000000
  ritornello bench index --backends run,memory --entries 1000000 --durable
  ritornello bench index --workload kv-events --json | jq '.rows[] | {backend, ingest_per_s}'")]
pub struct IndexArgs {
    /// Backends to measure [default: all that are compiled in]
    #[arg(long, value_delimiter = ',')]
    pub backends: Vec<String>,
    /// Pages
    #[arg(long, value_delimiter = ',', default_value = "100000",
          value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    pub entries: Vec<u64>,
    /// Also with a sync after every run
    #[arg(long)]
    pub durable: bool,
    /// Where the pages come from
    #[arg(long, value_enum, default_value = "chains")]
    pub workload: Workload,
    /// Memory for what a backend caches of its files
    #[arg(long, default_value = "128MiB", value_parser = size)]
    pub cache: u64,
    /// Draw it: an SVG file
    #[arg(long, value_parser = picture)]
    pub chart: Option<PathBuf>,
    /// A directory on the disk to measure [default: here, or a temporary one if this is memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
}

/// Of `bench codec`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. A slice holds one layer's keys and values of --page-tokens tokens and is encoded by
itself. The slices of a set are repeated until they fill --total bytes, which should be more than
the caches hold; every round copies them, encodes them and decodes them. Rates are bytes of numbers
over the processor time of one thread, and medians. Lossless codecs are compared bit by bit.

The error of a lossy codec is the norm of the difference of softmax(QK/sqrt d)V over its norm, with
the keys and values of all tokens gone through the codec: the mean of the layers, and the worst.

Without --kv, keys and values are a small sample of the demonstration's model after some training. A set of made-up
numbers whose keys have outlier channels is always measured as well.

Examples:
  ritornello bench codec
  ritornello bench codec --kv FILE.safetensors --json | jq '.rows[] | {codec, size_ratio}'
  build/env/vllm/bin/python engines/vllm/make_kv.py demo FILE.safetensors")]
pub struct CodecArgs {
    /// Keys, values and queries to use, as engines/vllm/make_kv.py writes them
    #[arg(long)]
    pub kv: Option<PathBuf>,
    /// Bytes of numbers that each rate is taken over, a thread
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub total: u64,
    /// Tokens a slice
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub page_tokens: u32,
    /// Threads at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
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
    /// Fills, opens or churns a backend of the index
    Contest(ContestArgs),
    /// Runs the ten stages on the index `lsm`
    Adaptive(AdaptivePart),
    /// Probes as a client
    Probe {
        /// Its directory
        dir: PathBuf,
        /// Pages in it
        #[arg(long)]
        entries: u64,
    },
}

/// Of the parts of `bench index`.
#[derive(Debug, Args)]
pub struct ContestArgs {
    /// Which part.
    #[command(subcommand)]
    pub part: ContestPart,
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
