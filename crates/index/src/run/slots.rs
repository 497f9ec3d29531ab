//! The slot table: from a page's hash to the page's run and the page's number in the run, in 8
//! bytes per page.
//!
//! A slot is `tag (20 bits) | run (28) | page (16)`. Twelve bits of the hash select one of 4,096
//! shards, twenty others are the tag. A shard is a sorted linear-probing table: a slot's home
//! position is its tag scaled to the shard's capacity. Slots are therefore in the order of their
//! tags, a search ends at the first larger tag, and growing copies the slots in one pass without
//! their hashes. Source: Amble and Knuth, "Ordered hash tables", 1974.
//!
//! A slot that matches agrees in 32 bits of the hash; the caller compares the other 96 bits. A
//! change adds or removes one slot, which moves the slots after it up to the next free position,
//! and may rebuild one shard, a 4,096th of the table.

use ritornello_format::PageHash;

/// The number of a run's record in the table of runs. Zero means no run.
pub(crate) type Number = u32;

const TAG_BITS: u32 = 20;
const RUN_BITS: u32 = 28;
const PAGE_BITS: u32 = 16;
pub(crate) const NUMBER_MAX: Number = (1 << RUN_BITS) - 1;

const SHARD_BITS: u32 = if cfg!(feature = "loom") { 1 } else { 12 };
/// Minimum capacity of a shard that is not empty.
const CAPACITY_MIN: usize = 16;

/// Two slots that may belong to the same page.
pub(crate) type Pair = [(Number, u16); 2];

/// Minimum pages of a table that several threads build.
const IN_PARALLEL: usize = 1 << 16;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |threads| threads.get().min(8))
}

/// Fills shards from their slots, and returns the pairs of slots with equal tags.
fn lay_out(work: &mut [(&mut Shard, &mut [u64])]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (shard, slots) in work {
        slots.sort_unstable();
        for (at, slot) in slots.iter().enumerate() {
            let same = slots[at + 1..].iter().take_while(|other| tag_of(**other) == tag_of(*slot));
            pairs.extend(same.map(|other| [unpack(*slot), unpack(*other)]));
        }
        if !slots.is_empty() {
            // Leave room for insertions, so that the shard does not grow soon.
            let capacity = (slots.len() + slots.len().isqrt()) * 5 / 4;
            shard.live = slots.len() as u32;
            shard.fill(slots, capacity.next_multiple_of(8).max(CAPACITY_MIN));
        }
    }
    pairs
}

#[derive(Debug)]
pub(crate) struct Slots {
    shards: Box<[Shard]>,
    bytes: usize,
}

/// A shard of the table. `slots` is empty, or has `capacity` home positions and `spill(capacity)`
/// further positions, so that a search never wraps around. Zero marks a free slot, because no run
/// has number zero. Between a slot and its home position no slot is free.
#[derive(Debug, Default)]
struct Shard {
    slots: Box<[u64]>,
    capacity: u32,
    live: u32,
}

const fn spill(capacity: usize) -> usize {
    8 + capacity / 32
}

const fn pack(tag: u32, run: Number, page: u16) -> u64 {
    (tag as u64) << (RUN_BITS + PAGE_BITS) | (run as u64) << PAGE_BITS | page as u64
}

const fn tag_of(slot: u64) -> u32 {
    (slot >> (RUN_BITS + PAGE_BITS)) as u32
}

const fn unpack(slot: u64) -> (Number, u16) {
    ((slot >> PAGE_BITS) as u32 & NUMBER_MAX, slot as u16)
}

impl Slots {
    pub(crate) fn new() -> Self {
        let shards = 1 << SHARD_BITS;
        Self { shards: (0..shards).map(|_| Shard::default()).collect(), bytes: 0 }
    }

