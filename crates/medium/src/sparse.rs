//! The contents of a simulated file.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes per block of contents.
pub(crate) const BLOCK: u64 = 4096;
/// The unit that a disk writes atomically.
pub(crate) const SECTOR: u64 = 512;

type Block = Arc<[u8; BLOCK as usize]>;

/// A sparse file: unwritten blocks read as zeroes. Clones are cheap: blocks and their table are
/// shared until a clone is written.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sparse {
    blocks: Arc<BTreeMap<u64, Block>>,
    length: u64,
    /// Number of leading blocks that are allocated, written or not.
    preallocated: u64,
}

impl Sparse {
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Bytes of allocated blocks.
    pub(crate) fn allocated(&self) -> u64 {
        let after = self.blocks.range(self.preallocated..).count() as u64;
        (self.preallocated + after) * BLOCK
    }

    /// Number of blocks that a write of `length` bytes at `offset` would add.
    pub(crate) fn missing(&self, offset: u64, length: u64) -> u64 {
        if length == 0 {
            return 0;
        }
        let first = (offset / BLOCK).max(self.preallocated);
        let end = (offset + length).div_ceil(BLOCK).max(first);
        end - first - self.blocks.range(first..end).count() as u64
    }

    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> usize {
        let length = (buffer.len() as u64).min(self.length.saturating_sub(offset));
        let mut done = 0;
        while done < length {
            let at = offset + done;
            let within = at % BLOCK;
            let take = (BLOCK - within).min(length - done);
            let to = &mut buffer[done as usize..(done + take) as usize];
            match self.blocks.get(&(at / BLOCK)) {
                Some(block) => {
                    to.copy_from_slice(&block[within as usize..(within + take) as usize]);
                }
                None => to.fill(0),
            }
            done += take;
        }
        length as usize
    }

    pub(crate) fn write(&mut self, bytes: &[u8], offset: u64) {
        let blocks = Arc::make_mut(&mut self.blocks);
        let mut done = 0;
        while done < bytes.len() as u64 {
            let at = offset + done;
            let within = at % BLOCK;
            let take = (BLOCK - within).min(bytes.len() as u64 - done);
            let block = blocks.entry(at / BLOCK).or_insert_with(|| Arc::new([0; BLOCK as usize]));
            Arc::make_mut(block)[within as usize..(within + take) as usize]
                .copy_from_slice(&bytes[done as usize..(done + take) as usize]);
            done += take;
        }
        self.length = self.length.max(offset + bytes.len() as u64);
    }

    pub(crate) fn allocate(&mut self, length: u64) {
        self.preallocated = self.preallocated.max(length.div_ceil(BLOCK));
        self.length = self.length.max(length);
    }

    pub(crate) fn set_len(&mut self, length: u64) {
        if length < self.length {
            // Truncated bytes must read as zeroes if the file grows again.
            let whole = length.div_ceil(BLOCK);
            let blocks = Arc::make_mut(&mut self.blocks);
            blocks.split_off(&whole);
            self.preallocated = self.preallocated.min(whole);
            if let Some(block) = blocks.get_mut(&(length / BLOCK)) {
                Arc::make_mut(block)[(length % BLOCK) as usize..].fill(0);
            }
        }
        self.length = length;
    }
}
