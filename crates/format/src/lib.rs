//! # ritornello-format
//!
//! The bytes of the store's own files (run headers, journal, checkpoint, manifest and others), and
//! the types that all crates share: scopes, page keys, places. `docs/format.md` specifies the
//! bytes. The bytes of codecs, remote objects, and the indexes `lsm` and `art` are defined beside
//! their code.
//!
//! **Promises.** Decoding never panics, and never returns bytes whose checksum disagrees. Encoding
//! is canonical: equal values encode to equal bytes. The bytes of version 1 do not change:
//! `tests/golden.rs` compares them with recorded bytes.
//!
//! **Must not know** files, threads, clocks, or any other crate of the project: this crate is pure.

#![forbid(unsafe_code)]

pub mod checkpoint;
mod checksum;
mod error;
mod header;
pub mod journal;
mod key;
mod key_list;
mod manifest;
mod marker;
mod place;
mod registry;
mod reservation;
pub mod residency;
mod scope;
mod scope_difference;
mod size;
mod version;
mod whole_file;
pub mod wire;

pub use checksum::{SliceChecksum, checksum};
pub use error::{Error, ErrorKind, Result};
pub use header::{RUN_HEADER_UNITS_MAX, RUN_MAGIC, RunHeader, Slice};
pub use key::{
    KEY_BYTES_MAX, KEY_BYTES_MIN, PageHash, PageHashes, ScopedKeys, check_keys, parse_key,
};
pub use key_list::KeyList;
pub use manifest::{Manifest, VolumeRecord};
pub use marker::VolumeMarker;
pub use place::{Extent, PIECE_UNITS, Place, SegmentId, UNIT, WHOLE_PAGE_UNITS, units_of};
pub use registry::{ScopeRegistry, ScopeSettings, StoredRegistry};
pub use reservation::ReservationRecord;
pub use scope::{PAGE_BYTES_MAX, Scope, ScopeId, ScopeSlot};
pub use scope_difference::FieldDifference;
pub use size::parse_bytes;
pub use version::FORMAT_VERSION;
