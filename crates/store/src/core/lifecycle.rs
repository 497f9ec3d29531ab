//! The life of a core: it is open, may be poisoned by a failed write or sync, and is closed.
//!
//! A poisoned store refuses changes and still serves lookups and reads, and its owner reopens it
//! when the disks accept writes.

use super::StoreCore;
use super::durability::busy;
use crate::client_id::ClientId;
use crate::rounds::{OnPoison, Rounds};
use ritornello_format::{Error, ErrorKind, Manifest, Result, VolumeMarker};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time that a close waits for the background threads, the last sync, and a change of the
/// manifest in progress.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between attempts to close a core in [`StoreCore::discard`].
const DISCARD_PAUSE: Duration = Duration::from_secs(1);

/// Whether the core answers, and whether it takes changes.
pub(crate) struct Lifecycle {
    /// The sync rounds. A failed write or sync poisons the rounds, and with them the store.
    rounds: Arc<Rounds>,
    closed: AtomicBool,
    pub(super) opened: OpenReport,
}

/// Duration of the opening, and the items that it dropped or repaired, by reason: see
/// [`CatalogStats::dropped_at_open`](crate::stats::CatalogStats::dropped_at_open).
#[derive(Default)]
pub(crate) struct OpenReport {
    pub(super) millis: f64,
    pub(super) dropped: BTreeMap<String, u64>,
}

impl Lifecycle {
    pub(super) fn new(rounds: Arc<Rounds>, opened: OpenReport) -> Self {
        Self { rounds, closed: AtomicBool::new(false), opened }
    }

    pub(super) fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    /// Whether the core was closed; checked in long loops.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether a failed write or sync has poisoned the store.
    pub(super) fn is_poisoned(&self) -> bool {
        self.rounds.cause().is_some()
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.is_closed() {
            return Err(Error::new(ErrorKind::Closed, "the store is closed: open it again"));
        }
        Ok(())
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        self.check_open()?;
        self.rounds.cause().map_or(Ok(()), |cause| Err(refusal(cause)))
    }

    /// Converts a `Fatal` error of a poisoned store into a retryable one: the same call may succeed
    /// after the store is reopened.
    pub(super) fn retryable(&self, error: Error) -> Error {
        match self.rounds.cause() {
            Some(cause) if error.kind() == ErrorKind::Fatal => refusal(cause).because(error),
            _ => error,
        }
    }
}

/// Returns the error of a call that would change a poisoned store.
fn refusal(cause: &str) -> Error {
    Error::retry(
        "a write or sync failed, and writes since the last flush may be lost: writes are refused \
         until the owner reopens the store",
    )
    .with("cause", cause)
}

impl StoreCore {
    /// The failed write or sync that poisoned the store, if any.
    #[must_use]
    pub fn poisoned(&self) -> Option<String> {
        self.lifecycle.rounds.cause().map(str::to_owned)
    }

    /// Sets the callback that reports poisoning instead of a log line. Calls it immediately if the
    /// store is already poisoned. Only the first call has an effect.
    pub fn on_poison(&self, callback: OnPoison) {
        self.lifecycle.rounds.on_poison(callback);
    }

    /// Adds `times` to the counter of how often this process reopened the store after a failure.
    pub fn note_reopenings(&self, times: u64) {
        self.counters.reopenings.add(times);
    }

