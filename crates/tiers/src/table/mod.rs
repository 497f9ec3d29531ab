//! The page table: a radix tree over page hashes.
//!
//! A node holds consecutive pages with the same state on every tier. A node is split where a state
//! starts to differ, and merged when the states agree again. Since the hash of a page commits to
//! all pages before it, a node is found by the hash of its first page, and compared with a prompt
//! by the last page that both have; only if this page differs are other pages compared.
//!
//! **Locks.** One read-write lock. Walks hold it for reading. A writer descends from the first page
//! of a prompt to the pages to change, and changes at most [`NODE_PAGES_MAX`] pages under one hold
//! of the lock. Structures that grow with the table grow in steps: nodes in blocks (`arena`), and
//! the index of nodes by their first page in moves of a few entries (`head_index`). Fields that a
//! walk updates (age, hits) are atomic.

mod arena;
mod eviction_queue;
mod head_index;
mod node;
mod tree;

pub use node::Residence;

use parking_lot::RwLock;
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, PageHashes};
use std::ops::Range;
use tree::{EvictionStep, Tree};

/// Maximum pages of a node, and of one write-locked step.
const NODE_PAGES_MAX: usize = 512;

/// Initial capacity of a walk's list of spans.
const SPANS_CAPACITY: usize = 64;

/// Consecutive pages of a prompt that have the same residence on every tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSpan {
    /// Index of the first page in the prompt.
    pub at: usize,
    /// Number of pages.
    pub pages: usize,
    /// The residence on each of [`Tier::ALL`].
    pub residences: [Residence; Tier::ALL.len()],
}

impl TableSpan {
    /// Whether the pages are present on `tier`.
    #[must_use]
    pub fn is_on(&self, tier: Tier) -> bool {
        self.residences[tier as usize] == Residence::Present
    }

    /// The fastest tier that the pages are present on.
    #[must_use]
    pub fn fastest(&self) -> Option<Tier> {
        Tier::ALL.into_iter().find(|tier| self.is_on(*tier))
    }
}

/// Evicted pages, consecutive in their prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictedPages {
    /// The pages, in prompt order.
    pub pages: Vec<PageHash>,
    /// The slots that the pages had on the host tier: the numbers that the caller of
    /// [`PageTable::mark_present`] gave, one per page, or none. Empty for other tiers.
    pub slots: Vec<u32>,
    /// Number of walks that visited these pages since they were inserted. This is an approximation:
    /// all pages of a node have one count, and concurrent walks may count as one.
    pub hits: u32,
}

/// Sizes of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Nodes of the tree.
    pub nodes: u64,
    /// Pages in the table.
    pub pages: u64,
    /// Pages present on each of [`Tier::ALL`].
    pub present: [u64; Tier::ALL.len()],
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PageTable {
    tree: RwLock<Tree>,
}

impl PageTable {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the states of the leading pages that are present on a tier or in transfer to a tier,
    /// and marks these pages as used.
    pub fn walk(&self, pages: &impl PageHashes) -> Vec<TableSpan> {
        let mut spans = Vec::with_capacity(SPANS_CAPACITY);
        self.tree.read().walk(pages, |span| spans.push(span));
        spans
    }

    /// Returns the number of leading pages that at least `times` walks have visited since the pages
    /// were inserted, by the approximate counts of [`EvictedPages::hits`].
    #[must_use]
    pub fn hot_prefix(&self, pages: &impl PageHashes, times: u32) -> usize {
        self.tree.read().hot_prefix(pages, times)
    }

    /// Claims the transfer of `pages[range]` to `tier`; `how` is `Loading` or `Storing`. Returns
    /// the ranges the caller must transfer and then [mark present](Self::mark_present) or
    /// [abandon](Self::abandon): pages that were neither present nor in transfer. The claimed pages
    /// are marked as used.
    #[must_use]
    pub fn claim(
        &self,
        tier: Tier,
        how: Residence,
        pages: &[PageHash],
        range: Range<usize>,
    ) -> Vec<Range<usize>> {
        let mut claimed: Vec<Range<usize>> = Vec::new();
        if range.is_empty() {
            return claimed;
        }
        // Pages before the range are inserted as well, in steps of at most [`NODE_PAGES_MAX`].
        for piece in pieces(0..range.end, pages.len()) {
            let requested = piece.start.max(range.start).min(piece.end)..piece.end;
            for new in self.tree.write().claim(tier, how, &pages[..piece.end], requested) {
                match claimed.last_mut() {
                    Some(last) if last.end == new.start => last.end = new.end,
                    _ => claimed.push(new),
                }
            }
        }
        claimed
    }

