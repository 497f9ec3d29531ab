//! Checkpoints: copies of all runs, made while the index changes, so that older journal files can
//! be removed.
//!
//! The index writes two checkpoint files alternately, and keeps the journal since the older
//! checkpoint: if one checkpoint is damaged, the other and a longer part of the journal restore the
//! same state. A checkpoint is written in four steps:
//!
//! 1. Sync the journal and begin a new journal file. Recovery will replay the records of this file
//!    on top of the copies.
//! 2. Copy the runs and the retentions, a few at a time, under the read lock. A copy may already
//!    show changes of the new journal file; replaying these changes again has no effect.
//! 3. Make durable the data that the journal's records name; then sync the journal up to the last
//!    change that a copy can show; then write the sequence number of this change into the last
//!    frame of the checkpoint. A checkpoint without this frame is invalid, so a checkpoint becomes
//!    valid only after the data of its runs is durable. If the journal lacks the change with this
//!    number, the checkpoint is not exact, and recovery prefers an exact older checkpoint.
//! 4. Sync the checkpoint; remove journal files that only the overwritten checkpoint needed.

use super::RunIndex;
use super::options::journal_bytes_max;
use super::slots::Number;
use crate::SyncData;
use crate::sync::Ordering;
use ritornello_format::Result;
use ritornello_format::checkpoint::{CheckpointEnd, CheckpointFrame, CheckpointHeader};
use ritornello_format::journal::{FRAME_BYTES_MAX, FRAME_OVERHEAD, Retentions};
use ritornello_format::wire::Writer;
use ritornello_medium::{Access, MediumFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of encoded runs after which the copy releases the read lock of the tables. The copy of a
/// run is completed before the release.
const COPY_MAX: usize = 64 << 10;
/// Maximum runs visited under one hold of the tables' lock, removed runs included.
const SCAN: Number = 4096;
/// Maximum retained runs in one frame of a checkpoint.
const RETAINED_ENTRIES: usize = 4096;

pub(super) fn path(dir: &Path, slot: usize) -> PathBuf {
    dir.join(format!("checkpoint-{slot}"))
}

/// Returns the path at which an open that rewrites the index writes its checkpoint. The open then
/// renames the file to one of the two checkpoint files. The file at this path is never read: after
/// a crash, the next open removes it.
pub(super) fn path_of_new(dir: &Path) -> PathBuf {
    dir.join("checkpoint-new")
}

/// One of the two checkpoint files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CheckpointFile {
    /// Id of the checkpoint; zero if the file holds no valid checkpoint.
    pub(super) id: u64,
    /// Number of the first journal file that recovery replays after loading the checkpoint.
    pub(super) journal: u64,
}

#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pub(super) files: [CheckpointFile; 2],
    /// The largest id in the header of any checkpoint file so far.
    pub(super) last_id: u64,
}

impl Checkpoints {
    /// Number of the file to write next: the file of the older checkpoint.
    pub(super) fn next(&self) -> usize {
        usize::from(self.files[0].id > self.files[1].id)
    }
}

