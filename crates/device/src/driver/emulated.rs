//! A device that is emulated by threads, for tests and measurements: device memory is memory of
//! this process, a stream is a thread, and the kernels are compiled for the CPU.
//!
//! Tests inject faults through [`Faults`].

use super::{Copies, Driver, Launch, Priority, RawEvent, RawStream};
use crate::layout::{MoveEntry, SpanEntry};
use parking_lot::Mutex;
use ritornello_format::{Error, Result};
use ritornello_volume::{ForkSafeLock, process_id};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Alignment of device memory, as CUDA's allocator has it.
const ALIGNMENT: usize = 256;
/// Maximum time that [`Faults::hold_moves`] holds moves, so that a test that fails can end.
const HOLD_MAX: Duration = Duration::from_secs(30);

/// Faults that tests inject. All may change while the device is in use.
#[derive(Debug)]
pub struct Faults {
    delay_micros: AtomicU64,
    is_held: ForkSafeLock<bool>,
    moves_left: AtomicI64,
    refused_records: AtomicI64,
    refused_queries: AtomicI64,
    refuse_pinning: AtomicBool,
    without_kernels: AtomicBool,
}

impl Faults {
    /// Makes each later copy or launch sleep `delay` before it moves bytes.
    pub fn delay_moves(&self, delay: Duration) {
        self.delay_micros.store(delay.as_micros() as u64, Ordering::Relaxed);
    }
    /// Makes each later copy or launch wait until [`Faults::release_moves`], at most 30 seconds.
    pub fn hold_moves(&self) {
        *self.is_held.lock() = true;
    }
    /// Ends [`Faults::hold_moves`].
    pub fn release_moves(&self) {
        *self.is_held.lock() = false;
        self.is_held.wake_all();
    }
    /// Lets the next `moves` copies and launches succeed. The device fails when it begins the copy
    /// or launch after them.
    pub fn fail_after(&self, moves: u32) {
        self.moves_left.store(i64::from(moves), Ordering::Relaxed);
    }
    /// Makes the next `records` calls of [`Driver::record`] fail. Work that is queued still runs.
    pub fn refuse_records(&self, records: u32) {
        self.refused_records.store(i64::from(records), Ordering::Relaxed);
    }
    /// Makes the next `queries` calls of [`Driver::is_complete`] fail. Work that is queued still
    /// runs.
    pub fn refuse_queries(&self, queries: u32) {
        self.refused_queries.store(i64::from(queries), Ordering::Relaxed);
    }
    /// Makes the device refuse to pin memory, as under a low `RLIMIT_MEMLOCK`.
    pub fn refuse_pinning(&self) {
        self.refuse_pinning.store(true, Ordering::Relaxed);
    }
    /// Leaves the device without kernels, like a CUDA device whose module did not load.
    pub fn remove_kernels(&self) {
        self.without_kernels.store(true, Ordering::Relaxed);
    }
}

/// The state that all streams of an emulated device share.
#[derive(Debug)]
struct Shared {
    faults: Faults,
    is_broken: AtomicBool,
    /// Number of copies and launches that run now.
    running: AtomicUsize,
}

impl Shared {
    fn check(&self) -> Result<()> {
        if self.is_broken.load(Ordering::SeqCst) {
            return Err(Error::fatal("the emulated device failed: the test injected the fault"));
        }
        Ok(())
    }

