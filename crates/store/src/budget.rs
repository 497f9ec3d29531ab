//! Divides the capacity of a store between whole segments and the largest possible metadata.

use crate::options::SEGMENT_BYTES_MIN;
use ritornello_format::{Error, Result};

/// Maximum bytes by which the obsolete records in the registry file may exceed the live records.
pub(crate) const REGISTRY_DEAD_BYTES: u64 = 64 << 10;
/// Bytes set aside for the manifest, the reservation log, lock and client files, and for the scope
/// registry's files as long as the records of live scopes take at most [`REGISTRY_MIN`].
const FIXED_METADATA: u64 = 1 << 20;
/// The limit for the registry's records of live scopes is 1/`REGISTRY_SHARE` of the capacity, but
/// at least [`REGISTRY_MIN`] and at most [`REGISTRY_MAX`].
const REGISTRY_SHARE: u64 = 4096;
/// The smallest limit for the records of live scopes, in bytes: 512 bytes for each of 512 scopes.
const REGISTRY_MIN: u64 = 256 << 10;
/// The largest limit for the records of live scopes, in bytes: 512 bytes for each of 65,536 scopes,
/// the maximum number.
const REGISTRY_MAX: u64 = 32 << 20;
/// The index takes at most 1/`INDEX_SHARE` of the capacity, or [`INDEX_MIN`] if that is more.
const INDEX_SHARE: u64 = 32;
/// The smallest limit for the index, in bytes.
const INDEX_MIN: u64 = 1 << 20;
/// Minimum bytes that a growing store leaves free in its file system; 2 % of the file system's size
/// if that is less.
const FLOOR: u64 = 1 << 30;

/// The budget of a store, in allocated bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Total capacity.
    pub capacity: u64,
    /// Bytes per segment.
    pub segment_bytes: u64,
    /// Maximum segment files.
    pub segments_max: u32,
    /// Maximum bytes of the index on disk.
    pub index_bytes: u64,
    /// Maximum bytes of the records of live scopes in the registry.
    pub registry_bytes: u64,
}

impl Budget {
    /// Divides `capacity` between whole segments of `segment_bytes` and the metadata.
    ///
    /// # Errors
    /// `Invalid` if the capacity does not hold two segments and their metadata; the error names a
    /// capacity that does. `Invalid` if the segment size is not a power of two from 1 MiB to
    /// 256 MiB.
    pub fn divide(capacity: u64, segment_bytes: u64) -> Result<Self> {
        if !segment_bytes.is_power_of_two()
            || !(SEGMENT_BYTES_MIN..=crate::options::SEGMENT_BYTES).contains(&segment_bytes)
        {
            return Err(Error::invalid(
                "segment_bytes must be a power of two from 1 MiB to 256 MiB",
            )
            .with("segment_bytes", segment_bytes));
        }
        let index_share = (capacity / INDEX_SHARE).max(INDEX_MIN);
        let segments = capacity.saturating_sub(index_share + FIXED_METADATA) / segment_bytes;
        if segments < 2 {
            let least = (2 * segment_bytes + FIXED_METADATA + INDEX_MIN).max(
                (2 * segment_bytes + FIXED_METADATA) * INDEX_SHARE / (INDEX_SHARE - 1)
                    + INDEX_SHARE,
            );
            return Err(Error::invalid(format!(
                "the capacity holds fewer than two segments and their metadata: \
                 give at least {least} bytes"
            ))
            .with("capacity", capacity)
            .with("segment_bytes", segment_bytes));
        }
        // A segment number has 24 bits.
        let segments_max = segments.min((1 << 24) - 1) as u32;
        let registry_bytes = (capacity / REGISTRY_SHARE).clamp(REGISTRY_MIN, REGISTRY_MAX);
        // A larger registry reduces the share of the index, not the number of segments.
        let index_bytes =
            index_share - (registry_bytes_max(registry_bytes) - registry_bytes_max(REGISTRY_MIN));
        Ok(Self { capacity, segment_bytes, segments_max, index_bytes, registry_bytes })
    }