    /// Builds a table of the pages that `each` visits; `each` is called twice and visits the same
    /// pages. The second result lists the pairs of slots that may be the same page, because 32 bits
    /// of their hashes are equal.
    ///
    /// Inserting slot by slot would wait for memory at every page. The slots are therefore
    /// distributed to their shards first. Each shard is then sorted and laid out within the
    /// processor's caches, by several threads for large tables.
    pub(crate) fn build(each: impl Fn(&mut dyn FnMut(PageHash, Number, u16))) -> (Self, Vec<Pair>) {
        let mut table = Self::new();
        let mut ends = vec![0usize; table.shards.len()];
        each(&mut |hash, _, _| ends[Self::shard(hash)] += 1);
        let mut count = 0;
        for end in &mut ends {
            count += std::mem::replace(end, count);
        }
        // During the distribution, `ends` holds the position of each shard's next slot; afterwards
        // it holds the end of each shard.
        let mut distributed = vec![0u64; count];
        each(&mut |hash, run, page| {
            let end = &mut ends[Self::shard(hash)];
            distributed[*end] = pack(Self::tag(hash), run, page);
            *end += 1;
        });
        let (mut rest, mut work) = (distributed.as_mut_slice(), Vec::with_capacity(ends.len()));
        let mut begin = 0;
        for (shard, end) in table.shards.iter_mut().zip(ends) {
            let (slots, more) = std::mem::take(&mut rest).split_at_mut(end - begin);
            work.push((shard, slots));
            (rest, begin) = (more, end);
        }
        let threads = if count < IN_PARALLEL { 1 } else { threads() };
        let parts = work.chunks_mut(1usize.max((1 << SHARD_BITS) / threads));
        let pairs = if threads == 1 {
            parts.map(lay_out).collect::<Vec<_>>()
        } else {
            std::thread::scope(|scope| {
                let started: Vec<_> = parts.map(|part| scope.spawn(|| lay_out(part))).collect();
                // The threads do not panic; a panic would be passed on here.
                let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                };
                started.into_iter().map(join).collect()
            })
        };
        table.bytes = table.shards.iter().map(|shard| shard.slots.len() * 8).sum();
        (table, pairs.concat())
    }

    #[inline]
    fn shard(hash: PageHash) -> usize {
        (hash.low() >> (64 - SHARD_BITS)) as usize
    }

    #[inline]
    fn tag(hash: PageHash) -> u32 {
        (hash.high() >> (64 - TAG_BITS)) as u32
    }

    /// The run and page number of each slot that may belong to this hash. A slot of another hash is
    /// returned only if 32 bits of both hashes are equal.
    #[inline]
    pub(crate) fn candidates(&self, hash: PageHash) -> impl Iterator<Item = (Number, u16)> + '_ {
        let tag = Self::tag(hash);
        let shard = &self.shards[Self::shard(hash)];
        let tail = shard.slots.get(shard.home(tag)..).unwrap_or_default();
        tail.iter()
            .take_while(move |slot| **slot != 0 && tag_of(**slot) <= tag)
            .filter(move |slot| tag_of(**slot) == tag)
            .map(|slot| unpack(*slot))
    }

    /// Reads the cache line at which [`Slots::candidates`] will begin, so that several lookups can
    /// wait for memory at the same time. The returned value has no meaning: returning it keeps the
    /// compiler from removing the read.
    #[inline]
    pub(crate) fn touch(&self, hash: PageHash) -> u64 {
        let shard = &self.shards[Self::shard(hash)];
        shard.slots.get(shard.home(Self::tag(hash))).copied().unwrap_or_default()
    }

    /// Adds a slot, unless `same` returns true for one of the candidates. Returns whether the slot
    /// was added.
    pub(crate) fn insert(
        &mut self,
        hash: PageHash,
        run: Number,
        page: u16,
        same: impl FnMut((Number, u16)) -> bool,
    ) -> bool {
        if self.candidates(hash).any(same) {
            return false;
        }
        let shard = &mut self.shards[Self::shard(hash)];
        let before = shard.slots.len();
        shard.insert(pack(Self::tag(hash), run, page));
        self.bytes = self.bytes + shard.slots.len() * 8 - before * 8;
        true
    }

    /// Removes the slot of page `page` of `run`, if it exists.
    pub(crate) fn remove(&mut self, hash: PageHash, run: Number, page: u16) {
        let shard = &mut self.shards[Self::shard(hash)];
        let before = shard.slots.len();
        shard.remove(pack(Self::tag(hash), run, page));
        self.bytes = self.bytes + shard.slots.len() * 8 - before * 8;
    }

    /// Estimates the bytes that slots for `pages` would add by growing full shards: 9 bytes for
    /// each new home position, which is a slot of 8 bytes and a share of the further positions. A
    /// full shard counts once for each page of `pages` that belongs to it.
    pub(crate) fn growth(&self, pages: &[PageHash]) -> usize {
        let full = |hash: &&PageHash| self.shards[Self::shard(**hash)].is_full();
        let shards = pages.iter().filter(full).map(|hash| &self.shards[Self::shard(*hash)]);
        shards.map(|shard| (shard.larger() - shard.capacity as usize) * 9).sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes + self.shards.len() * size_of::<Shard>()
    }
}

