//! Evicts by one of several candidate policies, the *followed* one: the candidate that would have
//! had most hits recently.

use super::arc::AdaptiveReplacement;
use super::density::Density;
use super::eviction_policy::EvictionPolicy;
use super::lru::Lru;
use super::s3fifo::S3Fifo;
use super::shadow::{CANDIDATES_MAX, Sample, Shadow};
use super::tree::{CHUNK_UNITS, Tree};
use super::two_q::TwoQ;
use super::{
    Demand, Eviction, EvictionContext, EvictionStats, Resident, ShadowStats, Used, Victim,
};
use ritornello_index::RunId;

/// Creates a candidate's policy.
type Make = fn() -> Box<dyn EvictionPolicy>;

/// The candidates. The store evicts by the first until another leads by the [`MARGIN`].
const CANDIDATES: [Make; 5] = [
    || Box::new(Density::new()),
    || Box::new(S3Fifo::new()),
    || Box::new(AdaptiveReplacement::new()),
    || Box::new(TwoQ::new()),
    || Box::new(Lru::new()),
];
const _: () = assert!(CANDIDATES.len() <= CANDIDATES_MAX);

/// The shadows take at most 1/`MEMORY_PART` of the index's memory, estimated as
/// [`INDEX_BYTES_PER_PAGE`] for each page.
const MEMORY_PART: u64 = 20;
const INDEX_BYTES_PER_PAGE: u64 = 34;
/// Bytes of memory that the shadows may take even if the index is small.
const MEMORY_FLOOR: u64 = 4 << 20;
/// Bytes of memory per page of one shadow, including remembered keys and unused space in tables.
const SHADOW_BYTES_PER_PAGE: u64 = 256;
/// The weight of a hit has decayed to 1/e after `WINDOW * n` requested sampled pages, where `n` is
/// the number of sampled pages that the store holds, or 256 if the store holds fewer.
const WINDOW: f64 = 64.0;
/// A candidate takes over if its recent hits exceed the hits of the followed candidate by more than
/// the share `MARGIN` of the requested pages plus [`SIGMAS`] standard errors.
const MARGIN: f64 = 0.005;
/// Standard errors in the condition of [`MARGIN`]. Whole sequences hit or miss together, so the
/// standard error of the difference of two candidates is computed from their differences in each
/// requested sequence, not in each page.
const SIGMAS: f64 = 2.0;
/// Number of requested sampled pages between two decisions about the candidate to follow.
const DECIDE_EVERY: u64 = 64;

/// Evicts by the candidate whose shadow had most hits recently. Another candidate takes over only
/// if it leads by the [`MARGIN`].
///
/// A shadow is a miniature of the store: it runs a candidate's own code over a sample of the keys,
/// with the same fraction of the capacity. Sampling turns a sequence into a shorter sequence in the
/// same order, so a prefix stays a prefix. Sources: Waldspurger et al., "Cache Modeling and
/// Optimization using Miniature Simulations", ATC '17, and "Efficient MRC Construction with
/// SHARDS", FAST '15.
#[derive(Debug)]
pub(super) struct Adaptive {
    tree: Tree,
    shadows: Vec<Shadow>,
    sample: Sample,
    followed: usize,
    switches: u64,
    /// Sampled pages requested since the last decision.
    undecided: u64,
    /// For each pair of shadows, the sum over the requested sequences of the squared difference of
    /// their hits. Decays like the hits.
    apart: [[f64; CANDIDATES_MAX]; CANDIDATES_MAX],
}

impl Adaptive {
    pub(super) fn new() -> Self {
        Self::with_chunk(CHUNK_UNITS)
    }

    /// A policy of an empty store. Each victim is the end of a piece of a run: as many units as are
    /// still to be freed, rounded up to a multiple of `chunk_units` and then to whole pages; or the
    /// whole piece, if fewer than `chunk_units` or fewer than the requested units would remain.
    pub(super) fn with_chunk(chunk_units: u32) -> Self {
        Self {
            tree: Tree::new(CANDIDATES[0](), chunk_units),
            shadows: CANDIDATES.iter().map(|make| Shadow::new(make())).collect(),
            sample: Sample::new(),
            followed: 0,
            switches: 0,
            undecided: 0,
            apart: [[0.0; CANDIDATES_MAX]; CANDIDATES_MAX],
        }
    }