    /// Moves bytes by `copy` on the thread of a stream, unless the device has failed, or fails at
    /// this move ([`Faults::fail_after`]).
    fn run_move(&self, copy: impl FnOnce()) {
        let delay = Duration::from_micros(self.faults.delay_micros.load(Ordering::Relaxed));
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let mut is_held = self.faults.is_held.lock();
        let deadline = Instant::now() + HOLD_MAX;
        while *is_held && Instant::now() < deadline {
            is_held = self.faults.is_held.wait_for(is_held, HOLD_MAX);
        }
        drop(is_held);
        // Count the move before `is_broken` is read: once the device is broken and `running` is
        // zero, no move will run.
        self.running.fetch_add(1, Ordering::SeqCst);
        if self.faults.moves_left.fetch_sub(1, Ordering::Relaxed) <= 0 {
            self.is_broken.store(true, Ordering::SeqCst);
        }
        if !self.is_broken.load(Ordering::SeqCst) {
            copy();
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Number of records of an event, and the number of the latest record whose work is complete.
#[derive(Debug, Default)]
struct EventState {
    recorded: u64,
    complete: u64,
}

type Event = Arc<ForkSafeLock<EventState>>;
type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Stream {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    fn new() -> Result<Self> {
        let (work, queue) = channel::<Work>();
        let thread = std::thread::Builder::new()
            .name("emulated-stream".into())
            .spawn(move || queue.into_iter().for_each(|work| work()))?;
        Ok(Self { work: Some(work), thread: Some(thread) })
    }

    fn push(&self, work: Work) -> Result<()> {
        let sent = self.work.as_ref().is_some_and(|queue| queue.send(work).is_ok());
        if sent { Ok(()) } else { Err(Error::fatal("the thread of an emulated stream ended")) }
    }
}

impl Drop for Stream {
    /// Waits until all work of the stream is complete.
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the thread of an emulated stream panicked");
        }
    }
}

/// An emulated device.
pub struct Emulated {
    shared: Arc<Shared>,
    streams: Mutex<HashMap<u64, Stream>>,
    events: Mutex<HashMap<u64, Event>>,
    allocations: Mutex<HashMap<u64, Layout>>,
    pinned: Mutex<HashMap<usize, usize>>,
    next_handle: AtomicU64,
    calls: AtomicU64,
    launches: AtomicU64,
    process: u32,
}

impl Default for Emulated {
    fn default() -> Self {
        let faults = Faults {
            delay_micros: AtomicU64::new(0),
            is_held: ForkSafeLock::new(false),
            moves_left: AtomicI64::new(i64::MAX),
            refused_records: AtomicI64::new(0),
            refused_queries: AtomicI64::new(0),
            refuse_pinning: AtomicBool::new(false),
            without_kernels: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(Shared {
                faults,
                is_broken: AtomicBool::new(false),
                running: AtomicUsize::new(0),
            }),
            streams: Mutex::default(),
            events: Mutex::default(),
            allocations: Mutex::default(),
            pinned: Mutex::default(),
            next_handle: AtomicU64::new(1),
            calls: AtomicU64::new(0),
            launches: AtomicU64::new(0),
            process: process_id(),
        }
    }
}

impl Emulated {
    /// The faults to inject.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Number of calls that queued work on a stream: copies, launches, records, waits, and
    /// [`Emulated::run`].
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Number of calls of [`Driver::launch`] while the device had kernels.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Number of events, and number of streams, that exist.
    #[must_use]
    pub fn handles(&self) -> (usize, usize) {
        (self.events.lock().len(), self.streams.lock().len())
    }

    /// Bytes of host memory that are pinned.
    #[must_use]
    pub fn pinned_bytes(&self) -> usize {
        self.pinned.lock().values().sum()
    }

    /// Queues `work` on a stream, as an engine queues a kernel.
    ///
    /// # Errors
    /// `Invalid` if the stream does not exist.
    pub fn run(&self, stream: RawStream, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.push(stream, Box::new(work))
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    fn push(&self, stream: RawStream, work: Work) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.streams.lock().get(&stream.0) {
            Some(stream) => stream.push(work),
            None => Err(Error::invalid("the emulated device has no such stream")),
        }
    }

    fn event(&self, event: RawEvent) -> Result<Event> {
        let found = self.events.lock().get(&event.0).cloned();
        found.ok_or_else(|| Error::invalid("the emulated device has no such event"))
    }

    /// Queues `copy`, which moves bytes, on a stream. `copy` does not run if the device has failed,
    /// or fails, when the stream reaches it.
    fn push_move(&self, stream: RawStream, copy: impl FnOnce() + Send + 'static) -> Result<()> {
        self.shared.check()?;
        let shared = Arc::clone(&self.shared);
        self.push(stream, Box::new(move || shared.run_move(copy)))
    }
}

impl fmt::Debug for Emulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emulated").field("shared", &self.shared).finish_non_exhaustive()
    }
}

unsafe extern "C" {
    /// Defined in `kernels/emulated.cpp`.
    fn ritornello_emulate_kernel(
        number: u32,
        grid: u32,
        spans: *const SpanEntry,
        count: u32,
        units: u32,
        moves: *const MoveEntry,
        pages: u32,
        arena: *mut u8,
    );
}

/// Runs a kernel on this thread.
///
/// # Safety
/// The conditions of [`Driver::launch`] hold during the call.
pub unsafe fn run_kernel(launch: &Launch) {
    // SAFETY: the conditions are the caller's; the emulated device has the addresses of this
    // process.
    unsafe {
        ritornello_emulate_kernel(
            launch.kernel.index() as u32,
            launch.grid,
            launch.spans as *const SpanEntry,
            launch.count,
            launch.units,
            launch.moves as *const MoveEntry,
            launch.pages,
            launch.arena as *mut u8,
        );
    }
}

impl Driver for Emulated {
    fn describe(&self) -> String {
        "an emulated device".into()
    }

    fn has_kernels(&self) -> bool {
        !self.shared.faults.without_kernels.load(Ordering::Relaxed)
    }

    fn has_failed(&self) -> bool {
        self.shared.is_broken.load(Ordering::SeqCst)
            && self.shared.running.load(Ordering::SeqCst) == 0
    }

