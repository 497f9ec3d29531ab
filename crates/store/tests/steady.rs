//! Measures the extents per run in a full store whose contents have been replaced [`TURNOVERS`]
//! times. The tests reserve space and commit runs, but write no page.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{refs, sequence};
use ritornello_format::Scope;
use ritornello_medium::SimDisk;
use ritornello_store::eviction::PolicyKind;
use ritornello_store::{
    Catalog, ClientId, LocalCatalog, Options, ReserveRequest, ScopeRef, SpaceHealth, StoreCore,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const KIB: u64 = 1 << 10;
/// Minimum and maximum length of a page that is not encoded, in percent of its raw length.
const RAW: (u64, u64) = (100, 100);
const TURNOVERS: u64 = 4;
/// Number of sequences of each kind whose pages are touched ([`Catalog::touch`]) after each put of
/// the second and later sets.
const USES_PER_PUT: u64 = 8;

/// A kind of sequences: all have the same scope, page length and number of pages.
struct Kind {
    scope: ScopeRef,
    page_bytes: u64,
    pages: u64,
    /// Number of sequences in a set; [`Steady::age`] puts one set after another.
    sequences: u64,
    /// Minimum and maximum length of an encoded page, in percent of its raw length.
    encoded: (u64, u64),
}

struct Steady {
    core: Arc<StoreCore>,
    catalog: LocalCatalog,
    kinds: Vec<Kind>,
    capacity: u64,
    /// Bytes of space that puts have reserved.
    put: u64,
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

impl Steady {
    /// `shapes` holds, for each kind of sequences, the bytes of a page, the maximum pages of a
    /// sequence, and the minimum and maximum length of an encoded page in percent.
    fn new(capacity: u64, policy: PolicyKind, shapes: &[(u64, u64, (u64, u64))]) -> Self {
        let options = Options {
            capacity: Some(capacity),
            eviction: policy,
            background_threads: false,
            scrub_rate: 0,
            sync_interval: Duration::from_secs(3600),
            ..Options::new(Path::new("/store"))
        };
        let disk = Arc::new(SimDisk::new(2 * capacity));
        let core = StoreCore::open(disk, &options, Arc::new(|_| false)).unwrap();
        let catalog = core.catalog_for(ClientId::LOCAL, "");
        let share = capacity / 16 / shapes.len() as u64;
        let longest = share.min(capacity / 64);
        let kind = |&(page_bytes, most, encoded): &(u64, u64, (u64, u64))| {
            let scope = Scope::opaque(&format!("{page_bytes}"), page_bytes, true);
            let pages = most.min(longest / page_bytes).max(1);
            let sequences = (share / (pages * page_bytes)).max(1);
            let scope = catalog.resolve(&scope, true).unwrap().unwrap();
            Kind { scope, page_bytes, pages, sequences, encoded }
        };
        let kinds = shapes.iter().map(kind).collect();
        Self { core, catalog, kinds, capacity, put: 0 }
    }

    fn keys(kind: &Kind, set: u64, sequence_number: u64) -> Vec<Vec<u8>> {
        sequence((set << 16) | sequence_number, kind.pages as usize)
    }

    fn put(&mut self, kind: usize, set: u64, number: u64) {
        let kind = &self.kinds[kind];
        let keys = Self::keys(kind, set, number);
        let (least, most) = kind.encoded;
        let units = kind.page_bytes / 4096;
        let length = |page: u64| {
            let share = least + mix(set * 7919 + number * 31 + page) % (most - least + 1);
            (units * share).div_ceil(100) as u32
        };
        let page_units =
            if kind.encoded == RAW { Vec::new() } else { (0..kind.pages).map(length).collect() };
        let wanted = ReserveRequest {
            page_units,
            timeout: Duration::from_secs(60),
            ..ReserveRequest::default()
        };
        let reserved = self.catalog.reserve(kind.scope, &refs(&keys), None, &wanted).unwrap();
        assert_eq!(reserved.refused, None);
        let written = vec![Some(0); reserved.runs.len()];
        self.catalog.commit(reserved.id, &written).unwrap();
        self.put += reserved.runs.iter().map(|run| run.place.units() * 4096).sum::<u64>();
        self.core.run_once();
    }

    fn touch(&self, kind: &Kind, set: u64, number: u64) {
        self.catalog.touch(kind.scope, &refs(&Self::keys(kind, set, number))).unwrap();
    }

    /// Touches up to 16 consecutive pages at a pseudorandom position, in each of [`USES_PER_PUT`]
    /// sequences of each kind in the previous set. Does nothing for the first set.
    fn use_middle_pages(&self, set: u64, number: u64) {
        for kind in self.kinds.iter().filter(|_| set > 0) {
            for at in 0..USES_PER_PUT {
                let chance = mix(mix(set << 20 | number) ^ at << 8);
                let keys = Self::keys(kind, set - 1, chance % kind.sequences);
                let count = 16.min(kind.pages) as usize;
                let first = ((chance >> 32) % (kind.pages - count as u64 + 1)) as usize;
                self.catalog.touch(kind.scope, &refs(&keys)[first..first + count]).unwrap();
            }
        }
    }

    /// Fills the store, and replaces its contents `TURNOVERS` times. After the sequences of a kind
    /// in a set were put, touches each of them once. After the set, touches the first sequence of
    /// each kind in one of the six latest sets.
    fn age(&mut self) -> SpaceHealth {
        let mut set = 0;
        while self.put < self.capacity * (TURNOVERS + 1) {
            for kind in 0..self.kinds.len() {
                for number in 0..self.kinds[kind].sequences {
                    self.put(kind, set, number);
                    self.use_middle_pages(set, number);
                }
                self.catalog.flush().unwrap();
                for number in 0..self.kinds[kind].sequences {
                    self.touch(&self.kinds[kind], set, number);
                }
            }
            let older = set - (mix(set) % 6).min(set);
            self.kinds.iter().for_each(|kind| self.touch(kind, older, 0));
            set += 1;
        }
        self.catalog.stats().unwrap().health
    }
}

/// Ages a store of `gib` GiB. Checks its extents per run, and that at most `free_percent` percent
/// of its space is not in use.
fn check(gib: u64, policy: PolicyKind, shapes: &[(u64, u64, (u64, u64))], free_percent: u64) {
    let mut steady = Steady::new(gib << 30, policy, shapes);
    let health = steady.age();
    let stats = steady.catalog.stats().unwrap();
    let extents = health.extents_per_run;
    println!("{gib} GiB, {}: {extents:.2} extents per run, {health:?}", stats.eviction.policy);
    assert!(stats.counters["evicted_pages"] > 0);
    assert!(extents <= 2.0, "{gib} GiB, {}: {extents:.2} extents per run", stats.eviction.policy);
    assert!(health.small_pages.max <= 1 && health.large_pages.p99 <= 3, "{health:?}");
    let space = stats.segments_max * stats.segment_bytes;
    let free = stats.free_bytes + stats.limbo_bytes + health.padding_bytes;
    assert!(free * 100 <= space * free_percent, "{free} of {space} bytes are not in use");
}

#[test]
fn runs_take_few_extents() {
    for (gib, policy) in [(2, PolicyKind::Lru), (2, PolicyKind::Adaptive), (8, PolicyKind::Lru)] {
        check(gib, policy, &[(192 * KIB, 256, RAW)], 6);
    }
}

#[test]
fn runs_of_many_lengths_take_few_extents() {
    let shapes = [
        (16 * KIB, 512, RAW),
        (64 * KIB, 256, (66, 74)),
        (192 * KIB, 256, (52, 54)),
        (8192 * KIB, 4, (66, 74)),
    ];
    for policy in [PolicyKind::Lru, PolicyKind::Adaptive] {
        check(2, policy, &shapes, 8);
    }
}
