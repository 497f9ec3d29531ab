//! Reads before writes: what is being loaded, and those who wait until nothing is.

use ritornello_format::residency::Tier;
use ritornello_volume::Parked;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Loads that wait or are under way.
#[derive(Debug, Default)]
pub(super) struct Slack {
    loads: Parked<usize>,
    /// Bytes that they are to bring, by tier.
    queued: [AtomicU64; 4],
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Loading {
    slack: Arc<Slack>,
    tier: Tier,
    bytes: u64,
}

impl Slack {
    pub(super) fn load(self: &Arc<Self>, tier: Tier, bytes: u64) -> Loading {
        *self.loads.lock() += 1;
        self.queued[tier as usize].fetch_add(bytes, Relaxed);
        Loading { slack: Arc::clone(self), tier, bytes }
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

impl Drop for Loading {
    fn drop(&mut self) {
        self.slack.queued[self.tier as usize].fetch_sub(self.bytes, Relaxed);
        let mut loads = self.slack.loads.lock();
        *loads -= 1;
        if *loads == 0 {
            self.slack.loads.wake_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn who_writes_waits_for_loads_and_not_for_ever() {
        let slack = Arc::new(Slack::default());
        slack.wait(Duration::from_secs(3600));
        let load = slack.load(Tier::Disk, 7);
        let other = slack.load(Tier::Disk, 5);
        assert_eq!(slack.queued(), [0, 0, 12, 0]);
        let begun = Instant::now();
        slack.wait(Duration::from_millis(30));
        assert!(begun.elapsed() >= Duration::from_millis(30));
        let waiting = thread::spawn({
            let slack = Arc::clone(&slack);
            move || slack.wait(Duration::from_secs(3600))
        });
        drop(load);
        assert!(!waiting.is_finished());
        drop(other);
        waiting.join().unwrap();
        assert_eq!(slack.queued(), [0; 4]);
    }
}
