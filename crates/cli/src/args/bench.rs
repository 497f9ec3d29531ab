//! Arguments of `bench`.

use super::{codec, picture, size};
use crate::bench::adaptive::args::{AdaptiveArgs, AdaptivePart};
use crate::bench::clients::part::ClientPart;
use crate::bench::index::{IndexPart, Workload};
use crate::bench::remote::RemoteArgs as BenchRemoteArgs;
use clap::{Args, Subcommand, ValueEnum};
use ritornello_codec::Codec;
use std::path::PathBuf;

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
    Remote(BenchRemoteArgs),
    /// One part of a measurement, in a separate process
    #[command(hide = true)]
    Part(PartArgs),
}

/// Arguments of `bench store`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Each of --runs rounds measures the raw limit and the store, in alternating order:
O_DIRECT writes (fdatasync included) of --total bytes into blocks never written against put_batch +
flush into a new store; writes over written blocks against put_batch + flush into a store that was
filled and cleared; O_DIRECT reads against get_batch from a reopened store. The raw side uses the best
operation size and depth of a small sweep; both sides use huge-page buffers. Ratios are taken by
round; the median is printed. Every byte read is compared with the byte put, outside the time;
bfloat16 pages hold normal noise, which lossless codecs can shorten. Bytes of lossy codecs differ and
are not compared.

A put or get is one sequence of 4,096 tokens, limited to 256 pages and to 512 MiB; calls are blocking,
from one thread. Processor seconds count the whole process.

Probes ask for 256 pages in an index of --entries pages in 32-page runs, without payload: warm, the
same few sequences; cold, a random sequence each time. Reopening is timed for the whole store. Memory
per page is the resident memory of a fresh process with that index open, less the memory with an
empty index; the next row has the memory of the whole store, which also keeps the order of eviction.

The measurement needs about three times --total on the disk, and 1 GiB for the index; all files are
removed.

--steady fills a store of --total bytes and writes four times as much again, with evictions, while
half of the gets hit; then measures it and fresh stores, in alternating order. It measures once with
pages of 192 KiB, and once with pages of 16 KiB, 64 KiB, 192 KiB and 8 MiB mixed.

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
    /// Tokens per page
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub page_tokens: u32,
    /// Bytes moved by each measurement
    #[arg(long, default_value = "2GiB", value_parser = size)]
    pub total: u64,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Codec of pages: split, zstd, int8 or int4. A store of raw pages is measured in the same rounds
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Measure a full store that evicts against a fresh store, with a capacity of --total
    #[arg(long, conflicts_with_all = ["only", "runs", "shape", "page_tokens", "codec"])]
    pub steady: bool,
    /// The only part to measure
    #[arg(long, value_enum)]
    pub only: Option<Part>,
    /// Pages in the probed index
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
    /// Custom shape: numbers per head
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub head_dim: Option<u32>,
    /// Custom shape: number format
    #[arg(long)]
    pub dtype: Option<String>,
    /// Custom shape: bytes per page, instead of the above
    #[arg(long, value_parser = size,
          conflicts_with_all = ["layers", "kv_heads", "head_dim", "dtype"])]
    pub page_bytes: Option<u64>,
    /// Bytes per segment file
    #[arg(long, hide = true, value_parser = size)]
    pub segment_bytes: Option<u64>,
}

/// Arguments of `bench host`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Each of --runs rounds creates a store in memory, puts --total bytes into it, clears
it, puts --total bytes again over the same memory, reopens it and gets them twice; and copies --total
bytes with memcpy, page by page, from private memory in huge pages to the target of the gets, with as
many threads as a get. The order alternates; ratios are taken by round; the median is printed. A call
is 64 pages. Every byte read is compared with the byte put, outside the time.

Examples:
  ritornello bench host
  ritornello bench host --page-bytes 192KiB --total 1GiB --json | jq '.get.ratio'")]
pub struct HostArgs {
    /// A directory in memory
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Bytes per page
    #[arg(long, default_value = "2MiB", value_parser = size)]
    pub page_bytes: u64,
    /// Bytes put, read and copied each time
    #[arg(long, default_value = "512MiB", value_parser = size)]
    pub total: u64,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
}

/// Arguments of `bench table`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Walks visit prompts of 256 pages in a page table of --nodes nodes: warm, four prompts
in turn; cold, another prompt each time. A node is a span of pages in one state; the worst case is
one page. Each walk is compared with dependent reads of memory, as many as the nodes it visits: of
the same lines repeatedly, and of all lines.

Examples:
  ritornello bench table
  ritornello bench table --nodes 100000 --json | jq '.rows[] | {pages_per_node, walk_p50_us}'")]
pub struct TableArgs {
    /// Nodes of the page table
    #[arg(long, default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(1024..=4_000_000))]
    pub nodes: u64,
    /// Pages per node, powers of two
    #[arg(long, value_delimiter = ',', default_value = "32,16,8,4,2,1", value_parser = node_pages)]
    pub pages_per_node: Vec<u64>,
}

fn node_pages(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(pages @ 1..=256_u64) if pages.is_power_of_two() => Ok(pages),
        _ => Err("a power of two up to 256".to_owned()),
    }
}

