//! Unsynced changes to a simulated file, and the effect of a power loss.

use crate::sparse::{BLOCK, SECTOR, Sparse};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { offset: u64, bytes: Arc<[u8]> },
    Allocate(u64),
    SetLen(u64),
}

impl Change {
    pub(crate) fn apply(&self, file: &mut Sparse) {
        match self {
            Self::Write { offset, bytes } => file.write(bytes, *offset),
            Self::Allocate(length) => file.allocate(*length),
            Self::SetLen(length) => file.set_len(*length),
        }
    }

    /// Applies to `file` the parts of this change that survive a power loss. Each 4 KiB of a write
    /// is kept, lost, or torn into 512-byte sectors that are kept or lost individually. Any other
    /// change is kept or lost as a whole.
    pub(crate) fn survive(&self, file: &mut Sparse, chance: &mut Chance) {
        let Self::Write { offset, bytes } = self else {
            if chance.keep() {
                self.apply(file);
            }
            return;
        };
        let end = offset + bytes.len() as u64;
        let mut at = *offset;
        while at < end {
            let next = ((at / BLOCK + 1) * BLOCK).min(end);
            let torn = chance.one_in(4);
            let step = if torn { SECTOR } else { BLOCK };
            while at < next {
                let stop = ((at / step + 1) * step).min(next);
                if chance.keep() {
                    file.write(&bytes[(at - offset) as usize..(stop - offset) as usize], at);
                }
                at = stop;
            }
        }
        if file.length() < end && chance.one_in(2) {
            // The new length of the file reached the disk, even if the last bytes did not.
            file.set_len(end);
        }
    }
}

/// Random decisions from one seed (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Chance {
    state: u64,
    /// Survival rate of unsynced changes, in quarters: 0 to 4.
    quarters: u64,
    /// Whether each file has a separate rate: one file may survive whole while another is lost.
    varies_by_file: bool,
}

impl Chance {
    /// Starts from `seed`, which also decides the survival rate, from none to all changes.
    pub(crate) fn new(seed: u64) -> Self {
        let mut chance = Self { state: seed, quarters: 0, varies_by_file: false };
        chance.quarters = chance.next() % 5;
        chance.varies_by_file = chance.one_in(2);
        chance
    }

    /// Draws a new survival rate for the next file, if `varies_by_file` is set.
    pub(crate) fn begin_file(&mut self) {
        if self.varies_by_file {
            self.quarters = self.next() % 5;
        }
    }

    pub(crate) fn keep(&mut self) -> bool {
        self.next() % 4 < self.quarters
    }

    pub(crate) fn one_in(&mut self, sides: u64) -> bool {
        self.next().is_multiple_of(sides)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
