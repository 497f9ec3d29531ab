//! Errors of runs that were not written.

use super::MissReason;
use super::chunk::Chunk;
use ritornello_format::{Error, ErrorKind};
use std::io;

/// The file system failed an operation on `chunk`.
pub(super) fn failed(what: &str, chunk: &Chunk, error: io::Error) -> Error {
    Error::retry(what)
        .with("reason", MissReason::Io.word())
        .with("segment", chunk.segment.0)
        .with("offset", chunk.offset)
        .because(error)
}

/// The segments belong to the parent process.
pub(super) fn inherited() -> Error {
    Error::new(
        ErrorKind::Closed,
        "these segments were opened before a fork: open the store again in the child",
    )
}

/// The call stopped before the run was complete, for `reason`.
pub(super) fn stopped(reason: MissReason) -> Error {
    Error::retry("a run was not written completely").with("reason", reason.word())
}
