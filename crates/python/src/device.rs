//! The Python classes of a device: an engine's KV memory on it, slots in pinned host memory, moves,
//! and the loads and saves of a store.

use crate::arguments::deadline;
use crate::error::{OrRaise, invalid};
use crate::fence::Fence;
use crate::log;
use crate::outcome::stats_of;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ritornello_device::driver::RawStream;
use ritornello_device::layout::{Direction, Span};
use ritornello_device::{Device as Core, Event, MoveTicket, Moved, Slots, Way, WayChoice};
use ritornello_format::{Error, Result, Scope};
use ritornello_store::{Outcome, PutOptions, Store, Ticket};
use ritornello_volume::page_memory::{BorrowedPages, OffsetPages, PageSource};
use ritornello_volume::transfer::Control;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A GPU or an emulated device, with pinned host memory and a thread that queues moves.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct Device(Arc<Core>);

/// An engine's KV memory on a device.
struct BlockMemory {
    device: Arc<Core>,
    pool: Arc<ritornello_device::Pool>,
}

/// Registered KV memory of an engine.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct DevicePool(Arc<BlockMemory>);

/// Some blocks of a pool, in order; accepted by `Store.submit_get` and `Store.submit_put`.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct DevicePages {
    memory: Arc<BlockMemory>,
    blocks: Vec<u32>,
}

/// Pages in pinned host memory.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct DeviceSlots(Arc<Slots>);

/// A submitted move between blocks and slots.
#[pyclass(frozen, module = "ritornello._core")]
pub(crate) struct DeviceMove(MoveTicket);

#[pymethods]
impl Device {
    /// Opens CUDA device `ordinal` with at least `staging` bytes of pinned memory; with `emulated`
    /// a device that threads of this process emulate.
    #[staticmethod]
    #[pyo3(signature = (ordinal=0, *, staging=1 << 30, emulated=false))]
    fn open(py: Python<'_>, ordinal: u32, staging: usize, emulated: bool) -> PyResult<Self> {
        log::start(py)?;
        let open = || if emulated { open_emulated(staging) } else { Core::open(ordinal, staging) };
        py.detach(open).or_raise(py).map(Self)
    }

    /// Registers KV memory: `spans` holds for each tensor the address of block 0, the bytes of a
    /// block, and the distance between blocks in bytes. `owner` keeps the memory allocated. `way`
    /// chooses how bytes move: "copies" by the copy engines, "kernel:N" by a kernel with N blocks
    /// of threads. "auto" chooses between copy engines and kernel by measured times, "length" by
    /// the mean length of the pieces.
    #[pyo3(signature = (spans, blocks, *, owner, way="auto"))]
    fn pool(
        &self,
        py: Python<'_>,
        spans: Vec<(u64, u32, u64)>,
        blocks: u32,
        owner: Py<PyAny>,
        way: &str,
    ) -> PyResult<DevicePool> {
        let choice = choice_of(py, way)?;
        let span = |(base, bytes, stride)| Span { base, bytes, stride };
        let spans: Vec<Span> = spans.into_iter().map(span).collect();
        let device = Arc::clone(&self.0);
        // SAFETY: the Python caller promises that `owner` keeps the memory at these addresses.
        let register = || unsafe { device.pool(&spans, blocks, choice, Arc::new(owner)) };
        let pool = py.detach(register).or_raise(py)?;
        Ok(DevicePool(Arc::new(BlockMemory { device, pool })))
    }

    /// Slots for `pages` pages of `page_bytes` bytes, or None if no free span of the pinned memory
    /// was long enough within `timeout` seconds, at most 30, or the pages exceed the pinned memory.
    #[pyo3(signature = (page_bytes, pages, *, timeout=0.0))]
    fn slots(
        &self,
        py: Python<'_>,
        page_bytes: usize,
        pages: usize,
        timeout: f64,
    ) -> PyResult<Option<DeviceSlots>> {
        self.0.check().or_raise(py)?;
        let deadline = deadline(py, Some(timeout))?;
        let take = || self.0.slots(page_bytes, pages, deadline, &|| false);
        Ok(py.detach(take).map(DeviceSlots))
    }

    /// The names of the device and of its driver, for logs and reports.
    fn describe(&self) -> String {
        self.0.describe()
    }

    /// Whether the device is broken, because the driver failed or the device did not complete a
    /// move in time. All later moves are refused.
    #[getter]
    fn broken(&self) -> bool {
        self.0.is_broken()
    }

    /// Statistics: the names of the device and of its driver, whether the device is broken, and of
    /// its pinned memory the usage in bytes and the kind of memory pages.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let staging = self.0.staging();
        let stats = serde_json::json!({
            "device": self.0.describe(),
            "broken": self.0.is_broken(),
            "staging": {
                "capacity": staging.capacity,
                "in_use": staging.in_use,
                "peak": staging.peak,
                "backing": format!("{:?}", staging.backing),
            },
        });
        stats_of(py, &stats)
    }
}

#[cfg(feature = "emulated")]
fn open_emulated(staging: usize) -> Result<Arc<Core>> {
    use ritornello_device::driver::emulated::Emulated;
    Core::new(Arc::new(Emulated::default()), staging)
}

