//! Tables: which block belongs to which slot. One table serves the moves of all parts of its pages.

use crate::core::{Core, Event, Stream};
use crate::driver::{Copies, Launch};
use crate::layout::{Direction, Kernel, MoveEntry, Part, as_bytes};
use crate::pool::Pool;
use crate::slots::{Arena, Slots};
use crate::way::Way;
use ritornello_format::{Error, Result, UNIT};
use ritornello_volume::{PageTarget, StagingBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum pages of a table.
pub const TABLE_PAGES_MAX: usize = 8192;
/// Bytes for tables, on the device and in pinned memory: enough for up to 2,048 tables of at most
/// 512 pages each. A table keeps its memory while its move waits, which may take a step of the
/// engine. If no memory is free for a table, its moves use the copy engines.
const TABLE_BYTES: usize = 8 << 20;

/// Memory for tables, allocated once: pinned memory, and device memory of the same length, in which
/// a table has the same offset. This memory is not shared with slots, so that calls which wait for
/// slots do not take the memory of tables.
#[derive(Debug)]
pub(crate) struct TableMemory {
    arena: Arc<Arena>,
    base: u64,
}

impl TableMemory {
    pub(crate) fn new(core: &Arc<Core>) -> Result<Arc<Self>> {
        let arena = Arena::new(core, TABLE_BYTES)?;
        let base = core.driver().allocate(arena.capacity())?;
        Ok(Arc::new(Self { arena, base }))
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

impl Drop for TableMemory {
    fn drop(&mut self) {
        let core = self.arena.core();
        if !core.can_free() {
            return;
        }
        // SAFETY: moves in flight hold references to tables, and tables to the memory they use.
        if let Err(error) = unsafe { core.driver().free(self.base) } {
            tracing::warn!(%error, "the tables of moves could not be freed on the device");
        }
    }
}

/// Blocks of a pool and the slots that belong to them: page `n` of the slots is block `blocks[n]`.
#[derive(Debug)]
pub struct Table {
    core: Arc<Core>,
    pool: Arc<Pool>,
    slots: Arc<Slots>,
    direction: Direction,
    /// The stream of all moves of this table: the first move uploads the table for later moves.
    stream: Stream,
    entries: Vec<MoveEntry>,
    /// `None` if the moves use no kernel.
    kernel: Option<KernelTable>,
}

/// The entries of a table as a kernel reads them, in device memory.
#[derive(Debug)]
struct KernelTable {
    memory: Arc<TableMemory>,
    grid: u32,
    /// The pinned copy of the entries, from which the device gets the table.
    source: StagingBuffer,
    /// Whether the copy to the device is queued.
    is_queued: AtomicBool,
}

impl KernelTable {
    /// `None` if no memory for a table is free: the moves are then made without a kernel.
    fn new(memory: &Arc<TableMemory>, entries: &[MoveEntry], grid: u32) -> Option<Self> {
        let source = memory.arena.pinned_copy(as_bytes(entries)).ok()?;
        Some(Self { memory: Arc::clone(memory), grid, source, is_queued: AtomicBool::new(false) })
    }

    /// The table's address on the device.
    fn address(&self) -> u64 {
        self.memory.base + self.memory.arena.offset_of(&self.source)
    }
}

impl Table {
    pub(crate) fn new(
        core: &Arc<Core>,
        memory: &Arc<TableMemory>,
        pool: &Arc<Pool>,
        slots: &Arc<Slots>,
        blocks: &[u32],
        direction: Direction,
    ) -> Result<Self> {
        let layout = pool.layout();
        let is_of_device = pool.is_of(core) && Arc::ptr_eq(slots.arena().core(), core);
        if !is_of_device || slots.page_bytes() as u64 != layout.page_bytes() {
            return Err(Error::invalid("slots and pool differ in device or page length")
                .with("slot_bytes", slots.page_bytes())
                .with("page_bytes", layout.page_bytes()));
        }
        let most = PageTarget::len(&**slots).min(TABLE_PAGES_MAX);
        if blocks.is_empty() || blocks.len() > most || !layout.whole().fits(blocks.len()) {
            return Err(Error::invalid("a table needs 1 to `most` pages, and a slot for each")
                .with("pages", blocks.len())
                .with("most", most));
        }
        layout.check_blocks(blocks, direction)?;
        let entry = |(page, &block)| MoveEntry { block, slot: slots.unit_of(page) };
        let entries: Vec<MoveEntry> = blocks.iter().enumerate().map(entry).collect();
        let pieces = blocks.len() * layout.spans().len();
        let kernel = match pool.ways().of(direction, pieces) {
            Way::Kernel { grid } => KernelTable::new(memory, &entries, grid),
            Way::Copies => None,
        };
        let stream = core.next_stream(direction);
        let (core, pool, slots) = (Arc::clone(core), Arc::clone(pool), Arc::clone(slots));
        Ok(Self { core, pool, slots, direction, stream, entries, kernel })
    }

    /// The slots that the moves of this table read or fill.
    #[must_use]
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// The pool whose blocks the moves of this table fill or read.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The direction of all moves of this table.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The stream of all moves of this table.
    pub(crate) fn stream(&self) -> Stream {
        self.stream
    }

    /// Whether moves of this table use a kernel.
    #[must_use]
    pub fn uses_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// Queues the move of `part` of all pages, after the work that `after` marks. Returns an event
    /// with which the end of the queued work can be marked, and an error if the driver refused a
    /// part of the move. The device may still run the other parts.
    ///
    /// # Errors
    /// `Retry` if no event is free; `Fatal` if the driver fails. After either error no work that
    /// moves bytes is queued.
    ///
    /// # Safety
    /// Until the queued work is complete, no other code or work writes to the bytes that the move
    /// reads, or accesses the bytes that it writes. The caller keeps `self` until then. No two
    /// threads call this function at the same time.
    pub(crate) unsafe fn queue(
        &self,
        part: &Part,
        after: Option<&Event>,
    ) -> Result<(Event, Result<()>)> {
        self.core.check()?;
        let event = self.core.event()?;
        let stream = self.core.raw_stream(self.stream);
        if let Some(after) = after {
            // SAFETY: the stream lives as long as the core.
            unsafe { after.delay(stream) }?;
        }
        let queued = match &self.kernel {
            // SAFETY: promised by the caller.
            Some(kernel) => unsafe { self.queue_kernel(kernel, part) },
            // SAFETY: promised by the caller.
            None => unsafe { self.queue_copies(part) },
        };
        Ok((event, queued))
    }

    /// # Safety
    /// The conditions of [`Table::queue`] hold.
    unsafe fn queue_kernel(&self, kernel: &KernelTable, part: &Part) -> Result<()> {
        let stream = self.core.raw_stream(self.stream);
        let table = kernel.address();
        if !kernel.is_queued.swap(true, Ordering::Relaxed) {
            let bytes = size_of_val(&*self.entries);
            // SAFETY: no move of this table is queued yet, and `self` keeps the source.
            unsafe { kernel.memory.arena.upload(&kernel.source, bytes, table, stream) }?;
        }
        let launch = Launch {
            kernel: Kernel { direction: self.direction, word: self.pool.layout().word() },
            grid: kernel.grid,
            spans: self.pool.span_address(part.spans.start),
            count: part.count(),
            units: part.units,
            moves: table,
            pages: self.entries.len() as u32,
            arena: self.slots.arena().address(),
        };
        // SAFETY: the tables stay as they are while `self` exists; promised by the caller.
        self.core.note(unsafe { self.core.driver().launch(stream, &launch) })
    }

    /// # Safety
    /// The conditions of [`Table::queue`] hold.
    unsafe fn queue_copies(&self, part: &Part) -> Result<()> {
        let arena = self.slots.arena().address();
        let mut copies = Copies::default();
        for entry in &self.entries {
            let slot = arena + u64::from(entry.slot) * UNIT;
            for (address, offset, bytes) in self.pool.layout().pieces(part, entry.block) {
                match self.direction {
                    Direction::Scatter => copies.push(address, slot + offset, bytes as usize),
                    Direction::Gather => copies.push(slot + offset, address, bytes as usize),
                }
            }
        }
        let stream = self.core.raw_stream(self.stream);
        // SAFETY: promised by the caller.
        self.core.note(unsafe { self.core.driver().copy(stream, &copies) })
    }
}
