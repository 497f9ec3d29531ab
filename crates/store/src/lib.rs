//! # ritornello-store
//!
//! The disk tier: `put_batch / probe / get_batch` over an index and a volume, with leases,
//! reservations, eviction and durability.
//!
//! It has two halves. The [`Engine`] is the owner's: it knows which pages exist and where, hands
//! out space, decides who stays; it answers small questions through [`Catalog`]. The [`Store`] is
//! everybody's: it moves payload between the caller's memory and the segment files, and asks a
//! catalog, its own process's or another's.
//!
//! **Promises.** Bytes that come back are those that were put under the key, or a miss with a
//! reason. No call waits without a deadline. The budget is never exceeded.
//!
//! **May not know** sockets, processes, engines.

#![forbid(unsafe_code)]

mod catalog;
mod stats;

pub use catalog::{
    Catalog, Leased, LeaseNumber, Located, LocatedRun, Refusal, Reserved, ReservedRun, ScopeRef,
};
pub use stats::{CatalogStats, Counter, Counters, IoStats};
