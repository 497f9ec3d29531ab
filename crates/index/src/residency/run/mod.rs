//! The residency backend `run`: runs in memory, and a journal of changes.
//!
//! | module | contents |
//! |---|---|
//! | [`super::runs`] | the pages, in memory |
//! | `journal` | the files |
//! | `recovery` | restores the pages from the files |
//!
//! **Durable form.** A change is applied and appended to a buffer under one hold of the writers'
//! lock (`pending`); a sync writes the buffer to the newest file. When that file has grown long,
//! the next file begins with a copy of the whole state. Changes made during the copy are appended
//! between its parts, so the order of the file is the order of events. When the copy is complete,
//! the older files are removed.
//!
//! **Locks**, in the order in which they may be taken: `copying` and `journal` are held across I/O,
//! and only calls that sync or maintain take them; `pending` serialises writers; a probe takes only
//! the lock `runs`, and releases it at the end of the run in which it has passed the 512th span of
//! pages with equal holders.

mod journal;
mod recovery;

use super::prefix::Prefixes;
use super::runs::Runs;
use super::{Holder, Prefix, Residency, ResidencyStats, Tier, Tiers, Worker, check};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock};
use journal::{Journal, Pending, poisoned};
use ritornello_format::residency::ResidencyRecord;
use ritornello_format::{Error, PageHash, PageHashes, Result, ScopeSlot};
use ritornello_medium::Medium;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum pages of the record of a put or removal, and maximum pages that are put or removed under
/// one hold of the lock `runs`.
const LOCK_BATCH: usize = 256;
/// Maximum number of runs that are searched for cleared pages with each batch of pages that is put
/// or removed, under the same hold of the lock `runs`.
const SWEPT: usize = 16;

/// Options of a [`RunResidency`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunResidencyOptions {
    /// Maximum bytes of memory, without the changes that wait for a sync. At this limit puts are
    /// refused with `Retry`; a single put may exceed the limit.
    pub memory_bytes_max: u64,
    /// Maximum bytes of changes that wait for a sync. Puts beyond the limit are refused with
    /// `Retry`; removals, whose records are small, are always accepted.
    pub pending_bytes_max: u64,
    /// [`Residency::maintain`] replaces a file whose length is at least twice the length of the
    /// copy of the state at its beginning, plus `journal_bytes`. [`Residency::sync`] replaces the
    /// file at twice this length.
    pub journal_bytes: u64,
}

impl Default for RunResidencyOptions {
    fn default() -> Self {
        Self { memory_bytes_max: 4 << 30, pending_bytes_max: 64 << 20, journal_bytes: 16 << 20 }
    }
}

/// Numbers of records and bytes that [`RunResidency::open`] recovered and dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyRecovered {
    /// Number of journal records that were applied.
    pub replayed: u64,
    /// Bytes at the ends of files, from a torn or damaged frame onwards, that were not applied. A
    /// crash may tear the last frame.
    pub torn_bytes: u64,
    /// Whether a file was damaged. A torn end of the last file is not damage.
    pub damaged: bool,
}

/// See the [module](self) and `trait` [`Residency`].
#[derive(Debug)]
pub struct RunResidency {
    medium: Arc<dyn Medium>,
    dir: PathBuf,
    options: RunResidencyOptions,
    copying: Mutex<()>,
    journal: Mutex<Journal>,
    pending: Mutex<Pending>,
    runs: RwLock<Runs>,
    refused: AtomicU64,
    disk_bytes: AtomicU64,
    poisoned: AtomicBool,
    recovered: ResidencyRecovered,
}

impl RunResidency {
    /// Opens the index in its own directory `dir`, or creates an index. Damage is not an error:
    /// records that fail verification are dropped, logged, and counted in
    /// [`RunResidency::recovered`].
    ///
    /// # Errors
    /// `Invalid` if a file has an unknown format version; `Retry` if a file cannot be read or
    /// created, or the file system has no room; `Fatal` if the recovered state cannot be written to
    /// a new file for another reason.
    pub fn open(medium: Arc<dyn Medium>, dir: &Path, options: RunResidencyOptions) -> Result<Self> {
        recovery::open(medium, dir, options)
    }

    /// Number of records recovered, and the damage found, by the open.
    #[must_use]
    pub fn recovered(&self) -> ResidencyRecovered {
        self.recovered
    }

    fn refuse(&self, error: Error) -> Result<()> {
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(error)
    }

