//! Writes that outlive the process that began them.

use crate::change::{Chance, Change};
use crate::sparse::{BLOCK, SECTOR, Sparse};

/// Writes to one file that the device has accepted and not yet performed. A write lands when the
/// device performs it.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlight(Vec<Change>);

impl InFlight {
    pub(super) fn begin(&mut self, bytes: &[u8], offset: u64) {
        if !bytes.is_empty() {
            self.0.push(Change::Write { offset, bytes: bytes.into() });
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn take(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.0)
    }

    /// Lands some of the writes in random order, and returns what landed. A write lands completely,
    /// not at all, or in part; the rest of it stays in flight.
    pub(super) fn land(&mut self, chance: &mut Chance) -> Vec<Change> {
        let mut waiting = self.take();
        let mut landed = Vec::new();
        while !waiting.is_empty() {
            let next = waiting.swap_remove(chance.below(waiting.len() as u64) as usize);
            if chance.one_in(4) {
                for part in parts(&next, chance) {
                    if chance.keep() { &mut landed } else { &mut self.0 }.push(part);
                }
            } else if chance.keep() {
                landed.push(next);
            } else {
                self.0.push(next);
            }
        }
        landed
    }

    /// Writes to `left`, the file after a power loss, the sectors of the writes in flight that
    /// survive this loss.
    pub(super) fn survive(&self, left: &mut Sparse, chance: &mut Chance) {
        self.0.iter().for_each(|change| change.survive(left, chance));
    }
}

/// Splits a write into blocks, and some of the blocks into sectors.
fn parts(change: &Change, chance: &mut Chance) -> Vec<Change> {
    let Change::Write { offset, bytes } = change else { return vec![change.clone()] };
    let end = offset + bytes.len() as u64;
    let (mut parts, mut at) = (Vec::new(), *offset);
    while at < end {
        let step = if chance.one_in(4) { SECTOR } else { BLOCK };
        let block_end = ((at / BLOCK + 1) * BLOCK).min(end);
        while at < block_end {
            let stop = ((at / step + 1) * step).min(block_end);
            let bytes = bytes[(at - offset) as usize..(stop - offset) as usize].into();
            parts.push(Change::Write { offset: at, bytes });
            at = stop;
        }
    }
    parts
}
