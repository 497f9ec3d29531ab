//! A disk that completes no operations, in a store whose long pages have a piece on every disk:
//! only the calls that need this disk wait or miss, and no page and no space is lost.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::tickets::*;
use common::*;
use ritornello_format::Scope;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_store::Options;
use ritornello_volume::segments::IoChoice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Length above which a page is cut into pieces over several volumes. It is less than the 16 MiB of
/// a store in use, so that the tests move few bytes, and at least 256 KiB for each volume.
const LONG_PAGE_BYTES: u64 = 768 << 10;
/// Bytes of a long page: not a multiple of the unit of 4 KiB.
const LONG: u64 = LONG_PAGE_BYTES + 100_001;
const SHORT: u64 = 64 << 10;
const SOON: Duration = Duration::from_millis(1500);
const LATE: Duration = Duration::from_secs(60);

struct Disks {
    _dir: tempfile::TempDir,
    schedule: Schedule,
    options: Options,
    open: Open,
}

fn medium(schedule: &Schedule) -> Arc<Faulty> {
    Arc::new(Faulty::new(Arc::new(Host), schedule.clone()))
}

fn disks(count: usize) -> Disks {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths = (0..count).map(|at| dir.path().join(format!("disk{at}"))).collect();
    let base = options(&dir.path().join("home"), 96);
    let io = IoChoice::Pool;
    let options = Options { paths, io, long_page_bytes: LONG_PAGE_BYTES, ..base };
    let schedule = Schedule::new();
    let open = open_on(medium(&schedule), &options).unwrap();
    Disks { _dir: dir, schedule, options, open }
}

impl Disks {
    /// Puts the pages one by one, so that each is a run.
    fn put_each(&self, scope: &Scope, keys: &[Vec<u8>]) {
        for key in keys.chunks(1) {
            assert_eq!(put(&self.open.store, scope, key, None).pages, 1);
        }
    }

    /// Stalls reads and writes of a disk. A put that creates a segment does not stall.
    fn stall(&self, disk: u8) {
        for op in [Op::Read, Op::Write] {
            let rule = Rule::always(MediumFault::Stall).on(op);
            self.schedule.add(rule.at(format!("disk{disk}/seg-")));
        }
    }

    /// Asserts that a get delivers all pages, with the right bytes, and does not wait for the
    /// stalled disk.
    fn assert_served(&self, scope: &Arc<Scope>, keys: &[Vec<u8>]) {
        let ticket = start_get(&self.open, scope, keys, LATE);
        assert_eq!(outcome(&ticket), (keys.len(), ""));
        assert_eq!(get(&self.open.store, scope, keys).pages, keys.len());
    }

    /// Asserts that a get ends, without any page, because a disk stalls.
    fn assert_stalled(&self, scope: &Arc<Scope>, keys: &[Vec<u8>]) {
        assert_eq!(outcome(&start_get(&self.open, scope, keys, LATE)), (0, "stalled"));
    }

    /// Asserts that all pages of `all` are hits, and that no lease and no space of a put is left,
    /// also after a restart. Closes the store.
    fn assert_whole(self, all: &[(&Scope, &[Vec<u8>])]) {
        let used = |open: &Open| {
            for (scope, keys) in all {
                let outcome = get(&open.store, scope, keys);
                assert_eq!(outcome.pages, keys.len(), "{} {outcome:?}", scope.model);
            }
            let stats = open.store.stats().unwrap().catalog;
            assert_eq!((stats.leases, stats.reservations), (0, 0));
            assert_eq!((stats.reserved_bytes, stats.deferred_bytes), (0, 0));
            assert_eq!(stats.quarantined_bytes, 0);
            stats.used_bytes
        };
        used(&self.open);
        // The space of puts that failed is free after two syncs.
        self.open.store.flush().unwrap();
        self.open.store.flush().unwrap();
        let report = self.open.core.verify(true, &mut |_, _| {}).unwrap();
        assert!(report.findings.is_empty(), "{report:?}");
        let before = used(&self.open);
        self.open.close();
        let open = open_on(medium(&self.schedule), &self.options).unwrap();
        assert_eq!(used(&open), before, "space was lost");
        open.close();
    }
}

