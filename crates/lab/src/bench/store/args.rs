//! Arguments of `bench store`, and the shape of the pages that the arguments select.

use crate::bench::shape::Shape;
use clap::{Args, ValueEnum};
use ritornello_codec::Codec;
use ritornello_format::Scope;
use ritornello_terminal::exit::Failure;
use ritornello_terminal::print::bytes;
use ritornello_terminal::value::{codec, size};
use std::path::PathBuf;

/// Tokens of a sequence, or 8 pages if these have more tokens. [`SEQUENCE_PAGES_MAX`],
/// [`SEQUENCE_BYTES_MAX`] and half of `--total` limit a sequence further, even to fewer than 8
/// pages.
const SEQUENCE_TOKENS: u64 = 4096;
/// Maximum pages per sequence.
const SEQUENCE_PAGES_MAX: u64 = 256;
/// Maximum bytes per sequence.
const SEQUENCE_BYTES_MAX: u64 = 512 << 20;

/// Options that `--paths` excludes, because they apply to a measurement of one directory.
const ONE_DIRECTORY: [&str; 6] = ["dir", "steady", "only", "codec", "entries", "python"];

/// Arguments of `bench store`.
#[derive(Debug, Args)]
#[command(after_help = "\
How it measures. Each of --runs rounds measures the raw limit and the store, in alternating order:
O_DIRECT writes (fdatasync included) of --total bytes into blocks never written against put_batch +
flush into a new store; writes over written blocks against put_batch + flush into a store that was
filled and cleared; O_DIRECT reads against get_batch from a reopened store. The raw side uses the best
operation size and depth of a small sweep; both sides use buffers in huge pages where the machine
has them. A ratio is taken per round; medians are printed. Every byte read is compared with the byte
put; the comparison is not timed. Pages of bfloat16 hold normally distributed numbers, which lossless
codecs can shorten. Bytes from lossy codecs differ and are not compared.

A put or get is one sequence of 4,096 tokens, or of 8 pages if that is more; but at most 256 pages,
512 MiB and half of --total. Calls are blocking, from one thread. Processor seconds count the whole
process. The column `raw I/O + one read` has the processor seconds of the raw I/O plus one read of
as many bytes of memory, because checksums read every byte once.

Probes ask for 256 pages in an index of --entries pages in 32-page runs, without payload: warm probes
for the same few sequences, a cold probe for a random sequence. Reopening is timed for the whole
store, and for the index alone. Memory per page is the resident memory of a fresh process with that
index open, less the memory with an empty index; the row below it has the memory of the whole store,
which also keeps the order of eviction.

The measurement needs about three times --total on the disk, or 1 KiB for each page of --entries if
that is more; all files are removed.

--steady fills a store of --total bytes and writes four times as much again, with evictions, and with
touches of which about half hit; then measures this store and fresh stores, in alternating order: once
with pages of 192 KiB, and once with pages of 16 KiB, 64 KiB, 192 KiB and 8 MiB mixed.

--paths measures a store over several directories, one per disk: the raw limit of each directory
alone and of all directories at the same time (the sum), then put and get with calls of each length in
--call-bytes, as many calls as --total holds. Ratios are to the sum of the same round. The measurement
needs about three times --total, spread over the directories, and memory for a call of each length.
With --full it needs about four times --total: the store holds twice --total, four times its capacity is
written before the first round, and nothing is cleared, so that every put evicts the least recently used
pages.
--throttle emulates slow disks: it limits the transfers in each directory to a rate; the store then
uses blocking calls on threads instead of io_uring.

Examples:
  ritornello bench store --paths /nvme1,/nvme2 --call-bytes 256MiB,2GiB
  ritornello bench store --paths /tmp/a,/tmp/b --throttle 250MiB --runs 3 --json
  ritornello bench store --paths /nvme1,/nvme2 --full
  ritornello bench store --dir /nvme --shape llama3-8b --page-tokens 64 --total 2GiB
  ritornello bench store --dir /nvme --steady --total 1GiB --json
  ritornello bench store --dir /nvme --shape qwen2.5-0.5b --page-tokens 16 --json
  ritornello bench store --shape custom --layers 80 --kv-heads 8 --head-dim 128 --dtype fp8
  ritornello bench store --shape custom --page-bytes 1MiB --only data --runs 3")]
