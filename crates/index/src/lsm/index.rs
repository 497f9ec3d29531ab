//! Changes and lookups: the implementation of [`PrefixIndex`].

use super::keys::{self, Family};
use super::record::{Record, Use};
use super::write::Change;
use super::{LsmIndex, ProbeMethod};
use crate::live_extents::held;
use crate::run::{check, check_place};
use crate::sync::Ordering;
use crate::{
    IndexStats, MatchedRun, NewRun, PrefixIndex, Removed, RunId, RunView, SyncData, Tuning,
};
use ritornello_format::{Error, PageHash, PageHashes, Place, Result, ScopeSlot};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Maximum runs of a scope that one batch removes. The descendants of these runs, which the batch
/// removes too, do not count.
const SCOPE_RUNS: usize = 1024;
/// Maximum touched runs whose recency is gathered in memory before it is written.
const TOUCHED_MAX: usize = 1 << 16;

impl PrefixIndex for LsmIndex {
    fn insert(&self, new: &NewRun<'_>) -> Result<RunId> {
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

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
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

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let Ok(keep) = u16::try_from(keep) else { return Vec::new() };
        let mut writer = self.writer.lock();
        self.cut(&mut writer, BTreeMap::from([(run, keep)]), BTreeMap::new())
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
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

    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        let mut removed = Vec::new();
        // Release the writer's lock after each batch, so that inserts make progress. Runs inserted
        // between batches have names after `last`. The first such run in the scope may be removed;
        // further such runs are removed only as descendants of removed runs.
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
            let cut = self.cut(&mut writer, cuts, BTreeMap::new());
            removed.extend(cut.into_iter().map(Removed::without_hashes));
        }
    }

    fn relocate(&self, run: RunId, place: &Place) -> Option<Removed> {
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
        let hashes = Vec::new();
        is_moved.then_some(Removed { run, scope, pages: 0, hashes, whole: false, extents })
    }

    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.probe_with(self.probe, scope, pages)
    }

    fn reads_files(&self) -> bool {
        true
    }

    fn probe_methods(&self) -> &'static [&'static str] {
        match self.probe {
            ProbeMethod::Bisect => {
                const { &[ProbeMethod::Bisect.name(), ProbeMethod::Scan.name()] }
            }
            ProbeMethod::Scan => const { &[ProbeMethod::Scan.name(), ProbeMethod::Bisect.name()] },
        }
    }

    fn probe_by(&self, method: &str, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        let named = [ProbeMethod::Bisect, ProbeMethod::Scan]
            .into_iter()
            .find(|probe| probe.name() == method);
        self.probe_with(named.unwrap_or(self.probe), scope, pages)
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun> {
        self.walk_with(self.probe, scope, pages)
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        (0..pages.len()).map(|at| self.db.find(scope, pages.at(at)).is_some()).collect()
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        self.db.find(scope, page).map(|(run, page)| (run, page.into()))
    }

    fn place(&self, run: RunId) -> Option<Place> {
        self.db.record(run).map(|record| record.place)
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let at = u16::try_from(at).ok()?;
        let record = self.db.record(run)?;
        keys::read_hash(&self.db.get(Family::Path, &keys::path(record.scope, run, at))?)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        loop {
            let record = self.db.record(run)?;
            let pages = self.db.hashes(run, &record, 0);
            let used = self.db.used(run)?;
            // A removal of pages changes the record in the same batch, and is never reverted. If
            // the record is unchanged, no page was therefore removed between the reads.
            if self.db.record(run)? == record {
                return Some(self.view(run, record, pages, used));
            }
        }
    }

    fn parent(&self, run: RunId) -> Option<RunId> {
        let (parent, _) = self.db.record(run)?.parent?;
        Some(parent)
    }

    fn has_children(&self, run: RunId) -> bool {
        let mut found = false;
        self.db.scan(Family::Child, &keys::page_position(run, 0), |key, _| {
            found = keys::read_child(key).is_some_and(|(parent, _)| parent == run);
            false
        });
        found
    }

    fn touch(&self, run: RunId, recency: u64) {
        let mut touched = self.touched.lock();
        let latest = touched.entry(run).or_default();
        *latest = recency.max(*latest);
        if touched.len() >= TOUCHED_MAX {
            drop(touched);
            self.write_touches();
        }
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        let mut writer = self.writer.lock();
        let mut change = Change::new(&self.db, &writer);
        change.counts.clock = change.counts.clock.max(clock);
        let retained = (|| {
            // If `runs` has several entries for one run, the last entry applies.
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

    fn clock(&self) -> u64 {
        self.gauges.clock.load(Ordering::Relaxed)
    }

    fn was_damaged(&self) -> bool {
        self.recovered.damaged
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        // One scan lists the names of the runs. A visit reads the state of its run, which may be
        // newer than the scan.
        self.db.scan(Family::Run, &[], |key, _| {
            if let Some(run) = keys::read_run(key)
                && let Some(view) = self.run(run)
            {
                visit(run, view);
            }
            true
        });
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        self.write_touches();
        let requested = self.gauges.appended.load(Ordering::Acquire);
        let _syncing = self.syncing.lock();
        self.db.check()?;
        // Sync also the batches that were appended while this call waited for the lock, because
        // `sync_data` makes their data durable too.
        let reached = self.gauges.appended.load(Ordering::Acquire);
        // Call `sync_data` even if no batch was appended since the last sync or the open: the open
        // may have recovered runs of a killed process, which had not synced their data.
        sync_data()?;
        if self.gauges.synced.load(Ordering::Acquire) >= requested {
            return Ok(());
        }
        self.db.db.flush_wal(true).map_err(|error| {
            self.db.poison(&error);
            Error::fatal("the index could not be made durable: open the store again").because(error)
        })?;
        self.gauges.synced.store(reached, Ordering::Release);
        Ok(())
    }

    /// Compacts if necessary, and tunes the structure of the tree. Without calls of this method,
    /// the size ratio and the maximum number of sorted runs per level keep the values that they
    /// had when the index was opened.
    fn maintain_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        if !self.db.is_poisoned() {
            self.tuner.tune(&self.db)?;
        }
        let Some(mut last) = self.compacting.try_lock() else { return Ok(()) };
        let budget = self.gauges.budget.load(Ordering::Relaxed);
        let appended = self.gauges.appended.load(Ordering::Acquire);
        let over = self.gauges.files(&self.db).0.bytes > budget;
        // If the files are within the budget, and only their worst case (the bytes that they may
        // reach without further inserts) exceeds it, compact only if batches were appended since
        // the last compaction: without them a compaction would not reduce the worst case.
        if !over && (self.gauges.worst_bytes(&self.db) <= budget || appended == *last) {
            return Ok(());
        }
        self.db.check()?;
        sync_data()?;
        self.flush()?;
        for family in Family::ALL {
            self.db.db.compact_range_cf::<&[u8], &[u8]>(self.db.handle(family)?, None, None);
        }
        *last = appended;
        self.gauges.compactions.fetch_add(1, Ordering::Relaxed);
        self.gauges.invalidate();
        Ok(())
    }

    fn set_budget(&self, bytes: u64) {
        self.gauges.budget.store(bytes, Ordering::Relaxed);
        self.gauges.invalidate();
    }

    fn stats(&self) -> IndexStats {
        self.gauges.stats(&self.db)
    }

    fn tuning(&self) -> Option<Tuning> {
        Some(self.tuner.tuning(&self.db))
    }
}
