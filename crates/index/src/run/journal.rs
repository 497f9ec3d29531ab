//! The journal files of the index `run`, and group commit.
//!
//! Records are appended to the last file; each checkpoint begins a new file. A record never changes
//! once it is written completely. The index keeps two checkpoint files; a journal file is removed
//! once recovery from neither checkpoint needs its records.

use super::RunIndex;
use super::pending::poisoned;
use crate::SyncData;
use crate::sync::{MutexGuard, Ordering};
use ritornello_format::journal::JournalHeader;
use ritornello_format::{Error, Result};
use ritornello_medium::{Access, Medium, MediumFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PREFIX: &str = "journal-";

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

#[derive(Clone, Copy, Debug)]
pub(super) struct JournalFile {
    pub(super) number: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
pub(super) struct Journal {
    file: Arc<dyn MediumFile>,
    /// All journal files, by ascending number; `file` is the last.
    files: Vec<JournalFile>,
    /// Sequence number of the last durable record.
    durable: u64,
}

impl Journal {
    pub(super) fn new(file: Arc<dyn MediumFile>, files: Vec<JournalFile>, durable: u64) -> Self {
        Self { file, files, durable }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub(super) fn current(&self) -> JournalFile {
        self.files.last().copied().unwrap_or(JournalFile { number: 0, bytes: 0 })
    }

    pub(super) fn first_number(&self) -> u64 {
        self.files.first().map_or(0, |file| file.number)
    }

    pub(super) fn count(&self) -> u64 {
        self.files.len() as u64
    }
}

/// Creates a journal file without records. The file is durable when the call returns.
pub(super) fn create(
    medium: &dyn Medium,
    dir: &Path,
    header: JournalHeader,
) -> io::Result<(Arc<dyn MediumFile>, JournalFile)> {
    let file = begin_file(medium, dir, header)?;
    finish_file(medium, dir, file.as_ref())?;
    Ok((file, JournalFile { number: header.number, bytes: JournalHeader::BYTES as u64 }))
}

/// Creates a file and writes its header. Until [`finish_file`] returns, a crash may lose the file.
fn begin_file(
    medium: &dyn Medium,
    dir: &Path,
    header: JournalHeader,
) -> io::Result<Arc<dyn MediumFile>> {
    let access = Access { write: true, create: true, direct: false };
    let file = medium.open(&path(dir, header.number), access)?;
    file.set_len(0)?;
    file.write_at(&header.encode(), 0)?;
    Ok(file)
}

fn finish_file(medium: &dyn Medium, dir: &Path, file: &dyn MediumFile) -> io::Result<()> {
    file.sync_data()?;
    medium.sync_dir(dir)
}

impl RunIndex {
    /// Makes the data of the records up to `last` durable by `sync_data`, then these records.
    /// `last` must be a result of [`super::pending::Pending::seal`]. Concurrent callers share one
    /// write and one sync: the caller that gets the journal's lock writes all records that may be
    /// written at that time.
    pub(super) fn commit(&self, last: u64, sync_data: SyncData<'_>) -> Result<()> {
        sync_data()?;
        self.pending.lock().allow_write_through(last);
        let mut journal = self.journal.lock();
        self.flush(&mut journal, last)
    }

    fn flush(&self, journal: &mut MutexGuard<'_, Journal>, last: u64) -> Result<()> {
        if self.is_poisoned() {
            return Err(poisoned());
        }
        if journal.durable >= last {
            return Ok(());
        }
        let (records, last) = {
            let mut pending = self.pending.lock();
            let taken = pending.take();
            self.gauges.pending.store(pending.bytes(), Ordering::Relaxed);
            taken
        };
        let offset = journal.current().bytes;
        if let Err(error) = journal.file.write_at(&records, offset) {
            // A part of the records may have been written: a later call writes the same bytes to
            // the same place.
            let mut pending = self.pending.lock();
            pending.put_back(records, last);
            self.gauges.pending.store(pending.bytes(), Ordering::Relaxed);
            drop(pending);
            return self.or_refuse(Err(error));
        }
        self.or_poison(journal.file.sync_data())?;
        journal.durable = last;
        if let Some(current) = journal.files.last_mut() {
            current.bytes += records.len() as u64;
        }
        self.gauges.written.fetch_add(records.len() as u64, Ordering::Relaxed);
        self.update_gauges(journal);
        Ok(())
    }

    /// Ends the current journal file and begins a new file. Records whose data is not known to be
    /// durable are not written to the current file: a later commit writes them to the new file.
    /// Returns the new file's header.
    pub(super) fn rotate(&self) -> Result<JournalHeader> {
        let mut journal = self.journal.lock();
        // Flush first: an earlier write may have failed half-way, and recovery accepts a torn
        // record at the end of the last file only.
        let last = self.pending.lock().writable_through();
        self.flush(&mut journal, last)?;
        let header =
            JournalHeader { number: journal.current().number + 1, first: journal.durable + 1 };
        let begun = begin_file(self.medium.as_ref(), &self.dir, header);
        let file = self.or_refuse(begun)?;
        self.or_poison(finish_file(self.medium.as_ref(), &self.dir, file.as_ref()))?;
        let entry = JournalFile { number: header.number, bytes: JournalHeader::BYTES as u64 };
        self.gauges.written.fetch_add(entry.bytes, Ordering::Relaxed);
        journal.file = file;
        journal.files.push(entry);
        self.update_gauges(&journal);
        Ok(header)
    }

    /// Removes the journal files with numbers below `first`.
    pub(super) fn remove_before(&self, first: u64) -> Result<()> {
        let mut journal = self.journal.lock();
        let gone = journal.files.iter().take_while(|file| file.number < first).count();
        let gone: Vec<JournalFile> = journal.files.drain(..gone).collect();
        for file in &gone {
            let removed = self.medium.remove(&path(&self.dir, file.number));
            self.or_poison(removed)?;
        }
        if !gone.is_empty() {
            let synced = self.medium.sync_dir(&self.dir);
            self.or_poison(synced)?;
        }
        self.update_gauges(&journal);
        Ok(())
    }

    pub(super) fn update_gauges(&self, journal: &Journal) {
        self.gauges.journals.store(journal.bytes(), Ordering::Relaxed);
        self.gauges.journal.store(journal.current().bytes, Ordering::Relaxed);
        self.gauges.journal_files.store(journal.count(), Ordering::Relaxed);
    }

    /// Passes on the result of an operation that needs room on the file system. The error of a full
    /// file system becomes `Retry`: the operation changed no valid bytes, and the records are kept
    /// for a later write. Any other failure poisons the index.
    pub(super) fn or_refuse<T>(&self, result: io::Result<T>) -> Result<T> {
        match result {
            Err(error) if is_full(&error) => Err(write_refused(&self.dir, error)),
            result => self.or_poison(result),
        }
    }

    /// Passes on the result of a write, sync or removal. A failure poisons the index: the state of
    /// the disk is then unknown, and a repeated sync may report success, because the kernel drops
    /// the error together with the dirty pages.
    pub(super) fn or_poison<T>(&self, result: io::Result<T>) -> Result<T> {
        result.map_err(|error| {
            self.gauges.poisoned.store(true, Ordering::Release);
            // Log at debug level: the store logs this error once, instead of at every attempt.
            tracing::debug!(dir = %self.dir.display(), %error, "the index could not be written");
            poisoned().because(error)
        })
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Converts the error of a file operation. If the file system has no room, logs this and returns
/// `Retry` with advice.
pub(super) fn write_refused(dir: &Path, error: io::Error) -> Error {
    if !is_full(&error) {
        return error.into();
    }
    tracing::warn!(
        dir = %dir.display(),
        %error,
        "the file system has no room for the files of the index"
    );
    Error::retry("no room for the index: free some space on its file system")
        .with("dir", dir.display())
        .because(error)
}
