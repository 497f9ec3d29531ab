//! Which runs go when space is wanted: the policy, behind a trait, and the clock that orders uses.
//!
//! Whatever the policy, pages go **leaf first**: a run is cut from its tail, and never before the
//! page that another run hangs from. So what is left is always a prefix, and can be hit.

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
mod policy;
mod s3fifo;
mod shadow;
mod tree;
mod two_q;

#[cfg(test)]
mod model;

pub use clock::RecencyClock;
pub use policy::Policy;

use ritornello_index::RunId;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// A run as a policy knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Its name.
    pub run: RunId,
    /// What lasts when the same pages are evicted and put again, under another name: the low half
    /// of the first page's hash. Policies that remember what they evicted know it by this.
    pub key: u64,
    /// The page it hangs from, where that is known: the run and the page's number there.
    pub parent: Option<(RunId, u32)>,
    /// Number of pages.
    pub pages: u32,
    /// Length of a page on disk, in units of 4 KiB.
    pub page_units: u32,
    /// Length of the header on disk, in units.
    pub header_units: u32,
}

/// Leading pages of a run that a sequence led through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The run.
    pub run: RunId,
    /// One past the last of its pages that was used; those behind it were not.
    pub pages: u32,
}

/// What a sequence of pages was named for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// They were read: the store had them.
    Read,
    /// They were put: the store did not have them, or not any more.
    Write,
}

/// What a policy may ask while it chooses victims.
pub trait Holdings {
    /// Whether a run must stay whole for now: it is leased, being appended to, or retained.
    fn is_pinned(&self, run: RunId) -> bool;
    /// What lasts of page `page` of a run when it is evicted and put again: see
    /// [`Resident::key`]. Zero where there is no such page.
    fn page_key(&self, run: RunId, page: u32) -> u64;
}

/// How an eviction policy and its rivals do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionStats {
    /// The policy that is configured.
    pub policy: String,
    /// The candidate that the store follows now; empty if there is no choice.
    pub following: String,
    /// Times the store went over to another candidate.
    pub switches: u64,
    /// Memory of all the shadow caches, in bytes.
    pub shadow_bytes: u64,
    /// One page in so many is sampled; zero if there are no shadows.
    pub sample_rate: u64,
    /// The candidates.
    pub shadows: Vec<Shadow>,
}

/// A shadow cache: what a candidate would have hit, by a sample of the pages asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shadow {
    /// The candidate.
    pub name: String,
    /// Sampled pages that were asked for.
    pub asked: u64,
    /// Those that it would have had, all pages before them included.
    pub hits: u64,
    /// Whether the store follows it.
    pub followed: bool,
}

/// A run to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// The run.
    pub run: RunId,
    /// Pages that stay; with none the whole run goes.
    pub keep_pages: u32,
    /// Units that become free, if nobody holds them.
    pub units: u64,
}

/// An eviction policy.
///
/// The store tells it everything that happens to runs; it answers who goes. It is called under the
/// owner's lock, so every method is fast: no I/O, and no work that grows with the number of runs.
///
/// **Protocol.** Runs are admitted when they are committed, at open oldest first. Whenever the
/// index reports that pages are gone, for whatever reason, the store calls [`Eviction::shrink`] or
/// [`Eviction::remove`]; that includes what [`Eviction::victims`] asked for.
pub trait Eviction: Send + Debug {
    /// The policy's name, as it is configured.
    fn name(&self) -> &'static str;

    /// A run is there; it counts as used now. A run that is known already is replaced.
    fn admit(&mut self, resident: &Resident);

    /// The parent of a run that was admitted without one has become known.
    fn link(&mut self, run: RunId, parent: RunId, page: u32);

    /// A sequence was used: the runs it leads through, from the root on. Unknown ones are skipped.
    fn hit(&mut self, path: &[Used]);

    /// A sequence was asked for, page by page ([`Resident::key`] of each), behind the page `after`;
    /// without one it is from the root. For policies that measure themselves; called once for each
    /// page that was read or had to be put.
    fn demanded(
        &mut self,
        demand: Demand,
        after: Option<u64>,
        pages: &mut dyn Iterator<Item = u64>,
    ) {
        let _ = (demand, after, pages);
    }

    /// What the policy knows of how it and its rivals would do; empty if it does not measure.
    fn measured(&self) -> EvictionStats {
        EvictionStats { policy: self.name().to_owned(), ..EvictionStats::default() }
    }

    /// `pages` pages of a run are gone.
    fn shrink(&mut self, run: RunId, pages: u32);

    /// A run is gone. Unknown ones are ignored.
    fn remove(&mut self, run: RunId);

    /// Chooses runs to cut until `units` units become free, or nothing is left to cut. Pinned runs
    /// are left whole, and so are the pages they hang from.
    ///
    /// Passing over pinned runs when their turn comes is the only work that grows; it is done once,
    /// not again by the next call.
    ///
    /// The store cuts them in the order given. The policy counts on it: a victim is not named
    /// again. One that the index does not know (it answers with nothing) needs no more.
    fn victims(&mut self, units: u64, holdings: &dyn Holdings) -> Vec<Victim>;

    /// Number of runs known.
    fn len(&self) -> usize;

    /// Whether no runs are known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
