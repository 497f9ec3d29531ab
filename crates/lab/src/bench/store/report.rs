//! The figures of `bench store`, as `--json` prints them.

use crate::bench::quantile::median;
use ritornello_volume::baseline::{IoShape, Rate};
use serde::Serialize;

/// All figures. A figure that was not measured is `null`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Name of the shape of the pages.
    pub shape: String,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Pages per put and per get.
    pub call_pages: u32,
    /// Number of rounds.
    pub runs: u32,
    /// Directory, file system and I/O mode.
    pub machine: Machine,
    /// Raw limits of the disk and the memory.
    pub raw: Option<Raw>,
    /// Rates of put and flush over blocks that were written before: the steady state.
    pub put: Option<Moved>,
    /// Rates of put and flush into a new store.
    pub put_fresh: Option<Moved>,
    /// Rates of get from a newly opened store.
    pub get: Option<Moved>,
    /// Figures of encoded pages, compared with raw pages. If present, `put`, `put_fresh` and `get`
    /// are for encoded pages.
    pub encoded: Option<EncodedRates>,
    /// Latencies of probes for the longest prefix.
    pub probe: Option<Probe>,
    /// Median milliseconds to open the store of `probe.entries` pages, with its files in the page
    /// cache.
    pub reopen_ms: Option<f64>,
    /// Median milliseconds to open the store of `probe.entries` pages, without its files in the
    /// page cache.
    pub reopen_cold_ms: Option<f64>,
    /// Milliseconds to open only the index of the store of `probe.entries` pages, with its files in
    /// the page cache.
    pub reopen_index_ms: Option<f64>,
    /// Resident bytes per page of a newly opened index with runs of 32 pages; the memory of an
    /// empty index is subtracted.
    pub memory_bytes_per_page: Option<f64>,
    /// Resident bytes per page of a newly opened index with runs of one page; the memory of an
    /// empty index is subtracted.
    pub memory_bytes_per_page_single: Option<f64>,
    /// Resident memory of the whole store, and of the index right after filling.
    pub memory_more: Option<MemoryMore>,
    /// Number of files of the store into which `bytes_put` bytes were put.
    pub files: Option<u64>,
    /// Allocated bytes of the files that `files` counts.
    pub bytes_on_disk: Option<u64>,
    /// Payload bytes put into the store whose files `files` counts.
    pub bytes_put: Option<u64>,
    /// Bytes per segment file.
    pub segment_bytes: Option<u64>,
    /// Duration of the measurement in seconds.
    pub seconds: f64,
}

/// Directory, file system and I/O mode of the measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Measured directory.
    pub dir: String,
    /// Name of the file system.
    pub file_system: String,
    /// I/O mode of the store.
    pub io: String,
    /// Warnings about the I/O of the store, such as why no better mode is used; empty without
    /// warnings.
    pub io_why: String,
    /// Kind of memory pages of the buffers.
    pub buffers: String,
    /// Bytes per operation and operations in flight of the raw writes.
    pub raw_write: Option<Depth>,
    /// Bytes per operation and operations in flight of the raw reads.
    pub raw_read: Option<Depth>,
}

/// Bytes per operation and number of operations in flight with which a raw limit of the disk is
/// measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Depth {
    /// Bytes per operation.
    pub op_bytes: usize,
    /// Operations in flight.
    pub depth: usize,
}

impl From<IoShape> for Depth {
    fn from(shape: IoShape) -> Self {
        Self { op_bytes: shape.op_bytes, depth: shape.depth }
    }
}

/// Raw limits: rates of the disk with direct I/O and of the memory, without a store; medians of the
/// rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Raw {
    /// Rate of overwriting blocks, `fdatasync` included.
    pub write_gib_s: f64,
    /// Rate of writing blocks that were never written, `fdatasync` included.
    pub write_fresh_gib_s: f64,
    /// Rate of reading blocks.
    pub read_gib_s: f64,
    /// Rate of copying in memory, on one thread.
    pub memcpy_gib_s: f64,
    /// Processor seconds per GiB of overwriting.
    pub write_cpu_s_per_gib: f64,
    /// Processor seconds per GiB of reading.
    pub read_cpu_s_per_gib: f64,
    /// Processor seconds to read a GiB of memory that is in no cache, with a plain loop. A put or
    /// get with checksums reads every byte once, so it needs about this time besides the time of
    /// the raw I/O.
    pub memory_read_cpu_s_per_gib: f64,
}

