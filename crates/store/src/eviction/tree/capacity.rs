//! Estimates how much a full store holds.

/// Estimates the contents of a full store by their recent maximum.
///
/// During most evictions the store is full, except for space that earlier evictions freed for a put
/// and that the put has not filled yet. The contents at a single eviction would therefore
/// underestimate the capacity by up to the length of a put.
#[derive(Debug, Default)]
pub(super) struct CapacityEstimate {
    /// Maximum contents of the store in the current period and in the previous period.
    peak: [Peak; 2],
    observations: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    units: u64,
    pages: u64,
    pieces: usize,
}

/// Evictions per period. After a store is made smaller, the estimate follows within two periods.
const PERIOD: u32 = 4096;
/// Units (8 MiB) of the contents per key of [`CapacityEstimate::keys`], if there are few pieces.
const UNITS_PER_KEY: u64 = 2048;

impl CapacityEstimate {
    /// Records the contents of the store when an eviction begins.
    pub(super) fn observe(&mut self, units: u64, pages: u64, pieces: usize) {
        if self.observations == PERIOD {
            (self.peak, self.observations) = ([Peak::default(), self.peak[0]], 0);
        }
        self.observations += 1;
        let peak = &mut self.peak[0];
        peak.units = peak.units.max(units);
        peak.pages = peak.pages.max(pages);
        peak.pieces = peak.pieces.max(pieces);
    }

    pub(super) fn units(&self) -> u64 {
        self.peak[0].units.max(self.peak[1].units)
    }

    pub(super) fn pages(&self) -> u64 {
        self.peak[0].pages.max(self.peak[1].pages)
    }

    /// The number `keys` of `EvictionPolicy::set_capacity`, which bounds the evicted keys that a
    /// policy remembers: the number of pieces or, if larger, the units of the contents divided by
    /// [`UNITS_PER_KEY`].
    pub(super) fn keys(&self) -> usize {
        let by_size = usize::try_from(self.units() / UNITS_PER_KEY).unwrap_or(usize::MAX);
        self.peak[0].pieces.max(self.peak[1].pieces).max(by_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_ignores_a_brief_decrease_and_follows_a_lasting_one() {
        let mut capacity = CapacityEstimate::default();
        capacity.observe(100, 10, 3);
        capacity.observe(70, 7, 2);
        assert_eq!((capacity.units(), capacity.pages(), capacity.keys()), (100, 10, 3));
        (0..2 * PERIOD).for_each(|_| capacity.observe(70, 7, 2));
        assert_eq!((capacity.units(), capacity.pages(), capacity.keys()), (70, 7, 2));
    }
}
