//! Changes bytes anywhere in a closed store: the store delivers no wrong byte, and never panics.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
enum Damage {
    Flip(u64, u8),
    Truncate(u64),
    Zero(u64, u64),
    Swap(u64, u64, u64),
    Remove,
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn damage(path: &Path, damage: &Damage) {
    let mut bytes = fs::read(path).unwrap();
    let length = bytes.len() as u64;
    if length == 0 {
        return;
    }
    // Most of a segment file is empty, so the change aims at the part before the last byte that is
    // not zero.
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(length, |at| at as u64 + 1);
    let at = |x: u64| (x % used) as usize;
    match damage {
        Damage::Flip(x, bit) => bytes[at(*x)] ^= 1 << (bit % 8),
        Damage::Truncate(x) => bytes.truncate(at(*x)),
        Damage::Zero(x, n) => {
            let from = at(*x);
            let to = (from + (*n % 20_000) as usize + 1).min(bytes.len());
            bytes[from..to].fill(0);
        }
        Damage::Swap(x, y, n) => {
            let (a, b) = (at(*x), at(*y));
            for i in 0..(*n % 9000) as usize {
                if a + i < bytes.len() && b + i < bytes.len() {
                    bytes.swap(a + i, b + i);
                }
            }
        }
        Damage::Remove => {
            fs::remove_file(path).unwrap();
            return;
        }
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn no_damage_returns_wrong_bytes() {
    let original = tempfile::tempdir().unwrap();
    let scopes = [chained(12_000), unchained(70_000)];
    {
        let open = open(original.path(), 8);
        for name in 0..12 {
            let scope = &scopes[(name % 2) as usize];
            let keys = sequence(name, 6);
            put(&open.store, scope, &keys[..3], None);
            put(&open.store, scope, &keys[3..], Some(&keys[2]));
        }
        open.store.delete(&scopes[1], &refs(&sequence(1, 2)[1..])).unwrap();
        open.close();
    }
    let names: Vec<PathBuf> = files(original.path())
        .into_iter()
        .map(|path| path.strip_prefix(original.path()).unwrap().to_owned())
        .collect();
    let kind = prop_oneof![
        4 => (any::<u64>(), any::<u8>()).prop_map(|(x, bit)| Damage::Flip(x, bit)),
        2 => any::<u64>().prop_map(Damage::Truncate),
        2 => (any::<u64>(), any::<u64>()).prop_map(|(x, n)| Damage::Zero(x, n)),
        2 => (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(x, y, n)| Damage::Swap(x, y, n)),
        1 => Just(Damage::Remove),
    ];
    let plan = prop::collection::vec((0..names.len(), kind), 1..4);
    let mut runner =
        TestRunner::new(Config { cases: 80, max_shrink_iters: 50, ..Config::default() });
    let whole = std::cell::Cell::new(0u32);
    runner
        .run(&plan, |plan| {
            let copy = tempfile::tempdir().unwrap();
            for name in &names {
                fs::create_dir_all(copy.path().join(name).parent().unwrap()).unwrap();
                fs::copy(original.path().join(name), copy.path().join(name)).unwrap();
            }
            for (file, kind) in &plan {
                let path = copy.path().join(&names[*file]);
                if path.exists() {
                    damage(&path, kind);
                }
            }
            let host = std::sync::Arc::new(ritornello_medium::Host);
            let Ok(open) = open_on(host, &options(copy.path(), 8)) else { return Ok(()) };
            let mut found = 0;
            for name in 0..12 {
                let scope = &scopes[(name % 2) as usize];
                let keys = sequence(name, 6);
                found += get(&open.store, scope, &keys).pages;
                for key in &keys {
                    get(&open.store, scope, std::slice::from_ref(key));
                }
                put(&open.store, scope, &keys, None);
                assert_eq!(get(&open.store, scope, &keys).pages, 6, "stored anew");
            }
            if found > 0 {
                whole.set(whole.get() + 1);
            }
            let report = open.core.verify(true, &mut |_, _| {}).unwrap();
            assert!(report.findings.is_empty(), "{report:?}");
            open.close();
            Ok(())
        })
        .unwrap();
    // Damage in one place must leave most pages of the store intact.
    assert!(whole.get() > 20, "{}", whole.get());
}
