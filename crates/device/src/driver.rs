//! The interface to a device. A stream runs its work in order; events make the work of one stream
//! wait for work of another.

pub mod cuda;
#[cfg(feature = "emulated")]
pub mod emulated;

use crate::layout::Kernel;
use ritornello_format::Result;
use std::fmt;

/// A stream: a queue of work that the device runs in order. The number is the driver's own handle,
/// so that it can denote a stream of the engine too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub u64);

/// An event: a mark in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawEvent(pub u64);

/// The priority of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// The device's highest priority, for loads.
    High,
    /// The device's lowest priority, for saves.
    Low,
}

/// A launch of a kernel. All addresses are addresses on the device.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The kernel to launch.
    pub kernel: Kernel,
    /// Number of blocks of 1,024 threads.
    pub grid: u32,
    /// Address of the first [`SpanEntry`](crate::layout::SpanEntry) to move.
    pub spans: u64,
    /// Number of spans to move.
    pub count: u32,
    /// Number of work units ([`crate::layout::WORK_UNIT`]) of these spans in one page.
    pub units: u32,
    /// Address of the first [`MoveEntry`](crate::layout::MoveEntry).
    pub moves: u64,
    /// Number of pages to move, each with an entry in `moves`.
    pub pages: u32,
    /// Address of the arena, the pinned memory that contains the slots.
    pub arena: u64,
}

/// A list of copies, as arrays of targets, sources and lengths: the form that CUDA's batched copy
/// takes.
#[derive(Clone, Debug, Default)]
pub struct Copies {
    to: Vec<u64>,
    from: Vec<u64>,
    bytes: Vec<usize>,
}

impl Copies {
    /// Adds a copy of `bytes` bytes.
    pub fn push(&mut self, to: u64, from: u64, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }
    /// Number of copies.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
    /// Whether there are no copies.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
    /// The copies as (target, source, bytes).
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64, usize)> {
        self.to
            .iter()
            .zip(&self.from)
            .zip(&self.bytes)
            .map(|((&to, &from), &bytes)| (to, from, bytes))
    }
    /// The arrays of targets, sources and lengths.
    #[must_use]
    pub fn columns(&self) -> (&[u64], &[u64], &[usize]) {
        (&self.to, &self.from, &self.bytes)
    }
}

/// A device and its driver.
///
/// Calls that queue work, and queries of events, do not wait for work of the device. All calls may
/// come from any thread.
pub trait Driver: Send + Sync + fmt::Debug {
    /// The names of the device and of its driver, for logs and reports.
    fn describe(&self) -> String;

    /// Whether kernels can be launched; if not, [`Driver::copy`] still works.
    fn has_kernels(&self) -> bool;

    /// Whether the device has failed, so that it moves no bytes any longer. An error of a call does
    /// not imply this: the driver may refuse a call while work that was queued before still runs.
    fn has_failed(&self) -> bool;

    /// Pins `bytes` bytes of host memory at `base`, and returns their address on the device.
    ///
    /// # Errors
    /// `Retry` or `Invalid` if the driver refuses, for example because the memory is pinned
    /// already; `Fatal` if the driver fails otherwise.
    ///
    /// # Safety
    /// The memory stays mapped until it is unpinned.
    unsafe fn pin(&self, base: *mut u8, bytes: usize) -> Result<u64>;

    /// Ends [`Driver::pin`] of the memory at `base`.
    ///
    /// # Errors
    /// `Fatal` if the driver fails. The memory must then stay mapped.
    ///
    /// # Safety
    /// No work of the device accesses the memory any longer.
    unsafe fn unpin(&self, base: *mut u8) -> Result<()>;

    /// Allocates `bytes` bytes of device memory.
    ///
    /// # Errors
    /// `Retry` if the device has too little free memory. The emulated device returns `Invalid` for
    /// a length that no allocation can have.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Frees memory of [`Driver::allocate`].
    ///
    /// # Errors
    /// `Fatal` if the driver fails.
    ///
    /// # Safety
    /// No work of the device accesses the memory any longer.
    unsafe fn free(&self, address: u64) -> Result<()>;

    /// Checks that the device can access `bytes` bytes at `base`. The emulated device checks only
    /// that the bytes are inside the address space.
    ///
    /// # Errors
    /// `Invalid` if the device cannot access them.
    fn check_memory(&self, base: u64, bytes: u64) -> Result<()>;

    /// Creates a stream.
    ///
    /// # Errors
    /// `Fatal` if the driver fails; `Retry` if the thread of an emulated stream cannot start.
    fn create_stream(&self, priority: Priority) -> Result<RawStream>;

    /// Destroys a stream. Its work still completes.
    ///
    /// # Safety
    /// `stream` was created by this driver, and is not used again.
    unsafe fn destroy_stream(&self, stream: RawStream);

    /// Creates an event. An event that was never recorded is complete.
    ///
    /// # Errors
    /// `Fatal` if the driver fails.
    fn create_event(&self) -> Result<RawEvent>;

    /// Destroys an event.
    ///
    /// # Safety
    /// `event` was created by this driver, and is not used again.
    unsafe fn destroy_event(&self, event: RawEvent);

    /// Marks the work that is queued on `stream` now: the event is complete when this work is.
    ///
    /// # Errors
    /// `Fatal` if the driver fails, or earlier work of the device failed.
    ///
    /// # Safety
    /// Event and stream exist.
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Makes later work of `stream` wait until the work that `event` marks is complete.
    ///
    /// # Errors
    /// Returns the errors of [`Driver::record`].
    ///
    /// # Safety
    /// Event and stream exist.
    unsafe fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Whether the work that `event` marks is complete.
    ///
    /// # Errors
    /// Returns the errors of [`Driver::record`].
    ///
    /// # Safety
    /// The event exists.
    unsafe fn is_complete(&self, event: RawEvent) -> Result<bool>;

    /// Queues copies, in any order among each other, without a kernel.
    ///
    /// # Errors
    /// Returns the errors of [`Driver::record`].
    ///
    /// # Safety
    /// Until the copies are complete, the device can access all their bytes, and no other work or
    /// thread writes to them, or reads their targets.
    unsafe fn copy(&self, stream: RawStream, copies: &Copies) -> Result<()>;

    /// Queues a launch.
    ///
    /// # Errors
    /// Returns the errors of [`Driver::record`], and `Fatal` if the device has no kernels.
    ///
    /// # Safety
    /// Until the launch is complete, the conditions of [`Driver::copy`] hold for the tables and all
    /// bytes that the launch moves, and nothing writes to the tables.
    unsafe fn launch(&self, stream: RawStream, launch: &Launch) -> Result<()>;
}
