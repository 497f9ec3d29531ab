//! Limits the bytes per second that move to and from a tier: each transfer reserves the time that
//! its bytes take at the limit, after the times that earlier transfers reserved. Reads, fetches and
//! background copies wait until their reserved time has passed; puts, and the storing of fetched
//! pages, do not wait. A background copy reserves at most [`BACKGROUND_QUANTUM`] at once, so that a
//! load waits for a background copy at most this long. The submission of a put
//! reserves the time of all its pages; after the end of the put, the limiter gives back the time of
//! the bytes that were not written.

use parking_lot::Mutex;
use ritornello_store::Completion;
use ritornello_volume::transfer::Control;
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a waiting transfer checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(20);
/// Seconds that a background transfer reserves at a time. A new load waits for the transfer for at
/// most this time.
const BACKGROUND_QUANTUM: f64 = 0.02;

/// Rate limiter of one tier. Without a limit no transfer waits.
#[derive(Debug, Default)]
pub(super) struct RateLimiter {
    bytes_per_second: Option<u64>,
    /// End of the time that transfers have reserved.
    reserved_until: Mutex<Option<Instant>>,
    /// Puts to settle: at most one per pending ticket, and the puts that ended since the last call.
    puts: Mutex<Vec<ReservedPut>>,
}

/// A put with its reserved time.
#[derive(Debug)]
struct ReservedPut {
    bytes: u64,
    end: Instant,
    put: Completion,
}

