//! The radix tree of the page table: lookup, splitting and merging of nodes, and the counts that
//! nodes keep of their children.

use super::arena::Arena;
use super::eviction_queue::EvictionQueue;
use super::head_index::HeadIndex;
use super::node::{Id, Node, Residence, TIERS};
use super::{EvictedPages, NODE_PAGES_MAX, TableSpan, TableStats};
use ritornello_format::residency::Tier;
use ritornello_format::{PageHash, PageHashes};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Maximum entries that one write-locked step of eviction requeues, because a walk used their nodes
/// since they were queued.
const RELIST_BATCH: usize = 64;

/// The result of one write-locked step of eviction.
#[derive(Debug)]
pub(super) enum EvictionStep {
    Evicted(EvictedPages),
    /// The step only requeued entries; the caller runs another step.
    Continue,
    Exhausted,
}

#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Arena,
    heads: HeadIndex,
    eviction_queues: [EvictionQueue; TIERS],
    clock: AtomicU64,
    pages: u64,
    present: [u64; TIERS],
}

impl Tree {
    pub(super) fn walk(&self, pages: &impl PageHashes, mut found: impl FnMut(TableSpan)) {
        let now = self.clock.fetch_add(1, Relaxed) + 1;
        let (mut at, all) = (0, pages.len());
        let mut open: Option<TableSpan> = None;
        // Most nodes have the length of the previous node, `usual`. A branch on this length lets
        // the processor guess where the next node begins, and fetch it while the current node is
        // still being loaded. A position that is computed from the current node would be known only
        // after the load.
        let mut usual = 1;
        while at < all {
            let Some(id) = self.node_starting_with(pages.at(at)) else { break };
            let node = self.node(id);
            if !node.is_anywhere() {
                break;
            }
            node.touch(now);
            let same = |most| node.matches(|page| pages.at(at + page), most);
            let as_usual = node.pages.len() == usual && usual <= all - at && same(usual) == usual;
            let matched = if as_usual { usual } else { same(all - at) };
            usual = matched;
            match &mut open {
                Some(span) if span.residences == node.residences => span.pages += matched,
                _ => {
                    let span = node.span(at, matched);
                    open.replace(span).into_iter().for_each(&mut found);
                }
            }
            at += matched;
            if matched < node.pages.len() {
                break;
            }
        }
        open.into_iter().for_each(found);
    }

    /// See [`PageTable::hot_prefix`](super::PageTable::hot_prefix).
    pub(super) fn hot_prefix(&self, pages: &impl PageHashes, times: u32) -> usize {
        let mut at = 0;
        while at < pages.len() {
            let Some(id) = self.node_starting_with(pages.at(at)) else { break };
            let node = self.node(id);
            if node.hits.load(Relaxed) < times {
                break;
            }
            let matched = node.matches(|page| pages.at(at + page), pages.len() - at);
            at += matched;
            if matched < node.pages.len() {
                break;
            }
        }
        at
    }

    /// See [`PageTable::claim`](super::PageTable::claim).
    pub(super) fn claim(
        &mut self,
        tier: Tier,
        how: Residence,
        pages: &[PageHash],
        range: Range<usize>,
    ) -> Vec<Range<usize>> {
        self.insert_missing(&pages[..range.end]);
        let now = self.clock.fetch_add(1, Relaxed) + 1;
        let mut claimed = Vec::new();
        self.for_each_node(pages, range, |tree, id, at| {
            let node = tree.node(id);
            if node.residences[tier as usize] == Residence::None {
                node.age.store(now, Relaxed);
                claimed.push(at..at + node.pages.len());
                tree.set_residence(id, tier, how);
            }
            true
        });
        claimed
    }

    /// Ends a claim. With `Some(slots)` the pages are on the tier now, in these slots if the list
    /// is not empty. With `None` the pages were not transferred. Returns the slots of pages that
    /// were not claimed.
    pub(super) fn finish_claim(
        &mut self,
        tier: Tier,
        pages: &[PageHash],
        range: Range<usize>,
        slots: Option<&[u32]>,
    ) -> Vec<u32> {
        let start = range.start;
        let mut unused = slots.map(<[u32]>::to_vec).unwrap_or_default();
        let mut taken = 0;
        self.for_each_node(pages, range, |tree, id, at| {
            let node = tree.nodes.at_mut(id);
            if !matches!(node.residences[tier as usize], Residence::Loading | Residence::Storing) {
                return true;
            }
            if slots.is_some_and(|slots| !slots.is_empty()) {
                let from = at - start - taken;
                node.slots = unused.drain(from..from + node.pages.len()).collect();
                taken += node.pages.len();
            }
            tree.set_residence(
                id,
                tier,
                if slots.is_some() { Residence::Present } else { Residence::None },
            );
            true
        });
        unused
    }

