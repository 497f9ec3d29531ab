//! A put to the first tier whose pages are also to be written to lower tiers.

use ritornello_store::Completion;
use ritornello_volume::staging::StagedPages;
use std::sync::{Arc, OnceLock};

/// The put to the first tier on which a write to a lower tier depends. `completion`: the end
/// of the put, if the write must wait for it. `spilled`: holds the pages that the put spills, if any; `None` if
/// the write belongs to no put, and all its pages are on a tier.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingPut {
    pub(super) completion: Option<Completion>,
    pub(super) spilled: Option<Arc<Spilled>>,
}

impl PendingPut {
    /// Whether the put has ended and spilled no pages, so that a write needs nothing of it.
    pub(super) fn is_settled(&self) -> bool {
        let done = self.completion.as_ref().is_none_or(|put| put.outcome().is_some());
        done && self.spilled.as_ref().is_none_or(|spilled| spilled.0.get().is_none())
    }
}

/// Pages of one put for which the first tier had no space, kept in staging until the lower tiers
/// have them; empty if the first tier took all pages. Each queued write that may need the pages
/// holds a reference.
#[derive(Debug, Default)]
pub(super) struct Spilled(OnceLock<(usize, StagedPages)>);

impl Spilled {
    /// Keeps `staged`, the pages of the prompt from page `first`.
    pub(super) fn keep(&self, first: usize, staged: StagedPages) {
        let _ = self.0.set((first, staged));
    }

    /// Returns the bytes of page `page` of the prompt if it was spilled.
    pub(super) fn page(&self, page: usize) -> Option<&[u8]> {
        let (first, pages) = self.0.get()?;
        pages.bytes(page.checked_sub(*first)?)
    }
}
