//! Limits of a run index.

use ritornello_format::checkpoint::{CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{FRAME_OVERHEAD, RunImage};

/// Limits of a [`super::RunIndex`]. The defaults fit a store of some hundred thousand runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Bytes of files that the index may take, all of them together and in the worst case: two
    /// checkpoints, the journal back to the older one, and what is not written yet. Inserts that
    /// could exceed it are refused with `Retry`. [`RunOptions::metadata_bytes_for`] computes it.
    /// An open that rewrites the index may exceed it by one checkpoint until it returns.
    pub metadata_bytes_max: u64,
    /// Bytes of journal that may wait in memory for a sync. Inserts beyond it are refused with
    /// `Retry`; removals, which are small, are not.
    pub pending_bytes_max: u64,
    /// Bytes of memory that the index may have resident. Inserts that would exceed it are refused
    /// with `Retry`; what is there can be read, and removed, which makes room again. An eighth is
    /// kept for journal on its way to the disk, and a quarter of the rest for what an allocator
    /// loses between blocks. What an index holds already when it is opened is loaded whatever this
    /// says, and opening takes 8 bytes a page more for a moment.
    pub memory_bytes_max: u64,
    /// About as many bytes of runs are gathered for one write of a checkpoint.
    pub checkpoint_write_bytes: usize,
    /// Whether the previous owner closed the index without a failed sync. `false` after a failed
    /// sync, a kill, or an open that failed: what is read may then be in the page cache only, and a
    /// sync of the same files would report success and write nothing. The open rewrites all of it
    /// into new files before it returns.
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
    /// Bytes of journal that may wait: of the eighth that is kept for it half is for the copy that
    /// is being written.
    pub(super) fn pending_max(&self) -> u64 {
        self.pending_bytes_max.min(self.memory_bytes_max / 16)
    }

    /// Bytes of records, hashes and slots.
    pub(super) fn tables_max(&self) -> u64 {
        ((self.memory_bytes_max - 2 * self.pending_max()) / 4 * 3).max(1)
    }

    /// What [`RunOptions::metadata_bytes_max`] must be to hold `runs` runs of `pages` pages and
    /// `extents` extents each.
    #[must_use]
    pub fn metadata_bytes_for(runs: u64, pages: u32, extents: u32) -> u64 {
        let image = RunImage::bytes(pages as usize, extents as usize) as u64;
        checkpoint_bytes(runs.saturating_mul(image), 256 << 10).saturating_mul(5) / 2 + (1 << 20)
    }
}

/// A checkpoint is due when the current journal file is this long: a sixteenth of the budget. Three
/// journal files and two checkpoints of two fifths of the budget then fit into it.
pub(crate) fn journal_bytes_max(budget: u64) -> u64 {
    (budget / 16).max(64 << 10)
}

/// Length of a checkpoint of so many bytes of images, written `frame` bytes at a time. No frame but
/// the last has less.
pub(crate) fn checkpoint_bytes(images: u64, frame: usize) -> u64 {
    let frames = images / frame.max(1) as u64 + 2;
    (CheckpointHeader::BYTES + CheckpointFrame::END_BYTES) as u64
        + images
        + frames * FRAME_OVERHEAD as u64
}
