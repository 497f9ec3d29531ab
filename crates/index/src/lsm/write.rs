//! Changes of the index `lsm`. The lock of [`Writer`] serialises writers. A change is one atomic
//! batch, so no recovery after a crash finds a page of a chained scope without the pages before it.

use super::LsmIndex;
use super::families::{COUNTS, Families};
use super::keys::{self, Family};
use super::record::{Counts, Record, Use};
use crate::live_extents::held;
use crate::sync::Ordering;
use crate::{Removed, RunId};
use ritornello_format::{Error, PageHash, Result, ScopeSlot};
use rocksdb::WriteBatch;
use std::collections::{BTreeMap, BTreeSet, HashMap};

#[derive(Debug)]
pub(super) struct Writer {
    pub(super) counts: Counts,
}

/// A change that is being assembled.
pub(super) struct Change<'a> {
    db: &'a Families,
    batch: WriteBatch,
    pub(super) counts: Counts,
}

impl<'a> Change<'a> {
    pub(super) fn new(db: &'a Families, writer: &Writer) -> Self {
        Self { db, batch: WriteBatch::default(), counts: writer.counts }
    }

    /// Adds an entry. The caller has subtracted an existing entry with the same key from the
    /// checksum over all entries.
    pub(super) fn put(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        self.batch.put_cf(self.db.handle(family)?, key, value);
        self.counts.sum.add(family, key, value);
        Ok(())
    }

    /// Replaces the entry of a run, which exists with the value `old`.
    pub(super) fn replace(
        &mut self,
        family: Family,
        run: RunId,
        old: &[u8],
        value: &[u8],
    ) -> Result<()> {
        self.counts.sum.subtract(family, &keys::run(run), old);
        self.put(family, &keys::run(run), value)
    }

    /// Deletes an entry, which exists with the value `value`.
    fn delete(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        self.batch.delete_cf(self.db.handle(family)?, key);
        self.counts.sum.subtract(family, key, value);
        Ok(())
    }
}

impl LsmIndex {
    /// Writes a change. If RocksDB refuses the change, the index is unchanged, and is poisoned: the
    /// index refuses all later writes.
    pub(super) fn commit(&self, writer: &mut Writer, mut change: Change<'_>) -> Result<()> {
        self.db.check()?;
        change.batch.put(COUNTS, change.counts.encode());
        let (bytes, entries) = (change.batch.size_in_bytes() as u64, change.batch.len() as u64);
        self.db.db.write(change.batch).map_err(|error| {
            self.db.poison(&error);
            Error::fatal("the index could not be written: open the store again").because(error)
        })?;
        writer.counts = change.counts;
        self.gauges.record(&writer.counts, bytes);
        self.db.controller.wrote(entries);
        Ok(())
    }

    /// The [`Record::depth`] of a run that is attached to `parent`.
    pub(super) fn depth_behind(&self, parent: Option<(RunId, u16)>) -> u64 {
        let Some((parent, page)) = parent else { return 0 };
        // The depth is the number of pages that are known to precede a run: none behind an
        // unchained run, because a page of that run can be removed while runs attached to it stay.
        let record = self.db.record(parent).filter(|record| record.chained);
        record.map_or(0, |record| record.depth + u64::from(page) + 1)
    }

    /// Logs an error of a method that does not return errors. The next sync fails, because the
    /// error poisoned the index.
    pub(super) fn log(&self, result: Result<()>, what: &str) {
        if let Err(error) = result {
            tracing::error!(%error, what, "a change of the index failed");
        }
    }

    /// Makes three changes in one batch. Truncates each run in `cuts` after the number of pages
    /// that `cuts` says. Removes all runs that descend from the pages that are cut off. Removes the
    /// pages in `holes`, which leave holes; a run without other pages is removed whole.
    pub(super) fn cut(
        &self,
        writer: &mut Writer,
        cuts: BTreeMap<RunId, u16>,
        holes: BTreeMap<RunId, BTreeSet<u16>>,
    ) -> Vec<Removed> {
        let mut change = Change::new(&self.db, writer);
        let mut removed = Vec::new();
        let done = (|| {
            let mut cuts = cuts;
            for (run, pages) in holes {
                let Some(record) = self.db.record(run) else { continue };
                if usize::from(record.live) == pages.len() {
                    cuts.insert(run, 0);
                } else {
                    removed.push(punch(&mut change, run, record, &pages)?);
                }
            }
            for (run, (keep, record)) in self.closure(cuts) {
                removed.extend(cut_one(&mut change, run, keep, record)?);
            }
            if removed.is_empty() {
                return Ok(());
            }
            self.commit(writer, change)
        })();
        if done.is_err() {
            removed.clear();
        }
        let mut touched = self.touched.lock();
        for gone in removed.iter().filter(|gone| gone.whole) {
            touched.remove(&gone.run);
        }
        drop(touched);
        self.log(done, "a removal");
        removed
    }

