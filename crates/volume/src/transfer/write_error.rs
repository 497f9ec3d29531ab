//! Why a run was not written.

use super::MissReason;
use super::chunk::Chunk;
use ritornello_format::{Error, ErrorKind};
use std::io;

/// The file system failed a chunk.
pub(super) fn failed(what: &str, chunk: &Chunk, error: io::Error) -> Error {
    Error::retry(what)
        .with("reason", MissReason::Io.word())
        .with("segment", chunk.segment.0)
        .with("offset", chunk.offset)
        .because(error)
}

/// In a forked child.
pub(super) fn inherited() -> Error {
    Error::new(
        ErrorKind::Closed,
        "these segments were opened before a fork: open the store again in the child",
    )
}

/// A run's end was not reached, and why.
pub(super) fn stopped(reason: MissReason) -> Error {
    Error::retry("a run was not written to its end").with("reason", reason.word())
}
