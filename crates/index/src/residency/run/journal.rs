//! The journal files of the residency backend `run`, and appending to them.

use super::RunResidency;
use crate::run::slots::Number;
use crate::sync::{MutexGuard, Ordering};
use ritornello_format::residency::{ResidencyHeader, ResidencyRecord};
use ritornello_format::wire::Writer;
use ritornello_format::{Error, Result};
use ritornello_medium::{Access, Medium, MediumFile};
use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PREFIX: &str = "residency-";
/// Bytes of records after which the copy of the state releases the locks `pending` and `runs`, once
/// the run that is being copied is complete.
const COPY_BYTES: u64 = 64 << 10;
/// Maximum runs visited under one hold of the locks `pending` and `runs`.
const SCAN_RECORDS: usize = 4096;
/// Maximum holders in one journal record.
const RECORD_HOLDERS: usize = 4096;
/// Bytes gathered for one write while the state is copied.
const WRITE_BYTES: u64 = 1 << 20;

/// Records of changes that are not yet written to a journal file.
#[derive(Debug)]
pub(super) struct Pending {
    buffer: Writer,
    /// Sequence number of the first record of the buffer.
    first: u64,
    /// Sequence number of the next record.
    next: u64,
}

impl Pending {
    pub(super) fn new(next: u64) -> Self {
        Self { buffer: Writer::new(), first: next, next }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.buffer.as_slice().len() as u64
    }

    fn push(&mut self, record: &ResidencyRecord<'_>) {
        record.encode(self.next, &mut self.buffer);
        self.next += 1;
    }

    /// Takes all records. Returns the records, and the sequence number of the first record.
    fn take(&mut self) -> (Vec<u8>, u64) {
        let first = std::mem::replace(&mut self.first, self.next);
        (std::mem::take(&mut self.buffer).into_vec(), first)
    }

    /// Puts back records that were taken and could not be written, in front of the records that
    /// were appended in the meantime.
    fn put_back(&mut self, records: &[u8], first: u64) {
        let since = std::mem::take(&mut self.buffer);
        self.buffer.raw(records).raw(since.as_slice());
        self.first = first;
    }
}

/// The journal files on disk. Records are appended to the newest, `file`.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) file: Arc<dyn MediumFile>,
    pub(super) number: u64,
    /// Length of `file`.
    pub(super) length: u64,
    /// Length of `file` directly after the copy of the state at its beginning; zero while the copy
    /// is incomplete.
    pub(super) copied: u64,
    /// Numbers and lengths of older files.
    pub(super) older: Vec<(u64, u64)>,
}

pub(super) fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{PREFIX}{number:016x}"))
}

