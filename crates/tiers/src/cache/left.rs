//! What the first tier could not take, kept until those below have it.

use super::policy::WritePolicy;
use super::prompt::Pages;
use super::shared::Shared;
use super::writer::After;
use ritornello_volume::staging::StagedPages;
use std::sync::{Arc, OnceLock};

/// Pages of one put; empty if all are on the first tier. Who may have to write them down holds it.
#[derive(Debug, Default)]
pub(super) struct Left(OnceLock<(usize, StagedPages)>);

impl Left {
    /// The bytes of a page of the prompt.
    pub(super) fn page(&self, page: usize) -> Option<&[u8]> {
        let (first, pages) = self.0.get()?;
        pages.bytes(page.checked_sub(*first)?)
    }
}

impl Shared {
    /// Pages `first..` of a prompt have no room on the first tier. They stay in staging for those who
    /// write them down, unless half of that is taken: puts need it more.
    pub(super) fn keep_left(
        self: &Arc<Self>,
        left: &Arc<Left>,
        pages: &Pages,
        first: usize,
        staged: StagedPages,
    ) {
        let staging = self.top().store().staging().stats();
        if staging.in_use > staging.capacity / 2 {
            return;
        }
        let range = first..pages.len();
        let _ = left.0.set((first, staged));
        // Who is written to when pages leave the tier above is so now; others wait for the put.
        if let Some(link) = self.links.first().filter(|link| link.policy == WritePolicy::Back) {
            self.table.forget(link.to, &pages.hashes, range.clone());
            self.take_down(
                link,
                pages,
                range,
                After { put: None, left: Some(Arc::clone(left)) },
                false,
            );
        }
    }
}
