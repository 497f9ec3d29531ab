//! A forked child drops its copy of a device without a call of the driver.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ritornello_device::driver::emulated::Emulated;
use ritornello_device::driver::{Copies, Driver, Launch, Priority, RawEvent, RawStream};
use ritornello_device::layout::{Direction, Span};
use ritornello_device::{Device, MoveTicket, Pool, Slots, Table, Way, WayChoice};
use ritornello_format::Result;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 8192;
const BLOCKS: usize = 4;

/// An emulated device whose calls are counted.
#[derive(Debug, Default)]
struct Counted {
    emulated: Emulated,
    calls: AtomicUsize,
}

impl Counted {
    fn count(&self) -> &Emulated {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &self.emulated
    }
}

// Each call has the safety conditions of the call of `Emulated` that it makes.
#[allow(clippy::undocumented_unsafe_blocks, reason = "each call is passed on unchanged")]
impl Driver for Counted {
    fn describe(&self) -> String {
        self.count().describe()
    }
    fn has_kernels(&self) -> bool {
        self.count().has_kernels()
    }
    fn has_failed(&self) -> bool {
        self.count().has_failed()
    }
    unsafe fn pin(&self, base: *mut u8, bytes: usize) -> Result<u64> {
        unsafe { self.count().pin(base, bytes) }
    }
    unsafe fn unpin(&self, base: *mut u8) -> Result<()> {
        unsafe { self.count().unpin(base) }
    }
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.count().allocate(bytes)
    }
    unsafe fn free(&self, address: u64) -> Result<()> {
        unsafe { self.count().free(address) }
    }
    fn check_memory(&self, base: u64, bytes: u64) -> Result<()> {
        self.count().check_memory(base, bytes)
    }
    fn create_stream(&self, priority: Priority) -> Result<RawStream> {
        self.count().create_stream(priority)
    }
    unsafe fn destroy_stream(&self, stream: RawStream) {
        unsafe { self.count().destroy_stream(stream) }
    }
    fn create_event(&self) -> Result<RawEvent> {
        self.count().create_event()
    }
    unsafe fn destroy_event(&self, event: RawEvent) {
        unsafe { self.count().destroy_event(event) }
    }
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        unsafe { self.count().record(event, stream) }
    }
    unsafe fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        unsafe { self.count().wait(stream, event) }
    }
    unsafe fn is_complete(&self, event: RawEvent) -> Result<bool> {
        unsafe { self.count().is_complete(event) }
    }
    unsafe fn copy(&self, stream: RawStream, copies: &Copies) -> Result<()> {
        unsafe { self.count().copy(stream, copies) }
    }
    unsafe fn launch(&self, stream: RawStream, launch: &Launch) -> Result<()> {
        unsafe { self.count().launch(stream, launch) }
    }
}

/// Runs `child` in a forked child. Returns the number that `child` returns, at most 100; 101 if
/// `child` panics.
fn in_child(child: impl FnOnce() -> usize) -> i32 {
    // SAFETY: the child allocates little and exits with `_exit`.
    let process = unsafe { libc::fork() };
    if process == 0 {
        // SAFETY: kills the child if it hangs.
        unsafe { libc::alarm(20) };
        let status = catch_unwind(AssertUnwindSafe(child)).map_or(101, |status| status.min(100));
        // SAFETY: exits the child here, without running the test harness.
        unsafe { libc::_exit(status as i32) };
    }
    let mut status = 0;
    // SAFETY: the process is our child.
    assert_eq!(unsafe { libc::waitpid(process, &raw mut status, 0) }, process);
    assert!(libc::WIFEXITED(status), "the child must end by itself: {status}");
    libc::WEXITSTATUS(status)
}

/// A device that has completed a gather of block 2, and the stream of an engine.
struct Rig {
    ticket: MoveTicket,
    table: Arc<Table>,
    slots: Arc<Slots>,
    pool: Arc<Pool>,
    device: Arc<Device>,
    counted: Arc<Counted>,
    stream: RawStream,
    _memory: Vec<u8>,
}

impl Rig {
    fn new() -> Self {
        let counted: Arc<Counted> = Arc::default();
        let mut memory = vec![0_u8; BLOCKS * PAGE];
        let base = memory.as_mut_ptr() as u64;
        let span = Span { base, bytes: PAGE as u32, stride: PAGE as u64 };
        let device = Device::new(Arc::clone(&counted) as Arc<dyn Driver>, 4 << 20).unwrap();
        let choice = WayChoice::Always(Way::Kernel { grid: 1 });
        // SAFETY: the caller keeps the memory, which is in the rig, until the pool is dropped.
        let pool = unsafe { device.pool(&[span], BLOCKS as u32, choice, Arc::new(())) }.unwrap();
        let slots = device.slots(PAGE, 1, None, &|| false).unwrap();
        let table = device.table(&pool, &slots, &[2], Direction::Gather).unwrap();
        let stream = counted.emulated.create_stream(Priority::Low).unwrap();
        // SAFETY: nothing else accesses the memory.
        let ticket = unsafe { device.submit(&table, 0..PAGE as u64, None, None) }.unwrap();
        assert!(ticket.wait(Instant::now() + Duration::from_secs(30)).unwrap());
        Self { ticket, table, slots, pool, device, counted, stream, _memory: memory }
    }
}

#[test]
fn forked_child_drops_a_device_without_its_driver() {
    let Rig { ticket, table, slots, pool, device, counted, stream, _memory } = Rig::new();
    // SAFETY: the stream exists.
    let mark = unsafe { device.mark(stream) }.unwrap();
    let calls = in_child(|| {
        let before = counted.calls.load(Ordering::Relaxed);
        drop((mark, ticket, table, slots, pool, device));
        counted.calls.load(Ordering::Relaxed) - before
    });
    assert_eq!(calls, 0, "the child must not call the driver");
}

#[test]
fn forked_child_drops_the_streams_of_a_closed_device_without_its_driver() {
    let Rig { ticket, table, slots, pool, device, counted, _memory, .. } = Rig::new();
    // The device's thread that queues moves ends when the device is dropped. After that only
    // `slots` keeps the device's streams.
    drop((ticket, table, pool, device));
    let calls = in_child(|| {
        let before = counted.calls.load(Ordering::Relaxed);
        drop(slots);
        let calls = counted.calls.load(Ordering::Relaxed) - before;
        let is_last = Arc::into_inner(counted).map(drop).is_some();
        if is_last { calls } else { 100 }
    });
    assert_eq!(calls, 0, "the child must not call the driver");
}
