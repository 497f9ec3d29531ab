//! Encoded pages, end to end: gets return the pages put, exactly or (with the lossy codecs)
//! approximately, pages take less space, and a later owner and a client read pages of every
//! lossless codec.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use proptest::prelude::*;
use ritornello_codec::Codec;
use ritornello_format::{ErrorKind, Result, Scope, ScopeSettings, UNIT};
use ritornello_medium::{Host, SimDisk};
use ritornello_store::{ClientId, Durability, Options, Outcome, PutOptions, Store};
use ritornello_volume::page_memory::{BorrowedPages, BorrowedPagesMut};
use ritornello_volume::staging::Staging;
use ritornello_volume::transfer::{Control, Packing};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Returns a scope whose pages are `layers` pairs of 16 x 64 matrices: 4 KiB per layer.
fn numbers(name: &str, dtype: &str, layers: u32) -> Scope {
    Scope {
        dtype: dtype.to_owned(),
        page_tokens: 16,
        layers: (0, layers),
        kv_heads: (0, 1),
        head_dim: 64,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque(name, 1, true)
    }
}

/// Returns a page of numbers as in real caches, with few exponents and noisy mantissas. If `odd` is
/// not zero and the bytes of the key add up to a multiple of `odd`, the page is noise, which no
/// lossless codec shortens.
fn content(scope: &Scope, key: &[u8], odd: usize) -> Vec<u8> {
    let mut bytes = page(scope, key);
    let number = key.iter().map(|byte| usize::from(*byte)).sum::<usize>();
    if odd > 0 && number.is_multiple_of(odd) {
        return bytes;
    }
    for number in bytes.chunks_exact_mut(2) {
        // The magnitudes are below 2, and at least 2^-7 in bfloat16 and 1 in float16.
        let exponent = 120 + (number[1] & 7);
        number[1] = (number[1] & 0x80) | (exponent >> 1);
        number[0] = (number[0] & 0x7f) | (exponent << 7);
    }
    bytes
}

fn set(store: &Store, scope: &Scope, codec: Codec) {
    let settings = ScopeSettings { codec: Some(codec.number()), ..ScopeSettings::default() };
    store.configure(scope, &settings).unwrap();
}

fn put_pages(
    store: &Store,
    scope: &Scope,
    keys: &[Vec<u8>],
    pages: &[Vec<u8>],
    control: &Control,
) -> Result<Outcome> {
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    store.put_batch(
        scope,
        &refs(keys),
        &BorrowedPages::new(&pages),
        &PutOptions::default(),
        control,
    )
}

fn put_all(store: &Store, scope: &Scope, keys: &[Vec<u8>], odd: usize) {
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| content(scope, key, odd)).collect();
    let done = put_pages(store, scope, keys, &pages, &Control::default()).unwrap();
    assert_eq!((done.pages, done.reason), (keys.len(), ""));
}

/// Gets the pages of `keys` into memory in fragments of `fragment` bytes.
fn get_pages(
    store: &Store,
    scope: &Scope,
    keys: &[Vec<u8>],
    fragment: usize,
) -> (Outcome, Vec<Vec<u8>>) {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let mut pages = vec![vec![0xEE; bytes]; keys.len()];
    let mut parts: Vec<Vec<&mut [u8]>> =
        pages.iter_mut().map(|page| page.chunks_mut(fragment).collect()).collect();
    let target = BorrowedPagesMut::fragmented(&mut parts);
    let outcome = store.get_batch(scope, &refs(keys), &target, &Control::default()).unwrap();
    drop(target);
    (outcome, pages)
}

fn expect(store: &Store, scope: &Scope, keys: &[Vec<u8>], odd: usize) {
    for fragment in [usize::MAX, 5000] {
        let (outcome, pages) = get_pages(store, scope, keys, fragment);
        assert_eq!((outcome.pages, outcome.reason), (keys.len(), ""));
        for (page, key) in pages.iter().zip(keys) {
            assert!(*page == content(scope, key, odd), "wrong bytes");
        }
    }
}

