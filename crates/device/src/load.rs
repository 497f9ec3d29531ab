//! Loads: pages that a reader fills slot by slot, copied to the device while later pages are read.
//! Consecutive pages pass through slots together, as a window (module `windows`). A lane is a
//! thread that reads windows and submits their copies.

use crate::core::Event;
use crate::device::Device;
use crate::layout::Direction;
use crate::mover::MoveTicket;
use crate::pool::Pool;
use crate::slots::Slots;
use crate::table::TABLE_PAGES_MAX;
use crate::windows::Windows;
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_volume::transfer::{Control, MissReason};
use ritornello_volume::{PageTarget, run_on_threads};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Maximum windows of a load that are read at the same time. Ten were the fastest number for a
/// store in memory on an H200 with 16 processors (`benches/gpu.py store`): fewer do not fill the
/// link, and more compete for processors.
const LANES: usize = 10;
/// Maximum bytes of a window. Short windows are faster: no copy overlaps the read of the first
/// window, no read overlaps the copy of the last, and slots that are soon reused are still in the
/// processor's cache.
const WINDOW_BYTES: usize = 4 << 20;
/// Time after which a load logs that its moves have not ended, or a save fails because a gather has
/// not ended.
pub(crate) const MOVES_TIME: Duration = Duration::from_secs(30);

/// The result of a load, of a save, or of a window of either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Leading pages that were moved.
    pub pages: usize,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Why the page after these pages was not moved; empty if all pages were moved.
    pub reason: &'static str,
}

/// Reads pages of a load into slots. The arguments are the range of pages, slots that have one page
/// for each page of the range, and the control of the load.
pub type Read<'a> = dyn Fn(Range<usize>, Arc<Slots>, &Control) -> Result<Moved> + Sync + 'a;

/// A load in progress, which its lanes share.
struct Load<'a> {
    device: &'a Device,
    pool: &'a Arc<Pool>,
    blocks: &'a [u32],
    /// The work that must be complete before the first move. Every move waits for this work,
    /// because any lane may submit the first move.
    after: Option<Arc<Event>>,
    control: &'a Control,
    read: &'a Read<'a>,
    windows: Windows,
    /// Number of the next window to read.
    next: AtomicUsize,
    /// The windows whose copies were submitted.
    moves: Mutex<Vec<(Range<usize>, MoveTicket)>>,
    ends: Mutex<Ends>,
}

/// The first page that the load will not deliver, and why.
struct Ends {
    at: usize,
    reason: &'static str,
    error: Option<Error>,
}

impl Ends {
    fn note(&mut self, at: usize, reason: &'static str, error: Option<Error>) {
        if at < self.at {
            *self = Self { at, reason, error };
        }
    }
}

impl Device {
    /// Loads pages: `read` fills slots, and page `n` of the load is copied to block `blocks[n]`,
    /// after the work that `after` marks. Windows of pages are read by up to ten threads, the
    /// caller's included; each window is copied while later windows are read. Returns after the
    /// last copy, also if `control` stops the load earlier. The bytes of blocks whose pages were
    /// not moved are unspecified.
    ///
    /// # Errors
    /// `Invalid` if a block does not exist or occurs twice; `Fatal` if the device cannot be used,
    /// or a thread of the load panicked; otherwise the error of [`Device::table`],
    /// [`Device::submit`], `read` or a move, if this error is why the first missing page is
    /// missing.
    ///
    /// # Safety
    /// From the completion of `after` until this returns, no other code or work accesses the
    /// blocks. After an error of kind `Fatal` this holds until the process exits.
    pub unsafe fn load(
        &self,
        pool: &Arc<Pool>,
        blocks: &[u32],
        after: Option<Arc<Event>>,
        control: &Control,
        read: &Read<'_>,
    ) -> Result<Moved> {
        self.check()?;
        pool.layout().check_blocks(blocks, Direction::Scatter)?;
        let load = Load {
            device: self,
            pool,
            blocks,
            after,
            control,
            read,
            windows: self.windows(pool, blocks.len(), 2 * LANES, WINDOW_BYTES),
            next: AtomicUsize::new(0),
            moves: Mutex::default(),
            ends: Mutex::new(Ends { at: blocks.len(), reason: "", error: None }),
        };
        let lanes = LANES.min(load.windows.count());
        // SAFETY: promised by the caller.
        for lane in run_on_threads(lanes, "device-load", || unsafe { load.run_lane() }) {
            if lane.is_err() {
                let error = Error::fatal("a thread of a load panicked");
                load.ends.lock().note(0, "panic", Some(error));
            }
        }
        let mut ends = load.ends.into_inner();
        for (pages, ticket) in load.moves.into_inner() {
            // Wait without a limit: the engine may reuse the blocks when this function returns.
            loop {
                match ticket.wait(Instant::now() + MOVES_TIME) {
                    Ok(true) => break,
                    Ok(false) => {
                        tracing::warn!(
                            "the device has not completed the copies of a load in 30 s: the load \
                             continues to wait"
                        )
                    }
                    Err(error) => {
                        ends.note(pages.start, "device", Some(error));
                        break;
                    }
                }
            }
        }
        match ends.error {
            Some(error) => Err(error),
            None => {
                let bytes = ends.at as u64 * pool.layout().page_bytes();
                Ok(Moved { pages: ends.at, bytes, reason: ends.reason })
            }
        }
    }