#[test]
fn gets_miss_long_pages_with_a_piece_on_a_stalled_volume() {
    let (disks, long, short) = (disks(3), Arc::new(unchained(LONG)), Arc::new(unchained(SHORT)));
    let (pages, others) = (sequence(1, 4), sequence(2, 24));
    disks.put_each(&long, &pages);
    disks.put_each(&short, &others);
    for key in &pages {
        assert_eq!(volumes_of(&disks.open, &long, key), [0, 1, 2]);
    }
    let is_elsewhere = |key: &&Vec<u8>| volumes_of(&disks.open, &short, key) != [0];
    let elsewhere: Vec<Vec<u8>> = others.iter().filter(is_elsewhere).cloned().collect();
    assert!((5..others.len()).contains(&elsewhere.len()), "{}", elsewhere.len());

    disks.stall(0);
    let caught = start_get(&disks.open, &long, &pages[..1], SOON);
    disks.assert_served(&short, &elsewhere);
    assert!(!caught.done(), "a get that reads the stalled disk has ended");
    await_stall(&disks.open, &[0]);
    disks.assert_stalled(&long, &pages);
    for key in pages.chunks(1) {
        disks.assert_stalled(&long, key);
    }
    for key in elsewhere.chunks(1) {
        disks.assert_served(&short, key);
    }

    disks.schedule.heal();
    let (found, reason) = outcome(&caught);
    assert!(found == 1 || ["deadline", "stalled"].contains(&reason), "{reason}");
    disks.assert_whole(&[(&long, &pages), (&short, &others)]);
}

/// While one of `count` disks stalls, puts of long pages use the other disks, and gets deliver
/// these pages. A put whose write to the stalled disk has begun ends when the disk answers.
fn put_beside_a_stalled_volume(count: usize) {
    let (disks, unchained) = (disks(count), Arc::new(unchained(LONG)));
    let (chained, chain) = (Arc::new(chained(LONG)), sequence(1, 4));
    let (before, during) = (sequence(2, 2), sequence(3, 3));
    let (caught, expired) = (sequence(4, 2), sequence(5, 1));
    disks.put_each(&unchained, &before);
    assert_eq!(put(&disks.open.store, &chained, &chain[..2], None).pages, 2);

    disks.stall(0);
    let caught_put = start_put(&disks.open, &unchained, &caught, LATE);
    let expired_put = start_put(&disks.open, &unchained, &expired, SOON);
    // Each of the three pages has a piece on the stalled disk.
    let until = Instant::now() + LATE;
    while disks.schedule.injected() < 3 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(disks.schedule.injected() >= 3);
    await_stall(&disks.open, &[0]);
    let others: Vec<u8> = (1..count as u8).collect();
    for key in during.chunks(1) {
        assert_eq!(outcome(&start_put(&disks.open, &unchained, key, LATE)), (1, ""));
        assert_eq!(volumes_of(&disks.open, &unchained, &key[0]), others);
    }
    disks.assert_served(&unchained, &during);
    // The first pages of the chain have a piece on the stalled disk.
    assert_eq!(outcome(&start_put(&disks.open, &chained, &chain, LATE)), (4, ""));
    disks.assert_stalled(&chained, &chain);
    let has_ended = caught_put.done() || expired_put.done();
    assert!(!has_ended, "a put that writes to the stalled disk has ended");

    disks.schedule.heal();
    assert_eq!(outcome(&caught_put), (2, ""));
    let (stored, reason) = outcome(&expired_put);
    assert!((stored, reason) == (1, "") || (stored, reason) == (0, "deadline"), "{reason}");
    disks.assert_whole(&[
        (&unchained, &[before, during, caught, expired[..stored].to_vec()].concat()),
        (&chained, &chain),
    ]);
}

#[test]
fn puts_of_long_pages_use_two_of_three_volumes() {
    put_beside_a_stalled_volume(3);
}

/// With a single usable volume, long pages are placed as short pages are.
#[test]
fn puts_of_long_pages_use_one_of_two_volumes() {
    put_beside_a_stalled_volume(2);
}

#[test]
fn long_pages_are_refused_while_all_volumes_stall() {
    let (disks, long) = (disks(2), Arc::new(unchained(LONG)));
    let (pages, more) = (sequence(1, 2), sequence(2, 2));
    disks.put_each(&long, &pages);
    disks.stall(0);
    disks.stall(1);
    let caught = start_get(&disks.open, &long, &pages[..1], LATE);
    await_stall(&disks.open, &[0, 1]);
    assert_eq!(outcome(&start_put(&disks.open, &long, &more, LATE)), (0, "stalled"));
    disks.assert_stalled(&long, &pages[1..]);
    disks.schedule.heal();
    assert_eq!(outcome(&caught), (1, ""));
    assert_eq!(put(&disks.open.store, &long, &more, None).pages, 2);
    disks.assert_whole(&[(&long, &[pages, more].concat())]);
}
