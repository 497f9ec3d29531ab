//! Which pages are present on which workers and tiers: what a router asks.
//!
//! A router hears of many workers what they stored, removed and cleared, and asks for each request
//! how many leading pages of its chain every worker holds. [`Residency`] answers it; three backends
//! keep it:
//!
//! | | holds | what survives |
//! |---|---|---|
//! | [`RunResidency`] | runs of consecutive pages in memory, spans of them that share one set | what was synced |
//! | [`MemoryResidency`] | a plain map: the oracle | nothing |
//! | `LsmResidency` | RocksDB, for more pages than memory holds (feature `lsm`) | what was synced |
//!
//! **It is a hint.** Events are late, come twice, out of order, or not at all. None is an error, and
//! nothing that is claimed here is believed by whoever reads pages: a wrong claim costs a hit. So an
//! event that cannot be applied is dropped, and so is whatever is damaged on disk.
//!
//! **Chains.** A page's hash names all pages before it, as the block hashes of engines do. A backend
//! may take a page that is found as proof of those before it in the same chain. Holding is not
//! chained: a worker may hold a page without the one before it, and removing a page removes
//! nothing behind it; the prefix of that worker only ends there.

mod memory;
mod prefix;
mod run;
mod runs;
mod sets;
mod spans;

#[cfg(all(feature = "lsm", not(loom)))]
mod lsm;

#[cfg(all(feature = "lsm", not(loom)))]
pub use lsm::{LsmResidency, LsmResidencyOptions};
pub use memory::MemoryResidency;
pub use prefix::Prefix;
pub use ritornello_format::residency::{Holder, Tier, Tiers, Worker};
pub use run::{ResidencyRecovered, RunResidency, RunResidencyOptions};

use ritornello_format::{Error, PageHash, PageHashes, Result, ScopeSlot};

/// Sizes and counts of a residency index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyStats {
    /// Pages, with those that a clear left behind until [`Residency::maintain`] has taken them.
    /// `lsm` estimates.
    pub pages: u64,
    /// Distinct sets of holders; zero where they are not shared.
    pub sets: u64,
    /// Bytes of memory held.
    pub memory_bytes: u64,
    /// Bytes of files now on disk.
    pub disk_bytes: u64,
    /// Bytes of changes that wait in memory for a sync.
    pub pending_bytes: u64,
    /// Puts that were refused since it was opened.
    pub refused: u64,
}

/// On which workers and tiers pages are present. Readers and one writer run in parallel; writers
/// take turns.
pub trait Residency: Send + Sync + std::fmt::Debug {
    /// Notes that `worker` holds `pages`, which follow each other, on `tier`, besides whatever was
    /// known of them. `parent` is the page before the first one, if the event says so; it need not
    /// be known here.
    ///
    /// # Errors
    /// `Invalid` if a page is [`PageHash::NONE`]; `Retry` at a limit (call [`Residency::sync`] and
    /// [`Residency::maintain`], or remove pages); `Fatal` if it is poisoned. In each case nothing is
    /// changed, and it is counted.
    fn put(
        &self,
        scope: ScopeSlot,
        worker: Worker,
        tier: Tier,
        parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> Result<()>;

    /// For every worker that holds the first page: how many leading pages it holds. Longest first,
    /// then by worker.
    fn locate(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Prefix>;

    /// Who holds one page, by worker.
    fn holders(&self, scope: ScopeSlot, page: PageHash) -> Vec<Holder>;

    /// Notes that `worker` holds these pages on none of `tiers` any more. Unknown ones: nothing.
    /// If one is [`PageHash::NONE`]: nothing at all.
    fn remove_blocks(&self, scope: ScopeSlot, worker: Worker, tiers: Tiers, pages: &[PageHash]);

    /// Notes that `worker` does not hold a page any more, on any tier.
    fn remove_block(&self, scope: ScopeSlot, worker: Worker, page: PageHash) {
        self.remove_blocks(scope, worker, Tiers::ALL, &[page]);
    }

    /// Notes that a worker holds nothing any more, in any scope: it restarted, or is gone. What it
    /// holds from then on counts.
    fn clear_worker(&self, worker: Worker);

    /// Notes that nobody holds anything of a scope any more.
    fn clear_scope(&self, scope: ScopeSlot);

    /// Makes every change before the call durable, where the backend keeps any.
    ///
    /// # Errors
    /// `Retry` if there was no room; `Fatal` if the medium refused: it is then poisoned.
    fn sync(&self) -> Result<()>;

    /// Takes back what clears left behind, and makes files smaller. It holds up nobody for long: for
    /// a thread that has nothing else to do.
    ///
    /// # Errors
    /// As of [`Residency::sync`].
    fn maintain(&self) -> Result<()>;

    /// Sizes and counts.
    fn stats(&self) -> ResidencyStats;
}

/// Refuses pages that cannot be any.
fn check(pages: &[PageHash]) -> Result<()> {
    match pages.iter().position(|page| *page == PageHash::NONE) {
        None => Ok(()),
        Some(at) => Err(Error::invalid("a page's hash is not all zeroes").with("page", at)),
    }
}
