//! Space that a process which died may still be writing to.
//!
//! `io_uring` outlives its process: a killed process frees its file locks while its direct writes
//! are still queued in the block layer, for as long as the disk takes. Whatever such a process may
//! have been writing to is withheld here until its segment is drained
//! ([`Segments::drain`](ritornello_volume::segments::Segments::drain)). That is all free space after
//! an opening that was not clean, because an owner's own reservations are in no log, and the
//! reservations of a client that died.

use super::{State, StoreCore};
use ritornello_format::{Extent, SegmentId};
use ritornello_volume::space::Space;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A drain that failed is tried again after this.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Withheld extents by segment.
///
/// Invariant: none of them is free or named by a run; `units` is their sum.
#[derive(Debug, Default)]
pub(super) struct Draining {
    waiting: BTreeMap<SegmentId, Vec<Extent>>,
    /// To be drained after the next sync round: part of it may be named by a durable record of a run
    /// whose removal is not durable yet.
    undurable: Vec<Extent>,
    units: u64,
}

impl Draining {
    pub(super) fn add(&mut self, extents: impl IntoIterator<Item = Extent>) {
        for extent in extents {
            self.units += u64::from(extent.units);
            self.waiting.entry(extent.segment).or_default().push(extent);
        }
    }

    /// What the next sync round covers.
    pub(super) fn take_undurable(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.undurable)
    }

    /// A sync round that took these succeeded or failed.
    pub(super) fn put_back(&mut self, extents: Vec<Extent>, durable: bool) {
        if durable {
            for extent in extents {
                self.waiting.entry(extent.segment).or_default().push(extent);
            }
        } else {
            self.undurable.extend(extents);
        }
    }

    /// What was withheld of `segment` when its drain began. More may have been added since.
    fn take(&mut self, segment: SegmentId, count: usize) -> Vec<Extent> {
        let Some(waiting) = self.waiting.get_mut(&segment) else { return Vec::new() };
        let taken: Vec<Extent> = waiting.drain(..count.min(waiting.len())).collect();
        if waiting.is_empty() {
            self.waiting.remove(&segment);
        }
        self.units -= taken.iter().map(|extent| u64::from(extent.units)).sum::<u64>();
        taken
    }

    pub(super) fn units(&self) -> u64 {
        self.units
    }

    pub(super) fn is_empty(&self) -> bool {
        self.units == 0
    }

    /// Whether anything of `segment` is withheld.
    pub(super) fn holds(&self, segment: SegmentId) -> bool {
        self.waiting.contains_key(&segment) || self.undurable.iter().any(|e| e.segment == segment)
    }
}

/// Takes `holes` out of the free space. Returns those that could be taken.
pub(super) fn withhold(space: &mut Space, holes: Vec<Extent>) -> Vec<Extent> {
    let withheld = |hole: &Extent| {
        let marked = space.mark(std::slice::from_ref(hole));
        if let Err(error) = &marked {
            tracing::error!(%error, "free space could not be withheld: report this");
        }
        marked.is_ok()
    };
    holes.into_iter().filter(withheld).collect()
}

impl State {
    /// Withholds all that is free in a segment, until the next sync round and a drain after it.
    pub(super) fn withhold_for_drain(&mut self, id: SegmentId) {
        let holes = self.space.holes_in(id);
        let withheld = withhold(&mut self.space, holes);
        self.draining.units += withheld.iter().map(|e| u64::from(e.units)).sum::<u64>();
        self.draining.undurable.extend(withheld);
    }
}

impl StoreCore {
    /// Drains what is withheld: in the background, one thread a volume, or at once in a store
    /// without threads of its own.
    pub(super) fn start_drain(self: &Arc<Self>) {
        if self.state.lock().draining.waiting.is_empty()
            || self.is_draining.swap(true, Ordering::AcqRel)
        {
            return;
        }
        if !self.options.upkeep {
            self.drain_all();
            return;
        }
        let core = Arc::clone(self);
        let started = std::thread::Builder::new()
            .name("ritornello-drain".to_owned())
            .spawn(move || core.drain_all());
        if let Err(error) = started {
            // The upkeep thread tries again.
            tracing::warn!(%error, "no thread to wait for writes of a dead process");
            self.is_draining.store(false, Ordering::Release);
        }
    }

    /// Drains every segment of which something is withheld, and frees that.
    fn drain_all(&self) {
        let work: Vec<(SegmentId, usize)> = {
            let state = self.state.lock();
            state.draining.waiting.iter().map(|(id, extents)| (*id, extents.len())).collect()
        };
        std::thread::scope(|scope| {
            let mut volumes: Vec<&[(SegmentId, usize)]> =
                work.chunk_by(|a, b| a.0.volume() == b.0.volume()).collect();
            let last = volumes.pop();
            for volume in volumes {
                let drain = || volume.iter().for_each(|(id, count)| self.drain_one(*id, *count));
                let thread = std::thread::Builder::new().name("ritornello-drain".to_owned());
                if !self.options.upkeep || thread.spawn_scoped(scope, drain).is_err() {
                    drain();
                }
            }
            last.into_iter().flatten().for_each(|(id, count)| self.drain_one(*id, *count));
        });
        // Under the lock, so that no caller that has just looked misses the notice.
        let _state = self.state.lock();
        self.is_draining.store(false, Ordering::Release);
        self.drained.notify_all();
    }

    fn drain_one(&self, id: SegmentId, count: usize) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        let started = Instant::now();
        match self.segments.drain(id) {
            Ok(()) => {
                let mut state = self.state.lock();
                let extents = state.draining.take(id, count);
                // Nothing on disk or in the journal names this space: it needs no limbo.
                self.free(&mut state, &extents);
                drop(state);
                self.drained.notify_all();
                if started.elapsed() > Duration::from_secs(1) {
                    tracing::info!(
                        segment = id.number(),
                        seconds = started.elapsed().as_secs_f64(),
                        "a dead process's writes have ended: its space is free"
                    );
                }
            }
            Err(error) => {
                let first = self.drain_failed.lock().replace(Instant::now()).is_none();
                if first {
                    tracing::warn!(
                        %error,
                        "writes of a dead process cannot be waited for: the space stays out of use"
                    );
                }
            }
        }
    }

    /// Drains again what could not be drained, after a pause.
    pub(super) fn retry_drain(self: &Arc<Self>) {
        let paused = self.drain_failed.lock().is_some_and(|at| at.elapsed() < RETRY_PAUSE);
        if !paused {
            self.start_drain();
        }
    }

    /// Waits until nothing is withheld, or `until`.
    pub(super) fn finish_drain(self: &Arc<Self>, until: Instant) {
        self.start_drain();
        while self.await_drain(until) {}
    }

    /// Blocks until withheld space is freed. Returns `false` on timeout, or if no drain runs.
    pub(super) fn await_drain(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        let drains = !state.draining.is_empty() && self.is_draining.load(Ordering::Acquire);
        drains && !self.drained.wait_until(&mut state, until).timed_out()
    }
}