impl RateLimiter {
    pub(super) fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, ..Self::default() }
    }

    pub(super) fn is_capped(&self) -> bool {
        self.bytes_per_second.is_some()
    }

    /// Bytes that the limit lets through in `duration`; `u64::MAX` without a limit.
    pub(super) fn bytes_in(&self, duration: Duration) -> u64 {
        self.bytes_per_second.map_or(u64::MAX, |rate| (duration.as_secs_f64() * rate as f64) as u64)
    }

    /// Reserves the time that `bytes` take at the limit, starting at the end of the time that
    /// earlier transfers reserved, or now if that is later. Returns the reserved time; `None`
    /// without a limit, or if the time is too long to be represented.
    pub(super) fn reserve(&self, bytes: u64) -> Option<Range<Instant>> {
        let duration = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second? as f64);
        self.settle_puts();
        let mut reserved_until = self.reserved_until.lock();
        let now = Instant::now();
        let begin = reserved_until.map_or(now, |until| until.max(now));
        let end = begin.checked_add(duration.ok()?)?;
        *reserved_until = Some(end);
        Some(begin..end)
    }

    /// [Reserves](Self::reserve) the time that a put of `bytes` takes if it writes all of them.
    pub(super) fn reserve_put(&self, bytes: u64, put: Completion) {
        if let Some(reserved) = self.reserve(bytes) {
            self.puts.lock().push(ReservedPut { bytes, end: reserved.end, put });
        }
    }

    /// Gives back the time of the bytes that ended puts did not write, as far as this time has not
    /// passed: time that passed unused must not let later transfers exceed the limit.
    fn settle_puts(&self) {
        let Some(rate) = self.bytes_per_second else { return };
        let now = Instant::now();
        self.puts.lock().retain(|ReservedPut { bytes, end, put }| {
            let Some(outcome) = put.outcome() else { return true };
            let left = end.saturating_duration_since(now).as_secs_f64() * rate as f64;
            // Rounded up, so that no part of a byte remains reserved.
            self.refund(bytes.saturating_sub(outcome.bytes).min(left.ceil() as u64));
            false
        });
    }

    /// [Reserves](Self::reserve) the time that `bytes` take, and waits until it has passed. Returns
    /// how long earlier transfers delayed the beginning of this time. If `control` stops the wait
    /// first, or its deadline is before the end of the reserved time, gives the time back and
    /// returns `None`.
    pub(super) fn wait(&self, bytes: u64, control: &Control) -> Option<Duration> {
        let requested_at = Instant::now();
        let Some(reserved) = self.reserve(bytes) else { return Some(Duration::ZERO) };
        loop {
            let left = reserved.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Some(reserved.start.saturating_duration_since(requested_at));
            }
            if control.stop().is_some()
                || control.deadline.is_some_and(|until| until < reserved.end)
            {
                self.refund(bytes);
                return None;
            }
            thread::sleep(left.min(CANCEL_CHECK));
        }
    }

    /// Waits like [`wait`](Self::wait), in steps of [`BACKGROUND_QUANTUM`]. Returns false if
    /// `control` stops the wait, and immediately if the wait would end after the deadline of
    /// `control`.
    pub(super) fn wait_in_steps(&self, bytes: u64, control: &Control) -> bool {
        let Some(rate) = self.bytes_per_second else { return true };
        let duration = (self.backlog() as f64 + bytes as f64) / rate as f64;
        let left = control.deadline.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.as_secs_f64() < duration) {
            return false;
        }
        let quantum = ((rate as f64 * BACKGROUND_QUANTUM) as u64).max(1);
        let mut left = bytes;
        while left > 0 {
            let now = left.min(quantum);
            if self.wait(now, control).is_none() {
                return false;
            }
            left -= now;
        }
        true
    }

    /// Bytes that the limit lets through in the reserved time that has not passed.
    pub(super) fn backlog(&self) -> u64 {
        self.settle_puts();
        let (Some(rate), Some(until)) = (self.bytes_per_second, *self.reserved_until.lock()) else {
            return 0;
        };
        let left = until.saturating_duration_since(Instant::now());
        (left.as_secs_f64() * rate as f64) as u64
    }

    fn refund(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        let mut reserved_until = self.reserved_until.lock();
        let duration = Duration::try_from_secs_f64(bytes as f64 / rate as f64).unwrap_or_default();
        *reserved_until = reserved_until.and_then(|until| until.checked_sub(duration));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_queue_and_respect_deadlines() {
        let rate = RateLimiter::new(Some(1_000_000));
        let start = Instant::now();
        assert_eq!(rate.backlog(), 0);
        assert!(rate.reserve(30_000).unwrap().end >= start + Duration::from_millis(30));
        assert!((1..=30_000).contains(&rate.backlog()));
        let others = rate.wait(30_000, &Control::default()).unwrap();
        assert!(
            others <= Duration::from_millis(30),
            "a transfer's own time must not count as delay"
        );
        assert!(start.elapsed() >= Duration::from_millis(60));
        let soon = Control {
            deadline: Some(Instant::now() + Duration::from_millis(5)),
            ..Control::default()
        };
        assert_eq!(rate.wait(3_600_000_000, &soon), None);
        assert!(
            rate.wait(1, &Control::default()).is_some(),
            "a stopped transfer must reserve no time"
        );
        assert_eq!(RateLimiter::default().wait(u64::MAX, &soon), Some(Duration::ZERO));
    }

    #[test]
    fn load_waits_for_one_background_quantum() {
        let rate = RateLimiter::new(Some(1_000_000));
        thread::scope(|threads| {
            let writer = threads.spawn(|| rate.wait_in_steps(500_000, &Control::default()));
            while rate.backlog() == 0 && !writer.is_finished() {
                thread::yield_now();
            }
            let others = rate.wait(100_000, &Control::default()).unwrap();
            // If the background transfer did not wait in steps, the load would wait for half a
            // second.
            assert!(others <= Duration::from_millis(50), "{others:?}");
            assert!(writer.join().unwrap());
        });
        assert!(RateLimiter::default().wait_in_steps(u64::MAX, &Control::default()));
        let soon = Instant::now() + Duration::from_secs(10);
        let late = Control { deadline: Some(soon), ..Control::default() };
        assert!(!rate.wait_in_steps(100_000_000, &late));
        assert_eq!(rate.backlog(), 0, "a write that would be late must reserve no time");
    }
}
