//! What happens in a life, one thing after the other.

use crate::dice::Dice;
use crate::kinds::{KINDS, NAMES, NUMBERS, SEQUENCES, keys_of};
use ritornello_codec::Codec;
use ritornello_format::ScopeSettings;

#[derive(Clone, Debug)]
pub enum Act {
    /// Puts the first so many pages of a sequence, retained for so many hours from now on.
    Put {
        at: usize,
        pages: usize,
        hours: u64,
    },
    Get {
        at: usize,
    },
    Touch {
        at: usize,
    },
    Delete {
        at: usize,
        page: usize,
    },
    DropScope {
        kind: usize,
    },
    Clear,
    Flush,
    Tend,
    /// A flush, or upkeep, and within it a put that was written before is committed.
    Beside {
        at: usize,
        pages: usize,
        tend: bool,
        after: u64,
    },
    Reopen {
        /// In MiB, if it is to be another capacity.
        capacity: Option<u64>,
    },
    Resize {
        mib: u64,
    },
    AddPath {
        dir: &'static str,
    },
    /// One of the directories that there are.
    DrainPath {
        which: u64,
    },
    Configure {
        kind: usize,
        settings: ScopeSettings,
    },
    /// Reads and verifies everything, as scrubbing does bit by bit.
    Scrub,
    Lease {
        at: usize,
    },
    Release,
    /// So many hours pass.
    Later {
        hours: u64,
    },
    /// The process is killed within an act and a flush; the disk keeps its power.
    Kill {
        act: Box<Act>,
        after: u64,
    },
    /// Power goes, and life goes on with what is left.
    Crash {
        seed: u64,
    },
}

impl Act {
    /// In a plain life nothing of the store's shape and settings changes.
    pub fn pick(dice: &mut Dice, plain: bool) -> Self {
        let sequences = if plain { SEQUENCES - NAMES as usize } else { SEQUENCES };
        let at = dice.below(sequences as u64) as usize;
        let (kind, _) = keys_of(at);
        let page = dice.below(kind.pages as u64) as usize;
        let put = Self::Put { at, pages: page + 1, hours: 0 };
        match dice.below(if plain { 64 } else { 88 }) {
            0..=31 => put,
            32 | 33 => {
                let (tend, after) = (dice.one_in(2), dice.below(6));
                Self::Beside { at, pages: page + 1, tend, after }
            }
            34..=37 => Self::Get { at },
            38..=41 => Self::Touch { at },
            42..=45 => Self::Delete { at, page },
            46 => Self::DropScope { kind: at / NAMES as usize },
            47 => {
                if dice.one_in(4) {
                    Self::Clear
                } else {
                    Self::Flush
                }
            }
            48..=54 => Self::Flush,
            55..=57 => Self::Tend,
            58 | 59 => {
                let another = !plain && dice.one_in(4);
                Self::Reopen { capacity: another.then(|| mib(dice)) }
            }
            60 | 61 if plain => Self::Kill { act: Box::new(put), after: dice.below(40) },
            60 | 61 => {
                let act = match dice.below(4) {
                    0 => put,
                    1 => Self::Reopen { capacity: None },
                    _ => Self::reshaping(dice),
                };
                Self::Kill { act: Box::new(act), after: dice.below(60) }
            }
            62 | 63 => Self::Crash { seed: dice.next() },
            64..=67 => Self::Put { at, pages: page + 1, hours: 1 + dice.below(20) },
            68..=78 => Self::reshaping(dice),
            79..=81 => Self::Configure { kind: at / NAMES as usize, settings: settings(dice, at) },
            82 => Self::Scrub,
            83 | 84 => Self::Lease { at },
            85 | 86 => Self::Release,
            _ => Self::Later { hours: 1 + dice.below(12) },
        }
    }

    fn reshaping(dice: &mut Dice) -> Self {
        match dice.below(8) {
            0..=3 => Self::Resize { mib: mib(dice) },
            4 | 5 => Self::AddPath { dir: ["/b", "/c", "/d"][dice.below(3) as usize] },
            _ => Self::DrainPath { which: dice.next() },
        }
    }
}

/// From the least that a store may have.
fn mib(dice: &mut Dice) -> u64 {
    4 + dice.below(6)
}

fn settings(dice: &mut Dice, at: usize) -> ScopeSettings {
    let quota = dice.one_in(2).then(|| (512 + dice.below(2048)) << 10);
    let retained = dice.one_in(3).then(|| quota.unwrap_or(2 << 20) / 2);
    let codec = (at / NAMES as usize == NUMBERS)
        .then(|| [Codec::Raw, Codec::Split, Codec::Zstd][dice.below(3) as usize].number());
    ScopeSettings { codec, quota_bytes: quota, retained_bytes: retained }
}

const _: () = assert!(NUMBERS < KINDS, "the numbers are one of the kinds");
