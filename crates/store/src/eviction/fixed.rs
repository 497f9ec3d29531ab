//! Eviction with one fixed policy.

use super::eviction_policy::EvictionPolicy;
use super::tree::{CHUNK_UNITS, Tree};
use super::{Eviction, EvictionContext, Resident, Used, Victim};
use ritornello_index::RunId;

/// The eviction state of a store with one policy.
#[derive(Debug)]
pub(super) struct FixedPolicy {
    name: &'static str,
    tree: Tree,
}

impl FixedPolicy {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>) -> Self {
        Self::with_chunk(policy, CHUNK_UNITS)
    }

    /// Creates the state of a store that evicts by `policy`. An eviction cuts pages off the end of
    /// a piece of a run: the units that are still to be freed, rounded up to a multiple of
    /// `chunk_units` and then to whole pages; but the whole piece, if fewer than `chunk_units` or
    /// fewer than the requested units would remain.
    pub(super) fn with_chunk(policy: Box<dyn EvictionPolicy>, chunk_units: u32) -> Self {
        Self { name: policy.name(), tree: Tree::new(policy, chunk_units) }
    }
}

impl Eviction for FixedPolicy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn admit(&mut self, resident: &Resident) {
        self.tree.admit(resident);
    }

    fn link(&mut self, run: RunId, parent: RunId, page: u32) {
        self.tree.link(run, parent, page);
    }

    fn hit(&mut self, path: &[Used]) {
        self.tree.hit(path);
    }

    fn shrink(&mut self, run: RunId, pages: u32) {
        self.tree.shrink(run, pages);
    }

    fn remove(&mut self, run: RunId) {
        self.tree.remove(run);
    }

    fn victims(&mut self, units: u64, context: &dyn EvictionContext) -> Vec<Victim> {
        self.tree.victims(units, context)
    }

    fn len(&self) -> usize {
        self.tree.len()
    }
}
