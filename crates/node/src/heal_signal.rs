//! Wakes the thread of [`crate::heal`].

use ritornello_volume::ForkSafeLock;
use std::time::{Duration, Instant};

/// Whether the heal thread was notified since its last wait, and whether it must end.
#[derive(Debug, Default)]
pub(crate) struct HealSignal(ForkSafeLock<HealState>);

#[derive(Debug, Default)]
struct HealState {
    poisoned: bool,
    stopped: bool,
}

impl HealSignal {
    /// Notifies the heal thread, because a core is poisoned or the owner changed. Waits for no I/O.
    pub(crate) fn notify(&self) {
        self.0.lock().poisoned = true;
        self.0.wake_all();
    }

    /// Ends the thread, because the store is being closed.
    pub(crate) fn stop(&self) {
        self.0.lock().stopped = true;
        self.0.wake_all();
    }

    /// Waits for a notification, at most `period`. Returns `false` if the thread must end.
    pub(crate) fn wait(&self, period: Duration) -> bool {
        let until = Instant::now() + period;
        let mut state = self.0.lock();
        while !state.poisoned && !state.stopped {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.0.wait_for(state, left);
        }
        state.poisoned = false;
        !state.stopped
    }

    /// Sleeps for `pause` whether notified or not. Returns `false` if the thread must end.
    pub(crate) fn sleep(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut state = self.0.lock();
        while !state.stopped {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.0.wait_for(state, left);
        }
        !state.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_ends_a_sleep_and_notify_does_not() {
        const HOUR: Duration = Duration::from_secs(3600);
        let heal_signal = HealSignal::default();
        assert!(heal_signal.wait(Duration::from_millis(1)), "the wait must end with its period");
        heal_signal.notify();
        assert!(heal_signal.wait(HOUR) && heal_signal.sleep(Duration::from_millis(1)));
        heal_signal.notify();
        assert!(heal_signal.sleep(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| heal_signal.sleep(HOUR));
            heal_signal.stop();
            assert!(!sleeper.join().unwrap());
        });
        assert!(!heal_signal.wait(HOUR), "the wait must report the stop");
    }
}
