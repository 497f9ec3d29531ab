//! Slots: contiguous pages in pinned host memory, between files and the device.

use crate::core::Core;
use crate::driver::{Copies, RawStream};
use ritornello_format::{Error, Result, UNIT};
use ritornello_volume::{
    Fragment, FragmentMut, PageSource, PageTarget, Staging, StagingBuffer, StagingStats,
};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// An arena: one allocation of staging memory, pinned as a whole, of which slots and tables are
/// parts.
#[derive(Debug)]
pub(crate) struct Arena {
    core: Arc<Core>,
    staging: Arc<Staging>,
    base: NonNull<u8>,
    /// The arena's address on the device.
    address: u64,
}

// SAFETY: an arena is plain memory; `Staging` gives each part of it to one owner at a time.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Allocates and pins an arena of at least `bytes`, which makes the arena's memory resident.
    pub(crate) fn new(core: &Arc<Core>, bytes: usize) -> Result<Arc<Self>> {
        let staging = Staging::new(bytes)?;
        let capacity = staging.capacity();
        let mut whole = staging
            .try_take(capacity)
            .ok_or_else(|| Error::retry("the arena of slots is in use").with("bytes", capacity))?;
        let base = NonNull::from(whole.bytes_mut()).cast::<u8>();
        drop(whole);
        // SAFETY: the arena stays mapped while `staging` exists, and `drop` unpins it first.
        let address = core.note(unsafe { core.driver().pin(base.as_ptr(), capacity) })?;
        Ok(Arc::new(Self { core: Arc::clone(core), staging, base, address }))
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// A copy of `bytes` in pinned memory. `Retry` if no memory is free.
    pub(crate) fn pinned_copy(&self, bytes: &[u8]) -> Result<StagingBuffer> {
        let mut buffer = self.staging.try_take(bytes.len()).ok_or_else(|| {
            Error::retry("no pinned memory is free for a table").with("bytes", bytes.len())
        })?;
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Ok(buffer)
    }

    /// Offset in this arena of `buffer`, one of its buffers, in bytes.
    pub(crate) fn offset_of(&self, buffer: &StagingBuffer) -> u64 {
        buffer.bytes().as_ptr() as u64 - self.base.as_ptr() as u64
    }

    /// Queues a copy of the first `bytes` bytes of `source`, a buffer of this arena, to the device
    /// address `to`.
    ///
    /// # Safety
    /// `to` has room for `bytes` bytes, which no other work accesses. The caller keeps `source` and
    /// the memory at `to` until the copy is complete.
    pub(crate) unsafe fn upload(
        &self,
        source: &StagingBuffer,
        bytes: usize,
        to: u64,
        stream: RawStream,
    ) -> Result<()> {
        let mut copies = Copies::default();
        copies.push(to, self.address + self.offset_of(source), bytes);
        // SAFETY: promised by the caller.
        self.core.note(unsafe { self.core.driver().copy(stream, &copies) })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn capacity(&self) -> usize {
        self.staging.capacity()
    }

    pub(crate) fn stats(&self) -> StagingStats {
        self.staging.stats()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // The memory of a forked child is not pinned, so it can be unmapped.
        if self.core.is_forked() {
            return;
        }
        let unpinned = match self.core.check() {
            // SAFETY: moves in flight hold references to slots, and slots to the arena.
            Ok(()) => unsafe { self.core.driver().unpin(self.base.as_ptr()) },
            broken => broken,
        };
        if let Err(error) = unpinned {
            tracing::warn!(%error, "pinned memory could not be unpinned");
            // The device may still access the memory, so it must not be unmapped.
            std::mem::forget(Arc::clone(&self.staging));
        }
    }
}

/// Pages in pinned memory, each contiguous and aligned to 4 KiB. A get reads pages of a store into
/// slots, and a put writes pages from slots to a store; moves copy pages between slots and the
/// device.
///
/// Dropping the last reference frees the memory. A move in flight holds a reference.
#[derive(Debug)]
pub struct Slots {
    arena: Arc<Arena>,
    /// Owns the memory, and frees it when dropped.
    _buffer: StagingBuffer,
    first: NonNull<u8>,
    pages: usize,
    page_bytes: usize,
    /// Distance between pages, a multiple of 4 KiB.
    stride: usize,
}

// SAFETY: the memory belongs to this value. Calls that receive its fragments, and moves, access it
// in the order that the caller promises.
unsafe impl Send for Slots {}
// SAFETY: as for `Send`.
unsafe impl Sync for Slots {}

impl Slots {
    /// Slots for `pages` pages. Waits for memory until `deadline`, at most 30 seconds, or until
    /// `is_stopped` returns true. `None` if no free span of the arena was long enough before that,
    /// or `pages` do not fit the arena.
    pub(crate) fn take(
        arena: &Arc<Arena>,
        page_bytes: usize,
        pages: usize,
        deadline: Option<Instant>,
        is_stopped: &dyn Fn() -> bool,
    ) -> Option<Self> {
        let stride = Self::stride(page_bytes);
        // Take one buffer for all pages: if each page were taken alone, two calls that each hold a
        // part of their pages could wait for each other.
        let bytes = stride.checked_mul(pages)?;
        let mut buffer = arena.staging.take(bytes, deadline, is_stopped)?;
        let memory = buffer.bytes_mut();
        // A put writes the bytes between the end of a page and the end of its last unit to disk, as
        // zeroes. No code writes to these bytes later.
        memory.chunks_mut(stride).take(pages).for_each(|page| page[page_bytes..].fill(0));
        let first = NonNull::from(memory).cast::<u8>();
        let arena = Arc::clone(arena);
        Some(Self { arena, _buffer: buffer, first, pages, page_bytes, stride })
    }

    /// Distance between pages of `page_bytes` bytes.
    pub(crate) fn stride(page_bytes: usize) -> usize {
        page_bytes.max(1).next_multiple_of(UNIT as usize)
    }

    /// Address of the first page, and the distance between pages.
    #[must_use]
    pub fn memory(&self) -> (*mut u8, usize) {
        (self.first.as_ptr(), self.stride)
    }

    /// Length of a page in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Offset of page `page` in the arena, in units of 4 KiB.
    pub(crate) fn unit_of(&self, page: usize) -> u32 {
        let offset = self.first.as_ptr() as usize - self.arena.base.as_ptr() as usize;
        ((offset + page * self.stride) / UNIT as usize) as u32
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn page(&self, page: usize) -> Option<*mut u8> {
        (page < self.pages).then(|| self.first.as_ptr().wrapping_add(page * self.stride))
    }
}

// SAFETY: the pages are distinct parts of a buffer that lives as long as `self`. Code of this crate
// accesses them only in moves, whose callers promise that no other call writes to the pages then.
unsafe impl PageTarget for Slots {
    fn len(&self) -> usize {
        self.pages
    }
    fn fragments(&self, page: usize, out: &mut Vec<FragmentMut>) {
        if let Some(at) = self.page(page) {
            // SAFETY: inside the buffer.
            out.push(unsafe { FragmentMut::new(at, self.page_bytes) });
        }
    }
}

// SAFETY: the buffer is initialised and lives as long as `self`; `take` cleared the bytes after
// each page, and no code writes to them.
unsafe impl PageSource for Slots {
    fn len(&self) -> usize {
        self.pages
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if let Some(at) = self.page(page) {
            // SAFETY: inside the buffer.
            out.push(unsafe { Fragment::new(at, self.page_bytes) });
        }
    }
    fn padded(&self, _: usize) -> bool {
        true
    }
}
