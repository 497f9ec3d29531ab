//! Which ends of prompts a tier could do without, those used longest ago first.
//!
//! A walk makes a node younger without a word to the order; whoever takes the oldest finds out, and
//! puts it where it belongs.

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
