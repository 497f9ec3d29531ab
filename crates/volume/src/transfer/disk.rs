//! Transfers from and to files: operations in flight, and their memory.

mod fetches;
mod read;
mod write;

pub(super) use read::read;
pub(super) use write::write;

use super::chunk::Chunk;
use super::page::PageMemory;
use super::volume_times::VolumeTimes;
use crate::io_engine::IoVec;
use crate::memory_block::Block;
use crate::staging::StagingBuffer;
use ritornello_format::UNIT;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes checksummed per step; between steps a transfer collects completions and submits
/// operations.
const STEP: usize = 1 << 20;

/// The operations in flight, each with the value that its completion needs.
struct InFlight<'a, T> {
    slots: Vec<Option<Slot<T>>>,
    vacant: Vec<usize>,
    bytes: u64,
    limit: u64,
    /// Measures each volume; `None` if the caller measures the volume by the time of the call.
    times: Option<&'a VolumeTimes>,
}

struct Slot<T> {
    volume: u8,
    bytes: u64,
    what: T,
}

impl<'a, T> InFlight<'a, T> {
    fn new(limit: usize, times: Option<&'a VolumeTimes>) -> Self {
        Self { slots: Vec::new(), vacant: Vec::new(), bytes: 0, limit: limit as u64, times }
    }
    /// Whether another operation, of any length, may start: the bytes in flight are below the limit
    /// before it starts, and may exceed the limit afterwards.
    fn has_room(&self) -> bool {
        self.bytes < self.limit
    }
    fn is_idle(&self) -> bool {
        self.vacant.len() == self.slots.len()
    }
    /// Adds an operation of `bytes` on `volume` and returns its tag.
    fn insert(&mut self, volume: u8, bytes: u64, what: T) -> u64 {
        self.bytes += bytes;
        if let Some(times) = self.times {
            times.begin(volume, Instant::now());
        }
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(Slot { volume, bytes, what });
        slot as u64
    }
    /// Removes the completed operation `tag` and returns its value; `None` for an unknown tag.
    fn complete(&mut self, tag: u64) -> Option<T> {
        let Slot { volume, bytes, what } = self.slots.get_mut(tag as usize)?.take()?;
        self.vacant.push(tag as usize);
        self.bytes -= bytes;
        if let Some(times) = self.times {
            times.end(volume, bytes, Instant::now());
        }
        Some(what)
    }
    /// Removes all operations, which the call abandons, and returns their tags and values. The
    /// measures of the volumes do not include these operations, so the caller must not use the
    /// measures.
    fn abandon(&mut self) -> impl Iterator<Item = (u64, T)> {
        (self.vacant, self.bytes) = (Vec::new(), 0);
        let slots = std::mem::take(&mut self.slots).into_iter();
        (0..).zip(slots).filter_map(|(tag, slot)| Some((tag, slot?.what)))
    }
}

/// Bytes of one page that an operation moves: a number by which the caller knows the page, the
/// range of the bytes in the page's memory, and this memory.
type Piece<'m> = (usize, Range<usize>, &'m PageMemory);

/// Bytes of a page that move through a buffer rather than in place.
struct Bounce {
    /// The caller's number of the page: the first value of [`Piece`].
    piece: usize,
    range: Range<usize>,
    /// Whether the whole page goes through staging. If false, only its last unit is copied.
    staged: bool,
    /// Offset of the bytes in the staging buffer or in the block.
    at: usize,
}

/// The buffers of one chunk. The kernel uses them until the chunk's operation completes, so they
/// are kept with the pending operation.
#[derive(Default)]
struct OpBuffers {
    bounces: Vec<Bounce>,
    /// Holds pages that go through staging.
    staging_buffer: Option<StagingBuffer>,
    /// Holds last units that are not full: `O_DIRECT` moves whole units only.
    block: Option<Block>,
}

