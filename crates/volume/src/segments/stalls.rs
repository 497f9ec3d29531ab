//! Which volumes complete no operations, although some are in flight.
//!
//! A process cannot take back an operation that the kernel holds: its call waits, even beyond its
//! deadline. Calls therefore begin no operation on a volume that has stalled, and their pages there
//! miss at once, so that a stalled disk holds up only the calls that it caught.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A volume that completes nothing for this long has stalled. Longer than a busy disk or a busy
/// machine takes for one operation, and shorter than a request can wait.
const STALLED_AFTER: Duration = Duration::from_secs(2);
/// A volume that completes nothing for this long may be about to stall.
const SILENT_AFTER: Duration = Duration::from_millis(250);

/// The operations of this process on each volume.
pub(crate) struct Stalls {
    opened: Instant,
    volumes: Box<[VolumeOps]>,
    /// Milliseconds that a test adds to the time.
    #[cfg(test)]
    waited: AtomicU64,
}

#[derive(Default)]
struct VolumeOps {
    in_flight: AtomicU32,
    /// Time of the last completion, or of the first operation after all had completed, in
    /// milliseconds since `opened`.
    progress: AtomicU64,
    is_logged: AtomicBool,
}

impl Stalls {
    pub(crate) fn new() -> Self {
        let volumes = (0..=u8::MAX).map(|_| VolumeOps::default()).collect();
        Self {
            opened: Instant::now(),
            volumes,
            #[cfg(test)]
            waited: AtomicU64::default(),
        }
    }

    /// Records an operation on `volume` that is in flight until the result is dropped.
    pub(crate) fn begin(&self, volume: u8) -> OpInFlight<'_> {
        let ops = &self.volumes[usize::from(volume)];
        // The time first: with an operation in flight, an old time means a stall.
        if ops.in_flight.load(Ordering::Acquire) == 0 {
            ops.progress.store(self.now(), Ordering::Release);
        }
        ops.in_flight.fetch_add(1, Ordering::AcqRel);
        OpInFlight { stalls: self, volume }
    }

    /// Whether `volume` has stalled.
    pub(crate) fn is_stalled(&self, volume: u8) -> bool {
        let ops = &self.volumes[usize::from(volume)];
        let is_stalled = self.silence(ops) >= STALLED_AFTER;
        if is_stalled && !ops.is_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                volume,
                seconds = STALLED_AFTER.as_secs(),
                "a volume completes no operation: its pages are misses until it does; check its disk"
            );
        }
        is_stalled
    }

    /// Whether a volume may be about to stall, or has stalled.
    pub(crate) fn is_any_silent(&self) -> bool {
        self.volumes.iter().any(|ops| self.silence(ops) >= SILENT_AFTER)
    }

    /// For how long a volume has completed nothing; zero if no operation is in flight.
    fn silence(&self, ops: &VolumeOps) -> Duration {
        if ops.in_flight.load(Ordering::Acquire) == 0 {
            return Duration::ZERO;
        }
        Duration::from_millis(self.now().saturating_sub(ops.progress.load(Ordering::Acquire)))
    }

    fn now(&self) -> u64 {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        #[cfg(test)]
        let now = now + self.waited.load(Ordering::Relaxed);
        now
    }
}

/// An operation in flight.
pub(crate) struct OpInFlight<'a> {
    stalls: &'a Stalls,
    volume: u8,
}

impl Drop for OpInFlight<'_> {
    fn drop(&mut self) {
        let ops = &self.stalls.volumes[usize::from(self.volume)];
        ops.progress.store(self.stalls.now(), Ordering::Release);
        ops.in_flight.fetch_sub(1, Ordering::AcqRel);
        if ops.is_logged.load(Ordering::Relaxed) && ops.is_logged.swap(false, Ordering::Relaxed) {
            tracing::warn!(self.volume, "the volume completes operations again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves the last progress of all volumes into the past.
    fn wait(stalls: &Stalls, time: Duration) {
        stalls.waited.fetch_add(time.as_millis() as u64, Ordering::Relaxed);
    }

    #[test]
    fn volume_without_completions_has_stalled() {
        let stalls = Stalls::new();
        wait(&stalls, STALLED_AFTER);
        assert!(!stalls.is_any_silent(), "no operation is in flight");
        let first = stalls.begin(3);
        assert!(!stalls.is_stalled(3), "the operation has just begun");
        wait(&stalls, SILENT_AFTER);
        let second = stalls.begin(3);
        assert!(stalls.is_any_silent() && !stalls.is_stalled(3));
        wait(&stalls, STALLED_AFTER);
        assert!(stalls.is_stalled(3) && !stalls.is_stalled(2));
        drop(first);
        assert!(!stalls.is_stalled(3), "the volume completes operations");
        wait(&stalls, STALLED_AFTER);
        assert!(stalls.is_stalled(3), "the second operation is in flight");
        drop(second);
        wait(&stalls, STALLED_AFTER);
        assert!(!stalls.is_stalled(3) && !stalls.is_any_silent());
    }
}