/// Arguments of `bench index`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Every backend is filled in a separate process, probed there, and killed; then other
processes reopen it: after the kill, after a clean close, and with its files out of the page cache. A
last process removes old sequences, leaf first, while it inserts new sequences.

Rates are pages per second. Write amplification is the kernel's count of bytes the process wrote to
storage, after a sync, per 40 bytes of a page; the next column has the backend's count. Each backend
is measured with only a final sync, and with a sync after every 65,536 pages; --durable adds a
measurement with a sync after every run.

Examples:
  ritornello bench index --entries 100000,1000000
  ritornello bench index --backends run,memory --entries 1000000 --durable
  ritornello bench index --workload kv-events --json | jq '.rows[] | {backend, ingest_per_s}'")]
pub struct IndexArgs {
    /// Backends to measure [default: all that are compiled in]
    #[arg(long, value_delimiter = ',')]
    pub backends: Vec<String>,
    /// Numbers of pages
    #[arg(long, value_delimiter = ',', default_value = "100000",
          value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    pub entries: Vec<u64>,
    /// Add a measurement with a sync after every run
    #[arg(long)]
    pub durable: bool,
    /// Source of the pages
    #[arg(long, value_enum, default_value = "chains")]
    pub workload: Workload,
    /// Memory for a backend's cache of its files
    #[arg(long, default_value = "128MiB", value_parser = size)]
    pub cache: u64,
    /// Write a chart: an SVG file
    #[arg(long, value_parser = picture)]
    pub chart: Option<PathBuf>,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
}

/// Arguments of `bench clients`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. This process owns a store; clients are separate processes. Each of --runs rounds
puts and flushes --total bytes and gets them back, once here and once in a client, in alternating
order; ratios are taken by round, and the median is printed. Every byte is compared, outside the time.

Questions are about 256 stored pages (4,096 in the last row, as sixteen requests would ask together),
4,000 times each: in this process, from a single client, and from a client while --clients other
clients lease, put and get without pause.

Examples:
  ritornello bench clients
  ritornello bench clients --dir /nvme --clients 8 --page-bytes 2MiB --total 1GiB
  ritornello bench clients --json | jq '.crowded.lease.p99_us'")]
pub struct ClientsArgs {
    /// Busy clients
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub clients: u32,
    /// Bytes per page put and read
    #[arg(long, default_value = "192KiB", value_parser = size)]
    pub page_bytes: u64,
    /// Bytes put and read each time
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub total: u64,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Bytes per segment file
    #[arg(long, hide = true, value_parser = size)]
    pub segment_bytes: Option<u64>,
}

/// Arguments of `bench codec`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. A slice holds one layer's keys and values of --page-tokens tokens and is encoded
separately. The slices of a set are repeated until they fill --total bytes, which should exceed the
caches; every round copies, encodes and decodes them. Rates are medians of bytes of numbers per
processor time of one thread. Lossless codecs are compared bit by bit.

The error of a lossy codec is the norm of the difference of softmax(QK/sqrt d)V over its norm, with
the keys and values of all tokens encoded and decoded: the mean of the layers, and the worst.

Without --kv, keys and values are a small sample of the demonstration's model after some training. A
synthetic set whose keys have outlier channels is always measured as well.

Examples:
  ritornello bench codec
  ritornello bench codec --kv FILE.safetensors --json | jq '.rows[] | {codec, size_ratio}'
  build/env/vllm/bin/python engines/vllm/make_kv.py demo FILE.safetensors")]
pub struct CodecArgs {
    /// Keys, values and queries to use, as engines/vllm/make_kv.py writes them
    #[arg(long)]
    pub kv: Option<PathBuf>,
    /// Bytes of numbers per rate and thread
    #[arg(long, default_value = "256MiB", value_parser = size)]
    pub total: u64,
    /// Tokens per slice
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub page_tokens: u32,
    /// Concurrent threads
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
    /// Dimensions from the other options
    Custom,
}

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
    /// Fills a metadata-only store
    Fill {
        /// Directory of the store
        dir: PathBuf,
        /// Pages
        #[arg(long)]
        entries: u64,
        /// Pages per run
        #[arg(long)]
        run_pages: u32,
    },
    /// Opens a store and prints its resident memory
    Resident {
        /// Directory of the store
        dir: PathBuf,
    },
    /// Opens the index of a metadata-only store and prints its memory and time
    OpenIndex {
        /// Directory of the store
        dir: PathBuf,
        /// Pages
        #[arg(long)]
        entries: u64,
        /// Pages per run
        #[arg(long)]
        run_pages: u32,
    },
    /// Fills, opens or churns an index backend
    IndexBackend(IndexPartArgs),
    /// Runs the ten stages on the index `lsm`
    Adaptive(AdaptivePart),
    /// Runs a client that reads commands from standard input
    Client(ClientPart),
    /// Probes as a client
    Probe {
        /// Directory of the store
        dir: PathBuf,
        /// Pages in the store
        #[arg(long)]
        entries: u64,
    },
}

/// Arguments of the parts of `bench index`.
#[derive(Debug, Args)]
pub struct IndexPartArgs {
    /// The part.
    #[command(subcommand)]
    pub part: IndexPart,
}
