//! Causes of misses that need a fault, a full store or a limit.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::explaining::*;
use common::volumes::{SEQUENCES, fill, two_volumes};
use common::*;
use ritornello_medium::{Faulty, Host, Medium, MediumFault, Op, Rule, Schedule, SimDisk};
use ritornello_store::admission::WriteBudget;
use ritornello_store::{
    Answer, CapacityChange, Catalog, ClientId, IndexKind, Options, ReserveRequest,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const PAGE: u64 = 64 << 10;

fn is_stored(open: &Open, name: u64, pages: usize) -> bool {
    let keys = sequence(name, pages);
    open.store.probe(&chained(PAGE), &refs(&keys)).unwrap() == pages
}

/// A run that cannot be read cannot be moved off a drained volume, so it is evicted.
#[test]
fn page_evicted_with_its_segment_has_cause_segment() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    let options = Options { paths: Vec::new(), ..two_volumes() };
    let medium = Faulty::new(Arc::new(disk), schedule.clone());
    let open = open_on(Arc::new(medium), &options).unwrap();
    schedule.add(Rule::always(MediumFault::Io).on(Op::Read).at("/b/seg-"));
    let drain = CapacityChange::DrainVolume("/b".to_owned());
    open.core.change_capacity(&drain, Duration::ZERO).unwrap();
    let evicted = (0..SEQUENCES).find(|name| !is_stored(&open, *name, 8)).unwrap();
    assert_missed(&open, &chained(PAGE), &sequence(evicted, 8), Answer::Evicted, "segment");
    let counters = open.store.stats().unwrap().catalog.counters;
    assert_eq!(counters["evicted_segment"], counters["evicted_pages"]);
    open.close();
}

/// A segment file cannot be opened (`ENFILE`), so the segment is absent. When opens succeed again,
/// the file does not exist.
#[test]
fn pages_of_a_removed_segment_file_have_cause_damaged() {
    let disk = SimDisk::new(64 * MIB);
    fill(&disk);
    let schedule = Schedule::new();
    schedule.add(Rule::always(MediumFault::NoSystemFiles).on(Op::Open).at("/b/seg-000000"));
    let options = Options { paths: Vec::new(), ..two_volumes() };
    let medium = Faulty::new(Arc::new(disk.clone()), schedule.clone());
    let open = open_on(Arc::new(medium), &options).unwrap();
    let absent = (0..SEQUENCES).find(|name| !is_stored(&open, *name, 8)).unwrap();
    let keys = sequence(absent, 8);
    assert_eq!(answers(&open, &chained(PAGE), &keys)[0].0, Answer::AbsentVolume);
    disk.remove(Path::new("/b/seg-000000")).unwrap();
    disk.sync_dir(Path::new("/b")).unwrap();
    schedule.heal();
    open.core.run_once();
    assert_missed(&open, &chained(PAGE), &keys, Answer::Damaged, "space");
    open.close();
}

#[test]
fn put_without_space_is_refused_with_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let open = open(dir.path(), 8);
    let scope = chained(PAGE);
    let refused = (0..40).find(|name| {
        let keys = sequence(*name, 8);
        let pages = put(&open.store, &scope, &keys, None).pages;
        begin_read(&open, &scope, &keys);
        pages == 0
    });
    let keys = sequence(refused.unwrap(), 8);
    assert_missed(&open, &scope, &keys, Answer::Refused, "no_space");
    open.close();
}

/// The space of evicted pages is reusable after a sync, for which this put has no time.
#[test]
fn put_without_time_to_sync_is_refused_with_deadline() {
    let disk = Arc::new(SimDisk::new(64 * MIB));
    let opts = Options { background_threads: false, ..options(Path::new("/store"), 8) };
    let open = open_beside(disk, &opts, Arc::new(|_| true)).unwrap();
    let client = open.core.catalog_for(ClientId(1), "one");
    let scope = chained(PAGE);
    let reference = client.resolve(&scope, true).unwrap().unwrap();
    let request = ReserveRequest { timeout: Duration::ZERO, ..ReserveRequest::default() };
    let refused = (0..100).find(|name| {
        let keys = sequence(*name, 8);
        let reserved = client.reserve(reference, &refs(&keys), None, &request).unwrap();
        if reserved.refused.is_none() {
            client.commit(reserved.id, &vec![Some(0); reserved.runs.len()]).unwrap();
        }
        reserved.refused.is_some()
    });
    let keys = sequence(refused.unwrap(), 8);
    assert_missed(&open, &scope, &keys, Answer::Refused, "deadline");
    open.close();
}

#[test]
fn put_beyond_the_budget_is_refused_with_write_budget() {
    let dir = tempfile::tempdir().unwrap();
    let write_budget = Some(WriteBudget::parse("0B/day").unwrap());
    let opts = Options { write_budget, ..options(dir.path(), 12) };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let (scope, keys) = (chained(PAGE), sequence(1, 8));
    put(&open.store, &scope, &keys, None);
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Refused, "write_budget", 8));
    open.close();
}

#[test]
fn unknown_pages_have_cause_forgotten_once_their_bucket_is_full() {
    let dir = tempfile::tempdir().unwrap();
    let write_budget = Some(WriteBudget::parse("0B/day").unwrap());
    let opts = Options { write_budget, ..options(dir.path(), 12) };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let (scope, keys) = (chained(PAGE), sequence(1, 8));
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(&scope, true).unwrap().unwrap();
    let refuse = |keys: &[Vec<u8>]| {
        let reserved = catalog.reserve(reference, &refs(keys), None, &ReserveRequest::default());
        assert!(reserved.unwrap().refused.is_some());
    };
    refuse(&keys[..4]);
    let known = [only(Answer::Refused, "write_budget", 4), only(Answer::Unknown, "not_offered", 4)];
    assert_eq!(answers(&open, &scope, &keys), known.concat());
    // A store of 12 MiB remembers 768 pages in 192 buckets.
    refuse(&sequence(2, 8192));
    assert_eq!(answers(&open, &scope, &keys), only(Answer::Unknown, "forgotten", 8));
    open.close();
}

/// The buffer of the index's records is full, and its files get no space.
#[test]
fn put_that_the_index_cannot_record_is_refused_with_metadata() {
    let schedule = Schedule::new();
    let disk: Arc<dyn Medium> =
        Arc::new(Faulty::new(Arc::new(SimDisk::new(64 * MIB)), schedule.clone()));
    let opts = Options {
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        background_threads: false,
        ..options(Path::new("/store"), 24)
    };
    let open = open_on(disk, &opts).unwrap();
    let scope = chained(4096);
    schedule.add(Rule::always(MediumFault::NoSpace).on(Op::Write).at("/index/"));
    let refused = (0..5000).find(|name| {
        let outcome = put(&open.store, &scope, &sequence(*name, 1), None);
        outcome.pages == 0
    });
    let keys = sequence(refused.unwrap(), 1);
    assert_missed(&open, &scope, &keys, Answer::Refused, "metadata");
    schedule.heal();
    open.store.flush().unwrap();
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 1);
    open.close();
}
