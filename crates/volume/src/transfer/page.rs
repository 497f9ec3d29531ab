//! The memory of a page during a transfer: which of its bytes move in place, and which through
//! staging.

use super::{Control, stream_copy};
use crate::io_engine::IoVec;
use crate::memory_block::Block;
use crate::page_memory::{PageSource, PageTarget};
use crate::segments::Segments;
use ritornello_format::UNIT;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Which bytes of a page's memory the kernel can read or write without a copy by this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direct {
    /// All bytes.
    Any,
    /// Whole units at aligned addresses, as `O_DIRECT` demands.
    Aligned,
    /// No byte of a page of at least 4 KiB: such pages go through staging, except padded pages,
    /// which are in staging already.
    Never,
}

impl Direct {
    /// Returns `Never` if `control` sends pages through staging, else the requirement of the files
    /// of `segments`.
    pub(super) fn of(segments: &Segments, control: &Control) -> Self {
        match (control.through_staging, segments.needs_alignment()) {
            (true, _) => Self::Never,
            (false, true) => Self::Aligned,
            (false, false) => Self::Any,
        }
    }
}

/// The fragments of one page of a source or a target. Most pages are one fragment, which needs no
/// heap memory: a call has thousands of pages.
pub(super) struct PageMemory {
    iovecs: SmallVec<[IoVec; 1]>,
    /// Offset of each iovec in the page.
    starts: SmallVec<[usize; 1]>,
    bytes: usize,
    /// Leading bytes of the page that move in place. Zero if the page goes through staging; else
    /// all whole units, and a last unit that is not full only if padding follows it in memory.
    in_place: usize,
}

impl PageMemory {
    /// Page `page` of `source`; `None` if it is not `bytes` long.
    pub(super) fn of_source(
        source: &dyn PageSource,
        page: usize,
        bytes: usize,
        direct: Direct,
    ) -> Option<Self> {
        let mut fragments = Vec::new();
        source.fragments(page, &mut fragments);
        // The cast changes the type only: a write to a file does not change its source.
        let iovecs = fragments.iter().map(|part| IoVec::new(part.as_ptr().cast_mut(), part.len()));
        Self::new(iovecs, bytes, direct, source.padded(page))
    }

    /// Page `page` of `target`; `None` if it is not `bytes` long.
    pub(super) fn of_target(
        target: &dyn PageTarget,
        page: usize,
        bytes: usize,
        direct: Direct,
    ) -> Option<Self> {
        let mut fragments = Vec::new();
        target.fragments(page, &mut fragments);
        let iovecs = fragments.iter().map(|part| IoVec::new(part.as_ptr(), part.len()));
        Self::new(iovecs, bytes, direct, false)
    }

    /// `bytes` of staging memory at the address `ptr`, which is a multiple of 4 KiB.
    pub(super) fn of_staging(ptr: *mut u8, bytes: usize) -> Self {
        Self {
            iovecs: smallvec![IoVec::new(ptr, bytes)],
            starts: smallvec![0],
            bytes,
            in_place: bytes,
        }
    }

    /// A page without memory, for reads that miss before they begin.
    pub(super) fn empty() -> Self {
        Self { iovecs: SmallVec::new(), starts: SmallVec::new(), bytes: 0, in_place: 0 }
    }

    fn new(
        fragments: impl Iterator<Item = IoVec>,
        bytes: usize,
        direct: Direct,
        padded: bool,
    ) -> Option<Self> {
        let mut iovecs = SmallVec::<[IoVec; 1]>::new();
        for iovec in fragments {
            if !iovec.extends(iovecs.last_mut()) {
                iovecs.push(iovec);
            }
        }
        let mut total = 0usize;
        let mut starts = SmallVec::with_capacity(iovecs.len());
        for iovec in &iovecs {
            starts.push(total);
            total = total.checked_add(iovec.len())?;
        }
        if total != bytes {
            return None;
        }
        let unit = UNIT as usize;
        let is_last = |at: usize| at + 1 == iovecs.len();
        let fits = |at: usize, iovec: &IoVec| {
            (iovec.ptr() as usize).is_multiple_of(unit)
                && (is_last(at) || iovec.len().is_multiple_of(unit))
        };
        let fit = || iovecs.iter().enumerate().all(|(at, iovec)| fits(at, iovec));
        let is_staged = match direct {
            Direct::Any => false,
            Direct::Aligned => !fit(),
            Direct::Never => !padded,
        };
        let in_place = if is_staged {
            0
        } else if padded && iovecs.last().is_some_and(|last| fits(iovecs.len() - 1, last)) {
            bytes.next_multiple_of(unit)
        } else {
            bytes - bytes % unit
        };
        Some(Self { iovecs, starts, bytes, in_place })
    }

