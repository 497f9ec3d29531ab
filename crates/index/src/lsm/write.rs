//! Changes of the index. The lock of [`Writer`] serialises writers. A change is one atomic batch,
//! so no reader, and no recovery after a crash, finds a page of a chained scope without the pages
//! before it.

use super::LsmIndex;
use super::families::{COUNTS, Families};
use super::keys::{self, Family};
use super::record::{Counts, Record, Use};
use crate::live_extents::held;
use crate::run::{check, check_place};
use crate::sync::Ordering;
use crate::{NewRun, Removed, RunId};
use ritornello_format::{Error, PageHash, PageHashes, Place, Result, ScopeSlot};
use rocksdb::WriteBatch;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Maximum runs of a scope that are removed in one batch, together with their descendants.
const SCOPE_RUNS: usize = 1024;
/// Maximum touched runs that are gathered before they are written.
const TOUCHED_MAX: usize = 1 << 16;

/// The state of the writer.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) counts: Counts,
}

/// A change that is being assembled.
struct Change<'a> {
    db: &'a Families,
    batch: WriteBatch,
    counts: Counts,
}

impl<'a> Change<'a> {
    fn new(db: &'a Families, writer: &Writer) -> Self {
        Self { db, batch: WriteBatch::default(), counts: writer.counts }
    }

    /// Adds an entry that does not exist.
    fn put(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        self.batch.put_cf(self.db.handle(family)?, key, value);
        self.counts.sum.add(family, key, value);
        Ok(())
    }

    /// Replaces the entry of a run, which exists with the value `old`.
    fn replace(&mut self, family: Family, run: RunId, old: &[u8], value: &[u8]) -> Result<()> {
        self.counts.sum.subtract(family, &keys::run(run), old);
        self.put(family, &keys::run(run), value)
    }

    /// Deletes an entry, which exists with this value.
    fn delete(&mut self, family: Family, key: &[u8], value: &[u8]) -> Result<()> {
        self.batch.delete_cf(self.db.handle(family)?, key);
        self.counts.sum.subtract(family, key, value);
        Ok(())
    }
}

