//! Journal records on their way to the disk.
//!
//! A writer appends its record under the same lock under which it changes the tables, so the order
//! of the journal is the order of the changes. `sync` takes the buffer away whole and writes it
//! with no lock held that a writer or a probe needs.
//!
//! Nothing is ever written under the writers' lock, so what bounds the buffer is its user: `sync`
//! empties it, [`crate::IndexStats::pending_bytes`] says how full it is, and from
//! [`super::RunOptions::pending_bytes_max`] on inserts are refused until somebody syncs.

use super::RunIndex;
use super::options::checkpoint_bytes;
use super::tables::SECTION;
use crate::sync::Ordering;
use ritornello_format::journal::JournalRecord;
use ritornello_format::wire::Writer;
use ritornello_format::{Error, Result};

/// What [`RunIndex::reserve`] leaves free: headers, and the records of a removal or two.
const SLACK: u64 = 4 << 10;

#[derive(Debug)]
pub(super) struct Pending {
    buffer: Writer,
    /// Sequence number of the next record.
    next: u64,
}

impl Pending {
    pub(super) fn starting_at(next: u64) -> Self {
        Self { buffer: Writer::new(), next }
    }

    /// The last sequence number given out.
    pub(super) fn last(&self) -> u64 {
        self.next - 1
    }

    /// Takes the records and the sequence number of the last one.
    pub(super) fn take(&mut self) -> (Vec<u8>, u64) {
        (std::mem::take(&mut self.buffer).into_vec(), self.last())
    }

    /// Gives back what was taken and could not be written, before what came since.
    pub(super) fn put_back(&mut self, records: &[u8]) {
        let newer = std::mem::take(&mut self.buffer);
        self.buffer.raw(records).raw(newer.as_slice());
    }

    /// Bytes of records.
    pub(super) fn bytes(&self) -> u64 {
        self.buffer.as_slice().len() as u64
    }
}

impl RunIndex {
    pub(super) fn append(&self, pending: &mut Pending, record: &JournalRecord<'_>) {
        // After a failed write nothing can become durable; the records would only pile up.
        if self.is_poisoned() {
            return;
        }
        record.encode(pending.next, &mut pending.buffer);
        pending.next += 1;
        self.gauges.pending.store(pending.buffer.as_slice().len() as u64, Ordering::Relaxed);
    }

    /// Refuses a record of `bytes` that brings a run of `image` bytes if the buffer is full or the
    /// files might outgrow their budget.
    pub(super) fn reserve(&self, pending: &Pending, bytes: usize, image: usize) -> Result<()> {
        if self.is_poisoned() {
            return Err(poisoned());
        }
        let waiting = pending.buffer.as_slice().len() as u64 + bytes as u64;
        if waiting > self.options.pending_bytes_max {
            return Err(Error::retry("the index's journal buffer is full: sync, then try again")
                .with("bytes", waiting)
                .with("pending_bytes_max", self.options.pending_bytes_max));
        }
        let worst = self.worst_case(image as u64) + waiting + SLACK;
        if worst > self.budget() {
            return Err(Error::retry(
                "the index has reached its share of the budget: sync, or remove pages",
            )
            .with("bytes", worst)
            .with("metadata_bytes_max", self.budget()));
        }
        Ok(())
    }

    /// Bytes of files once both checkpoints hold what is there now and `more`, and before any
    /// journal has gone.
    pub(super) fn worst_case(&self, more: u64) -> u64 {
        let images = self.tables.read().runs.image_bytes + more;
        let [first, second] =
            self.gauges.checkpoints.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        let checkpoint =
            checkpoint_bytes(images, self.options.checkpoint_write_bytes).max(first).max(second);
        2 * checkpoint + self.gauges.journals.load(Ordering::Relaxed)
    }

    /// Journals what was touched since the last time, each run once.
    pub(super) fn note_touches(&self) {
        let touched = std::mem::take(&mut *self.touched.lock());
        for section in touched.chunks(SECTION * 4) {
            let mut pending = self.pending.lock();
            let mut entries = Vec::with_capacity(section.len());
            {
                let tables = self.tables.read();
                for &run in section {
                    // The flag first: a touch from now on puts the run in the next list. A run
                    // that came into the record since then is not flagged, or in that list, too.
                    if tables.runs.hot(run).touched.swap(false, Ordering::AcqRel)
                        && tables.runs.is_live(run)
                    {
                        let recency = tables.runs.cold(run).recency.load(Ordering::Relaxed);
                        entries.push((tables.runs.id(run).0, recency));
                    }
                }
            }
            if !entries.is_empty() {
                self.append(&mut pending, &JournalRecord::Touch(entries));
            }
        }
    }
}

pub(super) fn poisoned() -> Error {
    Error::fatal(
        "the index could not be written and will not be written again: close the store, see to \
         the disk, and open it again",
    )
}
