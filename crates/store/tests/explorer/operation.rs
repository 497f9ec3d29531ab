//! The operations of a history.

use crate::kinds::{KINDS, NUMBERS, SEQUENCES, SEQUENCES_PER_KIND, keys_of};
use crate::rng::Rng;
use crate::workload::Workload;
use ritornello_codec::Codec;
use ritornello_format::ScopeSettings;

/// One operation. `at` is the number of a sequence, `pages` a number of its leading pages, `kind`
/// the index of a scope, and `after` the number of changes of the disk before a kill or a
/// concurrent commit.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Puts the first pages of a sequence. Retains them for `hours` hours, unless this is zero.
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
    /// A flush or, with `maintain`, a maintenance pass, and the commit of a put whose runs were
    /// written before it. The commit comes after `after` changes of the disk; after the flush or
    /// the pass if there are fewer changes, or if puts are durable.
    ConcurrentCommit {
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
    /// Drains the `which`th directory, modulo the number of directories.
    DrainVolume {
        which: u64,
    },
    Configure {
        kind: usize,
        settings: ScopeSettings,
    },
    /// Reads and verifies every page, as the store's scrubbing does in the background.
    Scrub,
    Lease {
        at: usize,
    },
    Release,
    AdvanceClock {
        hours: u64,
    },
    /// Kills the owner after `after` changes of the disk, at the latest when `operation` and the
    /// calls that follow it have ended. These calls are further puts if `operation` is a put, and a
    /// flush unless `operation` is a reopening. The disk keeps its power.
    Kill {
        operation: Box<Operation>,
        after: u64,
    },
    /// Loses power; the history continues with the state that survived.
    Crash {
        seed: u64,
    },
    /// The owner puts and flushes. The next sync of a file whose path contains `part` fails and
    /// drops dirty pages. If the flush makes such a sync, the poisoned owner ends as `end` says,
    /// and the next owner opens the store, puts and flushes.
    FailSync {
        part: &'static str,
        at: usize,
        pages: usize,
        end: OwnerEnd,
    },
    /// The owner ends as `end` says, and the next owner opens the store without the volume `dir`.
    LoseVolume {
        dir: &'static str,
        end: OwnerEnd,
    },
    /// The owner closes the store, and the next owner's `nth` open of a segment fails for lack of
    /// file handles. Later opens succeed: the segment returns with the next maintenance or, with
    /// `reopen`, when the store is opened again.
    FailOpen {
        nth: u64,
        reopen: bool,
    },
    /// The absent volume returns for the running owner or, with `reopen`, for the next owner.
    ReturnVolume {
        reopen: bool,
    },
    ClientPut {
        client_number: usize,
        at: usize,
        pages: usize,
    },
    ClientGet {
        client_number: usize,
        at: usize,
    },
    ClientFlush {
        client_number: usize,
    },
    /// A client reserves space for a put, unless it has an unfinished put.
    ClientReserve {
        client_number: usize,
        at: usize,
        pages: usize,
    },
    /// A client writes the runs of its reservation, and commits or aborts. The current owner or an
    /// earlier owner made the reservation.
    ClientEnd {
        client_number: usize,
        commit: bool,
    },
    /// A client is killed after `after` changes of the disk by its puts, with up to `in_flight`
    /// segment writes in flight. The owner learns of the death, and with `maintain` runs its
    /// periodic work, which may reuse the space of the client's reservations.
    ClientKill {
        client_number: usize,
        at: usize,
        pages: usize,
        after: u64,
        in_flight: usize,
        maintain: bool,
    },
    /// The owner is killed within a put, and a client becomes the owner.
    Takeover {
        client_number: usize,
        at: usize,
        pages: usize,
        after: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerEnd {
    Close,
    Kill,
    Crash(u64),
}

impl Operation {
    /// Chooses an operation. With `plain`, the operation does not change the store's capacity,
    /// directories, settings or clock, and neither retains, leases nor scrubs pages.
    pub fn choose(rng: &mut Rng, plain: bool) -> Self {
        let sequences = if plain { SEQUENCES - SEQUENCES_PER_KIND as usize } else { SEQUENCES };
        let at = rng.below(sequences as u64) as usize;
        let (kind, _) = keys_of(at);
        let page = rng.below(kind.pages as u64) as usize;
        let put = Self::Put { at, pages: page + 1, hours: 0 };
        match rng.below(if plain { 64 } else { 88 }) {
            0..=31 => put,
            32 | 33 => {
                let (maintain, after) = (rng.one_in(2), rng.below(6));
                Self::ConcurrentCommit { at, pages: page + 1, maintain, after }
            }
            34..=37 => Self::Get { at },
            38..=41 => Self::Touch { at },
            42..=45 => Self::Delete { at, page },
            46 => Self::DropScope { kind: at / SEQUENCES_PER_KIND as usize },
            47 => {
                if rng.one_in(4) {
                    Self::Clear
                } else {
                    Self::Flush
                }
            }
            48..=54 => Self::Flush,
            55..=57 => Self::Maintain,
            58 | 59 => {
                let another = !plain && rng.one_in(4);
                Self::Reopen { capacity: another.then(|| mib(rng)) }
            }
            60 | 61 if plain => Self::Kill { operation: Box::new(put), after: rng.below(40) },
            60 | 61 => {
                let operation = match rng.below(4) {
                    0 => put,
                    1 => Self::Reopen { capacity: None },
                    _ => Self::choose_capacity_change(rng),
                };
                Self::Kill { operation: Box::new(operation), after: rng.below(60) }
            }
            62 | 63 => Self::Crash { seed: rng.next() },
            64..=67 => Self::Put { at, pages: page + 1, hours: 1 + rng.below(20) },
            68..=78 => Self::choose_capacity_change(rng),
            79..=81 => Self::Configure {
                kind: at / SEQUENCES_PER_KIND as usize,
                settings: settings(rng, at),
            },
            82 => Self::Scrub,
            83 | 84 => Self::Lease { at },
            85 | 86 => Self::Release,
            _ => Self::AdvanceClock { hours: 1 + rng.below(12) },
        }
    }

    /// Chooses an operation for `workload`, in a store over the volumes `dirs`. `absent` says
    /// whether a volume is absent.
    pub fn choose_for(
        rng: &mut Rng,
        workload: &Workload,
        dirs: &[&'static str],
        absent: bool,
    ) -> Self {
        if workload.is_simple() {
            let operation = Self::choose(rng, workload.plain);
            let opens =
                matches!(operation, Self::Reopen { .. } | Self::Kill { .. } | Self::Crash { .. });
            return if workload.steady && opens { Self::Maintain } else { operation };
        }
        let at = rng.below((SEQUENCES - SEQUENCES_PER_KIND as usize) as u64) as usize;
        let pages = 1 + rng.below(keys_of(at).0.pages as u64) as usize;
        let client_number = rng.below(workload.clients.max(1) as u64) as usize;
        let roll = rng.below(100);
        // In a workload with volumes, the values 0 to 17 of `roll` may choose operations on
        // volumes. If it also has clients, the values are 64 to 81 instead, because the values 0 to
        // 38 choose the clients' operations.
        let volume_roll = if workload.clients > 0 { roll.wrapping_sub(64) } else { roll };
        if workload.volumes
            && let Some(operation) = Self::choose_for_volumes(rng, volume_roll, dirs, absent)
        {
            return operation;
        }
        match roll {
            0..=34 if workload.clients > 0 => {
                Self::choose_for_client(rng, client_number, at, pages)
            }
            35..=38 if workload.clients > 0 => {
                Self::Takeover { client_number, at, pages, after: rng.below(40) }
            }
            40..=45 if workload.faults => {
                let part = ["seg-", "/index/", ""][rng.below(3) as usize];
                Self::FailSync { part, at, pages, end: OwnerEnd::choose(rng) }
            }
            46..=49 => {
                let put = Self::Put { at, pages, hours: 0 };
                Self::Kill { operation: Box::new(put), after: rng.below(20) }
            }
            _ => Self::choose(rng, true),
        }
    }

    fn choose_for_volumes(
        rng: &mut Rng,
        roll: u64,
        dirs: &[&'static str],
        absent: bool,
    ) -> Option<Self> {
        Some(match roll {
            0..=11 if absent => Self::ReturnVolume { reopen: rng.one_in(2) },
            0..=7 => Self::LoseVolume {
                dir: dirs[rng.below(dirs.len() as u64) as usize],
                end: OwnerEnd::choose(rng),
            },
            12..=17 if !absent => Self::FailOpen { nth: 1 + rng.below(6), reopen: rng.one_in(2) },
            _ => return None,
        })
    }

    fn choose_for_client(rng: &mut Rng, client_number: usize, at: usize, pages: usize) -> Self {
        match rng.below(16) {
            0..=4 => Self::ClientPut { client_number, at, pages },
            5 | 6 => Self::ClientGet { client_number, at },
            7 => Self::ClientFlush { client_number },
            8..=10 => Self::ClientReserve { client_number, at, pages },
            11 | 12 => Self::ClientEnd { client_number, commit: !rng.one_in(3) },
            _ => {
                let (after, in_flight) = (rng.below(3), 1 + rng.below(16) as usize);
                Self::ClientKill {
                    client_number,
                    at,
                    pages,
                    after,
                    in_flight,
                    maintain: rng.one_in(2),
                }
            }
        }
    }

    fn choose_capacity_change(rng: &mut Rng) -> Self {
        match rng.below(8) {
            0..=3 => Self::Resize { mib: mib(rng) },
            4 | 5 => Self::AddVolume { dir: ["/b", "/c", "/d"][rng.below(3) as usize] },
            _ => Self::DrainVolume { which: rng.next() },
        }
    }
}

impl OwnerEnd {
    fn choose(rng: &mut Rng) -> Self {
        match rng.below(4) {
            0 => Self::Kill,
            1 => Self::Crash(rng.next()),
            _ => Self::Close,
        }
    }
}

/// Returns a random capacity, from 4 to 9 MiB.
fn mib(rng: &mut Rng) -> u64 {
    4 + rng.below(6)
}

fn settings(rng: &mut Rng, at: usize) -> ScopeSettings {
    let quota = rng.one_in(2).then(|| (512 + rng.below(2048)) << 10);
    let retained = rng.one_in(3).then(|| quota.unwrap_or(2 << 20) / 2);
    let codec = (at / SEQUENCES_PER_KIND as usize == NUMBERS)
        .then(|| [Codec::Raw, Codec::Split, Codec::Zstd][rng.below(3) as usize].number());
    ScopeSettings { codec, quota_bytes: quota, retained_bytes: retained }
}

const _: () = assert!(NUMBERS < KINDS, "`NUMBERS` must be the index of a kind");