    pub(super) fn lock(
        &mut self,
        tier: Tier,
        pages: &[PageHash],
        range: Range<usize>,
        slots: &mut Vec<u32>,
    ) -> usize {
        let (start, mut end) = (range.start, range.start);
        self.for_each_node(pages, range, |tree, id, at| {
            let node = tree.nodes.at_mut(id);
            if at != end || node.residences[tier as usize] != Residence::Present {
                return false;
            }
            node.locks[tier as usize] += 1;
            end = at + node.pages.len();
            if tier == Tier::Host {
                slots.extend(&node.slots);
            }
            tree.update_listing(id, tier as usize);
            true
        });
        end - start
    }

    pub(super) fn unlock(&mut self, tier: Tier, pages: &[PageHash], range: Range<usize>) {
        self.for_each_node(pages, range, |tree, id, _| {
            let locks = &mut tree.nodes.at_mut(id).locks[tier as usize];
            *locks = locks.saturating_sub(1);
            tree.update_listing(id, tier as usize);
            true
        });
    }

    pub(super) fn forget(
        &mut self,
        tier: Tier,
        pages: &[PageHash],
        range: Range<usize>,
        slots: &mut Vec<u32>,
    ) {
        self.for_each_node(pages, range, |tree, id, _| {
            let node = tree.nodes.at_mut(id);
            if node.residences[tier as usize] == Residence::Present
                && node.locks[tier as usize] == 0
            {
                if tier == Tier::Host {
                    slots.append(&mut node.slots);
                }
                tree.set_residence(id, tier, Residence::None);
            }
            true
        });
    }

    /// Evicts up to `most` pages at the end of the least recently used node that `tier` can evict.
    /// With `now`, also evicts pages of a node that a walk used since the node was queued.
    pub(super) fn evict(&mut self, tier: Tier, most: usize, now: bool) -> EvictionStep {
        for _ in 0..RELIST_BATCH {
            let Some((listed, id)) = self.eviction_queues[tier as usize].oldest() else {
                return EvictionStep::Exhausted;
            };
            if !now && self.node(id).age.load(Relaxed) != listed {
                self.update_listing(id, tier as usize);
                continue;
            }
            let kept = self.node(id).pages.len().saturating_sub(most);
            if kept > 0 {
                self.split(id, kept);
            }
            let node = self.nodes.at_mut(id);
            let slots =
                if tier == Tier::Host { std::mem::take(&mut node.slots) } else { Vec::new() };
            let hits = node.hits.load(Relaxed);
            let victim = EvictedPages { pages: node.pages.clone(), slots, hits };
            self.set_residence(id, tier, Residence::None);
            self.compact(id);
            return EvictionStep::Evicted(victim);
        }
        EvictionStep::Continue
    }

    /// Number of nodes in the eviction queue of `tier`.
    pub(super) fn evictable(&self, tier: Tier) -> usize {
        self.eviction_queues[tier as usize].len()
    }

    pub(super) fn stats(&self) -> TableStats {
        TableStats { nodes: self.heads.len() as u64, pages: self.pages, present: self.present }
    }

    fn node(&self, id: Id) -> &Node {
        self.nodes.at(id)
    }

    /// The node whose first page is `head`.
    fn node_starting_with(&self, head: PageHash) -> Option<Id> {
        self.heads.get(head, |id| self.node(id).head == head)
    }

    /// Inserts the pages that have no node.
    fn insert_missing(&mut self, pages: &[PageHash]) {
        let (mut at, mut last) = (0, None);
        while at < pages.len() {
            let Some(id) = self.node_starting_with(pages[at]) else { break };
            let matched = self.node(id).matches(|page| pages[at + page], pages.len() - at);
            at += matched;
            last = Some(id);
            if matched < self.node(id).pages.len() {
                if at < pages.len() {
                    last = Some(self.split(id, matched));
                }
                break;
            }
        }
        for piece in pages[at..].chunks(NODE_PAGES_MAX) {
            let id = self.nodes.add(Node::new(piece.to_vec(), last));
            self.heads.add(piece[0], id);
            self.pages += piece.len() as u64;
            if let Some(parent) = last {
                let parent = self.nodes.at_mut(parent);
                parent.children += 1;
                parent.child_xor ^= id.0;
            }
            last = Some(id);
        }
    }

