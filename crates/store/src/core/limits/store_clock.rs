//! The clock that ends retentions.

use std::time::Instant;

/// Maximum retention in seconds: 366 days.
pub(super) const RETENTION_MAX: u64 = 366 * 86_400;

/// The store's clock, in seconds since 1970, which never goes back. An opening starts the clock at
/// the system time or at the latest time that the index has recorded, whichever is later. If the
/// system clock lagged the recorded time at the opening, this lag is added to the system time from
/// then on. If the system clock is set forward, the store's clock follows, and retentions end
/// early. If the system clock is set back, the store's clock continues with the time that elapses,
/// from the latest time that it has shown.
#[derive(Debug)]
pub(crate) struct StoreClock {
    wall: fn() -> u64,
    /// Seconds that the system clock lagged the recorded time when the store was opened.
    skew: u64,
    /// The clock shows at least `base` plus the time elapsed since `started`.
    base: u64,
    started: Instant,
    latest: u64,
}

impl StoreClock {
    /// Starts at the system time, or at `mark`, the latest recorded time, if this is later.
    pub(crate) fn starting_at(mark: u64, wall: fn() -> u64) -> Self {
        let now = wall();
        let base = now.max(mark);
        Self { wall, skew: base - now, base, started: Instant::now(), latest: base }
    }

    pub(crate) fn now(&mut self) -> u64 {
        self.at(Instant::now())
    }

    fn at(&mut self, instant: Instant) -> u64 {
        let by_wall = (self.wall)().saturating_add(self.skew);
        let elapsed = instant.saturating_duration_since(self.started);
        let time = by_wall.max(self.base.saturating_add(elapsed.as_secs()));
        if time < self.latest {
            // The system clock was set back after a jump forward. Count the elapsed time from the
            // latest time, because a clock that stood still would end no retention.
            (self.base, self.started) = (self.latest, instant);
        }
        self.latest = self.latest.max(time);
        self.latest
    }

    /// Returns the time of this clock at which the system clock will show `until`, at most
    /// [`RETENTION_MAX`] seconds from now. `None` if `until` has passed.
    pub(super) fn end(&mut self, until: u64) -> Option<u64> {
        let remaining = until.checked_sub((self.wall)()).filter(|remaining| *remaining > 0)?;
        Some(self.now().saturating_add(remaining.min(RETENTION_MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    static WALL: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn clock_never_decreases() {
        let set = |seconds| WALL.store(seconds, Ordering::Relaxed);
        let near = |time: u64, expected: u64| (expected..expected + 100).contains(&time);
        let is_near = |time: Option<u64>, expected| time.is_some_and(|time| near(time, expected));
        set(1000);
        let mut clock = StoreClock::starting_at(0, || WALL.load(Ordering::Relaxed));
        assert!(near(clock.now(), 1000) && is_near(clock.end(1600), 1600));
        assert_eq!((clock.end(1000), clock.end(10)), (None, None));
        assert!(is_near(clock.end(u64::MAX), 1000 + RETENTION_MAX));
        set(2000);
        assert!(near(clock.now(), 2000));
        set(500);
        assert!(near(clock.now(), 2000), "the clock must not go back with the system clock");
        assert!(
            is_near(clock.end(1100), 2600),
            "a retention of 600 s begins at the time of the store's clock"
        );
        // The machine restarts with a system clock at zero.
        set(0);
        let mut clock = StoreClock::starting_at(2000, || WALL.load(Ordering::Relaxed));
        assert!(near(clock.now(), 2000) && is_near(clock.end(600), 2600));
        set(1000);
        assert!(near(clock.now(), 3000), "the lag at the opening is added to the system time");
    }

    #[test]
    fn clock_continues_after_a_corrected_jump_forward() {
        static JUMPING: AtomicU64 = AtomicU64::new(1000);
        let set = |seconds| JUMPING.store(seconds, Ordering::Relaxed);
        let mut clock = StoreClock::starting_at(0, || JUMPING.load(Ordering::Relaxed));
        let started = clock.started;
        let after = |seconds| started + Duration::from_secs(seconds);
        set(90_000);
        assert_eq!(clock.at(after(10)), 90_000);
        set(1020);
        assert_eq!(clock.at(after(20)), 90_000);
        set(1080);
        assert_eq!(clock.at(after(80)), 90_060);
        set(1020 + 3600);
        assert_eq!(clock.at(after(20 + 3600)), 93_600);
    }
}