    unsafe fn pin(&self, base: *mut u8, bytes: usize) -> Result<u64> {
        if self.shared.faults.refuse_pinning.load(Ordering::Relaxed) {
            return Err(Error::retry("the emulated device refuses to pin memory"));
        }
        let (start, end) = (base as usize, base as usize + bytes);
        let mut pinned = self.pinned.lock();
        if pinned.iter().any(|(&at, &length)| at < end && start < at + length) {
            return Err(Error::retry("the memory is pinned already"));
        }
        pinned.insert(start, bytes);
        Ok(base as u64)
    }

    unsafe fn unpin(&self, base: *mut u8) -> Result<()> {
        match self.pinned.lock().remove(&(base as usize)) {
            Some(_) => Ok(()),
            None => Err(Error::fatal("the memory was not pinned")),
        }
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT)
            .map_err(|error| Error::invalid("the allocation is too long").because(error))?;
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc_zeroed(layout) } as u64;
        if at == 0 {
            return Err(Error::retry("the emulated device has no free memory"));
        }
        self.allocations.lock().insert(at, layout);
        Ok(at)
    }

    unsafe fn free(&self, address: u64) -> Result<()> {
        let layout = self.allocations.lock().remove(&address);
        let layout =
            layout.ok_or_else(|| Error::fatal("the memory was not allocated by this device"))?;
        // SAFETY: allocated by `allocate` with this layout, and in use by no work, promised by the
        // caller.
        unsafe { dealloc(address as *mut u8, layout) };
        Ok(())
    }

    fn check_memory(&self, base: u64, bytes: u64) -> Result<()> {
        match base.checked_add(bytes) {
            Some(_) if base != 0 => Ok(()),
            _ => Err(Error::invalid("the memory is outside the address space")),
        }
    }

    fn create_stream(&self, _: Priority) -> Result<RawStream> {
        let handle = self.handle();
        self.streams.lock().insert(handle, Stream::new()?);
        Ok(RawStream(handle))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) {
        let stream = self.streams.lock().remove(&stream.0);
        // Wait for the stream's thread without the lock, because queued work may call this device.
        drop(stream);
    }

    fn create_event(&self) -> Result<RawEvent> {
        let handle = self.handle();
        self.events.lock().insert(handle, Event::default());
        Ok(RawEvent(handle))
    }

    unsafe fn destroy_event(&self, event: RawEvent) {
        self.events.lock().remove(&event.0);
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.shared.check()?;
        if self.shared.faults.refused_records.fetch_sub(1, Ordering::Relaxed) > 0 {
            return Err(Error::fatal("the emulated driver refused to record an event"));
        }
        let event = self.event(event)?;
        let number = {
            let mut state = event.lock();
            state.recorded += 1;
            state.recorded
        };
        self.push(
            stream,
            Box::new(move || {
                let mut state = event.lock();
                state.complete = state.complete.max(number);
                drop(state);
                event.wake_all();
            }),
        )
    }

    unsafe fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.shared.check()?;
        let event = self.event(event)?;
        let number = event.lock().recorded;
        // A stream waits only for records that were queued before the wait, so waits of several
        // streams cannot form a cycle.
        self.push(
            stream,
            Box::new(move || {
                let mut state = event.lock();
                while state.complete < number {
                    state = event.wait(state);
                }
            }),
        )
    }

    unsafe fn is_complete(&self, event: RawEvent) -> Result<bool> {
        self.shared.check()?;
        if self.shared.faults.refused_queries.fetch_sub(1, Ordering::Relaxed) > 0 {
            return Err(Error::fatal("the emulated driver refused to query an event"));
        }
        let event = self.event(event)?;
        let state = event.lock();
        Ok(state.complete >= state.recorded)
    }

    unsafe fn copy(&self, stream: RawStream, copies: &Copies) -> Result<()> {
        let copies = copies.clone();
        self.push_move(stream, move || {
            for (to, from, bytes) in copies.iter() {
                // SAFETY: both ranges are memory of this process and are not accessed otherwise
                // during the copy, promised by the caller of `copy`.
                unsafe { (to as *mut u8).copy_from_nonoverlapping(from as *const u8, bytes) };
            }
        })
    }

    unsafe fn launch(&self, stream: RawStream, launch: &Launch) -> Result<()> {
        if !self.has_kernels() {
            return Err(Error::fatal("the emulated device has no kernels"));
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        let launch = *launch;
        // SAFETY: promised by the caller until the launch is complete.
        self.push_move(stream, move || unsafe { run_kernel(&launch) })
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // A forked child does not have the threads of the streams, so it cannot join them.
        if process_id() != self.process {
            self.streams.get_mut().drain().for_each(std::mem::forget);
            return;
        }
        self.streams.lock().clear();
        for (address, layout) in self.allocations.lock().drain() {
            // SAFETY: allocated by `allocate` with this layout; all streams have ended.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }
}
