//! The shared state of a device: its driver, its streams, its events, and whether it is broken.

use crate::driver::{Driver, Priority, RawEvent, RawStream};
use crate::layout::Direction;
use parking_lot::Mutex;
use ritornello_format::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Maximum events that exist. Each move in flight, each copy of a pool's table and each mark of an
/// engine's stream ([`crate::Device::mark`]) uses one. A mark lasts until its last reference is
/// dropped.
const EVENTS_MAX: usize = 4096;
/// Interval at which a thread asks the driver whether an event is complete: the driver offers no
/// wait with a deadline.
pub(crate) const POLL: Duration = Duration::from_micros(50);

/// Number of streams of moves.
pub(crate) const STREAMS: usize = 3;

/// A stream of moves, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(usize);

impl Stream {
    /// The stream of all gathers.
    const SAVE: Self = Self(0);
    /// The streams of scatters: two, so that the device prepares one move while it copies another.
    const LOADS: [Self; 2] = [Self(1), Self(2)];

    pub(crate) fn index(self) -> usize {
        self.0
    }
}

/// A driver with its streams and events.
#[derive(Debug)]
pub(crate) struct Core {
    driver: Arc<dyn Driver>,
    /// By the index of a [`Stream`].
    streams: [RawStream; STREAMS],
    /// Number of times that a stream of scatters was chosen ([`Core::next_stream`]).
    scatters: AtomicUsize,
    events: Mutex<Events>,
    broken: OnceLock<String>,
    process: u32,
}

#[derive(Debug, Default)]
struct Events {
    free: Vec<RawEvent>,
    made: usize,
}

impl Core {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Result<Arc<Self>> {
        let mut streams = [RawStream(0); STREAMS];
        for at in 0..STREAMS {
            let is_save = at == Stream::SAVE.index();
            let priority = if is_save { Priority::Low } else { Priority::High };
            streams[at] = driver.create_stream(priority).inspect_err(|_| {
                for stream in &streams[..at] {
                    // SAFETY: created by an earlier iteration of the loop, and not used.
                    unsafe { driver.destroy_stream(*stream) };
                }
            })?;
        }
        Ok(Arc::new(Self {
            driver,
            streams,
            scatters: AtomicUsize::new(0),
            events: Mutex::default(),
            broken: OnceLock::new(),
            process: ritornello_volume::process_id(),
        }))
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// The stream for all moves of a new table in this direction, or for the copy of a pool's
    /// table. Successive calls for scatters return their streams in turn.
    pub(crate) fn next_stream(&self, direction: Direction) -> Stream {
        match direction {
            Direction::Scatter => {
                let number = self.scatters.fetch_add(1, Ordering::Relaxed);
                Stream::LOADS[number % Stream::LOADS.len()]
            }
            Direction::Gather => Stream::SAVE,
        }
    }

    /// The driver's handle of a stream.
    pub(crate) fn raw_stream(&self, stream: Stream) -> RawStream {
        self.streams[stream.index()]
    }

    /// Returns `result`. A fatal error of the driver marks the device as broken.
    pub(crate) fn note<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            if error.kind() == ErrorKind::Fatal && self.broken.set(error.to_string()).is_ok() {
                tracing::error!(%error, "the device failed: later moves are refused");
            }
        })
    }

    /// Marks the device as broken, because it did not complete a move within `time`. Returns the
    /// error of the move.
    pub(crate) fn give_up(&self, time: Duration) -> Error {
        let seconds = time.as_secs();
        let error = || {
            Error::fatal(
                "the device does not complete a move: restart the engine to use the device again",
            )
            .with("seconds", seconds)
        };
        self.note::<()>(Err(error())).err().unwrap_or_else(error)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.get().is_some()
    }

    /// Whether the calling process is a forked child of the process that opened the device. A child
    /// has neither the device nor the threads of its parent, and a thread of the parent may have
    /// held any lock at the fork: drops must then call no driver and take no lock.
    pub(crate) fn is_forked(&self) -> bool {
        ritornello_volume::process_id() != self.process
    }

    /// Whether memory on the device can be freed after all moves that use the memory were reported:
    /// the device belongs to this process, and is not broken. A broken device may still access the
    /// memory.
    pub(crate) fn can_free(&self) -> bool {
        !self.is_forked() && !self.is_broken()
    }

    /// Returns `Fatal` if the device is broken, or the calling process is a forked child of the
    /// process that opened the device.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::fatal(
                "a forked process cannot use the device of its parent: start workers by spawn",
            ));
        }
        match self.broken.get() {
            None => Ok(()),
            Some(cause) => {
                Err(Error::fatal("the device failed: restart the engine to use the device again")
                    .with("cause", cause))
            }
        }
    }

    /// Returns an event that no stream uses.
    ///
    /// # Errors
    /// `Retry` if [`EVENTS_MAX`] events are in use; `Fatal` if the driver fails.
    pub(crate) fn event(self: &Arc<Self>) -> Result<Event> {
        let mut events = self.events.lock();
        let raw = match events.free.pop() {
            Some(raw) => raw,
            None if events.made < EVENTS_MAX => {
                let raw = self.note(self.driver.create_event())?;
                events.made += 1;
                raw
            }
            None => {
                return Err(Error::retry(
                    "too many moves are in flight on the device: try again later",
                ));
            }
        };
        Ok(Event { core: Arc::clone(self), raw })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        for event in self.events.get_mut().free.drain(..) {
            // SAFETY: created by `event`. No `Event` exists, because each refers to its `Core`.
            unsafe { self.driver.destroy_event(event) };
        }
        for stream in self.streams {
            // SAFETY: created by `new`.
            unsafe { self.driver.destroy_stream(stream) };
        }
    }
}

/// An event that one move, one copy of a pool's table, or one mark of an engine's stream uses. When
/// the value is dropped, the driver's event can be used again.
#[derive(Debug)]
pub struct Event {
    core: Arc<Core>,
    raw: RawEvent,
}

impl Event {
    /// Marks the work that is queued on `stream` now: the event is complete when this work is.
    ///
    /// # Safety
    /// The stream exists.
    pub(crate) unsafe fn record(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the event lives as long as `self`; the stream is the caller's promise.
        self.core.note(unsafe { self.core.driver.record(self.raw, stream) })
    }

    /// Makes later work of `stream` wait for the marked work.
    ///
    /// # Safety
    /// The stream exists.
    pub(crate) unsafe fn delay(&self, stream: RawStream) -> Result<()> {
        self.core.check()?;
        // SAFETY: the event lives as long as `self`; the stream is the caller's promise.
        self.core.note(unsafe { self.core.driver.wait(stream, self.raw) })
    }

    /// Whether the marked work is complete. Does not refuse a broken device, because work that was
    /// queued before the failure may still be in flight.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        self.core.note(unsafe { self.core.driver.is_complete(self.raw) })
    }

    /// Waits until the marked work is complete, at most until `deadline`. Returns whether the work
    /// is complete.
    pub(crate) fn wait(&self, deadline: Instant) -> Result<bool> {
        while !self.is_complete()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
        Ok(true)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.core.is_forked() {
            return;
        }
        self.core.events.lock().free.push(self.raw);
    }
}