    /// Checks whether the disks of a poisoned store accept writes: rewrites the manifest, the
    /// markers of present volumes and the reservation log with their current contents, and syncs
    /// manifest and markers, and the newest segment of each present volume.
    ///
    /// The log is rewritten because the next owner reads it, and the page cache may hold a copy
    /// whose write failed.
    ///
    /// If some volumes fail, the check passes as long as at least one volume that takes puts
    /// accepts writes: the next core tests each volume when it opens, and leaves out the volumes
    /// that fail.
    ///
    /// # Errors
    /// File-system errors; `Retry` while the capacity or the directories change.
    pub fn check_disks_writable(&self) -> Result<()> {
        let change = self.shape.change_by(Instant::now());
        let _change = change
            .ok_or_else(|| Error::retry("the store's directories are being changed: try again"))?;
        let (manifest, directory) = (self.shape.manifest(), self.shape.directory());
        directory.write_manifest(&manifest)?;
        let absent = self.state.lock().absence.volumes();
        let (mut writable, mut failed) = (false, None);
        for (number, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
            let dir = self.options.dir.join(&volume.dir);
            let marker = VolumeMarker { store: manifest.uuid, volume: number };
            // Do not write into a volume without its marker: another file system may have been
            // mounted over the volume's directory.
            let is_present = !volume.is_retired() && !absent.contains(&number);
            if is_present && volume.marked && directory.has_marker(&dir, marker) {
                let marked = directory.write_marker(&dir, marker).map_err(Error::from);
                match marked.and_then(|()| self.segments.check_syncs(number)) {
                    Ok(()) => writable |= !volume.draining,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
        }
        // A volume failed, and no other volume would take a put: keep the poisoned core, which
        // still serves reads.
        if let Some(error) = failed.filter(|_| !writable) {
            return Err(error);
        }
        self.reservation_log.lock().rewrite()
    }

    /// Makes everything durable, stops the background threads and refuses later calls. Waits at
    /// most a minute for threads and syncs, then at most a second for the writes of the copies of
    /// the manifest and the scopes that the volumes hold.
    ///
    /// # Errors
    /// `Fatal` if the last sync failed. `Retry` if a disk does not answer: the store then refuses
    /// calls, [`StoreCore::is_writing`] returns whether it may still write, and the caller closes
    /// it again. File-system errors of the manifest.
    pub fn close(&self) -> Result<()> {
        self.close_within(CLOSE_TIMEOUT)
    }

    /// Like [`StoreCore::close`], but waits at most `timeout` for threads and syncs.
    ///
    /// # Errors
    /// Errors of [`StoreCore::close`].
    pub fn close_within(&self, timeout: Duration) -> Result<()> {
        let until = Instant::now() + timeout;
        self.lifecycle.closed.store(true, Ordering::Release);
        let is_stopped = self.maintenance.stop(until);
        let closed = match self.make_durable_within(until) {
            // An earlier close has completed.
            Err(error) if error.kind() == ErrorKind::Closed => self.lifecycle.rounds.check(),
            Ok(()) if !is_stopped || !self.disk_calls.end_writing(until) => Err(busy()),
            durable => durable.and_then(|()| self.note_clean(until)),
        };
        closed.map_err(|error| self.with_stalled(error))
    }

    /// Closes a core that is not put in use, because a later step of opening the store failed. Waits
    /// until the core no longer writes, without a time limit, as recovery waits for a disk: the
    /// caller then releases the directory's lock, or opens the next core.
    pub fn discard(&self) {
        loop {
            // An error of the close loses nothing: the core has acknowledged no change yet.
            let closed = self.close();
            if !self.is_writing() {
                return;
            }
            if let Err(error) = closed {
                tracing::warn!(%error, "a store that could not be opened still writes: waiting");
            }
            std::thread::sleep(DISCARD_PAUSE);
        }
    }

    /// Whether a background thread, or a call that a thread gave up, may change the store's files,
    /// as after a close during which a disk did not answer. While the result is true, no other
    /// process may own the store.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        !self.maintenance.has_ended() || self.disk_calls.are_writing()
    }

    /// Adds the directories of the volumes that have stalled to an error that a disk may have
    /// caused.
    pub(super) fn with_stalled(&self, error: Error) -> Error {
        let stalled = self.segments.stalled_volumes();
        if error.kind() != ErrorKind::Retry || stalled.is_empty() {
            return error;
        }
        let manifest = self.shape.manifest();
        let dirs = stalled.into_iter().filter_map(|number| {
            manifest.volumes.get(usize::from(number)).map(|volume| volume.dir.as_str())
        });
        error.with("stalled", dirs.collect::<Vec<_>>().join(", "))
    }

    /// Records a clean end in the manifest, unless a write of this owner or of a dead process may
    /// be in flight, a volume or segment is absent, or `until` has passed.
    fn note_clean(&self, until: Instant) -> Result<()> {
        let Some(change) = self.shape.change_by(until) else { return Ok(()) };
        // A call that began before the close may still run a round. If this round fails, the end is
        // not clean.
        match self.lifecycle.rounds.end(until) {
            Err(error) if error.kind() == ErrorKind::Retry => return Ok(()),
            ended => ended?,
        }
        let mut manifest = self.shape.manifest();
        if self.is_at_rest() {
            self.scopes.compact();
            manifest = Arc::new(Manifest { clean: true, ..Manifest::clone(&manifest) });
            self.shape.directory().write_manifest(&manifest)?;
        }
        drop(change);
        self.finish_copies(&manifest);
        Ok(())
    }

    /// Returns whether no write of this owner, or of a dead process, may be in flight. The store is
    /// closed, so no new reservation is made.
    fn is_at_rest(&self) -> bool {
        let state = self.state.lock();
        // A write to an absent segment may be in flight, because the segment was not drained.
        state.space.withheld_units() == 0
            && state.absence.is_empty()
            && !self.disk_calls.are_writing()
            && !state.reservations.has_open_of(ClientId::LOCAL)
    }
}
