//! The nodes whose last pages one tier can evict ([`Node::is_evictable`](super::node::Node)), least
//! recently used first.
//!
//! A walk ([`PageTable::walk`](super::PageTable::walk)) updates the age of a node (the time of its
//! last use), but not its position in the queue. Eviction compares the node's age with the age
//! under which the node was queued, and requeues the node if the two differ. An eviction requeues
//! nodes in a limited number of steps; after these it evicts a node even if the two ages differ.

use super::node::Id;
use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub(super) struct EvictionQueue(BTreeSet<(u64, Id)>);

impl EvictionQueue {
    pub(super) fn list(&mut self, age: u64, node: Id) {
        self.0.insert((age, node));
    }

    pub(super) fn delist(&mut self, age: u64, node: Id) {
        self.0.remove(&(age, node));
    }

    pub(super) fn oldest(&self) -> Option<(u64, Id)> {
        self.0.first().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
