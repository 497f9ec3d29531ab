//! A store that a failed write or sync has poisoned: it takes nothing any more, still finds and reads,
//! and is opened again by its owner when the disks take writes.

use super::StoreCore;
use crate::rounds::OnPoison;
use ritornello_format::{Error, ErrorKind, Result, VolumeMarker};

impl StoreCore {
    /// What poisoned the store: the failed write or sync after which it takes nothing any more.
    #[must_use]
    pub fn poisoned(&self) -> Option<String> {
        self.rounds.cause().map(str::to_owned)
    }

    /// Has `told` called, instead of a log line, when the store is poisoned; or now if it is. Set once.
    pub fn on_poison(&self, told: OnPoison) {
        self.rounds.on_poison(told);
    }

    /// Counts the times that this process has reopened the store.
    pub fn note_reopenings(&self, times: u64) {
        self.counters.reopenings.add(times);
    }

    /// Writes the manifest, the markers of the volumes and the reservation log anew, with what they
    /// hold, and syncs what must be durable: whether the disks of a poisoned store take writes again.
    ///
    /// The next owner reads the log: a copy of it in the page cache may be one whose write failed.
    ///
    /// # Errors
    /// Those of the file system; `Retry` while capacity or directories change.
    pub fn check_disks_writable(&self) -> Result<()> {
        let turn = self.shape.try_lock();
        let _turn =
            turn.ok_or_else(|| Error::retry("the store's directories are being changed"))?;
        let manifest = self.manifest();
        self.directory().write_manifest(&manifest)?;
        let away: Vec<u8> = self.state.lock().absence.volumes.keys().copied().collect();
        for (number, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
            let dir = self.options.dir.join(&volume.dir);
            let marker = VolumeMarker { store: manifest.uuid, volume: number };
            // Another file system may be mounted there by now.
            let is_here = !volume.is_gone() && !away.contains(&number);
            if is_here && volume.marked && self.directory().has_marker(&dir, marker) {
                self.directory().write_marker(&dir, marker)?;
            }
        }
        self.log.lock().rewrite()
    }

    /// What a session says of an error that has poisoned the store: the same call may succeed when
    /// the store has been reopened.
    pub(super) fn retryable(&self, error: Error) -> Error {
        match self.rounds.cause() {
            Some(cause) if error.kind() == ErrorKind::Fatal => refusal(cause).because(error),
            _ => error,
        }
    }
}

/// The error of a call that would change a poisoned store.
pub(super) fn refusal(cause: &str) -> Error {
    Error::retry(
        "a write or sync failed, so nothing written since the last flush is certain: the store takes \
         nothing until it is reopened, which its owner does when the disk takes writes again",
    )
    .with("cause", cause)
}
