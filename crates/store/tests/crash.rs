//! Power loss on a disk that loses and tears unsynced writes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::items::Item;
use common::*;
use parking_lot::Mutex;
use proptest::prelude::*;
use ritornello_format::Scope;
use ritornello_medium::{DiskChange, SimDisk, Watch, Watched};
use ritornello_store::Options;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PAGE: u64 = 20_000;

/// An action. `Put` and `Touch` name a sequence, and `Put` a number of its pages. `Delete` names a
/// sequence, and the page of it to delete; in the chained scope the pages after it are deleted too.
/// `Drop` drops the unchained scope if true, otherwise the chained scope. The number of `Crash`
/// selects the unsynced writes that are lost.
#[derive(Clone, Debug)]
enum Act {
    Put(u64, usize),
    Delete(u64, usize),
    Touch(u64),
    Flush,
    Drop(bool),
    Crash(u64),
    Reopen,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        8 => (0..40u64, 1..10usize).prop_map(|(s, n)| Act::Put(s, n)),
        1 => (0..40u64, 0..10usize).prop_map(|(s, n)| Act::Delete(s, n)),
        1 => (0..40u64).prop_map(Act::Touch),
        2 => Just(Act::Flush),
        1 => any::<bool>().prop_map(Act::Drop),
        2 => any::<u64>().prop_map(Act::Crash),
        1 => Just(Act::Reopen),
    ];
    prop::collection::vec(act, 1..60)
}

/// Pages that must survive a power loss: pages that were flushed, and were not deleted, dropped or
/// evicted since.
#[derive(Default)]
struct Oracle {
    durable: BTreeMap<u64, usize>,
}

struct Run {
    disk: SimDisk,
    open: Option<Open>,
    scopes: [Scope; 2],
    oracle: Oracle,
}

impl Run {
    fn open(&mut self) {
        let opts = options(Path::new("/store"), 5);
        self.open = Some(open_on(Arc::new(self.disk.clone()), &opts).unwrap());
    }

    fn now(&self) -> &Open {
        self.open.as_ref().unwrap()
    }

    fn scope(&self, sequence: u64) -> &Scope {
        &self.scopes[(sequence % 2) as usize]
    }

    fn probe(&self, name: u64) -> usize {
        self.now().store.probe(self.scope(name), &refs(&sequence(name, 10))).unwrap()
    }

    /// Checks with `get` that delivered pages have the right bytes and, if `exact`, that every page
    /// that `probe` counts is delivered.
    fn check_promises(&self, exact: bool) {
        for name in 0..40 {
            let promised = self.probe(name);
            let keys = sequence(name, promised);
            let got = get(&self.now().store, self.scope(name), &keys).pages;
            if exact {
                assert_eq!(got, promised, "sequence {name}");
            }
        }
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Put(name, pages) => {
                put(&self.now().store, self.scope(*name), &sequence(*name, *pages), None);
            }
            Act::Delete(name, at) => {
                let keys = sequence(*name, at + 1);
                self.now().store.delete(self.scope(*name), &refs(&keys[*at..])).unwrap();
                let kept = self.oracle.durable.entry(*name).or_default();
                *kept = (*kept).min(*at);
            }
            Act::Touch(name) => {
                self.now().store.touch(self.scope(*name), &refs(&sequence(*name, 10))).unwrap();
            }
            Act::Flush => {
                self.now().store.flush().unwrap();
                self.oracle.durable = (0..40).map(|name| (name, self.probe(name))).collect();
            }
            Act::Drop(second) => {
                let scope = &self.scopes[usize::from(*second)];
                self.now().store.drop_scope(scope).unwrap();
                self.oracle.durable.retain(|name, _| name % 2 != u64::from(*second));
            }
            Act::Reopen => {
                self.open.take().unwrap().close();
                self.open();
                self.check_promises(true);
            }
            Act::Crash(seed) => {
                // Pages evicted since the flush may be missing.
                let still: BTreeMap<u64, usize> = self
                    .oracle
                    .durable
                    .iter()
                    .map(|(name, pages)| (*name, (*pages).min(self.probe(*name))))
                    .collect();
                let after = self.disk.crash(*seed);
                self.open.take().unwrap().forget();
                self.disk = after;
                self.open();
                for (name, pages) in &still {
                    let keys = sequence(*name, *pages);
                    let got = get(&self.now().store, self.scope(*name), &keys).pages;
                    assert_eq!(got, *pages, "flushed pages of sequence {name} were lost");
                }
                self.check_promises(false);
                self.oracle.durable = still;
                self.act(&Act::Flush);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 400, ..ProptestConfig::default() })]
    #[test]
    fn flushed_pages_survive_power_loss_intact(acts in acts()) {
        let mut run = Run {
            disk: SimDisk::new(64 << 20),
            open: None,
            scopes: [chained(PAGE), unchained(PAGE)],
            oracle: Oracle::default(),
        };
        run.open();
        for act in &acts {
            run.act(act);
        }
        run.check_promises(false);
        run.open.take().unwrap().close();
    }
}

