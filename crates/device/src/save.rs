//! Saves: pages gathered from the device into slots, which a writer stores while later pages are
//! gathered.

use crate::core::Event;
use crate::device::Device;
use crate::driver::RawStream;
use crate::layout::Direction;
use crate::load::{MOVES_TIME, Moved};
use crate::mover::MoveTicket;
use crate::pool::Pool;
use crate::slots::Slots;
use ritornello_format::Result;
use ritornello_volume::ForkSafeLock;
use ritornello_volume::transfer::{Control, MissReason};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Windows that the pinned memory holds: one is put while the next is gathered, beside loads.
const WINDOWS: usize = 8;
/// Maximum bytes of a window. A put of this length keeps a disk busy to its end, although the next
/// put begins only after it.
const WINDOW_BYTES: usize = 256 << 20;

/// Stores pages of a save: the range of pages, and slots with these pages.
pub type Write<'a> = dyn FnMut(Range<usize>, Arc<Slots>, &Control) -> Result<Moved> + 'a;

/// The gathers of a save, for fences.
#[derive(Debug, Default)]
struct Gathers {
    moves: Vec<MoveTicket>,
    /// Whether no further gather will be submitted.
    are_all: bool,
}

/// A save. Dropping it ends the waits of its fence.
#[derive(Debug)]
pub struct Save {
    pool: Arc<Pool>,
    blocks: Box<[u32]>,
    fence: Arc<SaveFence>,
}

/// Orders writes to the blocks of a save, which are safe before its pages are stored.
#[derive(Debug, Default)]
pub struct SaveFence(ForkSafeLock<Gathers>);

impl Save {
    /// A save of `blocks` of `pool`.
    ///
    /// # Errors
    /// `Invalid` if a block does not exist.
    pub fn new(pool: &Arc<Pool>, blocks: &[u32]) -> Result<Self> {
        pool.layout().check_blocks(blocks, Direction::Gather)?;
        let (pool, blocks, fence) = (Arc::clone(pool), blocks.into(), Arc::default());
        Ok(Self { pool, blocks, fence })
    }

    /// The fence of this save.
    #[must_use]
    pub fn fence(&self) -> Arc<SaveFence> {
        Arc::clone(&self.fence)
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        self.fence.end_gathers();
    }
}

impl SaveFence {
    /// Makes later work of `stream` wait until all blocks were read. Waits until all gathers are
    /// queued on the device, at most until `deadline`; returns `false` if that comes first.
    ///
    /// # Errors
    /// Returns the errors of [`MoveTicket::fence`].
    ///
    /// # Safety
    /// The stream exists.
    pub unsafe fn fence(&self, stream: RawStream, deadline: Instant) -> Result<bool> {
        // SAFETY: promised by the caller.
        self.each(deadline, |gather| unsafe { gather.fence(stream, deadline) })
    }

    /// Waits until all blocks were read, at most until `deadline`. Returns whether they were.
    ///
    /// # Errors
    /// The error of a gather that failed.
    pub fn wait(&self, deadline: Instant) -> Result<bool> {
        self.each(deadline, |gather| gather.wait(deadline))
    }

    /// Calls `order` for each gather, once all are submitted. Returns `false` if one call does, or
    /// the gathers are not all submitted before `deadline`.
    fn each(
        &self,
        deadline: Instant,
        mut order: impl FnMut(&MoveTicket) -> Result<bool>,
    ) -> Result<bool> {
        let mut gathers = self.0.lock();
        while !gathers.are_all {
            match deadline.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return Ok(false),
                left => gathers = self.0.wait_for(gathers, left),
            }
        }
        let moves = gathers.moves.clone();
        drop(gathers);
        for gather in &moves {
            if !order(gather)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn add(&self, gather: MoveTicket) {
        self.0.lock().moves.push(gather);
    }

    fn end_gathers(&self) {
        self.0.lock().are_all = true;
        self.0.wake_all();
    }
}

/// A window whose gather was submitted.
struct Gathering {
    pages: Range<usize>,
    slots: Arc<Slots>,
    ticket: MoveTicket,
}

impl Device {
    /// Gathers the blocks of `save` behind the work that `after` marks, and calls `write` for each
    /// window of pages in order. While one window is written, the next is gathered.
    ///
    /// # Errors
    /// Returns the errors of [`Device::table`], [`Device::submit`] and `write`.
    ///
    /// # Safety
    /// From the completion of `after` until the fence orders it, or this returns, no other
    /// code or work writes to the blocks.
    pub unsafe fn save(
        &self,
        save: &Save,
        after: Option<Arc<Event>>,
        control: &Control,
        write: &mut Write<'_>,
    ) -> Result<Moved> {
        // SAFETY: promised by the caller.
        let saved = unsafe { self.save_windows(save, after, control, write) };
        save.fence.end_gathers();
        saved
    }

