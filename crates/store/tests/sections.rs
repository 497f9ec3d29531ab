//! Gets in sections, for every encoding of pages: the store announces a section when the section's
//! bytes of every page of the get are in the caller's memory.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_codec::Codec;
use ritornello_format::{ErrorKind, Scope, ScopeSettings};
use ritornello_store::Store;
use ritornello_volume::page_memory::{BorrowedPages, BorrowedPagesMut, OwnedPagesMut};
use ritornello_volume::transfer::{Control, Sections};
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

/// Returns a scope whose pages are 48 pairs of matrices of 16 x 128 numbers: 8 KiB per layer.
fn scope(name: &str) -> Scope {
    Scope {
        dtype: "bfloat16".to_owned(),
        page_tokens: 16,
        layers: (0, 48),
        kv_heads: (0, 1),
        head_dim: 128,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque(name, 1, true)
    }
}

const LAYER: u64 = 8 << 10;

/// Returns random numbers with eight neighbouring exponents, which every codec except `raw`
/// shortens.
fn content(scope: &Scope, key: &[u8]) -> Vec<u8> {
    let mut bytes = page(scope, key);
    for number in bytes.chunks_exact_mut(2) {
        let exponent = 120 + (number[1] & 7);
        number[1] = (number[1] & 0x80) | (exponent >> 1);
        number[0] = (number[0] & 0x7f) | (exponent << 7);
    }
    bytes
}

fn fill(store: &Store, scope: &Scope, codec: Codec, keys: &[Vec<u8>]) {
    let settings = ScopeSettings { codec: Some(codec.number()), ..ScopeSettings::default() };
    store.configure(scope, &settings).unwrap();
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| content(scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&pages);
    let done = store
        .put_batch(scope, &refs(keys), &source, &Default::default(), &Control::default())
        .unwrap();
    assert_eq!(done.pages, keys.len());
}

fn get(
    store: &Store,
    scope: &Scope,
    keys: &[Vec<u8>],
    sections: Option<&Arc<Sections>>,
) -> (Vec<bool>, Vec<Vec<u8>>) {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let mut pages = vec![vec![0xEE; bytes]; keys.len()];
    let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let control = Control { sections: sections.cloned(), ..Control::default() };
    let outcome = store.get_batch(scope, &refs(keys), &target, &control).unwrap();
    drop(target);
    (outcome.ok, pages)
}

fn groups() -> Arc<Sections> {
    Arc::new(Sections::new((1..=3).map(|group| group * 16 * LAYER).collect()).unwrap())
}

/// Makes a directory in the build's target directory and, if the machine has `/dev/shm`, a
/// directory there.
fn directories() -> Vec<tempfile::TempDir> {
    let memory = std::path::Path::new("/dev/shm").is_dir().then_some("/dev/shm");
    let all = [Some(env!("CARGO_TARGET_TMPDIR")), memory];
    all.into_iter().flatten().map(|dir| tempfile::tempdir_in(dir).unwrap()).collect()
}

const CODECS: [Codec; 5] = [Codec::Raw, Codec::Split, Codec::Zstd, Codec::Int8, Codec::Int4];

#[test]
fn sections_add_up_to_the_whole_page() {
    for dir in directories() {
        let open = open(dir.path(), 64);
        for codec in CODECS {
            let (scope, keys) = (scope(codec.word()), sequence(1, 6));
            fill(&open.store, &scope, codec, &keys);
            let (_, whole) = get(&open.store, &scope, &keys, None);
            let sections = groups();
            let (ok, pages) = get(&open.store, &scope, &keys, Some(&sections));
            assert!(ok.iter().all(|ok| *ok) && pages == whole, "{}", codec.word());
            assert_eq!(sections.arrived(), 3);
        }
        open.close();
    }
}

#[test]
fn flipped_bits_never_reach_a_section() {
    for dir in directories() {
        let open = open(dir.path(), 128);
        for codec in CODECS {
            let scope = scope(codec.word());
            let mut announced = [0; 4];
            for part in 0..8 {
                let keys = sequence(100 + part, 2);
                let before = segments(dir.path());
                fill(&open.store, &scope, codec, &keys);
                let (_, whole) = get(&open.store, &scope, &keys, None);
                let (path, range) = changed(&before, &segments(dir.path()));
                flip(&path, range.start + (range.end - range.start) * part as usize / 8);
                let sections = groups();
                let (ok, pages) = get(&open.store, &scope, &keys, Some(&sections));
                let here = sections.arrived();
                announced[here] += 1;
                for (page, (ok, whole)) in pages.iter().zip(ok.iter().zip(&whole)) {
                    let right = if *ok { whole.len() } else { here * 16 * LAYER as usize };
                    assert!(page[..right] == whole[..right], "{}", codec.word());
                }
                assert_eq!(here == 3, ok.iter().all(|ok| *ok));
            }
            assert!(
                announced[0] > 0 && announced[1] + announced[2] > 0,
                "{}: {announced:?}",
                codec.word()
            );
        }
        open.close();
    }
}

type Files = Vec<(std::path::PathBuf, Vec<u8>)>;

fn segments(dir: &std::path::Path) -> Files {
    let entries = fs::read_dir(dir.join("segments")).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// Returns the file with the longest range from its first to its last changed byte, and this range.
fn changed(before: &Files, after: &Files) -> (std::path::PathBuf, std::ops::Range<usize>) {
    let of = |(path, now): &(std::path::PathBuf, Vec<u8>)| {
        let old = before.iter().find(|(known, _)| known == path).map(|(_, bytes)| bytes.as_slice());
        let differs = |at: &usize| now[*at] != old.map_or(0, |old| old[*at]);
        let (first, last) = ((0..now.len()).find(differs), (0..now.len()).rev().find(differs));
        (path.clone(), first.unwrap_or(0)..last.map_or(0, |last| last + 1))
    };
    after.iter().map(of).max_by_key(|(_, range)| range.len()).unwrap()
}

fn flip(path: &std::path::Path, at: usize) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at as u64).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at as u64).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn missing_page_announces_no_section() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    let (scope, keys) = (scope("short"), sequence(3, 6));
    fill(&open.store, &scope, Codec::Raw, &keys[..4]);
    let sections = groups();
    let (ok, _) = get(&open.store, &scope, &keys, Some(&sections));
    assert_eq!(ok, [true, true, true, true, false, false]);
    assert_eq!(sections.arrived(), 0);
    open.close();
}

#[test]
fn ticket_announces_every_section() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    let (scope, keys) = (Arc::new(scope("ticket")), sequence(4, 6));
    fill(&open.store, &scope, Codec::Raw, &keys);
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let submit = |sections: Option<Sections>| {
        let target = Arc::new(OwnedPagesMut::new(vec![vec![0; bytes]; keys.len()]));
        let control = Control { sections: sections.map(Arc::new), ..Control::default() };
        let keys = keys.iter().map(|key| key.as_slice().into()).collect();
        open.store.submit_get(Arc::clone(&scope), keys, target, control)
    };
    let long = Some(Duration::from_secs(60));
    let ticket = submit(Some(Sections::new(vec![LAYER, bytes as u64]).unwrap())).unwrap();
    assert!(ticket.wait_section(0, long) && ticket.wait_section(1, long));
    assert!(ticket.wait_section(7, long), "a wait for an unknown section must end with the ticket");
    assert_eq!(ticket.wait(Some(Duration::ZERO)).unwrap().pages, keys.len());
    let plain = submit(None).unwrap();
    assert!(plain.wait_section(0, long) && plain.done());
    let wrong = submit(Some(Sections::new(vec![LAYER]).unwrap())).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Invalid);
    open.close();
}
