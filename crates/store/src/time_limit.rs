//! The time limit of a transfer, which grows with its bytes.

use crate::store::Store;
use std::time::Duration;

/// Maximum time limit of a transfer, unless its caller asks for more.
const LONGEST: Duration = Duration::from_secs(60);
/// Factor by which a transfer may be slower than the measured speed of the slowest volume, because
/// other transfers use this volume at the same time.
const SLACK: u64 = 4;
/// Assumed speed of a volume that was not measured, in bytes per second.
const UNMEASURED: u64 = 64 << 20;

impl Store {
    /// The time to allow for a get of `bytes`, or with `is_put` for a put: four times the time that
    /// the slowest measured volume needs for `bytes` (at 64 MiB/s if no volume was measured), at
    /// most 60 seconds. The result is never less than `least`.
    #[must_use]
    pub fn time_limit(&self, bytes: u64, least: Duration, is_put: bool) -> Duration {
        time_limit(bytes, least, self.segments.slowest(is_put))
    }
}

/// The time to allow for a transfer of `bytes` at `speed` bytes per second, which may be unknown:
/// see [`Store::time_limit`].
#[must_use]
pub fn time_limit(bytes: u64, least: Duration, speed: Option<u64>) -> Duration {
    let speed = speed.unwrap_or(UNMEASURED).max(1);
    let millis = bytes.saturating_mul(SLACK).saturating_mul(1000) / speed;
    Duration::from_millis(millis).min(LONGEST).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_transfers_have_more_time() {
        const MIB: u64 = 1 << 20;
        let least = Duration::from_secs(10);
        let limit = |bytes, speed| time_limit(bytes, least, speed).as_secs();
        assert_eq!(limit(MIB, None), 10);
        assert_eq!(limit(512 * MIB, None), 32);
        assert_eq!(limit(512 * MIB, Some(1 << 30)), 10);
        assert_eq!(limit(512 * MIB, Some(100 * MIB)), 20);
        assert_eq!(limit(512 * MIB, Some(MIB)), 60, "60 s is the maximum");
        assert_eq!(limit(u64::MAX, Some(0)), 60);
        assert_eq!(
            time_limit(MIB, 2 * LONGEST, None),
            2 * LONGEST,
            "a longer limit of the caller is kept"
        );
    }
}
