//! Staging: one bounded arena of memory, in huge pages if the machine permits. Pages are copied
//! through the arena if the caller's memory cannot be used for direct I/O or slows it down, or if
//! the caller needs its memory before the I/O completes. Encoded pages are written from the arena,
//! and usually read to it.

mod arena;

pub use arena::Backing;

use crate::page_memory::{Fragment, PageSource};
use arena::Arena;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Result, UNIT};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time that a call waits for staging memory, even if its deadline is later.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Interval at which a waiter checks whether it was cancelled.
const CANCEL_CHECK: Duration = Duration::from_millis(20);

/// A bounded arena of staging memory, handed out in 4 KiB-aligned [`StagingBuffer`]s.
///
/// The arena is in huge pages if the machine permits (see [`StagingStats::backing`]), and is not
/// inherited by a forked child. A buffer of a read that its call left behind is in use until the
/// kernel has completed the read, so a disk that hangs may hold the whole arena: calls then wait
/// for memory for a limited time ([`Staging::take`]). Transparent huge pages and small pages become
/// resident when they are first used, pages of the huge-page pool when the arena is made; all stay
/// resident.
pub struct Staging {
    arena: Arena,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Free spans: offset to length, both multiples of 4 KiB. Adjacent spans are always joined.
    free: BTreeMap<usize, usize>,
    /// Number of calls that wait for memory.
    waiting: usize,
    in_use: usize,
    peak: usize,
}

/// Usage of a [`Staging`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingStats {
    /// Size of the arena in bytes.
    pub capacity: usize,
    /// Bytes in use.
    pub in_use: usize,
    /// Maximum bytes that were in use at the same time.
    pub peak: usize,
    /// The kind of the arena's memory pages.
    pub backing: Backing,
}

impl Staging {
    /// An arena of at least `bytes`, rounded up to whole huge pages.
    ///
    /// # Errors
    /// `Retry` if the address space cannot be reserved, or cannot be kept from forked children;
    /// `Invalid` if `bytes` exceeds the address space.
    pub fn new(bytes: usize) -> Result<Arc<Self>> {
        let arena = Arena::new(bytes)?;
        let free = BTreeMap::from([(0, arena.len())]);
        let state = Mutex::new(State { free, waiting: 0, in_use: 0, peak: 0 });
        Ok(Arc::new(Self { arena, state, freed: Condvar::new() }))
    }

    /// Size of the arena in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.arena.len()
    }

    /// Current usage.
    #[must_use]
    pub fn stats(&self) -> StagingStats {
        let state = self.state.lock();
        StagingStats {
            capacity: self.arena.len(),
            in_use: state.in_use,
            peak: state.peak,
            backing: self.arena.backing(),
        }
    }

    /// Memory for `bytes`, rounded up to a multiple of 4 KiB. `None` if no free span is long
    /// enough, or if a call waits in [`Staging::take`]: calls that do not wait could otherwise take
    /// every span before the waiting call.
    #[must_use]
    pub fn try_take(self: &Arc<Self>, bytes: usize) -> Option<StagingBuffer> {
        let mut state = self.state.lock();
        if state.waiting == 0 { self.carve(&mut state, bytes) } else { None }
    }

    /// Memory for `bytes`, rounded up to a multiple of 4 KiB. Waits for memory until `deadline`, at
    /// most 30 seconds, or until `is_stopped` returns true. `None` if no free span was long enough
    /// in time, or if the arena is shorter than `bytes`.
    #[must_use]
    pub fn take(
        self: &Arc<Self>,
        bytes: usize,
        deadline: Option<Instant>,
        is_stopped: &dyn Fn() -> bool,
    ) -> Option<StagingBuffer> {
        let limit = Instant::now() + WAIT_MAX;
        let deadline = deadline.map_or(limit, |deadline| deadline.min(limit));
        if bytes > self.arena.len() {
            return None;
        }
        let mut state = self.state.lock();
        loop {
            let buffer = self.carve(&mut state, bytes);
            let now = Instant::now();
            if buffer.is_some() || now >= deadline || is_stopped() {
                return buffer;
            }
            state.waiting += 1;
            self.freed.wait_until(&mut state, deadline.min(now + CANCEL_CHECK));
            state.waiting -= 1;
        }
    }

    /// Takes the first free span that is long enough: the search is short because buffers are few,
    /// and consecutive calls get adjacent spans, which keeps lists of `iovec`s short.
    fn carve(self: &Arc<Self>, state: &mut State, bytes: usize) -> Option<StagingBuffer> {
        let want = bytes.max(1).checked_next_multiple_of(UNIT as usize)?;
        let (&offset, &length) = state.free.iter().find(|(_, length)| **length >= want)?;
        state.free.remove(&offset);
        if length > want {
            state.free.insert(offset + want, length - want);
        }
        state.in_use += want;
        state.peak = state.peak.max(state.in_use);
        Some(StagingBuffer { staging: Arc::clone(self), offset, length: want })
    }

    fn release(&self, offset: usize, length: usize) {
        let mut state = self.state.lock();
        state.in_use -= length;
        let (mut from, mut to) = (offset, offset + length);
        if let Some(behind) = state.free.remove(&to) {
            to += behind;
        }
        let before = state.free.range(..from).next_back().map(|(&at, &length)| (at, length));
        if let Some((at, length)) = before
            && at + length == from
        {
            state.free.remove(&at);
            from = at;
        }
        state.free.insert(from, to - from);
        drop(state);
        self.freed.notify_all();
    }

    /// Copies pages into staging, so that the caller can reuse their memory before they are
    /// written. `None` if the arena has not enough room now, a call waits for room, or the source
    /// lacks one of the pages.
    #[must_use]
    pub fn try_copy(
        self: &Arc<Self>,
        source: &dyn PageSource,
        pages: Range<usize>,
    ) -> Option<StagedPages> {
        let requested = pages.len();
        Some(self.copy_leading(source, pages)).filter(|staged| staged.pages.len() == requested)
    }

    /// Copies the leading pages until the arena has no more room, a call waits for room, or the
    /// source lacks a page.
    #[must_use]
    pub fn copy_leading(
        self: &Arc<Self>,
        source: &dyn PageSource,
        pages: Range<usize>,
    ) -> StagedPages {
        let mut fragments = Vec::new();
        let copies = pages.map_while(|page| self.copy_page(source, page, &mut fragments));
        StagedPages { pages: copies.collect() }
    }

    fn copy_page(
        self: &Arc<Self>,
        source: &dyn PageSource,
        page: usize,
        fragments: &mut Vec<Fragment>,
    ) -> Option<(StagingBuffer, usize)> {
        fragments.clear();
        source.fragments(page, fragments);
        let bytes: usize = fragments.iter().map(Fragment::len).sum();
        let mut buffer = if bytes > 0 { self.try_take(bytes)? } else { return None };
        let mut rest = buffer.bytes_mut();
        for fragment in fragments.iter() {
            let (head, tail) = rest.split_at_mut(fragment.len());
            // SAFETY: `PageSource` promises that the bytes are readable.
            let from = unsafe { std::slice::from_raw_parts(fragment.as_ptr(), fragment.len()) };
            head.copy_from_slice(from);
            rest = tail;
        }
        rest.fill(0);
        Some((buffer, bytes))
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Staging").field(&self.stats()).finish()
    }
}

