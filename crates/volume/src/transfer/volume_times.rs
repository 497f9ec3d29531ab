//! Measures each volume in a transfer with lanes that move bytes of several volumes: the time of
//! such a lane says nothing about one volume.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The bytes that one transfer moved from or to each volume, and the time for which it kept the
/// volume busy. All lanes of the transfer share these measures, because several lanes may use a
/// volume at the same time.
#[derive(Debug, Default)]
pub(super) struct VolumeTimes(Mutex<BTreeMap<u8, VolumeTime>>);

#[derive(Debug, Default)]
struct VolumeTime {
    /// Bytes of the completed operations.
    bytes: u64,
    /// Time with at least one operation in flight, without the time since `busy_since`.
    busy: Duration,
    /// Number of operations in flight.
    in_flight: usize,
    /// Since when operations have been in flight; `None` while `in_flight` is zero.
    busy_since: Option<Instant>,
}

impl VolumeTimes {
    /// Records that an operation on `volume` is about to be submitted.
    pub(super) fn begin(&self, volume: u8, now: Instant) {
        let mut volumes = self.0.lock();
        let volume = volumes.entry(volume).or_default();
        volume.in_flight += 1;
        volume.busy_since.get_or_insert(now);
    }

    /// Records that an operation of `bytes` on `volume` has completed.
    pub(super) fn end(&self, volume: u8, bytes: u64, now: Instant) {
        let mut volumes = self.0.lock();
        let volume = volumes.entry(volume).or_default();
        volume.bytes += bytes;
        volume.in_flight = volume.in_flight.saturating_sub(1);
        if volume.in_flight == 0
            && let Some(since) = volume.busy_since.take()
        {
            volume.busy += now.saturating_duration_since(since);
        }
    }

    /// Returns the number of each volume, its bytes, and its busy time. No operation is in flight.
    pub(super) fn measured(&self) -> Vec<(u8, u64, Duration)> {
        let volumes = self.0.lock();
        volumes.iter().map(|(number, volume)| (*number, volume.bytes, volume.busy)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_counts_overlaps_once_and_leaves_out_pauses() {
        let (times, start) = (VolumeTimes::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        times.begin(3, at(0));
        times.begin(0, at(1));
        times.begin(3, at(1));
        times.end(3, 10, at(2));
        times.end(3, 20, at(4));
        times.end(0, 5, at(9));
        times.begin(3, at(10));
        times.end(3, 30, at(11));
        let seconds = Duration::from_secs;
        assert_eq!(times.measured(), [(0, 5, seconds(8)), (3, 60, seconds(5))]);
    }

    /// Lanes read the clock before they take the lock, so times may arrive in another order.
    #[test]
    fn times_that_arrive_out_of_order_add_nothing() {
        let (times, start) = (VolumeTimes::default(), Instant::now());
        times.begin(0, start + Duration::from_secs(1));
        times.end(0, 5, start);
        assert_eq!(times.measured(), [(0, 5, Duration::ZERO)]);
    }
}