#[test]
fn lossless_codecs_return_every_bit() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 64);
    for (codec, most) in [(Codec::Raw, 1.02), (Codec::Split, 0.78), (Codec::Zstd, 0.80)] {
        let scope = numbers(codec.word(), "bfloat16", 80);
        set(&open.store, &scope, codec);
        let stats = || {
            let stats = open.store.stats().unwrap();
            let count = |name: &str| stats.catalog.counters[name];
            let counted = [count("put_raw_bytes"), count("put_encoded_bytes")];
            (stats.transfer, counted)
        };
        let (before, [raw_before, encoded_before]) = stats();
        let keys = sequence(1, 16);
        put_all(&open.store, &scope, &keys, 0);
        expect(&open.store, &scope, &keys, 0);
        let (after, [raw, encoded]) = stats();
        let (raw, encoded) = (raw - raw_before, encoded - encoded_before);
        let disk = after.put_stored_bytes - before.put_stored_bytes;
        assert_eq!(raw, after.put_bytes - before.put_bytes);
        assert!(encoded < disk && encoded + 16 * UNIT + (128 << 10) > disk, "{encoded} of {disk}");
        assert_eq!(codec == Codec::Raw, encoded == raw, "{}", codec.word());
        let put = (after.put_bytes - before.put_bytes) as f64;
        let ratio = (after.put_stored_bytes - before.put_stored_bytes) as f64 / put;
        assert!(ratio < most, "{}: {ratio}", codec.word());
        assert_eq!(put, 16.0 * scope.resolved_page_bytes().unwrap() as f64);
    }
    open.close();
}

#[test]
fn lossy_codecs_approximate_numbers_and_reject_unknown_layouts() {
    let dir = tempfile::tempdir().unwrap();
    let opts = options(dir.path(), 64);
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let number =
        |bytes: &[u8]| f32::from_bits(u32::from(bytes[0]) << 16 | u32::from(bytes[1]) << 24);
    for (codec, least, most) in [(Codec::Int8, 0.5, 0.02), (Codec::Int4, 0.25, 0.2)] {
        let scope = numbers(codec.word(), "bfloat16", 64);
        set(&open.store, &scope, codec);
        let before = open.store.stats().unwrap().transfer.put_stored_bytes;
        let keys = sequence(1, 8);
        put_all(&open.store, &scope, &keys, 0);
        let stored = (open.store.stats().unwrap().transfer.put_stored_bytes - before) as f64;
        let ratio = stored / (8.0 * scope.resolved_page_bytes().unwrap() as f64);
        assert!(ratio > least && ratio < least + 0.12, "{ratio}");
        let (outcome, pages) = get_pages(&open.store, &scope, &keys, usize::MAX);
        assert_eq!(outcome.pages, 8);
        for (page, key) in pages.iter().zip(&keys) {
            let right = content(&scope, key, 0);
            for (got, right) in page.chunks_exact(2).zip(right.chunks_exact(2)) {
                assert!((number(got) - number(right)).abs() < 2.0 * most);
            }
        }
        let unknown = Scope { layout: "engine's own".into(), page_bytes: Some(4096), ..scope };
        let unknown = Scope { model: "unknown".into(), ..unknown };
        let settings = ScopeSettings { codec: Some(codec.number()), ..ScopeSettings::default() };
        let error = open.store.configure(&unknown, &settings).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("engine's own"), "{error}");
    }
    open.close();
    // A store whose default codec is lossy uses this codec only for scopes that a lossy codec can
    // encode; this scope's pages are stored without loss.
    let lossy = ritornello_store::Options { codec: Codec::Int8, ..opts };
    let open = open_on(Arc::new(Host), &lossy).unwrap();
    let scope = chained(8192);
    let keys = sequence(9, 3);
    put(&open.store, &scope, &keys, None);
    assert_eq!(get(&open.store, &scope, &keys).pages, 3);
    open.close();
}

