//! The mover: one thread of a device, which queues the moves of each direction in the order of
//! their submission, gathers before scatters, and reports when each move has ended.

use crate::core::{Core, Event, POLL, STREAMS};
use crate::driver::RawStream;
use crate::layout::{Direction, Part};
use crate::table::Table;
use ritornello_format::{Error, ErrorKind, Result};
use ritornello_volume::ForkSafeLock;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum moves in one direction that wait for the mover's thread to queue them on the device.
const QUEUE_MAX: usize = 4096;
/// Maximum time that closing a device waits for moves in flight. The memory of moves that do not
/// end in this time is never freed.
const CLOSE_TIME: Duration = Duration::from_secs(10);

/// Interval at which the thread asks the driver of a broken device about moves in flight.
const BROKEN_POLL: Duration = Duration::from_millis(1);

/// Called on the mover's thread when a move has ended. A callback must not block.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// The progress of a move.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Submitted,
    /// Queued on the device. The event marks its end.
    Queued(Arc<Event>),
    Complete,
    Failed(ErrorKind, String),
}

/// A submitted move.
#[derive(Clone, Debug, Default)]
pub struct MoveTicket(Arc<ForkSafeLock<Stage>>);

impl MoveTicket {
    /// Makes later work of `stream` wait until the move is complete. The call itself waits until
    /// the move is queued on the device; it returns `false`, without an effect on the stream, if
    /// the move is not queued by `deadline`.
    ///
    /// # Errors
    /// The move's error if it has failed; `Fatal` if the driver fails.
    ///
    /// # Safety
    /// The stream exists.
    pub unsafe fn fence(&self, stream: RawStream, deadline: Instant) -> Result<bool> {
        let event = match &*self.wait_while(deadline, |stage| matches!(stage, Stage::Submitted)) {
            Stage::Submitted => return Ok(false),
            Stage::Queued(event) => Arc::clone(event),
            ended => return ended.result().map(|()| true),
        };
        // SAFETY: promised by the caller.
        unsafe { event.delay(stream) }.map(|()| true)
    }

    /// Waits until the move has ended; returns `false` if it has not ended by `deadline`.
    ///
    /// # Errors
    /// The move's error if it has failed. The device may still access the move's memory only if the
    /// device was closed before the move had ended, or if the driver counts as failed because every
    /// query failed for five seconds.
    pub fn wait(&self, deadline: Instant) -> Result<bool> {
        let is_pending = |stage: &Stage| matches!(stage, Stage::Submitted | Stage::Queued(_));
        let stage = self.wait_while(deadline, is_pending);
        if is_pending(&stage) { Ok(false) } else { stage.result().map(|()| true) }
    }

    fn wait_while(
        &self,
        deadline: Instant,
        is_pending: impl Fn(&Stage) -> bool,
    ) -> std::sync::MutexGuard<'_, Stage> {
        let mut stage = self.0.lock();
        while is_pending(&stage) {
            match deadline.saturating_duration_since(Instant::now()) {
                Duration::ZERO => break,
                left => stage = self.0.wait_for(stage, left),
            }
        }
        stage
    }

    fn set(&self, stage: Stage) {
        *self.0.lock() = stage;
        self.0.wake_all();
    }

    fn end(&self, result: Result<()>, done: Option<Done>) {
        self.set(match &result {
            Ok(()) => Stage::Complete,
            Err(error) => Stage::Failed(error.kind(), error.to_string()),
        });
        let Some(done) = done else { return };
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            tracing::error!("the callback of a move panicked");
        }
    }
}

impl Stage {
    fn result(&self) -> Result<()> {
        match self {
            Self::Failed(kind, message) => Err(Error::new(*kind, message.clone())),
            _ => Ok(()),
        }
    }
}

/// A move, from its submission to its end.
struct Move {
    table: Arc<Table>,
    part: Part,
    after: Option<Arc<Event>>,
    ticket: MoveTicket,
    done: Option<Done>,
}