#[cfg(not(feature = "emulated"))]
fn open_emulated(_: usize) -> Result<Arc<Core>> {
    Err(ritornello_format::Error::invalid(
        "this wheel has no emulated device: build one with `make wheel-device`",
    ))
}

fn choice_of(py: Python<'_>, way: &str) -> PyResult<WayChoice> {
    Ok(match way {
        "auto" => WayChoice::Measure,
        "length" => WayChoice::ByLength,
        "copies" => WayChoice::Always(Way::Copies),
        _ => match way.strip_prefix("kernel:").and_then(|grid| grid.parse().ok()) {
            Some(grid @ 1..) => WayChoice::Always(Way::Kernel { grid }),
            _ => {
                let ways = "way must be \"auto\", \"length\", \"copies\" or \"kernel:N\"";
                return Err(invalid(py, format!("{ways}, not {way:?}")));
            }
        },
    })
}

#[pymethods]
impl DevicePool {
    /// Bytes of a page, over all tensors.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.0.pool.layout().page_bytes()
    }

    /// The measurements by which the pool chooses between a kernel and the copy engines for each
    /// move; empty unless `way` is "auto". For each: the direction, the number of pieces, the
    /// seconds that a kernel took, and the seconds that the copy engines took.
    #[getter]
    fn measured(&self) -> Vec<(&'static str, usize, f64, f64)> {
        let row = |m: &ritornello_device::Measured| {
            let direction = match m.direction {
                Direction::Scatter => "scatter",
                Direction::Gather => "gather",
            };
            (direction, m.pieces, m.kernel.as_secs_f64(), m.copies.as_secs_f64())
        };
        self.0.pool.ways().measured().iter().map(row).collect()
    }

    fn __len__(&self) -> usize {
        self.0.pool.layout().blocks() as usize
    }

    /// Returns the pages in these blocks, in this order.
    fn pages(&self, blocks: Vec<u32>) -> DevicePages {
        DevicePages { memory: Arc::clone(&self.0), blocks }
    }
}

#[pymethods]
impl DevicePages {
    fn __len__(&self) -> usize {
        self.blocks.len()
    }

    /// Starts to copy slots to these blocks, after the work that stream `after` has now: of each
    /// page the bytes from offset `part[0]` to below `part[1]`, or all bytes without `part`.
    #[pyo3(signature = (slots, *, part=None, after=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        slots: &DeviceSlots,
        part: Option<(u64, u64)>,
        after: Option<u64>,
    ) -> PyResult<DeviceMove> {
        self.submit(slots, Direction::Scatter, part, after).or_raise(py)
    }

    /// Starts to copy these blocks to slots, after the work that stream `after` has now; `part` as
    /// in `scatter`.
    #[pyo3(signature = (slots, *, part=None, after=None))]
    fn gather(
        &self,
        py: Python<'_>,
        slots: &DeviceSlots,
        part: Option<(u64, u64)>,
        after: Option<u64>,
    ) -> PyResult<DeviceMove> {
        self.submit(slots, Direction::Gather, part, after).or_raise(py)
    }
}

impl DevicePages {
    fn submit(
        &self,
        slots: &DeviceSlots,
        direction: Direction,
        part: Option<(u64, u64)>,
        after: Option<u64>,
    ) -> Result<DeviceMove> {
        let memory = Arc::clone(&self.memory);
        let device = Arc::clone(&memory.device);
        let part = part.map_or(0..memory.pool.layout().page_bytes(), |(start, end)| start..end);
        let table = device.table(&memory.pool, &slots.0, &self.blocks, direction)?;
        let after = mark(&device, after)?;
        // SAFETY: the Python caller promises the order of accesses to blocks and slots.
        unsafe { device.submit(&table, part, after, None) }.map(DeviceMove)
    }

    /// Checks that a page of `scope` is as long as a page of the pool, and that the blocks exist
    /// and, for a scatter, differ.
    fn check_pages(&self, scope: &Scope, direction: Direction) -> Result<()> {
        let layout = self.memory.pool.layout();
        let page_bytes = scope.resolved_page_bytes()?;
        if page_bytes != layout.page_bytes() {
            return Err(Error::invalid(
                "a page of the scope is not as long as a page of the pool: register the memory \
                 that holds this scope's pages",
            )
            .with("scope", page_bytes)
            .with("pool", layout.page_bytes()));
        }
        layout.check_blocks(&self.blocks, direction)
    }

    /// Starts a get of `keys` from `store` into these blocks, after the work that stream `after`
    /// has now.
    pub(crate) fn load(
        &self,
        store: &Arc<Store>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        control: Control,
        after: Option<u64>,
    ) -> Result<Ticket> {
        self.check_pages(&scope, Direction::Scatter)?;
        let (memory, blocks) = (Arc::clone(&self.memory), self.blocks.clone());
        let after = mark(&memory.device, after)?;
        let (pages, reader) = (blocks.len(), Arc::clone(store));
        store.submit_read(keys, pages, control, move |keys, control| {
            let device = Arc::clone(&memory.device);
            let read = |pages: Range<usize>, slots: Arc<Slots>, control: &Control| {
                Ok(moved(&reader.get_batch(&scope, &keys[pages], slots.as_ref(), control)?))
            };
            // SAFETY: the Python caller does not access the blocks until the ticket is done.
            let loaded = unsafe { device.load(&memory.pool, &blocks, after, control, &read) }?;
            Ok(outcome(pages, loaded))
        })
    }