    /// Visits the nodes of `pages[range]`, split so that each node is within the range, until
    /// `visit` returns false. `visit` receives the index in `pages` at which the node begins.
    /// Afterwards each visited node is removed if it is [removable](Node::is_removable), and
    /// otherwise merged with neighbours in the same state.
    fn for_each_node(
        &mut self,
        pages: &[PageHash],
        range: Range<usize>,
        mut visit: impl FnMut(&mut Self, Id, usize) -> bool,
    ) {
        let (mut at, mut visited) = (0, Vec::new());
        while at < range.end {
            let Some(id) = self.node_starting_with(pages[at]) else { break };
            let matched = self.node(id).matches(|page| pages[at + page], range.end - at);
            let whole = matched == self.node(id).pages.len();
            if at + matched > range.start {
                let before = range.start.saturating_sub(at);
                if before > 0 {
                    self.split(id, before);
                }
                let mine = if whole { id } else { self.split(id, matched - before) };
                visited.push(mine);
                if !visit(self, mine, at + before) {
                    break;
                }
            }
            at += matched;
            if !whole {
                break;
            }
        }
        for id in visited {
            self.compact(id);
        }
    }

    /// Splits a node at page `at`. The node keeps its id and its later pages; the earlier pages
    /// become a new node, whose id is returned. The node's id, which its children and the eviction
    /// queues hold, thus stays valid.
    fn split(&mut self, id: Id, at: usize) -> Id {
        let node = self.nodes.at_mut(id);
        let mut front = node.split_front(at);
        // The split node becomes the only child of the new node.
        front.children = 1;
        front.child_xor = id.0;
        front.children_on =
            node.residences.map(|residence| u32::from(residence != Residence::None));
        let (head, rest, parent) = (front.head, node.head, front.parent);
        let front = self.nodes.add(front);
        self.nodes.at_mut(id).parent = Some(front);
        if let Some(parent) = parent {
            self.nodes.at_mut(parent).child_xor ^= id.0 ^ front.0;
        }
        self.heads.remove(head, id);
        self.heads.add(head, front);
        self.heads.add(rest, id);
        for tier in 0..TIERS {
            self.update_listing(front, tier);
        }
        front
    }

    /// Removes the node if it is [removable](Node::is_removable), then each ancestor for which this
    /// holds. Merges the first remaining node with neighbours in the same state.
    fn compact(&mut self, id: Id) {
        let mut left = id;
        while self.node(left).is_removable() {
            // A node without pages was already merged into its child. Its entry is free, and the
            // field `parent` of a free entry names another free entry, so the loop ends here.
            let Some(before) = self.node(left).parent.filter(|_| self.is_known(left)) else {
                if self.is_known(left) {
                    self.remove(left);
                }
                return;
            };
            self.remove(left);
            left = before;
        }
        self.merge(left);
        let node = self.node(left);
        if node.children == 1 {
            self.merge(Id(node.child_xor));
        }
    }

    fn is_known(&self, id: Id) -> bool {
        !self.node(id).pages.is_empty()
    }

    fn remove(&mut self, id: Id) {
        let node = self.nodes.take(id);
        self.heads.remove(node.head, id);
        self.pages -= node.pages.len() as u64;
        if let Some(parent) = node.parent {
            let parent = self.nodes.at_mut(parent);
            parent.children -= 1;
            parent.child_xor ^= id.0;
        }
    }