    /// Divides `pages` pages of `pool` into windows of at most `window_bytes` bytes, short enough
    /// that the pinned memory holds `windows` of them. A window has at least one page, of any
    /// length.
    pub(crate) fn windows(
        &self,
        pool: &Pool,
        pages: usize,
        windows: usize,
        window_bytes: usize,
    ) -> Windows {
        let slot_bytes = Slots::stride(pool.layout().page_bytes() as usize);
        let window_bytes = window_bytes.min(self.staging().capacity / windows);
        Windows::new(pages, slot_bytes, window_bytes, TABLE_PAGES_MAX)
    }
}

impl Load<'_> {
    /// Reads windows and submits their copies, until no window is left, or the next window begins
    /// at or behind a page that the load will not deliver.
    ///
    /// # Safety
    /// The conditions of [`Device::load`] hold.
    unsafe fn run_lane(&self) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.windows.count() {
                return;
            }
            let pages = self.windows.pages(number);
            if pages.start >= self.ends.lock().at {
                return;
            }
            // SAFETY: promised by the caller; windows have different blocks.
            match unsafe { self.move_window(pages.clone()) } {
                Ok((read, ticket)) => {
                    self.moves.lock().extend(ticket.map(|ticket| (pages.clone(), ticket)));
                    if read.pages < pages.len() {
                        self.ends.lock().note(pages.start + read.pages, read.reason, None);
                    }
                }
                Err(error) => self.ends.lock().note(pages.start, "error", Some(error)),
            }
        }
    }

    /// Reads one window, and submits the copy of the pages that were read.
    ///
    /// # Safety
    /// The conditions of [`Device::load`] hold.
    unsafe fn move_window(&self, pages: Range<usize>) -> Result<(Moved, Option<MoveTicket>)> {
        let none = |reason| Ok((Moved { pages: 0, bytes: 0, reason }, None));
        if let Some(reason) = self.control.stop() {
            return none(reason.word());
        }
        let page_bytes = self.pool.layout().page_bytes();
        let is_stopped = || self.control.stop().is_some() || self.device.is_broken();
        let deadline = self.control.deadline;
        let slots = self.device.slots(page_bytes as usize, pages.len(), deadline, &is_stopped);
        let Some(slots) = slots else {
            return none(self.control.stop().unwrap_or(MissReason::Staging).word());
        };
        // Copies may be in flight: a panic of the reader must not leave the load before they end.
        let read =
            AssertUnwindSafe(|| (self.read)(pages.clone(), Arc::clone(&slots), self.control));
        let read = catch_unwind(read).unwrap_or_else(|_| Err(Error::fatal("a reader panicked")))?;
        let read = Moved { pages: read.pages.min(PageTarget::len(&*slots)), ..read };
        if read.pages == 0 {
            return Ok((read, None));
        }
        let blocks = &self.blocks[pages.start..pages.start + read.pages];
        let table = self.device.table(self.pool, &slots, blocks, Direction::Scatter)?;
        // SAFETY: promised by the caller; the reader has returned.
        let ticket =
            unsafe { self.device.submit(&table, 0..page_bytes, self.after.clone(), None) }?;
        Ok((read, Some(ticket)))
    }
}
