//! Changes of the index. The lock of `pending` serialises writers; the tables are locked for one
//! batch at a time, so that a probe waits for at most one batch.

use super::RunIndex;
use super::pending::Pending;
use super::runs::NO_RUN;
use super::slots::Number;
use super::tables::{LOCK_BATCH, pages_of};
use crate::live_extents::held;
use crate::{NewRun, Removed, RunId};
use ritornello_format::journal::{
    FRAME_BYTES_MAX, FRAME_OVERHEAD, JournalRecord, Retentions, RunImage,
};
use ritornello_format::{Error, PageHash, PageHashes, Place, Result, ScopeSlot};
use std::borrow::Cow;

/// Maximum entries of one journal record.
const ENTRIES: usize = 1024;

impl RunIndex {
    pub(super) fn insert_run(&self, new: &NewRun<'_>) -> Result<RunId> {
        check(new)?;
        let image = RunImage::bytes(new.pages.len(), new.place.extents.len());
        let pages = pages_of(new.pages);
        let mut pending = self.pending.lock();
        self.reserve(&pending, image + FRAME_OVERHEAD, image)?;
        self.check_memory(new.pages, new.place.extents.len())?;
        let (parent, parent_page) = self.check_against_tables(new)?;
        let attach = new.chained && parent != NO_RUN;
        // No step below can fail on a conflict: the writers' lock is held.
        let mut tables = self.tables.write();
        let run = tables
            .runs
            .allocate()
            .ok_or_else(|| Error::retry("the index holds as many runs as it can: remove some"))?;
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

    /// Checks that there is memory for a run.
    ///
    /// # Errors
    /// `Retry` at the ceiling.
    pub(super) fn check_memory(&self, pages: &[PageHash], extents: usize) -> Result<()> {
        let most = self.options.tables_max();
        let tables = self.tables.read();
        let held = tables.bytes();
        // Make a coarse estimate first: the exact estimate reads shards.
        let plenty = held + held / 4 + 32 * pages.len() + (1 << 20);
        if plenty as u64 <= most || (held + tables.growth(pages, extents)) as u64 <= most {
            return Ok(());
        }
        drop(tables);
        Err(Error::retry("the index has reached its memory ceiling: remove pages, or raise it")
            .with("bytes", held)
            .with("memory_bytes_max", self.options.memory_bytes_max))
    }

    /// Checks a run against the tables. Returns the run and page of its parent.
    ///
    /// # Errors
    /// `Invalid` if a page exists already, or if the parent does not exist.
    fn check_against_tables(&self, new: &NewRun<'_>) -> Result<(Number, u16)> {
        let tables = self.tables.read();
        let present = |page: &PageHash| tables.find(new.scope, *page).is_some();
        if let Some(at) = new.pages.iter().position(present) {
            return Err(Error::invalid(
                "a page is in the index already: insert only missing pages",
            )
            .with("page", at));
        }
        let parent = tables.parent(new.scope, new.parent);
        if new.parent.is_some() && parent.0 == NO_RUN {
            return Err(Error::invalid(
                "the parent is not in the index: insert it first, or leave it out",
            ));
        }
        Ok(parent)
    }

    pub(super) fn link_run(&self, scope: ScopeSlot, parent: PageHash, child: PageHash) {
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

    /// Cuts a run. Removes the descendants of the pages after the cut first, leaves before their
    /// parents. The index is therefore closed at every moment, for a probe and in every prefix of
    /// the journal that a crash leaves.
    pub(super) fn cut(&self, pending: &mut Pending, run: Number, keep: u32) -> Vec<Removed> {
        let removals = {
            let tables = self.tables.read();
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
        Some(Removed { run: id, scope, pages: cut.pages, whole: cut.whole, extents: cut.extents })
    }

    pub(super) fn remove_pages(&self, scope: ScopeSlot, pages: &dyn PageHashes) -> Vec<Removed> {
        let mut pending = self.pending.lock();
        let mut removed: Vec<Removed> = Vec::new();
        let mut punched = Vec::new();
        for at in 0..pages.len() {
            let hash = pages.at(at);
            let Some((run, page, whole)) = self.removal(scope, hash) else { continue };
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
                    last.extents.extend(extents);
                }
                _ => removed.push(Removed { run: id, scope, pages: 1, whole: false, extents }),
            }
        }
        if !punched.is_empty() {
            self.append(&mut pending, &JournalRecord::Punch(punched));
        }
        removed
    }

    /// How to remove a page: by cutting its run at the page (`true`), or by a hole. The last page
    /// of an unchained run is removed by cutting the whole run.
    fn removal(&self, scope: ScopeSlot, hash: PageHash) -> Option<(Number, u16, bool)> {
        let tables = self.tables.read();
        let (run, page) = tables.find(scope, hash)?;
        if tables.runs.hot(run).chained {
            return Some((run, page, true));
        }
        let last = tables.runs.live_pages(run) == 1;
        Some((run, if last { 0 } else { page }, last))
    }

    pub(super) fn remove_runs_of(&self, scope: ScopeSlot) -> Vec<Removed> {
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
                removed.extend(self.cut(&mut pending, run, 0));
            }
        }
        removed
    }

    pub(super) fn move_run(&self, id: RunId, place: &Place) -> Option<Removed> {
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
        Some(Removed { run: id, scope, pages: 0, whole: false, extents })
    }
}

impl RunIndex {
    pub(super) fn retain_runs(&self, runs: &[(RunId, u64)], clock: u64) {
        let mut pending = self.pending.lock();
        // Append at least one record, which carries the clock.
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
}

/// Checks that do not need the tables.
pub(crate) fn check(new: &NewRun<'_>) -> Result<()> {
    if new.pages.is_empty() || new.pages.len() > usize::from(u16::MAX) {
        return Err(Error::invalid("a run has 1 to 65,535 pages: split longer runs")
            .with("pages", new.pages.len()));
    }
    if new.pages.contains(&PageHash::NONE) {
        return Err(Error::invalid("a page hash of zeroes stands for no page"));
    }
    if has_twins(new.pages) {
        return Err(Error::invalid("a page occurs twice in the run: insert it once"));
    }
    check_place(new.place, new.pages.len())
}

/// Checks that a place holds `pages` pages, or is empty (a metadata-only index), and fits a journal
/// record.
pub(crate) fn check_place(place: &Place, pages: usize) -> Result<()> {
    if !place.extents.is_empty() {
        place.check(pages as u32, u32::MAX).map_err(|error| {
            Error::invalid("the place does not hold the run's header and pages").because(error)
        })?;
    }
    if RunImage::bytes(pages, place.extents.len()) + FRAME_OVERHEAD > FRAME_BYTES_MAX {
        return Err(
            Error::invalid("the run has too many extents").with("extents", place.extents.len())
        );
    }
    Ok(())
}

fn has_twins(pages: &[PageHash]) -> bool {
    if pages.len() <= 8 {
        return (1..pages.len()).any(|at| pages[..at].contains(&pages[at]));
    }
    // Compare halves of the hashes first: halves sort faster, and are rarely equal by chance.
    let mut halves: Vec<u64> = pages.iter().map(|page| page.low()).collect();
    halves.sort_unstable();
    if halves.windows(2).all(|pair| pair[0] != pair[1]) {
        return false;
    }
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    pages.windows(2).any(|pair| pair[0] == pair[1])
}
