//! The limit of requests per second.

use parking_lot::Mutex;
use std::time::Instant;

/// A token bucket: each admitted request takes a token of the bucket, and tokens return at a fixed
/// rate.
#[derive(Debug)]
pub(crate) struct RateLimit {
    per_second: f64,
    burst: f64,
    state: Mutex<(f64, Instant)>,
}

impl RateLimit {
    pub(crate) fn new(per_second: u32, burst: u32) -> Self {
        let burst = f64::from(burst);
        let state = Mutex::new((burst, Instant::now()));
        Self { per_second: f64::from(per_second), burst, state }
    }

    /// Whether a request at `now` is within the limit.
    pub(crate) fn admits(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let (tokens, since) = *state;
        let returned = now.saturating_duration_since(since).as_secs_f64() * self.per_second;
        let tokens = (tokens + returned).min(self.burst);
        let admitted = tokens >= 1.0;
        *state = (if admitted { tokens - 1.0 } else { tokens }, now.max(since));
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn requests_beyond_a_burst_are_served_at_the_rate() {
        let limit = RateLimit::new(10, 3);
        let start = Instant::now();
        let admitted = |at| limit.admits(start + Duration::from_millis(at));
        assert_eq!([0, 0, 0, 0].map(admitted), [true, true, true, false]);
        assert_eq!([100, 100].map(admitted), [true, false]);
        assert_eq!([10_000; 4].map(admitted), [true, true, true, false]);
    }
}
