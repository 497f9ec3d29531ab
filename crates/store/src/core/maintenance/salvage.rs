//! Salvages runs that the index has lost, which were found by their headers.
//!
//! Segments also hold runs that the index did not have: evicted runs, intact or partly overwritten,
//! and runs that were refused because another put had stored one of their pages. If two runs
//! have the same pages, the index usually had the later run, so runs are chosen by descending
//! generation; in a chained scope an earlier run that has all pages of a later run and more takes
//! the later run's place. A parent usually has a lower generation than its children, so runs are
//! inserted by ascending generation, and a run is linked to its parent.
//!
//! A run in a chained scope is salvaged at most up to its first page that does not verify, because
//! later pages are useless without it. A run in a scope that is not chained keeps every page that
//! verifies, is not stored, and is in no later run; the run's other pages become holes.

use super::verify::Verification;
use crate::catalog::ScopeRef;
use crate::core::StoreCore;
use crate::core::residents::resident;
use ritornello_format::{ErrorKind, Extent, PageHash, Place, Result, RunHeader, ScopeSlot};
use ritornello_index::NewRun;
use ritornello_volume::transfer::{Control, PageOutcome, SalvagedRun};
use std::cmp::Reverse;
use std::collections::HashMap;

/// The runs that were chosen to be inserted into the index.
#[derive(Default)]
struct Chosen {
    runs: Vec<Option<ChosenRun>>,
    /// For each page of a chosen run, the position of that run in `runs`.
    claimed: HashMap<(ScopeSlot, PageHash), usize>,
}

/// A run whose space is marked as in use and whose pages verify.
struct ChosenRun {
    scope: ScopeRef,
    place: Place,
    /// The run's pages; [`PageHash::NONE`] for holes. The last page is not a hole.
    pages: Vec<PageHash>,
    /// The extents of the header and of the pages that are not holes, which are marked as in use.
    extents: Vec<Extent>,
    parent: Option<PageHash>,
}

impl ChosenRun {
    fn count(&self) -> u64 {
        self.pages.iter().filter(|page| **page != PageHash::NONE).count() as u64
    }
}

impl Chosen {
    fn add(&mut self, run: ChosenRun) {
        let number = self.runs.len();
        let pages = run.pages.iter().filter(|page| **page != PageHash::NONE);
        self.claimed.extend(pages.map(|page| ((run.scope.slot, *page), number)));
        self.runs.push(Some(run));
    }
}

impl StoreCore {
    /// Inserts the pages of each run in `found` that are of this store and a live scope, verify,
    /// and are not stored; in chained scopes only leading pages. No new scope gets the slot of a
    /// found run.
    ///
    /// # Errors
    /// Errors of the scope registry.
    pub(super) fn salvage(
        &self,
        mut found: Vec<SalvagedRun>,
        report: &mut Verification,
    ) -> Result<()> {
        let store = self.shape.manifest().uuid;
        found.retain(|run| run.header.store == store);
        found.sort_by_key(|run| Reverse(run.place.generation));
        report.generation_max = found.first().map_or(0, |run| run.place.generation);
        if let Some(slot) = found.iter().map(|run| run.header.slot).max() {
            self.scopes.never_reuse(slot)?;
        }
        let mut chosen = Chosen::default();
        for run in found {
            self.choose(run, &mut chosen, report);
        }
        let mut chosen: Vec<ChosenRun> = chosen.runs.into_iter().flatten().rev().collect();
        // Insert runs after their parents, and at the end runs whose parents are lost.
        loop {
            let before = chosen.len();
            chosen.retain(|run| {
                let is_ready =
                    run.parent.is_none_or(|page| self.index.locate(run.scope.slot, page).is_some());
                if is_ready {
                    self.insert_salvaged(run, report);
                }
                !is_ready
            });
            if chosen.len() == before {
                break;
            }
        }
        for run in &chosen {
            report.pages_behind_lost += self.insert_salvaged(run, report);
        }
        Ok(())
    }

