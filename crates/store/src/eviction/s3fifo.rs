//! S3-FIFO: a small queue, a main queue, and a queue of the keys of evicted pages.

use super::eviction_policy::{Arrival, EvictionPolicy};
use super::ghost::Ghosts;
use super::pieces::{List, Piece, Pieces};

/// New pages enter a small queue, which has a tenth of the space. A page that reaches the end of
/// the small queue moves to the main queue if it was used in the small queue. Pages that are put
/// again soon after their eviction from the small queue enter the main queue. A page that reaches
/// the end of the main queue returns to the queue's start if the page's count of uses in the main
/// queue is not zero: each use adds one to the count, up to three, and each return subtracts one.
///
/// Yang et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP '23. Unlike in the paper,
/// one use suffices to move a page to the main queue. A lease and a read are separate uses, also if
/// one request makes both.
#[derive(Debug)]
pub(super) struct S3Fifo {
    /// The small queue, then the main queue.
    lists: [List; 2],
    ghosts: Ghosts,
    capacity: u64,
    keys: usize,
}

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Maximum `stamp` of a piece. In the main queue the stamp is the number of times that the piece
/// may still pass through the queue: each use adds one, each pass subtracts one. In the small queue
/// any stamp above zero moves the piece to the main queue.
const USES_MAX: u32 = 3;

impl S3Fifo {
    pub(super) fn new() -> Self {
        Self { lists: [List::new(); 2], ghosts: Ghosts::default(), capacity: 0, keys: 0 }
    }

    fn list(&mut self, piece: &Piece) -> &mut List {
        &mut self.lists[usize::from(piece.queue != SMALL as u8)]
    }

    /// Target units of the small queue.
    fn small(&self) -> u64 {
        self.capacity / 10
    }
}

impl EvictionPolicy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn set_capacity(&mut self, units: u64, keys: usize) {
        self.keys = keys;
        self.capacity = units;
    }

    fn recall(&mut self, key: u64, _: u64) -> bool {
        self.ghosts.recall(key).is_some()
    }

    fn insert(&mut self, pieces: &mut Pieces, slot: u32, arrival: Arrival) {
        let piece = &mut pieces[slot];
        match arrival {
            Arrival::New { known, .. } => {
                (piece.queue, piece.stamp) = (u8::from(known), 0);
                self.lists[usize::from(known)].push_newest(pieces, slot);
            }
            Arrival::Inherited => {
                let used = piece.uses > 0;
                (piece.queue, piece.stamp) = (u8::from(used), 0);
                self.lists[usize::from(used)].push_oldest(pieces, slot);
            }
        }
    }

    fn touch(&mut self, pieces: &mut Pieces, slot: u32) {
        let stamp = &mut pieces[slot].stamp;
        *stamp = (*stamp + 1).min(USES_MAX);
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

    fn victim(&mut self, pieces: &mut Pieces) -> Option<u32> {
        loop {
            let [small, main] = &self.lists;
            let from_small = small.units() > self.small() || main.oldest().is_none();
            let from = if from_small && small.oldest().is_some() { SMALL } else { MAIN };
            let slot = self.lists[from].oldest()?;
            let piece = &mut pieces[slot];
            if piece.stamp == 0 {
                return Some(slot);
            }
            let stamp = if from == SMALL { 0 } else { piece.stamp.min(USES_MAX) - 1 };
            self.lists[from].unlink(pieces, slot);
            let piece = &mut pieces[slot];
            (piece.queue, piece.stamp) = (MAIN as u8, stamp);
            self.lists[MAIN].push_newest(pieces, slot);
        }
    }

    fn evicted(&mut self, pieces: &Pieces, slot: u32, key: u64, units: u64) {
        if pieces[slot].queue == SMALL as u8 {
            let most = self.capacity - self.small();
            self.ghosts.remember(key, 0, units, most, self.keys);
        }
    }

    fn remembers(&self) -> bool {
        true
    }

    fn warmest(&self) -> Option<u32> {
        self.lists[MAIN].newest().or(self.lists[SMALL].newest())
    }

    fn memory_bytes(&self) -> usize {
        self.ghosts.memory_bytes()
    }
}
