//! One order, whatever comes.

use super::order::Order;
use super::tree::{CHUNK_UNITS, Tree};
use super::{Eviction, Holdings, Resident, Used, Victim};
use ritornello_index::RunId;

/// A policy that keeps to one order.
#[derive(Debug)]
pub(super) struct Single {
    name: &'static str,
    tree: Tree,
}

impl Single {
    pub(super) fn new(order: Box<dyn Order>) -> Self {
        Self::with_chunk(order, CHUNK_UNITS)
    }

    /// Cuts runs in chunks of about `chunk_units` units; what is left smaller than that goes, too.
    pub(super) fn with_chunk(order: Box<dyn Order>, chunk_units: u32) -> Self {
        Self { name: order.name(), tree: Tree::new(order, chunk_units) }
    }
}

impl Eviction for Single {
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

    fn victims(&mut self, units: u64, holdings: &dyn Holdings) -> Vec<Victim> {
        self.tree.victims(units, holdings)
    }

    fn len(&self) -> usize {
        self.tree.len()
    }
}
