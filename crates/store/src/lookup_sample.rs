//! The choice of the lookups that are timed: reading the clock twice takes a tenth of the time of a
//! lookup in the owner's process.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU32, Ordering};

/// Distance of the positions of two consecutive lookups, modulo 2^32. The multiples of this number
/// (2^32 over the golden ratio) are spread evenly, and not periodic in the number of lookups: a
/// caller that alternates two kinds of lookups gets both timed.
const STEP: u32 = 0x9E37_79B9;

/// Chooses one of 16 lookups. The position of the first lookup is random, so each lookup has the
/// same chance to be timed, also the first, which is slower than later lookups: with a fixed start,
/// a process of few lookups would report mainly its first. A timed lookup is among the first 21.
#[derive(Debug)]
pub(crate) struct LookupSample(AtomicU32);

impl LookupSample {
    pub(crate) fn new() -> Self {
        // Each `RandomState` has other keys, which the standard library derives from random bytes
        // of the kernel.
        let [a, b, c, d, ..] = RandomState::new().build_hasher().finish().to_le_bytes();
        Self::starting_at(u32::from_le_bytes([a, b, c, d]))
    }

    fn starting_at(position: u32) -> Self {
        Self(AtomicU32::new(position))
    }

    /// Counts a lookup. Returns whether it is timed: the lookups at one of 16 positions are.
    pub(crate) fn next_is_timed(&self) -> bool {
        self.0.fetch_add(STEP, Ordering::Relaxed) >> 28 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_lookup_is_timed_in_one_of_sixteen_stores() {
        // Numbers of the timed lookups of stores whose first positions cover all positions evenly.
        let timed = |part: u32| -> Vec<u32> {
            let sample = LookupSample::starting_at(part << 20);
            (0..1000).filter(|_| sample.next_is_timed()).collect()
        };
        let stores: Vec<Vec<u32>> = (0..4096).map(timed).collect();
        for number in 0..64 {
            let count = stores.iter().filter(|timed| timed.contains(&number)).count();
            assert_eq!(count, 4096 / 16, "lookup {number}");
        }
        for timed in stores {
            assert!(timed[0] < 21 && timed.len().abs_diff(62) <= 2, "{timed:?}");
            for kind in 0..2 {
                assert!(timed.iter().any(|number| number % 2 == kind), "{timed:?}");
            }
        }
    }

    #[test]
    fn stores_begin_at_different_positions() {
        let first = |_| LookupSample::new().0.into_inner();
        let firsts: BTreeSet<u32> = (0..64).map(first).collect();
        assert!(firsts.len() > 32, "{firsts:?}");
    }
}