impl OpBuffers {
    /// Builds the iovecs of `chunk`: the run header, `header_bytes` long, from `header`; then
    /// `pieces` of pages, in place or through buffers, which this function allocates. `None` if
    /// `staging` returns no memory.
    fn prepare<'m>(
        chunk: &Chunk,
        header: Option<&Block>,
        header_bytes: u64,
        pieces: impl Iterator<Item = Piece<'m>> + Clone,
        staging: impl FnOnce(usize) -> Option<StagingBuffer>,
    ) -> Option<(Self, Vec<IoVec>)> {
        let (mut staged, mut tails) = (0, 0);
        for (_, range, memory) in pieces.clone() {
            let bytes = range.end - memory.in_place().clamp(range.start, range.end);
            *if memory.is_in_place() { &mut tails } else { &mut staged } += bytes;
        }
        let staging_buffer = if staged > 0 { Some(staging(staged)?) } else { None };
        let block = (tails > 0).then(|| Block::new(tails));
        let mut buffers = Self { bounces: Vec::new(), staging_buffer, block };
        let mut iovecs = Vec::new();
        let Range { start, end } = chunk.logical;
        if let Some(header) = header
            && start < header_bytes
        {
            let length = end.min(header_bytes) - start;
            IoVec::new(header.as_ptr().wrapping_add(start as usize), length as usize)
                .push_to(&mut iovecs);
        }
        let (mut in_staging, mut in_block) = (0, 0);
        for (piece, range, memory) in pieces {
            let split = memory.in_place().clamp(range.start, range.end);
            memory.iovecs(range.start..split, &mut iovecs);
            if split == range.end {
                continue;
            }
            let staged = !memory.is_in_place();
            let at = if staged { &mut in_staging } else { &mut in_block };
            let bounce = Bounce { piece, range: split..range.end, staged, at: *at };
            *at += bounce.range.len();
            IoVec::new(buffers.address(&bounce), bounce.range.len()).push_to(&mut iovecs);
            buffers.bounces.push(bounce);
        }
        debug_assert_eq!(iovecs.iter().map(IoVec::len).sum::<usize>() as u64, end - start);
        debug_assert!(iovecs.iter().all(|iovec| iovec.len() < u32::MAX as usize));
        debug_assert_eq!((end - start) % UNIT, 0);
        Some((buffers, iovecs))
    }

    fn address(&self, bounce: &Bounce) -> *mut u8 {
        let base = match (bounce.staged, &self.staging_buffer, &self.block) {
            (true, Some(staging_buffer), _) => staging_buffer.as_ptr(),
            (false, _, Some(block)) => block.as_ptr(),
            // Unreachable: `prepare` allocated a buffer for every bounce.
            _ => std::ptr::null_mut(),
        };
        base.wrapping_add(bounce.at)
    }

    /// The bytes of a bounce.
    ///
    /// # Safety
    /// `bounce` is one of [`OpBuffers::bounces`], and no operation is in flight on it.
    unsafe fn bytes(&self, bounce: &Bounce) -> &[u8] {
        // SAFETY: inside the staging buffer or block, which `self` owns, and which is initialised.
        unsafe { std::slice::from_raw_parts(self.address(bounce), bounce.range.len()) }
    }

    /// The bytes of a bounce, mutable.
    ///
    /// # Safety
    /// The conditions of [`OpBuffers::bytes`] apply.
    #[allow(clippy::mut_from_ref)] // Callers hold one bounce at a time, and do not share `self`.
    unsafe fn bytes_mut(&self, bounce: &Bounce) -> &mut [u8] {
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.address(bounce), bounce.range.len()) }
    }
}

/// The memory that one operation of a read writes to, except memory of the target. The kernel
/// writes to it until the operation completes.
struct OpMemory {
    buffers: OpBuffers,
    /// Staging memory of the parts of the chunk.
    _staging_buffers: Vec<Arc<StagingBuffer>>,
    /// The memory of the run's header, if the chunk holds bytes of it.
    _header: Option<Arc<Block>>,
    /// Whether the operation also writes to memory of the target, which the caller owns.
    uses_target: bool,
}
