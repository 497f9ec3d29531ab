//! Changes bytes anywhere in a closed store, and truncates, removes and swaps its files: the store
//! delivers no wrong byte, and never panics. Damage in any piece of a page that is striped over
//! several volumes costs this page and, in a chained scope, the pages after it.
//! `damaged_segments.rs` checks which pages other damage costs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::items::Item;
use common::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use ritornello_format::Extent;
use ritornello_medium::{Access, Host, Medium, SimDisk};
use ritornello_store::{Catalog, ClientId, Options};
use ritornello_volume::segments::Segments;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Length above which stores on several volumes stripe a page.
const LONG_PAGE: u64 = 768 << 10;
/// Bytes of a striped page: so long that each of four pieces has more than 256 KiB.
const STRIPED: u64 = 1_100_000;

/// Damage to a file. The numbers are positions, modulo the length of the part of the file that ends
/// with the last byte that is not zero; in `Flip`, `Zero` and `Swap` the last number selects the
/// bit, or the length of the changed range.
#[derive(Clone, Debug)]
enum Damage {
    Flip(u64, u8),
    Truncate(u64),
    Zero(u64, u64),
    Swap(u64, u64, u64),
    Remove,
    /// Swaps the file with the file of this index, modulo the number of files of the store.
    SwapFiles(usize),
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
    // The end of a segment file is empty, so the change begins in the part that ends with the last
    // byte that is not zero.
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
        Damage::SwapFiles(_) => return,
    }
    fs::write(path, bytes).unwrap();
}

/// Swaps two files, if both exist, through a temporary name in `dir`, which is on their file
/// system.
fn swap_files(one: &Path, other: &Path, dir: &Path) {
    if one.exists() && other.exists() && one != other {
        let between = dir.join("between");
        fs::rename(one, &between).unwrap();
        fs::rename(other, one).unwrap();
        fs::rename(between, other).unwrap();
    }
}

/// A store whose segments are on `volumes` volumes in `dir`.
fn options_on(dir: &Path, volumes: usize) -> Options {
    let further = (1..volumes).map(|at| dir.join(format!("volume{at}"))).collect();
    let mib = if volumes > 1 { 16 } else { 8 };
    let base = options(&dir.join("home"), mib);
    Options { further_dirs: Some(further), long_page_bytes: LONG_PAGE, ..base }
}

/// Items of striped pages, `chained` pages in a chained scope, and two in a scope that is not
/// chained.
fn striped_items(chained: usize) -> [Item; 2] {
    [
        Item::new("striped chained", 1, STRIPED, true, chained),
        Item::new("striped unchained", 1, STRIPED + 1, false, 2),
    ]
}

/// Puts the items into a new store on `volumes` volumes, and asserts that each page is striped over
/// all of them.
fn put_striped(open: &Open, items: &[Item], volumes: usize) {
    for item in items {
        let all = item.keys.len();
        assert_eq!(put_after_compaction(|| item.put(&open.store).unwrap()).pages, all);
        for at in 0..all {
            let on = item.single(at).volumes(open);
            assert_eq!(on.len(), volumes, "a page is not striped over all volumes: {on:?}");
        }
    }
}

#[test]
fn damage_never_delivers_wrong_bytes() {
    for (volumes, cases) in [(1, 30), (2, 25), (4, 25)] {
        damage_randomly(volumes, cases);
    }
}

fn damage_randomly(volumes: usize, cases: u32) {
    let dir = tempfile::tempdir().unwrap();
    let options = options_on(dir.path(), volumes);
    let scopes = [chained(12_000), unchained(70_000)];
    // A store on one volume stripes no page.
    let striped = if volumes > 1 { Vec::from(striped_items(2)) } else { Vec::new() };
    let single_pages = |item: &Item| (0..item.keys.len()).map(|at| item.single(at)).collect();
    let singles: Vec<Vec<Item>> = striped.iter().map(single_pages).collect();
    {
        let open = open_on(Arc::new(Host), &options).unwrap();
        put_striped(&open, &striped, volumes);
        for name in 0..12 {
            let scope = &scopes[(name % 2) as usize];
            let keys = sequence(name, 6);
            put(&open.store, scope, &keys[..3], None);
            put(&open.store, scope, &keys[3..], Some(&keys[2]));
        }
        open.store.delete(&scopes[1], &refs(&sequence(1, 2)[1..])).unwrap();
        let paths = open.store.stats().unwrap().catalog.paths;
        assert!(paths.iter().all(|path| path.used_bytes > 0), "{paths:?}");
        open.close();
    }
    // Each case begins with these files, in the same directories, which the manifest names.
    let original: Vec<(PathBuf, Vec<u8>)> =
        files(dir.path()).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect();
    let kind = prop_oneof![
        4 => (any::<u64>(), any::<u8>()).prop_map(|(x, bit)| Damage::Flip(x, bit)),
        2 => any::<u64>().prop_map(Damage::Truncate),
        2 => (any::<u64>(), any::<u64>()).prop_map(|(x, n)| Damage::Zero(x, n)),
        2 => (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(x, y, n)| Damage::Swap(x, y, n)),
        1 => Just(Damage::Remove),
        1 => any::<usize>().prop_map(Damage::SwapFiles),
    ];
    let plan = prop::collection::vec((0..original.len(), kind), 1..4);
    let mut runner = TestRunner::new(Config { cases, max_shrink_iters: 50, ..Config::default() });
    let whole = std::cell::Cell::new(0u32);
    runner
        .run(&plan, |plan| {
            files(dir.path()).iter().for_each(|path| fs::remove_file(path).unwrap());
            original.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
            for (file, kind) in &plan {
                match kind {
                    Damage::SwapFiles(other) => {
                        let other = &original[other % original.len()].0;
                        swap_files(&original[*file].0, other, dir.path());
                    }
                    kind if original[*file].0.exists() => damage(&original[*file].0, kind),
                    _ => {}
                }
            }
            let Ok(open) = open_on(Arc::new(Host), &options) else { return Ok(()) };
            // A volume without its marker is absent, and its pages cannot be stored anew.
            let is_absent = !open.core.stats().unwrap().absent_space.reasons.is_empty();
            assert!(!is_absent || volumes > 1);
            let mut found = 0;
            for name in 0..12 {
                let scope = &scopes[(name % 2) as usize];
                let keys = sequence(name, 6);
                found += get(&open.store, scope, &keys).pages;
                for key in &keys {
                    get(&open.store, scope, std::slice::from_ref(key));
                }
                put(&open.store, scope, &keys, None);
                let stored = get(&open.store, scope, &keys).pages;
                assert!(
                    stored == 6 || is_absent,
                    "a put after the damage must restore all 6 pages, not {stored}"
                );
            }
            for (item, singles) in striped.iter().zip(&singles) {
                found += item.get(&open.store).unwrap().pages;
                for single in singles {
                    single.get(&open.store).unwrap();
                }
                put_after_compaction(|| item.put(&open.store).unwrap());
                let stored = item.get(&open.store).unwrap().pages;
                assert!(
                    stored == item.keys.len() || is_absent,
                    "a put after the damage must restore all striped pages, not {stored}"
                );
            }
            if found > 0 {
                whole.set(whole.get() + 1);
            }
            // The gets above have found all damage, except in pages behind an absent page: no get
            // reads these, so verification is the first to find damage in them, and removes them.
            let mut report = open.core.verify(true, &mut |_, _| {}).unwrap();
            if is_absent {
                report = open.core.verify(true, &mut |_, _| {}).unwrap();
            }
            assert!(report.findings.is_empty(), "{report:?}");
            open.close();
            Ok(())
        })
        .unwrap();
    // In more than a quarter of the cases the store opens and some pages can be read before they
    // are put again.
    assert!(
        whole.get() > cases / 4,
        "{volumes} volumes: pages can be read in only {} of {cases} cases",
        whole.get()
    );
}

