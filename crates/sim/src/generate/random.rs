//! Seeded random numbers, the same on every machine.

use crate::trace::mix64;

/// SplitMix64: see [`mix64`].
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(mix64(seed))
    }

    pub(super) const fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    /// A uniform number from 0 to below 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }
}
