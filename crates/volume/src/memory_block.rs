//! Blocks of 4 KiB-aligned memory on the heap, for bytes that do not go through staging: run
//! headers, the last unit of a page whose length is not a multiple of 4 KiB, copies of encoded
//! pages, bytes that are read only to be searched for run headers (salvage) or to test whether a
//! page can be read, and the bytes that a self-test writes and reads back.

use ritornello_format::UNIT;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// A 4 KiB-aligned block on the heap, initially zero.
pub(crate) struct Block {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block owns its memory.
unsafe impl Send for Block {}
// SAFETY: a block owns its memory, which changes through `&mut`, or through I/O whose end its owner
// awaits.
unsafe impl Sync for Block {}

impl Block {
    /// A block of `bytes`, rounded up to a multiple of 4 KiB, at least 4 KiB.
    pub(crate) fn new(bytes: usize) -> Self {
        let unit = UNIT as usize;
        let size = bytes.clamp(1, isize::MAX as usize / 2).next_multiple_of(unit);
        // SAFETY: `unit` is a power of two, and `size`, a multiple of it, does not overflow
        // `isize`.
        let layout = unsafe { Layout::from_size_align_unchecked(size, unit) };
        // SAFETY: the size is not zero.
        let Some(ptr) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        Self { ptr, layout }
    }
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory belongs to `self` and is initialised.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory belongs to `self`, which is borrowed mutably, and is initialised.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.as_ptr(), self.layout) };
    }
}
