//! # ritornello-store
//!
//! The disk tier: `put_batch / probe / get_batch` over an index and a volume, with leases,
//! reservations, eviction and durability.
//!
//! It has two halves. The [`StoreCore`] is the owner's: it knows which pages exist and where, hands
//! out space, decides who stays; it answers small questions through [`Catalog`]. The [`Store`] is
//! everybody's: it moves payload between the caller's memory and the segment files, and asks a
//! catalog, its own process's or another's.
//!
//! **Promises.** Bytes that come back are those that were put under the key, or a miss with a
//! reason. No call waits without a deadline. The budget is never exceeded.
//!
//! **May not know** sockets, processes, engines.

#![forbid(unsafe_code)]

pub mod admission;
mod budget;
mod catalog;
mod conversion;
mod directory;
mod encode;
mod core;
pub mod eviction;
mod get;
pub mod lease;
mod memory;
mod moved;
mod options;
mod outcome;
mod ownership;
mod parts;
mod policy;
mod put;
mod registry_file;
mod resolved;
pub mod rounds;
mod silence;
mod stats;
mod store;
mod submit;
mod sync;
mod ticket;
mod volumes;
mod written;

pub use budget::Budget;
pub use catalog::{
    Catalog, Committed, HeldKeys, HeldScope, LEASED_AT_ONCE, LeaseNumber, Leased, Located,
    LocatedRun, Refusal, Reserved, ReservedRun, ScopeRef, ReserveRequest,
};
pub use conversion::{Conversion, convert_index};
pub use directory::Directory;
pub use core::{Alive, ClientId, StoreCore, Finding, CapacityChange, LocalCatalog, Verification};
pub use memory::{ControlGroup, check_memory, control_group, memory_left};
pub use moved::{StoreStats, TransferStats};
pub use options::{
    Durability, IndexKind, Options, SEGMENT_BYTES, SEGMENT_BYTES_MIN, parse_codec, parse_index,
};
pub use outcome::Outcome;
pub use ownership::foreign_directory;
pub use policy::{ClientCall, POLICY_FILE, StorePolicy};
pub use silence::{OwnerSilent, StoreReopening};
pub use stats::{
    AdmissionStats, CatalogStats, Counter, Counters, IndexDecision, IndexTuning, IoStats,
    LsmEstimate, PathStats, Pieces, SCOPES_SHOWN, ScopeUsage, SpaceHealth, Unavailable,
};
pub use store::{Store, PutOptions, check_sections};
pub use ticket::{Bell, Ticket};
pub use volumes::open_segments;