/// The pieces of the only page of `item`.
fn pieces(open: &Open, item: &Item) -> Vec<Extent> {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(&item.scope, false).unwrap().unwrap();
    let located = catalog.begin_read(reference, &refs(&item.keys)).unwrap();
    catalog.release(located.lease).unwrap();
    let run = &located.runs[0];
    run.place.page(run.first)
}

/// Flips a bit in the middle of a piece.
fn flip_bit(disk: &SimDisk, piece: Extent) {
    let dir = format!("/disk{}", piece.segment.volume());
    let path = Path::new(&dir).join(Segments::file_name(piece.segment));
    let file = disk.open(&path, Access { write: true, ..Access::default() }).unwrap();
    let (at, mut byte) = (piece.offset() + piece.bytes() / 2, [0]);
    file.read_at(&mut byte, at).unwrap();
    file.write_at(&[byte[0] ^ 8], at).unwrap();
}

/// Damages each piece of each striped page in turn. After each damage the lost pages are put again.
#[test]
fn damaged_piece_costs_its_page_and_the_pages_behind() {
    for volumes in [2, 4] {
        let disk = SimDisk::new(64 * MIB);
        let paths = (0..volumes).map(|at| PathBuf::from(format!("/disk{at}"))).collect();
        let base = options(Path::new("/store"), 32);
        let (long_page_bytes, background_threads) = (LONG_PAGE, false);
        let options = Options { paths, long_page_bytes, background_threads, ..base };
        let open = open_on(Arc::new(disk.clone()), &options).unwrap();
        let striped = striped_items(3);
        put_striped(&open, &striped, volumes);
        let short = [
            Item::new("short chained", 1, 12_000, true, 6),
            Item::new("short unchained", 1, 70_000, false, 6),
        ];
        for item in &short {
            assert_eq!(item.put(&open.store).unwrap().pages, item.keys.len());
        }
        let total = open.core.stats().unwrap().pages;
        for damaged in &striped {
            let all = damaged.keys.len();
            for (page, turn) in (0..all).flat_map(|page| (0..volumes).map(move |at| (page, at))) {
                let pieces = pieces(&open, &damaged.single(page));
                let is_striped =
                    |piece: &Extent| piece.segment.volume() != pieces[0].segment.volume();
                assert!(pieces.iter().any(is_striped), "a page is on one volume only: {pieces:?}");
                flip_bit(&disk, pieces[turn % pieces.len()]);
                let model = &damaged.scope.model;
                let what = format!("piece {turn} of page {page} of {model} on {volumes} volumes");
                let lost = if damaged.scope.chained { page..all } else { page..page + 1 };
                for item in striped.iter().chain(&short) {
                    let mut found = item.get(&open.store).unwrap();
                    if item.scope.chained {
                        // The get that finds the damage may still deliver pages after it.
                        found.ok[found.pages..].fill(false);
                    }
                    let mut expected = vec![true; item.keys.len()];
                    if item.scope.model == *model {
                        expected[lost.clone()].fill(false);
                    }
                    assert_eq!(found.ok, expected, "{what}: {}", item.scope.model);
                }
                let left = open.core.stats().unwrap().pages;
                assert_eq!(left, total - lost.len() as u64, "{what}: other pages were removed");
                assert_eq!(damaged.put(&open.store).unwrap().pages, all, "{what}");
                assert_eq!(damaged.get(&open.store).unwrap().pages, all, "{what}");
                open.store.flush().unwrap();
            }
        }
        let report = open.core.verify(false, &mut |_, _| {}).unwrap();
        assert!(report.findings.is_empty(), "{report:?}");
        open.close();
    }
}