impl Shard {
    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * u64::from(self.capacity)) >> TAG_BITS) as usize
    }

    /// Whether the shard grows with the next slot.
    fn is_full(&self) -> bool {
        (self.live as usize + 1) * 5 > self.capacity as usize * 4
    }

    /// Capacity of the next larger shard.
    fn larger(&self) -> usize {
        (self.capacity as usize * 5 / 4).next_multiple_of(8).max(CAPACITY_MIN)
    }

    fn insert(&mut self, slot: u64) {
        if self.is_full() {
            self.rebuild(self.larger());
        }
        while !self.try_insert(slot) {
            self.rebuild((self.capacity as usize * 5 / 4).next_multiple_of(8));
        }
    }

    /// Inserts a slot. Returns `false` if no position at or after the slot's home position is free.
    fn try_insert(&mut self, slot: u64) -> bool {
        let tail = &mut self.slots
            [((u64::from(tag_of(slot)) * u64::from(self.capacity)) >> TAG_BITS) as usize..];
        let Some(free) = tail.iter().position(|other| *other == 0) else { return false };
        let goes_before = |other: &u64| tag_of(*other) > tag_of(slot);
        let at = tail[..free].iter().position(goes_before).unwrap_or(free);
        tail.copy_within(at..free, at + 1);
        tail[at] = slot;
        self.live += 1;
        true
    }

    fn remove(&mut self, slot: u64) {
        let tag = tag_of(slot);
        let mut at = self.home(tag);
        while self
            .slots
            .get(at)
            .is_some_and(|other| *other != slot && *other != 0 && tag_of(*other) <= tag)
        {
            at += 1;
        }
        if self.slots.get(at) != Some(&slot) {
            return;
        }
        // Close the gap: move the following slots back by one position, up to the first free
        // position or the first slot that is in its home position.
        let mut next = at + 1;
        while let Some(&other) = self.slots.get(next) {
            if other == 0 || self.home(tag_of(other)) == next {
                break;
            }
            next += 1;
        }
        self.slots.copy_within(at + 1..next, at);
        self.slots[next - 1] = 0;
        self.live -= 1;
        if self.live == 0 {
            *self = Self::default();
        } else if self.capacity as usize > CAPACITY_MIN && self.live * 4 < self.capacity {
            self.rebuild((self.live as usize * 2).next_multiple_of(8).max(CAPACITY_MIN));
        }
    }

    /// Moves the slots, in order, to a table of `capacity`, or of the next size that holds them.
    fn rebuild(&mut self, capacity: usize) {
        let slots = std::mem::take(&mut self.slots);
        self.fill(&slots, capacity);
    }

    /// Lays out the non-zero entries of `sorted` at `capacity`, or at the next size that holds
    /// them.
    fn fill(&mut self, sorted: &[u64], mut capacity: usize) {
        'larger: loop {
            let mut slots = vec![0u64; capacity + spill(capacity)].into_boxed_slice();
            let mut free = 0;
            for &slot in sorted.iter().filter(|slot| **slot != 0) {
                let home = ((u64::from(tag_of(slot)) * capacity as u64) >> TAG_BITS) as usize;
                let at = home.max(free);
                if at >= slots.len() {
                    capacity = (capacity * 5 / 4).next_multiple_of(8);
                    continue 'larger;
                }
                slots[at] = slot;
                free = at + 1;
            }
            self.slots = slots;
            self.capacity = capacity as u32;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn hash(shard: u64, tag: u64) -> PageHash {
        let low = u128::from(shard << (64 - SHARD_BITS));
        PageHash((u128::from(tag << (64 - TAG_BITS)) << 64 | low).to_le_bytes())
    }

    proptest! {
        #[test]
        fn shard_behaves_as_a_set(
            tags in prop::collection::vec((0u64..40, 1u32..9, any::<bool>()), 1..400),
            spread in prop::sample::select(vec![1u64, 1 << 10, (1 << 20) / 40]),
        ) {
            let mut slots = Slots::new();
            let mut model = BTreeSet::new();
            for (tag, run, add) in tags {
                // Tags near the maximum have the last home positions, after which a shard has only
                // `spill(capacity)` positions.
                let tag = (1 << 20) - 1 - tag * spread;
                if add {
                    let new = slots.insert(hash(1, tag), run, 7, |(other, _)| other == run);
                    prop_assert_eq!(new, model.insert((tag, run)));
                } else {
                    slots.remove(hash(1, tag), run, 7);
                    model.remove(&(tag, run));
                }
            }
            for tag in (0..40).map(|tag| (1 << 20) - 1 - tag * spread) {
                let found: BTreeSet<_> =
                    slots.candidates(hash(1, tag)).map(|(run, _)| (tag, run)).collect();
                let expected: BTreeSet<_> =
                    model.iter().filter(|(other, _)| *other == tag).copied().collect();
                prop_assert_eq!(found, expected);
            }
            for (tag, run) in model {
                slots.remove(hash(1, tag), run, 7);
            }
            prop_assert_eq!(slots.bytes, 0);
        }
    }

    proptest! {
        #[test]
        fn bulk_build_equals_inserting_slot_by_slot(
            pages in prop::collection::btree_set((0u64..3, 0u64..2000, 1u32..9), 0..600),
        ) {
            let each = |visit: &mut dyn FnMut(PageHash, Number, u16)| {
                pages.iter().for_each(|&(shard, tag, run)| visit(hash(shard, tag << 9), run, 7));
            };
            let (built, pairs) = Slots::build(each);
            let mut slots = Slots::new();
            let mut expected = 0;
            for &(shard, tag, run) in &pages {
                expected += slots.candidates(hash(shard, tag << 9)).count();
                slots.insert(hash(shard, tag << 9), run, 7, |_| false);
            }
            prop_assert_eq!(pairs.len(), expected);
            for &(shard, tag, _) in &pages {
                let of = |slots: &Slots| -> BTreeSet<_> {
                    slots.candidates(hash(shard, tag << 9)).collect()
                };
                prop_assert_eq!(of(&built), of(&slots));
            }
            let mut built = built;
            pages.iter().for_each(|&(shard, tag, run)| built.remove(hash(shard, tag << 9), run, 7));
            prop_assert_eq!(built.bytes, 0);
        }
    }

    #[test]
    fn pages_with_equal_tags_are_all_found() {
        let mut slots = Slots::new();
        for run in 1..=3000 {
            assert!(slots.insert(hash(2, (1 << 20) - 1), run, 0, |(other, _)| other == run));
        }
        assert_eq!(slots.candidates(hash(2, (1 << 20) - 1)).count(), 3000);
    }
}
