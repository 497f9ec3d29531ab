//! Adaptive replacement.

use super::eviction_policy::{Arrival, EvictionPolicy};
use super::ghost::Ghosts;
use super::pieces::{List, Piece, Pieces};

/// Two lists: pages that were put once and not used since, and all other pages. If an evicted page
/// is put again while its key is remembered, the target length of the list from which the page was
/// evicted grows.
///
/// Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03; here with
/// lengths in units instead of numbers of pages.
#[derive(Debug)]
pub(super) struct AdaptiveReplacement {
    /// The list of pages put once and not used since, then the list of all other pages.
    lists: [List; 2],
    /// For each list, the keys by which evictions from it are remembered: an eviction of several
    /// pages at the end of a piece is remembered by the key of the first of these pages.
    ghosts: [Ghosts; 2],
    /// Target units of the list of pages put once and not used since.
    target: u64,
    capacity: u64,
    keys: usize,
}

const ONCE: usize = 0;
const AGAIN: usize = 1;

impl AdaptiveReplacement {
    pub(super) fn new() -> Self {
        Self {
            lists: [List::new(); 2],
            ghosts: [Ghosts::default(), Ghosts::default()],
            target: 0,
            capacity: 0,
            keys: 0,
        }
    }

    fn list(&mut self, piece: &Piece) -> &mut List {
        &mut self.lists[usize::from(piece.queue != ONCE as u8)]
    }
}

impl EvictionPolicy for AdaptiveReplacement {
    fn name(&self) -> &'static str {
        "arc"
    }

    fn set_capacity(&mut self, units: u64, keys: usize) {
        self.keys = keys;
        self.capacity = units;
        self.target = self.target.min(units);
    }

    fn recall(&mut self, key: u64, units: u64) -> bool {
        let [once, again] = self.ghosts.each_ref().map(Ghosts::units);
        if self.ghosts[ONCE].recall(key).is_some() {
            let step = units.saturating_mul((again / once.max(1)).max(1));
            self.target = self.target.saturating_add(step).min(self.capacity);
            true
        } else if self.ghosts[AGAIN].recall(key).is_some() {
            let step = units.saturating_mul((once / again.max(1)).max(1));
            self.target = self.target.saturating_sub(step);
            true
        } else {
            false
        }
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
        self.unlink(pieces, slot);
        pieces[slot].queue = AGAIN as u8;
        self.lists[AGAIN].push_newest(pieces, slot);
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
        let [once, again] = self.lists;
        let first = if once.units() > self.target { [once, again] } else { [again, once] };
        first[0].oldest().or(first[1].oldest())
    }

    fn evicted(&mut self, pieces: &Pieces, slot: u32, key: u64, units: u64) {
        let list = usize::from(pieces[slot].queue != ONCE as u8);
        let room = match list {
            ONCE => self.capacity.saturating_sub(self.lists[ONCE].units()),
            _ => self.capacity.saturating_sub(self.ghosts[ONCE].units()),
        };
        self.ghosts[list].remember(key, 0, units, room, self.keys);
    }

    fn remembers(&self) -> bool {
        true
    }

    fn warmest(&self) -> Option<u32> {
        self.lists[AGAIN].newest().or(self.lists[ONCE].newest())
    }

    fn memory_bytes(&self) -> usize {
        self.ghosts.iter().map(Ghosts::memory_bytes).sum()
    }
}
