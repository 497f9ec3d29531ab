//! What a policy decides: in which order pieces go.

use super::pieces::{Piece, Pieces};
use std::fmt::Debug;

/// How a piece comes to a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It was just put. `known`: the policy remembers that it was evicted.
    New {
        /// By [`EvictionPolicy::recall`].
        known: bool,
        /// It is the only one behind pages that were used: a conversation goes on.
        continues: bool,
    },
    /// Another policy had it, and it is older than all that came so far.
    Inherited,
}

/// An eviction policy's own part: it lists pieces and says which one is next. What may go, and what
/// hangs from what, is the tree's business: a candidate that cannot go is taken out and comes back
/// by [`EvictionPolicy::relist`].
///
/// Every operation takes constant time, amortised.
pub(super) trait EvictionPolicy: Send + Debug {
    /// The policy's name.
    fn name(&self) -> &'static str;

    /// The store holds about so many units when it is full. What is remembered of evicted pages
    /// is about so many keys.
    fn set_capacity(&mut self, units: u64, keys: usize) {
        let _ = (units, keys);
    }

    /// Whether what was evicted under this key is remembered; it is forgotten then.
    fn recall(&mut self, key: u64, units: u64) -> bool {
        let _ = (key, units);
        false
    }

    /// Lists a piece.
    fn insert(&mut self, pieces: &mut Pieces, slot: u32, arrival: Arrival);

    /// A piece that is listed was used. Its `uses` counts this use.
    fn touch(&mut self, pieces: &mut Pieces, slot: u32);

    /// Takes out a piece that is listed.
    fn unlink(&mut self, pieces: &mut Pieces, slot: u32);

    /// Lists a piece that was taken out as the next of its kind to go. Its `queue` and `stamp` are
    /// as they were.
    fn relist(&mut self, pieces: &mut Pieces, slot: u32);

    /// Lists a piece next to one that is listed, to go right after it. It has the same `queue` and
    /// `stamp`.
    fn list_after(&mut self, pieces: &mut Pieces, listed: u32, slot: u32);

    /// A listed piece lost `units`.
    fn shrunk(&mut self, piece: &Piece, units: u64);

    /// The listed piece that goes next. Always one, unless none is listed.
    fn victim(&mut self, pieces: &mut Pieces) -> Option<u32>;

    /// Pages of a piece go, the first of which has this key.
    fn evicted(&mut self, pieces: &Pieces, slot: u32, key: u64, units: u64) {
        let _ = (pieces, slot, key, units);
    }

    /// Whether [`EvictionPolicy::evicted`] has a use for keys.
    fn remembers(&self) -> bool {
        false
    }

    /// The listed piece that would go last.
    fn warmest(&self) -> Option<u32>;

    /// Memory besides the pieces.
    fn memory_bytes(&self) -> usize;
}
