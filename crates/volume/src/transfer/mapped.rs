//! Moving runs from and to segments that are mapped: copies, checksummed while they are in the cache.
//!
//! A page is copied in pieces of [`PIECE`] bytes, and each piece goes into the page's checksum before
//! the next is copied: it comes from the first-level cache then, at several times the rate at which
//! memory is copied, so that all is verified as it is on a disk. What is checksummed is the copy, on
//! the way in; what others may do to mapped bytes meanwhile shows in it.

mod copy_threads;
mod get;
mod mapped_run;
mod put;

pub(crate) use copy_threads::copy_threads;
pub(super) use get::{copy_out, failed, read};
pub(super) use mapped_run::MappedRun;
pub(super) use put::write;

/// Bytes that are copied and checksummed in turns: they fit the first-level cache.
pub(super) const PIECE: usize = 16 << 10;
