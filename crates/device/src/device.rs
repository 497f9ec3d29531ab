//! A device with its pinned memory, streams and mover. A worker of an engine opens its device once.

use crate::core::{Core, Event};
use crate::driver::cuda::Cuda;
use crate::driver::{Driver, RawStream};
use crate::layout::{Direction, Span};
use crate::mover::{Done, MoveTicket, Mover};
use crate::pool::{Owner, Pool};
use crate::slots::{Arena, Slots};
use crate::table::{Table, TableMemory};
use crate::way::{Measured, Way, Ways};
use parking_lot::Mutex;
use ritornello_format::Result;
use ritornello_volume::{PageTarget, StagingStats};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Once the measurements of one direction have taken this time, the remaining [`PROBE_PIECES`] are
/// not measured in this direction.
const PROBE_TIME: Duration = Duration::from_millis(30);
/// Numbers of pieces of the moves that are measured, in the order of the measurements.
const PROBE_PIECES: [usize; 3] = [64, 512, 4096];
/// Maximum bytes of device memory that a measurement allocates.
const PROBE_BYTES: usize = 64 << 20;
/// Maximum moves of one measurement. With several moves, the mover's polling interval adds less to
/// the mean time of a move.
const MOVES_MAX: usize = 16;
/// Maximum time that the device may take for the moves of one measurement.
const MOVE_TIME: Duration = Duration::from_secs(30);

/// How a pool chooses between the two ways of its moves, by a kernel or by the copy engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WayChoice {
    /// Choose by measured times ([`Ways::add`]). In each direction no measurement begins after
    /// 30 ms. Pools whose pieces have the same average length share the measurements.
    Measure,
    /// Choose the copy engines for pieces of 128 KiB and more on average, and a kernel for shorter
    /// pieces if the device has kernels.
    ByLength,
    /// Use this way for all moves, for tests and benchmarks. A device without kernels always uses
    /// the copy engines.
    Always(Way),
}

/// A device with its streams, its pinned memory and its mover.
#[derive(Debug)]
pub struct Device {
    // This field is dropped first: dropping the mover ends the moves, which use the other fields.
    mover: Mover,
    tables: Arc<TableMemory>,
    arena: Arc<Arena>,
    core: Arc<Core>,
    /// Measured times of moves by both ways, by the average length of a piece in bytes. Later pools
    /// with the same average length use the same times.
    measured: Mutex<HashMap<u64, Ways>>,
}

impl Device {
    /// Opens CUDA device `ordinal` with at least `staging` bytes of pinned memory.
    ///
    /// # Errors
    /// Returns the errors of [`Cuda::open`] and [`Device::new`].
    pub fn open(ordinal: u32, staging: usize) -> Result<Arc<Self>> {
        Self::new(Arc::new(Cuda::open(ordinal)?), staging)
    }

    /// A device of `driver` with at least `staging` bytes of pinned memory for slots.
    ///
    /// # Errors
    /// `Retry` if memory cannot be allocated or pinned; `Fatal` if the driver fails.
    pub fn new(driver: Arc<dyn Driver>, staging: usize) -> Result<Arc<Self>> {
        let core = Core::new(driver)?;
        let arena = Arena::new(&core, staging)?;
        let tables = TableMemory::new(&core)?;
        let mover = Mover::new(&core)?;
        Ok(Arc::new(Self { mover, tables, arena, core, measured: Mutex::default() }))
    }

    /// The names of the device and of its driver, for logs and reports.
    #[must_use]
    pub fn describe(&self) -> String {
        self.core.driver().describe()
    }

