//! The `art` backend: Holt, a persistent adaptive radix tree. The page hashes of a run
//! are stored in chunks under adjacent keys.
//!
//! **Off by default.** The cargo feature `art` compiles this backend, and `ritornello bench index
//! --backends art` opens it, for comparison. A store cannot use this backend.
//!
//! | module | contents |
//! |---|---|
//! | `key` | keys and their order |
//! | `record` | values, and their checksums |
//! | `tree` | the calls of Holt that are used |
//! | `index` | changes and lookups: the implementation of [`crate::PrefixIndex`] |
//! | `read` | reads of the tree |
//! | `write` | batches of changes, and removals |
//! | `recovery` | opens and verifies the index |
//!
//! **Atomic changes.** A batch of Holt is one record of its log. A run exists if its record exists,
//! under a key that begins with `r`. The record is written last, after the chunks of a run that is
//! too long for one batch. A crash can leave chunks without a record; the next open with
//! [`ArtOptions::verify`] removes them. If Holt fails in the middle of a batch, it may have applied
//! a part: an insert then removes all its keys again before it returns the error. If this removal
//! fails as well, or if a change fails that is not an insert, the index is poisoned.
//!
//! **Limits of Holt 0.9.2**, and how the backend handles them:
//!
//! * *No sync without a checkpoint.* Either every batch waits for an `fdatasync` of the log
//!   ([`ArtOptions::durable`]), or the only barrier is a checkpoint, which writes every dirty frame
//!   of 512 KiB. Unless `durable` is set, [`crate::PrefixIndex::sync`] writes a checkpoint.
//! * *Records cannot be held back until their data is durable.* Holt appends an inserted run to its
//!   log immediately, so the run may exist without the bytes of its pages after a power loss. A
//!   read of these pages finds wrong checksums, and is a miss. The backend `run` withholds records
//!   until their data is durable.
//! * *Damage is not detected.* Holt's frames have no checksums. Every value except the position of
//!   a page therefore carries a checksum seeded with its key. A position is compared with the
//!   hashes of the run instead. A damaged value is a miss. The open checks the records of all runs,
//!   and with [`ArtOptions::verify`] their page hashes and links too. To notice lost records, the
//!   open compares the numbers of runs and pages that the records add up to with the stored
//!   numbers.
//! * *No recovery from damage.* If Holt refuses its files, its log is dropped; if Holt then still
//!   refuses, all files are dropped. The losses are logged and reported by
//!   [`ArtIndex::recovered`].
//! * *A kill loses changes that were not synced.* Up to 64 KiB of the log are in the memory of the
//!   process. Synced changes are safe.
//! * *A failed sync is not repaired.* Holt reads its log and its list of frames from the page
//!   cache, which may hold bytes that the disk lacks, and appends to the same files. Holt never
//!   writes lost entries of its list of frames again. After a failed sync the index is intact only
//!   until the next power loss: remove the index, or [copy](crate::copy()) it to another index.
//!   [`crate::OpenOptions::clean`] has no effect.
//! * *Writes are not reported.* [`crate::IndexStats::written_bytes`] counts the bytes of each key
//!   and value once, although Holt writes them to its log and to its frames.
//! * *Holt uses the host's file system.* Its I/O does not go through the `Medium`.
//! * *Keys and values are at most 64 KiB.* A run whose place has more than 5,454 extents is refused
//!   (`Invalid`).

mod index;
mod key;
mod read;
mod record;
mod recovery;
#[cfg(test)]
mod tests;
mod tree;
mod write;

use crate::RunId;
use parking_lot::Mutex;
use ritornello_format::Result;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tree::Holt;
use write::Numbers;

/// Options of an [`ArtIndex`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtOptions {
    /// Bytes of memory for cached frames (Holt's units of 512 KiB) that are not dirty. Fewer than
    /// 4 MiB count as 4 MiB.
    pub cache_bytes: u64,
    /// Whether every change is durable when the call that makes it returns, except the recency from
    /// [`crate::PrefixIndex::touch`]. [`crate::PrefixIndex::sync`] then writes only this recency.
    pub durable: bool,
    /// Whether the open checks the pages and the links of every run, in addition to its record. If
    /// `false`, damage of a run's pages is found when they are used, and the run's descendants are
    /// not removed.
    pub verify: bool,
}

impl Default for ArtOptions {
    fn default() -> Self {
        Self { cache_bytes: 128 << 20, durable: false, verify: true }
    }
}

/// See the [module](self) and `trait` [`crate::PrefixIndex`].
#[derive(Debug)]
pub struct ArtIndex {
    tree: Holt,
    dir: PathBuf,
    options: ArtOptions,
    /// The run numbers that are assigned next. This lock serialises writers.
    numbers: Mutex<Numbers>,
    /// Recency of runs that is not written to the tree yet.
    touched: Mutex<HashMap<RunId, u64>>,
    retained: Mutex<Retained>,
    gauges: Gauges,
    recovered: ArtRecovered,
}

/// The end of the retention of each retained run, and the store's clock.
#[derive(Debug, Default)]
struct Retained {
    runs: BTreeMap<RunId, u64>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Gauges {
    poisoned: AtomicBool,
    /// Whether this index has logged damage or a failed read.
    damage_logged: AtomicBool,
    runs: AtomicU64,
    pages: AtomicU64,
    /// Bytes of keys and values written since the last sync.
    pending: AtomicU64,
    written: AtomicU64,
    checkpoints: AtomicU64,
}

/// Files, runs and keys that [`ArtIndex::open`] dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArtRecovered {
    /// Whether Holt refused its log, which was therefore dropped.
    pub log_dropped: bool,
    /// Whether Holt refused all of its files, which were therefore dropped.
    pub all_dropped: bool,
    /// Whether the numbers of runs and pages that the open found differ from the stored numbers, or
    /// the stored numbers are lost.
    pub lost: bool,
    /// Runs dropped as inconsistent, including their descendants.
    pub dropped_runs: u64,
    /// Keys with page hashes of runs that were being written or removed when the process died, or
    /// whose records are damaged.
    pub leftover_keys: u64,
}

impl ArtIndex {
    /// Opens the index in its own directory `dir`, or creates an index. Damage is not an error:
    /// entries that fail verification are dropped, logged, and reported by [`ArtIndex::recovered`].
    ///
    /// # Errors
    /// `Fatal` if Holt cannot read or write its files, or another process has the index open;
    /// `Retry` if another call of the file system fails.
    pub fn open(dir: &Path, options: ArtOptions) -> Result<Self> {
        recovery::open(dir, options)
    }

    /// Returns the files, runs and keys that the open dropped.
    #[must_use]
    pub fn recovered(&self) -> ArtRecovered {
        self.recovered
    }

    /// Logs damage, unless this index has already logged damage or a failed read. The caller treats
    /// damage as a miss.
    fn log_damage(&self, run: RunId) {
        if !self.gauges.damage_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                dir = %self.dir.display(),
                run = run.0,
                "a run in the index is damaged: its pages are misses, and an open of the index that \
                 verifies runs drops the run"
            );
        }
    }

    /// Returns the value, or `None` after an error, which is logged unless this index has already
    /// logged damage or a failed read. The caller treats an error as a miss.
    fn or_miss<T>(&self, result: Result<T>) -> Option<T> {
        result
            .inspect_err(|error| {
                if !self.gauges.damage_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        dir = %self.dir.display(),
                        %error,
                        "the index could not be read: the lookup is a miss"
                    );
                }
            })
            .ok()
    }
}
