//! Power losses after each change of the disk except allocations, also while operations change the
//! index during a checkpoint: the index `run` recovers a past state that is not older than the last
//! sync.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "shared with another test")]

mod common;

use common::recorder::{Pause, Recorder};
use common::{Op, Pair, op, open, shape};
use proptest::prelude::*;
use ritornello_format::ScopeSlot;
use ritornello_index::conformance::{Content, contents, pages, place};
use ritornello_index::{NewRun, PrefixIndex};
use ritornello_medium::{Access, Medium, SimDisk};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Replaces operations that write several journal records, because a crash could leave a state in
/// the middle of such an operation: a removal becomes the removal of one page, and the drop of a
/// scope becomes a sync. A reopening and a crash become syncs, too.
fn single(op: Op) -> Op {
    match op {
        Op::Remove { scope, path, at, .. } => Op::Remove { scope, path, at, count: 1 },
        Op::DropScope { .. } | Op::Reopen | Op::Crash { .. } => Op::Sync,
        other => other,
    }
}

/// Writes a checkpoint. Before each of the checkpoint's writes, applies the next operation of
/// `meanwhile`, if any is left.
fn checkpoint_while(
    pair: &mut Pair,
    recorder: &Recorder,
    meanwhile: &[Op],
    mut after: impl FnMut(&Pair),
) {
    let (about, paused) = channel();
    let (permit, go) = channel();
    *recorder.pause.lock() = Some(Pause { about, go });
    let run = Arc::clone(&pair.run);
    let thread = std::thread::spawn(move || run.checkpoint());
    let mut meanwhile = meanwhile.iter();
    while !thread.is_finished() {
        if paused.recv_timeout(Duration::from_micros(200)).is_err() {
            continue;
        }
        let Some(op) = meanwhile.next() else { break };
        pair.apply(op);
        after(pair);
        permit.send(()).unwrap();
    }
    drop((paused, permit));
    thread.join().unwrap().unwrap();
    *recorder.pause.lock() = None;
}

/// Checks that the index opened on each recorded disk has one of the states `past`, and has the
/// same state after a sync, a checkpoint and a power loss.
fn check_crashes(recorder: &Recorder, past: &[Moment], what: &dyn Debug) {
    for disk in recorder.crashes.lock().drain(..) {
        let index = open(&disk);
        assert!(!index.recovered().damaged);
        let now = shape(&contents(&*index));
        assert!(past.contains(&now), "after {what:?}: {now:#?} is none of {past:#?}");
        index.sync().unwrap();
        index.checkpoint().unwrap();
        drop(index);
        assert_eq!(shape(&contents(&*open(&disk.crash(3)))), now);
    }
}

type Moment = BTreeMap<u64, Content>;

fn shapes(history: &[Moment]) -> Vec<Moment> {
    history.iter().map(shape).collect()
}

fn recorded() -> (Recorder, Pair) {
    let disk = SimDisk::new(1 << 30);
    let recorder = Recorder::over(disk.clone());
    let medium = recorder.medium();
    (recorder, Pair::on(disk, move |_| Arc::new(medium.clone())))
}