    /// Returns an error if the index is poisoned, if a put of `pages` pages would exceed the limit
    /// of waiting changes or the maximum number of runs, or if the memory limit is reached. Removes
    /// cleared pages before it returns an error of the last two kinds.
    fn admit(&self, pending: &Pending, pages: usize) -> Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(poisoned());
        }
        let waiting = pending.bytes() + (pages * size_of::<PageHash>()) as u64;
        if waiting > self.options.pending_bytes_max {
            return Err(Error::retry("too many changes wait for a sync: sync, then try again")
                .with("bytes", waiting)
                .with("pending_bytes_max", self.options.pending_bytes_max));
        }
        loop {
            let bytes = {
                let runs = self.runs.read();
                if runs.bytes() < self.options.memory_bytes_max && runs.has_room(pages) {
                    return Ok(());
                }
                (!runs.is_waiting()).then(|| runs.bytes())
            };
            if let Some(bytes) = bytes {
                return Err(Error::retry("the residency index is full: remove pages")
                    .with("bytes", bytes)
                    .with("memory_bytes_max", self.options.memory_bytes_max));
            }
            self.runs.write().reclaim(SWEPT);
        }
    }
}

impl Residency for RunResidency {
    fn put(
        &self,
        scope: ScopeSlot,
        worker: Worker,
        tier: Tier,
        parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> Result<()> {
        let mut pending = self.pending.lock();
        if let Err(error) = check(pages).and_then(|()| self.admit(&pending, pages.len())) {
            return self.refuse(error);
        }
        let holders = &[Holder { worker, tiers: tier.into() }];
        let mut parent = parent;
        for pages in pages.chunks(LOCK_BATCH) {
            let mut runs = self.runs.write();
            runs.reclaim(SWEPT);
            runs.put(scope, holders, parent, pages);
            let last = pages.last().copied();
            let (holders, pages) = (Cow::Borrowed(&holders[..]), Cow::Borrowed(pages));
            self.append(&mut pending, &ResidencyRecord::Stored { scope, parent, holders, pages });
            parent = last;
        }
        Ok(())
    }

    fn prefixes(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Prefix> {
        let (mut at, mut prefixes) = (0, Prefixes::default());
        while self.runs.read().prefixes(scope, pages, &mut at, &mut prefixes) {}
        prefixes.finish()
    }

    fn holders(&self, scope: ScopeSlot, page: PageHash) -> Vec<Holder> {
        self.runs.read().holders(scope, page).to_vec()
    }

    fn remove_blocks(&self, scope: ScopeSlot, worker: Worker, tiers: Tiers, pages: &[PageHash]) {
        if tiers.is_empty() || check(pages).is_err() {
            return;
        }
        let mut pending = self.pending.lock();
        let holder = Holder { worker, tiers };
        for pages in pages.chunks(LOCK_BATCH) {
            let mut runs = self.runs.write();
            runs.reclaim(SWEPT);
            pages.iter().for_each(|page| runs.remove(scope, worker, tiers, *page));
            let pages = Cow::Borrowed(pages);
            self.append(&mut pending, &ResidencyRecord::Removed { scope, holder, pages });
        }
    }

    fn clear_worker(&self, worker: Worker) {
        let mut pending = self.pending.lock();
        self.runs.write().clear_worker(worker);
        self.append(&mut pending, &ResidencyRecord::ClearedWorker(worker));
    }

    fn clear_scope(&self, scope: ScopeSlot) {
        let mut pending = self.pending.lock();
        self.runs.write().clear_scope(scope);
        self.append(&mut pending, &ResidencyRecord::ClearedScope(scope));
    }

    fn sync(&self) -> Result<()> {
        self.write_out()?;
        // `maintain` replaces the newest file at a certain length. If `maintain` is not called, a
        // sync replaces the file at twice this length.
        if self.is_due(2) { self.rewrite() } else { Ok(()) }
    }

    fn maintain(&self) -> Result<()> {
        while self.runs.read().is_waiting() {
            self.runs.write().reclaim(SWEPT);
        }
        if self.is_due(1) { self.rewrite() } else { Ok(()) }
    }

    fn stats(&self) -> ResidencyStats {
        let pending_bytes = self.pending.lock().bytes();
        let runs = self.runs.read();
        ResidencyStats {
            pages: runs.pages(),
            sets: runs.sets(),
            memory_bytes: runs.bytes() + pending_bytes,
            disk_bytes: self.disk_bytes.load(Ordering::Relaxed),
            pending_bytes,
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}
