//! Changes and lookups: the implementation of [`PrefixIndex`].
//!
//! The lock of `pending` serialises writers. While a writer holds the lock of the tables, it
//! changes the slots of at most 256 pages ([`LOCK_BATCH`]), or at most [`ENTRIES`] retentions, so
//! that a probe waits for at most one batch.

use super::RunIndex;
use super::check::{check, check_place};
use super::pending::Pending;
use super::record::Pages;
use super::runs::{Cut, NO_RUN};
use super::slots::Number;
use super::tables::LOCK_BATCH;
use crate::live_extents::held;
use crate::sync::{AtomicU64, Ordering};
use crate::{IndexStats, MatchedRun, NewRun, PrefixIndex, Removed, RunId, RunView, SyncData};
use ritornello_format::journal::{FRAME_OVERHEAD, JournalRecord, Retentions, RunImage};
use ritornello_format::{Error, PageHash, PageHashes, Place, Result, ScopeSlot};
use std::borrow::Cow;

/// Maximum entries of one journal record of removals (`Cut`, `Punch`) or retentions.
const ENTRIES: usize = 1024;

impl PrefixIndex for RunIndex {
    fn insert(&self, new: &NewRun<'_>) -> Result<RunId> {
        check(new)?;
        let image = RunImage::bytes(new.pages.len(), new.place.extents.len());
        let pages = Pages::new(new.pages);
        let mut pending = self.pending.lock();
        self.reserve(&pending, image + FRAME_OVERHEAD, image)?;
        self.check_memory(new.pages, new.place.extents.len())?;
        let (parent, parent_page) = self.check_against_tables(new)?;
        let attach = new.chained && parent != NO_RUN;
        // The run passed all checks. No other writer can invalidate the checks while this call
        // holds the writers' lock.
        let mut tables = self.tables.write();
        let run = tables.runs.allocate().ok_or_else(|| {
            Error::retry("the index holds the maximum number of runs: remove pages")
        })?;
        tables.runs.fill(run, new.scope, new.chained, new.recency, pages);
        tables.runs.set_place(run, new.place);
        let mut from = 0;
        loop {
            let to = new.pages.len().min(from + LOCK_BATCH);
            if tables.add_slots(run, from..to).is_err() {
                debug_assert!(false, "a page appeared while the writers' lock was held");
            }
            if to == new.pages.len() {
                break;
            }
            drop(tables);
            tables = self.tables.write();
            from = to;
        }
        tables.runs.publish(run);
        if attach {
            tables.runs.attach(run, parent, parent_page);
        }
        let id = tables.runs.id(run);
        let parent = attach.then(|| (tables.runs.id(parent).0, parent_page));
        drop(tables);
        let image = RunImage {
            run: id.0,
            scope: new.scope,
            chained: new.chained,
            parent,
            recency: new.recency,
            place: Cow::Borrowed(new.place),
            pages: Cow::Borrowed(new.pages),
        };
        self.append(&mut pending, &JournalRecord::Insert(image));
        Ok(id)
    }

    fn link(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
        let mut pending = self.pending.lock();
        let (child, parent, page) = {
            let tables = self.tables.read();
            let Some((child, 0)) = tables.find(scope, child) else { return };
            let Some((parent, page)) = tables.find(scope, parent) else { return };
            let attached = tables.runs.cold(child).parent != NO_RUN;
            if attached || parent == child || !tables.runs.hot(child).chained {
                return;
            }
            (child, parent, page)
        };
        let (child, parent) = {
            let mut tables = self.tables.write();
            tables.runs.attach(child, parent, page);
            (tables.runs.id(child).0, tables.runs.id(parent).0)
        };
        self.append(&mut pending, &JournalRecord::Link { child, parent, page });
    }

    fn truncate(&self, run: RunId, keep: u32) -> Vec<Removed> {
        let mut pending = self.pending.lock();
        let number = self.tables.read().runs.number(run);
        number.map_or_else(Vec::new, |number| self.cut(&mut pending, number, keep))
    }

