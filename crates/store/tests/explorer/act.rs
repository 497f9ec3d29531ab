//! The acts of a life.

use crate::dice::Dice;
use crate::family::Family;
use crate::kinds::{KINDS, NAMES, NUMBERS, SEQUENCES, keys_of};
use ritornello_codec::Codec;
use ritornello_format::ScopeSettings;

#[derive(Clone, Debug)]
pub enum Act {
    /// Puts the first pages of a sequence, retained for some hours from now on.
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
    Maintain,
    /// A flush or maintenance, during which a put that was written before is committed.
    Beside {
        at: usize,
        pages: usize,
        maintain: bool,
        after: u64,
    },
    Reopen {
        /// The new capacity in MiB, if it changes.
        capacity: Option<u64>,
    },
    Resize {
        mib: u64,
    },
    AddVolume {
        dir: &'static str,
    },
    /// Drains one of the directories.
    DrainVolume {
        which: u64,
    },
    Configure {
        kind: usize,
        settings: ScopeSettings,
    },
    /// Reads and verifies every page, as scrubbing does over time.
    Scrub,
    Lease {
        at: usize,
    },
    Release,
    /// Advances the clock by some hours.
    Later {
        hours: u64,
    },
    /// Kills the process within an act and a flush; the disk keeps its power.
    Kill {
        act: Box<Act>,
        after: u64,
    },
    /// Power loss; the life continues with the surviving state.
    Crash {
        seed: u64,
    },
    /// The next sync of a file whose path contains `part` fails and drops dirty pages. The owner is
    /// poisoned and ends; another opens the store, puts and flushes.
    FailSync {
        part: &'static str,
        at: usize,
        pages: usize,
        end: End,
    },
    /// The owner ends, and the next one opens the store without one of its volumes.
    Leave {
        dir: &'static str,
        end: End,
    },
    /// The owner ends, and the next one cannot open a segment at once.
    FailOpen {
        nth: u64,
        reopen: bool,
    },
    /// The volume returns: for the running owner, or for the next one.
    Return {
        reopen: bool,
    },
    /// A client puts, without interruption.
    ClientPut {
        who: usize,
        at: usize,
        pages: usize,
    },
    ClientGet {
        who: usize,
        at: usize,
    },
    ClientFlush {
        who: usize,
    },
    /// A client reserves space for a put.
    ClientReserve {
        who: usize,
        at: usize,
        pages: usize,
    },
    /// A client writes what it reserved, to this owner or a former one, and commits or aborts.
    ClientEnd {
        who: usize,
        commit: bool,
    },
    /// A client is killed after `after` changes of a put, with writes in flight. The core learns of
    /// it, and `run_once` begins the reuse of the space.
    ClientKill {
        who: usize,
        at: usize,
        pages: usize,
        after: u64,
        in_flight: usize,
        maintain: bool,
    },
    /// The owner is killed within a put, and a client becomes the owner.
    Takeover {
        who: usize,
        at: usize,
        pages: usize,
        after: u64,
    },
}

/// How an owner ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Close,
    Kill,
    Crash(u64),
}

impl Act {
    /// Picks an act; in a plain life none changes the store's space and settings.
    pub fn pick(dice: &mut Dice, plain: bool) -> Self {
        let sequences = if plain { SEQUENCES - NAMES as usize } else { SEQUENCES };
        let at = dice.below(sequences as u64) as usize;
        let (kind, _) = keys_of(at);
        let page = dice.below(kind.pages as u64) as usize;
        let put = Self::Put { at, pages: page + 1, hours: 0 };
        match dice.below(if plain { 64 } else { 88 }) {
            0..=31 => put,
            32 | 33 => {
                let (maintain, after) = (dice.one_in(2), dice.below(6));
                Self::Beside { at, pages: page + 1, maintain, after }
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
            55..=57 => Self::Maintain,
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

    /// Picks an act of a life of `family`; `away` says whether a volume is away.
    pub fn pick_in(dice: &mut Dice, family: &Family, away: bool) -> Self {
        if family.is_simple() {
            let act = Self::pick(dice, family.plain);
            let opens = matches!(act, Self::Reopen { .. } | Self::Kill { .. } | Self::Crash { .. });
            return if family.steady && opens { Self::Maintain } else { act };
        }
        let at = dice.below((SEQUENCES - NAMES as usize) as u64) as usize;
        let pages = 1 + dice.below(keys_of(at).0.pages as u64) as usize;
        let who = dice.below(family.clients.max(1) as u64) as usize;
        let roll = dice.below(100);
        // With clients, the acts of volumes take other numbers.
        let of_volumes = if family.clients > 0 { roll.wrapping_sub(64) } else { roll };
        if family.volumes
            && let Some(act) = Self::of_volumes(dice, of_volumes, away)
        {
            return act;
        }
        match roll {
            0..=34 if family.clients > 0 => Self::of_client(dice, who, at, pages),
            35..=38 if family.clients > 0 => {
                Self::Takeover { who, at, pages, after: dice.below(40) }
            }
            40..=45 if family.faults => {
                let part = ["seg-", "/index/", ""][dice.below(3) as usize];
                Self::FailSync { part, at, pages, end: End::pick(dice) }
            }
            46..=49 => {
                let put = Self::Put { at, pages, hours: 0 };
                Self::Kill { act: Box::new(put), after: dice.below(20) }
            }
            _ => Self::pick(dice, true),
        }
    }

    fn of_volumes(dice: &mut Dice, roll: u64, away: bool) -> Option<Self> {
        Some(match roll {
            0..=11 if away => Self::Return { reopen: dice.one_in(2) },
            0..=7 => {
                Self::Leave { dir: ["/a", "/b"][dice.below(2) as usize], end: End::pick(dice) }
            }
            12..=17 if !away => Self::FailOpen { nth: 1 + dice.below(6), reopen: dice.one_in(2) },
            _ => return None,
        })
    }

    fn of_client(dice: &mut Dice, who: usize, at: usize, pages: usize) -> Self {
        match dice.below(16) {
            0..=4 => Self::ClientPut { who, at, pages },
            5 | 6 => Self::ClientGet { who, at },
            7 => Self::ClientFlush { who },
            8..=10 => Self::ClientReserve { who, at, pages },
            11 | 12 => Self::ClientEnd { who, commit: !dice.one_in(3) },
            _ => {
                let (after, in_flight) = (dice.below(3), 1 + dice.below(16) as usize);
                Self::ClientKill { who, at, pages, after, in_flight, maintain: dice.one_in(2) }
            }
        }
    }

    fn reshaping(dice: &mut Dice) -> Self {
        match dice.below(8) {
            0..=3 => Self::Resize { mib: mib(dice) },
            4 | 5 => Self::AddVolume { dir: ["/b", "/c", "/d"][dice.below(3) as usize] },
            _ => Self::DrainVolume { which: dice.next() },
        }
    }
}

impl End {
    fn pick(dice: &mut Dice) -> Self {
        match dice.below(4) {
            0 => Self::Kill,
            1 => Self::Crash(dice.next()),
            _ => Self::Close,
        }
    }
}

/// A capacity from the minimum on.
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
