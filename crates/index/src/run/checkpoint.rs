//! Checkpoints: all runs, copied while the index changes, so that the journal before can go.
//!
//! There are two files, written in turn, and the journal reaches back to the older one: whichever
//! is damaged, the other and a longer journal say the same. Writing goes so:
//!
//! 1. The journal is synced and a new file begun: what it does not hold yet is replayed on top.
//! 2. The runs are copied, some at a time, under the read lock. A copy may show changes that are
//!    in the new journal file already; replaying them again does nothing.
//! 3. The journal is synced up to the last change that a copy can show, after the data that it
//!    names; its number goes into the last frame. A checkpoint without that frame is none, so no
//!    copy counts before its data is durable. One whose journal does not reach that far is not
//!    exact, and recovery prefers the older one.
//! 4. The checkpoint is synced; journal files that only the overwritten checkpoint needed go.

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

/// Bytes of images copied under one hold of the lock, or one run if that is more.
const COPY_MAX: usize = 64 << 10;
/// Records looked at under one hold of the lock.
const SCAN: Number = 4096;
/// Retained runs in one frame.
const RETAINED_ENTRIES: usize = 4096;

pub(super) fn path(dir: &Path, slot: usize) -> PathBuf {
    dir.join(format!("checkpoint-{slot}"))
}

/// The checkpoint that a rewriting open writes before it takes the name of one of the two. Never
/// read: a crash leaves it behind, and the next open removes it.
pub(super) fn path_of_new(dir: &Path) -> PathBuf {
    dir.join("checkpoint-new")
}

/// One of the two files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// Zero: nothing of worth in it.
    pub(super) id: u64,
    /// Journal file that it is followed by.
    pub(super) journal: u64,
}

#[derive(Debug, Default)]
pub(super) struct Checkpoints {
    pub(super) slots: [Slot; 2],
    /// The largest id that any file has ever begun with.
    pub(super) last_id: u64,
}

impl Checkpoints {
    /// Where the next one goes: over the older one.
    pub(super) fn next(&self) -> usize {
        usize::from(self.slots[0].id > self.slots[1].id)
    }
}

impl RunIndex {
    /// Whether it is time for a checkpoint: the journal file is long, or the budget nearly used up
    /// with journals making a good part of it.
    pub(super) fn is_checkpoint_due(&self) -> bool {
        let budget = self.budget();
        let (journal, limit) =
            (self.gauges.journal.load(Ordering::Relaxed), journal_bytes_max(budget));
        let journals = self.gauges.journals.load(Ordering::Relaxed);
        // A budget that was made smaller is met by writing less into both files.
        let files = self.gauges.checkpoints.iter().map(|bytes| bytes.load(Ordering::Relaxed));
        journal >= limit
            || (journals >= limit && self.worst_case(0) >= budget / 4 * 3)
            || journals + files.sum::<u64>() > budget
    }

    /// Whether it is high time, because nobody called [`crate::PrefixIndex::maintain`].
    pub(super) fn must_checkpoint(&self) -> bool {
        let journal = self.gauges.journal.load(Ordering::Relaxed);
        journal >= 2 * journal_bytes_max(self.budget())
            || self.worst_case(0) >= self.budget() / 8 * 7 && self.is_checkpoint_due()
    }

    /// [`RunIndex::checkpoint_after`] for runs whose data is durable, or that have none.
    ///
    /// # Errors
    /// As there.
    pub fn checkpoint(&self) -> Result<()> {
        self.checkpoint_after(&|| Ok(()))
    }

    /// Writes a checkpoint now, whether one is due or not. Writers and probes go on meanwhile.
    /// Does nothing if one is being written. It counts after `sync_data` was called with all runs in
    /// the index that it holds.
    ///
    /// # Errors
    /// `Fatal` if the medium refused: the index is then poisoned. `Retry` if there was no room for
    /// it, or what `sync_data` returned: the checkpoints and journals there were are as good as before.
    pub fn checkpoint_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        let Some(mut checkpoints) = self.checkpoints.try_lock() else { return Ok(()) };
        let journal = self.rotate()?;
        let header = CheckpointHeader {
            id: checkpoints.last_id + 1,
            journal: journal.number,
            first: journal.first,
        };
        let slot = checkpoints.next();
        checkpoints.slots[slot].id = 0;
        checkpoints.last_id = header.id;
        let bytes = self.write_checkpoint(&path(&self.dir, slot), header, sync_data)?;
        checkpoints.slots[slot] = Slot { id: header.id, journal: journal.number };
        self.count_checkpoint(slot, bytes);
        self.remove_before(checkpoints.slots[0].journal.min(checkpoints.slots[1].journal))
    }

    pub(super) fn count_checkpoint(&self, slot: usize, bytes: u64) {
        self.gauges.checkpoints[slot].store(bytes, Ordering::Relaxed);
        self.gauges.written.fetch_add(bytes, Ordering::Relaxed);
        self.gauges.made.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes a checkpoint into the file `path` and returns its length. It is durable then, and so
    /// is its name.
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
        // Every change that a copy can show was appended by now: a writer appends before it lets
        // go of the lock that this takes.
        end.last = self.pending.lock().seal();
        end.reuse = self.tables.read().runs.reuse;
        self.commit(end.last, sync_data)?;
        self.or_refuse(out.finish(&end))?;
        let synced = out.file.sync_data().and_then(|()| self.medium.sync_dir(&self.dir));
        self.or_poison(synced)?;
        Ok(out.offset)
    }

    fn copy_runs(&self, out: &mut Output, end: &mut CheckpointEnd) -> io::Result<()> {
        // Runs that come into records behind this one are in the new journal.
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
    /// What is retained, in frames of a bounded length; and the clock, if it was ever told.
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

/// The file being written.
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
