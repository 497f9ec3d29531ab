//! # ritornello-store
//!
//! The disk tier: `put_batch / probe / get_batch` over an index and a volume, with leases,
//! reservations, eviction and durability.
//!
//! A store has two halves. The [`StoreCore`] is the owner's half: it knows which pages exist and
//! where they are stored, grants space, evicts, and answers small calls through [`Catalog`]. Every
//! process has a [`Store`], which moves payload between the caller's memory and the segment files,
//! and calls a catalog, in its own process or in another.
//!
//! **Promises.** A get returns the bytes that were put under the key, or a miss with a reason; with
//! the lossy codecs `int8` and `int4` it returns an approximation. A call waits for space and I/O
//! at most until the caller's deadline, except for reads in flight into the caller's memory,
//! writes in flight, and the opening of a segment's file. Without a deadline it waits for space for at most a minute. The files of a
//! store stay within its budget; ARCHITECTURE.md lists the exceptions.
//!
//! **Must not know** how a call reaches the owner (sockets, takeovers), or inference engines.

#![forbid(unsafe_code)]

pub mod admission;
mod budget;
mod catalog;
mod client_id;
mod commit_order;
mod conversion;
mod core;
mod decision;
mod decision_counts;
mod directory;
mod durations;
mod encode;
pub mod eviction;
mod explain;
mod explanation;
mod get;
mod io_threads;
pub mod lease;
mod listed_dirs;
mod lookup_sample;
mod machine_memory;
mod options;
mod outcome;
mod owner_silent;
mod ownership;
mod parts;
mod permissions;
mod put;
mod queue_lengths;
mod registry_file;
mod resolved;
mod restore;
pub mod rounds;
mod stats;
mod store;
mod stored;
mod submit;
mod sync;
mod ticket;
mod time_limit;
mod transfer_counts;
mod transfer_stats;
mod volume_copies;
mod volumes;

pub use budget::Budget;
pub use catalog::{
    Catalog, Committed, KeyListing, Keys, LEASE_PAGES_MAX, LeaseNumber, Leased, Located,
    LocatedRun, PackedKeys, Refusal, Request, ReserveRequest, Reserved, ReservedRun, Response,
    ScopeListing, ScopeRef, WireError, rule,
};
pub use client_id::ClientId;
pub use conversion::{Conversion, convert_index};
pub use core::{
    CapacityChange, ClientAlive, DamagedPage, LocalCatalog, StoreCore, Verification,
    remembered_answers,
};
pub use decision::{
    DECISION_KEYS_MAX, Decision, DecisionEstimate, DecisionListing, DecisionMemory,
    DecisionOutcome, EXPLAINED_DECISIONS_MAX, ExplainedRequest, LISTED_DECISIONS_MAX,
    REPORTED_DECISIONS_MAX, RequestExplanation,
};
pub use decision_counts::DecisionCounts;
pub use directory::{Directory, POLICY_FILE};
pub use durations::{
    DURATION_BOUNDS, DURATION_COUNTS, DurationCounters, DurationCounts, LOOKUP_BOUNDS,
};
pub use explanation::{Answer, EXPLAINED_KEYS_MAX, Explanation, KeySpan, OtherScope};
pub use machine_memory::{ControlGroup, check_memory, control_group, memory_left};
pub use options::{
    Durability, IndexKind, Options, SEGMENT_BYTES, SEGMENT_BYTES_MIN, parse_codec, parse_index,
};
pub use outcome::Outcome;
pub use owner_silent::{OwnerSilent, StoreReopening};
pub use ownership::foreign_directory;
pub use permissions::{ClientCall, StorePolicy};
pub use queue_lengths::{CacheQueues, QueueLengths};
pub use restore::{Restore, Restored};
pub use stats::{
    AbsentSpace, AdmissionStats, CatalogStats, Counter, Counters, IndexDecision, IndexTuning,
    IoStats, LsmEstimate, PiecePercentiles, SCOPES_SHOWN, ScopeUsage, SpaceHealth, VolumeStats,
};
pub use store::{PutOptions, Store, check_sections};
pub use stored::{StoredCheckpoint, StoredScope, StoredStats, StoredVolume};
pub use ticket::{Completion, CompletionQueue, Ticket};
pub use time_limit::time_limit;
pub use transfer_counts::{CACHE_COUNTS, CacheCounters, CacheCounts, TransferTotals};
pub use transfer_stats::{StoreStats, TransferStats};
pub use volume_copies::{VOLUME_COPIES, is_volume_copy};
pub use volumes::open_segments;
