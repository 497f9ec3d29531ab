//! Journal records on their way to the disk.
//!
//! A writer appends its record under the same lock under which it changes the tables, so the order
//! of the journal is the order of the changes. `sync` seals the buffer, has the data made durable
//! that its records name, and then writes it with no lock held that a writer or a probe needs.
//! What is appended after the seal names data that may be on its way still, and stays behind.
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
use std::collections::VecDeque;

/// What [`RunIndex::reserve`] leaves free: headers, and the records of a removal or two.
const HEADROOM_BYTES: u64 = 4 << 10;

#[derive(Debug)]
pub(super) struct Pending {
    /// What came since the last seal.
    buffer: Writer,
    /// Sealed records, oldest first, each batch with the number of its last one.
    sealed: VecDeque<(u64, Vec<u8>)>,
    /// What the records up to this one name is durable: they may be written. It ends a batch.
    writable_through: u64,
    /// Sequence number of the next record.
    next: u64,
}

impl Pending {
    pub(super) fn new(next: u64) -> Self {
        Self { buffer: Writer::new(), sealed: VecDeque::new(), writable_through: next - 1, next }
    }

    /// Ends a batch with the last record there is, and returns its number.
    pub(super) fn seal(&mut self) -> u64 {
        let last = self.next - 1;
        if !self.buffer.as_slice().is_empty() {
            self.sealed.push_back((last, std::mem::take(&mut self.buffer).into_vec()));
        }
        last
    }

    /// Notes that what the records up to `last`, a seal, name is durable.
    pub(super) fn allow_write_through(&mut self, last: u64) {
        self.writable_through = self.writable_through.max(last);
    }

    /// The last record that may be written.
    pub(super) fn writable_through(&self) -> u64 {
        self.writable_through
    }

    /// Takes the records that may be written, and the number of the last one.
    pub(super) fn take(&mut self) -> (Vec<u8>, u64) {
        let batches = self.sealed.partition_point(|(last, _)| *last <= self.writable_through);
        let mut batches = self.sealed.drain(..batches).map(|(_, batch)| batch);
        let mut records = batches.next().unwrap_or_default();
        batches.for_each(|batch| records.extend(batch));
        (records, self.writable_through)
    }

    /// Gives back what was taken and could not be written, before what came since.
    pub(super) fn put_back(&mut self, records: Vec<u8>, last: u64) {
        self.sealed.push_front((last, records));
    }

    /// Bytes of records.
    pub(super) fn bytes(&self) -> u64 {
        let sealed: usize = self.sealed.iter().map(|(_, batch)| batch.len()).sum();
        (sealed + self.buffer.as_slice().len()) as u64
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
        self.gauges.pending.store(pending.bytes(), Ordering::Relaxed);
    }

    /// Refuses a record of `bytes` that brings a run of `image` bytes if the buffer is full or the
    /// files might outgrow their budget.
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
    pub(super) fn append_touches(&self) {
        let touched = std::mem::take(&mut *self.touched.lock());
        for section in touched.chunks(SECTION * 4) {
            let mut pending = self.pending.lock();
            let mut entries = Vec::with_capacity(section.len());
            {
                let tables = self.tables.read();
                for &run in section {
                    // The flag first: a touch from now on puts the run in the next list. A run
                    // that came into the record since then is not flagged, or in that list, too.
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
        "the index could not be written and will not be written again: close the store, see to \
         the disk, and open it again",
    )
}
