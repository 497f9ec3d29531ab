//! Journal records of the index `run` that are not written yet.
//!
//! A writer changes the tables and appends its record under one hold of the writers' lock, so the
//! order of the journal is the order of the changes. [`crate::PrefixIndex::sync_after`] seals the
//! buffer, makes the data durable that the sealed records name, and then writes the records without
//! any lock that a writer or a probe needs. Records appended after the seal name data that may not
//! be durable yet; they stay for the next sync.
//!
//! A writer does no I/O, so the caller of the index must sync the index, which empties the buffer,
//! before the buffer grows large. [`crate::IndexStats::pending_bytes`] reports the bytes of the
//! buffer and of the sealed records that no sync has taken. An insert that would take them beyond
//! [`super::RunOptions::pending_bytes_max`], or beyond a sixteenth of
//! [`super::RunOptions::memory_bytes_max`] if that is less, is refused until a sync takes records.

use super::RunIndex;
use super::options::checkpoint_bytes;
use super::tables::LOCK_BATCH;
use crate::sync::Ordering;
use ritornello_format::journal::JournalRecord;
use ritornello_format::wire::Writer;
use ritornello_format::{Error, Result};
use std::collections::VecDeque;

/// Bytes that [`RunIndex::reserve`] keeps free for file headers and for the records of removals,
/// which are never refused.
const HEADROOM_BYTES: u64 = 4 << 10;

#[derive(Debug)]
pub(super) struct Pending {
    /// Records appended since the last seal.
    buffer: Writer,
    /// Sealed batches, oldest first, each with the sequence number of its last record.
    sealed: VecDeque<(u64, Vec<u8>)>,
    /// Sequence number of the last record that may be written, because the data that it and earlier
    /// records name is durable. This record is always the last record of a batch.
    writable_through: u64,
    /// Sequence number of the next record.
    next: u64,
}

impl Pending {
    pub(super) fn new(next: u64) -> Self {
        Self { buffer: Writer::new(), sealed: VecDeque::new(), writable_through: next - 1, next }
    }

    /// Seals the buffer as a batch. Returns the sequence number of the last record.
    pub(super) fn seal(&mut self) -> u64 {
        let last = self.next - 1;
        if !self.buffer.as_slice().is_empty() {
            self.sealed.push_back((last, std::mem::take(&mut self.buffer).into_vec()));
        }
        last
    }

    /// Permits writing the records up to `last`, the end of a batch, because the data that they
    /// name is durable.
    pub(super) fn allow_write_through(&mut self, last: u64) {
        self.writable_through = self.writable_through.max(last);
    }

    pub(super) fn writable_through(&self) -> u64 {
        self.writable_through
    }

    /// Takes the records that may be written. Returns the records and the sequence number of the
    /// last record.
    pub(super) fn take(&mut self) -> (Vec<u8>, u64) {
        let batches = self.sealed.partition_point(|(last, _)| *last <= self.writable_through);
        let mut batches = self.sealed.drain(..batches).map(|(_, batch)| batch);
        let mut records = batches.next().unwrap_or_default();
        batches.for_each(|batch| records.extend(batch));
        (records, self.writable_through)
    }

    /// Puts back records that were taken and could not be written, before the records appended
    /// since.
    pub(super) fn put_back(&mut self, records: Vec<u8>, last: u64) {
        self.sealed.push_front((last, records));
    }

    /// Bytes of all records that are not written yet, sealed or not.
    pub(super) fn bytes(&self) -> u64 {
        let sealed: usize = self.sealed.iter().map(|(_, batch)| batch.len()).sum();
        (sealed + self.buffer.as_slice().len()) as u64
    }
}

impl RunIndex {
    pub(super) fn append(&self, pending: &mut Pending, record: &JournalRecord<'_>) {
        // A poisoned index never writes again, so records would only take memory.
        if self.is_poisoned() {
            return;
        }
        record.encode(pending.next, &mut pending.buffer);
        pending.next += 1;
        self.gauges.pending.store(pending.bytes(), Ordering::Relaxed);
    }

    /// Checks that there is room for a journal record of `bytes` bytes, whose run takes `image`
    /// bytes in a checkpoint: in the buffer of records, and in the budget of the files.
    ///
    /// # Errors
    /// `Retry` if there is no room; `Fatal` if the index is poisoned.
    pub(super) fn reserve(&self, pending: &Pending, bytes: usize, image: usize) -> Result<()> {
        if self.is_poisoned() {
            return Err(poisoned());
        }
        let waiting = pending.bytes() + bytes as u64;
        if waiting > self.options.pending_max() {
            return Err(Error::retry("the index's journal buffer is full: sync, then try again")
                .with("bytes", waiting)
                .with("pending_bytes_max", self.options.pending_max()));
        }
        let worst = self.worst_case(image as u64) + waiting + HEADROOM_BYTES;
        if worst > self.budget() {
            return Err(Error::retry(
                "the index's files have reached their budget: sync, or remove pages",
            )
            .with("bytes", worst)
            .with("metadata_bytes_max", self.budget()));
        }
        Ok(())
    }

    /// Bytes of all files at the worst moment: both checkpoints hold the current runs and `more`
    /// bytes, and no journal file has been removed yet.
    pub(super) fn worst_case(&self, more: u64) -> u64 {
        let images = self.tables.read().runs.image_bytes + more;
        let [first, second] =
            self.gauges.checkpoints.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        let checkpoint =
            checkpoint_bytes(images, self.options.checkpoint_write_bytes).max(first).max(second);
        2 * checkpoint + self.gauges.journals.load(Ordering::Relaxed)
    }

    /// Appends journal records with the recency of all runs touched since the last call, each once.
    pub(super) fn append_touches(&self) {
        let touched = std::mem::take(&mut *self.touched.lock());
        for batch in touched.chunks(LOCK_BATCH * 4) {
            let mut pending = self.pending.lock();
            let mut entries = Vec::with_capacity(batch.len());
            {
                let tables = self.tables.read();
                for &run in batch {
                    // Clear the flag before reading the recency, so that a later touch lists the
                    // run again. After a removal of the touched run, a new run may have its number;
                    // the flag of the new run is set only if the new run was touched itself.
                    if tables.runs.is_live(run)
                        && tables.runs.hot(run).touched.swap(false, Ordering::AcqRel)
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
        "the index could not be written and will not be written again: close the store, check \
         the disk, and open it again",
    )
}