pub struct StoreArgs {
    /// Model whose pages are put and read
    #[arg(long, value_enum, default_value = "llama3-8b")]
    pub shape: ShapeName,
    /// Tokens per page
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub page_tokens: u32,
    /// Bytes put, and bytes read, by each measurement, rounded to whole calls; with --steady, the
    /// capacity of each store
    #[arg(long, default_value = "2GiB", value_parser = size)]
    pub total: u64,
    /// A directory on the disk to measure [default: the current directory, or a temporary
    /// directory if the current one is in memory]
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Directories on different disks, separated by commas: measures a store over all of them
    #[arg(long, value_delimiter = ',', value_name = "DIR,...", conflicts_with_all = ONE_DIRECTORY)]
    pub paths: Vec<PathBuf>,
    /// Bytes per put and per get, each length measured separately
    #[arg(long, value_delimiter = ',', default_value = "256MiB,2GiB", value_parser = size,
          value_name = "SIZE,...", requires = "paths")]
    pub call_bytes: Vec<u64>,
    /// Maximum bytes per second of each directory of --paths, reads and writes together
    #[arg(long, value_parser = rate, value_name = "SIZE", requires = "paths")]
    pub throttle: Option<u64>,
    /// Measure a full store, whose puts evict, over the directories of --paths
    #[arg(long, requires = "paths")]
    pub full: bool,
    /// Number of rounds; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Codec of pages: raw, split, zstd, int8 or int4. Unless the codec is raw, a store of raw
    /// pages is measured in the same rounds as well
    #[arg(long, default_value = "raw", value_parser = codec)]
    pub codec: Codec,
    /// Compare a full store that evicts with fresh stores, each with a capacity of --total
    #[arg(long, conflicts_with_all = ["only", "runs", "shape", "page_tokens", "codec"])]
    pub steady: bool,
    /// Measure only this part
    #[arg(long, value_enum)]
    pub only: Option<Part>,
    /// Number of pages in the probed index
    #[arg(long, default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(256..=100_000_000))]
    pub entries: u64,
    /// An interpreter that has the ritornello package, for the probe from Python
    #[arg(long)]
    pub python: Option<PathBuf>,
    /// Custom shape: number of layers
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub layers: Option<u32>,
    /// Custom shape: number of KV heads
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub kv_heads: Option<u32>,
    /// Custom shape: numbers per head
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub head_dim: Option<u32>,
    /// Custom shape: number format
    #[arg(long)]
    pub dtype: Option<String>,
    /// Custom shape: bytes per page, instead of layers, heads, numbers and format
    #[arg(long, value_parser = size,
          conflicts_with_all = ["layers", "kv_heads", "head_dim", "dtype"])]
    pub page_bytes: Option<u64>,
    /// Bytes per segment file
    #[arg(long, hide = true, value_parser = size)]
    pub segment_bytes: Option<u64>,
}

/// Parses a rate in bytes per second.
fn rate(text: &str) -> Result<u64, String> {
    match size(text)? {
        0 => Err("expected a rate above zero, such as 250MiB".to_owned()),
        rate => Ok(rate),
    }
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
    /// Dimensions from --layers, --kv-heads, --head-dim and --dtype, or --page-bytes
    Custom,
}

impl StoreArgs {
    /// Returns the shape that the arguments select.
    ///
    /// # Errors
    /// `Unusable` for dimensions of a shape that is not `custom`, for a shape without a valid page,
    /// and if the total is less than a page or makes more than 2^32 - 1 sequences.
    pub fn shape(&self) -> Result<Shape, Failure> {
        let scope = self.scope()?;
        let page_bytes = scope.resolved_page_bytes()?;
        let by_tokens = (SEQUENCE_TOKENS / u64::from(self.page_tokens)).max(8);
        let by_bytes = (SEQUENCE_BYTES_MAX / page_bytes).max(1);
        // A small total still makes two sequences, so that there is more than one call.
        let by_total = (self.total / page_bytes / 2).max(1);
        let pages = by_tokens.min(by_bytes).min(SEQUENCE_PAGES_MAX).min(by_total);
        let sequences = self.total.div_ceil(pages * page_bytes).max(2);
        let fits = u32::try_from(sequences).ok().filter(|_| self.total >= page_bytes);
        let sequences = fits.ok_or_else(|| {
            Failure::unusable(
                "--total is less than a page, or makes more than 2^32 - 1 sequences",
                "--total 2GiB",
            )
        })?;
        // The cast is safe: `pages` is at most 256.
        let codec = self.codec;
        Ok(Shape { scope, codec, page_bytes, sequence_pages: pages as u32, sequences })
    }

