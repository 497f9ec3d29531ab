//! Eviction: the policies behind a trait, and the clock that numbers uses of runs.
//!
//! With every policy, pages are evicted **leaf first**: a run is cut from its tail, and keeps every
//! page that another run follows, and the pages before it. The remaining pages are always a prefix,
//! which can be hit.

mod adaptive;
mod arc;
mod clock;
mod density;
mod eviction_policy;
mod fixed;
mod fold;
mod ghost;
mod lru;
mod pieces;
mod policy_kind;
mod s3fifo;
mod shadow;
mod tree;
mod two_q;

#[cfg(test)]
mod model;

pub use clock::RecencyClock;
pub use policy_kind::PolicyKind;

use ritornello_index::RunId;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// A run as an eviction policy knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The run's id.
    pub run: RunId,
    /// The low half of the hash of the run's first page. Policies that remember evicted pages
    /// recognise a page by this key when it is put again, in a run with another id.
    pub key: u64,
    /// The page that the run follows, if it is known: the run of this page, and the page's index in
    /// that run.
    pub parent: Option<(RunId, u32)>,
    /// Number of pages.
    pub pages: u32,
    /// Length of a page on disk, in units of 4 KiB.
    pub page_units: u32,
    /// Length of the header on disk, in units.
    pub header_units: u32,
}

/// Leading pages of a run that a sequence used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The run.
    pub run: RunId,
    /// Number of leading pages used; later pages were not used.
    pub pages: u32,
}

/// Why a sequence of pages was requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The pages were read, so the store had them.
    Read,
    /// The pages were put, so the store did not have them.
    Write,
}

/// The state of runs that a policy may query while it chooses victims.
pub trait EvictionContext {
    /// Whether a run must stay complete: it is leased (by a reader, or by a put whose pages follow
    /// it), retained or absent, or, in an eviction that spares the volumes that puts avoid, only on
    /// such volumes.
    fn is_protected(&self, run: RunId) -> bool;
    /// The key of page `page` of a run: see [`Resident::key`]. Zero if the run has no page `page`.
    fn page_key(&self, run: RunId, page: u32) -> u64;
}

/// The eviction policy of a store, and the hits that its candidates would have had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionStats {
    /// The configured policy.
    pub policy: String,
    /// The candidate that the store follows; empty without candidates.
    pub following: String,
    /// Number of times that the store switched to another candidate.
    pub switches: u64,
    /// Bytes of memory of all shadow caches, and of the state that samples keys for them.
    pub shadow_bytes: u64,
    /// The shadow caches simulate one of `sample_rate` pages; zero without shadow caches.
    pub sample_rate: u64,
    /// One shadow cache for each candidate. The candidates are the policies between which the
    /// configured policy chooses.
    pub shadows: Vec<ShadowStats>,
}

/// A shadow cache: the hits of a candidate over a sample of the requested pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowStats {
    /// Name of the candidate policy.
    pub name: String,
    /// Number of requests for pages in the sample.
    pub requested: u64,
    /// Number of these requests for which the candidate would have had the page and all pages
    /// before it.
    pub hits: u64,
    /// Whether the store follows the candidate.
    pub followed: bool,
}

/// A run whose last pages, or all pages, are to be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// The run.
    pub run: RunId,
    /// Number of leading pages that stay; zero evicts the whole run.
    pub keep_pages: u32,
    /// Units of the pages to remove, and of the header if the whole run is removed.
    pub units: u64,
}

/// An eviction policy.
///
/// The store reports all events of runs, and the policy chooses victims. The store calls the policy
/// under the lock of the core's state, so every method is fast: no work proportional to the number
/// of runs, and no I/O, except that the index `lsm` may read its files for an [`EvictionContext`].
///
/// **Protocol.** Runs are admitted when they are committed or salvaged. At open all runs are
/// admitted, least recently used first. A scope with a quota has a policy of its own as well, to
/// which the runs of the scope are admitted in the same order. Whenever the index reports removed
/// pages, for any reason, the store calls [`Eviction::shrink`] or [`Eviction::remove`], also for
/// the victims that [`Eviction::victims`] returned.
pub trait Eviction: Send + Debug {
    /// The configured name of the policy.
    fn name(&self) -> &'static str;

    /// The name of the policy by which victims are chosen now. `adaptive` returns the candidate
    /// that it follows; for some time after a switch, victims are pieces that the previous
    /// candidate still lists.
    fn followed(&self) -> &'static str {
        self.name()
    }

    /// Adds a run that counts as used now. Replaces an earlier run with the same id.
    fn admit(&mut self, resident: &Resident);

    /// Sets the parent of a run that was admitted without a parent.
    fn link(&mut self, run: RunId, parent: RunId, page: u32);

    /// Records the use of a sequence: its runs, starting at the root. Skips runs that were not
    /// admitted.
    fn hit(&mut self, path: &[Used]);

    /// Records the demand for a sequence, page by page ([`Resident::key`] of each), after the page
    /// `after`, or starting at the root if `after` is `None`. Policies that simulate candidates use
    /// these calls. A read reports the pages that it finds, a put the pages that it must store, so
    /// a request for a sequence reports each page once. The default ignores the calls.
    fn demanded(
        &mut self,
        demand: Demand,
        after: Option<u64>,
        pages: &mut dyn Iterator<Item = u64>,
    ) {
        let _ = (demand, after, pages);
    }

    /// The simulated hits of the policy's candidates. The default, for a policy without candidates,
    /// returns only the policy's name.
    fn measured(&self) -> EvictionStats {
        EvictionStats { policy: self.name().to_owned(), ..EvictionStats::default() }
    }

    /// Removes the last `pages` pages of a run.
    fn shrink(&mut self, run: RunId, pages: u32);

    /// Removes a run. Ignores runs that were not admitted.
    fn remove(&mut self, run: RunId);

    /// Chooses runs to cut until at least `units` units become free, or no run that this call
    /// examines can be cut. Never cuts a protected run, or the pages that it follows.
    ///
    /// The work does not grow with the number of runs. The work grows with the number of protected
    /// runs that the policy proposes as victims and the call skips; a later call examines only a
    /// bounded number of them again.
    ///
    /// The policy relies on the store to cut the victims in the given order, and does not choose a
    /// victim again. If the index does not know a victim, the store calls [`Eviction::remove`] for
    /// it.
    fn victims(&mut self, units: u64, context: &dyn EvictionContext) -> Vec<Victim>;

    /// Number of runs that were admitted and not removed.
    fn len(&self) -> usize;

    /// Whether all admitted runs were removed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