    /// Returns the maximum number of segments of each directory. `existing` has the current number
    /// of segments per directory, or `None` for a directory that must become empty. The division is
    /// as even as possible. If the store has fewer than `segments_max` segments, no directory loses
    /// segments and the smallest directories grow; if it has more, the largest directories shrink.
    #[must_use]
    pub fn shares(&self, existing: &[Option<u32>]) -> Vec<u32> {
        let mut shares: Vec<u32> = existing.iter().map(|there| there.unwrap_or(0)).collect();
        let mut active: Vec<usize> =
            (0..existing.len()).filter(|&at| existing[at].is_some()).collect();
        let sum = |shares: &[u32]| shares.iter().map(|n| u64::from(*n)).sum::<u64>();
        let most = u64::from(self.segments_max);
        if active.is_empty() {
            return shares;
        }
        // Each step raises the smallest shares to the next larger share, or, if the sum of the
        // shares must shrink, lowers the largest shares to the next smaller share. The loop takes
        // about one step for each directory.
        while sum(&shares) != most {
            let total = sum(&shares);
            let grow = total < most;
            active.sort_by_key(|&at| if grow { shares[at] } else { u32::MAX - shares[at] });
            let level = shares[active[0]];
            let same = active.iter().take_while(|&&at| shares[at] == level).count();
            let gap = most.abs_diff(total);
            let step =
                active.get(same).map_or(u64::MAX, |&at| u64::from(shares[at].abs_diff(level)));
            let each = step.min(gap / same as u64) as u32;
            let rest = if each == 0 { gap as usize } else { same };
            for &at in active[..same].iter().take(rest) {
                let by = each.max(1);
                shares[at] = if grow { shares[at] + by } else { shares[at] - by };
            }
        }
        shares
    }

    /// Bytes that a growing store leaves free on a file system of `total` bytes.
    #[must_use]
    pub fn floor(total: u64) -> u64 {
        FLOOR.min(total / 50)
    }
}

/// Maximum bytes of the registry file and its replacement together, while the records of live
/// scopes take `live` bytes.
const fn registry_bytes_max(live: u64) -> u64 {
    3 * live + REGISTRY_DEAD_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_never_exceed_the_capacity() {
        for capacity in [4 << 20, 9 << 20, 1 << 30, 200 << 30, 1 << 50] {
            for segment_bytes in [1 << 20, 16 << 20, 256 << 20] {
                let Ok(budget) = Budget::divide(capacity, segment_bytes) else { continue };
                let used = u64::from(budget.segments_max) * segment_bytes
                    + budget.index_bytes
                    + registry_bytes_max(budget.registry_bytes)
                    + (FIXED_METADATA - registry_bytes_max(REGISTRY_MIN));
                assert!(used <= capacity, "{budget:?}");
                let shares = budget.shares(&[Some(0); 3]);
                assert_eq!(shares.iter().sum::<u32>(), budget.segments_max);
                assert!(shares.iter().all(|share| share.abs_diff(shares[0]) <= 1));
            }
        }
    }

    #[test]
    fn shares_are_as_even_as_possible() {
        let budget = |segments_max| Budget {
            capacity: 0,
            segment_bytes: 1 << 20,
            segments_max,
            index_bytes: 0,
            registry_bytes: 0,
        };
        assert_eq!(budget(10).shares(&[Some(10), Some(0)]), [10, 0]);
        assert_eq!(budget(16).shares(&[Some(10), Some(0)]), [10, 6]);
        assert_eq!(budget(21).shares(&[Some(10), Some(0)]), [10, 11]);
        assert_eq!(budget(12).shares(&[Some(15), Some(5)]), [7, 5]);
        assert_eq!(budget(7).shares(&[Some(15), Some(5), None]), [3, 4, 0]);
        assert_eq!(budget(9).shares(&[None, Some(2), Some(3)]), [0, 5, 4]);
        assert_eq!(budget(5).shares(&[Some(1), Some(1), Some(1)]).iter().sum::<u32>(), 5);
    }

    #[test]
    fn error_for_too_small_capacity_names_a_sufficient_capacity() {
        for segment_bytes in [1 << 20, 256 << 20] {
            let error = Budget::divide(2 << 20, segment_bytes).unwrap_err();
            let least =
                error.message().split(' ').filter_map(|w| w.parse::<u64>().ok()).next_back();
            assert!(Budget::divide(least.unwrap(), segment_bytes).is_ok(), "{error}");
        }
    }
}
