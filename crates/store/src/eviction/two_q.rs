//! 2Q: a queue of new pages, and a list of pages that were put again, in order of last use.

use super::eviction_policy::{Arrival, EvictionPolicy};
use super::ghost::Ghosts;
use super::pieces::{List, Piece, Pieces};

/// New pages enter a queue that uses do not reorder. Pages that are put again soon after they left
/// the queue enter a list in order of last use.
///
/// Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
/// Algorithm", VLDB '94: the full version. The queue takes a quarter of the space; the keys of
/// pages evicted from the queue are remembered, for at most as many pages as fit into half of the
/// space.
#[derive(Debug)]
pub(super) struct TwoQ {
    /// The queue of new pages, then the list in order of last use.
    lists: [List; 2],
    left: Ghosts,
    capacity: u64,
    keys: usize,
}

const IN: usize = 0;
const MAIN: usize = 1;

impl TwoQ {
    pub(super) fn new() -> Self {
        Self { lists: [List::new(); 2], left: Ghosts::default(), capacity: 0, keys: 0 }
    }

    fn list(&mut self, piece: &Piece) -> &mut List {
        &mut self.lists[usize::from(piece.queue != IN as u8)]
    }
}

impl EvictionPolicy for TwoQ {
    fn name(&self) -> &'static str {
        "2q"
    }

    fn set_capacity(&mut self, units: u64, keys: usize) {
        self.keys = keys;
        self.capacity = units;
    }

    fn recall(&mut self, key: u64, _: u64) -> bool {
        self.left.recall(key).is_some()
    }

    fn insert(&mut self, pieces: &mut Pieces, slot: u32, arrival: Arrival) {
        let queue = match arrival {
            Arrival::New { known, .. } => usize::from(known),
            Arrival::Inherited => usize::from(pieces[slot].uses > 0),
        };
        pieces[slot].queue = queue as u8;
        match arrival {
            Arrival::New { .. } => self.lists[queue].push_newest(pieces, slot),
            Arrival::Inherited => self.lists[queue].push_oldest(pieces, slot),
        }
    }

    fn touch(&mut self, pieces: &mut Pieces, slot: u32) {
        if pieces[slot].queue != IN as u8 {
            self.lists[MAIN].unlink(pieces, slot);
            self.lists[MAIN].push_newest(pieces, slot);
        }
    }

    fn unlink(&mut self, pieces: &mut Pieces, slot: u32) {
        self.list(&pieces[slot]).unlink(pieces, slot);
    }

    fn relist(&mut self, pieces: &mut Pieces, slot: u32) {
        self.list(&pieces[slot]).push_oldest(pieces, slot);
    }

    fn list_after(&mut self, pieces: &mut Pieces, listed: u32, slot: u32) {
        self.list(&pieces[slot]).push_after(pieces, listed, slot);
    }

    fn shrunk(&mut self, piece: &Piece, units: u64) {
        self.list(piece).shrunk(units);
    }

    fn victim(&mut self, _: &mut Pieces) -> Option<u32> {
        let [queue, main] = self.lists;
        let first = if queue.units() > self.capacity / 4 { [queue, main] } else { [main, queue] };
        first[0].oldest().or(first[1].oldest())
    }

    fn evicted(&mut self, pieces: &Pieces, slot: u32, key: u64, units: u64) {
        if pieces[slot].queue == IN as u8 {
            self.left.remember(key, 0, units, self.capacity / 2, self.keys);
        }
    }

    fn remembers(&self) -> bool {
        true
    }

    fn warmest(&self) -> Option<u32> {
        self.lists[MAIN].newest().or(self.lists[IN].newest())
    }

    fn memory_bytes(&self) -> usize {
        self.left.memory_bytes()
    }
}
