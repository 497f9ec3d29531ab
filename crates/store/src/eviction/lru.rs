//! Least recently used first.

use super::eviction_policy::{Arrival, EvictionPolicy};
use super::pieces::{List, Piece, Pieces};

/// Evicts the least recently used piece.
///
/// A use of a sequence touches its pieces leaf first, so a used piece is evicted before its
/// ancestors. Pieces that were put and not used since are in the order of their puts.
#[derive(Debug)]
pub(super) struct Lru(List);

impl Lru {
    pub(super) const fn new() -> Self {
        Self(List::new())
    }
}

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, pieces: &mut Pieces, slot: u32, arrival: Arrival) {
        match arrival {
            Arrival::New { .. } => self.0.push_newest(pieces, slot),
            Arrival::Inherited => self.0.push_oldest(pieces, slot),
        }
    }

    fn touch(&mut self, pieces: &mut Pieces, slot: u32) {
        self.0.unlink(pieces, slot);
        self.0.push_newest(pieces, slot);
    }

    fn unlink(&mut self, pieces: &mut Pieces, slot: u32) {
        self.0.unlink(pieces, slot);
    }

    fn relist(&mut self, pieces: &mut Pieces, slot: u32) {
        self.0.push_oldest(pieces, slot);
    }

    fn list_after(&mut self, pieces: &mut Pieces, listed: u32, slot: u32) {
        self.0.push_after(pieces, listed, slot);
    }

    fn shrunk(&mut self, _: &Piece, units: u64) {
        self.0.shrunk(units);
    }

    fn victim(&mut self, _: &mut Pieces) -> Option<u32> {
        self.0.oldest()
    }

    fn warmest(&self) -> Option<u32> {
        self.0.newest()
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}
