//! Residency: the workers and tiers on which pages are present, for routers.
//!
//! A router receives events from many workers about pages that they stored, removed and cleared.
//! For each request the router needs, for each worker, the number of leading pages that the worker
//! holds. [`Residency`] returns these numbers; three backends implement the trait:
//!
//! | | holds | keeps after a restart |
//! |---|---|---|
//! | [`RunResidency`] | runs of consecutive pages in memory; pages with equal holders share one set of holders | synced changes |
//! | [`MemoryResidency`] | a plain map, with which tests compare the other backends | nothing |
//! | `LsmResidency` | RocksDB, for more pages than memory holds (feature `lsm`) | synced changes |
//!
//! **Off by default.** No store opens a residency: a router turns it on when it opens one of these
//! backends itself, as `crates/index/examples/residency.rs` does.
//!
//! **A hint.** Events come late, twice, out of order, or not at all. None of this is an error, and
//! readers of pages do not rely on the answers: a wrong answer costs at most a cache hit. Events
//! that cannot be applied and damaged records on disk are therefore dropped.
//!
//! **Chains.** A page's hash commits to all pages before it, as block hashes of engines do: pages
//! with equal hashes have equal pages before them. Holders are independent of the chain: a worker
//! may hold a page without the page before it. Removing a page keeps the pages after it, but ends
//! the worker's prefix.

mod memory;
mod prefix;
mod run;
mod runs;
mod sets;
mod spans;

#[cfg(feature = "lsm")]
mod lsm;

#[cfg(feature = "lsm")]
pub use lsm::{LsmResidency, LsmResidencyOptions};
pub use memory::MemoryResidency;
pub use prefix::Prefix;
pub use ritornello_format::residency::{Holder, Tier, Tiers, Worker};
pub use run::{ResidencyRecovered, RunResidency, RunResidencyOptions};

use ritornello_format::{Error, PageHash, PageHashes, Result, ScopeSlot};

/// Sizes and counts of a residency index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyStats {
    /// Number of pages, including pages whose holders were all cleared and that
    /// [`Residency::maintain`] has not removed yet. The backend `lsm` estimates the number.
    pub pages: u64,
    /// Number of sets of holders, each shared by all pages with these holders. Until
    /// [`Residency::maintain`] the number includes sets that became empty, or equal to another set,
    /// when a worker was cleared. Zero in backends that do not share sets.
    pub sets: u64,
    /// Bytes of memory that the index takes.
    pub memory_bytes: u64,
    /// Bytes of files on disk.
    pub disk_bytes: u64,
    /// Bytes of changes in memory that are not synced.
    pub pending_bytes: u64,
    /// Puts refused since the index was opened; zero in the backend `memory`.
    pub refused: u64,
}

/// The holders of pages. Readers never wait for the I/O of writers. Writers wait for each other.
pub trait Residency: Send + Sync + std::fmt::Debug {
    /// Adds `worker` on `tier` to the holders of `pages`, which are consecutive. `parent` is the
    /// page before the first page, if the event names it; the index may not have it.
    ///
    /// # Errors
    /// `Invalid` if a page is [`PageHash::NONE`]; `Retry` at a limit (call [`Residency::sync`] and
    /// [`Residency::maintain`], or remove pages); `Fatal` if the index is poisoned or the change
    /// cannot be written. In each case nothing is changed, and [`ResidencyStats::refused`] counts
    /// the put, except in the backend `memory`.
    fn put(
        &self,
        scope: ScopeSlot,
        worker: Worker,
        tier: Tier,
        parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> Result<()>;

    /// Returns, for every worker that holds the first page, the number of leading pages that it
    /// holds. The result is ordered by length, longest first, then by worker.
    fn prefixes(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Prefix>;

    /// The holders of one page, by worker.
    fn holders(&self, scope: ScopeSlot, page: PageHash) -> Vec<Holder>;

    /// Removes `worker` on `tiers` from the holders of these pages. Unknown pages are skipped. If a
    /// page is [`PageHash::NONE`], nothing is changed.
    fn remove_blocks(&self, scope: ScopeSlot, worker: Worker, tiers: Tiers, pages: &[PageHash]);

    /// Removes `worker` on all tiers from the holders of a page.
    fn remove_block(&self, scope: ScopeSlot, worker: Worker, page: PageHash) {
        self.remove_blocks(scope, worker, Tiers::ALL, &[page]);
    }

    /// Removes a worker from the holders of all pages of all scopes, because it restarted or left.
    /// Later puts by the worker add it again.
    fn clear_worker(&self, worker: Worker);

    /// Removes all holders of all pages of a scope.
    fn clear_scope(&self, scope: ScopeSlot);

    /// Makes every change before the call durable, if the backend persists changes.
    ///
    /// # Errors
    /// In the backend `run`, `Retry` if the file system has no room. `Fatal` if a write or sync
    /// failed: every later sync then fails too.
    fn sync(&self) -> Result<()>;

    /// Removes pages whose holders were all cleared, and reduces the size of files; the backend
    /// `lsm` does both only at its budget, and `memory` nothing. Does not delay other calls for
    /// long: meant for a background thread.
    ///
    /// # Errors
    /// In the backend `run`, `Retry` if the file system has no room. `Fatal` if a write or sync
    /// failed.
    fn maintain(&self) -> Result<()>;

    /// Returns sizes and counts of the index.
    fn stats(&self) -> ResidencyStats;
}

/// Refuses [`PageHash::NONE`].
fn check(pages: &[PageHash]) -> Result<()> {
    match pages.iter().position(|page| *page == PageHash::NONE) {
        None => Ok(()),
        Some(at) => {
            Err(Error::invalid("a page hash of zeroes stands for no page: leave the page out")
                .with("page", at))
        }
    }
}
