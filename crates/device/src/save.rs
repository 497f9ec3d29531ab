//! Saves: pages gathered from the device into slots when they are submitted, and stored later.

use crate::core::Event;
use crate::device::Device;
use crate::driver::RawStream;
use crate::layout::Direction;
use crate::load::{MOVES_TIME, Moved};
use crate::mover::MoveTicket;
use crate::pool::Pool;
use crate::slots::Slots;
use ritornello_format::{Error, Result};
use ritornello_volume::transfer::Control;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Maximum bytes of a window. A put of this length keeps a disk busy to its end, although the next
/// put begins only after it.
const WINDOW_BYTES: usize = 128 << 20;
/// Saves leave half of the pinned memory to loads, for which requests wait.
const SHARE: usize = 2;
/// Minimum number of windows that fit the saves' share.
const WINDOWS: usize = 4;

/// Stores pages of a save: the range of pages, and slots with these pages.
pub type Write<'a> = dyn FnMut(Range<usize>, Arc<Slots>, &Control) -> Result<Moved> + 'a;

/// A window whose gather was submitted.
#[derive(Debug)]
struct Gathering {
    pages: Range<usize>,
    slots: Arc<Slots>,
    ticket: MoveTicket,
}

/// Pages whose gathers were submitted.
#[derive(Debug)]
pub struct Save {
    windows: VecDeque<Gathering>,
    pages: usize,
}

/// Orders writes to the blocks of a save, which are safe before its pages are stored.
#[derive(Clone, Debug)]
pub struct SaveFence(Arc<[MoveTicket]>);

impl Device {
    /// Submits gathers of the leading blocks for which slots are free, after the work that `after`
    /// marks. Waits for nothing.
    ///
    /// # Errors
    /// Returns the errors of [`Device::table`] and [`Device::submit`].
    ///
    /// # Safety
    /// From the completion of `after` until the save's fence orders it, no other code or work
    /// writes to the blocks.
    pub unsafe fn gather(
        &self,
        pool: &Arc<Pool>,
        blocks: &[u32],
        after: Option<Arc<Event>>,
    ) -> Result<Save> {
        self.check()?;
        pool.layout().check_blocks(blocks, Direction::Gather)?;
        let page_bytes = pool.layout().page_bytes();
        let windows = self.windows(pool, blocks.len(), SHARE * WINDOWS, WINDOW_BYTES);
        let mut save = Save { windows: VecDeque::new(), pages: 0 };
        for pages in (0..windows.count()).map(|number| windows.pages(number)) {
            let staging = self.staging();
            let bytes = Slots::stride(page_bytes as usize) * pages.len();
            if staging.in_use + bytes > staging.capacity / SHARE {
                break;
            }
            let now = Some(Instant::now());
            let slots = self.slots(page_bytes as usize, pages.len(), now, &|| false);
            let Some(slots) = slots else { break };
            let table = self.table(pool, &slots, &blocks[pages.clone()], Direction::Gather)?;
            // SAFETY: promised by the caller.
            let ticket = unsafe { self.submit(&table, 0..page_bytes, after.clone(), None) }?;
            save.pages = pages.end;
            save.windows.push_back(Gathering { pages, slots, ticket });
        }
        Ok(save)
    }
}

impl Save {
    /// Leading pages that are gathered.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The fence of this save.
    #[must_use]
    pub fn fence(&self) -> SaveFence {
        SaveFence(self.windows.iter().map(|window| window.ticket.clone()).collect())
    }

    /// Calls `write` for each window in order, after its gather, until a window is not stored
    /// whole. Frees the slots of each window that was written.
    ///
    /// # Errors
    /// The error of a gather or of `write`.
    pub fn store(mut self, control: &Control, write: &mut Write<'_>) -> Result<Moved> {
        let mut moved = Moved { pages: 0, bytes: 0, reason: "" };
        while let Some(window) = self.windows.pop_front() {
            if !window.ticket.wait(Instant::now() + MOVES_TIME)? {
                return Err(Error::retry("the device has not gathered the pages of a save")
                    .with("seconds", MOVES_TIME.as_secs()));
            }
            let written = write(window.pages.clone(), window.slots, control)?;
            moved.pages += written.pages;
            moved.bytes += written.bytes;
            if written.pages < window.pages.len() {
                moved.reason = written.reason;
                break;
            }
        }
        Ok(moved)
    }
}

impl SaveFence {
    /// Makes later work of `stream` wait until all blocks were read. Waits until the gathers are
    /// queued on the device, at most until `deadline`; returns `false` if that comes first.
    ///
    /// # Errors
    /// Returns the errors of [`MoveTicket::fence`].
    ///
    /// # Safety
    /// The stream exists.
    pub unsafe fn fence(&self, stream: RawStream, deadline: Instant) -> Result<bool> {
        for gather in &*self.0 {
            // SAFETY: promised by the caller.
            if !unsafe { gather.fence(stream, deadline) }? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all blocks were read, at most until `deadline`. Returns whether they were.
    ///
    /// # Errors
    /// The error of a gather that failed.
    pub fn wait(&self, deadline: Instant) -> Result<bool> {
        for gather in &*self.0 {
            if !gather.wait(deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
