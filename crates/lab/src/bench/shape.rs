//! The pages of a measurement, and the number of pages per call.

use super::disk::capacity_for;
use ritornello_codec::{Codec, Dtype};
use ritornello_format::{Scope, UNIT, WHOLE_PAGE_UNITS, units_of};
use ritornello_store::Budget;
use ritornello_terminal::exit::Failure;

/// Bytes of a segment that [`Shape::capacity`] sets aside for run headers. One header has at most
/// 16 KiB.
const HEADER_BYTES: u64 = 32 << 10;

/// Size and number of the pages of one measurement, and their division into sequences.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Scope of the pages.
    pub scope: Scope,
    /// Codec of the store.
    pub codec: Codec,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Pages per sequence: of one put, and of one get.
    pub sequence_pages: u32,
    /// Number of sequences in a set. A measurement may put several sets, whose sequences have
    /// different keys.
    pub sequences: u32,
}

impl Shape {
    /// Returns whether pages hold bfloat16 numbers, which codecs can shorten.
    #[must_use]
    pub fn is_bfloat16(&self) -> bool {
        Dtype::parse(&self.scope.dtype) == Some(Dtype::Bf16)
    }

    /// Returns the payload bytes of all sequences of a set.
    #[must_use]
    pub fn total(&self) -> u64 {
        u64::from(self.sequences) * u64::from(self.sequence_pages) * self.page_bytes
    }

    /// Returns the bytes from one page to the next in memory: a multiple of 4 KiB, so that all
    /// pages are aligned.
    #[must_use]
    pub fn stride(&self) -> usize {
        (units_of(self.page_bytes) * UNIT) as usize
    }

    /// Returns the bytes of memory that a sequence takes: [`stride`](Self::stride) for each page.
    #[must_use]
    pub fn sequence_bytes(&self) -> usize {
        self.stride() * self.sequence_pages as usize
    }

    /// Returns a capacity that holds the whole set, the free reserve and the headers.
    ///
    /// # Errors
    /// `Unusable` if no capacity fits.
    pub fn capacity(&self, segment_bytes: u64) -> Result<u64, Failure> {
        let stored = u64::from(self.sequences) * self.sequence_bytes() as u64;
        // Small pages are never split, so the end of a segment may stay unused. Headers take space
        // too.
        let unused = (self.stride() as u64).min(u64::from(WHOLE_PAGE_UNITS) * UNIT) + HEADER_BYTES;
        let usable = segment_bytes.saturating_sub(unused).max(segment_bytes / 4);
        let segments = (stored + stored / 10).div_ceil(usable) + 1;
        let pages = u64::from(self.sequences) * u64::from(self.sequence_pages);
        capacity_for(segments, segment_bytes, pages * 512)
    }

    /// Returns the number of sequences to put until every block of a store of this capacity is
    /// written; `written` bytes of blocks are written already.
    ///
    /// # Errors
    /// `Unusable` if the capacity is too small for segments of this size.
    pub fn sequences_to_fill(
        &self,
        capacity: u64,
        segment_bytes: u64,
        written: u64,
    ) -> Result<u32, Failure> {
        let budget = Budget::divide(capacity, segment_bytes)?;
        let all = u64::from(budget.segments_max) * segment_bytes;
        let sequence = u64::from(self.sequence_pages) * self.page_bytes;
        // Put a tenth more than the bytes of all blocks, because the store keeps part of its space
        // free.
        let missing = (all + all / 10).saturating_sub(written);
        Ok(u32::try_from(missing / sequence + 1).unwrap_or(u32::MAX))
    }
}
