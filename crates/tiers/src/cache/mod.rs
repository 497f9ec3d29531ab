//! The cache: one interface for lookups, reads and writes of a list of tiers.
//!
//! The host and disk tiers are stores that all processes of this machine share; the remote tier is
//! shared by several machines. A **lookup** finds a prompt on every tier and prefetches pages from
//! the remote in the background; a **read** takes each page from the fastest tier that has it; a
//! **put** writes to the first tier, and each lower tier receives the pages according to its write
//! policy. The load gate decides how many of the found pages are worth loading.
//!
//! **Promises.** No lookup, read or put waits for the remote or for background work. Background
//! work that exceeds its bounds is dropped and counted. A faulty tier costs hits; delivered bytes
//! are the bytes that were put.

#[allow(clippy::module_inception, reason = "one noun a file")]
mod cache;
mod load_tracker;
mod local_tier;
mod lookup;
mod prefetch;
mod promotion;
mod prompt;
mod rate;
mod read;
mod shared;
mod spec;
mod spill;
mod stats;
mod tier_policies;
mod write_back;
mod write_queue;

pub use cache::{Cache, Settings};
pub use lookup::{Lookup, LookupOptions, Readiness, TierLease};
pub use spec::{TierLocation, TierSpec};
pub use stats::{CacheStats, CallStats, GateStats, PrefetchStats, TierStats, tier_name};
pub use tier_policies::{MAX_LOOKUP_WAIT, PrefetchPolicy, WritePolicy};