/// Rates of puts or gets of the store: medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Moved {
    /// Payload in GiB per second.
    pub gib_s: f64,
    /// The store's rate divided by the raw disk's rate in the same round.
    pub ratio: f64,
    /// Processor seconds per GiB, of the whole process.
    pub cpu_s_per_gib: f64,
    /// The store's rate divided by the raw disk's rate, in each round.
    pub ratios: Vec<f64>,
}

impl Moved {
    /// Returns the medians of `rounds`, each of which has the store's rate and the raw disk's rate.
    #[must_use]
    pub fn of(rounds: &[(Rate, Rate)]) -> Self {
        let medians = |of: fn(&Rate) -> f64| {
            median(&rounds.iter().map(|(rate, _)| of(rate)).collect::<Vec<_>>())
        };
        let ratios: Vec<f64> =
            rounds.iter().map(|(rate, raw)| rate.gib_s() / raw.gib_s()).collect();
        Self {
            gib_s: medians(Rate::gib_s),
            ratio: median(&ratios),
            cpu_s_per_gib: medians(Rate::cpu_s_per_gib),
            ratios,
        }
    }
}

/// Figures of encoded pages. A ratio is the figure of encoded pages divided by the figure of raw
/// pages in the same round. Rates count the bytes before encoding. All figures except `kept` are
/// medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct EncodedRates {
    /// Name of the codec.
    pub codec: String,
    /// Bytes on disk per byte of payload, headers and padding included.
    pub size: f64,
    /// Ratio of the rates of put and flush over used blocks.
    pub put_ratio: f64,
    /// Ratio of the rates of put and flush into a new store.
    pub put_fresh_ratio: f64,
    /// Ratio of the rates of get.
    pub get_ratio: f64,
    /// Ratio of the processor seconds per GiB of put and flush over used blocks.
    pub put_cpu_ratio: f64,
    /// Ratio of the processor seconds per GiB of get.
    pub get_cpu_ratio: f64,
    /// Pages kept by a store that is too small for all pages.
    pub kept: CapacityGain,
}

/// Pages of one set kept by two stores of the same capacity, one with raw and one with encoded
/// pages.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CapacityGain {
    /// Bytes of the segments that each of the stores may create.
    pub segments_bytes: u64,
    /// Raw pages kept.
    pub raw_pages: u64,
    /// Encoded pages kept.
    pub encoded_pages: u64,
    /// Encoded pages kept per raw page kept.
    pub ratio: f64,
}

/// Latency of a 256-page probe, in microseconds. Warm probes alternate between at most four
/// sequences. A cold probe is for a sequence far from the previous one, so its index entries are
/// probably in no cache of the processor.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// Median of warm probes, from Rust in the owner.
    pub p50_us: f64,
    /// 99th percentile of warm probes, from Rust in the owner.
    pub p99_us: f64,
    /// Median of cold probes, from Rust in the owner.
    pub cold_p50_us: f64,
    /// Median of warm probes of the index alone, without the lookup of the scope.
    pub index_p50_us: f64,
    /// Median of cold probes of the index alone.
    pub index_cold_p50_us: f64,
    /// Median of probes from Python in the owner; `null` without an interpreter, or if the probe
    /// failed.
    pub python_p50_us: Option<f64>,
    /// Median of probes from a client process, in Rust.
    pub socket_p50_us: Option<f64>,
    /// Pages in the index.
    pub entries: u64,
    /// Pages per probe.
    pub pages: u32,
}

/// Resident memory of the whole store, and of the index right after filling, in bytes per page; the
/// memory without pages is subtracted.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryMore {
    /// Resident bytes per page of the whole store, in runs of 32.
    pub store: f64,
    /// Resident bytes per page of the whole store, in one-page runs.
    pub store_single: f64,
    /// Resident bytes per page of the index right after filling, in runs of 32.
    pub filled: f64,
    /// Resident bytes per page of the index right after filling, in one-page runs.
    pub filled_single: f64,
}