    /// Returns the runs in `cuts` and all runs that descend from pages after the cuts, each with
    /// its record and the number of leading pages to keep.
    fn closure(&self, cuts: BTreeMap<RunId, u16>) -> HashMap<RunId, (u16, Record)> {
        let mut removals: HashMap<RunId, (u16, Record)> = HashMap::new();
        let mut open: Vec<(RunId, u16)> = cuts.into_iter().collect();
        while let Some((run, keep)) = open.pop() {
            // If an earlier step of this loop cut the run at `end`, it has listed the children of
            // pages `end` and later.
            let end = match removals.get_mut(&run) {
                Some((known, _)) if *known <= keep => continue,
                Some((known, _)) => std::mem::replace(known, keep),
                None => {
                    let Some(record) = self.db.record(run) else { continue };
                    if keep >= record.pages {
                        continue;
                    }
                    removals.insert(run, (keep, record));
                    u16::MAX
                }
            };
            let end = keys::page_position(run, end);
            self.db.scan(Family::Child, &keys::page_position(run, keep), |key, _| {
                let Some((parent, child)) = keys::read_child(key) else { return false };
                if parent != run || key[..end.len()] >= end[..] {
                    return false;
                }
                open.push((child, 0));
                true
            });
        }
        removals
    }

    /// Writes the recency of touched runs that still exist.
    pub(super) fn write_touches(&self) {
        let mut writer = self.writer.lock();
        let touched = self.touched.lock().clone();
        if touched.is_empty() || self.db.is_poisoned() {
            return;
        }
        let mut change = Change::new(&self.db, &writer);
        let written = (|| {
            for (run, recency) in &touched {
                let Some(before) = self.db.used(*run).filter(|used| used.recency < *recency) else {
                    continue;
                };
                let used = Use { recency: *recency, ..before };
                change.replace(Family::Use, *run, &before.encode(), &used.encode())?;
            }
            if change.batch.is_empty() {
                return Ok(());
            }
            self.commit(&mut writer, change)
        })();
        // Keep runs that were touched again during the write.
        self.touched.lock().retain(|run, recency| touched.get(run) != Some(recency));
        self.log(written, "a change of recency");
    }

    pub(super) fn is_full(&self) -> bool {
        // A compaction of the whole database writes the database a second time before it deletes
        // the first copy.
        let budget = self.gauges.budget.load(Ordering::Relaxed);
        self.gauges.worst_bytes(&self.db) > budget
    }
}

fn cut_one(
    change: &mut Change<'_>,
    run: RunId,
    keep: u16,
    mut record: Record,
) -> Result<Option<Removed>> {
    if keep >= record.pages {
        return Ok(None);
    }
    let mut hashes = change.db.hashes(run, &record, keep);
    let mut gone = 0;
    for (page, hash) in (0..=u16::MAX).zip(&hashes).filter(|(_, hash)| **hash != PageHash::NONE) {
        drop_page(change, record.scope, run, page, *hash)?;
        gone += 1;
    }
    let whole = gone >= record.live;
    let from = if whole { 0 } else { keep };
    let extents = held(&record.place, &hashes, from.into());
    // Remove the first `keep` entries, which stand for the pages that stay.
    hashes.drain(..usize::from(keep).min(hashes.len()));
    let (scope, pages) = (record.scope, gone.into());
    let removed = Removed { run, scope, pages, hashes, whole, extents };
    change.counts.pages -= u64::from(gone);
    if whole {
        change.delete(Family::Run, &keys::run(run), &record.encode())?;
        if let Some(used) = change.db.used(run) {
            change.delete(Family::Use, &keys::run(run), &used.encode())?;
        }
        if let Some((parent, page)) = record.parent {
            change.delete(Family::Child, &keys::child(parent, page, run), &[])?;
        }
        change.counts.runs -= 1;
    } else {
        let before = record.encode();
        record.pages = keep;
        record.live -= gone;
        record.place.truncate(keep.into());
        change.replace(Family::Run, run, &before, &record.encode())?;
    }
    Ok(Some(removed))
}

/// Deletes a page from the column families `path` and `page`.
fn drop_page(
    change: &mut Change<'_>,
    scope: ScopeSlot,
    run: RunId,
    page: u16,
    hash: PageHash,
) -> Result<()> {
    change.delete(Family::Path, &keys::path(scope, run, page), &hash.0)?;
    change.delete(Family::Page, &keys::page(scope, hash), &keys::page_position(run, page))
}

/// Makes holes in a run of which pages remain.
fn punch(
    change: &mut Change<'_>,
    run: RunId,
    mut record: Record,
    pages: &BTreeSet<u16>,
) -> Result<Removed> {
    let scope = record.scope;
    let before = record.encode();
    let hashes = change.db.hashes(run, &record, 0);
    let (mut punched, mut extents) = (Vec::with_capacity(pages.len()), Vec::new());
    for &page in pages {
        if let Some(hash) = hashes.get(usize::from(page)) {
            drop_page(change, scope, run, page, *hash)?;
            punched.push(*hash);
        }
        extents.extend(record.place.page(page.into()));
    }
    let gone = pages.len() as u16;
    record.live -= gone;
    change.counts.pages -= u64::from(gone);
    change.replace(Family::Run, run, &before, &record.encode())?;
    let extents = crate::live_extents::join(extents);
    Ok(Removed { run, scope, pages: gone.into(), hashes: punched, whole: false, extents })
}
