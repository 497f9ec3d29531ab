//! A node: consecutive pages, and their state on each tier.

use super::TableSpan;
use ritornello_format::PageHash;
use ritornello_format::residency::Tier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

pub(super) const TIERS: usize = Tier::ALL.len();

/// The state of pages on one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Residence {
    /// Not on the tier.
    #[default]
    None,
    /// In transfer from a slower tier.
    Loading,
    /// In transfer by a background write: from a faster tier, or by a promotion from a slower tier.
    Storing,
    /// On the tier.
    Present,
}

/// The index of a node in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Id(pub(super) u32);

/// The fields that a walk reads come first, and share one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Node {
    /// The first of `pages`; [`PageHash::NONE`] if `pages` is empty.
    pub(super) head: PageHash,
    pub(super) pages: Vec<PageHash>,
    /// The value of the tree's clock, which counts walks and claims, when the node was last used.
    pub(super) age: AtomicU64,
    /// Number of walks that visited the node.
    pub(super) hits: AtomicU32,
    pub(super) residences: [Residence; TIERS],
    pub(super) parent: Option<Id>,
    pub(super) children: u32,
    /// The exclusive or of the children's ids: the id of the child if there is one child.
    pub(super) child_xor: u32,
    pub(super) locks: [u32; TIERS],
    /// For each tier, the number of children that are on it or in transfer to it.
    pub(super) children_on: [u32; TIERS],
    /// Slots of the pages on the host tier; empty unless the pages are present on that tier.
    pub(super) slots: Vec<u32>,
    /// The age under which a tier's [eviction queue](super::eviction_queue) lists the node; `None`
    /// if the queue does not list the node.
    pub(super) listed: [Option<u64>; TIERS],
}

const _: () = assert!(std::mem::offset_of!(Node, parent) < 64);

impl Default for Node {
    fn default() -> Self {
        Self::new(Vec::new(), None)
    }
}

impl Node {
    pub(super) fn new(pages: Vec<PageHash>, parent: Option<Id>) -> Self {
        Self {
            head: pages.first().copied().unwrap_or(PageHash::NONE),
            pages,
            parent,
            age: AtomicU64::default(),
            hits: AtomicU32::default(),
            residences: Default::default(),
            children: 0,
            child_xor: 0,
            locks: Default::default(),
            children_on: Default::default(),
            slots: Vec::new(),
            listed: Default::default(),
        }
    }

    pub(super) fn span(&self, at: usize, pages: usize) -> TableSpan {
        TableSpan { at, pages, residences: self.residences }
    }

    pub(super) fn touch(&self, now: u64) {
        self.age.store(now, Relaxed);
        // A load and a store replace an atomic addition, which would double the cost of each walk.
        // Two concurrent walks may therefore count as a single hit.
        self.hits.store(self.hits.load(Relaxed).saturating_add(1), Relaxed);
    }

    pub(super) fn is_anywhere(&self) -> bool {
        self.residences.iter().any(|residence| *residence != Residence::None)
    }

    /// Whether the node can be removed: its pages are on no tier and in transfer to none, and it
    /// has no children.
    pub(super) fn is_removable(&self) -> bool {
        self.children == 0 && !self.is_anywhere()
    }

    /// Whether `tier` can evict the last pages of the node.
    pub(super) fn is_evictable(&self, tier: usize) -> bool {
        self.residences[tier] == Residence::Present
            && self.locks[tier] == 0
            && self.children_on[tier] == 0
    }

    /// Returns how many of the node's leading pages equal the `rest` pages that `at` returns by
    /// index. The caller knows that the first pages are equal. Compares the last page that both
    /// lists have, which commits to all pages before it, and bisects if it differs.
    pub(super) fn matches(&self, at: impl Fn(usize) -> PageHash, rest: usize) -> usize {
        let both = self.pages.len().min(rest);
        if both <= 1 || self.pages[both - 1] == at(both - 1) {
            return both;
        }
        let (mut same, mut differs) = (0, both - 1);
        while same < differs {
            let middle = usize::midpoint(same, differs);
            if self.pages[middle] == at(middle) {
                same = middle + 1;
            } else {
                differs = middle;
            }
        }
        same
    }

    /// Splits off the pages before `at` as a new node, which becomes the parent of this node.
    pub(super) fn split_front(&mut self, at: usize) -> Self {
        let rest = self.pages.split_off(at);
        let slots = if self.slots.is_empty() { Vec::new() } else { self.slots.split_off(at) };
        self.head = rest[0];
        Self {
            slots: std::mem::replace(&mut self.slots, slots),
            residences: self.residences,
            locks: self.locks,
            age: AtomicU64::new(self.age.load(Relaxed)),
            hits: AtomicU32::new(self.hits.load(Relaxed)),
            ..Self::new(std::mem::replace(&mut self.pages, rest), self.parent)
        }
    }

    /// Takes over the pages of the parent `front`.
    pub(super) fn absorb(&mut self, mut front: Self) {
        front.pages.append(&mut self.pages);
        front.slots.append(&mut self.slots);
        (self.head, self.pages, self.slots) = (front.head, front.pages, front.slots);
        self.parent = front.parent;
        self.age.fetch_max(front.age.into_inner(), Relaxed);
        self.hits.fetch_max(front.hits.into_inner(), Relaxed);
    }
}
