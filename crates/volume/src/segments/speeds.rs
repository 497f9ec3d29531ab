//! This process's measurements of its volumes: the speed of each volume, and whether one thread
//! checksums as fast as a volume moves bytes.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Minimum bytes that a transfer moves on a volume to count towards a measurement of the volume: a
/// shorter transfer spends too much of its time waiting for the first operations.
const TRANSFER_BYTES_MIN: u64 = 8 << 20;
/// Minimum bytes of a measurement, which sums consecutive transfers of one volume and direction:
/// other work of the machine disturbs a shorter measurement.
const MEASURED_BYTES_MIN: u64 = 128 << 20;
/// Percentage of a transfer's time for which each lane of the busiest volume computes, on average.
/// A lane computes while it does not wait for I/O; the busiest volume is the volume whose lanes
/// together compute longest. Above this percentage, later transfers use one more lane for each
/// volume.
const BUSY: u64 = 90;
/// Percentage of a transfer's time for which each lane of the busiest volume would compute if the
/// volume had one lane less. Below this percentage, later transfers use one lane less for each
/// volume.
const IDLE: u64 = 70;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    Read,
    Written,
}

/// Measurements of the volumes, by direction.
#[derive(Debug)]
pub(crate) struct Speeds {
    /// Maximum lanes of each volume.
    lanes_max: usize,
    read: Mutex<Direction>,
    written: Mutex<Direction>,
    /// Whether a volume was measured since [`Speeds::take_new`].
    is_new: AtomicBool,
}

#[derive(Debug, Default)]
struct Direction {
    volumes: BTreeMap<u8, VolumeSpeed>,
    /// Lanes of each volume beyond the first.
    more_lanes: usize,
}

/// The speed of a volume, and the measurement in progress.
#[derive(Clone, Copy, Debug, Default)]
struct VolumeSpeed {
    /// Smoothed speed in KiB/s; zero before the first measurement.
    speed: u32,
    bytes: u64,
    micros: u64,
}

impl Speeds {
    /// Returns speeds without measurements. A volume has at most `lanes_max` lanes.
    pub(crate) fn new(lanes_max: usize) -> Self {
        Self {
            lanes_max,
            read: Mutex::default(),
            written: Mutex::default(),
            is_new: AtomicBool::default(),
        }
    }

    fn of(&self, moved: Moved) -> &Mutex<Direction> {
        match moved {
            Moved::Read => &self.read,
            Moved::Written => &self.written,
        }
    }

    /// Number of lanes for each volume.
    pub(crate) fn lanes(&self, moved: Moved) -> usize {
        1 + self.of(moved).lock().more_lanes
    }

