//! Residency: every backend passes the conformance suite
//! (`crates/index/src/conformance/residency.rs`); `run` and `lsm` match `memory` under random
//! events; `run` recovers a past state from its files, and `lsm` is created again, empty, after
//! damage.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use proptest::prelude::*;
use ritornello_format::{ErrorKind, PageHash, ScopeSlot};
use ritornello_index::conformance;
use ritornello_index::residency::{
    Holder, MemoryResidency, Residency, RunResidency, RunResidencyOptions, Tier, Tiers, Worker,
};
use ritornello_medium::{Access, Faulty, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const DIR: &str = "/residency";
const SCOPES: u32 = 3;
const WORKERS: u32 = 4;
/// Number of chains. Chain n begins with the first 8 n pages of chain zero.
const CHAINS: u64 = 4;
const PAGES: usize = 48;

/// A random operation. The pages of an event are up to `count` pages of a chain, beginning with
/// page `first`.
#[derive(Clone, Debug)]
enum Event {
    /// Calls [`Residency::put`]. If `parent` is true and `first` is not zero, the call names the
    /// page before the first page.
    Stored {
        scope: u32,
        worker: u32,
        tier: Tier,
        chain: u64,
        first: usize,
        count: usize,
        parent: bool,
    },
    /// Calls [`Residency::remove_blocks`].
    Removed {
        scope: u32,
        worker: u32,
        tiers: Tiers,
        chain: u64,
        first: usize,
        count: usize,
    },
    ClearedWorker(u32),
    ClearedScope(u32),
    Sync,
    Maintain,
    /// Syncs the index. A test that compares the index with `memory` also opens it again.
    Reopen,
}

fn event() -> impl Strategy<Value = Event> {
    let tier = || prop::sample::select(Tier::ALL.to_vec());
    let tiers = prop_oneof![tier().prop_map(Tiers::from), Just(Tiers::ALL)];
    let span = || (0..CHAINS, 0..PAGES, 1usize..24);
    prop_oneof![
        10 => (0..SCOPES, 0..WORKERS, tier(), span(), any::<bool>()).prop_map(
            |(scope, worker, tier, (chain, first, count), parent)| {
                Event::Stored { scope, worker, tier, chain, first, count, parent }
            }
        ),
        6 => (0..SCOPES, 0..WORKERS, tiers, span()).prop_map(
            |(scope, worker, tiers, (chain, first, count))| {
                Event::Removed { scope, worker, tiers, chain, first, count }
            }
        ),
        1 => (0..WORKERS).prop_map(Event::ClearedWorker),
        1 => (0..SCOPES).prop_map(Event::ClearedScope),
        1 => Just(Event::Sync),
        1 => Just(Event::Maintain),
        1 => Just(Event::Reopen),
    ]
}

fn chain(number: u64) -> Vec<PageHash> {
    let family = |at: u64| if number > 0 && at >= 8 * number { number } else { 0 };
    (0..PAGES as u64).map(|at| conformance::page(family(at), at)).collect()
}

fn span(number: u64, first: usize, count: usize) -> (Option<PageHash>, Vec<PageHash>) {
    let chain = chain(number);
    let parent = first.checked_sub(1).map(|before| chain[before]);
    (parent, chain[first..PAGES.min(first + count)].to_vec())
}

fn apply(index: &dyn Residency, event: &Event) {
    match *event {
        Event::Stored { scope, worker, tier, chain, first, count, parent } => {
            let (before, pages) = span(chain, first, count);
            let before = before.filter(|_| parent);
            index.put(ScopeSlot(scope), Worker(worker), tier, before, &pages).unwrap();
        }
        Event::Removed { scope, worker, tiers, chain, first, count } => {
            let (_, pages) = span(chain, first, count);
            index.remove_blocks(ScopeSlot(scope), Worker(worker), tiers, &pages);
        }
        Event::ClearedWorker(worker) => index.clear_worker(Worker(worker)),
        Event::ClearedScope(scope) => index.clear_scope(ScopeSlot(scope)),
        Event::Sync | Event::Reopen => index.sync().unwrap(),
        Event::Maintain => index.maintain().unwrap(),
    }
}

type Contents = BTreeMap<(u32, PageHash), Vec<Holder>>;

/// Returns the holders of every page.
fn contents(index: &dyn Residency) -> Contents {
    let mut all = Contents::new();
    for scope in 0..SCOPES {
        for page in (0..CHAINS).flat_map(chain) {
            let holders = index.holders(ScopeSlot(scope), page);
            if !holders.is_empty() {
                all.insert((scope, page), holders);
            }
        }
    }
    all
}

fn check(index: &dyn Residency, model: &MemoryResidency, after: &Event) {
    assert_eq!(contents(index), contents(model), "after {after:?}");
    for (scope, number) in (0..SCOPES).flat_map(|scope| (0..CHAINS).map(move |c| (scope, c))) {
        let chain = chain(number);
        for first in [0, 5, 16] {
            let keys = &&chain[first..];
            let found = index.prefixes(ScopeSlot(scope), keys);
            assert_eq!(found, model.prefixes(ScopeSlot(scope), keys), "after {after:?}");
        }
    }
}

fn options() -> RunResidencyOptions {
    // With a journal of 2 KiB the index replaces its files often.
    RunResidencyOptions { journal_bytes: 2 << 10, ..RunResidencyOptions::default() }
}

fn open_on(medium: Arc<dyn Medium>) -> RunResidency {
    RunResidency::open(medium, Path::new(DIR), options()).unwrap()
}

fn open(disk: &SimDisk) -> RunResidency {
    open_on(Arc::new(disk.clone()))
}

#[test]
fn memory_residency_conforms() {
    conformance::run_residency(&|| Box::new(MemoryResidency::new()));
}

#[test]
fn run_residency_conforms() {
    conformance::run_residency(&|| Box::new(open(&SimDisk::new(1 << 30))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn run_matches_memory(events in prop::collection::vec(event(), 1..80)) {
        let (disk, model) = (SimDisk::new(1 << 30), MemoryResidency::new());
        let mut index = open(&disk);
        for event in &events {
            apply(&index, event);
            apply(&model, event);
            if matches!(event, Event::Reopen) {
                drop(index);
                index = open(&disk);
                prop_assert!(!index.recovered().damaged);
            }
            check(&index, &model, event);
        }
        index.maintain().unwrap();
        let stats = index.stats();
        prop_assert_eq!(stats.pages, model.stats().pages, "`maintain` must remove cleared pages");
    }

    /// The medium fails from one operation onward, as at a power loss. The index recovers a past
    /// state that is not older than the last sync, and accepts changes.
    #[test]
    fn power_loss_recovers_a_past_state(
        events in prop::collection::vec(event(), 1..60),
        fails_at in 1u64..120,
        fault in prop::sample::select(vec![MediumFault::Io, MediumFault::Short]),
        seed in any::<u64>(),
    ) {
        let (disk, schedule) = (SimDisk::new(1 << 30), Schedule::new());
        let index = open_on(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
        schedule.add(Rule::nth(fails_at, fault).onward());
        let mut past = vec![contents(&index)];
        for event in &events {
            match event {
                Event::Sync | Event::Reopen | Event::Maintain => {
                    let done = if matches!(event, Event::Maintain) { index.maintain() } else { index.sync() };
                    if done.is_err() {
                        break;
                    }
                    if !matches!(event, Event::Maintain) {
                        past.drain(..past.len() - 1);
                    }
                }
                event => {
                    apply(&index, event);
                    past.push(contents(&index));
                }
            }
        }
        let left = disk.crash(seed);
        let index = open(&left);
        prop_assert!(!index.recovered().damaged);
        let now = contents(&index);
        prop_assert!(past.contains(&now), "{now:#?} is none of {past:#?}");
        apply(&index, &Event::ClearedWorker(0));
        index.sync().unwrap();
        let now = contents(&index);
        drop(index);
        prop_assert_eq!(contents(&open(&left.crash(seed))), now);
    }

    /// If the newest journal file is cut, or one of its bytes changes, the index recovers a past
    /// state.
    #[test]
    fn damage_drops_later_changes(
        events in prop::collection::vec(event(), 1..40),
        at in 0.0..1.0f64,
        cut in any::<bool>(),
    ) {
        let disk = SimDisk::new(1 << 30);
        let index = RunResidency::open(
            Arc::new(disk.clone()),
            Path::new(DIR),
            RunResidencyOptions::default(),
        ).unwrap();
        let mut past = vec![contents(&index)];
        for event in &events {
            apply(&index, event);
            past.push(contents(&index));
        }
        index.sync().unwrap();
        drop(index);
        let name = disk.list(Path::new(DIR)).unwrap().pop().unwrap();
        let access = Access { write: true, ..Access::default() };
        let file = disk.open(&Path::new(DIR).join(name), access).unwrap();
        let at = (file.length().unwrap() as f64 * at) as u64;
        if cut {
            file.set_len(at).unwrap();
        } else {
            let mut byte = [0];
            file.read_at(&mut byte, at).unwrap();
            file.write_at(&[byte[0] ^ 0x10], at).unwrap();
        }
        file.sync_data().unwrap();
        let now = contents(&open(&disk));
        prop_assert!(past.contains(&now), "{now:#?} is none of {past:#?}");
        prop_assert_eq!(contents(&open(&disk)), now);
    }
}

#[test]
fn changes_continue_while_files_are_replaced() {
    let (disk, model) = (SimDisk::new(1 << 30), MemoryResidency::new());
    let schedule = Schedule::new();
    let index = open_on(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
    // Delay every sync, so that changes happen during a sync.
    schedule.add(Rule::always(MediumFault::Slow(Duration::from_micros(200))).on(Op::SyncData));
    let apply_both = |event: &Event| {
        apply(&index, event);
        apply(&model, event);
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in (0u32..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                let (scope, worker, chain) =
                    (round % SCOPES, round % 7 % WORKERS, u64::from(round) % 4);
                let (first, tier, count, parent) = (round as usize * 7 % 40, Tier::Host, 9, true);
                apply_both(&Event::Stored { scope, worker, tier, chain, first, count, parent });
                let (first, tiers, count) = (round as usize * 11 % 40, Tiers::ALL, 3);
                apply_both(&Event::Removed { scope, worker, tiers, chain, first, count });
            }
        });
        for round in 0..20 {
            index.maintain().unwrap();
            index.sync().unwrap();
            let left = open(&disk.crash(round));
            assert!(!left.recovered().damaged, "in round {round}");
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    index.sync().unwrap();
    let names = disk.list(Path::new(DIR)).unwrap();
    assert!(
        !names.contains(&"residency-0000000000000001".into()),
        "the first file must be replaced"
    );
    assert_eq!(contents(&index), contents(&model));
    assert_eq!(contents(&open(&disk.crash(1))), contents(&model));
}

#[test]
fn full_disk_is_retry_at_a_write_and_fatal_at_a_sync() {
    for (op, kind) in [(Op::Write, ErrorKind::Retry), (Op::SyncData, ErrorKind::Fatal)] {
        let (disk, schedule) = (SimDisk::new(1 << 30), Schedule::new());
        let index = open_on(Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone())));
        schedule.add(Rule::nth(1, MediumFault::NoSpace).on(op));
        let (scope, worker, tier, chain) = (0, 0, Tier::Host, 1);
        let (first, count, parent) = (0, 4, false);
        apply(&index, &Event::Stored { scope, worker, tier, chain, first, count, parent });
        assert_eq!(index.sync().unwrap_err().kind(), kind, "{op:?}");
        match kind {
            ErrorKind::Retry => {
                index.sync().unwrap();
                assert_eq!(contents(&open(&disk.crash(1))), contents(&index));
            }
            _ => assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal),
        }
    }
}

#[test]
fn failed_sync_of_the_directory_of_a_new_file_is_fatal() {
    let (disk, schedule) = (SimDisk::new(1 << 30), Schedule::new());
    let index = open_on(Arc::new(Faulty::new(Arc::new(disk), schedule.clone())));
    for round in 0..100 {
        let (scope, worker, tier, chain) = (round % SCOPES, 0, Tier::Host, u64::from(round) % 4);
        let (first, count, parent) = (round as usize % 40, 8, false);
        apply(&index, &Event::Stored { scope, worker, tier, chain, first, count, parent });
    }
    schedule.add(Rule::nth(1, MediumFault::NoSpace).on(Op::SyncDir));
    let failed = index.sync().and_then(|()| index.maintain()).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Fatal);
    assert_eq!(index.sync().unwrap_err().kind(), ErrorKind::Fatal);
}

#[test]
fn record_out_of_sequence_ends_a_file() {
    let disk = SimDisk::new(1 << 30);
    let index = open(&disk);
    let pages = conformance::pages(1, 4);
    index.sync().unwrap();
    let name = disk.list(Path::new(DIR)).unwrap().pop().unwrap();
    let access = Access { write: true, ..Access::default() };
    let file = disk.open(&Path::new(DIR).join(name), access).unwrap();
    let from = file.length().unwrap();
    index.put(ScopeSlot(0), Worker(1), Tier::Device, None, &pages).unwrap();
    index.sync().unwrap();
    let mut stored = vec![0; (file.length().unwrap() - from) as usize];
    file.read_at(&mut stored, from).unwrap();
    index.remove_blocks(ScopeSlot(0), Worker(1), Tiers::ALL, &pages);
    index.sync().unwrap();
    drop(index);
    file.write_at(&stored, file.length().unwrap()).unwrap();
    let index = open(&disk);
    assert_eq!(index.recovered().torn_bytes, stored.len() as u64);
    assert_eq!(index.prefixes(ScopeSlot(0), &pages), []);
}

/// A prompt may branch after the removed middle pages of a run. A lookup of this prompt must not
/// report the removed pages as present.
#[test]
fn branch_after_removed_holes_does_not_match() {
    let index = open(&SimDisk::new(1 << 30));
    let (chain, branch) = (conformance::pages(1, 24), conformance::pages(2, 1));
    let put = |parent, pages: &[PageHash]| {
        index.put(ScopeSlot(0), Worker(1), Tier::Device, parent, pages).unwrap();
    };
    put(None, &chain[..20]);
    index.remove_blocks(ScopeSlot(0), Worker(1), Tiers::ALL, &chain[1..12]);
    put(Some(chain[19]), &chain[20..]);
    put(Some(chain[12]), &branch);
    // `requested` has 13 pages before the branch, and the removals left 13 of the run's 24 pages:
    // the lookup must not take these equal numbers for equal pages.
    let requested = [&chain[..13], &branch].concat();
    assert_eq!(index.prefixes(ScopeSlot(0), &requested)[0].pages, 1);
}

#[test]
fn complete_file_after_a_gap_replaces_earlier_files() {
    let disk = SimDisk::new(1 << 30);
    let index = open(&disk);
    let pages = conformance::pages(1, 100);
    let put = |index: &RunResidency, pages: &[PageHash]| {
        index.put(ScopeSlot(0), Worker(1), Tier::Device, None, pages).unwrap();
        index.sync().unwrap();
    };
    put(&index, &pages[..40]);
    let before = disk.crash(0);
    // The following changes exceed the length at which the index replaces its file.
    (0..100).for_each(|_| put(&index, &pages));
    index.maintain().unwrap();
    drop(index);
    // Restore the older file, as if its removal had been lost.
    let old = before.list(Path::new(DIR)).unwrap().pop().unwrap();
    assert!(!disk.list(Path::new(DIR)).unwrap().contains(&old));
    let path = Path::new(DIR).join(old);
    let from = before.open(&path, Access::default()).unwrap();
    let mut bytes = vec![0; from.length().unwrap() as usize];
    from.read_at(&mut bytes, 0).unwrap();
    let to = disk.open(&path, Access { write: true, create: true, direct: false }).unwrap();
    to.write_at(&bytes, 0).unwrap();
    let index = open(&disk);
    assert!(index.recovered().damaged);
    assert_eq!(index.prefixes(ScopeSlot(0), &pages)[0].pages, 100);
    assert_eq!(disk.list(Path::new(DIR)).unwrap().len(), 1, "skipped files must be removed");
}

#[test]
fn run_refuses_puts_only_at_its_limits() {
    let limits =
        RunResidencyOptions { memory_bytes_max: 4 << 20, pending_bytes_max: 1 << 20, ..options() };
    let disk = Arc::new(SimDisk::new(1 << 30));
    let index = RunResidency::open(disk, Path::new(DIR), limits).unwrap();
    let fill = |scope: u32| {
        for number in 0.. {
            let pages = conformance::pages(number + 1, 64);
            match index.put(ScopeSlot(scope), Worker(number as u32 % 3), Tier::Host, None, &pages) {
                Ok(()) if number % 256 == 0 => index.sync().unwrap(),
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Retry);
                    return (number, error.to_string());
                }
            }
        }
        unreachable!()
    };
    let (puts, error) = fill(0);
    assert!(error.contains("memory_bytes_max"), "{error}");
    let stats = index.stats();
    assert_eq!((stats.refused, stats.pages), (1, puts * 64));
    assert!(stats.memory_bytes < 6 << 20, "{stats:?}");
    // The index removes cleared pages when it needs room for new pages.
    index.clear_scope(ScopeSlot(0));
    let (again, _) = fill(1);
    assert!(again > puts / 2, "{again} puts into cleared memory, {puts} into new memory");
    (0..3).for_each(|worker| index.clear_worker(Worker(worker)));
    index.maintain().unwrap();
    let stats = index.stats();
    assert_eq!((stats.pages, stats.sets), (0, 0));
    // Without a sync the pending records reach their limit, and a put is refused.
    let pages = conformance::pages(1, 64);
    let full = (0..10_000)
        .find_map(|_| index.put(ScopeSlot(0), Worker(0), Tier::Host, None, &pages).err());
    assert!(full.unwrap().to_string().contains("pending_bytes_max"));
    index.sync().unwrap();
    index.put(ScopeSlot(0), Worker(0), Tier::Host, None, &pages).unwrap();
}

