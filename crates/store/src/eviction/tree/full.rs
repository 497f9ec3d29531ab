//! How much there is when the store is full.

/// What a full store holds: the most of late.
///
/// Whenever space is wanted the store is full, but for what a put has had evicted and has not
/// filled yet. That gap must not count: a policy would take the store for smaller by as much as a
/// request is long.
#[derive(Debug, Default)]
pub(super) struct Full {
    /// The most in this period, and in that before.
    most: [Most; 2],
    /// How often it was looked at in this period.
    looks: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Most {
    units: u64,
    pages: u64,
    pieces: usize,
}

/// Looks to a period. A store that was made smaller is found out after two at most.
const PERIOD: u32 = 4096;
/// Units (8 MiB) for each of which a policy remembers a key, even if there are few pieces.
const UNITS_PER_KEY: u64 = 2048;

impl Full {
    /// Space is wanted while there is so much.
    pub(super) fn observe(&mut self, units: u64, pages: u64, pieces: usize) {
        if self.looks == PERIOD {
            (self.most, self.looks) = ([Most::default(), self.most[0]], 0);
        }
        self.looks += 1;
        let most = &mut self.most[0];
        most.units = most.units.max(units);
        most.pages = most.pages.max(pages);
        most.pieces = most.pieces.max(pieces);
    }

    pub(super) fn units(&self) -> u64 {
        self.most[0].units.max(self.most[1].units)
    }

    pub(super) fn pages(&self) -> u64 {
        self.most[0].pages.max(self.most[1].pages)
    }

    /// Keys of evicted pages that a policy may remember: one for each piece.
    pub(super) fn keys(&self) -> usize {
        let by_size = usize::try_from(self.units() / UNITS_PER_KEY).unwrap_or(usize::MAX);
        self.most[0].pieces.max(self.most[1].pieces).max(by_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_do_not_count_and_a_smaller_store_is_found_out() {
        let mut full = Full::default();
        full.observe(100, 10, 3);
        full.observe(70, 7, 2);
        assert_eq!((full.units(), full.pages(), full.keys()), (100, 10, 3));
        (0..2 * PERIOD).for_each(|_| full.observe(70, 7, 2));
        assert_eq!((full.units(), full.pages(), full.keys()), (70, 7, 2));
    }
}
