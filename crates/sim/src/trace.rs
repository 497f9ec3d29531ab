//! Request traces as paths through a tree of blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Requests in the order in which they are replayed. A request is a path of blocks from a root;
/// blocks are numbered in the order of their first appearance, without gaps.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    name: String,
    /// End of each request's blocks in `blocks`.
    ends: Vec<usize>,
    blocks: Vec<u32>,
    /// The key of every block, which policies see as `Resident::key`. A part of a trace keeps the
    /// keys of its blocks.
    keys: Vec<u64>,
    skipped: Vec<u64>,
    clock_jumps: u64,
}

/// A part of a trace, for tuning on the first half and reporting results of the second half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TracePart {
    /// The first half of the requests.
    First,
    /// The second half, replayed from an empty store.
    Second,
    /// All requests.
    #[default]
    Whole,
}

impl Trace {
    /// The name of the generator, or of the file without `.jsonl` and `.gz`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.ends.len()
    }

    /// Number of block references: the sum of the numbers of blocks of all requests.
    #[must_use]
    pub fn references(&self) -> usize {
        self.blocks.len()
    }

    /// Number of distinct blocks: an unbounded store would hold this number at the end.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.keys.len()
    }

    /// Numbers of the malformed lines that were skipped, starting at 1.
    #[must_use]
    pub fn skipped(&self) -> &[u64] {
        &self.skipped
    }

    /// Number of requests whose time is before the preceding request's time.
    #[must_use]
    pub const fn clock_jumps(&self) -> u64 {
        self.clock_jumps
    }

    /// The blocks of request `at`, starting at the root.
    ///
    /// # Panics
    /// If `at` is not below [`Self::requests`].
    #[must_use]
    pub fn request(&self, at: usize) -> &[u32] {
        &self.blocks[self.span(at)]
    }

    /// The range of request `at` in [`Self::blocks`].
    pub(crate) fn span(&self, at: usize) -> Range<usize> {
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[at]
    }

    /// The blocks of all requests, request after request.
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The key of a block, which is the same in the whole trace and in its parts.
    pub(crate) fn key(&self, block: u32) -> u64 {
        self.keys[block as usize]
    }

    /// Returns the requests of a part as a separate trace, with the part's footprint. The result
    /// keeps the skipped lines and the clock jumps of the whole trace.
    #[must_use]
    pub fn part(self, part: TracePart) -> Self {
        let middle = self.requests() / 2;
        let requests = match part {
            TracePart::First => 0..middle,
            TracePart::Second => middle..self.requests(),
            TracePart::Whole => return self,
        };
        let mut renamed = vec![u32::MAX; self.keys.len()];
        let mut out = Self {
            name: self.name.clone(),
            skipped: self.skipped.clone(),
            clock_jumps: self.clock_jumps,
            ..Self::default()
        };
        for at in requests {
            for &block in self.request(at) {
                let name = &mut renamed[block as usize];
                if *name == u32::MAX {
                    *name = out.keys.len() as u32;
                    out.keys.push(self.key(block));
                }
                out.blocks.push(*name);
            }
            out.ends.push(out.blocks.len());
        }
        out
    }
}

/// Builds a trace from requests.
///
/// A block is identified by its id *and all ids before it*, as engines hash blocks: the same id
/// after different blocks is a different block, and an id that occurs twice in one request makes
/// two blocks.
#[derive(Debug, Default)]
pub struct TraceBuilder {
    trace: Trace,
    /// Blocks of the requests added so far, by predecessor (`u32::MAX` at a root) and id.
    known: HashMap<(u32, u64), u32>,
    last_time: f64,
}

impl TraceBuilder {
    /// An empty trace with this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { trace: Trace { name: name.into(), ..Trace::default() }, ..Self::default() }
    }

    /// Adds a request. Requests keep the order of the calls; a time, in milliseconds, that is
    /// before the preceding request's time counts as a clock jump.
    pub fn request(&mut self, time_ms: f64, ids: impl IntoIterator<Item = u64>) {
        self.trace.clock_jumps += u64::from(time_ms < self.last_time);
        self.last_time = time_ms;
        let mut before = u32::MAX;
        for id in ids {
            let keys = &mut self.trace.keys;
            before = match self.known.entry((before, id)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let chain = keys.get(before as usize).copied().unwrap_or(0);
                    // The cast loses no bits: 2^32 entries of `known` alone would take more than
                    // 100 GB of memory.
                    let block = keys.len() as u32;
                    keys.push(mix64(chain ^ mix64(id.wrapping_add(1))));
                    *new.insert(block)
                }
            };
            self.trace.blocks.push(before);
        }
        self.trace.ends.push(self.trace.blocks.len());
    }

    /// Records that line `number` was malformed and is skipped.
    pub fn skip(&mut self, number: u64) {
        self.trace.skipped.push(number);
    }

    /// The finished trace.
    #[must_use]
    pub fn finish(self) -> Trace {
        self.trace
    }
}

/// A bijection whose every output bit depends on every input bit: the finaliser of SplitMix64
/// (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA '14).
pub(crate) const fn mix64(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_identity_includes_ids_before_it() {
        let mut builder = TraceBuilder::new("t");
        builder.request(5.0, [1, 2, 2]);
        builder.request(3.0, [1, 2, 3]);
        builder.request(4.0, [2, 3]);
        let trace = builder.finish();
        assert_eq!([trace.request(0), trace.request(1)], [[0, 1, 2], [0, 1, 3]]);
        assert_eq!(trace.request(2), [4, 5]);
        assert_eq!((trace.requests(), trace.references(), trace.footprint()), (3, 8, 6));
        assert_eq!(trace.clock_jumps(), 1);
        let mut keys: Vec<u64> = (0..6).map(|block| trace.key(block)).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 6);
    }

    #[test]
    fn parts_have_own_footprints_and_keep_keys() {
        let mut builder = TraceBuilder::new("t");
        [[1, 2], [1, 3], [1, 3], [9, 3]].into_iter().for_each(|ids| builder.request(0.0, ids));
        let whole = builder.finish();
        let (first, second) =
            (whole.clone().part(TracePart::First), whole.clone().part(TracePart::Second));
        assert_eq!((first.requests(), first.footprint()), (2, 3));
        assert_eq!((second.requests(), second.footprint()), (2, 4));
        assert_eq!([second.request(0), second.request(1)], [[0, 1], [2, 3]]);
        assert_eq!(second.key(1), whole.key(2));
    }
}
