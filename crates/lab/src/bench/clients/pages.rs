//! Pages that the owner and the clients of `bench clients` put, get, probe and lease.

use crate::bench::shape::Shape;
use ritornello_codec::Codec;
use ritornello_format::Scope;

/// Number of stored sequences of 256 small pages, which are probed and leased, never read.
pub const MATCH_SEQUENCES: u32 = 64;
/// Pages per probe, and per lease.
pub const MATCH_PAGES: u32 = 256;
/// Pages of a long probe: as many as sixteen probes of [`MATCH_PAGES`].
pub const LONG_PAGES: u32 = 4096;
/// Numbers of the sets with sequences of [`MATCH_PAGES`] and of [`LONG_PAGES`] pages; pages of
/// different sets have different keys.
pub const MATCH_SET: u32 = 10;
pub const LONG_SET: u32 = 11;

/// Returns the shape of sequences of short pages, of 4,096 bytes each. These pages are probed and
/// leased, never read.
pub fn short(sequence_pages: u32, sequences: u32) -> Shape {
    shape("ritornello bench match", 4096, sequence_pages, sequences)
}

fn shape(name: &str, page_bytes: u64, sequence_pages: u32, sequences: u32) -> Shape {
    let scope = Scope::opaque(name, page_bytes, true);
    Shape { scope, codec: Codec::Raw, page_bytes, sequence_pages, sequences }
}

/// Returns the shape of the data that is put and read: `total` bytes, rounded down to whole
/// sequences of 64 pages, at least one sequence and at most 2^20.
pub fn data(page_bytes: u64, total: u64) -> Shape {
    let sequences = (total / page_bytes / 64).clamp(1, 1 << 20);
    shape("ritornello bench data", page_bytes, 64, sequences as u32)
}