    fn remove(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        let mut pending = self.pending.lock();
        let mut removed: Vec<Removed> = Vec::new();
        let mut punched = Vec::new();
        for at in 0..pages.len() {
            let hash = pages.at(at);
            let Some((run, page, whole)) = self.removal(scope, hash) else { continue };
            // Append the record of the pages punched so far before the record of a cut, so that
            // the journal has the changes in order.
            if punched.len() == ENTRIES || (whole && !punched.is_empty()) {
                self.append(&mut pending, &JournalRecord::Punch(std::mem::take(&mut punched)));
            }
            if whole {
                removed.extend(self.cut(&mut pending, run, u32::from(page)));
                continue;
            }
            let mut tables = self.tables.write();
            let Some((hash, extents)) = tables.runs.punch(run, page) else { continue };
            tables.slots.remove(hash, run, page);
            let id = tables.runs.id(run);
            punched.push((id.0, page));
            match removed.last_mut() {
                Some(last) if last.run == id => {
                    last.pages += 1;
                    last.hashes.push(hash);
                    last.extents.extend(extents);
                }
                _ => {
                    let hashes = vec![hash];
                    removed.push(Removed {
                        run: id,
                        scope,
                        pages: 1,
                        hashes,
                        whole: false,
                        extents,
                    });
                }
            }
        }
        if !punched.is_empty() {
            self.append(&mut pending, &JournalRecord::Punch(punched));
        }
        removed
    }

    fn drop_scope(&self, scope: ScopeSlot) -> Vec<Removed> {
        let mut removed = Vec::new();
        let (mut next, end) = (1, self.tables.read().runs.end());
        // Release the writers' lock between batches, so that inserts make progress.
        while next < end {
            let mut pending = self.pending.lock();
            let mut found = Vec::new();
            let stop = end.min(next + 16 * LOCK_BATCH as Number);
            {
                let tables = self.tables.read();
                while next < stop && found.len() < LOCK_BATCH {
                    if tables.runs.is_live(next) && tables.runs.hot(next).scope == scope {
                        found.push(next);
                    }
                    next += 1;
                }
            }
            for run in found {
                let cut = self.cut(&mut pending, run, 0);
                removed.extend(cut.into_iter().map(Removed::without_hashes));
            }
        }
        removed
    }

    fn relocate(&self, id: RunId, place: &Place) -> Option<Removed> {
        let mut pending = self.pending.lock();
        let mut tables = self.tables.write();
        let run = tables.runs.number(id)?;
        check_place(place, tables.runs.hot(run).pages().len()).ok()?;
        let scope = tables.runs.hot(run).scope;
        let extents = held(&tables.runs.place(run), tables.runs.hot(run).pages(), 0);
        tables.runs.set_place(run, place);
        drop(tables);
        let record = JournalRecord::Relocate { run: id.0, place: Cow::Borrowed(place) };
        self.append(&mut pending, &record);
        Some(Removed { run: id, scope, pages: 0, hashes: Vec::new(), whole: false, extents })
    }

