//! Pages that are not worth the wear of a write are refused, reported and counted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use ritornello_medium::Host;
use ritornello_store::admission::{AdmissionMode, WriteBudget};
use ritornello_store::{CatalogStats, Options};
use std::path::Path;
use std::sync::Arc;

const PAGE: u64 = 64 << 10;

fn open_with(dir: &Path, admission: AdmissionMode, budget: Option<&str>) -> Open {
    let write_budget = budget.map(|text| WriteBudget::parse(text).unwrap());
    open_on(Arc::new(Host), &Options { admission, write_budget, ..options(dir, 12) }).unwrap()
}

fn stats(open: &Open) -> CatalogStats {
    open.store.stats().unwrap().catalog
}

#[test]
fn second_put_is_admitted() {
    let dir = tempfile::tempdir().unwrap();
    let scope = chained(PAGE);
    let open = open_with(dir.path(), AdmissionMode::SecondSight, None);
    let keys = sequence(1, 8);
    let first = put(&open.store, &scope, &keys[..6], None);
    assert_eq!((first.pages, first.reason), (0, "admission"));
    assert_eq!(stats(&open).admission.ghost_pages, 6);
    // The put admits the first six pages, which the previous put offered too. It refuses the last
    // two, which the next put may then store.
    let again = put(&open.store, &scope, &keys, None);
    assert_eq!((again.pages, again.reason), (6, "admission"));
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 8);
    assert_eq!(get(&open.store, &scope, &keys).pages, 8);
    let seen = stats(&open);
    assert_eq!((seen.counters["refused_admission"], seen.counters["refused_pages"]), (8, 8));
    assert_eq!(seen.admission.policy, "second_sight");
    open.close();
    // The list of refused pages does not survive a close; stored pages do.
    let open = open_with(dir.path(), AdmissionMode::SecondSight, None);
    put(&open.store, &scope, &sequence(2, 8), None);
    assert_eq!(put(&open.store, &scope, &keys, None).pages, 8);
    open.close();
    let open = open_with(dir.path(), AdmissionMode::SecondSight, None);
    assert_eq!(put(&open.store, &scope, &sequence(2, 8), None).pages, 0);
    open.close();
}

#[test]
fn zero_budget_writes_nothing_and_reads() {
    let dir = tempfile::tempdir().unwrap();
    let scope = chained(PAGE);
    let open = open_with(dir.path(), AdmissionMode::Auto, None);
    put(&open.store, &scope, &sequence(1, 8), None);
    open.close();
    let open = open_with(dir.path(), AdmissionMode::Auto, Some("0B/day"));
    for _ in 0..3 {
        let refused = put(&open.store, &scope, &sequence(2, 8), None);
        assert_eq!((refused.pages, refused.reason), (0, "write_budget"));
    }
    assert_eq!(
        put(&open.store, &scope, &sequence(1, 8), None).pages,
        8,
        "stored pages need no budget"
    );
    assert_eq!(get(&open.store, &scope, &sequence(1, 8)).pages, 8);
    let seen = stats(&open);
    assert_eq!(seen.counters["refused_write_budget"], 24);
    assert_eq!(seen.admission.budget_bytes_per_day, Some(0));
    assert_eq!(seen.admission.ghost_pages, 0);
    open.close();
}

#[test]
fn low_budget_admits_pages_at_second_put() {
    let dir = tempfile::tempdir().unwrap();
    let scope = chained(PAGE);
    // The budget's bucket holds 4 MiB and begins half full; at 96 MiB per day it gains less than a
    // page during the test. `auto` admits every page until the bucket is a quarter full: after
    // about 16 pages.
    let open = open_with(dir.path(), AdmissionMode::Auto, Some("96MiB/day"));
    let mut stored = 0;
    for name in 0..4 {
        stored += put(&open.store, &scope, &sequence(name, 8), None).pages as u64;
    }
    let seen = stats(&open);
    assert_eq!(seen.admission.policy, "second_sight");
    assert!((15..=17).contains(&stored), "{stored} pages stored, not about 16 (1 MiB)");
    assert_eq!(seen.counters["refused_admission"], 32 - stored);
    let available = seen.admission.available_bytes.unwrap();
    assert!(available < 5 * MIB / 4, "{available}");
    // Pages put again may use the rest of the budget.
    let again = (0..4).map(|name| put(&open.store, &scope, &sequence(name, 8), None).pages);
    assert_eq!(again.sum::<usize>(), 32);
    for name in 4..8 {
        put(&open.store, &scope, &sequence(name, 8), None);
        put(&open.store, &scope, &sequence(name, 8), None);
    }
    assert!(stats(&open).counters["refused_write_budget"] > 0);
    open.close();
}

#[test]
fn budget_of_unplaced_pages_is_refunded() {
    let dir = tempfile::tempdir().unwrap();
    let scope = chained(PAGE);
    let open = open_with(dir.path(), AdmissionMode::WriteThrough, Some("1TB/day"));
    let full = sequence(1, 150);
    let stored = put(&open.store, &scope, &full, None).pages;
    begin_read(&open, &scope, &full[..stored]);
    let before = stats(&open).admission.available_bytes.unwrap();
    for name in 2..10 {
        put(&open.store, &scope, &sequence(name, 150), None);
    }
    let after = stats(&open);
    assert!(after.counters["refused_space"] > 500, "{after:?}");
    // The eight puts above have 75 MiB, and the store has 12 MiB. The write budget lost only the
    // bytes of pages that found space.
    assert!(after.admission.available_bytes.unwrap() + 12 * MIB > before);
    open.close();
}