    /// Marks claimed pages as present; `slots` holds one slot per page on the host tier, or is
    /// empty. Returns those of `slots` that the table did not take, because their pages were not
    /// claimed: the caller frees them.
    pub fn mark_present(
        &self,
        tier: Tier,
        pages: &[PageHash],
        range: Range<usize>,
        slots: &[u32],
    ) -> Vec<u32> {
        let (start, mut unused) = (range.start, Vec::new());
        for piece in pieces(range, pages.len()) {
            let from = (piece.start - start).min(slots.len());
            let to = (piece.end - start).min(slots.len());
            unused.extend(self.tree.write().finish_claim(
                tier,
                pages,
                piece,
                Some(&slots[from..to]),
            ));
        }
        unused
    }

    /// Abandons a claim: the pages were not transferred.
    pub fn abandon(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) {
        for piece in pieces(range, pages.len()) {
            self.tree.write().finish_claim(tier, pages, piece, None);
        }
    }

    /// Locks the leading pages of `pages[range]` that are present on `tier` until they are
    /// [unlocked](Self::unlock). Returns the number of locked pages, and their slots on the host
    /// tier.
    #[must_use]
    pub fn lock(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) -> (usize, Vec<u32>) {
        let (mut locked, mut slots) = (0, Vec::new());
        for piece in pieces(range, pages.len()) {
            let requested = piece.len();
            let newly_locked = self.tree.write().lock(tier, pages, piece, &mut slots);
            locked += newly_locked;
            if newly_locked < requested {
                break;
            }
        }
        (locked, slots)
    }

    /// Releases the locks that [`lock`](Self::lock) took on these pages.
    pub fn unlock(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) {
        for piece in pieces(range, pages.len()) {
            self.tree.write().unlock(tier, pages, piece);
        }
    }

    /// Evicts `requested` pages from `tier`: least recently used first, and the end of a prompt
    /// before its beginning. Evicts fewer if all other pages on `tier` are locked, or precede pages
    /// that are locked on or in transfer to `tier`.
    #[must_use]
    pub fn evict(&self, tier: Tier, requested: usize) -> Vec<EvictedPages> {
        let (mut victims, mut taken) = (Vec::new(), 0);
        // A step of eviction requeues nodes that a walk used since they were queued, and concurrent
        // walks may use nodes just as fast. The number of such steps is therefore limited to the
        // length of the queue; later steps also evict nodes that were used.
        let mut relists_left = self.tree.read().evictable(tier);
        while taken < requested {
            let most = (requested - taken).min(NODE_PAGES_MAX);
            let evicted = self.tree.write().evict(tier, most, relists_left == 0);
            match evicted {
                EvictionStep::Evicted(victim) => {
                    taken += victim.pages.len();
                    victims.push(victim);
                }
                EvictionStep::Continue => relists_left = relists_left.saturating_sub(1),
                EvictionStep::Exhausted => break,
            }
        }
        victims
    }

    /// Records that `pages[range]` are no longer on `tier`, except pages that are locked on or in
    /// transfer to `tier`. Returns the freed slots.
    pub fn forget(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) -> Vec<u32> {
        let mut slots = Vec::new();
        for piece in pieces(range, pages.len()) {
            self.tree.write().forget(tier, pages, piece, &mut slots);
        }
        slots
    }

    /// Panics if the counts and links of the nodes contradict each other. For tests; visits every
    /// node.
    #[cfg(debug_assertions)]
    #[doc(hidden)]
    pub fn check(&self) {
        self.tree.read().check();
    }

    /// Sizes of the table.
    #[must_use]
    pub fn stats(&self) -> TableStats {
        self.tree.read().stats()
    }
}

/// Cuts `range`, up to page `pages`, into pieces of at most [`NODE_PAGES_MAX`] pages.
fn pieces(range: Range<usize>, pages: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end.min(pages);
    range
        .clone()
        .step_by(NODE_PAGES_MAX)
        .map(move |at| at..end.min(at + NODE_PAGES_MAX))
        .filter(|p| !p.is_empty())
}
