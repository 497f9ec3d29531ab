//! The interface of an eviction policy: the order in which pieces are evicted.

use super::pieces::{Piece, Pieces};
use std::fmt::Debug;

/// How a piece arrives at a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The piece was just put.
    New {
        /// Whether the policy remembered an eviction of the piece's first page: see
        /// [`EvictionPolicy::recall`].
        known: bool,
        /// Whether the pages before the piece were used, and no other piece follows them, as when a
        /// conversation continues.
        continues: bool,
    },
    /// The piece comes from the previous policy. Pieces are handed over warmest first: see
    /// [`EvictionPolicy::warmest`].
    Inherited,
}

/// The part in which eviction policies differ: lists pieces and chooses the next victim. The tree,
/// which calls the policy, decides which pieces may be evicted. The tree unlinks a victim that must
/// stay, and lists it again later ([`EvictionPolicy::relist`]).
///
/// Every operation takes amortised constant time.
pub(super) trait EvictionPolicy: Send + Debug {
    /// The policy's name.
    fn name(&self) -> &'static str;

    /// Sets the units of a full store, and the number of keys that bounds the remembered evictions:
    /// a policy remembers at most 2 x `keys`, or 128 if that is more. The default, for a policy
    /// that uses neither, ignores them.
    fn set_capacity(&mut self, units: u64, keys: usize) {
        let _ = (units, keys);
    }

    /// Removes `key` from the remembered evictions. Returns whether `key` was among them. `units`
    /// is the length of the page's piece. The default, for a policy that remembers no evictions,
    /// returns false.
    fn recall(&mut self, key: u64, units: u64) -> bool {
        let _ = (key, units);
        false
    }

    /// Lists a piece.
    fn insert(&mut self, pieces: &mut Pieces, slot: u32, arrival: Arrival);

    /// Records a use of a listed piece. `Piece::uses` counts this use already.
    fn touch(&mut self, pieces: &mut Pieces, slot: u32);

    /// Removes a listed piece from its list.
    fn unlink(&mut self, pieces: &mut Pieces, slot: u32);

    /// Lists an unlinked piece again, as the oldest piece of the list that its `Piece::queue` and
    /// `Piece::stamp` name.
    fn relist(&mut self, pieces: &mut Pieces, slot: u32);

    /// Lists a piece next to the piece `listed`, to be evicted right after it. The two pieces have
    /// equal `Piece::queue` and equal `Piece::stamp`.
    fn list_after(&mut self, pieces: &mut Pieces, listed: u32, slot: u32);

    /// Records that a listed piece lost `units`.
    fn shrunk(&mut self, piece: &Piece, units: u64);

    /// Returns the next victim, or `None` if no piece is listed.
    fn victim(&mut self, pieces: &mut Pieces) -> Option<u32>;

    /// Records the eviction of pages at the end of a piece: `units` is the units of these pages,
    /// `key` the key of the first of them. The default, for a policy that remembers no evictions,
    /// does nothing.
    fn evicted(&mut self, pieces: &Pieces, slot: u32, key: u64, units: u64) {
        let _ = (pieces, slot, key, units);
    }

    /// Whether [`EvictionPolicy::evicted`] uses keys. If not (the default), the caller passes zero
    /// as the key.
    fn remembers(&self) -> bool {
        false
    }

    /// Returns a listed piece that the policy would evict among the last.
    fn warmest(&self) -> Option<u32>;

    /// Bytes of memory that the policy takes, without the pieces, which the tree holds.
    fn memory_bytes(&self) -> usize;
}
