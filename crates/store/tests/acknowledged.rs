//! Pages that a put acknowledges because another put stored them, and deletes in `durable` mode.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_codec::Codec;
use ritornello_format::{RunHeader, Scope, ScopeSettings};
use ritornello_medium::{Faulty, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::admission::AdmissionMode;
use ritornello_store::{
    Catalog, ClientId, Durability, Options, Outcome, PutOptions, ReserveRequest,
};
use ritornello_volume::page_memory::{BorrowedPages, Fragment, PageSource};
use ritornello_volume::transfer::{Control, RunWrite};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PAGE: u64 = 64 << 10;
const LONG: Duration = Duration::from_secs(30);

/// A function that puts pages of the given keys. Another client has stored the first six pages.
type Way = fn(&Open, &Arc<Scope>, &[Vec<u8>]) -> Outcome;

fn copy(open: &Open, scope: &Arc<Scope>, keys: &[Vec<u8>]) -> Outcome {
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    submit_copy(open, scope, keys, &BorrowedPages::new(&pages))
}

fn submit_copy(
    open: &Open,
    scope: &Arc<Scope>,
    keys: &[Vec<u8>],
    source: &dyn PageSource,
) -> Outcome {
    let boxed = keys.iter().map(|key| key.as_slice().into()).collect();
    let (terms, control) = (PutOptions::default(), Control::default());
    let ticket = open.store.submit_put_copy(Arc::clone(scope), boxed, source, terms, control);
    ticket.unwrap().wait(Some(LONG)).unwrap().as_ref().clone()
}

fn copy_without_staging(open: &Open, scope: &Arc<Scope>, keys: &[Vec<u8>]) -> Outcome {
    let staging = open.store.staging();
    let rest = staging.stats().capacity - staging.stats().in_use;
    let _all = staging.try_take(rest).unwrap();
    copy(open, scope, keys)
}

fn plain(open: &Open, scope: &Arc<Scope>, keys: &[Vec<u8>]) -> Outcome {
    put(&open.store, scope, keys, None)
}

/// A scope of bfloat16 numbers, which a codec can encode, in pages of [`PAGE`] bytes.
fn numbers() -> Scope {
    Scope {
        dtype: "bfloat16".to_owned(),
        page_tokens: 16,
        layers: (0, 16),
        kv_heads: (0, 1),
        head_dim: 64,
        layout: "page_first".to_owned(),
        page_bytes: None,
        ..Scope::opaque("numbers", 1, true)
    }
}

fn durable(admission: AdmissionMode) -> Options {
    let durability = Durability::Durable;
    Options { durability, admission, ..options(Path::new("/store"), 32) }
}

/// Commits pages as another client, as one part of a longer put. A commit of a part does not sync,
/// because the client flushes once after the last part. This client never flushes.
fn commit_unsynced(open: &Open, scope: &Scope, keys: &[Vec<u8>]) {
    let catalog = open.core.catalog_for(ClientId(7), "other");
    let reference = catalog.resolve(scope, true).unwrap().unwrap();
    let request =
        ReserveRequest { flushed_later: true, timeout: LONG, ..ReserveRequest::default() };
    let keys_of = refs(keys);
    let reserve = || catalog.reserve(reference, &keys_of, None, &request).unwrap();
    let mut reserved = reserve();
    if reserved.runs.is_empty() {
        // The mode `SecondSight` admits pages at their second put.
        reserved = reserve();
    }
    let [run] = &reserved.runs[..] else { panic!("{reserved:?}") };
    let header = RunHeader {
        store: reserved.store,
        scope: reference.id,
        slot: reference.slot,
        generation: run.place.generation,
        page_bytes: PAGE,
        header_units: run.place.header_units,
        page_units: run.place.page_units,
        parent: None,
        extents: run.place.extents.clone(),
        extents_total: run.place.extents.len() as u32,
        keys: keys.iter().collect(),
        slices_per_page: 1,
        slices: Vec::new(),
    };
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&pages);
    let write = RunWrite { place: &run.place, header: &header, source: &source, first: 0 };
    let sums = open.core.segments().write_runs(&[write], &Control::default());
    let sums: Vec<Option<u64>> = sums.into_iter().map(Result::ok).collect();
    assert_eq!(catalog.commit(reserved.id, &sums).unwrap().stored, keys.len());
}

/// In `durable` mode another client commits six pages without a flush. Then `way` puts `requested`
/// pages, the put acknowledges `expected` pages, and power is lost: all acknowledged pages must
/// survive.
fn survive(scope: &Scope, admission: AdmissionMode, way: Way, requested: usize, expected: usize) {
    let scope = Arc::new(scope.clone());
    for seed in 0..12 {
        let disk = SimDisk::new(128 * MIB);
        let opts = durable(admission);
        let open = open_on(Arc::new(disk.clone()), &opts).unwrap();
        if scope.dtype == "bfloat16" {
            let codec = Some(Codec::Split.number());
            open.store.configure(&scope, &ScopeSettings { codec, ..Default::default() }).unwrap();
        }
        let keys = sequence(1, 8);
        commit_unsynced(&open, &scope, &keys[..6]);
        let outcome = way(&open, &scope, &keys[..requested]);
        assert_eq!(outcome.pages, expected, "{outcome:?}");
        let after = disk.crash(seed);
        open.forget();
        let open = open_on(Arc::new(after), &opts).unwrap();
        let survived = get(&open.store, &scope, &keys[..expected]).pages;
        assert_eq!(survived, expected, "seed {seed}: acknowledged pages were lost");
        open.close();
    }
}