proptest! {
    #![proptest_config(common::cases(48))]
    #[test]
    fn power_loss_during_writes_recovers_a_past_state(
        ops in prop::collection::vec(op().prop_map(single), 1..40),
        meanwhile in prop::collection::vec(op().prop_map(single), 0..12),
    ) {
        let (recorder, mut pair) = recorded();
        for op in &ops {
            let mut past = pair.history.clone();
            if matches!(op, Op::Checkpoint) {
                checkpoint_while(&mut pair, &recorder, &meanwhile, |pair| {
                    past.push(contents(&*pair.run));
                });
            } else {
                pair.apply(op);
            }
            pair.check(op);
            past.extend(pair.history.last().cloned());
            if matches!(op, Op::Checkpoint) {
                // After a checkpoint, `check` keeps only the latest state. Keep the earlier states
                // too: a crash may lose the operations that were applied after the checkpoint
                // synced the journal.
                pair.history.clone_from(&past);
            }
            check_crashes(&recorder, &shapes(&past), op);
        }
    }

    /// Without one of the two checkpoints the index recovers the latest state; with one journal
    /// file cut at a random length, a past state.
    #[test]
    fn lost_checkpoint_or_cut_journal_is_survived(
        rounds in prop::collection::vec((
            prop::collection::vec(op().prop_map(single), 0..10),
            prop::collection::vec(op().prop_map(single), 0..12),
            any::<bool>(),
        ), 1..5),
        end in prop::collection::vec(op().prop_map(single), 0..10),
        cut in 0.0..1.0f64,
    ) {
        let (recorder, mut pair) = recorded();
        let mut all: Vec<Moment> = vec![BTreeMap::new()];
        for (before, meanwhile, reopen) in &rounds {
            for op in before {
                pair.apply(op);
                all.push(contents(&*pair.run));
            }
            checkpoint_while(&mut pair, &recorder, meanwhile, |pair| {
                all.push(contents(&*pair.run));
            });
            if *reopen {
                pair.apply(&Op::Reopen);
            }
        }
        for op in end.iter().filter(|op| !matches!(op, Op::Checkpoint)) {
            pair.apply(op);
            all.push(contents(&*pair.run));
        }
        pair.run.sync().unwrap();
        let now = contents(&*pair.run);
        let past = shapes(&all);
        let dir = Path::new("/index");
        let names = pair.disk.list(dir).unwrap();
        for name in names {
            let path = dir.join(&name);
            let disk = pair.disk.crash(0);
            if name.to_string_lossy().contains("checkpoint") {
                disk.remove(&path).unwrap();
                disk.sync_dir(dir).unwrap();
                prop_assert_eq!(contents(&*open(&disk)), now.clone());
            } else {
                let file = disk.open(&path, Access { write: true, ..Access::default() }).unwrap();
                file.set_len((file.length().unwrap() as f64 * cut) as u64).unwrap();
                file.sync_data().unwrap();
                let left = shape(&contents(&*open(&disk)));
                prop_assert!(past.contains(&left), "{name:?} cut: {left:#?} is none of {past:#?}");
            }
        }
    }
}

/// Neither the journal nor a checkpoint names a run whose data is not durable.
#[test]
fn records_become_durable_after_their_data() {
    let (recorder, pair) = recorded();
    let index = Arc::clone(&pair.run);
    let generation = Cell::new(0);
    let insert = || {
        let number = generation.replace(generation.get() + 1) + 1;
        let (pages, place) = (pages(number, 2), place(number, 2));
        let (scope, parent) = (ScopeSlot(1), None);
        let run = NewRun { scope, chained: true, parent, pages: &pages, place: &place, recency: 1 };
        index.insert(&run).unwrap();
    };
    let synced_data = Cell::new(0);
    let check = || {
        for disk in recorder.crashes.lock().drain(..) {
            let newest = contents(&*open(&disk)).into_keys().next_back().unwrap_or(0);
            assert!(
                newest <= synced_data.get(),
                "run {newest} is durable, but data only up to run {}",
                synced_data.get()
            );
        }
    };
    let sync_data = || {
        check();
        synced_data.set(generation.get());
        insert();
        Ok(())
    };
    for round in 0..6 {
        insert();
        if round % 3 == 1 {
            index.sync_after(&sync_data).unwrap();
        } else {
            index.checkpoint_after(&sync_data).unwrap();
        }
        check();
        assert!(synced_data.get() > round, "each sync and checkpoint must sync data first");
    }
    let newest = contents(&*open(&recorder.disk.crash(1))).into_keys().next_back();
    assert_eq!(newest, Some(synced_data.get()), "the newest run with synced data must be durable");
}