#[test]
fn lossless_codecs_are_read_after_restart() {
    let dir = tempfile::tempdir().unwrap();
    let scope = numbers("mixed", "bfloat16", 40);
    let codecs = [Codec::Raw, Codec::Split, Codec::Zstd];
    let keys = sequence(4, 24);
    {
        let open = open(dir.path(), 64);
        for (at, codec) in codecs.into_iter().enumerate() {
            set(&open.store, &scope, codec);
            // Put eight new pages with each codec, after the pages that are stored already. Some of
            // the new pages are noise, which no lossless codec shortens.
            put_all(&open.store, &scope, &keys[..8 * at + 8], 5);
            expect(&open.store, &scope, &keys[..8 * at + 8], 5);
        }
        open.close();
    }
    let open = open(dir.path(), 64);
    expect(&open.store, &scope, &keys, 5);
    expect(&open.store, &scope, &keys[5..19], 5);
    let report = open.core.verify(true, &mut |_, _| {}).unwrap();
    assert_eq!((report.pages, report.findings.len()), (24, 0), "{report:?}");
    // The store of a client reads and encodes pages itself.
    let catalog = Arc::new(open.core.catalog_for(ClientId(3), "client"));
    let staging = Staging::new(8 << 20).unwrap();
    let client = Store::new(catalog, open.core.segments(), staging);
    expect(&client, &scope, &keys, 5);
    let more = sequence(5, 9);
    put_all(&client, &scope, &more, 5);
    expect(&open.store, &scope, &more, 5);
    client.close();
    open.close();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn lossless_codecs_return_pages_of_unknown_layout(
        page_bytes in 1u64..900_000,
        pages in 1usize..12,
        odd in 0usize..4,
        codec in prop::sample::select(vec![Codec::Split, Codec::Zstd]),
        dtype in prop::sample::select(vec!["bfloat16", "float16"]),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let open = open(dir.path(), 32);
        let scope = Scope {
            layout: "engine's own".into(),
            page_bytes: Some(page_bytes),
            ..numbers("any", dtype, 1)
        };
        set(&open.store, &scope, codec);
        let keys = sequence(7, pages);
        put_all(&open.store, &scope, &keys, odd);
        expect(&open.store, &scope, &keys, odd);
        open.close();
    }
}

/// Flips a bit in the middle of the used part of a segment file.
fn flip(dir: &Path) {
    let path = fs::read_dir(dir.join("segments")).or_else(|_| fs::read_dir(dir)).unwrap();
    let segment = path
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains("seg-"))
        .unwrap();
    let bytes = fs::read(&segment).unwrap();
    let used = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&segment).unwrap();
    file.write_all_at(&[bytes[used / 2] ^ 1], used as u64 / 2).unwrap();
}

#[test]
fn damaged_encoded_page_is_a_miss_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let scope = numbers("damage", "bfloat16", 16);
    let keys = sequence(2, 8);
    {
        let open = open(dir.path(), 8);
        set(&open.store, &scope, Codec::Split);
        put_all(&open.store, &scope, &keys, 0);
        open.close();
    }
    flip(dir.path());
    let open = open(dir.path(), 8);
    let (outcome, pages) = get_pages(&open.store, &scope, &keys, usize::MAX);
    assert_eq!((outcome.reason, outcome.pages < 8), ("checksum", true));
    for at in (0..8).filter(|at| outcome.ok[*at]) {
        assert!(pages[at] == content(&scope, &keys[at], 0), "WRONG BYTES");
    }
    assert!(open.store.probe(&scope, &refs(&keys)).unwrap() < 8, "the damaged page was kept");
    assert_eq!(
        open.store.stats().unwrap().catalog.counters["damaged_pages"],
        8 - outcome.pages as u64
    );
    put_all(&open.store, &scope, &keys, 0);
    expect(&open.store, &scope, &keys, 0);
    open.close();
}