#[test]
fn copied_puts_acknowledge_durable_pages_only() {
    let all = AdmissionMode::WriteThrough;
    survive(&chained(PAGE), all, copy, 6, 6);
    survive(&chained(PAGE), all, copy, 8, 8);
    survive(&unchained(PAGE), all, copy, 6, 6);
    survive(&chained(PAGE), all, copy_without_staging, 8, 6);
    survive(&chained(PAGE), AdmissionMode::SecondSight, copy, 8, 6);
}

#[test]
fn plain_and_encoded_puts_acknowledge_durable_pages_only() {
    let all = AdmissionMode::WriteThrough;
    for scope in [chained(PAGE), numbers()] {
        for (requested, way) in [(6, plain as Way), (8, plain), (6, copy), (8, copy)] {
            survive(&scope, all, way, requested, requested);
        }
        survive(&scope, AdmissionMode::SecondSight, plain, 8, 6);
    }
}

/// A source of the pages of a put. The first access to the source deletes a stored page: after the
/// caller's probe, and before the I/O thread that runs the put reserves space.
struct Deleting<'a> {
    pages: BorrowedPages<'a>,
    delete: Box<dyn Fn() + Send + Sync + 'a>,
    done: AtomicBool,
}

// SAFETY: all fragments are fragments of `pages`.
unsafe impl PageSource for Deleting<'_> {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if !self.done.swap(true, Ordering::AcqRel) {
            (self.delete)();
        }
        self.pages.fragments(page, out);
    }
}

/// Puts eight pages, six of which are stored at first; page `deleted` is deleted during the put.
/// Returns the outcome of the put, and which pages are present after it.
fn put_while_deleting(scope: &Scope, deleted: usize) -> (Outcome, Vec<bool>) {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 32);
    let scope = Arc::new(scope.clone());
    let keys = sequence(1, 8);
    for at in 0..6_usize {
        let before = at.checked_sub(1).map(|before| keys[before].as_slice());
        assert_eq!(put(&open.store, &scope, &keys[at..=at], before).pages, 1);
    }
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(&scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let (store, name) = (Arc::clone(&open.store), Arc::clone(&scope));
    let victim = keys[deleted].clone();
    let delete = Box::new(move || assert_eq!(store.delete(&name, &[&victim]).unwrap(), 1));
    let pages = BorrowedPages::new(&pages);
    let source = Deleting { pages, delete, done: AtomicBool::default() };
    let outcome = submit_copy(&open, &scope, &keys, &source);
    let present = open.store.exists(&scope, &refs(&keys)).unwrap();
    assert_eq!(get(&open.store, &scope, &keys).pages, outcome.pages);
    assert_eq!(open.store.stats().unwrap().catalog.reserved_bytes, 0);
    drop(source);
    open.close();
    (outcome, present)
}

#[test]
fn chained_tail_is_not_put_without_its_head() {
    let (outcome, present) = put_while_deleting(&chained(PAGE), 3);
    assert_eq!((outcome.pages, outcome.reason, outcome.ok.len()), (3, "not_found", 8));
    assert_eq!(present, [true, true, true, false, false, false, false, false]);
}

#[test]
fn unchained_tail_is_put_without_its_head() {
    let (outcome, present) = put_while_deleting(&unchained(PAGE), 3);
    assert_eq!((outcome.pages, outcome.reason), (3, "not_found"));
    assert_eq!(present, [true, true, true, false, true, true, true, true]);
}

#[test]
fn durable_deletes_survive_power_loss() {
    let disk = SimDisk::new(64 * MIB);
    let open = open_on(Arc::new(disk.clone()), &durable(AdmissionMode::WriteThrough)).unwrap();
    let (scope, keys) = (unchained(4096), sequence(1, 4));
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
    assert_eq!(open.store.delete(&scope, &refs(&keys[..1])).unwrap(), 1);
    for seed in 0..12 {
        let open =
            open_on(Arc::new(disk.crash(seed)), &durable(AdmissionMode::WriteThrough)).unwrap();
        let present = open.store.exists(&scope, &refs(&keys)).unwrap();
        assert_eq!(present, [false, true, true, true], "crash {seed}");
    }
}

/// A full disk refuses the record of a deletion: the call fails until the record is durable, also
/// when a repeated call finds nothing left to remove.
#[test]
fn durable_delete_fails_until_it_is_durable() {
    let (disk, schedule) = (SimDisk::new(64 * MIB), Schedule::new());
    let medium = Arc::new(Faulty::new(Arc::new(disk.clone()), schedule.clone()));
    let options = durable(AdmissionMode::WriteThrough);
    let open = open_on(medium, &options).unwrap();
    let (scope, keys) = (unchained(4096), sequence(1, 4));
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 4);
    schedule.add(Rule::always(MediumFault::NoSpace).on(Op::Write).at("journal-"));
    open.store.delete(&scope, &refs(&keys[..1])).unwrap_err();
    schedule.heal();
    open.store.delete(&scope, &refs(&keys[..1])).unwrap();
    for seed in 0..6 {
        let open = open_on(Arc::new(disk.crash(seed)), &options).unwrap();
        let present = open.store.exists(&scope, &refs(&keys)).unwrap();
        assert_eq!(present, [false, true, true, true], "crash {seed}");
    }
}
