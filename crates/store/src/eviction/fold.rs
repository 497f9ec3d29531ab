//! A fast hasher for 64-bit numbers that are consecutive, or that are hashes already.

use std::hash::{BuildHasherDefault, Hasher};

pub(super) type Folding = BuildHasherDefault<Fold>;

/// Hashes a number by one multiplication: the hash is the XOR of the two halves of the 128-bit
/// product. This is enough for run ids, which are consecutive, and for keys, which are hashes.
#[derive(Debug, Default)]
pub(super) struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // The multiplier is 2^64 divided by the golden ratio (Knuth, TAOCP 6.4).
        let product = u128::from(self.0 ^ number) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

/// Approximate memory of a hash table with capacity for `entries` of `entry_bytes` each.
pub(super) fn table_bytes(entries: usize, entry_bytes: usize) -> usize {
    entries * 8 / 7 * (entry_bytes + 1)
}