    /// Records that a transfer moved `bytes` from or to `volume` in `elapsed`, in one or several
    /// lanes.
    pub(crate) fn moved(&self, moved: Moved, volume: u8, bytes: u64, elapsed: Duration) {
        if bytes < TRANSFER_BYTES_MIN {
            return;
        }
        let mut direction = self.of(moved).lock();
        let volume = direction.volumes.entry(volume).or_default();
        volume.bytes += bytes;
        volume.micros += u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX).max(1);
        if volume.bytes < MEASURED_BYTES_MIN {
            return;
        }
        let speed = (volume.bytes / 1024).saturating_mul(1_000_000) / volume.micros;
        let speed = u32::try_from(speed).unwrap_or(u32::MAX).max(1);
        let smoothed = if volume.speed == 0 { speed } else { volume.speed };
        *volume = VolumeSpeed { speed: smoothed - smoothed / 4 + speed / 4, bytes: 0, micros: 0 };
        drop(direction);
        self.is_new.store(true, Ordering::Release);
    }

    /// Records that the lanes of the busiest volume together computed for `busiest`, in a transfer
    /// that took `elapsed`. If the lanes cannot keep up with this volume, later transfers use one
    /// more lane for each volume, up to `lanes_max`; if fewer lanes suffice, later transfers use
    /// one less.
    pub(crate) fn computed(&self, moved: Moved, elapsed: Duration, busiest: Duration) {
        if elapsed.is_zero() {
            return;
        }
        let percent = u64::try_from(100 * busiest.as_micros() / elapsed.as_micros().max(1));
        let percent = percent.unwrap_or(u64::MAX);
        let mut direction = self.of(moved).lock();
        direction.more_lanes = more_lanes(direction.more_lanes, percent, self.lanes_max);
    }

    /// The speed of the slowest volume that was measured, in bytes per second.
    pub(crate) fn slowest(&self, moved: Moved) -> Option<u64> {
        let direction = self.of(moved).lock();
        let speeds = direction.volumes.values().map(|volume| u64::from(volume.speed) * 1024);
        speeds.filter(|speed| *speed > 0).min()
    }

    /// Returns [`Speeds::get`] if a volume was measured since the last call.
    pub(crate) fn take_new(&self) -> Option<Vec<u32>> {
        self.is_new.swap(false, Ordering::AcqRel).then(|| self.get())
    }

    /// The speeds of the volumes in KiB/s, by volume number; zero for a volume without a
    /// measurement. The speeds are of reads, unless a volume has a measurement of writes only: then
    /// all speeds are of writes.
    fn get(&self) -> Vec<u32> {
        let of = |direction: &Mutex<Direction>| {
            let volumes = &direction.lock().volumes;
            let measured = volumes.iter().filter(|(_, volume)| volume.speed > 0);
            let mut list = Vec::new();
            for (number, volume) in measured {
                list.resize(usize::from(*number), 0);
                list.push(volume.speed);
            }
            list
        };
        let (read, written) = (of(&self.read), of(&self.written));
        let is_measured = |at: usize| read.get(at).is_some_and(|speed| *speed > 0);
        let covers = written.iter().enumerate().all(|(at, speed)| *speed == 0 || is_measured(at));
        if covers { read } else { written }
    }
}

/// The new number of lanes beyond the first, after a transfer in which the `1 + more` lanes of the
/// busiest volume computed for `percent` of the time in total.
fn more_lanes(more: usize, percent: u64, max: usize) -> usize {
    let lanes = more as u64 + 1;
    if percent > BUSY * lanes && more + 1 < max {
        more + 1
    } else if more > 0 && percent < IDLE * (lanes - 1) {
        more - 1
    } else {
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn measurement_needs_enough_bytes() {
        let speeds = Speeds::new(1);
        speeds.moved(Moved::Written, 1, 128 << 20, SECOND);
        assert_eq!(speeds.take_new().unwrap(), [0, 128 << 10]);
        assert_eq!(speeds.take_new(), None);
        for _ in 0..100 {
            speeds.moved(Moved::Read, 0, TRANSFER_BYTES_MIN - 1, SECOND);
        }
        speeds.moved(Moved::Read, 0, 64 << 20, SECOND);
        assert_eq!(speeds.get(), [0, 128 << 10], "64 MiB of reads are too few for a measurement");
        speeds.moved(Moved::Read, 0, 64 << 20, 3 * SECOND);
        speeds.moved(Moved::Read, 2, 256 << 20, SECOND);
        assert_eq!(speeds.get(), [0, 128 << 10], "the speeds must be of writes");
        speeds.moved(Moved::Read, 1, 128 << 20, SECOND);
        assert_eq!(speeds.get(), [32 << 10, 128 << 10, 256 << 10], "the speeds must be of reads");
        assert_eq!(speeds.slowest(Moved::Read), Some(32 << 20));
        assert_eq!(Speeds::new(1).slowest(Moved::Read), None);
        for _ in 0..50 {
            speeds.moved(Moved::Read, 0, 128 << 20, SECOND);
        }
        assert!(speeds.get()[0].abs_diff(128 << 10) < 10, "old measurements must fade");
    }

    #[test]
    fn busy_volumes_get_more_lanes_and_idle_volumes_fewer() {
        assert_eq!(more_lanes(0, 95, 4), 1);
        assert_eq!(more_lanes(0, 95, 1), 0, "this machine permits one lane");
        assert_eq!(more_lanes(0, 80, 4), 0);
        assert_eq!(more_lanes(1, 110, 4), 1, "two lanes are needed");
        assert_eq!(more_lanes(1, 185, 4), 2);
        assert_eq!(more_lanes(1, 60, 4), 0);
    }
}