impl RunIndex {
    /// Returns whether a checkpoint is due. Each of these conditions makes a checkpoint due:
    /// * The current journal file has at least the length [`journal_bytes_max`].
    /// * All journal files together have at least this length, and [`RunIndex::worst_case`], the
    ///   most bytes that the index's files may take, is at least three quarters of the budget.
    /// * The journal files and the two checkpoint files together exceed the budget.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        let budget = self.budget();
        let (journal, limit) =
            (self.gauges.journal.load(Ordering::Relaxed), journal_bytes_max(budget));
        let journals = self.gauges.journals.load(Ordering::Relaxed);
        // After a reduction of the budget, the files may exceed the budget until shorter
        // checkpoints replace them.
        let files = self.gauges.checkpoints.iter().map(|bytes| bytes.load(Ordering::Relaxed));
        journal >= limit
            || (journals >= limit && self.worst_case(0) >= budget / 4 * 3)
            || journals + files.sum::<u64>() > budget
    }

    /// Returns whether a sync must write a checkpoint itself, before
    /// [`crate::PrefixIndex::maintain`] does. A sync must if the current journal file is at least
    /// twice as long as [`journal_bytes_max`], or if a checkpoint is due and
    /// [`RunIndex::worst_case`] is at least seven eighths of the budget.
    pub(super) fn must_checkpoint(&self) -> bool {
        let journal = self.gauges.journal.load(Ordering::Relaxed);
        journal >= 2 * journal_bytes_max(self.budget())
            || self.worst_case(0) >= self.budget() / 8 * 7 && self.is_checkpoint_due()
    }

    /// Writes a checkpoint like [`RunIndex::checkpoint_after`], but syncs no data. For callers with
    /// runs without data, or with runs that are durable already.
    ///
    /// # Errors
    /// Errors of [`RunIndex::checkpoint_after`].
    pub fn checkpoint(&self) -> Result<()> {
        self.checkpoint_after(&|| Ok(()))
    }

    /// Writes a checkpoint immediately, even before it is due. Writers and probes proceed
    /// concurrently. Does nothing if a concurrent call is writing a checkpoint. The checkpoint
    /// becomes valid after `sync_data` has made the data of all its runs durable.
    ///
    /// # Errors
    /// `Fatal` if a write, a sync or the removal of a journal file failed, in this call or earlier:
    /// the index is then poisoned. `Retry` if the file system had no room; the error of
    /// `sync_data`. After these two errors the newer checkpoint and all journal files are valid,
    /// and the older checkpoint may be overwritten.
    pub fn checkpoint_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        let Some(mut checkpoints) = self.checkpoints.try_lock() else { return Ok(()) };
        let journal = self.rotate()?;
        let header = CheckpointHeader {
            id: checkpoints.last_id + 1,
            journal: journal.number,
            first: journal.first,
        };
        let slot = checkpoints.next();
        checkpoints.files[slot].id = 0;
        checkpoints.last_id = header.id;
        let bytes = self.write_checkpoint(&path(&self.dir, slot), header, sync_data)?;
        checkpoints.files[slot] = CheckpointFile { id: header.id, journal: journal.number };
        self.count_checkpoint(slot, bytes);
        self.remove_before(checkpoints.files[0].journal.min(checkpoints.files[1].journal))
    }

    pub(super) fn count_checkpoint(&self, slot: usize, bytes: u64) {
        self.gauges.checkpoints[slot].store(bytes, Ordering::Relaxed);
        self.gauges.written.fetch_add(bytes, Ordering::Relaxed);
        self.gauges.made.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes a checkpoint to the file `path` and returns its length. File and name are durable
    /// when the call returns.
    pub(super) fn write_checkpoint(
        &self,
        path: &Path,
        header: CheckpointHeader,
        sync_data: SyncData<'_>,
    ) -> Result<u64> {
        let access = Access { write: true, create: true, direct: false };
        let file = self.or_refuse(self.medium.open(path, access))?;
        let mut out = Output { file, offset: 0, header, ordinal: 0, buffer: Writer::new() };
        out.buffer.raw(&header.encode());
        let mut end = CheckpointEnd::default();
        let copied = self.copy_runs(&mut out, &mut end).and_then(|()| self.copy_retained(&mut out));
        self.or_refuse(copied)?;
        // A writer appends its record before it releases the lock of `pending`. So when this call
        // has the lock, the records of all changes that a copy can show, except of recency, are
        // appended.
        end.last = self.pending.lock().seal();
        end.reuse = self.tables.read().runs.reuse;
        self.commit(end.last, sync_data)?;
        self.or_refuse(out.finish(&end))?;
        let synced = out.file.sync_data().and_then(|()| self.medium.sync_dir(&self.dir));
        self.or_poison(synced)?;
        Ok(out.offset)
    }

    fn copy_runs(&self, out: &mut Output, end: &mut CheckpointEnd) -> io::Result<()> {
        // Runs with number `stop` or higher were inserted after the new journal file began, so
        // recovery replays their records from this file.
        let stop = self.tables.read().runs.end();
        let mut run = 1;
        let mut images = Writer::new();
        let frame = self.options.checkpoint_write_bytes;
        while run < stop {
            let tables = self.tables.read();
            let full = images.as_slice().len() + COPY_MAX.min(frame);
            let last = stop.min(run.saturating_add(SCAN));
            let mut overfull = false;
            while run < last && images.as_slice().len() < full {
                if tables.runs.is_live(run) {
                    let image = tables.runs.image(run);
                    let bytes = images.as_slice().len() + image.encoded_bytes();
                    overfull = bytes + FRAME_OVERHEAD > FRAME_BYTES_MAX;
                    if overfull {
                        break;
                    }
                    image.encode(&mut images);
                    end.runs += 1;
                    end.pages += u64::from(tables.runs.live_pages(run));
                }
                run += 1;
            }
            drop(tables);
            if images.as_slice().len() >= frame || overfull || run == stop {
                out.frame(&images)?;
                images = Writer::new();
            }
        }
        Ok(())
    }
}

impl RunIndex {
    /// Copies the retentions, in frames of bounded length, and the clock by which they end
    /// ([`crate::PrefixIndex::clock`]), if it was ever set.
    fn copy_retained(&self, out: &mut Output) -> io::Result<()> {
        let mut first = 0;
        loop {
            let (clock, runs) = {
                let tables = self.tables.read();
                let runs: Vec<_> = tables.runs.retained(first).take(RETAINED_ENTRIES).collect();
                (tables.runs.clock, runs)
            };
            let whole = runs.len() < RETAINED_ENTRIES;
            first = runs.last().map_or(first, |(run, _)| *run as Number + 1);
            if clock > 0 && (first == 0 || !runs.is_empty()) {
                out.retained(&Retentions { clock, runs })?;
            }
            if whole {
                return Ok(());
            }
        }
    }
}

/// The checkpoint file that is being written.
#[derive(Debug)]
struct Output {
    file: Arc<dyn MediumFile>,
    offset: u64,
    header: CheckpointHeader,
    ordinal: u32,
    buffer: Writer,
}

impl Output {
    fn frame(&mut self, images: &Writer) -> io::Result<()> {
        if !images.as_slice().is_empty() {
            let sequence = self.header.sequence(self.ordinal);
            CheckpointFrame::encode_runs(sequence, images.as_slice(), &mut self.buffer);
            self.ordinal += 1;
        }
        self.write()
    }

    fn retained(&mut self, retained: &Retentions) -> io::Result<()> {
        let sequence = self.header.sequence(self.ordinal);
        CheckpointFrame::encode_retained(sequence, retained, &mut self.buffer);
        self.ordinal += 1;
        self.write()
    }

    fn write(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut self.buffer).into_vec();
        self.file.write_at(&bytes, self.offset)?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn finish(&mut self, end: &CheckpointEnd) -> io::Result<()> {
        CheckpointFrame::encode_end(self.header.sequence(self.ordinal), end, &mut self.buffer);
        self.write()?;
        self.file.set_len(self.offset)
    }
}
