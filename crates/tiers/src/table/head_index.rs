//! Index of the page table's nodes by the hash of their first page, the head. A node is a row of
//! consecutive pages in the same state.
//!
//! The index uses open addressing over 8-byte words: a lookup mostly reads one cache line of the
//! index and one of the node. The index grows into a second array, to which every insertion moves a
//! few entries, so that no single insertion moves them all.

use super::node::Id;
use ritornello_format::PageHash;

/// Number of slots of the index's first array.
const INITIAL_SLOTS: usize = 64;
/// Slots of the old array that each insertion empties. The index grows again when the new array is
/// half full; the old array, which has half the length, is empty long before that.
const MOVES_PER_INSERTION: usize = 8;
/// Values of slots without an entry: a search ends at `EMPTY`, and continues past `TOMBSTONE`.
const EMPTY: u64 = 0;
const TOMBSTONE: u64 = u32::MAX as u64;

#[derive(Debug, Default)]
pub(super) struct HeadIndex {
    now: Slots,
    /// The array that `now` replaces, and the number of its leading slots from which the entries
    /// were moved to `now`.
    old: Slots,
    moved: usize,
    len: usize,
}

/// An array of slots, whose length is a power of two. A used slot holds the low 32 bits of the hash
/// of a node's first page, and the node's id plus one. A search starts at the slot that the 32 bits
/// select.
#[derive(Debug, Default)]
struct Slots(Box<[u64]>);

fn word(head: PageHash, id: Id) -> u64 {
    head.low() << 32 | (u64::from(id.0) + 1)
}

fn id_of(word: u64) -> Option<Id> {
    (word != EMPTY && word != TOMBSTONE).then(|| Id((word as u32).wrapping_sub(1)))
}

impl Slots {
    fn place(&self, half: u64) -> usize {
        half as usize & self.0.len().wrapping_sub(1)
    }

    /// The slot that holds the low 32 bits of `head` and a node for which `has` returns true.
    #[inline]
    fn find(&self, head: PageHash, has: impl Fn(Id) -> bool) -> Option<usize> {
        let half = head.low() & u64::from(u32::MAX);
        let mut at = self.place(half);
        loop {
            let word = *self.0.get(at)?;
            if word == EMPTY {
                return None;
            }
            if word >> 32 == half && id_of(word).is_some_and(&has) {
                return Some(at);
            }
            at = self.place(at as u64 + 1);
        }
    }

    fn add(&mut self, word: u64) {
        let mut at = self.place(word >> 32);
        while id_of(self.0[at]).is_some() {
            at = self.place(at as u64 + 1);
        }
        self.0[at] = word;
    }

    /// Removes the entry at `gap`. A later entry whose search passes the gap is moved into the gap,
    /// and the slot that it leaves is the next gap. The last gap becomes empty.
    fn remove_at(&mut self, mut gap: usize) {
        let mut at = gap;
        loop {
            at = self.place(at as u64 + 1);
            let word = self.0[at];
            if word == EMPTY {
                break;
            }
            let far = |from: usize| self.place(at.wrapping_sub(from) as u64);
            if far(self.place(word >> 32)) >= far(gap) {
                self.0[gap] = word;
                gap = at;
            }
        }
        self.0[gap] = EMPTY;
    }
}

impl HeadIndex {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The node whose first page is `head`. `has` returns whether a node's first page is `head`.
    #[inline]
    pub(super) fn get(&self, head: PageHash, has: impl Fn(Id) -> bool) -> Option<Id> {
        let found = self.now.find(head, &has).map(|at| self.now.0[at]);
        found.or_else(|| self.old.find(head, &has).map(|at| self.old.0[at])).and_then(id_of)
    }

    /// Adds a node that is not in the index.
    pub(super) fn add(&mut self, head: PageHash, id: Id) {
        if 2 * (self.len + 1) > self.now.0.len() {
            // `old` is already empty, because each insertion since the last growth emptied
            // `MOVES_PER_INSERTION` of its slots.
            let size = (2 * self.now.0.len()).max(INITIAL_SLOTS);
            self.old = std::mem::replace(&mut self.now, Slots(vec![EMPTY; size].into()));
            self.moved = 0;
        }
        self.now.add(word(head, id));
        self.len += 1;
        self.move_entries();
    }

    /// Removes node `id`, which starts with `head`.
    pub(super) fn remove(&mut self, head: PageHash, id: Id) {
        let mine = |other: Id| other == id;
        if let Some(at) = self.now.find(head, mine) {
            self.now.remove_at(at);
        } else if let Some(at) = self.old.find(head, mine) {
            self.old.0[at] = TOMBSTONE;
        } else {
            return;
        }
        self.len -= 1;
    }

    fn move_entries(&mut self) {
        let end = (self.moved + MOVES_PER_INSERTION).min(self.old.0.len());
        for at in self.moved..end {
            let word = self.old.0[at];
            if id_of(word).is_some() {
                self.now.add(word);
                self.old.0[at] = TOMBSTONE;
            }
        }
        self.moved = end;
        if end == self.old.0.len() && end > 0 {
            (self.old, self.moved) = (Slots::default(), 0);
        }
    }

    #[cfg(debug_assertions)]
    pub(super) fn iter(&self) -> impl Iterator<Item = Id> + '_ {
        self.now.0.iter().chain(&self.old.0).filter_map(|word| id_of(*word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Returns the hash of a page for the test. Many of these hashes select the same slot, also the
    /// last slot of the array.
    fn head(number: u64) -> PageHash {
        let low = if number.is_multiple_of(3) {
            u64::MAX - number % 7
        } else {
            number.wrapping_mul(0x9e37_79b9)
        };
        PageHash(((u128::from(number) << 64) | u128::from(low)).to_le_bytes())
    }

    #[test]
    fn index_agrees_with_a_hash_map() {
        let (mut heads, mut map) = (HeadIndex::default(), HashMap::new());
        let mut random = 1_u64;
        for step in 0..60_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (random >> 33) % 6000;
            // The first 40,000 steps insert more than they remove, the later steps remove more.
            let adds = (random >> 20) % 4 < if step < 40_000 { 3 } else { 1 };
            let id = Id(number as u32);
            if adds && map.insert(number, id).is_none() {
                heads.add(head(number), id);
            } else if !adds && map.remove(&number).is_some() {
                heads.remove(head(number), id);
            }
            let number = (random >> 45) % 6000;
            assert_eq!(
                heads.get(head(number), |id| u64::from(id.0) == number),
                map.get(&number).copied()
            );
            assert_eq!(heads.len(), map.len());
        }
        for number in 0..6000 {
            assert_eq!(
                heads.get(head(number), |id| u64::from(id.0) == number),
                map.get(&number).copied()
            );
        }
    }

    #[test]
    fn each_insertion_moves_few_entries() {
        let mut heads = HeadIndex::default();
        for number in 0..100_000_u64 {
            let before = heads.moved;
            heads.add(head(3 * number + 1), Id(number as u32));
            assert!(heads.moved <= before + MOVES_PER_INSERTION || heads.old.0.is_empty());
            assert!(
                heads.old.0.len() <= 4 * heads.len(),
                "the old array must have at most four slots per entry"
            );
        }
    }
}