    /// Starts a put of these blocks, after the work that stream `after` has now. Does not gather
    /// the leading pages that are stored already. Gathers the pages after them in order, until too
    /// little of the pinned memory is free or the device takes no further move.
    pub(crate) fn save(
        &self,
        store: &Arc<Store>,
        scope: Arc<Scope>,
        keys: Vec<Box<[u8]>>,
        options: PutOptions,
        control: Control,
        after: Option<u64>,
    ) -> Result<(Ticket, Fence)> {
        self.check_pages(&scope, Direction::Gather)?;
        let (memory, pages) = (Arc::clone(&self.memory), self.blocks.len());
        let first = {
            let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
            store.probe(&scope, &keys)?.min(pages)
        };
        let after = mark(&memory.device, after)?;
        // SAFETY: the Python caller orders later writes to the blocks by the fence.
        let save = unsafe { memory.device.gather(&memory.pool, &self.blocks[first..], after) }?;
        let fence = Fence::new(save.fence());
        let (gathered, unready) = (first + save.pages(), save.reason());
        let writer = Arc::clone(store);
        let ticket = store.submit_write(keys, pages, control, move |keys, control| {
            // Keep the device: a dropped device does not queue gathers that still wait.
            let _memory = memory;
            let stored = Cell::new(0_usize);
            // Puts the pages from `stored` to below `end`. The first call includes the leading
            // pages that are stored already, without their bytes: this marks them as used, and
            // retains them if `options` has a retention.
            let put = |end: usize, slots: &dyn PageSource, control: &Control| {
                let from = stored.get();
                let before = from.checked_sub(1).map(|last: usize| keys[last].into());
                let parent = before.or_else(|| options.parent.clone());
                let options = PutOptions { parent, ..options.clone() };
                let source = OffsetPages::new(slots, first.saturating_sub(from));
                let put = writer.put_batch(&scope, &keys[from..end], &source, &options, control)?;
                stored.set(from + put.pages);
                Ok::<Moved, Error>(moved(&put))
            };
            let moved = if gathered == first {
                put(first, &BorrowedPages::new(&[]), control)?
            } else {
                save.store(control, &mut |part, slots, control| {
                    let put = put(first + part.end, slots.as_ref(), control)?;
                    let pages = stored.get().saturating_sub(first + part.start);
                    Ok(Moved { pages, ..put })
                })?
            };
            let stored = stored.get();
            let is_partial = stored == gathered && gathered < pages;
            let reason = if is_partial { unready } else { moved.reason };
            Ok(outcome(pages, Moved { pages: stored, reason, ..moved }))
        })?;
        Ok((ticket, fence))
    }
}

fn mark(device: &Core, stream: Option<u64>) -> Result<Option<Arc<Event>>> {
    // SAFETY: the Python caller passes a stream that exists.
    stream.map(|stream| unsafe { device.mark(RawStream(stream)) }).transpose()
}

fn moved(outcome: &Outcome) -> Moved {
    Moved { pages: outcome.pages, bytes: outcome.bytes, reason: outcome.reason }
}

fn outcome(pages: usize, moved: Moved) -> Outcome {
    let mut ok = vec![false; pages];
    ok[..moved.pages].fill(true);
    Outcome { pages: moved.pages, bytes: moved.bytes, seconds: 0.0, reason: moved.reason, ok }
}

#[pymethods]
impl DeviceSlots {
    /// Address of the first page, and the distance in bytes from each page to the next.
    #[getter]
    fn memory(&self) -> (usize, usize) {
        let (first, stride) = self.0.memory();
        (first.addr(), stride)
    }

    /// Bytes of a page.
    #[getter]
    fn page_bytes(&self) -> usize {
        self.0.page_bytes()
    }
}

#[pymethods]
impl DeviceMove {
    /// Waits until the move has ended, at most `timeout` seconds. Returns whether the move has
    /// ended.
    #[pyo3(signature = (timeout=30.0))]
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let deadline = deadline(py, Some(timeout))?.unwrap_or_else(Instant::now);
        py.detach(|| self.0.wait(deadline)).or_raise(py)
    }

    /// Makes later work of `stream` wait until the move is complete. Returns False if the move was
    /// not queued within `timeout` seconds: the stream then does not wait.
    #[pyo3(signature = (stream, timeout=30.0))]
    fn fence(&self, py: Python<'_>, stream: u64, timeout: f64) -> PyResult<bool> {
        let deadline = deadline(py, Some(timeout))?.unwrap_or_else(Instant::now);
        // SAFETY: the Python caller passes a stream that exists.
        py.detach(|| unsafe { self.0.fence(RawStream(stream), deadline) }).or_raise(py)
    }
}