    pub(super) fn in_place(&self) -> usize {
        self.in_place
    }
    /// Whether all whole units of the page move in place. True for a page shorter than 4 KiB, even
    /// if it moves through a buffer.
    pub(super) fn is_in_place(&self) -> bool {
        self.in_place > 0 || self.bytes < UNIT as usize
    }

    /// Appends the memory of bytes `range`, which end at or before [`PageMemory::in_place`].
    pub(super) fn iovecs(&self, range: Range<usize>, out: &mut Vec<IoVec>) {
        let mut left = range.len();
        for (iovec, skip) in self.iovecs_from(range.start) {
            if left == 0 {
                return;
            }
            // A range that exceeds the last fragment ends in the padding that `PageSource::padded`
            // promises.
            let last = self.iovecs.last().is_some_and(|last| last.ptr() == iovec.ptr());
            let room = if last { left } else { iovec.len() - skip };
            let take = left.min(room);
            IoVec::new(iovec.ptr().wrapping_add(skip), take).push_to(out);
            left -= take;
        }
    }

    /// Copies bytes `range` of the page to `to` and fills the remainder of `to` with zeroes.
    ///
    /// # Safety
    /// The page's memory is readable, and nothing writes to it during the call.
    pub(super) unsafe fn gather(&self, range: Range<usize>, to: &mut [u8]) {
        let mut rest = to;
        // SAFETY: promised by the caller.
        unsafe {
            self.for_each(range, |bytes| {
                if let Some((head, tail)) =
                    std::mem::take(&mut rest).split_at_mut_checked(bytes.len())
                {
                    head.copy_from_slice(bytes);
                    rest = tail;
                }
            });
        }
        rest.fill(0);
    }

    /// Copies `from` to bytes `range` of the page, clipped to the page's end.
    ///
    /// # Safety
    /// The page's memory belongs to a target, no other code accesses it during the call, and `from`
    /// does not overlap it.
    pub(super) unsafe fn scatter(&self, range: Range<usize>, from: &[u8]) {
        let bytes = from.len().min(range.len());
        // SAFETY: `from` has `bytes` bytes; the caller promised the other conditions.
        unsafe { self.write_from(range.start, from.as_ptr(), bytes) };
    }

    /// Copies `from` to the page, starting at its byte `at`, clipped to the page's end, past the
    /// processor's caches ([`stream_copy`]).
    ///
    /// # Safety
    /// The conditions of [`PageMemory::scatter`] apply.
    pub(super) unsafe fn stream(&self, at: usize, from: &[u8]) {
        let mut rest = from;
        for (iovec, skip) in self.iovecs_from(at) {
            let (now, behind) = rest.split_at(rest.len().min(iovec.len() - skip));
            // SAFETY: inside the fragment, which a target promises to be writable; no overlap,
            // promised by the caller.
            unsafe { stream_copy::copy(now.as_ptr(), iovec.ptr().add(skip), now.len()) };
            rest = behind;
        }
    }

    /// Copies `bytes` bytes at `from` to the page, starting at its byte `at`, clipped to the page's
    /// end.
    ///
    /// # Safety
    /// The conditions of [`PageMemory::scatter`] apply. The bytes at `from` are readable; another
    /// process may change them during the copy, so they are read through a raw pointer.
    pub(super) unsafe fn write_from(&self, at: usize, mut from: *const u8, bytes: usize) {
        let mut left = bytes;
        for (iovec, skip) in self.iovecs_from(at) {
            let now = left.min(iovec.len() - skip);
            // SAFETY: inside the fragment, which a target promises to be writable; no overlap,
            // promised by the caller.
            unsafe { iovec.ptr().add(skip).copy_from_nonoverlapping(from, now) };
            from = from.wrapping_add(now);
            left -= now;
        }
    }

    /// Copies `bytes` bytes of the page, starting at its byte `at`, to `to`, clipped to the page's
    /// end.
    ///
    /// # Safety
    /// The conditions of [`PageMemory::gather`] apply. The bytes at `to` are writable and do not
    /// overlap the page.
    pub(super) unsafe fn read_to(&self, at: usize, mut to: *mut u8, bytes: usize) {
        let mut left = bytes;
        for (iovec, skip) in self.iovecs_from(at) {
            let now = left.min(iovec.len() - skip);
            // SAFETY: inside the fragment, which is readable; no overlap, promised by the caller.
            unsafe { to.copy_from_nonoverlapping(iovec.ptr().add(skip), now) };
            to = to.wrapping_add(now);
            left -= now;
        }
    }

    /// A copy of the first `bytes` of the page.
    ///
    /// # Safety
    /// The conditions of [`PageMemory::gather`] apply.
    pub(super) unsafe fn to_block(&self, bytes: usize) -> Block {
        let mut block = Block::new(bytes);
        // SAFETY: promised by the caller.
        unsafe { self.gather(0..bytes, &mut block.bytes_mut()[..bytes]) };
        block
    }

