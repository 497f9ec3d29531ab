//! # ritornello-remote
//!
//! Where a remote is, and how it is spoken to: object stores (S3, GCS, Azure), a mounted file system,
//! memory, and backends that somebody else supplies, all opened by their address.
//!
//! **Promises.** Opening asks nobody: a server that is down when a process starts costs hits until it
//! is up. Threads and connections come with the first call, so that a process may fork before it. Every request ends by itself, so that no
//! thread waits for ever. What a server says is told apart by what helps: `Retry` where asking again
//! may, `Fatal` where somebody must change something first, and then it says what.
//!
//! **May not know** what the values mean: they are named bytes here.

#![forbid(unsafe_code)]

mod address;
#[cfg(feature = "clients")]
mod builders;
#[cfg(feature = "s3")]
mod credentials;
#[cfg(feature = "clients")]
mod error_map;
#[cfg(feature = "clients")]
mod objects;
mod open;
#[cfg(feature = "clients")]
mod plain;
#[cfg(feature = "clients")]
mod plaintext;
#[cfg(feature = "s3")]
mod profile;

pub use address::Address;
pub use open::{ConfiguredBackend, Opener, open, register_opener, schemes};
#[cfg(feature = "clients")]
pub use plain::PlainClient;
