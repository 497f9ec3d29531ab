//! # ritornello-service
//!
//! The node service: one HTTP address that answers about the stores of a machine, for probes of
//! health, for Prometheus, and for programs of operators.
//!
//! ```text
//!   accept loop ── TLS; limits of connections, headers and time       server.rs, connections.rs
//!     └─ guard ── Host, token and role, rate, headers of responses    guard.rs
//!          └─ routes, and the OpenAPI document of exactly these       routes/
//!               └─ observer ── one answer for several requests        observer.rs
//!                    └─ store access ── an open handle, or none       store_access.rs
//! ```
//!
//! **Stores.** A store that this process has open answers through its handle. Any other store is
//! observed: its owner answers, or its files if no process owns it. The owner also explains misses,
//! to this process as a client for one call. Neither makes this process the owner.
//!
//! **Threads.** One thread serves all connections and never waits for a store. Calls of stores run
//! on separate threads: of each store at most one observation, one scrub and eight other calls at a
//! time, and, if disks hang, at most four searches for the drives of its directories and 12
//! abandoned observations. Requests wait for calls within a deadline, so a hung disk delays
//! answers about its store, and no other answer. One thread reads the token file again after it
//! changed, another the files of the certificate.
//!
//! **Roles.** A token gives the role `read`, `operate` or `admin`; the method of a request, and
//! its path if it is `/v1/explain`, decide which role it needs. Calls that operate on a store need
//! an open handle: an observer only reads. Lookups need one too, because the owner counts them.
//!
//! **Promises.** `/livez` answers without a store. Without a token file the service listens on
//! loopback addresses only, and its requests change nothing. A request is answered only if its
//! Host header names the service, so a web page of another origin cannot read answers, even if
//! the host name of its site resolves to this machine. Memory, threads, connections, the time of
//! each request and the number of time series are bounded for all requests. Probes of health are
//! answered also if other clients open all connections and send nothing or a part of a request, or
//! send too many requests.
//! Label values cannot add lines or labels.
//!
//! **Must not know** how a store works, or the command line: the caller opens stores and prints.

#![forbid(unsafe_code)]

mod answer;
mod arriving_body;
mod calls;
mod certificate;
mod connections;
mod drive;
mod guard;
mod guarded_file;
mod host;
mod limits;
mod metrics;
mod observer;
mod problem;
mod rate;
mod reread;
mod role;
mod routes;
mod scrubs;
mod server;
mod settings;
mod store_access;
mod tokens;

pub use certificate::Certificate;
pub use role::Role;
pub use server::Service;
pub use settings::Settings;
pub use store_access::StoreAccess;
pub use tokens::Tokens;
