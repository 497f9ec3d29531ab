//! Histograms of the durations of calls.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds in microseconds of the buckets of the durations of puts and gets, of a store and of
/// a remote. Longer calls are in no bucket.
pub const DURATION_BOUNDS: [u64; 11] =
    [100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000];
/// Upper bounds in microseconds of the buckets of the durations of lookups.
pub const LOOKUP_BOUNDS: [u64; 11] =
    [1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 100_000, 1_000_000];

/// Position of the first bucket in [`DurationCounts`].
pub(crate) const FIRST_BUCKET: usize = 2;
/// Number of entries of [`DurationCounts`].
pub const DURATION_COUNTS: usize = FIRST_BUCKET + DURATION_BOUNDS.len();
/// Counts of the durations of calls: the number of calls, the sum of their durations in
/// microseconds, and for each of [`DURATION_BOUNDS`] the number of calls in its bucket and in no
/// lower bucket.
pub type DurationCounts = [u64; DURATION_COUNTS];

/// `elapsed` in whole microseconds.
pub(crate) fn micros(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
}

/// The position in `bounds` of the lowest bucket that holds a call of the duration `elapsed`;
/// `None` if the call is longer than all bounds.
pub(crate) fn bucket(bounds: [u64; 11], elapsed: Duration) -> Option<usize> {
    let is_longer = |bound: &u64| Duration::from_micros(*bound) < elapsed;
    Some(bounds.partition_point(is_longer)).filter(|at| *at < bounds.len())
}

/// The counters of [`DurationCounts`]. Any thread may add a call, without a lock.
#[derive(Debug, Default)]
pub struct DurationCounters([AtomicU64; DURATION_COUNTS]);

impl DurationCounters {
    /// Adds a call.
    pub fn add(&self, elapsed: Duration) {
        let [calls, sum, buckets @ ..] = &self.0;
        calls.fetch_add(1, Relaxed);
        sum.fetch_add(micros(elapsed), Relaxed);
        if let Some(at) = bucket(DURATION_BOUNDS, elapsed) {
            buckets[at].fetch_add(1, Relaxed);
        }
    }

    /// Returns the counts. A concurrent [`add`](Self::add) may be included in only some of them.
    #[must_use]
    pub fn counts(&self) -> DurationCounts {
        self.0.each_ref().map(|count| count.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_is_in_the_bucket_of_its_duration() {
        let counters = DurationCounters::default();
        assert_eq!(counters.counts(), [0; DURATION_COUNTS]);
        for micros in [0, 100, 101, 300, 2_999_999, 10_000_000, 10_000_001] {
            counters.add(Duration::from_micros(micros));
        }
        counters.add(Duration::from_nanos(100_001));
        let [calls, sum, buckets @ ..] = counters.counts();
        assert_eq!((calls, sum), (8, 23_000_601));
        assert_eq!(buckets, [2, 3, 0, 0, 0, 0, 0, 0, 0, 1, 1], "10.000001 s is in no bucket");
    }
}
