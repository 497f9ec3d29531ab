//! Storage of the page table's nodes, in blocks that never move: adding a node moves no other node.

use super::node::{Id, Node};

const BLOCK_NODES: usize = 1 << 13;

#[derive(Debug, Default)]
pub(super) struct Arena {
    blocks: Vec<Vec<Node>>,
    /// The first free entry. The field `parent` of a free entry names the next free entry.
    free: Option<Id>,
}

impl Arena {
    #[inline]
    pub(super) fn at(&self, id: Id) -> &Node {
        &self.blocks[id.0 as usize / BLOCK_NODES][id.0 as usize % BLOCK_NODES]
    }

    pub(super) fn at_mut(&mut self, id: Id) -> &mut Node {
        &mut self.blocks[id.0 as usize / BLOCK_NODES][id.0 as usize % BLOCK_NODES]
    }

    pub(super) fn add(&mut self, node: Node) -> Id {
        if let Some(id) = self.free {
            let place = self.at_mut(id);
            let next = place.parent;
            *place = node;
            self.free = next;
            return id;
        }
        if self.blocks.last().is_none_or(|last| last.len() == BLOCK_NODES) {
            self.blocks.push(Vec::with_capacity(BLOCK_NODES));
        }
        let before = (self.blocks.len() - 1) * BLOCK_NODES;
        let last = &mut self.blocks[before / BLOCK_NODES];
        last.push(node);
        Id((before + last.len() - 1) as u32)
    }

    /// Removes a node and frees its entry.
    pub(super) fn take(&mut self, id: Id) -> Node {
        let next = self.free.replace(id);
        std::mem::replace(self.at_mut(id), Node { parent: next, ..Node::default() })
    }

    /// Number of used and of free entries.
    #[cfg(debug_assertions)]
    pub(super) fn places(&self) -> (usize, usize) {
        let free = std::iter::successors(self.free, |id| self.at(*id).parent).count();
        (self.blocks.iter().map(Vec::len).sum::<usize>() - free, free)
    }
}