impl LsmIndex {
    /// Writes a change. If RocksDB refuses it, nothing is changed, and nothing is written after it.
    fn commit(&self, writer: &mut Writer, mut change: Change<'_>) -> Result<()> {
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

    pub(super) fn insert_run(&self, new: &NewRun<'_>) -> Result<RunId> {
        check(new)?;
        self.db.check()?;
        let mut writer = self.writer.lock();
        if self.is_full() {
            return Err(Error::retry("the index's files have reached their budget: remove pages"));
        }
        let present = |page: &PageHash| self.db.find(new.scope, *page).is_some();
        if let Some(at) = new.pages.iter().position(present) {
            return Err(Error::invalid(
                "a page is in the index already: insert only missing pages",
            )
            .with("page", at));
        }
        let parent = match new.parent {
            None => None,
            Some(page) => Some(self.db.find(new.scope, page).ok_or_else(|| {
                Error::invalid("the parent is not in the index: insert it first, or leave it out")
            })?),
        };
        let mut change = Change::new(&self.db, &writer);
        change.counts.last += 1;
        change.counts.runs += 1;
        change.counts.pages += new.pages.len() as u64;
        let run = RunId(change.counts.last);
        for (page, hash) in (0..=u16::MAX).zip(new.pages) {
            change.put(Family::Path, &keys::path(new.scope, run, page), &hash.0)?;
            change.put(
                Family::Page,
                &keys::page(new.scope, *hash),
                &keys::page_position(run, page),
            )?;
        }
        let parent = parent.filter(|_| new.chained);
        if let Some((parent, page)) = parent {
            change.put(Family::Child, &keys::child(parent, page, run), &[])?;
        }
        let record = Record {
            scope: new.scope,
            chained: new.chained,
            parent,
            depth: self.depth_behind(parent),
            // The cast is exact: `check` limits the number of pages.
            pages: new.pages.len() as u16,
            live: new.pages.len() as u16,
            place: new.place.clone(),
        };
        change.put(Family::Run, &keys::run(run), &record.encode())?;
        let used = Use { recency: new.recency, retain_until: 0 };
        change.put(Family::Use, &keys::run(run), &used.encode())?;
        self.commit(&mut writer, change)?;
        Ok(run)
    }

    /// The [`Record::depth`] of a run that is attached to `parent`.
    fn depth_behind(&self, parent: Option<(RunId, u16)>) -> u64 {
        let Some((parent, page)) = parent else { return 0 };
        // A page of an unchained run can be removed without the runs attached to it.
        let record = self.db.record(parent).filter(|record| record.chained);
        record.map_or(0, |record| record.depth + u64::from(page) + 1)
    }

    pub(super) fn link_run(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        let mut writer = self.writer.lock();
        let Some((child, 0)) = self.db.find(scope, child) else { return };
        let Some((parent, page)) = self.db.find(scope, parent) else { return };
        let Some(mut record) = self.db.record(child) else { return };
        if parent == child || record.parent.is_some() || !record.chained {
            return;
        }
        let before = record.encode();
        record.parent = Some((parent, page));
        record.depth = self.depth_behind(record.parent);
        let mut change = Change::new(&self.db, &writer);
        let linked = change
            .put(Family::Child, &keys::child(parent, page, child), &[])
            .and_then(|()| change.replace(Family::Run, child, &before, &record.encode()))
            .and_then(|()| self.commit(&mut writer, change));
        self.log(linked, "a link");
    }

    /// Logs an error that the caller cannot get; the next sync reports it.
    fn log(&self, result: Result<()>, what: &str) {
        if let Err(error) = result {
            tracing::error!(%error, what, "a change of the index failed");
        }
    }

    /// Cuts runs, each after a number of pages, removes the descendants of the pages after the
    /// cuts, and makes holes, in one batch.
    fn cut(
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

    /// The runs to cut, and all descendants of the pages after the cuts.
    fn closure(&self, cuts: BTreeMap<RunId, u16>) -> HashMap<RunId, (u16, Record)> {
        let mut removals: HashMap<RunId, (u16, Record)> = HashMap::new();
        let mut open: Vec<(RunId, u16)> = cuts.into_iter().collect();
        while let Some((run, keep)) = open.pop() {
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

    pub(super) fn truncate_run(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let Ok(keep) = u16::try_from(keep) else { return Vec::new() };
        let mut writer = self.writer.lock();
        self.cut(&mut writer, BTreeMap::from([(run, keep)]), BTreeMap::new())
    }

    pub(super) fn remove_pages(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        let mut writer = self.writer.lock();
        let mut chained: HashMap<RunId, bool> = HashMap::new();
        let mut cuts = BTreeMap::new();
        let mut holes: BTreeMap<RunId, BTreeSet<u16>> = BTreeMap::new();
        for at in 0..pages.len() {
            let Some((run, page)) = self.db.find(scope, pages.at(at)) else { continue };
            let is_chained = *chained
                .entry(run)
                .or_insert_with(|| self.db.record(run).is_some_and(|record| record.chained));
            if is_chained {
                let keep = cuts.entry(run).or_insert(page);
                *keep = page.min(*keep);
            } else {
                holes.entry(run).or_default().insert(page);
            }
        }
        self.cut(&mut writer, cuts, holes)
    }

    pub(super) fn remove_runs_of(&self, scope: ScopeSlot) -> Vec<Removed> {
        let mut removed = Vec::new();
        // Releases the writer's lock after each batch, so that inserts make progress. Runs that
        // they add have names after `last`, and are not visited.
        let last = self.writer.lock().counts.last;
        let mut next = RunId(0);
        loop {
            let mut writer = self.writer.lock();
            let mut cuts = BTreeMap::new();
            while cuts.len() < SCOPE_RUNS && next.0 <= last {
                let mut found = None;
                let start = keys::path(scope, next, 0);
                self.db.scan(Family::Path, &start, |key, _| {
                    found = keys::read_path(key).filter(|(s, _, _)| *s == scope);
                    false
                });
                let Some((_, run, _)) = found else {
                    next = RunId(last + 1);
                    break;
                };
                cuts.insert(run, 0);
                next = RunId(run.0 + 1);
            }
            if cuts.is_empty() {
                return removed;
            }
            removed.extend(self.cut(&mut writer, cuts, BTreeMap::new()));
        }
    }

    pub(super) fn move_run(&self, run: RunId, place: &Place) -> Option<Removed> {
        let mut writer = self.writer.lock();
        let mut record = self.db.record(run)?;
        check_place(place, usize::from(record.pages)).ok()?;
        let extents = held(&record.place, &self.db.hashes(run, &record, 0), 0);
        let before = record.encode();
        record.place = place.clone();
        let scope = record.scope;
        let mut change = Change::new(&self.db, &writer);
        let moved = change
            .replace(Family::Run, run, &before, &record.encode())
            .and_then(|()| self.commit(&mut writer, change));
        let is_moved = moved.is_ok();
        self.log(moved, "a relocation");
        is_moved.then_some(Removed { run, scope, pages: 0, whole: false, extents })
    }

    pub(super) fn touch_run(&self, run: RunId, recency: u64) {
        let mut touched = self.touched.lock();
        let latest = touched.entry(run).or_default();
        *latest = recency.max(*latest);
        if touched.len() >= TOUCHED_MAX {
            drop(touched);
            self.write_touches();
        }
    }

    /// Writes the recency of touched runs that still exist.
    pub(super) fn write_touches(&self) {
        let mut writer = self.writer.lock();
        let touched: Vec<(RunId, u64)> =
            self.touched.lock().iter().map(|(run, recency)| (*run, *recency)).collect();
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
        self.touched
            .lock()
            .retain(|run, recency| touched.binary_search(&(*run, *recency)).is_err());
        self.log(written, "recency");
    }

    pub(super) fn retain_runs(&self, runs: &[(RunId, u64)], clock: u64) {
        let mut writer = self.writer.lock();
        let mut change = Change::new(&self.db, &writer);
        change.counts.clock = change.counts.clock.max(clock);
        let retained = (|| {
            // If a run is named twice, the last end counts.
            let last: BTreeMap<RunId, u64> = runs.iter().copied().collect();
            for (run, until) in last {
                if let Some(before) = self.db.used(run) {
                    let used = Use { retain_until: until, ..before };
                    change.replace(Family::Use, run, &before.encode(), &used.encode())?;
                }
            }
            self.commit(&mut writer, change)
        })();
        self.log(retained, "a retention");
    }

    fn is_full(&self) -> bool {
        // A compaction of the whole database writes it a second time before it deletes the first.
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
    let hashes = change.db.hashes(run, &record, keep);
    let mut gone = 0;
    for (page, hash) in (0..=u16::MAX).zip(&hashes).filter(|(_, hash)| **hash != PageHash::NONE) {
        drop_page(change, record.scope, run, page, *hash)?;
        gone += 1;
    }
    let whole = gone >= record.live;
    let from = if whole { 0 } else { keep };
    let extents = held(&record.place, &hashes, from.into());
    let removed = Removed { run, scope: record.scope, pages: gone.into(), whole, extents };
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

/// Deletes a page from both families.
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
    let mut extents = Vec::new();
    for &page in pages {
        if let Some(hash) = hashes.get(usize::from(page)) {
            drop_page(change, scope, run, page, *hash)?;
        }
        extents.extend(record.place.page(page.into()));
    }
    let gone = pages.len() as u16;
    record.live -= gone;
    change.counts.pages -= u64::from(gone);
    change.replace(Family::Run, run, &before, &record.encode())?;
    let extents = crate::live_extents::join(extents);
    Ok(Removed { run, scope, pages: gone.into(), whole: false, extents })
}
