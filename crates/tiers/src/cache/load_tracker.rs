//! Reads before writes: what is being loaded, and those who wait until nothing is.

use ritornello_format::residency::Tier;
use ritornello_volume::Parked;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Loads that wait or are under way.
#[derive(Debug, Default)]
pub(super) struct LoadTracker {
    loads: Parked<usize>,
    /// Bytes that they are to bring, by tier.
    queued: [AtomicU64; 4],
}

/// One of them, until it is dropped.
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

    /// Bytes that wait to be loaded from each tier.
    pub(super) fn queued(&self) -> [u64; 4] {
        self.queued.each_ref().map(|bytes| bytes.load(Relaxed))
    }

    /// Waits until nothing is being loaded, and not for longer than that.
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
    fn who_writes_waits_for_loads_and_not_for_ever() {
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