    /// Returns the shape of calls that move `call_bytes` each, rounded down to whole pages.
    ///
    /// # Errors
    /// `Unusable` for dimensions of a shape that is not `custom`, for a shape without a valid page,
    /// and if a call is shorter than a page or longer than the total.
    pub fn call_shape(&self, call_bytes: u64) -> Result<Shape, Failure> {
        let scope = self.scope()?;
        let page_bytes = scope.resolved_page_bytes()?;
        let pages = call_bytes / page_bytes;
        let calls = self.total / (pages * page_bytes).max(1);
        match (u32::try_from(pages), u32::try_from(calls)) {
            (Ok(sequence_pages @ 1..), Ok(sequences @ 1..)) => {
                Ok(Shape { scope, codec: self.codec, page_bytes, sequence_pages, sequences })
            }
            _ => Err(Failure::unusable(
                format!(
                    "a call of {} is shorter than a page or longer than --total",
                    bytes(call_bytes)
                ),
                "a larger --call-bytes or --total",
            )),
        }
    }

    fn scope(&self) -> Result<Scope, Failure> {
        let custom = self.shape == ShapeName::Custom;
        let given = self.layers.is_some()
            || self.kv_heads.is_some()
            || self.head_dim.is_some()
            || self.dtype.is_some()
            || self.page_bytes.is_some();
        if given && !custom {
            return Err(Failure::unusable(
                "--layers, --kv-heads, --head-dim, --dtype and --page-bytes need --shape custom",
                "--shape custom, or leave these options out",
            ));
        }
        let dtype = self.dtype.clone().unwrap_or_else(|| "bfloat16".to_owned());
        let (name, layers, heads, dim) = match self.shape {
            ShapeName::Llama3 => ("llama3-8b", 32, 8, 128),
            ShapeName::Qwen25 => ("qwen2.5-0.5b", 24, 2, 64),
            ShapeName::Custom => {
                if let Some(bytes) = self.page_bytes {
                    return Ok(Scope::opaque("ritornello bench", bytes, true));
                }
                let (Some(layers), Some(heads), Some(dim)) =
                    (self.layers, self.kv_heads, self.head_dim)
                else {
                    return Err(Failure::unusable(
                        "a custom shape needs its dimensions",
                        "--layers 32 --kv-heads 8 --head-dim 128, or --page-bytes 8MiB",
                    ));
                };
                ("custom", layers, heads, dim)
            }
        };
        Ok(Scope {
            dtype,
            kv_scale: "none".to_owned(),
            page_tokens: self.page_tokens,
            layers: (0, layers),
            kv_heads: (0, heads),
            head_dim: dim,
            layout: "page_first".to_owned(),
            page_bytes: None,
            ..Scope::opaque(&format!("ritornello bench {name}"), 1, true)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: StoreArgs,
    }

    fn shape(text: &str) -> Result<Shape, Failure> {
        let words = "store ".to_owned() + text;
        Line::try_parse_from(words.split_whitespace()).unwrap().args.shape()
    }

    #[test]
    fn named_shapes_have_their_page_sizes() {
        let llama = shape("").unwrap();
        assert_eq!((llama.page_bytes, llama.sequence_pages, llama.sequences), (8 << 20, 64, 4));
        assert_eq!(llama.total(), 2 << 30);
        let qwen = shape("--shape qwen2.5-0.5b --page-tokens 16").unwrap();
        assert_eq!((qwen.page_bytes, qwen.sequence_pages), (192 << 10, 256));
        assert!(qwen.total() >= 2 << 30 && qwen.total() < (2 << 30) + (48 << 20));
        let long = shape("--page-tokens 256 --total 64MiB").unwrap();
        assert_eq!((long.page_bytes, long.sequence_pages, long.sequences), (32 << 20, 1, 2));
    }

    #[test]
    fn call_has_the_given_length() {
        let shape = |text: &str, call| {
            let words = "store --paths a,b ".to_owned() + text;
            Line::try_parse_from(words.split_whitespace()).unwrap().args.call_shape(call)
        };
        let long = shape("", 2 << 30).unwrap();
        assert_eq!((long.sequence_pages, long.sequences, long.total()), (256, 1, 2 << 30));
        let short = shape("", 256 << 20).unwrap();
        assert_eq!((short.sequence_pages, short.sequences, short.total()), (32, 8, 2 << 30));
        assert!(shape("", 1 << 20).is_err(), "shorter than a page");
        assert!(shape("--total 1GiB", 2 << 30).is_err(), "longer than the total");
    }

    #[test]
    fn invalid_shapes_are_refused() {
        for bad in
            ["--shape custom", "--layers 3", "--total 1MiB", "--shape custom --page-bytes 1GiB"]
        {
            assert_eq!(
                shape(bad).unwrap_err().status,
                ritornello_terminal::exit::Status::Unusable,
                "{bad}"
            );
        }
        let odd = shape("--shape custom --page-bytes 5000 --total 1MiB").unwrap();
        assert_eq!((odd.page_bytes, odd.stride()), (5000, 8192));
    }
}
