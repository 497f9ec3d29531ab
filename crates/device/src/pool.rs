//! An engine's KV memory on the device.

use crate::core::Core;
use crate::layout::{Direction, Layout, Span, SpanEntry, as_bytes};
use crate::slots::Arena;
use crate::way::Ways;
use ritornello_format::{Error, Result};
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time for the copy of a pool's table to the device. The copy may wait for work of the
/// engine.
const SETUP_TIME: Duration = Duration::from_secs(30);

/// The layout of an engine's KV memory, with its table of spans on the device. The memory belongs
/// to the engine.
#[derive(Debug)]
pub struct Pool {
    core: Arc<Core>,
    layout: Layout,
    /// Address on the device of the table of [`SpanEntry`]s that kernels read.
    spans: u64,
    ways: Ways,
    /// Keeps the engine's memory allocated: moves in flight hold a reference to the pool.
    _owner: Owner,
}

/// An object that keeps the memory of a pool allocated. It may be dropped on any thread.
pub type Owner = Arc<dyn Any + Send + Sync>;

impl Pool {
    /// Copies the table of `spans` to the device.
    ///
    /// # Safety
    /// The conditions of [`crate::Device::pool`] hold.
    pub(crate) unsafe fn new(
        arena: &Arena,
        spans: &[Span],
        blocks: u32,
        owner: Owner,
    ) -> Result<Self> {
        let core = arena.core();
        core.check()?;
        let layout = Layout::new(spans, blocks)?;
        for (number, span) in spans.iter().enumerate() {
            let bytes = span.stride * u64::from(blocks - 1) + u64::from(span.bytes);
            let checked = core.note(core.driver().check_memory(span.base, bytes));
            checked.map_err(|error| error.with("span", number))?;
        }
        let spans = core.driver().allocate(size_of_val(layout.spans()))?;
        let piece_bytes = layout.page_bytes() / layout.spans().len() as u64;
        let ways = Ways::new(piece_bytes, core.driver().has_kernels());
        // The pool frees the table when it is dropped, also if the upload finds no pinned memory.
        // After a failure of the device the table is never freed.
        let pool = Self { core: Arc::clone(core), layout, spans, ways, _owner: owner };
        pool.upload(arena)?;
        Ok(pool)
    }

    fn upload(&self, arena: &Arena) -> Result<()> {
        let bytes = as_bytes(self.layout.spans());
        let source = arena.pinned_copy(bytes)?;
        let event = self.core.event()?;
        let stream = self.core.raw_stream(self.core.next_stream(Direction::Scatter));
        // SAFETY: the table was allocated with this length, and no other work accesses it. Table
        // and source are kept until the copy is complete; after an error neither is ever freed.
        let queued = unsafe { arena.upload(&source, bytes.len(), self.spans, stream) };
        // SAFETY: the stream lives as long as the core.
        let recorded = queued.and_then(|()| unsafe { event.record(stream) });
        let outcome = match recorded.and_then(|()| event.wait(Instant::now() + SETUP_TIME)) {
            Ok(true) => return Ok(()),
            Ok(false) => self
                .core
                .note(Err(Error::fatal("the device did not copy the table of a pool in time")
                    .with("seconds", SETUP_TIME.as_secs()))),
            Err(error) => Err(error),
        };
        std::mem::forget(source);
        outcome
    }

    /// The layout of a page in the pool's blocks.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The choice between kernels and copy engines for the pool's moves, and the times measured for
    /// this choice.
    #[must_use]
    pub fn ways(&self) -> &Ways {
        &self.ways
    }

    pub(crate) fn with_ways(mut self, ways: Ways) -> Self {
        self.ways = ways;
        self
    }

    /// Address on the device of the entry of span `number`.
    pub(crate) fn span_address(&self, number: usize) -> u64 {
        self.spans + (number * size_of::<SpanEntry>()) as u64
    }

    pub(crate) fn is_of(&self, core: &Arc<Core>) -> bool {
        Arc::ptr_eq(&self.core, core)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.core.can_free() {
            return;
        }
        // SAFETY: moves in flight hold a reference to the pool.
        if let Err(error) = unsafe { self.core.driver().free(self.spans) } {
            tracing::warn!(%error, "the table of a pool could not be freed on the device");
        }
    }
}
