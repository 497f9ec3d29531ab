//! Checks that a shadow that samples every page behaves like a store with the same policy.

use super::super::arc::AdaptiveReplacement;
use super::super::density::Density;
use super::super::lru::Lru;
use super::super::s3fifo::S3Fifo;
use super::super::two_q::TwoQ;
use super::*;
use std::collections::HashMap;

/// Capacity of the store and of the shadow, in pages. Every fraction of the capacity that a policy
/// uses, such as a tenth or a sixteenth, is a whole number of pages.
const FITS: usize = 240;

/// A store that drives a policy as the core does. Every page is a run, and a put frees all the
/// space that it needs before it admits its first run.
struct Store {
    tree: Tree,
    page_units: u32,
    /// Runs by key, and keys by run.
    runs: HashMap<u64, u64>,
    keys: Vec<u64>,
}

/// Keys of all runs, and the pages that the current put protects.
struct ProtectedByPut<'a>(&'a [u64], &'a [Used]);

impl EvictionContext for ProtectedByPut<'_> {
    fn is_protected(&self, run: RunId) -> bool {
        self.1.iter().any(|used| used.run == run)
    }
    fn page_key(&self, run: RunId, _: u32) -> u64 {
        self.0[run.0 as usize]
    }
}

impl Store {
    fn new(policy: Box<dyn EvictionPolicy>, page_units: u32) -> Self {
        // Eviction rounds the requested units upwards, to whole chunks (here of one unit) and then
        // to whole pages: a request for the units of one page evicts one page.
        Self { tree: Tree::new(policy, 1), page_units, runs: HashMap::new(), keys: Vec::new() }
    }

    /// Reads the leading stored pages of a sequence and puts the missing pages. Returns the number
    /// of stored pages.
    fn request(&mut self, sequence: &[u64]) -> usize {
        let there = sequence.iter().map_while(|key| self.runs.get(key));
        let path: Vec<Used> = there.map(|run| Used { run: RunId(*run), pages: 1 }).collect();
        let missing = &sequence[path.len()..];
        self.tree.hit(&path);
        let mut free = FITS - self.runs.len();
        for _ in missing {
            if free == 0 {
                let context = ProtectedByPut(&self.keys, &path);
                let victims = self.tree.victims(u64::from(self.page_units), &context);
                assert_eq!(victims.len(), 1);
                self.runs.remove(&self.keys[victims[0].run.0 as usize]);
                self.tree.remove(victims[0].run);
                free += 1;
            }
            free -= 1;
        }
        let mut parent = path.last().map(|used| (used.run, 0));
        for &key in missing {
            let run = RunId(self.keys.len() as u64);
            let page_units = self.page_units;
            self.tree.admit(&Resident { run, key, parent, pages: 1, page_units, header_units: 0 });
            self.runs.insert(key, run.0);
            self.keys.push(key);
            parent = Some((run, 0));
        }
        path.len()
    }
}

/// Returns the page keys of each request. The first 20 requests fill the store. Then follow 4000
/// requests, each for 1 to 30 leading pages of one of 120 sequences. The lower the number of a
/// sequence, the more often it is requested.
fn sequences() -> Vec<Vec<u64>> {
    let mut state = 7u64;
    let mut below = |bound: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let fill = (0..20).map(|which| (which, FITS as u64 / 20));
    let mut requested: Vec<(u64, u64)> = fill.collect();
    for _ in 0..4000 {
        let spread = 1 + below(120);
        requested.push((below(spread), 1 + below(30)));
    }
    let sequence = |(which, pages)| (0..pages).map(|page| ((which + 1) << 32) | page).collect();
    requested.into_iter().map(sequence).collect()
}

#[test]
fn shadow_of_all_pages_behaves_like_the_store() {
    let policies: [fn() -> Box<dyn EvictionPolicy>; 5] = [
        || Box::new(Lru::new()),
        || Box::new(AdaptiveReplacement::new()),
        || Box::new(TwoQ::new()),
        || Box::new(S3Fifo::new()),
        || Box::new(Density::new()),
    ];
    for (make, page_units) in policies.into_iter().flat_map(|make| [(make, 1), (make, 1 << 14)]) {
        let (mut store, mut shadow) = (Store::new(make(), page_units), Shadow::new(make()));
        shadow.set_capacity(FITS as u64);
        let mut hits = 0;
        for (at, sequence) in sequences().iter().enumerate() {
            let there = store.request(sequence);
            // As the core does, report first the pages that were read, then the pages put.
            let (read, put) = sequence.split_at(there);
            let mut had = shadow.demand(None, true, read, 1.0);
            if !put.is_empty() {
                had += shadow.demand(read.last().copied(), had == there, put, 1.0);
            }
            let name = shadow.name();
            assert_eq!(had, there, "{name}, pages of {page_units} units, request {at}");
            hits += had;
        }
        assert!(hits > 1000);
    }
}
