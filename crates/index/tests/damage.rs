//! Files of the index `run` with flipped bits, zeroes, noise or swapped parts, and files that were
//! cut, extended, replaced or removed: the open neither fails nor panics, and finds only runs that
//! existed before.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "shared with another test")]

mod common;

use common::{Op, Pair, op, open};
use proptest::prelude::*;
use ritornello_format::PageHash;
use ritornello_index::conformance::{Content, contents};
use ritornello_index::{PrefixIndex, RunIndex};
use ritornello_medium::{Access, Medium, SimDisk};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A change of files. `file` and `other` are numbers of files, modulo the number of all files; `at`
/// and `to` are positions in these two files, as fractions of their lengths. `Noise` overwrites all
/// bytes from `at` to the end of the file. `Swap` exchanges up to `bytes` bytes of the two files.
/// `Replace` overwrites `file` with the contents of `other`. `Extend` appends zeroes.
#[derive(Clone, Debug)]
enum Damage {
    Flip { file: u8, at: f64, bit: u8 },
    Cut { file: u8, at: f64 },
    Zero { file: u8, at: f64, bytes: u16 },
    Noise { file: u8, at: f64, seed: u64 },
    Swap { file: u8, at: f64, other: u8, to: f64, bytes: u8 },
    Replace { file: u8, other: u8 },
    Remove { file: u8 },
    Extend { file: u8, bytes: u16 },
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = || 0.0..1.0f64;
    let file = any::<u8>;
    prop_oneof![
        4 => (file(), at(), 0u8..8).prop_map(|(file, at, bit)| Damage::Flip { file, at, bit }),
        2 => (file(), at()).prop_map(|(file, at)| Damage::Cut { file, at }),
        2 => (file(), at(), any::<u16>()).prop_map(|(file, at, bytes)| Damage::Zero { file, at, bytes }),
        2 => (file(), at(), any::<u64>()).prop_map(|(file, at, seed)| Damage::Noise { file, at, seed }),
        2 => (file(), at(), file(), at(), any::<u8>())
            .prop_map(|(file, at, other, to, bytes)| Damage::Swap { file, at, other, to, bytes }),
        1 => (file(), file()).prop_map(|(file, other)| Damage::Replace { file, other }),
        1 => file().prop_map(|file| Damage::Remove { file }),
        1 => (file(), any::<u16>()).prop_map(|(file, bytes)| Damage::Extend { file, bytes }),
    ]
}

fn files(disk: &SimDisk) -> Vec<PathBuf> {
    let dir = Path::new("/index");
    disk.list(dir).unwrap().into_iter().map(|name| dir.join(name)).collect()
}

fn read(disk: &SimDisk, path: &Path) -> Vec<u8> {
    let file = disk.open(path, Access::default()).unwrap();
    let mut bytes = vec![0; file.length().unwrap() as usize];
    let read = file.read_at(&mut bytes, 0).unwrap();
    bytes.truncate(read);
    bytes
}

fn write(disk: &SimDisk, path: &Path, bytes: &[u8]) {
    let file = disk.open(path, Access { write: true, create: true, direct: false }).unwrap();
    file.set_len(0).unwrap();
    file.write_at(bytes, 0).unwrap();
    file.sync_data().unwrap();
}

