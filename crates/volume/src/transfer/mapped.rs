//! Transfers from and to mapped segments: copies, checksummed while they are in the cache.
//!
//! A page is copied in pieces of [`PIECE`] bytes, and each piece is added to the page's checksum
//! before the next is copied. The checksum then reads from the first-level cache, at several times
//! the speed of memory, so that verification costs little. A read checksums the copy, because other
//! processes may change the mapped bytes at any time.

mod copy_threads;
mod get;
mod mapped_run;
mod put;

pub(crate) use copy_threads::copy_threads;
pub(super) use get::{copy_out, failed, read};
pub(super) use mapped_run::MappedRun;
pub(super) use put::write;

/// Bytes that are copied and then checksummed: a piece fits the first-level cache.
pub(super) const PIECE: usize = 16 << 10;