#[cfg(feature = "lsm")]
mod lsm {
    use super::*;
    use ritornello_index::residency::{LsmResidency, LsmResidencyOptions};
    use std::cell::Cell;

    #[test]
    fn lsm_residency_conforms() {
        let (dir, made) = (tempfile::tempdir().unwrap(), Cell::new(0));
        conformance::run_residency(&|| {
            let dir = dir.path().join(made.replace(made.get() + 1).to_string());
            Box::new(LsmResidency::open(&dir, &LsmResidencyOptions::default()).unwrap())
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn lsm_matches_memory_backend(events in prop::collection::vec(event(), 1..60)) {
            let (dir, model) = (tempfile::tempdir().unwrap(), MemoryResidency::new());
            let options = LsmResidencyOptions { memtable_bytes: 64 << 10, ..Default::default() };
            let mut index = LsmResidency::open(dir.path(), &options).unwrap();
            for event in &events {
                apply(&index, event);
                apply(&model, event);
                if matches!(event, Event::Reopen) {
                    drop(index);
                    index = LsmResidency::open(dir.path(), &options).unwrap();
                }
                check(&index, &model, event);
            }
        }
    }

    #[test]
    fn lsm_respects_its_budget_and_is_recreated_after_damage() {
        let dir = tempfile::tempdir().unwrap();
        let budget = 4 << 20;
        let options =
            LsmResidencyOptions { memtable_bytes: 256 << 10, budget, ..Default::default() };
        let index = LsmResidency::open(dir.path(), &options).unwrap();
        let again = LsmResidency::open(dir.path(), &options).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Retry, "an index that is open cannot be opened again");
        let fill = || {
            (0..20_000u32).find_map(|number| {
                let pages = conformance::pages(u64::from(number) + 1, 64);
                index.put(ScopeSlot(1), Worker(1), Tier::Disk, None, &pages).err()
            })
        };
        assert_eq!(fill().unwrap().kind(), ErrorKind::Retry);
        assert_eq!(index.stats().refused, 1);
        index.clear_worker(Worker(1));
        index.maintain().unwrap();
        let pages = conformance::pages(1, 64);
        index.put(ScopeSlot(1), Worker(1), Tier::Disk, None, &pages).unwrap();
        index.sync().unwrap();
        drop(index);
        std::fs::write(dir.path().join("lsm/CURRENT"), "nonsense").unwrap();
        let index = LsmResidency::open(dir.path(), &options).unwrap();
        assert!(index.was_damaged());
        assert_eq!(index.prefixes(ScopeSlot(1), &pages), []);
        drop(index);
        // Give the second record of RocksDB's manifest the type of a record of a recycled log, which
        // RocksDB would read in an endless loop.
        let database = dir.path().join("lsm");
        let list = std::fs::read_to_string(database.join("CURRENT")).unwrap();
        let list = database.join(list.trim_end());
        let mut bytes = std::fs::read(&list).unwrap();
        let second = 7 + usize::from(u16::from_le_bytes([bytes[4], bytes[5]]));
        bytes[second + 6] ^= 4;
        std::fs::write(&list, bytes).unwrap();
        let (done, opened) = std::sync::mpsc::channel();
        let path = dir.path().to_owned();
        std::thread::spawn(move || drop(done.send(LsmResidency::open(&path, &options))));
        let opened = opened.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        assert!(opened.unwrap().was_damaged());
    }
}
