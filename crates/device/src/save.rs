//! Saves: pages gathered from the device into slots when they are submitted, and stored later.

use crate::core::Event;
use crate::device::Device;
use crate::driver::RawStream;
use crate::layout::Direction;
use crate::load::{MOVES_TIME, Moved};
use crate::mover::MoveTicket;
use crate::pool::Pool;
use crate::slots::Slots;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_volume::transfer::Control;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Maximum bytes of a window, the consecutive pages that one put stores. Puts follow one another.
/// The disk is idle between two puts, so puts are long.
const WINDOW_BYTES: usize = 128 << 20;
/// A gather takes slots only if at most 1/2 of the pinned memory, slots of loads included, is in
/// use afterwards. The remainder is for loads, because requests wait for loads.
const SHARE: usize = 2;
/// Minimum number of windows of a save that fit into half of the pinned memory, unless a page is
/// longer than such a window.
const WINDOWS: usize = 4;

/// Reasons why pages are not gathered: saves have no more slots, or the device takes no more moves.
/// The caller may save these pages later.
const STAGING_FULL: &str = "staging_full";
const BUSY: &str = "busy";

/// Stores pages of a save. The arguments are the range of pages, slots with these pages, and the
/// control of the call.
pub type Write<'a> = dyn FnMut(Range<usize>, Arc<Slots>, &Control) -> Result<Moved> + 'a;

/// A window whose gather was submitted.
#[derive(Debug)]
struct Gathering {
    pages: Range<usize>,
    slots: Arc<Slots>,
    ticket: MoveTicket,
}

/// A save: the pages whose gathers (copies from the device to slots) were submitted.
#[derive(Debug)]
pub struct Save {
    windows: VecDeque<Gathering>,
    pages: usize,
    reason: &'static str,
}

/// Orders writes to the blocks of a save after its gathers. A write does not need to wait until the
/// pages are stored.
#[derive(Clone, Debug)]
pub struct SaveFence(Arc<[MoveTicket]>);

impl Device {
    /// Submits gathers of the leading blocks for which slots are free, while the device takes more
    /// moves, after the work that `after` marks. Does not block.
    ///
    /// # Errors
    /// Returns the errors of [`Device::table`] and [`Device::submit`], except `Retry`.
    ///
    /// # Safety
    /// From the completion of `after` until the gathers are complete, no other code or work writes
    /// to the blocks: see [`Save::fence`].
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
        let mut save = Save { windows: VecDeque::new(), pages: 0, reason: "" };
        for pages in (0..windows.count()).map(|number| windows.pages(number)) {
            let staging = self.staging();
            let bytes = Slots::stride(page_bytes as usize) * pages.len();
            if staging.in_use + bytes > staging.capacity / SHARE {
                save.reason = STAGING_FULL;
                break;
            }
            let now = Some(Instant::now());
            let slots = self.slots(page_bytes as usize, pages.len(), now, &|| false);
            let Some(slots) = slots else {
                save.reason = STAGING_FULL;
                break;
            };
            let table = self.table(pool, &slots, &blocks[pages.clone()], Direction::Gather)?;
            // SAFETY: promised by the caller.
            let ticket = match unsafe { self.submit(&table, 0..page_bytes, after.clone(), None) } {
                Ok(ticket) => ticket,
                Err(error) if error.kind() == ErrorKind::Retry => {
                    save.reason = BUSY;
                    break;
                }
                Err(error) => return Err(error),
            };
            save.pages = pages.end;
            save.windows.push_back(Gathering { pages, slots, ticket });
        }
        Ok(save)
    }
}

impl Save {
    /// Leading pages whose gathers were submitted.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Why the pages after [`Save::pages`] are not gathered; empty if all pages are.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// The fence of this save.
    #[must_use]
    pub fn fence(&self) -> SaveFence {
        SaveFence(self.windows.iter().map(|window| window.ticket.clone()).collect())
    }

    /// Calls `write` for each window in order, after its gather, until a window is not stored
    /// whole, or until a gather failed with `Retry`, because the device had no free event. Frees
    /// the slots of each window that was written.
    ///
    /// # Errors
    /// `Retry` if a gather has not ended after 30 seconds; otherwise the first error of `write`, or
    /// of a gather except `Retry`.
    pub fn store(mut self, control: &Control, write: &mut Write<'_>) -> Result<Moved> {
        let mut moved = Moved { pages: 0, bytes: 0, reason: "" };
        while let Some(window) = self.windows.pop_front() {
            let gathered = match window.ticket.wait(Instant::now() + MOVES_TIME) {
                Err(error) if error.kind() == ErrorKind::Retry => {
                    moved.reason = BUSY;
                    break;
                }
                gathered => gathered?,
            };
            if !gathered {
                return Err(Error::retry(
                    "the device has not gathered the pages of a save: try again",
                )
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
    /// Makes later work of `stream` wait until all blocks were read. The call itself waits until
    /// the gathers are queued on the device; it returns `false` if a gather is not queued by
    /// `deadline`.
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

    /// Waits until all blocks were read; returns `false` if a block was not read by `deadline`.
    ///
    /// # Errors
    /// Returns the error of the first gather that failed.
    pub fn wait(&self, deadline: Instant) -> Result<bool> {
        for gather in &*self.0 {
            if !gather.wait(deadline)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
