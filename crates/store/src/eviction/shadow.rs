//! A candidate's miniature store, and the sample of pages that all candidates share.

use super::eviction_policy::EvictionPolicy;
use super::tree::Tree;
use super::{EvictionContext, Resident, Used};
use ritornello_index::RunId;

pub(super) const CANDIDATES_MAX: usize = 8;
/// Maximum number of recent sequences whose ends are remembered, so that sequences that continue
/// them are recognised.
const ENDS: usize = 1024;

/// The pages that precede a requested sequence, as the shadow caches know them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Prefix {
    /// The last of these pages that is in the sample.
    pub(super) last: Option<u64>,
    /// Which shadows had all these pages.
    pub(super) alive: [bool; CANDIDATES_MAX],
}

/// The sample: pages whose mixed keys end in `shift` zero bits.
#[derive(Debug)]
pub(super) struct Sample {
    shift: u32,
    /// The sampled pages of the current sequence.
    keys: Vec<u64>,
    /// The pages before the current sequence.
    prefix: Prefix,
    /// The last key of the current sequence; of an empty sequence, the page that it follows.
    end: Option<u64>,
    /// Last keys of recent sequences, by key modulo [`ENDS`], each with the prefix of a sequence
    /// that follows it.
    ends: Vec<(u64, Prefix)>,
}

impl Sample {
    pub(super) fn new() -> Self {
        Self { shift: 0, keys: Vec::new(), prefix: Prefix::default(), end: None, ends: Vec::new() }
    }

    /// Returns `n` if the sample has one page in `n`.
    pub(super) fn rate(&self) -> u64 {
        1 << self.shift
    }

    pub(super) fn halve(&mut self) {
        self.shift += 1;
    }

    /// Whether a page is in the sample. Mixes the key differently from `fold::Fold`, the hasher of
    /// the tables of runs and keys, so that the sampled keys spread over all buckets.
    pub(super) fn has(&self, key: u64) -> bool {
        let mixed = key.wrapping_mul(0xD6E8_FEB8_6659_FD93);
        (mixed ^ (mixed >> 32)) & (self.rate() - 1) == 0
    }

    /// Begins a sequence: `pages`, which follow the page `after`, or no page. If `after` is a page
    /// that is not remembered as the end of a sequence, all shadows count the earlier pages as
    /// missing.
    pub(super) fn take(&mut self, after: Option<u64>, pages: &mut dyn Iterator<Item = u64>) {
        self.prefix = match after {
            None => Prefix { last: None, alive: [true; CANDIDATES_MAX] },
            Some(key) => {
                let known = self.ends.get(key as usize % ENDS).filter(|(end, _)| *end == key);
                known.map_or_else(Prefix::default, |(_, prefix)| *prefix)
            }
        };
        self.keys.clear();
        self.end = after;
        for key in pages {
            self.end = Some(key);
            if self.has(key) {
                self.keys.push(key);
            }
        }
    }

    pub(super) fn keys(&self) -> &[u64] {
        &self.keys
    }

    pub(super) fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// Remembers the end of the current sequence, and which shadows had all its pages. Does nothing
    /// for an empty sequence that follows no page.
    pub(super) fn note_end(&mut self, alive: &[bool]) {
        let Some(end) = self.end else { return };
        let mut prefix = self.prefix;
        prefix.last = self.keys.last().copied().or(prefix.last);
        prefix.alive[..alive.len()].copy_from_slice(alive);
        self.ends.resize(ENDS, (0, Prefix::default()));
        self.ends[end as usize % ENDS] = (end, prefix);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.ends.capacity() * size_of::<(u64, Prefix)>() + self.keys.capacity() * 8
    }
}

/// The sampled pages that the store would hold if it followed one candidate policy. Each page is a
/// run whose id is the page's key.
#[derive(Debug)]
pub(super) struct Shadow {
    name: &'static str,
    tree: Tree,
    capacity: u64,
    requested: u64,
    hits: u64,
    recent_requested: f64,
    recent_hits: f64,
    path: Vec<Used>,
}

