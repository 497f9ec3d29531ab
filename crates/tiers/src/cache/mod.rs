//! The cache: one list of tiers, found and loaded from, and put to, as if they were one.
//!
//! Host and disk are stores of this machine that all its processes share; the remote is one that
//! several machines do. A prompt is **found** wherever it is, and what lies on the remote is brought
//! up in the background meanwhile; pages are **read** from the fastest tier that has them, and
//! **put** to the first, from which they go down as each tier's policy says. The gate says how much
//! of what was found is worth loading.
//!
//! **Promises.** Nobody who finds, reads or puts waits for a remote, or for what goes on in the
//! background. What does not fit there is dropped and counted. Whatever is wrong with a tier costs
//! hits; bytes that come are those that were put.

#[allow(clippy::module_inception, reason = "one noun a file")]
mod cache;
mod figures;
mod find;
mod load_tracker;
mod local_tier;
mod policy;
mod prefetch;
mod promotion;
mod prompt;
mod rate;
mod read;
mod shared;
mod spec;
mod spill;
mod write_back;
mod write_queue;

pub use cache::{Cache, Settings};
pub use figures::{CacheStats, CallStats, GateStats, PrefetchStats, TierStats, tier_word};
pub use find::{Found, LookupOptions, Readiness, TierLease};
pub use policy::{MAX_LOOKUP_WAIT, PrefetchPolicy, WritePolicy};
pub use spec::{TierLocation, TierSpec};