    /// Halves the sample until the shadows fit their maximum memory.
    fn bound_memory(&mut self) {
        let most = (self.tree.pages() * INDEX_BYTES_PER_PAGE / MEMORY_PART).max(MEMORY_FLOOR);
        let pages = most / (CANDIDATES.len() as u64 * SHADOW_BYTES_PER_PAGE);
        while self.shadows.iter().any(|shadow| shadow.pages() > pages) {
            self.sample.halve();
            self.shadows.iter_mut().for_each(|shadow| shadow.remove_unsampled(&self.sample));
        }
    }

    /// Switches to the best candidate if it is significantly better than the followed candidate
    /// (see [`MARGIN`]) and no earlier switch is in progress.
    fn decide(&mut self) {
        if self.tree.is_moving() {
            return;
        }
        let score = |at: usize| self.shadows[at].recent_hits();
        let mut best = self.followed;
        for at in 0..self.shadows.len() {
            if score(at) > score(best) {
                best = at;
            }
        }
        let lead = score(best) - score(self.followed);
        let requested = self.shadows[best].recent_requested();
        if best != self.followed
            && lead > MARGIN * requested + SIGMAS * self.apart[best][self.followed].sqrt()
        {
            self.tree.follow(CANDIDATES[best]());
            self.followed = best;
            self.switches += 1;
        }
    }
}

impl Eviction for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn followed(&self) -> &'static str {
        self.shadows[self.followed].name()
    }

    fn admit(&mut self, resident: &Resident) {
        self.tree.admit(resident);
    }

    fn link(&mut self, run: RunId, parent: RunId, page: u32) {
        self.tree.link(run, parent, page);
    }

    fn hit(&mut self, path: &[Used]) {
        self.tree.hit(path);
    }

    fn demanded(&mut self, _: Demand, after: Option<u64>, pages: &mut dyn Iterator<Item = u64>) {
        self.sample.take(after, pages);
        let keys = self.sample.keys();
        if keys.is_empty() {
            self.sample.note_end(&[]);
            return;
        }
        self.undecided += keys.len() as u64;
        let prefix = self.sample.prefix();
        let window = WINDOW * (self.tree.pages() / self.sample.rate()).max(256) as f64;
        let mut alive = [false; CANDIDATES_MAX];
        let kept = (1.0 - keys.len() as f64 / window).max(0.0);
        let mut hits = [0.0; CANDIDATES_MAX];
        for (at, shadow) in self.shadows.iter_mut().enumerate() {
            let had = shadow.demand(prefix.last, prefix.alive[at], keys, kept);
            alive[at] = had == keys.len() && prefix.alive[at];
            hits[at] = had as f64;
        }
        for (row, ours) in self.apart.iter_mut().zip(hits) {
            for (sum, theirs) in row.iter_mut().zip(hits) {
                *sum = *sum * kept + (ours - theirs) * (ours - theirs);
            }
        }
        self.sample.note_end(&alive);
        self.bound_memory();
        if self.undecided >= DECIDE_EVERY {
            self.undecided = 0;
            self.decide();
        }
    }

    fn measured(&self) -> EvictionStats {
        let shadows = self.shadows.iter().enumerate();
        let shadows = shadows.map(|(at, shadow)| ShadowStats {
            name: shadow.name().to_owned(),
            requested: shadow.requested(),
            hits: shadow.hits(),
            followed: at == self.followed,
        });
        EvictionStats {
            policy: self.name().to_owned(),
            following: self.shadows[self.followed].name().to_owned(),
            switches: self.switches,
            shadow_bytes: self.shadows.iter().map(Shadow::memory_bytes).sum::<usize>() as u64
                + self.sample.memory_bytes() as u64,
            sample_rate: self.sample.rate(),
            shadows: shadows.collect(),
        }
    }

    fn shrink(&mut self, run: RunId, pages: u32) {
        self.tree.shrink(run, pages);
    }

    fn remove(&mut self, run: RunId) {
        self.tree.remove(run);
    }

    fn victims(&mut self, units: u64, context: &dyn EvictionContext) -> Vec<Victim> {
        let victims = self.tree.victims(units, context);
        let pages = self.tree.pages_when_full() / self.sample.rate();
        self.shadows.iter_mut().for_each(|shadow| shadow.set_capacity(pages.max(1)));
        victims
    }

    fn len(&self) -> usize {
        self.tree.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn followed_policy_is_the_candidate_that_the_statistics_name() {
        for (at, make) in CANDIDATES.iter().enumerate() {
            let policy = Adaptive { followed: at, ..Adaptive::new() };
            assert_eq!(policy.followed(), policy.measured().following);
            assert_eq!(policy.followed(), make().name());
        }
    }
}