    /// Merges a node with its parent, if the node is the only child, both have the same state, and
    /// together they have at most [`NODE_PAGES_MAX`] pages. The node keeps its id, so that its
    /// children's links to it stay valid.
    fn merge(&mut self, id: Id) {
        let node = self.node(id);
        let Some(before) = node.parent else { return };
        let front = self.node(before);
        let alike = front.residences == node.residences && front.locks == node.locks;
        if front.children != 1 || !alike || front.pages.len() + node.pages.len() > NODE_PAGES_MAX {
            return;
        }
        // Remove the parent from the queues, because its id becomes free.
        for tier in 0..TIERS {
            self.delist(before, tier);
        }
        let front = self.nodes.take(before);
        self.heads.remove(self.node(id).head, id);
        self.heads.remove(front.head, before);
        self.heads.add(front.head, id);
        // The grandparent's child is now this node instead of the merged parent.
        if let Some(parent) = front.parent {
            self.nodes.at_mut(parent).child_xor ^= before.0 ^ id.0;
        }
        let node = self.nodes.at_mut(id);
        node.absorb(front);
        for tier in 0..TIERS {
            self.update_listing(id, tier);
        }
    }

    /// Sets the residence of a node on a tier, and updates all counts that depend on it.
    fn set_residence(&mut self, id: Id, tier: Tier, to: Residence) {
        let kind = tier as usize;
        let node = self.nodes.at_mut(id);
        let from = std::mem::replace(&mut node.residences[kind], to);
        let (parent, pages) = (node.parent, node.pages.len() as u64);
        if from == Residence::Present {
            self.present[kind] -= pages;
        }
        if to == Residence::Present {
            self.present[kind] += pages;
        }
        self.update_listing(id, kind);
        let (was, is) = (from != Residence::None, to != Residence::None);
        if let Some(parent) = parent.filter(|_| was != is) {
            let count = &mut self.nodes.at_mut(parent).children_on[kind];
            *count = if is { *count + 1 } else { *count - 1 };
            self.update_listing(parent, kind);
        }
    }

    /// Lists a node in a tier's eviction queue under its current age, if the tier can evict the
    /// node's last pages; otherwise removes the node from the queue.
    fn update_listing(&mut self, id: Id, tier: usize) {
        self.delist(id, tier);
        let node = self.nodes.at_mut(id);
        if node.is_evictable(tier) {
            let age = node.age.load(Relaxed);
            node.listed[tier] = Some(age);
            self.eviction_queues[tier].list(age, id);
        }
    }

    fn delist(&mut self, id: Id, tier: usize) {
        if let Some(age) = self.nodes.at_mut(id).listed[tier].take() {
            self.eviction_queues[tier].delist(age, id);
        }
    }

    /// Panics if counts and links of nodes contradict each other. For tests.
    #[cfg(debug_assertions)]
    pub(super) fn check(&self) {
        let mut children = std::collections::HashMap::<Id, Vec<Id>>::new();
        let (mut pages, mut present, mut listed) = (0, [0; TIERS], [0; TIERS]);
        for id in self.heads.iter() {
            let node = self.node(id);
            assert_eq!(node.pages.first(), Some(&node.head));
            assert_eq!(self.node_starting_with(node.head), Some(id));
            assert!(node.pages.len() <= NODE_PAGES_MAX, "{}", node.pages.len());
            assert!(!node.is_removable(), "{node:?}");
            let on_host = node.residences[Tier::Host as usize] == Residence::Present;
            assert!(node.slots.is_empty() || (on_host && node.slots.len() == node.pages.len()));
            pages += node.pages.len() as u64;
            for tier in 0..TIERS {
                if node.residences[tier] == Residence::Present {
                    present[tier] += node.pages.len() as u64;
                }
                assert_eq!(node.listed[tier].is_some(), node.is_evictable(tier), "{node:?}");
                listed[tier] += usize::from(node.listed[tier].is_some());
            }
            if let Some(parent) = node.parent {
                children.entry(parent).or_default().push(id);
            }
        }
        for id in self.heads.iter() {
            let node = self.node(id);
            let mine = children.remove(&id).unwrap_or_default();
            assert_eq!(node.children as usize, mine.len());
            assert_eq!(node.child_xor, mine.iter().fold(0, |xor, child| xor ^ child.0));
            for tier in 0..TIERS {
                let occupied = |child: &&Id| self.node(**child).residences[tier] != Residence::None;
                assert_eq!(node.children_on[tier] as usize, mine.iter().filter(occupied).count());
            }
        }
        assert!(children.is_empty(), "a parent is missing");
        assert_eq!((self.pages, self.present), (pages, present));
        assert_eq!(self.eviction_queues.each_ref().map(EvictionQueue::len), listed);
        assert_eq!(self.nodes.places().0, self.heads.len());
    }
}
