//! How the capacity is divided: whole segments, and what metadata can grow to at worst.

use crate::options::SEGMENT_BYTES_MIN;
use ritornello_format::{Error, Result};

/// Manifest, scope registry, reservation log, lock and client files.
const FIXED_METADATA: u64 = 1 << 20;
/// The index may take one part in this many of the capacity.
const INDEX_SHARE: u64 = 32;
/// The index is given at least this much.
const INDEX_MIN: u64 = 1 << 20;
/// Growth stops when the file system would be left with less than this, or a fiftieth of it if
/// that is less.
const FLOOR: u64 = 1 << 30;

/// The budget of a store, in allocated bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Everything.
    pub capacity: u64,
    /// Bytes a segment.
    pub segment_bytes: u64,
    /// Segment files at most.
    pub segments_max: u32,
    /// What the index may take on disk.
    pub index_bytes: u64,
}

impl Budget {
    /// Divides `capacity`.
    ///
    /// # Errors
    /// `Invalid` if fewer than two segments fit beside the metadata, naming the least capacity,
    /// or if the segment size is not a power of two from 1 MiB to 256 MiB.
    pub fn divide(capacity: u64, segment_bytes: u64) -> Result<Self> {
        if !segment_bytes.is_power_of_two()
            || !(SEGMENT_BYTES_MIN..=crate::options::SEGMENT_BYTES).contains(&segment_bytes)
        {
            return Err(Error::invalid("segment_bytes is a power of two from 1 MiB to 256 MiB")
                .with("segment_bytes", segment_bytes));
        }
        let index_bytes = (capacity / INDEX_SHARE).max(INDEX_MIN);
        let segments = capacity.saturating_sub(index_bytes + FIXED_METADATA) / segment_bytes;
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
        // The limit is the width of a segment number.
        let segments_max = segments.min((1 << 24) - 1) as u32;
        Ok(Self { capacity, segment_bytes, segments_max, index_bytes })
    }

    /// Segments each of `volumes` directories may hold.
    #[must_use]
    pub fn per_volume(&self, volumes: usize) -> Vec<u32> {
        let count = volumes.max(1) as u32;
        (0..count)
            .map(|v| self.segments_max / count + u32::from(v < self.segments_max % count))
            .collect()
    }

    /// Bytes that growth leaves free on a file system of `total` bytes.
    #[must_use]
    pub fn floor(total: u64) -> u64 {
        FLOOR.min(total / 50)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_never_exceed_the_whole() {
        for capacity in [4 << 20, 9 << 20, 1 << 30, 200 << 30, 1 << 50] {
            for segment_bytes in [1 << 20, 16 << 20, 256 << 20] {
                let Ok(budget) = Budget::divide(capacity, segment_bytes) else { continue };
                let used = u64::from(budget.segments_max) * segment_bytes
                    + budget.index_bytes
                    + FIXED_METADATA;
                assert!(used <= capacity, "{budget:?}");
                let per_volume = budget.per_volume(3);
                assert_eq!(per_volume.iter().sum::<u32>(), budget.segments_max);
            }
        }
    }

    #[test]
    fn too_small_a_capacity_is_told_what_would_do() {
        for segment_bytes in [1 << 20, 256 << 20] {
            let error = Budget::divide(2 << 20, segment_bytes).unwrap_err();
            let least =
                error.message().split(' ').filter_map(|w| w.parse::<u64>().ok()).next_back();
            assert!(Budget::divide(least.unwrap(), segment_bytes).is_ok(), "{error}");
        }
    }
}