/// A crash can undo an eviction that is not durable. The store therefore reuses the freed space
/// only once the eviction is durable: every page that a probe finds after the crash is delivered.
#[test]
fn pages_found_after_undone_evictions_are_delivered() {
    for seed in 0..30 {
        let disk = SimDisk::new(64 << 20);
        let opts = options(Path::new("/store"), 8);
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        let scope = chained(PAGE);
        let evicted = || open.store.stats().unwrap().catalog.counters["evicted_pages"];
        let mut name = 0;
        while evicted() == 0 {
            put(&open.store, &scope, &sequence(name, 5), None);
            name += 1;
        }
        open.store.flush().unwrap();
        let (flushed, before) = (name, evicted());
        while evicted() < before + 10 {
            put(&open.store, &scope, &sequence(name, 5), None);
            name += 1;
        }
        let after = disk.crash(seed);
        open.forget();
        let open = open_on(Arc::new(after), &opts).unwrap();
        let mut promised = 0;
        for name in 0..flushed {
            let pages = open.store.probe(&scope, &refs(&sequence(name, 5))).unwrap();
            assert_eq!(get(&open.store, &scope, &sequence(name, pages)).pages, pages);
            promised += pages;
        }
        assert!(promised > 0);
        open.close();
    }
}

/// Records, after each change of the disk, the disk as a power loss at this moment would leave it.
#[derive(Debug)]
struct Crashes {
    disk: SimDisk,
    states: Mutex<Vec<SimDisk>>,
}

impl Watch for Crashes {
    fn after(&self, _: &DiskChange<'_>) {
        let mut states = self.states.lock();
        let seed = states.len() as u64;
        states.push(self.disk.crash(seed));
    }
}

/// Power fails after each change of the disk while a page in pieces on four volumes is put and
/// flushed. The page is then whole or not found, and a page that was flushed before is whole.
#[test]
fn long_page_is_whole_or_not_found_after_power_loss() {
    let disk = SimDisk::new(512 << 20);
    let crashes = Arc::new(Crashes { disk: disk.clone(), states: Mutex::default() });
    let medium = Watched::new(Arc::new(disk), Arc::clone(&crashes) as Arc<dyn Watch>);
    let options = Options {
        paths: ["/a", "/b", "/c", "/d"].map(PathBuf::from).to_vec(),
        segment_bytes: Some(8 * MIB),
        background_threads: false,
        ..options(Path::new("/store"), 256)
    };
    let open = open_on(Arc::new(medium), &options).unwrap();
    let [flushed, long] = [1, 2].map(|name| Item::new("long", name, 16 * MIB + 5_001, false, 1));
    assert_eq!(flushed.put(&open.store).unwrap().pages, 1);
    open.store.flush().unwrap();
    crashes.states.lock().clear();
    assert_eq!(long.put(&open.store).unwrap().pages, 1);
    assert_eq!(long.volumes(&open), [0, 1, 2, 3]);
    let put_states = crashes.states.lock().len();
    open.store.flush().unwrap();
    let states = std::mem::take(&mut *crashes.states.lock());
    open.close();
    assert!(
        put_states > 4 && states.len() > put_states + 4,
        "each volume must be written and synced"
    );
    let last = states.len() - 1;
    for (at, state) in states.into_iter().enumerate() {
        let open = open_on(Arc::new(state), &options).unwrap();
        assert_eq!(flushed.get(&open.store).unwrap().pages, 1, "state {at}");
        let promised = open.store.probe(&long.scope, &refs(&long.keys)).unwrap();
        assert_eq!(long.get(&open.store).unwrap().pages, promised, "state {at}");
        assert!(at < last || promised == 1, "a page must be present after its flush has returned");
        open.store.close();
    }
}

/// In `durable` mode an acknowledged put needs no flush.
#[test]
fn durable_puts_survive_without_flush() {
    for seed in 0..10 {
        let disk = SimDisk::new(64 << 20);
        let opts = ritornello_store::Options {
            durability: ritornello_store::Durability::Durable,
            ..options(Path::new("/store"), 8)
        };
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        let scope = chained(PAGE);
        for name in 0..6 {
            assert_eq!(put(&open.store, &scope, &sequence(name, 3), None).pages, 3);
        }
        let after = disk.crash(seed);
        open.forget();
        let open = open_on(Arc::new(after), &opts).unwrap();
        for name in 0..6 {
            assert_eq!(get(&open.store, &scope, &sequence(name, 3)).pages, 3);
        }
        open.close();
    }
}
