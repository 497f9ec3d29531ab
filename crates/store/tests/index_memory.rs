//! The memory ceiling of the index: the puts that it refuses, and the evictions after which the
//! index takes puts again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::{Faulty, Host, MediumFault, Op, Rule, Schedule};
use ritornello_store::{Catalog, ClientId, IndexKind, Options, parse_index};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// Puts sequences of one page until a put is refused. Returns how many were stored.
fn fill(open: &Open, next: &mut u64) -> u64 {
    for stored in 0.. {
        let outcome = put(&open.store, &chained(PAGE), &sequence(*next, 1), None);
        if outcome.pages == 0 {
            assert_eq!(outcome.reason, "index_memory");
            return stored;
        }
        *next += 1;
        if stored % 64 == 63 {
            open.store.flush().unwrap();
        }
    }
    0
}

#[test]
fn index_ceiling_refuses_puts_until_eviction() {
    let dir = tempfile::tempdir().unwrap();
    let opts = Options {
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        background_threads: false,
        ..options(dir.path(), 128)
    };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let scope = chained(PAGE);
    let mut next = 0;
    let first = fill(&open, &mut next);
    let stats = open.store.stats().unwrap().catalog;
    assert!(first > 2000 && stats.runs == first, "{first}");
    assert_eq!(stats.index_memory_max_bytes, 1 << 20);
    assert!((85..=100).contains(&stats.index_memory_percent), "{}", stats.index_memory_percent);
    assert!(stats.index_memory_bytes <= 1 << 20);
    let lsm = stats.index_as_lsm.unwrap();
    assert!(lsm.memory_bytes > 0 && lsm.disk_bytes > 100 * first, "{lsm:?}");
    assert_eq!((stats.counters["refused_index_memory"], stats.counters["evicted_pages"]), (1, 0));
    // Stored pages can still be read, and put again.
    for name in [0, first / 2, first - 1] {
        assert_eq!(open.store.probe(&scope, &refs(&sequence(name, 1))).unwrap(), 1);
        assert_eq!(get(&open.store, &scope, &sequence(name, 1)).pages, 1);
        assert_eq!(put(&open.store, &scope, &sequence(name, 1), None).pages, 1);
    }
    open.core.run_once();
    let counters = open.store.stats().unwrap().catalog.counters;
    let evicted = counters["evicted_pages"];
    assert_eq!(counters["evicted_index"], evicted);
    assert!((first / 16..first / 2).contains(&evicted), "{evicted} of {first} pages were evicted");
    let again = fill(&open, &mut next);
    assert!(again >= evicted / 2, "{again}");
    // A deletion also frees the index's memory.
    for name in next - 1024..next {
        assert_eq!(open.store.delete(&scope, &refs(&sequence(name, 1))).unwrap(), 1);
    }
    assert!(fill(&open, &mut next) > 0);
    // Maintenance evicts nothing for the index unless a put was refused.
    open.core.run_once();
    let before = open.store.stats().unwrap().catalog.counters["evicted_pages"];
    open.core.run_once();
    assert_eq!(open.store.stats().unwrap().catalog.counters["evicted_pages"], before);
    open.close();
}

#[test]
fn full_journal_buffer_costs_a_sync_and_no_page() {
    let dir = tempfile::tempdir().unwrap();
    let opts = Options {
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        background_threads: false,
        ..options(dir.path(), 128)
    };
    let open = open_on(Arc::new(Host), &opts).unwrap();
    let scope = chained(PAGE);
    // About 600 records fill the buffer. The store has no background threads, so a commit that
    // finds the buffer full must sync.
    for name in 0..2000 {
        let outcome = try_put(&open.store, &scope, &sequence(name, 1), None).unwrap();
        assert_eq!((outcome.pages, outcome.reason), (1, ""), "{name}");
    }
    let counters = open.store.stats().unwrap().catalog.counters;
    assert!(counters["syncs"] > 0);
    assert_eq!((counters["refused_metadata"], counters["evicted_pages"]), (0, 0));
    open.close();
}

#[test]
fn index_name_may_have_a_memory_ceiling() {
    assert_eq!(parse_index("run").unwrap(), (IndexKind::Run, None));
    assert_eq!(parse_index("run:8GiB").unwrap(), (IndexKind::Run, Some(8 << 30)));
    for word in ["run:", "run:8", "run:1MiB", "memory:8GiB", "tree", "run:8GiB:2"] {
        assert!(parse_index(word).is_err(), "{word}");
    }
}

/// Every page on the volume that puts use is leased. Eviction for the index frees memory on the
/// volume that puts avoid.
#[test]
fn full_index_evicts_on_an_avoided_volume() {
    let dir = tempfile::tempdir().unwrap();
    let schedule = Schedule::new();
    let opts = Options {
        index: Some(IndexKind::Run),
        index_memory: Some(1 << 20),
        background_threads: false,
        paths: ["a", "b"].map(|name| dir.path().join(name)).to_vec(),
        ..options(&dir.path().join("home"), 128)
    };
    let open = open_on(Arc::new(Faulty::new(Arc::new(Host), schedule.clone())), &opts).unwrap();
    let mut next = 0;
    assert!(fill(&open, &mut next) > 2000);
    open.core.run_once();
    schedule.add(Rule::always(MediumFault::Io).on(Op::Write).at("b/seg-"));
    let scope = chained(PAGE);
    let failed = |next: u64| put(&open.store, &scope, &sequence(next, 1), None).reason == "io";
    assert_eq!((next..next + 40).filter(|next| failed(*next)).count(), 8);
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(&scope, false).unwrap().unwrap();
    for name in 0..next + 40 {
        let located = catalog.begin_read(reference, &refs(&sequence(name, 1))).unwrap();
        let mut extents = located.runs.iter().flat_map(|run| &run.place.extents);
        if extents.any(|extent| extent.segment.volume() == 1) {
            catalog.release(located.lease).unwrap();
        }
    }
    next += 40;
    fill(&open, &mut next);
    open.core.run_once();
    assert!(fill(&open, &mut next) > 0, "eviction must free memory of the index");
    open.close();
}