    /// # Safety
    /// The conditions of [`Device::save`] hold.
    unsafe fn save_windows(
        &self,
        save: &Save,
        mut after: Option<Arc<Event>>,
        control: &Control,
        write: &mut Write<'_>,
    ) -> Result<Moved> {
        self.check()?;
        let windows = self.windows(&save.pool, save.blocks.len(), WINDOWS, WINDOW_BYTES);
        let mut moved = Moved { pages: 0, bytes: 0, reason: "" };
        let mut next = None;
        for number in 0..windows.count() {
            let window = match next.take() {
                Some(window) => window,
                // SAFETY: promised by the caller.
                None => match unsafe {
                    self.gather(save, windows.pages(number), &mut after, control, true)
                }? {
                    Ok(window) => window,
                    Err(reason) => return Ok(Moved { reason, ..moved }),
                },
            };
            if number + 1 < windows.count() {
                // SAFETY: promised by the caller.
                next = unsafe {
                    self.gather(save, windows.pages(number + 1), &mut after, control, false)
                }?
                .ok();
            }
            if number + 1 == windows.count() || (number + 2 == windows.count() && next.is_some()) {
                save.fence.end_gathers();
            }
            if !window.ticket.wait(Instant::now() + MOVES_TIME)? {
                return Err(self.give_up(MOVES_TIME));
            }
            let written = write(window.pages.clone(), window.slots, control)?;
            moved.pages += written.pages;
            moved.bytes += written.bytes;
            if written.pages < window.pages.len() {
                moved.reason = written.reason;
                break;
            }
        }
        // A gather that was begun needlessly still reads its blocks.
        if let Some(window) = next
            && !window.ticket.wait(Instant::now() + MOVES_TIME)?
        {
            return Err(self.give_up(MOVES_TIME));
        }
        Ok(moved)
    }

    /// Submits the gather of a window. Returns the reason if `control` stops it or no slots are
    /// free; waits for slots only if `is_patient`.
    ///
    /// # Safety
    /// The conditions of [`Device::save`] hold.
    unsafe fn gather(
        &self,
        save: &Save,
        pages: Range<usize>,
        after: &mut Option<Arc<Event>>,
        control: &Control,
        is_patient: bool,
    ) -> Result<std::result::Result<Gathering, &'static str>> {
        if let Some(reason) = control.stop() {
            return Ok(Err(reason.word()));
        }
        let page_bytes = save.pool.layout().page_bytes();
        let is_stopped = || control.stop().is_some() || self.is_broken();
        let deadline = if is_patient { control.deadline } else { Some(Instant::now()) };
        let slots = self.slots(page_bytes as usize, pages.len(), deadline, &is_stopped);
        let Some(slots) = slots else {
            return Ok(Err(control.stop().unwrap_or(MissReason::Staging).word()));
        };
        let table =
            self.table(&save.pool, &slots, &save.blocks[pages.clone()], Direction::Gather)?;
        // Later gathers are behind this one in their stream.
        // SAFETY: promised by the caller.
        let ticket = unsafe { self.submit(&table, 0..page_bytes, after.take(), None) }?;
        save.fence.add(ticket.clone());
        Ok(Ok(Gathering { pages, slots, ticket }))
    }
}