    /// The address of bytes `range` of the page, if they are contiguous in memory.
    pub(super) fn contiguous(&self, range: &Range<usize>) -> Option<*mut u8> {
        let (iovec, skip) = self.iovecs_from(range.start).next()?;
        (skip + range.len() <= iovec.len()).then(|| iovec.ptr().wrapping_add(skip))
    }

    /// Calls `visit` with bytes `range` of the page, in order.
    ///
    /// # Safety
    /// The conditions of [`PageMemory::gather`] apply.
    pub(super) unsafe fn for_each(&self, range: Range<usize>, mut visit: impl FnMut(&[u8])) {
        let mut left = range.end.min(self.bytes).saturating_sub(range.start);
        for (iovec, skip) in self.iovecs_from(range.start) {
            if left == 0 {
                return;
            }
            let take = left.min(iovec.len() - skip);
            // SAFETY: inside the fragment, which is readable, promised by the caller.
            visit(unsafe { std::slice::from_raw_parts(iovec.ptr().add(skip), take) });
            left -= take;
        }
    }

    /// The iovecs starting at byte `at`, each with the number of its bytes to skip.
    fn iovecs_from(&self, at: usize) -> impl Iterator<Item = (&IoVec, usize)> {
        let first = self.starts.partition_point(|&start| start <= at).saturating_sub(1);
        let inside = at < self.bytes;
        self.iovecs[first..]
            .iter()
            .zip(&self.starts[first..])
            .filter_map(move |(iovec, &start)| inside.then_some((iovec, at.saturating_sub(start))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_block::Block;
    use crate::page_memory::{BorrowedPages, BorrowedPagesMut};

    fn memory(parts: Vec<&[u8]>, direct: Direct) -> PageMemory {
        let bytes = parts.iter().map(|part| part.len()).sum();
        PageMemory::of_source(&BorrowedPages::fragmented(&[parts]), 0, bytes, direct).unwrap()
    }

    #[test]
    fn aligned_fragments_move_in_place() {
        let (a, b) = (Block::new(8192), Block::new(8192));
        assert_eq!(memory(vec![a.bytes(), b.bytes()], Direct::Aligned).in_place(), 16384);
        assert_eq!(memory(vec![a.bytes(), &b.bytes()[..5000]], Direct::Aligned).in_place(), 12288);
        assert_eq!(memory(vec![&a.bytes()[..5000], b.bytes()], Direct::Aligned).in_place(), 0);
        assert_eq!(memory(vec![&a.bytes()[1..]], Direct::Aligned).in_place(), 0);
        assert_eq!(memory(vec![&a.bytes()[1..]], Direct::Any).in_place(), 4096);
        assert_eq!(memory(vec![a.bytes(), b.bytes()], Direct::Never).in_place(), 0);
    }

    #[test]
    fn page_with_different_length_is_refused() {
        let bytes = [0; 10];
        let source = BorrowedPages::new(&[&bytes]);
        assert!(PageMemory::of_source(&source, 0, 11, Direct::Aligned).is_none());
        assert!(PageMemory::of_source(&source, 1, 10, Direct::Aligned).is_none());
    }

    #[test]
    fn any_range_of_a_page_is_gathered_from_its_fragments() {
        let bytes: Vec<u8> = (0..100).collect();
        let page =
            memory(vec![&bytes[..7], &bytes[7..7], &bytes[7..50], &bytes[50..]], Direct::Any);
        let split = {
            let (mut x, mut y) = ([0; 33], [0; 67]);
            x.copy_from_slice(&bytes[..33]);
            y.copy_from_slice(&bytes[33..]);
            (x, y)
        };
        let apart = memory(vec![&split.0, &split.1], Direct::Any);
        for from in 0..100 {
            for to in from..=100 {
                for page in [&page, &apart] {
                    let mut out = [0xee; 104];
                    // SAFETY: the arrays outlive the page.
                    unsafe { page.gather(from..to, &mut out) };
                    assert_eq!(out[..to - from], bytes[from..to]);
                    assert!(out[to - from..].iter().all(|&byte| byte == 0));
                }
            }
        }
    }

    #[test]
    fn scattering_stops_at_the_end_of_the_page() {
        let (mut a, mut b) = ([0; 10], [0; 20]);
        let mut pages = [vec![&mut a[..], &mut b[..]]];
        let target = BorrowedPagesMut::fragmented(&mut pages);
        let page = PageMemory::of_target(&target, 0, 30, Direct::Aligned).unwrap();
        let from: Vec<u8> = (1..=40).collect();
        // SAFETY: the arrays are borrowed for the target.
        unsafe { page.scatter(5..45, &from) };
        assert_eq!((a[4], a[5], b[0], b[19]), (0, 1, 6, 25));
    }
}
