//! Durability: the sync rounds, which write the data of runs before the index records of the runs.

use super::StoreCore;
use super::step::STEP_RUNS;
use crate::options::Durability;
use ritornello_format::{Error, Result, SegmentId};
use std::time::{Duration, Instant};

/// Maximum time that [`StoreCore::make_durable`] waits for earlier sync rounds.
pub(super) const SYNC_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum time that [`StoreCore::sync_copies`] waits for earlier sync rounds and for the disk.
const COPY_SYNC_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time that a background thread waits for a sync before it continues with other work.
pub(super) const BACKGROUND_SYNC_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum unsynced bytes of the index journal: more bytes trigger a sync. [`pending_max`] is lower
/// if the index's memory ceiling is low.
pub(super) const PENDING_BYTES_MAX: u64 = 16 << 20;

/// Returns the unsynced journal bytes that trigger a sync: [`PENDING_BYTES_MAX`], or 1/64 of
/// `ceiling`, the index's memory ceiling in bytes, if this is less. `ceiling` is 0 for an index
/// without a ceiling.
pub(super) fn pending_max(ceiling: u64) -> u64 {
    if ceiling == 0 { PENDING_BYTES_MAX } else { PENDING_BYTES_MAX.min(ceiling / 64) }
}

impl StoreCore {
    /// Syncs the data, then the index, then makes the space reusable that the synced records free.
    /// Requests that arrive during a round share the next round. Puts continue during a round;
    /// commits made after the data sync began belong to the next round.
    ///
    /// # Errors
    /// `Fatal`: the store is poisoned. `Retry` if no round could begin, if a segment's file cannot
    /// be opened, or if the file system has no room for the records of the index. `Closed` if an
    /// earlier close has completed.
    pub(super) fn make_durable(&self) -> Result<()> {
        self.make_durable_by(Instant::now() + SYNC_TIMEOUT)
    }

    /// Like [`StoreCore::make_durable`], but waits for earlier rounds only until `deadline`.
    ///
    /// # Errors
    /// Errors of [`StoreCore::make_durable`]: `Retry` also if earlier rounds have not ended by
    /// `deadline`.
    pub(super) fn make_durable_by(&self, deadline: Instant) -> Result<()> {
        self.lifecycle.rounds().join(deadline, || self.sync_all())
    }

    /// Like [`StoreCore::make_durable_by`], but returns at `deadline` even if the round that this
    /// call began has not ended: the round continues on a separate thread.
    ///
    /// # Errors
    /// Errors of [`StoreCore::make_durable`]: `Retry` also at `deadline`.
    pub(super) fn make_durable_within(&self, deadline: Instant) -> Result<()> {
        let sync = move |core: &Self| core.make_durable_by(deadline);
        let late = || Instant::now() >= deadline;
        self.beside("ritornello-round", sync, late).unwrap_or_else(|| Err(busy()))
    }

    /// Like [`StoreCore::make_durable_within`], for background threads: waits for at most
    /// [`BACKGROUND_SYNC_TIMEOUT`].
    pub(super) fn make_durable_in_background(&self) -> Result<()> {
        self.make_durable_within(Instant::now() + BACKGROUND_SYNC_TIMEOUT)
    }

    /// Makes all changes durable, on request.
    ///
    /// # Errors
    /// `Closed` if the core is closed; `Retry` if the store is poisoned; the errors of
    /// [`StoreCore::make_durable`].
    pub(super) fn flush(&self) -> Result<()> {
        self.lifecycle.check_writable()?;
        self.make_durable()
    }

    /// Whether puts and deletes wait until they are durable.
    pub(super) fn durable_puts(&self) -> bool {
        self.options.durability == Durability::Durable
    }

    /// In `durable` mode, waits until a put is durable. Does not wait if `flushed_later` is set,
    /// because the caller flushes after the last part of the put.
    pub(super) fn await_durable_put(&self, flushed_later: bool) -> Result<()> {
        if self.durable_puts() && !flushed_later { self.make_durable() } else { Ok(()) }
    }

    /// Runs one sync round.
    fn sync_all(&self) -> Result<()> {
        let started = Instant::now();
        // Take the limbo (space whose freeing is not durable yet) before the index closes the batch
        // of records that this round writes, so that the batch includes the records that free this
        // space.
        let space = self.state.lock().space.begin_round();
        let synced = self.index.sync_after(&|| self.sync_dirty());
        let reusable = self.state.lock().space.end_round(space, synced.is_ok());
        synced.map_err(|error| error.with("store", self.options.dir.display()))?;
        let mut reusable = reusable.chunks(STEP_RUNS);
        self.state.in_steps(|state| {
            let Some(extents) = reusable.next() else { return false };
            state.space.free_from_limbo(extents);
            true
        });
        self.counters.syncs.add(1);
        self.counters.sync_micros.add(started.elapsed().as_micros() as u64);
        Ok(())
    }

    /// Syncs the segments that were written since their last sync, so that the data of all runs in
    /// the index is durable. At most one thread may call this at a time. The call clears the list
    /// of these segments before it syncs them: a second thread would find the list empty, and
    /// report success before the segments are durable.
    fn sync_dirty(&self) -> Result<()> {
        let dirty = std::mem::take(&mut self.state.lock().unsynced.segments);
        let segments: Vec<_> = dirty.iter().copied().collect();
        let synced = self.segments.sync(&segments);
        if synced.is_err() {
            self.state.lock().unsynced.segments.extend(dirty);
        }
        synced
    }

    /// Syncs the `segments` of copied runs between two rounds.
    ///
    /// # Errors
    /// `Fatal` if the store is poisoned, or if the sync failed, which poisons the store. `Retry` if
    /// a segment's file cannot be opened, if earlier rounds, or this sync, have not ended after
    /// [`COPY_SYNC_TIMEOUT`], or when the store is closed.
    pub(super) fn sync_copies(&self, segments: Vec<SegmentId>) -> Result<()> {
        let deadline = Instant::now() + COPY_SYNC_TIMEOUT;
        let sync = move |core: &Self| {
            let rounds = core.lifecycle.rounds();
            let _paused = rounds.between(deadline)?;
            rounds.check()?;
            core.segments.sync(&segments).inspect_err(|error| rounds.poison(error))
        };
        let give_up = || self.lifecycle.is_closed() || Instant::now() >= deadline;
        self.beside("ritornello-round", sync, give_up).unwrap_or_else(|| Err(busy()))
    }
}

/// Error for a sync, a close or a change of the manifest that has not ended in time.
pub(super) fn busy() -> Error {
    Error::retry("the disks have not completed earlier writes or syncs in time: check the disks")
}
