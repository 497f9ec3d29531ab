//! The page table: a radix tree over page hashes.
//!
//! A node is a stretch of consecutive pages that are in the same state on every tier; it is split
//! where that ends, and merged again where the difference is gone. Since a page's hash commits to all
//! pages before it, a node is found by the hash of its first page, and a stretch is compared by its
//! last page alone, unless that differs.
//!
//! **Locks.** One read-write lock. A walk holds it for reading; nobody holds it for writing for
//! longer than [`NODE_PAGES_MAX`] pages take, behind a walk to them from the first page of their prompt. What
//! grows with the table does so in steps: nodes are in blocks (`arena`), heads move a few at a time
//! (`heads`). What a walk leaves behind (age, hits) is atomic.

mod arena;
mod eviction_queue;
mod head_index;
mod node;
mod tree;

pub use node::Phase;

use parking_lot::RwLock;
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, PageHashes};
use std::ops::Range;
use tree::{Eviction, Tree};

/// Most pages of a node, and most that one hold of the lock for writing concerns.
const NODE_PAGES_MAX: usize = 512;

/// Stretches that a walk has room for from the start.
const SPANS_CAPACITY: usize = 64;

/// A stretch of a prompt in the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first page in the prompt.
    pub at: usize,
    /// Pages.
    pub pages: usize,
    /// On each of [`Tier::ALL`].
    pub phases: [Phase; Tier::ALL.len()],
}

impl Span {
    /// Whether its pages are on `tier`.
    #[must_use]
    pub fn is_on(&self, tier: Tier) -> bool {
        self.phases[tier as usize] == Phase::Present
    }

    /// The fastest tier that its pages are on.
    #[must_use]
    pub fn fastest(&self) -> Option<Tier> {
        Tier::ALL.into_iter().find(|tier| self.is_on(*tier))
    }
}

/// Pages that a tier has given away, consecutive in their prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victim {
    /// The pages, in the order of their prompt.
    pub pages: Vec<PageHash>,
    /// Where the host tier kept them, a place a page; of other tiers empty.
    pub slots: Vec<u32>,
    /// How often a walk came by since they were first known.
    pub hits: u32,
}

/// Sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Nodes of the tree.
    pub nodes: u64,
    /// Pages that are known.
    pub pages: u64,
    /// Of those on each of [`Tier::ALL`].
    pub present: [u64; Tier::ALL.len()],
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct PageTable {
    tree: RwLock<Tree>,
}

impl PageTable {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Where the leading pages are, as far as any tier has them or is about to; they count as used.
    pub fn walk(&self, pages: &impl PageHashes) -> Vec<Span> {
        let mut spans = Vec::with_capacity(SPANS_CAPACITY);
        self.tree.read().walk(pages, |span| spans.push(span));
        spans
    }

    /// How many leading pages walks came by at least so many times, since they were known.
    #[must_use]
    pub fn hot_prefix(&self, pages: &impl PageHashes, times: u32) -> usize {
        self.tree.read().hot_prefix(pages, times)
    }

    /// Says that `pages[range]` are to be brought to `tier`, where `how` says from which side. The
    /// answer is what the caller is to bring and then to [`settle`](Self::settle): pages that were
    /// neither there nor on their way, in ranges of `pages`; they count as used.
    #[must_use]
    pub fn claim(
        &self,
        tier: Tier,
        how: Phase,
        pages: &[PageHash],
        range: Range<usize>,
    ) -> Vec<Range<usize>> {
        let mut claimed: Vec<Range<usize>> = Vec::new();
        if range.is_empty() {
            return claimed;
        }
        // Those before it, too: they are to be known, however far they reach.
        for piece in pieces(0..range.end, pages.len()) {
            let wanted = piece.start.max(range.start).min(piece.end)..piece.end;
            for new in self.tree.write().claim(tier, how, &pages[..piece.end], wanted) {
                match claimed.last_mut() {
                    Some(last) if last.end == new.start => last.end = new.end,
                    _ => claimed.push(new),
                }
            }
        }
        claimed
    }

    /// What was claimed is there now; `slots` says where, a place a page, on the host tier. Returns
    /// the slots of pages that nobody had claimed.
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

    /// What was claimed did not come.
    pub fn abandon(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) {
        for piece in pieces(range, pages.len()) {
            self.tree.write().finish_claim(tier, pages, piece, None);
        }
    }

    /// Keeps the leading pages of `pages[range]` that are on `tier` there, until they are
    /// [unlocked](Self::unlock). Returns their slots where the tier is the host, and how many they
    /// are.
    #[must_use]
    pub fn lock(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) -> (usize, Vec<u32>) {
        let (mut locked, mut slots) = (0, Vec::new());
        for piece in pieces(range, pages.len()) {
            let wanted = piece.len();
            let came = self.tree.write().lock(tier, pages, piece, &mut slots);
            locked += came;
            if came < wanted {
                break;
            }
        }
        (locked, slots)
    }

    /// Lets go of what was locked.
    pub fn unlock(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) {
        for piece in pieces(range, pages.len()) {
            self.tree.write().unlock(tier, pages, piece);
        }
    }

    /// Takes at least `wanted` pages from `tier` if there are so many that nobody has locked: what
    /// was used longest ago first, and of a prompt its end before its beginning.
    #[must_use]
    pub fn evict(&self, tier: Tier, wanted: usize) -> Vec<Victim> {
        let (mut victims, mut taken) = (Vec::new(), 0);
        // Walks that go on meanwhile make ends younger: after a while what is left is taken as it is.
        let mut relists_left = self.tree.read().evictable(tier);
        while taken < wanted {
            let most = (wanted - taken).min(NODE_PAGES_MAX);
            let evicted = self.tree.write().evict(tier, most, relists_left == 0);
            match evicted {
                Eviction::Evicted(victim) => {
                    taken += victim.pages.len();
                    victims.push(victim);
                }
                Eviction::Continue => relists_left = relists_left.saturating_sub(1),
                Eviction::Exhausted => break,
            }
        }
        victims
    }

    /// `pages[range]` are not on `tier` any more, whoever saw to that; what is locked stays.
    /// Returns the slots that are free now.
    pub fn forget(&self, tier: Tier, pages: &[PageHash], range: Range<usize>) -> Vec<u32> {
        let mut slots = Vec::new();
        for piece in pieces(range, pages.len()) {
            self.tree.write().forget(tier, pages, piece, &mut slots);
        }
        slots
    }

    /// Panics if what nodes say of each other does not agree. For tests; slow.
    #[cfg(debug_assertions)]
    #[doc(hidden)]
    pub fn check(&self) {
        self.tree.read().check();
    }

    /// Sizes.
    #[must_use]
    pub fn stats(&self) -> TableStats {
        self.tree.read().stats()
    }
}

/// `range` in pieces of what one hold of the lock may concern.
fn pieces(range: Range<usize>, pages: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end.min(pages);
    range
        .clone()
        .step_by(NODE_PAGES_MAX)
        .map(move |at| at..end.min(at + NODE_PAGES_MAX))
        .filter(|p| !p.is_empty())
}
