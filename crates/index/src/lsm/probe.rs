//! The two methods by which the index `lsm` finds the longest prefix.
//!
//! A probe takes no snapshot, and not the lock of writers. A probe may or may not see
//! concurrent changes. Each page of its result was present at some moment of the probe. [`scan`]
//! reads every page. [`bisect`] does not, but a chained run is never removed before the runs
//! attached to it, so the last page proves that the pages before it are present.

use super::families::Families;
use super::keys::{self, Family};
use crate::{MatchedRun, RunId};
use ritornello_format::{PageHashes, ScopeSlot};

/// The result of a bisection: a number of pages, and the location of the last page.
struct Found {
    pages: usize,
    run: RunId,
    page: u16,
}

/// The number of leading pages, by bisection; `None` if bisection cannot determine it.
pub(super) fn bisect(db: &Families, scope: ScopeSlot, keys: &dyn PageHashes) -> Option<usize> {
    let Some(found) = last_found(db, scope, keys) else { return Some(0) };
    let record = db.record(found.run)?;
    // If at least as many pages precede the found page in its chain as in `keys`, the pages are the
    // same, because the hash of the found page commits to them, and all of them are in the index.
    let proven = record.chained && record.depth + u64::from(found.page) + 1 >= found.pages as u64;
    proven.then_some(found.pages)
}

/// Returns the leading pages by run, collected backwards from the last page along the parents.
/// `None` if bisection cannot determine them.
pub(super) fn walk_back(
    db: &Families,
    scope: ScopeSlot,
    keys: &dyn PageHashes,
) -> Option<Vec<MatchedRun>> {
    let Some(found) = last_found(db, scope, keys) else { return Some(Vec::new()) };
    let (mut run, mut page, mut left) = (found.run, found.page, found.pages);
    let mut matched = Vec::new();
    loop {
        let record = db.record(run).filter(|record| record.chained)?;
        let pages = left.min(usize::from(page) + 1);
        left -= pages;
        matched.push(MatchedRun {
            run,
            first: (usize::from(page) + 1 - pages) as u32,
            pages: pages as u32,
            at: left as u32,
        });
        if left == 0 {
            matched.reverse();
            return Some(matched);
        }
        (run, page) = record.parent?;
    }
}

/// Finds a page that is present while the next page is missing. If all pages before the found page
/// are present too, the found page is the last page of the longest prefix.
fn last_found(db: &Families, scope: ScopeSlot, keys: &dyn PageHashes) -> Option<Found> {
    let find = |at: usize| {
        db.find(scope, keys.at(at)).map(|(run, page)| Found { pages: at + 1, run, page })
    };
    let (mut known, mut missing) = (0, keys.len());
    let mut found = None;
    // Look up the first page first: most probes of a cold cache find that this page is missing.
    let mut next = 0;
    while known < missing {
        match find(next) {
            Some(here) => {
                known = here.pages;
                found = Some(here);
            }
            None => missing = next,
        }
        next = known + (missing - known) / 2;
    }
    found
}

/// Finds the run of a page, reads the run's pages in order, and continues with the page after the
/// run. Returns the number of leading pages.
pub(super) fn scan(
    db: &Families,
    scope: ScopeSlot,
    keys: &dyn PageHashes,
    mut visit: impl FnMut(MatchedRun),
) -> usize {
    let Ok(handle) = db.handle(Family::Path) else { return 0 };
    let mut iterator = db.db.raw_iterator_cf(handle);
    let mut at = 0;
    while at < keys.len() {
        let Some((run, first)) = db.find(scope, keys.at(at)) else { break };
        let (start, mut page) = (at, first);
        db.controller.ranged(1);
        db.meter.seek(|| iterator.seek(keys::path(scope, run, first)));
        // The iterator does not see runs that were inserted after the iterator was made.
        if iterator.key().is_none_or(|key| keys::read_path(key) != Some((scope, run, first))) {
            iterator = db.db.raw_iterator_cf(handle);
            iterator.seek(keys::path(scope, run, first));
        }
        while at < keys.len() {
            let Some((key, value)) = iterator.item() else { break };
            if keys::read_path(key) != Some((scope, run, page)) || *value != keys.at(at).0 {
                break;
            }
            at += 1;
            iterator.next();
            let Some(next) = page.checked_add(1) else { break };
            page = next;
        }
        if let Err(error) = iterator.status() {
            db.poison(&error);
        }
        if at == start {
            // The run was removed concurrently, or its first page cannot be read.
            break;
        }
        let pages = (at - start) as u32;
        visit(MatchedRun { run, first: first.into(), pages, at: start as u32 });
    }
    at
}