impl Move {
    /// Reports the end of a move, after releasing its table and slots.
    fn end(self, result: Result<()>) {
        let Self { table, part: _, after, ticket, done } = self;
        drop((table, after));
        ticket.end(result, done);
    }

    /// Ends a move with an error. If the device is broken, never frees the move's memory: after a
    /// close that gave up waiting ([`CLOSE_TIME`]), the device may still access this memory.
    fn fail(self, core: &Core, error: Error) {
        if core.is_broken() {
            std::mem::forget(Arc::clone(&self.table));
        }
        self.end(Err(error));
    }
}

/// The index of a direction in arrays of two queues. Gathers come first, because an engine may wait
/// until a gather is queued, while a scatter waits for queued work of the engine anyway.
fn place_of(direction: Direction) -> usize {
    match direction {
        Direction::Gather => 0,
        Direction::Scatter => 1,
    }
}

#[derive(Default)]
struct State {
    /// One queue for each direction ([`place_of`]).
    submitted: [VecDeque<Move>; 2],
    is_closed: bool,
}

impl State {
    fn next(&mut self) -> Option<Move> {
        self.submitted.iter_mut().find_map(VecDeque::pop_front)
    }

    fn has_next(&self) -> bool {
        self.submitted.iter().any(|queue| !queue.is_empty())
    }
}

/// The thread that queues moves, and reports their ends.
pub(crate) struct Mover {
    state: Arc<ForkSafeLock<State>>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Mover {
    pub(crate) fn new(core: &Arc<Core>) -> Result<Self> {
        let state = Arc::new(ForkSafeLock::new(State::default()));
        let (of_thread, core) = (Arc::clone(&state), Arc::clone(core));
        let thread = std::thread::Builder::new()
            .name("ritornello-mover".into())
            .spawn(move || InFlight { core, queues: Default::default() }.run(&of_thread))?;
        Ok(Self { state, thread: Some(thread), process: std::process::id() })
    }

    /// Submits the move of `part` of all pages of `table`, after the work that `after` marks.
    ///
    /// # Safety
    /// The conditions of [`crate::Device::submit`] hold.
    pub(crate) unsafe fn submit(
        &self,
        table: &Arc<Table>,
        part: Part,
        after: Option<Arc<Event>>,
        done: Option<Done>,
    ) -> Result<MoveTicket> {
        let ticket = MoveTicket::default();
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(Error::new(ErrorKind::Closed, "the device is closed"));
        }
        let place = place_of(table.direction());
        if state.submitted[place].len() >= QUEUE_MAX {
            return Err(Error::retry("too many moves wait for the device: try again later"));
        }
        let (table, of_caller) = (Arc::clone(table), ticket.clone());
        state.submitted[place].push_back(Move { table, part, after, ticket, done });
        drop(state);
        self.state.wake_one();
        Ok(of_caller)
    }
}

impl fmt::Debug for Mover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Mover")
            .field("submitted", &state.submitted.iter().map(VecDeque::len).sum::<usize>())
            .field("is_closed", &state.is_closed)
            .finish_non_exhaustive()
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // A forked child does not have the mover's thread.
        if self.process != std::process::id() {
            return;
        }
        self.state.lock().is_closed = true;
        self.state.wake_one();
        // A callback may drop the last reference to the device on the mover's thread, which cannot
        // join itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that moves pages of a device panicked");
        }
    }
}

/// A move that the mover's thread has queued on the device.
struct InFlightMove {
    queued: Move,
    event: Arc<Event>,
    /// Whether `event` was recorded after the queued work, and so marks the end of this work.
    is_marked: bool,
    /// The driver's error, if a part of the move was not queued.
    result: Result<()>,
}