#[test]
fn cancelled_put_in_parts_can_be_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 128);
    // The put of 40 MiB has several parts.
    let scope = numbers("long", "bfloat16", 64);
    let keys = sequence(3, 160);
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| content(&scope, key, 0)).collect();
    set(&open.store, &scope, Codec::Split);
    let stop = Control { cancelled: Some(Arc::new(AtomicBool::new(true))), ..Control::default() };
    let outcome = put_pages(&open.store, &scope, &keys, &pages, &stop).unwrap();
    assert_eq!((outcome.pages, outcome.reason), (0, "cancelled"));
    let late = Control { deadline: Some(Instant::now()), ..Control::default() };
    let outcome = put_pages(&open.store, &scope, &keys, &pages, &late).unwrap();
    assert_eq!((outcome.pages, outcome.reason), (0, "deadline"));
    // Whenever the deadline passes, the pages that the put reports as stored can be read.
    for micros in [200, 2000, 8000, 20_000] {
        let deadline = Some(Instant::now() + Duration::from_micros(micros));
        let control = Control { deadline, ..Control::default() };
        let outcome = put_pages(&open.store, &scope, &keys, &pages, &control).unwrap();
        assert!(outcome.pages == 160 || outcome.reason == "deadline", "{outcome:?}");
        expect(&open.store, &scope, &keys[..outcome.pages], 0);
    }
    put_all(&open.store, &scope, &keys, 0);
    expect(&open.store, &scope, &keys, 0);
    assert_eq!(open.store.stats().unwrap().catalog.reservations, 0);
    open.close();
}

/// In `durable` mode the parts of a put share sync rounds, and are durable before the put is
/// acknowledged.
#[test]
fn parts_of_a_durable_put_share_sync_rounds() {
    let disk = SimDisk::new(256 << 20);
    let options = Options { durability: Durability::Durable, ..options(Path::new("/store"), 128) };
    let open = open_on(Arc::new(disk.clone()), &options).unwrap();
    let scope = numbers("durable", "bfloat16", 80);
    set(&open.store, &scope, Codec::Split);
    let keys = sequence(1, 140);
    let syncs = || open.store.stats().unwrap().catalog.counters["syncs"];
    let before = syncs();
    put_all(&open.store, &scope, &keys, 0);
    // The put has parts of 25, 51, 51 and 13 pages of 320 KiB: the first of at most 8 MiB, the
    // others of at most 16 MiB.
    assert!(syncs() - before < 4, "the put took {} sync rounds", syncs() - before);
    let after = disk.crash(7);
    open.forget();
    let open = open_on(Arc::new(after), &options).unwrap();
    expect(&open.store, &scope, &keys, 0);
    open.close();
}

#[test]
fn without_staging_memory_pages_are_stored_raw() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 32);
    let scope = numbers("starved", "bfloat16", 64);
    set(&open.store, &scope, Codec::Split);
    // Fill all staging memory with encoded pages, so that no memory is left for the put.
    let encoder = BarelyShorter;
    let hog = vec![0u8; 1 << 20];
    let mut held = Vec::new();
    let segments = open.core.segments();
    for length in [1 << 20, 8192] {
        let pages = [&hog[..length]];
        let source = BorrowedPages::new(&pages);
        let pack = || segments.pack_page(&source, 0, length as u64, 1, &encoder, None);
        while let Packing::Packed(page) = pack() {
            held.push(page);
        }
    }
    // The put's memory is aligned, because unaligned memory cannot be written without staging.
    let keys = sequence(6, 6);
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let mut memory = Staging::new(8 << 20).unwrap().try_take(6 * bytes).unwrap();
    for (page, key) in memory.bytes_mut().chunks_exact_mut(bytes).zip(&keys) {
        page.copy_from_slice(&content(&scope, key, 0));
    }
    let pages: Vec<&[u8]> = memory.bytes().chunks_exact(bytes).collect();
    let source = BorrowedPages::new(&pages);
    let (terms, control) = (PutOptions::default(), Control::default());
    let done = open.store.put_batch(&scope, &refs(&keys), &source, &terms, &control).unwrap();
    assert_eq!((done.pages, done.reason), (6, ""));
    drop(held);
    expect(&open.store, &scope, &keys, 0);
    let moved = open.store.stats().unwrap().transfer;
    assert!(
        moved.put_stored_bytes > moved.put_bytes,
        "pages must be stored unencoded, with a header"
    );
    open.close();
}

/// Encodes every slice just short enough that the store keeps the encoded page instead of the raw
/// page.
struct BarelyShorter;

impl ritornello_volume::Pack for BarelyShorter {
    fn pack(&self, slice: &[u8], _: &mut [u8]) -> Option<(u8, usize)> {
        Some((Codec::Zstd.number(), slice.len() - 4096))
    }
}
