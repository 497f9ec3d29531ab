//! Counts loads in progress, for which background writes wait.

use ritornello_format::residency::Tier;
use ritornello_volume::ForkSafeLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts loads that are queued or running.
#[derive(Debug, Default)]
pub(super) struct LoadTracker {
    loads: ForkSafeLock<usize>,
    /// Bytes of the queued and running loads, by tier. A load counts with all its bytes until it
    /// ends.
    queued: [AtomicU64; 4],
}

/// A load in progress; dropping the guard ends the load.
#[derive(Debug)]
pub(super) struct LoadGuard {
    tracker: Arc<LoadTracker>,
    tier: Tier,
    bytes: u64,
}

impl LoadTracker {
    pub(super) fn begin(self: &Arc<Self>, tier: Tier, bytes: u64) -> LoadGuard {
        *self.loads.lock() += 1;
        self.queued[tier as usize].fetch_add(bytes, Relaxed);
        LoadGuard { tracker: Arc::clone(self), tier, bytes }
    }

    /// Returns the bytes of the loads in progress from each tier.
    pub(super) fn queued(&self) -> [u64; 4] {
        self.queued.each_ref().map(|bytes| bytes.load(Relaxed))
    }

    /// Waits until no load is in progress, for at most `longest`.
    pub(super) fn wait(&self, longest: Duration) {
        let until = Instant::now() + longest;
        let mut loads = self.loads.lock();
        while *loads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            loads = self.loads.wait_for(loads, left);
        }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.tracker.queued[self.tier as usize].fetch_sub(self.bytes, Relaxed);
        let mut loads = self.tracker.loads.lock();
        *loads -= 1;
        if *loads == 0 {
            self.tracker.loads.wake_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn writer_waits_for_loads_until_timeout() {
        let tracker = Arc::new(LoadTracker::default());
        tracker.wait(Duration::from_secs(3600));
        let load = tracker.begin(Tier::Disk, 7);
        let other = tracker.begin(Tier::Disk, 5);
        assert_eq!(tracker.queued(), [0, 0, 12, 0]);
        let begun = Instant::now();
        tracker.wait(Duration::from_millis(30));
        assert!(begun.elapsed() >= Duration::from_millis(30));
        let waiting = thread::spawn({
            let tracker = Arc::clone(&tracker);
            move || tracker.wait(Duration::from_secs(3600))
        });
        drop(load);
        assert!(!waiting.is_finished());
        drop(other);
        waiting.join().unwrap();
        assert_eq!(tracker.queued(), [0; 4]);
    }
}
