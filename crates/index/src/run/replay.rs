//! Runs as checkpoint and journal bring them back, and the tables made of them.

use super::runs::{NO_RUN, Runs};
use super::slots::Number;
use super::tables::Tables;
use super::write::check_place;
use crate::RunId;
use ritornello_format::PageHash;
use ritornello_format::journal::{JournalRecord, Retentions, RunImage};
use std::sync::atomic::Ordering;

/// Runs without slots and without a tree.
#[derive(Debug)]
pub(super) struct Restored {
    runs: Runs,
    /// Child, parent and page, in the order in which they were read.
    links: Vec<(RunId, RunId, u16)>,
    /// Largest reuse count met.
    reuse: u32,
}

impl Default for Restored {
    fn default() -> Self {
        Self { runs: Runs::new(), links: Vec::new(), reuse: 0 }
    }
}

impl Restored {
    /// Runs and pages.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.runs.live, self.runs.pages)
    }

    pub(super) fn note_reuse(&mut self, reuse: u32) {
        self.reuse = self.reuse.max(reuse);
    }

    /// Puts a run back, unless the record is held by it already or by a later one.
    pub(super) fn insert(&mut self, image: RunImage<'static>) -> bool {
        self.note_reuse((image.run >> 32) as u32);
        let holes = image.pages.iter().filter(|page| **page == PageHash::NONE).count();
        if (image.chained && holes > 0)
            || holes == image.pages.len()
            || check_place(&image.place, image.pages.len()).is_err()
        {
            return false;
        }
        let run = RunId(image.run);
        let link = image.parent.map(|(parent, page)| (run, RunId(parent), page));
        if !self.runs.restore(image) {
            return false;
        }
        self.links.extend(link);
        true
    }

    pub(super) fn retain(&mut self, retentions: Retentions) {
        self.runs.clock = self.runs.clock.max(retentions.clock);
        for (run, until) in retentions.runs {
            if let Some(run) = self.runs.number(RunId(run)) {
                self.runs.retain(run, until);
            }
        }
    }

    pub(super) fn apply(&mut self, record: JournalRecord<'static>) {
        match record {
            JournalRecord::Insert(image) => {
                self.insert(image);
            }
            JournalRecord::Cut(entries) => {
                for (run, keep) in entries {
                    if let Some(run) = self.runs.number(RunId(run)) {
                        self.runs.cut(run, keep);
                    }
                }
            }
            JournalRecord::Punch(entries) => {
                for (run, page) in entries {
                    if let Some(run) = self.runs.number(RunId(run)) {
                        self.runs.punch(run, page);
                    }
                }
            }
            JournalRecord::Link { child, parent, page } => {
                self.links.push((RunId(child), RunId(parent), page));
            }
            JournalRecord::Relocate { run, place } => {
                let Some(run) = self.runs.number(RunId(run)) else { return };
                let pages = self.runs.hot(run).pages().len();
                let mut place = place.into_owned();
                // The checkpoint may show a later cut already.
                place.truncate(pages as u32);
                if check_place(&place, pages).is_ok() {
                    self.runs.set_place(run, &place);
                } else {
                    self.runs.cut(run, 0);
                }
            }
            JournalRecord::Retain(retentions) => self.retain(retentions),
            JournalRecord::Touch(entries) => {
                for (run, recency) in entries {
                    if let Some(run) = self.runs.number(RunId(run)) {
                        self.runs.cold(run).recency.fetch_max(recency, Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// Attaches what was attached. Returns the runs whose parent is gone: removing it removed them,
    /// had the journal not ended before it said so.
    fn attach(&mut self) -> Vec<Number> {
        let mut orphans = Vec::new();
        for (child, parent, page) in std::mem::take(&mut self.links) {
            let Some(child) = self.runs.number(child) else { continue };
            if self.runs.cold(child).parent != NO_RUN {
                continue;
            }
            let scope = self.runs.hot(child).scope;
            let there = self.runs.number(parent).filter(|&parent| {
                let hot = self.runs.hot(parent);
                parent != child && hot.scope == scope && usize::from(page) < hot.pages().len()
            });
            match there {
                Some(parent) => self.runs.attach(child, parent, page),
                None => orphans.push(child),
            }
        }
        orphans
    }
}

/// Tables of what was restored, and the runs that had to be dropped. With `overlaps`, runs that
/// claim the same space are dropped, both: one of them is from a time that the other does not know.
pub(super) fn finish(mut restored: Restored, overlaps: bool) -> (Tables, Vec<RunId>) {
    let mut doomed = restored.attach();
    let mut runs = restored.runs;
    runs.reuse = runs.reuse.max(restored.reuse);
    runs.reuse_floor = runs.reuse.saturating_add(1);
    if overlaps {
        doomed.extend(overlapping(&runs));
    }
    let mut dropped = Vec::new();
    let (mut tables, twins) = Tables::build(runs);
    drop_all(&mut tables, &doomed, &mut dropped);
    for (later, earlier) in twins {
        if tables.runs.is_live(later) && tables.runs.is_live(earlier) {
            drop_all(&mut tables, &[later], &mut dropped);
        }
    }
    tables.runs.collect_free();
    (tables, dropped)
}

/// Drops runs, and what hangs behind them.
fn drop_all(tables: &mut Tables, doomed: &[Number], dropped: &mut Vec<RunId>) {
    for &run in doomed {
        for (run, _) in tables.closure(run, 0).into_iter().rev() {
            let id = tables.runs.id(run);
            if tables.discard(run).is_some() {
                dropped.push(id);
            }
        }
    }
}

/// Runs that hold space which another one holds, too.
fn overlapping(runs: &Runs) -> Vec<Number> {
    let mut spans = Vec::new();
    for run in (1..runs.end()).filter(|run| runs.is_live(*run)) {
        for extent in runs.view(run).live_extents() {
            spans.push((extent.segment, extent.start, extent.end(), run));
        }
    }
    spans.sort_unstable();
    let mut found = Vec::new();
    // The span that reaches farthest so far.
    let mut farthest = None;
    for span in spans {
        if let Some((segment, _, end, run)) = farthest
            && segment == span.0
            && span.1 < end
        {
            found.extend([run, span.3]);
            if span.2 <= end {
                continue;
            }
        }
        farthest = Some(span);
    }
    found.sort_unstable();
    found.dedup();
    found
}
