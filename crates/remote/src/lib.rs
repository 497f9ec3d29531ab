//! # ritornello-remote
//!
//! Opens remotes by their address: object stores (S3, GCS, Azure), a mounted file system, memory,
//! and backends that are registered from outside.
//!
//! **Promises.** Opening sends no request: a process can open a remote whose server is down, and
//! pages in this remote miss until the server is up. The first call of a remote creates its threads
//! and connections, so that a process may fork before that call. Every request to an object store
//! has a timeout, so that no thread waits without limit. This crate sets no timeout for calls of
//! directories and of registered backends. Errors of requests are classified: `Retry` if a retry
//! can succeed, `Fatal` with advice if the configuration must change first.
//!
//! **Must not know** the meaning of values: for this crate a value is bytes with a name.

#![forbid(unsafe_code)]

#[cfg(feature = "clients")]
mod baseline_client;
#[cfg(feature = "clients")]
mod builders;
#[cfg(feature = "s3")]
mod credentials;
#[cfg(feature = "clients")]
mod error_map;
#[cfg(feature = "clients")]
mod objects;
mod open;
mod parsed_address;
#[cfg(feature = "s3")]
mod profile;
#[cfg(feature = "clients")]
mod tls_check;

#[cfg(feature = "clients")]
pub use baseline_client::BaselineClient;
pub use open::{ConfiguredBackend, Opener, open, open_deferred, register_opener, schemes};
pub use parsed_address::ParsedAddress;
