//! Options of the index `run`.

use ritornello_format::checkpoint::{CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{FRAME_OVERHEAD, RunImage};

/// Options of a [`super::RunIndex`]. The defaults suit a store of some hundred thousand runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Maximum bytes of all files in the worst case: two checkpoints, the journal back to the older
    /// checkpoint, and records that are not written yet. Inserts that could exceed the limit are
    /// refused with `Retry`. [`RunOptions::metadata_bytes_for`] computes a value. An open that
    /// rewrites the index may exceed the limit by one checkpoint until it returns.
    pub metadata_bytes_max: u64,
    /// Maximum bytes of journal records that wait to be written, without the records that a sync is
    /// writing; never more than a sixteenth of [`RunOptions::memory_bytes_max`]. Inserts beyond the
    /// limit are refused with `Retry`; removals, whose records are small, are always accepted.
    pub pending_bytes_max: u64,
    /// Maximum bytes of resident memory. Inserts that would exceed the limit are refused with
    /// `Retry`; reads and removals still work, and removals make room. Up to one eighth of the
    /// limit is kept for journal records, and a quarter of the remainder for the allocator's
    /// fragmentation. An existing index is loaded even if it exceeds the limit, and loading takes 8
    /// more bytes per page for a short time.
    pub memory_bytes_max: u64,
    /// Bytes of encoded runs that a checkpoint gathers in memory before it writes them in one
    /// write.
    pub checkpoint_write_bytes: usize,
    /// Whether the previous owner recorded a clean end of the store. No owner records one after a
    /// failed sync, a kill or a failed open, while a volume or segment is absent, or while a write
    /// may be in flight. If the value is `false`, the bytes of the files may exist in the page
    /// cache only, and a sync of these files would report success without writing them. The open
    /// therefore rewrites the whole index into new files before it returns.
    pub clean: bool,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            metadata_bytes_max: 1 << 30,
            pending_bytes_max: 64 << 20,
            memory_bytes_max: u64::MAX,
            checkpoint_write_bytes: 256 << 10,
            clean: true,
        }
    }
}

impl RunOptions {
    /// Returns the maximum bytes of waiting records: [`RunOptions::pending_bytes_max`], but at most
    /// a sixteenth of [`RunOptions::memory_bytes_max`]. The same number of bytes is kept for the
    /// records that are being written.
    pub(super) fn pending_max(&self) -> u64 {
        self.pending_bytes_max.min(self.memory_bytes_max / 16)
    }

    /// Returns the maximum bytes of the tables: the slots, the runs with their page hashes, extents
    /// and retentions, and the list of touched runs.
    pub(super) fn tables_max(&self) -> u64 {
        ((self.memory_bytes_max - 2 * self.pending_max()) / 4 * 3).max(1)
    }

    /// The [`RunOptions::metadata_bytes_max`] that holds `runs` runs of `pages` pages and `extents`
    /// extents each.
    #[must_use]
    pub fn metadata_bytes_for(runs: u64, pages: u32, extents: u32) -> u64 {
        let image = RunImage::bytes(pages as usize, extents as usize) as u64;
        checkpoint_bytes(runs.saturating_mul(image), 256 << 10).saturating_mul(5) / 2 + (1 << 20)
    }
}

/// Length of the current journal file at which a checkpoint is due: a sixteenth of the budget, at
/// least 64 KiB. Three journal files of a sixteenth each, and two checkpoints of two fifths each,
/// fit the budget.
pub(crate) fn journal_bytes_max(budget: u64) -> u64 {
    (budget / 16).max(64 << 10)
}

/// Estimated length of a checkpoint with `images` bytes of runs and retentions, in frames of
/// `frame` bytes.
pub(crate) fn checkpoint_bytes(images: u64, frame: usize) -> u64 {
    let frames = images / frame.max(1) as u64 + 2;
    (CheckpointHeader::BYTES + CheckpointFrame::END_BYTES) as u64
        + images
        + frames * FRAME_OVERHEAD as u64
}