fn inflict(disk: &SimDisk, damage: &Damage) {
    let all = files(disk);
    if all.is_empty() {
        return;
    }
    let pick = |file: u8| all[usize::from(file) % all.len()].as_path();
    let position = |bytes: &[u8], at: f64| ((bytes.len() as f64) * at) as usize;
    let change = |file: u8, with: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = read(disk, pick(file));
        if !bytes.is_empty() {
            with(&mut bytes);
            write(disk, pick(file), &bytes);
        }
    };
    match *damage {
        Damage::Flip { file, at, bit } => change(file, &|bytes| {
            let at = position(bytes, at);
            bytes[at] ^= 1 << bit;
        }),
        Damage::Cut { file, at } => change(file, &|bytes| bytes.truncate(position(bytes, at))),
        Damage::Zero { file, at, bytes: count } => change(file, &|bytes| {
            let from = position(bytes, at);
            let to = bytes.len().min(from + usize::from(count));
            bytes[from..to].fill(0);
        }),
        Damage::Noise { file, at, seed } => change(file, &|bytes| {
            let from = position(bytes, at);
            for (offset, byte) in bytes[from..].iter_mut().enumerate() {
                *byte = ritornello_index::synthetic::mix(seed ^ offset as u64) as u8;
            }
        }),
        Damage::Swap { file, at, other, to, bytes: count } => {
            let (mut one, mut two) = (read(disk, pick(file)), read(disk, pick(other)));
            let (from, to) = (position(&one, at), position(&two, to));
            let count = usize::from(count).min(one.len() - from).min(two.len() - to);
            one[from..from + count].swap_with_slice(&mut two[to..to + count]);
            write(disk, pick(file), &one);
            if pick(file) != pick(other) {
                write(disk, pick(other), &two);
            }
        }
        Damage::Replace { file, other } => write(disk, pick(file), &read(disk, pick(other))),
        Damage::Remove { file } => {
            disk.remove(pick(file)).unwrap();
            disk.sync_dir(Path::new("/index")).unwrap();
        }
        Damage::Extend { file, bytes } => {
            let file = disk.open(pick(file), Access { write: true, ..Access::default() }).unwrap();
            file.set_len(file.length().unwrap() + u64::from(bytes)).unwrap();
        }
    }
}

/// Checks that every recovered run is in `ever` with at least the pages that it has now, that its
/// parent exists, and that no two runs claim the same unit of space.
fn assert_intact(index: &RunIndex, ever: &BTreeMap<u64, Content>) {
    let now = contents(index);
    let mut units = BTreeSet::new();
    for (generation, run) in &now {
        let then = ever
            .get(generation)
            .unwrap_or_else(|| panic!("found a run that was never inserted: {run:?}"));
        assert_eq!(run.scope, then.scope);
        assert!(run.pages.len() <= then.pages.len());
        for (page, once) in run.pages.iter().zip(&then.pages) {
            assert!(
                page == once || *page == PageHash::NONE,
                "found a page that was never inserted"
            );
        }
        assert!(run.units.is_subset(&then.units));
        assert!(run.units.iter().all(|unit| units.insert(*unit)), "two runs claim the same unit");
        if let Some((parent, page)) = run.parent {
            assert!(
                (page as usize) < now[&parent].pages.len(),
                "a run follows a page that its parent does not have"
            );
        }
    }
}

proptest! {
    #![proptest_config(common::cases(256))]
    #[test]
    fn damage_only_loses_runs(
        ops in prop::collection::vec(op(), 10..50),
        damages in prop::collection::vec(damage(), 1..4),
    ) {
        let mut pair = Pair::new();
        let mut ever: BTreeMap<u64, Content> = BTreeMap::new();
        for op in &ops {
            if !matches!(op, Op::Crash { .. }) {
                pair.apply(op);
                for (generation, run) in contents(&*pair.run) {
                    ever.entry(generation).or_insert(run);
                }
            }
        }
        pair.run.sync().unwrap();
        let disk = pair.disk.crash(0);
        damages.iter().for_each(|damage| inflict(&disk, damage));
        let index = open(&disk);
        assert_intact(&index, &ever);
        // Records that recovery skipped stay skipped: later openings find the same contents.
        let recovered = contents(&*index);
        index.sync().unwrap();
        let again = open(&disk.crash(1));
        assert!(!again.recovered().damaged, "the first open must repair the files");
        assert_eq!(contents(&*again), recovered);
        again.checkpoint().unwrap();
        assert_eq!(contents(&*open(&disk.crash(2))), recovered);
    }
}

#[test]
fn files_extended_to_1_tib_lose_no_run() {
    let mut pair = Pair::new();
    pair.apply(&Op::Put { scope: 0, path: 0, length: 9, attach: false, skip: 0 });
    pair.run.checkpoint().unwrap();
    pair.apply(&Op::Put { scope: 2, path: 0, length: 9, attach: false, skip: 0 });
    pair.run.sync().unwrap();
    let before = contents(&*pair.run);
    for path in files(&pair.disk) {
        let file = pair.disk.open(&path, Access { write: true, ..Access::default() }).unwrap();
        file.set_len(1 << 40).unwrap();
    }
    let index = open(&pair.disk);
    assert_eq!(contents(&*index), before);
    assert!(index.recovered().torn_bytes > 1 << 39);
}