    fn probe(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> usize {
        self.tables.read().walk(scope, pages, |_, _, _, _| ())
    }

    fn walk(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<MatchedRun> {
        let mut matched = Vec::new();
        let tables = self.tables.read();
        tables.walk(scope, pages, |run, page, count, at| {
            matched.push(MatchedRun {
                run: tables.runs.id(run),
                first: u32::from(page),
                pages: count as u32,
                at: at as u32,
            });
        });
        matched
    }

    fn exists(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<bool> {
        let mut found = Vec::with_capacity(pages.len());
        // Look the pages up in batches, because a request for many pages must not delay a writer
        // for long.
        while found.len() < pages.len() {
            let tables = self.tables.read();
            let end = pages.len().min(found.len() + LOCK_BATCH);
            for at in found.len()..end {
                found.push(tables.find(scope, pages.at(at)).is_some());
            }
        }
        found
    }

    fn locate(&self, scope: ScopeSlot, page: PageHash) -> Option<(RunId, u32)> {
        let tables = self.tables.read();
        let (run, page) = tables.find(scope, page)?;
        Some((tables.runs.id(run), u32::from(page)))
    }

    fn place(&self, run: RunId) -> Option<Place> {
        let tables = self.tables.read();
        tables.runs.number(run).map(|run| tables.runs.place(run))
    }

    fn page(&self, run: RunId, at: u32) -> Option<PageHash> {
        let tables = self.tables.read();
        let run = tables.runs.number(run)?;
        let page = *tables.runs.hot(run).pages().get(at as usize)?;
        (page != PageHash::NONE).then_some(page)
    }

    fn run(&self, run: RunId) -> Option<RunView> {
        let tables = self.tables.read();
        tables.runs.number(run).map(|run| tables.runs.view(run))
    }

    fn parent(&self, run: RunId) -> Option<RunId> {
        let tables = self.tables.read();
        let parent = tables.runs.cold(tables.runs.number(run)?).parent;
        (parent != NO_RUN).then(|| tables.runs.id(parent))
    }

    fn has_children(&self, run: RunId) -> bool {
        let tables = self.tables.read();
        tables.runs.number(run).is_some_and(|run| tables.runs.cold(run).child != NO_RUN)
    }

    fn touch(&self, run: RunId, recency: u64) {
        let tables = self.tables.read();
        let Some(number) = tables.runs.number(run) else { return };
        tables.runs.cold(number).recency.fetch_max(recency, Ordering::Relaxed);
        if !tables.runs.hot(number).touched.swap(true, Ordering::AcqRel) {
            self.touched.lock().push(number);
        }
    }

    fn retain(&self, runs: &[(RunId, u64)], clock: u64) {
        let mut pending = self.pending.lock();
        // Append a record even if `runs` is empty, because the record carries the clock.
        let first = runs.chunks(ENTRIES).next().unwrap_or_default();
        for batch in std::iter::once(first).chain(runs.chunks(ENTRIES).skip(1)) {
            let mut entries = Vec::with_capacity(batch.len());
            let mut tables = self.tables.write();
            tables.runs.clock = tables.runs.clock.max(clock);
            for &(id, until) in batch {
                if let Some(run) = tables.runs.number(id) {
                    tables.runs.retain(run, until);
                    entries.push((id.0, until));
                }
            }
            drop(tables);
            let record = JournalRecord::Retain(Retentions { clock, runs: entries });
            self.append(&mut pending, &record);
        }
    }

    fn clock(&self) -> u64 {
        self.tables.read().runs.clock
    }

    fn was_damaged(&self) -> bool {
        self.recovered.damaged
    }

    fn for_each(&self, visit: &mut dyn FnMut(RunId, RunView)) {
        let mut number = NO_RUN;
        loop {
            number += 1;
            let view = {
                let tables = self.tables.read();
                if number >= tables.runs.end() {
                    return;
                }
                tables
                    .runs
                    .is_live(number)
                    .then(|| (tables.runs.id(number), tables.runs.view(number)))
            };
            if let Some((run, view)) = view {
                visit(run, view);
            }
        }
    }

    fn sync_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        self.append_touches();
        let last = self.pending.lock().seal();
        self.commit(last, sync_data)?;
        if self.must_checkpoint() { self.checkpoint_after(sync_data) } else { Ok(()) }
    }

    fn maintain_after(&self, sync_data: SyncData<'_>) -> Result<()> {
        if self.is_checkpoint_due() { self.checkpoint_after(sync_data) } else { Ok(()) }
    }

    fn has_memory_for(&self, pages: &[PageHash]) -> bool {
        self.check_memory(pages, 1).is_ok()
    }

    fn set_budget(&self, bytes: u64) {
        self.gauges.budget.store(bytes, Ordering::Relaxed);
    }

    fn stats(&self) -> IndexStats {
        let get = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let (runs, pages, memory) = {
            let tables = self.tables.read();
            (tables.runs.live, tables.runs.pages, tables.bytes() as u64)
        };
        let checkpoints = self.gauges.checkpoints.each_ref().map(get);
        let bounded = self.options.memory_bytes_max < u64::MAX;
        let pending_bytes = get(&self.gauges.pending);
        IndexStats {
            runs,
            pages,
            memory_bytes: memory + pending_bytes,
            memory_bytes_max: if bounded { self.options.memory_bytes_max } else { 0 },
            memory_percent: if bounded {
                (memory * 100 / self.options.tables_max()) as u32
            } else {
                0
            },
            disk_bytes: get(&self.gauges.journals) + checkpoints.iter().sum::<u64>(),
            written_bytes: get(&self.gauges.written),
            checkpoints: get(&self.gauges.made),
            pending_bytes,
            files: get(&self.gauges.journal_files)
                + checkpoints.iter().filter(|bytes| **bytes > 0).count() as u64,
        }
    }
}

impl RunIndex {
    /// Removes all but the first `keep` pages of a run. First removes the descendants of the
    /// removed pages, leaves before their parents. Neither a probe nor a recovery from a part of
    /// the journal therefore finds a page without the pages before it.
    fn cut(&self, pending: &mut Pending, run: Number, keep: u32) -> Vec<Removed> {
        let removals = {
            let tables = self.tables.read();
            // `drop_scope` may have cut an ancestor of this run before. That cut removed this run
            // and may have freed the memory of this run's record.
            if !tables.runs.is_live(run) {
                return Vec::new();
            }
            let hot = tables.runs.hot(run);
            match u16::try_from(keep) {
                Ok(keep) if usize::from(keep) < hot.pages().len() => {
                    if hot.chained {
                        tables.closure(run, keep)
                    } else {
                        vec![(run, keep)]
                    }
                }
                _ => return Vec::new(),
            }
        };
        let mut removed = Vec::with_capacity(removals.len());
        let mut entries = Vec::with_capacity(removals.len().min(ENTRIES));
        for &(run, keep) in removals.iter().rev() {
            if let Some(gone) = self.cut_one(run, keep) {
                entries.push((gone.run.0, if gone.whole { 0 } else { keep }));
                removed.push(gone);
            }
            if entries.len() == ENTRIES {
                self.append(pending, &JournalRecord::Cut(std::mem::take(&mut entries)));
            }
        }
        if !entries.is_empty() {
            self.append(pending, &JournalRecord::Cut(entries));
        }
        removed
    }

    fn cut_one(&self, run: Number, keep: u16) -> Option<Removed> {
        let mut tables = self.tables.write();
        let (id, scope) = (tables.runs.id(run), tables.runs.hot(run).scope);
        let cut = tables.runs.cut(run, keep)?;
        let mut first = usize::from(cut.first);
        for (at, batch) in cut.hashes.chunks(LOCK_BATCH).enumerate() {
            if at > 0 {
                drop(tables);
                tables = self.tables.write();
            }
            tables.drop_slots(run, first, batch);
            first += batch.len();
        }
        if cut.whole {
            tables.runs.release(run);
        }
        let Cut { whole, pages, hashes, extents, .. } = cut;
        Some(Removed { run: id, scope, pages, hashes, whole, extents })
    }

    /// Returns how to remove the page `hash`: the page's run, a page number, and whether to cut the
    /// run at this number (`true`) or to remove the page with this number alone (`false`). A run in
    /// a chained scope is cut at the page. Any other run is cut at page 0 if no other page is left.
    fn removal(&self, scope: ScopeSlot, hash: PageHash) -> Option<(Number, u16, bool)> {
        let tables = self.tables.read();
        let (run, page) = tables.find(scope, hash)?;
        if tables.runs.hot(run).chained {
            return Some((run, page, true));
        }
        let last = tables.runs.live_pages(run) == 1;
        Some((run, if last { 0 } else { page }, last))
    }
}