    /// Whether the device is broken, because the driver failed or the device did not complete a
    /// move in time. All later moves are refused.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.core.is_broken()
    }

    /// Checks that the device can be used.
    ///
    /// # Errors
    /// `Fatal` if the device is broken, or the calling process is a forked child of the process
    /// that opened the device.
    pub fn check(&self) -> Result<()> {
        self.core.check()
    }

    /// Size and usage of the pinned memory from which slots are taken.
    #[must_use]
    pub fn staging(&self) -> StagingStats {
        self.arena.stats()
    }

    /// Registers an engine's KV memory: `blocks` blocks in `spans`. The bytes of a block in all
    /// spans, in this order, are a page. The pool keeps a reference to `owner`.
    ///
    /// # Errors
    /// `Invalid` if the spans overlap, alternate with different strides, exceed a limit, or are not
    /// allocated on the device; `Retry` if memory is short, or too many moves and marks are in use;
    /// `Fatal` if the device is broken.
    ///
    /// # Safety
    /// The memory stays allocated until `owner` is dropped.
    pub unsafe fn pool(
        &self,
        spans: &[Span],
        blocks: u32,
        choice: WayChoice,
        owner: Owner,
    ) -> Result<Arc<Pool>> {
        // SAFETY: promised by the caller.
        let pool = unsafe { Pool::new(self.tables.arena(), spans, blocks, owner) }?;
        let ways = match choice {
            WayChoice::ByLength => pool.ways().clone(),
            WayChoice::Always(way) => pool.ways().clone().force(way),
            WayChoice::Measure => self.measure(&pool)?,
        };
        Ok(Arc::new(pool.with_ways(ways)))
    }

    /// Slots for `pages` pages of `page_bytes` bytes. Waits for memory until `deadline`, at most 30
    /// seconds, or until `is_stopped` returns true. `None` if no free span was long enough before
    /// that, the pages exceed the pinned memory, or the device cannot be used.
    #[must_use]
    pub fn slots(
        &self,
        page_bytes: usize,
        pages: usize,
        deadline: Option<Instant>,
        is_stopped: &dyn Fn() -> bool,
    ) -> Option<Arc<Slots>> {
        self.check().ok()?;
        Slots::take(&self.arena, page_bytes, pages, deadline, is_stopped).map(Arc::new)
    }

    /// A table of moves between page `n` of `slots` and block `blocks[n]` of `pool`, for each `n`.
    ///
    /// # Errors
    /// `Invalid` if slots and pool differ in device or page length, a block does not exist, two
    /// pages would fill one block, there are more blocks than slots, or the table is empty or too
    /// long; `Fatal` if the device cannot be used.
    pub fn table(
        &self,
        pool: &Arc<Pool>,
        slots: &Arc<Slots>,
        blocks: &[u32],
        direction: Direction,
    ) -> Result<Arc<Table>> {
        self.check()?;
        Table::new(&self.core, &self.tables, pool, slots, blocks, direction).map(Arc::new)
    }

    /// Submits the move of bytes `part` of all pages of `table`, after the work that `after`
    /// marks. `done` is called on the mover's thread when the move has ended, and must not block.
    ///
    /// # Errors
    /// `Invalid` if the part is empty, exceeds the page, or does not begin and end where spans
    /// begin or end; `Retry` if too many moves wait; `Fatal` if the device is broken.
    ///
    /// # Safety
    /// From the completion of `after` until the move is complete, no other code or work writes to
    /// the bytes that the move reads, or accesses the bytes that the move writes. After a failed
    /// move this holds until the process exits.
    pub unsafe fn submit(
        &self,
        table: &Arc<Table>,
        part: Range<u64>,
        after: Option<Arc<Event>>,
        done: Option<Done>,
    ) -> Result<MoveTicket> {
        self.core.check()?;
        let part = table.pool().layout().part(&part)?;
        // SAFETY: promised by the caller.
        unsafe { self.mover.submit(table, part, after, done) }
    }

    /// Marks the work that is queued on an engine's stream now.
    ///
    /// # Errors
    /// `Retry` if too many moves and marks are in use; `Fatal` if the driver fails, or the device
    /// is broken.
    ///
    /// # Safety
    /// The stream exists.
    pub unsafe fn mark(&self, stream: RawStream) -> Result<Arc<Event>> {
        self.core.check()?;
        let event = self.core.event()?;
        // SAFETY: promised by the caller.
        unsafe { event.record(stream) }?;
        Ok(Arc::new(event))
    }

    /// Measures the ways with pieces of the pool's average length, in memory that is not the
    /// pool's. Begins no measurement of a direction after [`PROBE_TIME`]. Without kernels, or if
    /// pieces of this length were measured before, nothing is measured.
    fn measure(&self, pool: &Pool) -> Result<Ways> {
        let mut ways = pool.ways().clone();
        let layout = pool.layout();
        let word = u64::from(layout.word().bytes());
        let piece = layout.page_bytes() / layout.spans().len() as u64 / word * word;
        if piece == 0 || !self.core.driver().has_kernels() {
            return Ok(ways);
        }
        if let Some(known) = self.measured.lock().get(&piece) {
            return Ok(known.clone());
        }
        let slot_bytes = piece.next_multiple_of(ritornello_format::UNIT) as usize;
        let most = PROBE_BYTES.min(self.arena.capacity() / 2) / slot_bytes;
        for direction in [Direction::Scatter, Direction::Gather] {
            let began = Instant::now();
            for pieces in PROBE_PIECES.into_iter().filter(|pieces| *pieces <= most) {
                let scratch = match self.core.driver().allocate(piece as usize * pieces) {
                    Ok(scratch) => Scratch { core: Arc::clone(&self.core), address: scratch },
                    // The engine may have allocated all memory: use the measurements made so far.
                    Err(_) => break,
                };
                let measured = self.measure_moves(&scratch, piece as u32, pieces, direction)?;
                let Some(measured) = measured else { break };
                ways.add(measured);
                if began.elapsed() >= PROBE_TIME {
                    break;
                }
            }
        }
        if !ways.measured().is_empty() {
            self.measured.lock().insert(piece, ways.clone());
        }
        Ok(ways)
    }

    /// Measures both ways with `pieces` pieces. `None` if the pinned memory is in use.
    fn measure_moves(
        &self,
        scratch: &Scratch,
        piece: u32,
        pieces: usize,
        direction: Direction,
    ) -> Result<Option<Measured>> {
        let span = Span { base: scratch.address, bytes: piece, stride: u64::from(piece) };
        let now = Some(Instant::now());
        let Some(slots) = self.slots(piece as usize, pieces, now, &|| false) else {
            return Ok(None);
        };
        let blocks = scattered(PageTarget::len(&*slots) as u32);
        let mut times = [Duration::ZERO; 2];
        for (time, way) in times.iter_mut().zip([Way::kernel(direction), Way::Copies]) {
            // SAFETY: the memory was allocated with this length, and outlives the pool.
            let pool =
                unsafe { self.pool(&[span], pieces as u32, WayChoice::Always(way), Arc::new(())) }?;
            let table = self.table(&pool, &slots, &blocks, direction)?;
            // The first move is not measured, because it includes the upload of the table and the
            // loading of the kernel.
            self.measure_move(&table, 1)?;
            let times = (PROBE_PIECES[2] / pieces).min(MOVES_MAX) as u32;
            *time = self.measure_move(&table, times)? / times;
        }
        Ok(Some(Measured { direction, pieces, kernel: times[0], copies: times[1] }))
    }

    /// The time of `times` whole moves of `table` in succession.
    fn measure_move(&self, table: &Arc<Table>, times: u32) -> Result<Duration> {
        let began = Instant::now();
        let part = 0..table.pool().layout().page_bytes();
        let (mut last, mut refusal) = (None, None);
        for _ in 0..times {
            // SAFETY: only these moves access slots and scratch memory.
            match unsafe { self.submit(table, part.clone(), None, None) } {
                Ok(ticket) => last = Some(ticket),
                Err(error) => refusal = Some(error),
            }
        }
        // Moves that were submitted must end before their memory is freed.
        let has_ended = match last {
            Some(ticket) => ticket.wait(began + MOVE_TIME)?,
            None => true,
        };
        match refusal {
            Some(error) if has_ended => return Err(error),
            None if has_ended => return Ok(began.elapsed()),
            _ => {}
        }
        Err(self.core.give_up(MOVE_TIME))
    }
}

/// The numbers below `count`, a power of two of at least eight, in an order in which neighbours are
/// not consecutive. The copy engines may move pieces as one if they are adjacent in host memory and
/// in device memory; the pieces of a page are adjacent in its slot only.
fn scattered(count: u32) -> Vec<u32> {
    debug_assert!(count.is_power_of_two());
    (0..count).map(|number| number.wrapping_mul(37) % count).collect()
}

/// Device memory of a measurement of the ways. A drop frees the memory, unless the device is broken
/// and may still access it.
struct Scratch {
    core: Arc<Core>,
    address: u64,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.core.can_free() {
            return;
        }
        // SAFETY: the device is not broken, so the measured moves are complete.
        if let Err(error) = unsafe { self.core.driver().free(self.address) } {
            tracing::warn!(%error, "the device memory of a measurement could not be freed");
        }
    }
}
