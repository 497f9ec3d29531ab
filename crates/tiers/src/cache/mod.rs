//! The cache: one interface for lookups, reads and writes of a list of tiers.
//!
//! The host and disk tiers are stores that all processes of this machine share; the remote tier is
//! shared by several machines. A **lookup** leases the leading pages on local tiers. If these pages
//! end before the prompt does, the prefetcher asks the remote for the further pages in the
//! background, if the lookup permits loads. In an unchained scope a lookup leases every page on a
//! local tier, and the prefetcher asks the remote for each of the other pages. A **read** takes
//! each page from the fastest local tier that has it; a **put** writes to the first tier, and each
//! lower tier receives the pages according to its write policy. The load gate decides how many of
//! the found pages are worth loading.
//!
//! **Promises.** No lookup, read or put waits for the remote, or for background work to end. A read
//! of a tier with a rate limit waits for the time that earlier transfers and the read itself take
//! at that rate. Under a rate limit, a background copy between tiers reserves at most 20 ms of the
//! tier's time at once; a put, a fetch from the remote, and the storing of fetched pages reserve
//! all the time that they take. A put that wrote fewer bytes gives the rest back at its end. Background work drops pages that it cannot write within the limits
//! of its queue and its deadlines, and counts them as `dropped_pages`. A put's ticket reports pages
//! as stored only if they are on the first tier, not if they were spilled. Pages that a lower tier
//! should write, and that were neither found on a tier above nor spilled, count as its
//! `lost_pages`. A faulty tier causes misses, and never delivers wrong bytes: a read returns the
//! bytes that were put or, in scopes with the lossy codecs `int8` and `int4`, the values as the
//! codec has rounded them.
//!
//! **Parts.** Each part has a separate state, with locks and threads if it needs them, and knows
//! only the parts listed below it:
//!
//! ```text
//! Cache
//! ├─ Lookups       answers lookups: leases local pages, asks the gate
//! ├─ Prefetcher    fetches pages of prompts from the remote to the first tier
//! ├─ Promotions    copies pages from the disk tier to the host tier before a load
//! ├─ LowerTiers    passes pages of puts, fetches and lookups to the writers of lower tiers
//! │  └─ TierWriter the writes to one tier: a WriteQueue with its worker, and a WriteBack
//! └─ TierSet       the stores, the remote, the page table, the load gate, the counters
//! ```
//!
//! **A read from a remote** begins in `Lookups`: if the local pages end before the prompt does, it
//! hands the prompt to `Prefetcher`, and asks the caller to repeat the lookup for as long as the
//! prefetch policy waits. A thread of the prefetcher asks the remote which pages exist, and asks
//! the gate how many of these to load. `Fetch` loads them: `RemoteTier` reads objects, each
//! verified by `ObjectRead`, with calls that have a deadline, retries and a circuit breaker
//! (`remote::call_executor`). The fetched pages are put into the first tier and leased there, for
//! at most 30 seconds; a later lookup leases them itself, and ends these leases. The requests to
//! an object store are made in `ritornello_remote`.

#[allow(clippy::module_inception, reason = "each file is named after its type")]
mod cache;
mod contents;
mod dirty_pages;
mod fetch;
mod load_gate;
mod load_tracker;
mod local_prefix;
mod local_tier;
mod lookup;
mod lookups;
mod lower_tiers;
mod pending_put;
mod prefetch;
mod prefetcher;
mod promotion;
mod prompt;
mod puts;
mod rate;
mod read;
mod spec;
mod stats;
mod tier_policies;
mod tier_set;
mod tier_writer;
mod write_back;
mod write_queue;

pub use cache::{Cache, Settings};
pub use lookup::{Lookup, LookupOptions, Readiness, TierLease};
pub use spec::{TierLocation, TierSpec};
pub use stats::{CacheStats, CallStats, GateStats, PrefetchStats, TierStats, tier_name};
pub use tier_policies::{MAX_LOOKUP_WAIT, PrefetchPolicy, WritePolicy};