/// A buffer of staging memory. Dropping it frees the memory.
#[derive(Debug)]
pub struct StagingBuffer {
    staging: Arc<Staging>,
    offset: usize,
    length: usize,
}

impl StagingBuffer {
    /// The bytes of the buffer. The buffer may hold bytes of an earlier user.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the arena is initialised (anonymous memory starts as zeroes) and lives as long as
        // `self.staging`; `carve` assigned this span to this buffer only.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.length) }
    }

    /// Bytes `range` of the buffer, clipped to its end. I/O may be in flight on its other bytes.
    pub(crate) fn part(&self, range: Range<usize>) -> &[u8] {
        let (from, to) = (range.start.min(self.length), range.end.min(self.length));
        // SAFETY: as in `bytes`, for bytes inside the buffer.
        unsafe { std::slice::from_raw_parts(self.as_ptr().add(from), to.saturating_sub(from)) }
    }

    /// The bytes of the buffer, mutable.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.length) }
    }

    /// Frees all but the first `bytes`, rounded up to a multiple of 4 KiB.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let keep = bytes.max(1).next_multiple_of(UNIT as usize);
        if keep < self.length {
            self.staging.release(self.offset + keep, self.length - keep);
            self.length = keep;
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the span is inside the arena.
        unsafe { self.staging.arena.base().add(self.offset) }
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        self.staging.release(self.offset, self.length);
    }
}

/// Pages copied into staging: aligned and padded, so they are written without another copy.
#[derive(Debug)]
pub struct StagedPages {
    pages: Vec<(StagingBuffer, usize)>,
}

impl StagedPages {
    /// The bytes of page `page`, without padding; `None` if there is no such page.
    #[must_use]
    pub fn bytes(&self, page: usize) -> Option<&[u8]> {
        self.pages.get(page).map(|(buffer, bytes)| &buffer.bytes()[..*bytes])
    }

    /// Frees all pages before `first`, which becomes page 0.
    pub fn release_before(&mut self, first: usize) {
        self.pages.drain(..first.min(self.pages.len()));
    }
}

// SAFETY: the buffers belong to this value alone, live as long as this value, and are zero after
// the end of a page.
unsafe impl PageSource for StagedPages {
    fn len(&self) -> usize {
        self.pages.len()
    }
    fn fragments(&self, page: usize, out: &mut Vec<Fragment>) {
        if let Some((buffer, bytes)) = self.pages.get(page) {
            // SAFETY: `bytes` is at most the buffer's length.
            out.push(unsafe { Fragment::new(buffer.as_ptr(), *bytes) });
        }
    }
    fn padded(&self, _: usize) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;
