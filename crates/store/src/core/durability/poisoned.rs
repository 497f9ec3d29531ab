//! A store poisoned by a failed write or sync: it refuses changes, still serves lookups and reads,
//! and its owner reopens it when the disks accept writes.

use crate::core::StoreCore;
use crate::rounds::OnPoison;
use ritornello_format::{Error, ErrorKind, Result, VolumeMarker};

impl StoreCore {
    /// The failed write or sync that poisoned the store, if any.
    #[must_use]
    pub fn poisoned(&self) -> Option<String> {
        self.rounds.cause().map(str::to_owned)
    }

    /// Sets the callback for poisoning, which replaces the log line; calls it immediately if
    /// already poisoned. Only the first call has an effect.
    pub fn on_poison(&self, callback: OnPoison) {
        self.rounds.on_poison(callback);
    }

    /// Adds to the count of reopenings by this process.
    pub fn note_reopenings(&self, times: u64) {
        self.counters.reopenings.add(times);
    }

    /// Checks whether the disks of a poisoned store accept writes: rewrites the manifest, the
    /// volume markers and the reservation log with their current contents, and syncs the files that
    /// must be durable.
    ///
    /// The log is rewritten because the next owner reads it, and the page cache may hold a copy
    /// whose write failed.
    ///
    /// # Errors
    /// File-system errors; `Retry` while the capacity or the directories change.
    pub fn check_disks_writable(&self) -> Result<()> {
        let shape = self.shape.try_lock();
        let _shape =
            shape.ok_or_else(|| Error::retry("the store's directories are being changed"))?;
        let manifest = self.manifest();
        self.directory().write_manifest(&manifest)?;
        let absent: Vec<u8> = self.state.lock().absence.volumes.keys().copied().collect();
        for (number, volume) in (0..=u8::MAX).zip(&manifest.volumes) {
            let dir = self.options.dir.join(&volume.dir);
            let marker = VolumeMarker { store: manifest.uuid, volume: number };
            // Another file system may have been mounted over the directory.
            let is_present = !volume.is_retired() && !absent.contains(&number);
            if is_present && volume.marked && self.directory().has_marker(&dir, marker) {
                self.directory().write_marker(&dir, marker)?;
            }
        }
        self.log.lock().rewrite()
    }

    /// Converts a `Fatal` error of a poisoned store into a retryable one: the same call may succeed
    /// after the store is reopened.
    pub(crate) fn retryable(&self, error: Error) -> Error {
        match self.rounds.cause() {
            Some(cause) if error.kind() == ErrorKind::Fatal => refusal(cause).because(error),
            _ => error,
        }
    }
}

/// Returns the error of a call that would change a poisoned store.
pub(crate) fn refusal(cause: &str) -> Error {
    Error::retry(
        "a write or sync failed, and writes since the last flush may be lost: writes are refused \
         until the owner reopens the store",
    )
    .with("cause", cause)
}
