//! Withheld space: space to which a dead process may still be writing.
//!
//! Writes by `io_uring` outlive their process: the kernel releases the file locks of a killed
//! process while its direct writes are still queued in the block layer, where the writes
//! stay until the disk completes them. Space to which the process may have been writing is withheld
//! until its segment is drained
//! ([`Segments::drain`](ritornello_volume::segments::Segments::drain)). After an unclean end all
//! free space is withheld, because the owner's reservations are in no log; after the death of a
//! client, the space of its reservations is withheld.

use super::StoreSpace;
use crate::core::StoreCore;
use parking_lot::{Condvar, Mutex};
use ritornello_format::{Extent, SegmentId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause before a failed drain is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Withheld extents by segment.
///
/// Invariant: no withheld extent is free or named by a run; `units` is the length of all withheld
/// extents.
#[derive(Debug, Default)]
pub(super) struct Draining {
    waiting: BTreeMap<SegmentId, Vec<Extent>>,
    /// Extents of segments that were absent and have returned. The extents are drained after the
    /// next sync round: until then a durable record may name a run in them that was removed since.
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

    /// Takes the extents that may be drained after the next sync round.
    pub(super) fn take_undurable(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.undurable)
    }

    /// Takes extents back after their sync round: queues them for a drain if the round succeeded
    /// (`durable`), otherwise for the next round.
    pub(super) fn put_back(&mut self, extents: Vec<Extent>, durable: bool) {
        if durable {
            for extent in extents {
                self.waiting.entry(extent.segment).or_default().push(extent);
            }
        } else {
            self.undurable.extend(extents);
        }
    }

    /// Takes the `count` extents of `segment` that were withheld when its drain began. Extents of
    /// the segment that were withheld later need another drain.
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

    /// Whether any extent of `segment` is withheld. Does not count extents that a sync round
    /// has taken ([`Draining::take_undurable`]) and not put back.
    pub(super) fn holds(&self, segment: SegmentId) -> bool {
        self.waiting.contains_key(&segment) || self.undurable.iter().any(|e| e.segment == segment)
    }
}

impl StoreSpace {
    /// Withholds all free space until it is drained.
    pub(crate) fn withhold_free(&mut self) {
        let withheld = self.take_free();
        self.draining.add(withheld);
    }

    /// Marks all free space as in use, and returns it.
    pub(crate) fn take_free(&mut self) -> Vec<Extent> {
        let holes = self.allocator.holes().collect();
        self.mark_holes(holes)
    }

    /// Withholds all free space of a segment until the next sync round and a drain after it.
    pub(crate) fn withhold_for_drain(&mut self, id: SegmentId) {
        let withheld = self.mark_holes(self.allocator.holes_in(id));
        self.draining.units += withheld.iter().map(|e| u64::from(e.units)).sum::<u64>();
        self.draining.undurable.extend(withheld);
    }

    /// Marks `holes` as in use. Returns the holes that could be marked.
    fn mark_holes(&mut self, mut holes: Vec<Extent>) -> Vec<Extent> {
        holes.retain(|hole| {
            let marked = self.allocator.mark(std::slice::from_ref(hole));
            if let Err(error) = &marked {
                tracing::error!(%error, "free space could not be withheld: report this");
            }
            marked.is_ok()
        });
        holes
    }
}

/// The drains in progress, at most one per volume. Their extents are in [`Draining`].
#[derive(Default)]
pub(crate) struct Drain {
    /// The volumes that are being drained.
    running: Mutex<BTreeSet<u8>>,
    /// When a drain last failed; `None` if none failed, or a later drain succeeded.
    failed: Mutex<Option<Instant>>,
    /// Signals that withheld space was freed, or that a drain ended.
    drained: Condvar,
}

impl StoreCore {
    /// Starts draining withheld space, except on volumes that are being drained: in background
    /// threads, one per volume, because a drain waits for its device; or in the calling thread if
    /// the store has no background threads.
    pub(crate) fn start_drain(self: &Arc<Self>) {
        let mut work = BTreeMap::<u8, Vec<(SegmentId, usize)>>::new();
        for (id, extents) in &self.state.lock().space.draining.waiting {
            work.entry(id.volume()).or_default().push((*id, extents.len()));
        }
        let drain = &self.maintenance.drain;
        work.retain(|volume, _| drain.running.lock().insert(*volume));
        for (volume, segments) in work {
            if !self.options.background_threads {
                self.drain_volume(volume, &segments);
                continue;
            }
            let core = Arc::clone(self);
            let started = std::thread::Builder::new()
                .name("ritornello-drain".to_owned())
                .spawn(move || core.drain_volume(volume, &segments));
            if let Err(error) = started {
                // The periodic thread starts the drain again.
                tracing::warn!(
                    %error,
                    "cannot start a thread that waits for writes of a dead process: retrying later"
                );
                drain.running.lock().remove(&volume);
            }
        }
    }

    /// Drains `segments` of one volume. Each segment comes with the number of its withheld extents,
    /// which are freed after the drain.
    fn drain_volume(&self, volume: u8, segments: &[(SegmentId, usize)]) {
        segments.iter().for_each(|(id, count)| self.drain_one(*id, *count));
        // Notify under the lock: otherwise a thread between its check and its wait would miss the
        // notification.
        let _state = self.state.lock();
        self.maintenance.drain.running.lock().remove(&volume);
        self.maintenance.drain.drained.notify_all();
    }

    fn drain_one(&self, id: SegmentId, count: usize) {
        // Skip the drain, because the store is closed. The space stays withheld, so the close
        // records no clean end.
        if self.lifecycle.is_closed() {
            return;
        }
        let started = Instant::now();
        match self.segments.drain(id) {
            Ok(()) => {
                let mut state = self.state.lock();
                let extents = state.space.draining.take(id, count);
                // Free the space without a sync round, because no run and no journal record names
                // it.
                state.space.free(&extents);
                drop(state);
                *self.maintenance.drain.failed.lock() = None;
                self.maintenance.drain.drained.notify_all();
                if started.elapsed() > Duration::from_secs(1) {
                    tracing::info!(
                        segment = id.number(),
                        seconds = started.elapsed().as_secs_f64(),
                        "the writes of a dead process have ended: the space that was withheld for \
                         them is free"
                    );
                }
            }
            Err(error) => {
                let first = self.maintenance.drain.failed.lock().replace(Instant::now()).is_none();
                if first {
                    tracing::warn!(
                        %error,
                        "a segment could not be drained: space to which a dead process may write \
                         is not reused until a later drain succeeds"
                    );
                }
            }
        }
    }

    /// Starts a drain of withheld space, unless a drain failed less than [`RETRY_PAUSE`] ago.
    pub(crate) fn retry_drain(self: &Arc<Self>) {
        let paused =
            self.maintenance.drain.failed.lock().is_some_and(|at| at.elapsed() < RETRY_PAUSE);
        if !paused {
            self.start_drain();
        }
    }

    /// Starts a drain, and waits until no space is withheld or no drain runs, at most until
    /// `until`.
    pub(crate) fn finish_drain(self: &Arc<Self>, until: Instant) {
        self.start_drain();
        while self.await_drain(until) {}
    }

    /// Blocks until withheld space is freed or a drain ends. Returns `false` on timeout, or
    /// immediately if no space is withheld or no drain runs.
    pub(crate) fn await_drain(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        let drains =
            !state.space.draining.is_empty() && !self.maintenance.drain.running.lock().is_empty();
        drains && !self.maintenance.drain.drained.wait_until(&mut state, until).timed_out()
    }
}
