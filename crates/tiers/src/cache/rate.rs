//! A cap on the bytes a second that go to and from a tier: whoever moves bytes takes the next stretch
//! of time for them, and waits until it is over.

use parking_lot::Mutex;
use ritornello_volume::transfer::Control;
use std::thread;
use std::time::{Duration, Instant};

/// A waiter looks so often whether it was cancelled.
const CANCEL_CHECK: Duration = Duration::from_millis(20);

/// See the module. Without a cap nobody waits.
#[derive(Debug, Default)]
pub(super) struct Rate {
    bytes_a_second: Option<u64>,
    /// Until when time is taken.
    taken: Mutex<Option<Instant>>,
}

impl Rate {
    pub(super) fn new(bytes_a_second: Option<u64>) -> Self {
        Self { bytes_a_second, taken: Mutex::default() }
    }

    pub(super) fn is_capped(&self) -> bool {
        self.bytes_a_second.is_some()
    }

    /// Takes the time of `bytes`; returns when it ends.
    pub(super) fn charge(&self, bytes: u64) -> Option<Instant> {
        let long = Duration::try_from_secs_f64(bytes as f64 / self.bytes_a_second? as f64);
        let mut taken = self.taken.lock();
        let now = Instant::now();
        let end = taken.map_or(now, |taken| taken.max(now)).checked_add(long.ok()?)?;
        *taken = Some(end);
        Some(end)
    }

    /// Waits for the time of `bytes`, unless `control` says stop before that: then none is taken.
    /// Returns whether it came.
    pub(super) fn wait(&self, bytes: u64, control: &Control) -> bool {
        let Some(end) = self.charge(bytes) else { return true };
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            if control.stop().is_some() || control.deadline.is_some_and(|until| until < end) {
                self.give_back(bytes);
                return false;
            }
            thread::sleep(left.min(CANCEL_CHECK));
        }
    }

    fn give_back(&self, bytes: u64) {
        let Some(rate) = self.bytes_a_second else { return };
        let mut taken = self.taken.lock();
        let long = Duration::try_from_secs_f64(bytes as f64 / rate as f64).unwrap_or_default();
        *taken = taken.and_then(|taken| taken.checked_sub(long));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_for_those_before_them_and_not_past_a_deadline() {
        let rate = Rate::new(Some(1_000_000));
        let start = Instant::now();
        assert!(rate.charge(30_000).unwrap() >= start + Duration::from_millis(30));
        assert!(rate.wait(30_000, &Control::default()));
        assert!(start.elapsed() >= Duration::from_millis(60));
        let soon = Control {
            deadline: Some(Instant::now() + Duration::from_millis(5)),
            ..Control::default()
        };
        assert!(!rate.wait(3_600_000_000, &soon));
        assert!(rate.wait(1, &Control::default()), "what was not moved took no time");
        assert!(Rate::default().wait(u64::MAX, &soon));
    }
}