impl Shadow {
    pub(super) fn new(policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            name: policy.name(),
            tree: Tree::new(policy, 1),
            capacity: u64::MAX,
            requested: 0,
            hits: 0,
            recent_requested: 0.0,
            recent_hits: 0.0,
            path: Vec::new(),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn requested(&self) -> u64 {
        self.requested
    }

    pub(super) fn hits(&self) -> u64 {
        self.hits
    }

    pub(super) fn recent_requested(&self) -> f64 {
        self.recent_requested
    }

    pub(super) fn recent_hits(&self) -> f64 {
        self.recent_hits
    }

    pub(super) fn pages(&self) -> u64 {
        self.tree.pages()
    }

    pub(super) fn set_capacity(&mut self, pages: u64) {
        self.capacity = pages;
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.tree.memory_bytes() + self.path.capacity() * size_of::<Used>()
    }

    /// Multiplies the recent counts by `kept`. Then reads the leading stored pages of the sequence
    /// `keys`, and puts the missing pages. `before` is the last sampled page before the sequence.
    /// `alive` says whether the shadow had all pages before the sequence; if not, no page is a hit.
    /// Returns the number of hits.
    pub(super) fn demand(
        &mut self,
        before: Option<u64>,
        alive: bool,
        keys: &[u64],
        kept: f64,
    ) -> usize {
        let used = |key: u64| Used { run: RunId(key), pages: 1 };
        let there = keys.iter().take_while(|key| self.tree.knows(RunId(**key))).count();
        let hits = if alive { there as u64 } else { 0 };
        self.requested += keys.len() as u64;
        self.hits += hits;
        self.recent_requested = self.recent_requested * kept + keys.len() as f64;
        self.recent_hits = self.recent_hits * kept + hits as f64;
        self.path.clear();
        self.path.extend(keys[..there].iter().map(|key| used(*key)));
        self.tree.hit(&self.path);
        let before = before.filter(|before| self.tree.knows(RunId(*before)));
        let parent = keys[..there].last().copied().or(before);
        if let (Some(first), Some(before)) = (keys[..there].first(), before) {
            self.tree.link(RunId(*first), RunId(before), 0);
        }
        let mut request = 0;
        for key in &keys[there..] {
            // An earlier request, in which the page followed a different page, may have stored the
            // page: remove it, and put it again after its current parent.
            self.tree.remove(RunId(*key));
            request += 1;
        }
        let excess = (self.tree.pages() + request).saturating_sub(self.capacity);
        if excess > 0 {
            self.tree.victims(excess, &Protected(parent));
        }
        // Refuse pages that do not fit, as the store does.
        let room = usize::try_from(self.capacity.saturating_sub(self.tree.pages()));
        let fit = (keys.len() - there).min(room.unwrap_or(usize::MAX));
        let mut parent = parent;
        for &key in &keys[there..there + fit] {
            self.tree.admit(&Resident {
                run: RunId(key),
                key,
                parent: parent.map(|parent| (RunId(parent), 0)),
                pages: 1,
                page_units: 1,
                header_units: 0,
            });
            parent = Some(key);
        }
        if alive { there } else { 0 }
    }

    /// Removes pages that are no longer sampled after the sample was halved. Halves the capacity
    /// and the recent counts as well.
    pub(super) fn remove_unsampled(&mut self, sample: &Sample) {
        let out: Vec<RunId> = self.tree.runs().filter(|run| !sample.has(run.0)).collect();
        out.into_iter().for_each(|run| self.tree.remove(run));
        if self.capacity != u64::MAX {
            self.capacity = (self.capacity / 2).max(1);
        }
        self.recent_requested /= 2.0;
        self.recent_hits /= 2.0;
    }
}

/// Protects the page that new pages are about to follow.
struct Protected(Option<u64>);

impl EvictionContext for Protected {
    fn is_protected(&self, run: RunId) -> bool {
        self.0 == Some(run.0)
    }
    fn page_key(&self, run: RunId, _: u32) -> u64 {
        run.0
    }
}

#[cfg(test)]
mod tests;
