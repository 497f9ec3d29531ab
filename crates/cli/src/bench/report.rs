//! What a measurement came to, as `--json` prints it.

use ritornello_volume::limit::IoShape;
use serde::Serialize;

/// All figures. What was not measured is `null`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The shape's name.
    pub shape: String,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Bytes a page.
    pub page_bytes: u64,
    /// Pages of one put and of one get.
    pub call_pages: u32,
    /// Rounds.
    pub runs: u32,
    /// Where, and on what.
    pub machine: Machine,
    /// What the disk and the memory can do.
    pub raw: Option<Raw>,
    /// Put and flush over blocks that were written before: the steady state.
    pub put: Option<Moved>,
    /// Put and flush into a new store.
    pub put_fresh: Option<Moved>,
    /// Get from a store that was opened anew.
    pub get: Option<Moved>,
    /// A store of encoded pages, which all of the above is then, beside one of raw pages.
    pub encoded: Option<EncodedRates>,
    /// The longest-prefix question.
    pub probe: Option<Probe>,
    /// Opening the store of `probe.entries` pages, its files in the page cache.
    pub reopen_ms: Option<f64>,
    /// The same, its files not in the page cache.
    pub reopen_cold_ms: Option<f64>,
    /// The same of the index alone, its files in the page cache.
    pub reopen_index_ms: Option<f64>,
    /// Resident memory of the index a page, in runs of 32.
    pub memory_bytes_per_page: Option<f64>,
    /// Resident memory of the index a page, in runs of one.
    pub memory_bytes_per_page_single: Option<f64>,
    /// The whole store's resident memory beside that.
    pub memory_more: Option<MemoryMore>,
    /// Files of the store that holds `bytes_put`.
    pub files: Option<u64>,
    /// Blocks that they take, in bytes.
    pub bytes_on_disk: Option<u64>,
    /// Payload put into it.
    pub bytes_put: Option<u64>,
    /// Bytes a segment file.
    pub segment_bytes: Option<u64>,
    /// How long all of it took.
    pub seconds: f64,
}

/// Where it was measured, and on what.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// The directory measured in.
    pub dir: String,
    /// The file system.
    pub file_system: String,
    /// How the store moves bytes.
    pub io: String,
    /// Why not better; empty if there is nothing better.
    pub io_why: String,
    /// What the buffers are made of.
    pub buffers: String,
    /// Bytes an operation and operations in flight of the raw writes.
    pub raw_write: Option<Depth>,
    /// The same of the raw reads.
    pub raw_read: Option<Depth>,
}

/// How a raw limit was driven.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Depth {
    /// Bytes an operation.
    pub op_bytes: usize,
    /// Operations in flight.
    pub depth: usize,
}

impl From<IoShape> for Depth {
    fn from(shape: IoShape) -> Self {
        Self { op_bytes: shape.op_bytes, depth: shape.depth }
    }
}

/// What the disk and the memory can do, medians.
#[derive(Clone, Debug, Serialize)]
pub struct Raw {
    /// Overwriting, `fdatasync` included.
    pub write_gib_s: f64,
    /// Writing blocks that were never written, `fdatasync` included.
    pub write_fresh_gib_s: f64,
    /// Reading.
    pub read_gib_s: f64,
    /// Copying in memory, on one thread.
    pub memcpy_gib_s: f64,
    /// Processor seconds a GiB of overwriting.
    pub write_cpu_s_per_gib: f64,
    /// Processor seconds a GiB of reading.
    pub read_cpu_s_per_gib: f64,
}

/// A rate of the store, medians.
#[derive(Clone, Debug, Serialize)]
pub struct Moved {
    /// Payload.
    pub gib_s: f64,
    /// To the raw limit of the same round.
    pub ratio: f64,
    /// Processor seconds a GiB, of the whole process.
    pub cpu_s_per_gib: f64,
    /// The ratio of every round.
    pub ratios: Vec<f64>,
}

/// A store of encoded pages beside one of raw pages: rates of payload, medians of the ratios of
/// rounds.
#[derive(Clone, Debug, Serialize)]
pub struct EncodedRates {
    /// The codec.
    pub codec: String,
    /// Bytes that payload takes on disk, headers and padding included, to payload.
    pub size: f64,
    /// Put and flush, overwriting.
    pub put_ratio: f64,
    /// Put and flush into a new store.
    pub put_fresh_ratio: f64,
    /// Get.
    pub get_ratio: f64,
    /// Processor seconds a GiB, to those of raw pages: put and flush, overwriting.
    pub put_cpu_ratio: f64,
    /// The same of a get.
    pub get_cpu_ratio: f64,
    /// Pages that stay in a store that is too small for all.
    pub kept: Kept,
}

/// Pages that were left of one set in two stores of the same capacity.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Kept {
    /// All segments of such a store.
    pub segments_bytes: u64,
    /// As they come.
    pub raw_pages: u64,
    /// Encoded.
    pub encoded_pages: u64,
    /// The latter to the former.
    pub ratio: f64,
}

/// A 256-page probe, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// Warm, from Rust, in the owner.
    pub p50_us: f64,
    /// The slowest in a hundred of these.
    pub p99_us: f64,
    /// Of random sequences.
    pub cold_p50_us: f64,
    /// Warm, of the index alone: without looking up the scope.
    pub index_p50_us: f64,
    /// Of random sequences, of the index alone.
    pub index_cold_p50_us: f64,
    /// From Python, in the owner; `null` without an interpreter.
    pub python_p50_us: Option<f64>,
    /// From another process, in Rust.
    pub socket_p50_us: Option<f64>,
    /// Pages in the index.
    pub entries: u64,
    /// Pages a probe asks for.
    pub pages: u32,
}

/// Resident memory a page, in bytes, seen in other ways.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryMore {
    /// Of the whole store, in runs of 32.
    pub store: f64,
    /// Of the whole store, in runs of one.
    pub store_single: f64,
    /// Of the index, right after all pages were inserted, in runs of 32.
    pub filled: f64,
    /// Of the index, right after all pages were inserted, in runs of one.
    pub filled_single: f64,
}

/// The value in the middle; of nothing, zero.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value that a part `q` of the others is below; of nothing, zero.
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = (sorted.len() as f64 * q) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0, 9.0, 4.0]), 3.0);
        assert_eq!(quantile(&(0..100).map(f64::from).collect::<Vec<_>>(), 0.99), 99.0);
        assert_eq!(median(&[]), 0.0);
    }
}