    /// Chooses the pages of `found` that verify and are not stored. Marks the space of the chosen
    /// pages as in use.
    fn choose(&self, found: SalvagedRun, chosen: &mut Chosen, report: &mut Verification) {
        let SalvagedRun { place, header, .. } = found;
        let all = header.keys.len() as u64;
        let scope = self.scopes.by_slot(header.slot);
        let known =
            scope.filter(|scope| header.scope == scope.id && header.page_bytes == scope.page_bytes);
        let Some(scope) = known else {
            report.leave("scope", all);
            return;
        };
        let outcomes = match self.segments.verify_run(&place, &Control::default()) {
            Ok(read) => read.pages,
            Err(error) => {
                let is_damaged = error.kind() == ErrorKind::Miss;
                report.leave(if is_damaged { "overwritten" } else { "unreadable" }, all);
                return;
            }
        };
        if scope.chained {
            self.choose_leading(scope, place, &header, &outcomes, chosen, report);
        } else {
            self.choose_each(scope, place, &header, &outcomes, chosen, report);
        }
    }

    /// Chooses, of the run at `place` in a chained scope, the leading pages that verify, are not
    /// stored, and are in no chosen run. If a chosen run has the first page too, the run at `place`
    /// replaces the chosen run if it has all pages of the chosen run and more, and is not chosen
    /// otherwise.
    fn choose_leading(
        &self,
        scope: ScopeRef,
        mut place: Place,
        header: &RunHeader,
        outcomes: &[PageOutcome],
        chosen: &mut Chosen,
        report: &mut Verification,
    ) {
        let all = header.keys.len() as u64;
        let good = outcomes.iter().take_while(|outcome| outcome.is_verified()).count();
        match outcomes.get(good) {
            Some(PageOutcome::Missed(why)) if !why.is_damage() => {
                report.leave("unreadable", all - good as u64);
            }
            _ => report.leave("overwritten", all - good as u64),
        }
        let hashes = header.keys.iter().take(good).map(|key| PageHash::of(&scope.id, key));
        let mut pages: Vec<PageHash> = hashes.collect();
        let stored = self.index.exists(scope.slot, &pages);
        let claims = |page: &PageHash| chosen.claimed.get(&(scope.slot, *page)).copied();
        let rival = pages.first().and_then(claims);
        let is_free =
            |at: &usize| !stored[*at] && claims(&pages[*at]).is_none_or(|run| Some(run) == rival);
        let new = (0..good).take_while(is_free).count();
        let shared = pages[..new].iter().filter(|page| claims(page).is_some()).count();
        let replaced = rival.and_then(|run| chosen.runs[run].as_ref()).map(|run| run.pages.len());
        if new == 0 || replaced.is_some_and(|pages| shared < pages || new == pages) {
            return;
        }
        pages.truncate(new);
        place.truncate(new as u32);
        let mut state = self.state.lock();
        if !state.space.mark(&place.extents) {
            report.leave("space", new as u64);
            return;
        }
        if let Some(run) = rival.and_then(|run| chosen.runs[run].take()) {
            state.space.free(&run.extents);
        }
        drop(state);
        let parent = header.parent.as_deref().map(|key| PageHash::of(&scope.id, key));
        let extents = place.extents.clone();
        chosen.add(ChosenRun { scope, place, pages, extents, parent });
    }

