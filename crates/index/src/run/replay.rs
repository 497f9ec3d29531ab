//! Restores runs from checkpoint and journal, and builds the tables.

use super::check::check_place;
use super::runs::{NO_RUN, Runs};
use super::slots::Number;
use super::tables::Tables;
use crate::RunId;
use ritornello_format::PageHash;
use ritornello_format::journal::{JournalRecord, Retentions, RunImage};
use std::sync::atomic::Ordering;

/// Runs that were read from a checkpoint and the journal. They have no slots yet, and their
/// attachments are collected in `links`, but not made.
#[derive(Debug)]
pub(super) struct Restored {
    runs: Runs,
    /// Attachments, each as child, parent and the parent's page, in the order in which they were
    /// read.
    links: Vec<(RunId, RunId, u16)>,
    /// The largest reuse count read so far. The reuse count is the upper half of a [`RunId`]; it
    /// grows whenever the number in the lower half is assigned again.
    reuse: u32,
}

impl Default for Restored {
    fn default() -> Self {
        Self { runs: Runs::new(), links: Vec::new(), reuse: 0 }
    }
}

impl Restored {
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.runs.live, self.runs.pages)
    }

    pub(super) fn note_reuse(&mut self, reuse: u32) {
        self.reuse = self.reuse.max(reuse);
    }

    /// Restores a run, unless its image is invalid, or its number was already used for the same run
    /// or a later run. Returns whether the run was restored.
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
                // The run may have fewer pages than `place`: the checkpoint may already show a cut
                // whose record comes later in the journal.
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

    /// Restores the attachments. Returns the runs whose parent page does not exist: a part of the
    /// journal that was not read inserted the parent, or removed the parent and these runs.
    fn attach(&mut self) -> Vec<Number> {
        let mut orphans = Vec::new();
        for (child, parent, page) in std::mem::take(&mut self.links) {
            let Some(child) = self.runs.number(child) else { continue };
            if self.runs.cold(child).parent != NO_RUN {
                continue;
            }
            let scope = self.runs.hot(child).scope;
            let present = self.runs.number(parent).filter(|&parent| {
                let hot = self.runs.hot(parent);
                parent != child && hot.scope == scope && usize::from(page) < hot.pages().len()
            });
            match present {
                Some(parent) => self.runs.attach(child, parent, page),
                None => orphans.push(child),
            }
        }
        orphans
    }
}

/// Builds tables of the restored runs. Returns the tables and the ids of the runs that had to be
/// dropped. With `overlaps`, both of two runs that claim the same space are dropped: at least one
/// of their records is obsolete, and it is unknown which.
pub(super) fn finish(mut restored: Restored, overlaps: bool) -> (Tables, Vec<RunId>) {
    let mut invalid = restored.attach();
    let mut runs = restored.runs;
    runs.reuse = runs.reuse.max(restored.reuse);
    runs.reuse_floor = runs.reuse.saturating_add(1);
    if overlaps {
        invalid.extend(overlapping(&runs));
    }
    let mut dropped = Vec::new();
    let (mut tables, twins) = Tables::build(runs);
    drop_all(&mut tables, &invalid, &mut dropped);
    // `twins` are pairs of runs that hold the same page, which only one run may hold. If both runs
    // of a pair still exist, drop the run with the higher number.
    for (later, earlier) in twins {
        if tables.runs.is_live(later) && tables.runs.is_live(earlier) {
            drop_all(&mut tables, &[later], &mut dropped);
        }
    }
    tables.runs.collect_free();
    (tables, dropped)
}

/// Drops runs and their descendants.
fn drop_all(tables: &mut Tables, invalid: &[Number], dropped: &mut Vec<RunId>) {
    for &run in invalid {
        for (run, _) in tables.closure(run, 0).into_iter().rev() {
            let id = tables.runs.id(run);
            if tables.discard(run).is_some() {
                dropped.push(id);
            }
        }
    }
}

/// Runs whose space overlaps the space of another run.
fn overlapping(runs: &Runs) -> Vec<Number> {
    let mut spans = Vec::new();
    for run in (1..runs.end()).filter(|run| runs.is_live(*run)) {
        for extent in runs.view(run).live_extents() {
            spans.push((extent.segment, extent.start, extent.end(), run));
        }
    }
    spans.sort_unstable();
    let mut found = Vec::new();
    // The extent with the highest end among the visited extents of the current segment.
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
