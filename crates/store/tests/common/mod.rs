//! A small store in a temporary directory or on a simulated disk, and pages whose bytes follow from
//! their key, so that every byte read can be checked.
//!
//! `RITORNELLO_TEST_INDEX=lsm` names the index of the stores in real directories. Stores on a
//! simulated disk keep `run`, because RocksDB bypasses the simulated disk.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod explaining;
pub mod fixture;
pub mod items;
pub mod log_lines;
pub mod tickets;
pub mod volumes;

use ritornello_format::{Result, Scope};
use ritornello_medium::{Host, Medium};
use ritornello_store::{
    Catalog, ClientAlive, ClientId, Durability, IndexKind, LeaseNumber, Options, Outcome,
    PutOptions, Store, StoreCore,
};
use ritornello_volume::page_memory::{BorrowedPages, BorrowedPagesMut};
use ritornello_volume::segments::IoChoice;
use ritornello_volume::staging::Staging;
use ritornello_volume::transfer::Control;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;

pub struct Open {
    pub core: Arc<StoreCore>,
    pub store: Arc<Store>,
    tested_index: Option<IndexKind>,
}

/// Returns the index that the environment names for a store in `dir`; `None` if it names no index
/// or `dir` is `/store`, the directory of stores on simulated disks.
fn tested_index(dir: &Path) -> Option<IndexKind> {
    let word = std::env::var("RITORNELLO_TEST_INDEX").ok()?;
    (!dir.starts_with("/store")).then(|| IndexKind::parse(&word).unwrap())
}

impl Open {
    pub fn close(self) {
        self.store.close();
        self.core.close().unwrap();
    }

    /// Stops without making data durable, like a killed process. If the environment names the
    /// store's index (`lsm`), closes the store instead and returns false, because RocksDB cannot
    /// open its files twice in one process.
    pub fn forget(self) -> bool {
        if self.tested_index.is_some() {
            self.close();
            return false;
        }
        self.store.close();
        std::mem::forget(self);
        true
    }
}

/// Returns options with segments of 1 MiB, and a background sync once an hour, so that tests decide
/// when data becomes durable.
pub fn options(dir: &Path, mib: u64) -> Options {
    Options {
        capacity: Some(mib * MIB),
        index: tested_index(dir),
        segment_bytes: Some(MIB),
        io: IoChoice::Auto,
        durability: Durability::Cache,
        sync_interval: Duration::from_secs(3600),
        scrub_rate: 0,
        ..Options::new(dir)
    }
}

pub fn open_on(medium: Arc<dyn Medium>, options: &Options) -> Result<Open> {
    open_beside(medium, options, Arc::new(|_| false))
}

/// Opens a store that client processes use; `alive` says whether a client process is alive.
pub fn open_beside(medium: Arc<dyn Medium>, options: &Options, alive: ClientAlive) -> Result<Open> {
    let core = StoreCore::open(medium, options, alive)?;
    let catalog = Arc::new(core.catalog_for(ClientId::LOCAL, ""));
    let staging = Staging::new(8 * MIB as usize)?;
    let store = Store::new(catalog, core.segments(), staging);
    Ok(Open { core, store, tested_index: tested_index(&options.dir) })
}

pub fn open(dir: &Path, mib: u64) -> Open {
    open_on(Arc::new(Host), &options(dir, mib)).unwrap()
}

pub fn chained(page_bytes: u64) -> Scope {
    Scope::opaque("chained", page_bytes, true)
}

pub fn unchained(page_bytes: u64) -> Scope {
    Scope::opaque("unchained", page_bytes, false)
}

/// The keys of a sequence: key `n` commits to the sequence's name and all pages before it.
pub fn sequence(name: u64, pages: usize) -> Vec<Vec<u8>> {
    (0..pages as u64).map(|n| [name.to_le_bytes(), n.to_le_bytes()].concat()).collect()
}

pub fn refs(keys: &[Vec<u8>]) -> Vec<&[u8]> {
    keys.iter().map(Vec::as_slice).collect()
}

/// The only correct bytes for `key` in `scope`.
pub fn page(scope: &Scope, key: &[u8]) -> Vec<u8> {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let mut seed = scope.id().seed();
    for byte in key {
        seed = seed.rotate_left(9).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(*byte);
    }
    let word = |n: usize| {
        let mut x = seed.wrapping_add(n as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
        x.wrapping_mul(0x94d0_49bb_1331_11eb).to_le_bytes()
    };
    // In a build without optimization `into_flattened` takes a tenth of the time of `flat_map`.
    let mut page = (0..bytes.div_ceil(8)).map(word).collect::<Vec<_>>().into_flattened();
    page.truncate(bytes);
    page
}

/// Puts pages. The index `lsm` refuses with `metadata` while compaction has not caught up, so the
/// put is repeated for at most 10 seconds.
pub fn put(store: &Store, scope: &Scope, keys: &[Vec<u8>], parent: Option<&[u8]>) -> Outcome {
    put_after_compaction(|| try_put(store, scope, keys, parent).unwrap())
}

/// Puts with `put`, and repeats the put as [`put`] does.
pub fn put_after_compaction(put: impl Fn() -> Outcome) -> Outcome {
    let compacts = std::env::var("RITORNELLO_TEST_INDEX").is_ok_and(|index| index == "lsm");
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let outcome = put();
        if !compacts || outcome.reason != "metadata" || Instant::now() >= until {
            return outcome;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether the evictions by cause add up to `evicted_pages`. Tests do not demand that all evictions
/// have one cause: with the index `lsm` the store may also evict when the index's files reach their
/// budget.
pub fn evictions_have_causes(counters: &BTreeMap<String, u64>) -> bool {
    let causes = ["space", "quota", "index", "segment"].map(|cause| format!("evicted_{cause}"));
    causes.iter().map(|cause| counters[cause]).sum::<u64>() == counters["evicted_pages"]
}

pub fn try_put(
    store: &Store,
    scope: &Scope,
    keys: &[Vec<u8>],
    parent: Option<&[u8]>,
) -> Result<Outcome> {
    let pages: Vec<Vec<u8>> = keys.iter().map(|key| page(scope, key)).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let source = BorrowedPages::new(&pages);
    store.put_batch(scope, &refs(keys), &source, &PutOptions::after(parent), &Control::default())
}

/// Leases the leading pages as a read does: the lease does not count towards the client's share of
/// the store's space.
pub fn begin_read(open: &Open, scope: &Scope, keys: &[Vec<u8>]) -> LeaseNumber {
    let catalog = open.core.catalog_for(ClientId::LOCAL, "");
    let reference = catalog.resolve(scope, false).unwrap().unwrap();
    catalog.begin_read(reference, &refs(keys)).unwrap().lease
}

/// Gets pages, and checks the bytes of every page that is reported as read.
pub fn get(store: &Store, scope: &Scope, keys: &[Vec<u8>]) -> Outcome {
    let bytes = scope.resolved_page_bytes().unwrap() as usize;
    let mut pages = vec![vec![0xEE; bytes]; keys.len()];
    let mut slices: Vec<&mut [u8]> = pages.iter_mut().map(Vec::as_mut_slice).collect();
    let target = BorrowedPagesMut::new(&mut slices);
    let outcome = store.get_batch(scope, &refs(keys), &target, &Control::default()).unwrap();
    drop(target);
    for (at, key) in keys.iter().enumerate() {
        if outcome.ok[at] {
            assert!(pages[at] == page(scope, key), "WRONG BYTES for page {at}");
        }
    }
    assert_eq!(outcome.pages, outcome.ok.iter().take_while(|ok| **ok).count());
    outcome
}
