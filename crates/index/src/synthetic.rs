//! Chains of synthetic keys, for the example `measure`, and the generator [`mix`], for benchmarks
//! and tests.
//!
//! Keys are 32 pseudo-random bytes, as long as SHA-256 block hashes. The keys are computed on
//! demand, so that they take no memory in addition to the index.

use crate::{NewRun, PrefixIndex};
use ritornello_format::{
    Extent, PageHash, PageHashes, Place, Result, ScopeId, ScopeSlot, ScopedKeys, SegmentId,
};

/// The pages with which an index is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Total number of pages.
    pub pages: u64,
    /// Pages per run, at most 65,535.
    pub run_pages: u32,
    /// Pages per chain: runs are attached to each other up to this length.
    pub chain_pages: u32,
    /// Seed of the pseudo-random keys.
    pub seed: u64,
}

impl Default for Shape {
    /// A million pages, in chains of 256 and runs of 32.
    fn default() -> Self {
        Self { pages: 1_000_000, run_pages: 32, chain_pages: 256, seed: 1 }
    }
}

/// The scope of all chains.
pub const SLOT: ScopeSlot = ScopeSlot(1);

impl Shape {
    /// The scope's digest, the seed of the page hashes.
    #[must_use]
    pub fn scope(&self) -> ScopeId {
        ScopeId([0x5a; 16])
    }

    /// Number of chains; the last chain may be shorter.
    #[must_use]
    pub fn chains(&self) -> u64 {
        self.pages.div_ceil(u64::from(self.chain_pages.max(1)))
    }

    /// The keys of chain `chain`.
    #[must_use]
    pub fn keys(&self, chain: u64) -> Vec<[u8; 32]> {
        let first = chain * u64::from(self.chain_pages.max(1));
        let last = self.pages.min(first + u64::from(self.chain_pages.max(1)));
        (first..last).map(|page| self.key(page)).collect()
    }

    fn key(&self, page: u64) -> [u8; 32] {
        let mut key = [0; 32];
        for (at, word) in key.chunks_exact_mut(8).enumerate() {
            let state = self.seed.rotate_left(32) ^ (page * 4 + at as u64);
            word.copy_from_slice(&mix(state).to_le_bytes());
        }
        key
    }

    /// Inserts all pages, chain by chain. Each run has one extent, as nearly all runs of a store
    /// have. Returns the number of runs.
    ///
    /// # Errors
    /// Errors of [`PrefixIndex::insert`], and of [`PrefixIndex::sync`], which is called after each
    /// chain at whose end more than 1 MiB of changes waits, and at the end.
    pub fn fill(&self, index: &dyn PrefixIndex) -> Result<u64> {
        let scope = self.scope();
        let mut runs = 0;
        for chain in 0..self.chains() {
            let keys = self.keys(chain);
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_slice()).collect();
            let keys = ScopedKeys { scope: &scope, keys: &keys };
            let hashes: Vec<PageHash> = (0..keys.len()).map(|at| keys.at(at)).collect();
            let mut parent = None;
            for pages in hashes.chunks(self.run_pages.max(1) as usize) {
                let place = place(runs, pages.len() as u32);
                let run = NewRun {
                    scope: SLOT,
                    chained: true,
                    parent,
                    pages,
                    place: &place,
                    recency: runs,
                };
                index.insert(&run)?;
                parent = pages.last().copied();
                runs += 1;
            }
            if index.stats().pending_bytes > 1 << 20 {
                index.sync()?;
            }
        }
        index.sync()?;
        Ok(runs)
    }
}

/// A place of one extent. The places of runs with equal numbers of pages do not overlap.
fn place(run: u64, pages: u32) -> Place {
    let units = 1 + pages;
    let a_segment = 65_536 / units;
    Place {
        generation: run + 1,
        header_checksum: mix(run),
        header_units: 1,
        page_units: 1,
        extents: vec![Extent {
            segment: SegmentId((run / u64::from(a_segment.max(1))) as u32),
            start: (run % u64::from(a_segment.max(1))) as u32 * units,
            units,
        }],
    }
}

/// `SplitMix64` (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
#[must_use]
pub fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryIndex;

    #[test]
    fn every_chain_is_found_whole() {
        let shape = Shape { pages: 1000, run_pages: 7, chain_pages: 64, seed: 3 };
        let index = MemoryIndex::new();
        let runs = shape.fill(&index).unwrap();
        assert_eq!((index.stats().pages, index.stats().runs), (1000, runs));
        for chain in 0..shape.chains() {
            let keys = shape.keys(chain);
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_slice()).collect();
            let scoped = ScopedKeys { scope: &shape.scope(), keys: &keys };
            assert_eq!(index.probe(SLOT, &scoped), keys.len());
        }
    }
}
