//! How evenly puts into a full store use its four volumes. The test reserves space and commits
//! runs, but writes no page.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{refs, sequence};
use ritornello_format::Scope;
use ritornello_medium::SimDisk;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{Catalog, ClientId, LocalCatalog, Options, ReserveRequest, StoreCore};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const VOLUMES: usize = 4;
const CAPACITY: u64 = 16 << 30;
/// A put has 256 MiB: sixteen runs of two pages.
const PAGE: u64 = 8 << 20;
const PAGES: usize = 32;

/// Puts a sequence. Returns its bytes, divided by the number of volumes and by the bytes on the
/// volume with most of them: the part of the sum of equal volumes' speeds that a transfer reaches.
fn put(core: &Arc<StoreCore>, catalog: &LocalCatalog, number: u64) -> f64 {
    let scope = catalog.resolve(&Scope::opaque("scope", PAGE, true), true).unwrap().unwrap();
    let keys = sequence(number, PAGES);
    let (mut bytes, mut first) = ([0; VOLUMES], 0);
    while first < PAGES {
        let wanted =
            ReserveRequest { timeout: Duration::from_secs(60), ..ReserveRequest::default() };
        let reserved = catalog.reserve(scope, &refs(&keys[first..]), None, &wanted).unwrap();
        assert_eq!(reserved.refused, None);
        for run in &reserved.runs {
            first += run.pages as usize;
            for extent in &run.place.extents {
                bytes[usize::from(extent.segment.volume())] += extent.bytes();
            }
        }
        catalog.commit(reserved.id, &vec![Some(0); reserved.runs.len()]).unwrap();
    }
    core.run_once();
    let most = *bytes.iter().max().unwrap() * VOLUMES as u64;
    bytes.iter().sum::<u64>() as f64 / most as f64
}

/// A segment of 256 MiB has room for fifteen runs of this length and a remainder that is slightly
/// too short for another, so most of the free space of a full store is in such remainders.
#[test]
fn puts_into_full_stores_use_all_volumes() {
    let options = Options {
        paths: (0..VOLUMES).map(|at| PathBuf::from(format!("/disk{at}"))).collect(),
        capacity: Some(CAPACITY),
        eviction: PolicyKind::Lru,
        background_threads: false,
        scrub_rate: 0,
        sync_interval: Duration::from_secs(3600),
        ..Options::new(Path::new("/store"))
    };
    let disk = Arc::new(SimDisk::new(2 * CAPACITY));
    let core = StoreCore::open(disk, &options, Arc::new(|_| false)).unwrap();
    let catalog = core.catalog_for(ClientId::LOCAL, "");
    let puts = CAPACITY / (PAGE * PAGES as u64);
    (0..2 * puts).for_each(|number| _ = put(&core, &catalog, number));
    let slowness: f64 = (2 * puts..4 * puts).map(|at| put(&core, &catalog, at).recip()).sum();
    let reached = 2.0 * puts as f64 / slowness;
    println!("transfers reach {reached:.2} of the sum of the volumes' speeds");
    assert!(catalog.stats().unwrap().counters["evicted_pages"] > 0);
    assert!(reached > 0.9, "transfers reach {reached:.2} of the sum of the volumes' speeds");
}
