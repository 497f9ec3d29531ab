//! Keys of evicted pages that a policy remembers.

use std::collections::{HashMap, VecDeque};

/// Keys of evicted pages, oldest first. Bounded in units and in number.
///
/// Invariant: every key in `by_key` is in `queue` with the same number, and `units` is the sum over
/// `by_key`. All further entries of `queue` are obsolete. They are removed when they outnumber the
/// keys in `by_key` by more than [`KEYS_MIN`].
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    by_key: HashMap<u64, Ghost, super::fold::Folding>,
    queue: VecDeque<(u64, u32)>,
    units: u64,
    next: u32,
}

#[derive(Debug)]
struct Ghost {
    units: u32,
    number: u32,
    note: u32,
}

/// Minimum of the limit `keys_max` of [`Ghosts::remember`]: lower limits are raised to it.
const KEYS_MIN: usize = 64;

impl Ghosts {
    /// Sum of the units of the pages whose keys are remembered.
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Adds a key with a note, which [`Ghosts::recall`] returns, then removes the oldest keys while
    /// there are more than `units_max` units or `keys_max` keys (at least [`KEYS_MIN`]).
    pub(super) fn remember(
        &mut self,
        key: u64,
        note: u32,
        units: u64,
        units_max: u64,
        keys_max: usize,
    ) {
        self.recall(key);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        self.next = self.next.wrapping_add(1);
        self.by_key.insert(key, Ghost { units, number: self.next, note });
        self.queue.push_back((key, self.next));
        self.units += u64::from(units);
        if self.queue.len() > 2 * self.by_key.len() + KEYS_MIN {
            let live = |(key, number): &(u64, u32)| {
                self.by_key.get(key).is_some_and(|ghost| ghost.number == *number)
            };
            self.queue.retain(live);
        }
        while self.units > units_max || self.by_key.len() > keys_max.max(KEYS_MIN) {
            let Some((key, number)) = self.queue.pop_front() else { break };
            if self.by_key.get(&key).is_some_and(|ghost| ghost.number == number) {
                self.recall(key);
            }
        }
    }

    /// Removes a key. Returns its note if the key was remembered.
    pub(super) fn recall(&mut self, key: u64) -> Option<u32> {
        let ghost = self.by_key.remove(&key)?;
        self.units -= u64::from(ghost.units);
        Some(ghost.note)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        super::fold::table_bytes(self.by_key.capacity(), size_of::<(u64, Ghost)>())
            + self.queue.capacity() * size_of::<(u64, u32)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remember(ghosts: &mut Ghosts, key: u64, units: u64, units_max: u64, keys_max: usize) {
        ghosts.remember(key, key as u32, units, units_max, keys_max);
    }

    #[test]
    fn ghosts_are_bounded_in_units_and_number() {
        let mut ghosts = Ghosts::default();
        (0..10).for_each(|key| remember(&mut ghosts, key, 10, 50, 1000));
        assert_eq!([4, 5, 5].map(|key| ghosts.recall(key)), [None, Some(5), None]);
        assert_eq!(ghosts.units(), 40);
        (0..1000).for_each(|key| remember(&mut ghosts, key, 1, u64::MAX, 1));
        assert_eq!(ghosts.recall(1000 - KEYS_MIN as u64 - 1), None);
        assert!(ghosts.recall(1000 - KEYS_MIN as u64).is_some());
    }

    #[test]
    fn repeated_key_counts_as_newest() {
        let mut ghosts = Ghosts::default();
        [1, 2, 1, 3].into_iter().for_each(|key| remember(&mut ghosts, key, 1, 2, 1000));
        assert_eq!([1, 2, 3].map(|key| ghosts.recall(key)), [Some(1), None, Some(3)]);
    }
}
