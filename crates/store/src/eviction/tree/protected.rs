//! Pieces that were protected when they became victims.

use super::super::EvictionContext;
use super::super::pieces::Pieces;
use ritornello_index::RunId;
use std::collections::VecDeque;

/// A queue of pieces that were protected when they became victims. Each call for victims lists the
/// first `EXAMINED_MAX` (`tree/victims.rs`) of these pieces again before it returns, and adds only
/// the further pieces. No policy lists a queued piece, unless the piece was used, or lost its last
/// child, since it was added.
///
/// The tree does not learn when a protection ends, so each eviction examines some of these pieces
/// again, the longest-waiting first. Calls for victims do not pass over a queued piece again, as
/// long as no policy lists it.
#[derive(Debug, Default)]
pub(super) struct ProtectedPieces {
    queue: VecDeque<(u32, RunId)>,
}

impl ProtectedPieces {
    /// Adds a piece that was unlinked because it is protected.
    pub(super) fn push(&mut self, pieces: &mut Pieces, slot: u32) {
        let piece = &mut pieces[slot];
        if !piece.is_protected() {
            piece.set_protected(true);
            self.queue.push_back((slot, piece.run));
        }
    }

    /// Examines the next `count` queued pieces. Returns the pieces that are no longer protected and
    /// that no policy lists, in the order in which they were added.
    pub(super) fn unprotected(
        &mut self,
        pieces: &mut Pieces,
        context: &dyn EvictionContext,
        count: usize,
    ) -> Vec<u32> {
        let mut unprotected = Vec::new();
        for _ in 0..count.min(self.queue.len()) {
            let Some((slot, run)) = self.queue.pop_front() else { break };
            let piece = &mut pieces[slot];
            if piece.run != run || !piece.is_protected() {
                continue;
            }
            // A piece that was used, or lost its last child, since it was added is listed already.
            if !piece.is_listed() && context.is_protected(run) {
                self.queue.push_back((slot, run));
                continue;
            }
            piece.set_protected(false);
            if !piece.is_listed() {
                unprotected.push(slot);
            }
        }
        unprotected
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.queue.capacity() * size_of::<(u32, RunId)>()
    }
}
