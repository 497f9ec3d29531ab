//! The clock of eviction, which numbers the uses of pages in their order.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts uses. Ticks are persisted with the runs, so that eviction keeps its order across
/// restarts.
#[derive(Debug)]
pub struct RecencyClock(AtomicU64);

impl RecencyClock {
    /// Creates a clock whose first tick is later than `last`, the latest tick in the index.
    #[must_use]
    pub fn starting_after(last: Option<u64>) -> Self {
        Self(AtomicU64::new(last.unwrap_or(0)))
    }

    /// Returns the next tick. Ticks are unique and never zero.
    pub fn tick(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// The latest tick.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_continue_after_restart() {
        assert_eq!(RecencyClock::starting_after(None).tick(), 1);
        let clock = RecencyClock::starting_after(Some(7));
        assert_eq!((clock.tick(), clock.tick(), clock.now()), (8, 9, 9));
    }
}