impl InFlightMove {
    /// Marks the end of the queued work, unless the end is marked already.
    fn mark(&mut self, core: &Core) -> Result<()> {
        if !self.is_marked {
            // SAFETY: the stream lives as long as the core.
            unsafe { self.event.record(core.raw_stream(self.queued.table.stream())) }?;
            self.is_marked = true;
            self.queued.ticket.set(Stage::Queued(Arc::clone(&self.event)));
        }
        Ok(())
    }

    /// The result of the move; `None` while its work may run. The engine itself computes the blocks
    /// of a load that is reported as failed, and copies that still ran would overwrite them. An
    /// error of the driver therefore ends a move only if the device has failed. Otherwise the move
    /// stays in flight until the driver reports that its work is complete.
    fn poll(&mut self, core: &Core) -> Option<Result<()>> {
        let refusal = match self.mark(core).and_then(|()| self.event.is_complete()) {
            Ok(false) => return None,
            Ok(true) => None,
            Err(error) if core.driver().has_failed() => Some(error),
            Err(_) => return None,
        };
        let result = std::mem::replace(&mut self.result, Ok(()));
        Some(result.and(refusal.map_or(Ok(()), Err)))
    }
}

/// The moves that the mover's thread has queued on the device: one queue per stream, in the order
/// in which the moves end.
struct InFlight {
    core: Arc<Core>,
    queues: [VecDeque<InFlightMove>; STREAMS],
}

impl InFlight {
    fn run(mut self, state: &ForkSafeLock<State>) {
        loop {
            let mut locked = state.lock();
            while !locked.has_next() && !locked.is_closed {
                if self.is_empty() {
                    locked = state.wait(locked);
                } else {
                    // The driver calls no function when a move ends, so the thread polls.
                    let pause = if self.core.is_broken() { BROKEN_POLL } else { POLL };
                    locked = state.wait_for(locked, pause);
                    break;
                }
            }
            let is_closed = locked.is_closed;
            let next = locked.next();
            drop(locked);
            match next {
                Some(next) if is_closed => {
                    next.end(Err(Error::new(ErrorKind::Closed, "the device is closed")));
                }
                Some(next) => self.queue(next),
                None if is_closed => return self.close(),
                None => {}
            }
            self.reap();
        }
    }

    fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    fn queue(&mut self, next: Move) {
        if let Err(error) = self.core.check() {
            return next.end(Err(error));
        }
        // SAFETY: the caller of `submit` promised the order of accesses. The table is kept until
        // the end of the move. Only this thread queues tables.
        match unsafe { next.table.queue(&next.part, next.after.as_deref()) } {
            Ok((event, result)) => {
                let stream = next.table.stream().index();
                let event = Arc::new(event);
                let mut queued = InFlightMove { queued: next, event, is_marked: false, result };
                // If the driver refuses the mark, `poll` tries again.
                let _ = queued.mark(&self.core);
                self.queues[stream].push_back(queued);
            }
            Err(error) => next.fail(&self.core, error),
        }
    }

    /// Reports the moves that have ended.
    fn reap(&mut self) {
        for queue in &mut self.queues {
            while let Some(result) = queue.front_mut().and_then(|first| first.poll(&self.core)) {
                let Some(InFlightMove { queued: ended, .. }) = queue.pop_front() else { break };
                match result {
                    Ok(()) => ended.end(Ok(())),
                    Err(error) => ended.fail(&self.core, error),
                }
            }
        }
    }

    fn close(&mut self) {
        let deadline = Instant::now() + CLOSE_TIME;
        while !self.is_empty() && Instant::now() < deadline {
            self.reap();
            std::thread::sleep(POLL);
        }
        for InFlightMove { queued: left, .. } in self.queues.iter_mut().flat_map(std::mem::take) {
            let error = Error::fatal("the device did not complete a move before it was closed")
                .with("seconds", CLOSE_TIME.as_secs());
            match self.core.note::<()>(Err(error)) {
                Err(error) => left.fail(&self.core, error),
                Ok(()) => left.end(Ok(())),
            }
        }
    }
}