    /// Chooses, of a run in a scope that is not chained, the pages that verify, are not stored, and
    /// are in no chosen run. Does not mark the space of the other pages: another run may use it.
    fn choose_each(
        &self,
        scope: ScopeRef,
        mut place: Place,
        header: &RunHeader,
        outcomes: &[PageOutcome],
        chosen: &mut Chosen,
        report: &mut Verification,
    ) {
        let hashes = header.keys.iter().map(|key| PageHash::of(&scope.id, key));
        let hashes: Vec<PageHash> = hashes.take(outcomes.len()).collect();
        let stored = self.index.exists(scope.slot, &hashes);
        report.leave("overwritten", (header.keys.len() - hashes.len()) as u64);
        let mut pages = Vec::with_capacity(hashes.len());
        for ((outcome, hash), stored) in outcomes.iter().zip(hashes).zip(stored) {
            let is_wanted = match outcome {
                PageOutcome::Verified => {
                    !stored && !chosen.claimed.contains_key(&(scope.slot, hash))
                }
                PageOutcome::Missed(why) => {
                    report.leave(if why.is_damage() { "overwritten" } else { "unreadable" }, 1);
                    false
                }
            };
            pages.push(if is_wanted { hash } else { PageHash::NONE });
        }
        if pages.iter().all(|page| *page == PageHash::NONE) {
            return;
        }
        let mut state = self.state.lock();
        let mut extents = place.header();
        let has_header = state.space.mark(&extents);
        for (at, page) in (0u32..).zip(&mut pages).filter(|(_, page)| **page != PageHash::NONE) {
            let own = place.page(at);
            if has_header && state.space.mark(&own) {
                extents.extend(own);
            } else {
                report.leave("space", 1);
                *page = PageHash::NONE;
            }
        }
        let Some(last) = pages.iter().rposition(|page| *page != PageHash::NONE) else {
            if has_header {
                state.space.free(&extents);
            }
            return;
        };
        drop(state);
        pages.truncate(last + 1);
        place.truncate(last as u32 + 1);
        chosen.add(ChosenRun { scope, place, pages, extents, parent: None });
    }

    /// Inserts a chosen run. Frees its space instead if a page was stored or the scope was dropped
    /// since the run was chosen, or if the index refuses the run. Returns the number of pages
    /// inserted.
    fn insert_salvaged(&self, run: &ChosenRun, report: &mut Verification) -> u64 {
        let (slot, pages) = (run.scope.slot, run.count());
        let units = run.extents.iter().map(|extent| u64::from(extent.units)).sum();
        // The index accepts no run with holes, so each hole is inserted under a hash that no page
        // has, and then removed. The space of holes is not marked, so it is not freed either.
        let hole = |at: usize| {
            let name = [&run.place.generation.to_le_bytes()[..], &at.to_le_bytes()[..]].concat();
            PageHash::of(&run.scope.id, &[&b"salvaged hole"[..], &name[..]].concat())
        };
        let named = run.pages.iter().enumerate();
        let named = named.map(|(at, page)| if *page == PageHash::NONE { hole(at) } else { *page });
        let named: Vec<PageHash> = named.collect();
        let mut state = self.state.lock();
        // A client may have put a page, or dropped the scope, since the run was chosen.
        let is_stored = self.index.exists(slot, &named).contains(&true);
        let found = run.parent.and_then(|page| self.index.locate(slot, page));
        let new = NewRun {
            scope: slot,
            chained: run.scope.chained,
            parent: run.parent.filter(|_| found.is_some()),
            pages: &named,
            place: &run.place,
            recency: state.residents.clock.tick(),
        };
        let inserted = (self.scopes.is_live(slot) && !is_stored).then(|| self.index.insert(&new));
        let Some(Ok(id)) = inserted else {
            state.space.free(&run.extents);
            if inserted.is_some() {
                report.leave("index", pages);
            }
            return 0;
        };
        let holes = run.pages.iter().zip(&named).filter(|(page, _)| **page == PageHash::NONE);
        let holes: Vec<PageHash> = holes.map(|(_, name)| *name).collect();
        if !holes.is_empty() {
            drop(self.index.remove(slot, &holes));
        }
        let resident = resident(id, found, &run.pages, &run.place);
        state.residents.admit(slot, &resident, pages, units);
        // The process that wrote the run may not have synced it.
        state.unsynced.note(&run.extents);
        report.pages_salvaged += pages;
        pages
    }
}

impl Verification {
    fn leave(&mut self, reason: &str, pages: u64) {
        if pages > 0 {
            *self.not_salvaged.entry(reason.to_owned()).or_default() += pages;
        }
    }
}