/// Numbers of the journal files in `dir`, ascending.
pub(super) fn numbers(medium: &dyn Medium, dir: &Path) -> io::Result<Vec<u64>> {
    let names = medium.list(dir)?;
    let number = |name: &str| u64::from_str_radix(name.strip_prefix(PREFIX)?, 16).ok();
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| number(name.to_str()?)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Creates a journal file that has only a header, durably.
pub(super) fn create(
    medium: &dyn Medium,
    dir: &Path,
    header: ResidencyHeader,
) -> io::Result<Arc<dyn MediumFile>> {
    let file = write_header(medium, dir, header)?;
    file.sync_data()?;
    medium.sync_dir(dir)?;
    Ok(file)
}

fn write_header(
    medium: &dyn Medium,
    dir: &Path,
    header: ResidencyHeader,
) -> io::Result<Arc<dyn MediumFile>> {
    let access = Access { write: true, create: true, direct: false };
    let file = medium.open(&path(dir, header.number), access)?;
    file.set_len(0)?;
    file.write_at(&header.encode(), 0)?;
    Ok(file)
}

pub(super) fn poisoned() -> Error {
    Error::fatal("the residency index could not be written: open it again")
}

impl RunResidency {
    /// Appends the record of a change. The caller has held the lock `pending` since before it
    /// applied the change, so the order of records is the order of changes.
    pub(super) fn append(&self, pending: &mut Pending, record: &ResidencyRecord<'_>) {
        // A poisoned index never writes again, so records would only take memory.
        if !self.poisoned.load(Ordering::Acquire) {
            pending.push(record);
        }
    }

    /// Makes all appended records durable.
    pub(super) fn write_out(&self) -> Result<()> {
        let mut journal = self.journal.lock();
        self.write(&mut journal)?;
        self.synced(journal.file.sync_data())
    }

    fn write(&self, journal: &mut MutexGuard<'_, Journal>) -> Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(poisoned());
        }
        let (records, first) = self.pending.lock().take();
        if let Err(error) = journal.file.write_at(&records, journal.length) {
            // A part of the records may have been written: a later call writes the same bytes to
            // the same place.
            self.pending.lock().put_back(&records, first);
            return self.or_poison(Err(error));
        }
        journal.length += records.len() as u64;
        self.measure(journal);
        Ok(())
    }

    /// Returns whether the newest file has at least `times` the length at which
    /// [`maintain`](crate::residency::Residency::maintain) replaces the file.
    pub(super) fn is_due(&self, times: u64) -> bool {
        let journal = self.journal.lock();
        journal.length >= times * (2 * journal.copied + self.options.journal_bytes)
    }

    /// Writes the whole state to a new file, and removes the older files. Does nothing during a
    /// concurrent call.
    pub(super) fn rewrite(&self) -> Result<()> {
        let Some(_copying) = self.copying.try_lock() else { return Ok(()) };
        self.rotate()?;
        self.fill()
    }

    /// Ends the newest journal file and begins the next.
    fn rotate(&self) -> Result<()> {
        let mut journal = self.journal.lock();
        self.write(&mut journal)?;
        self.synced(journal.file.sync_data())?;
        // Records that are not written yet go to the next file.
        let header =
            ResidencyHeader { number: journal.number + 1, first: self.pending.lock().first };
        let file = self.or_poison(write_header(self.medium.as_ref(), &self.dir, header))?;
        self.synced(file.sync_data())?;
        self.synced(self.medium.sync_dir(&self.dir))?;
        let before = (journal.number, journal.length);
        journal.older.push(before);
        journal.file = file;
        journal.number = header.number;
        journal.length = ResidencyHeader::BYTES as u64;
        journal.copied = 0;
        Ok(())
    }

    /// Copies the state to the newest file, and removes the older files.
    pub(super) fn fill(&self) -> Result<()> {
        let mut run: Number = 1;
        while self.copy(&mut run) {
            if self.pending.lock().bytes() >= WRITE_BYTES {
                self.write(&mut self.journal.lock())?;
            }
        }
        self.append(&mut self.pending.lock(), &ResidencyRecord::Complete);
        self.write_out()?;
        let mut journal = self.journal.lock();
        journal.copied = journal.length;
        // The copy is durable, so it replaces the older files.
        let older = std::mem::take(&mut journal.older);
        self.measure(&journal);
        for (number, _) in older {
            let removed = self.medium.remove(&path(&self.dir, number));
            self.or_poison(removed)?;
        }
        self.synced(self.medium.sync_dir(&self.dir))
    }

    fn measure(&self, journal: &Journal) {
        let older = journal.older.iter().map(|(_, bytes)| bytes).sum::<u64>();
        self.disk_bytes.store(journal.length + older, Ordering::Relaxed);
    }

    /// Appends one batch of runs to the records that wait to be written, starting at number `run`,
    /// and advances `run` past the batch. Returns `false` if no run is left. Holds the writers'
    /// lock, so that the copy of a run precedes every later change of the run.
    fn copy(&self, run: &mut Number) -> bool {
        let mut pending = self.pending.lock();
        let runs = self.runs.read();
        let full = pending.bytes() + COPY_BYTES;
        for _ in 0..SCAN_RECORDS {
            let more = runs.visit(*run, |scope, parent, holders, pages| {
                for holders in holders.chunks(RECORD_HOLDERS) {
                    let (holders, pages) = (Cow::Borrowed(holders), Cow::Borrowed(pages));
                    let record = ResidencyRecord::Stored { scope, parent, holders, pages };
                    self.append(&mut pending, &record);
                }
            });
            if !more {
                return false;
            }
            *run += 1;
            if pending.bytes() >= full {
                break;
            }
        }
        true
    }

    /// Passes on the result of a write. If the file system has no room, the index is not poisoned,
    /// and the records of a failed write stay for a later write.
    pub(super) fn or_poison<T>(&self, result: io::Result<T>) -> Result<T> {
        result.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Error::retry("no room for the residency index: free some space on its file system")
                    .with("dir", self.dir.display())
                    .because(error)
            }
            _ => self.poison(error),
        })
    }

    /// Passes on the result of a sync. A sync that failed for any reason poisons the index: the
    /// kernel may drop the written bytes, and report success for the next sync.
    fn synced(&self, result: io::Result<()>) -> Result<()> {
        result.map_err(|error| self.poison(error))
    }

    /// Poisons the index, which then writes no further records, because the contents of the disk
    /// are unknown.
    fn poison(&self, error: io::Error) -> Error {
        self.poisoned.store(true, Ordering::Release);
        tracing::error!(
            dir = %self.dir.display(),
            %error,
            "the residency index could not be written: it stores no further changes"
        );
        poisoned().because(error)
    }
}
