//! Putting: reserve, write, commit.

use crate::catalog::{Reserved, ScopeRef, Wanted};
use crate::outcome::Outcome;
use crate::store::{PATIENCE, Store, Terms};
use ritornello_format::{Result, RunHeader};
use ritornello_volume::memory::PageSource;
use ritornello_volume::transfer::{Control, RunWrite};
use std::time::Instant;

impl Store {
    pub(crate) fn put(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        source: &dyn PageSource,
        terms: &Terms,
        control: &Control,
    ) -> Result<Outcome> {
        let parent = terms.parent.as_deref();
        let started = Instant::now();
        let patience = control
            .deadline
            .map_or(PATIENCE, |deadline| deadline.saturating_duration_since(Instant::now()));
        let wanted = Wanted { retain_until: terms.retain_until, patience, ..Wanted::default() };
        let reserved = self.catalog.reserve(scope, keys, parent, &wanted)?;
        let refused = reserved.refused.map_or("", |refusal| refusal.word());
        if reserved.runs.is_empty() {
            return Ok(outcome_of(keys.len(), reserved.present, 0, refused));
        }
        let unsettled = Unsettled { store: self, reservation: reserved.id };
        let headers: Vec<RunHeader> =
            reserved.runs.iter().map(|run| header(&reserved, run, scope, keys, parent)).collect();
        let writes: Vec<RunWrite<'_>> = reserved
            .runs
            .iter()
            .zip(&headers)
            .map(|(run, header)| RunWrite {
                place: &run.place,
                header,
                source,
                first: run.at as usize,
            })
            .collect();
        let results = self.segments.write_runs(&writes, control);
        let mut reason = refused;
        let written: Vec<Option<u64>> = results
            .into_iter()
            .map(|result| {
                result
                    .inspect_err(|error| {
                        tracing::warn!(%error, "a run could not be written");
                        reason = control.stop().map_or("io", |stop| stop.word());
                    })
                    .ok()
            })
            .collect();
        let stored = self.catalog.commit(reserved.id, &written)?;
        std::mem::forget(unsettled);
        let pages: u64 = reserved
            .runs
            .iter()
            .zip(&written)
            .filter(|(_, written)| written.is_some())
            .map(|(run, _)| u64::from(run.pages))
            .sum();
        let bytes = pages * scope.page_bytes;
        self.moved.puts.add(1);
        self.moved.put_bytes.add(bytes);
        self.moved.put_micros.add(started.elapsed().as_micros() as u64);
        if stored < keys.len() && reason.is_empty() {
            reason = "superseded";
        }
        Ok(outcome_of(keys.len(), stored, bytes, reason))
    }
}

/// A reservation that is neither committed nor aborted. If it is dropped (an error, a panic), this
/// process writes there no more, and whoever owns the store by now is told.
struct Unsettled<'a> {
    store: &'a Store,
    reservation: u64,
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        // An owner that cannot be told finds out when this process ends.
        let _ = self.store.catalog.abort(self.reservation);
    }
}

fn header(
    reserved: &Reserved,
    run: &crate::catalog::ReservedRun,
    scope: ScopeRef,
    keys: &[&[u8]],
    parent: Option<&[u8]>,
) -> RunHeader {
    let at = run.at as usize;
    let before = at.checked_sub(1).map(|before| keys[before]).or(parent);
    RunHeader {
        store: reserved.store,
        scope: scope.id,
        slot: scope.slot,
        generation: run.place.generation,
        page_bytes: scope.page_bytes,
        header_units: run.place.header_units,
        page_units: run.place.page_units,
        parent: before.filter(|_| scope.chained).map(<[u8]>::to_vec),
        extents: run.place.extents.clone(),
        extents_total: run.place.extents.len() as u32,
        keys: keys[at..at + run.pages as usize].iter().map(|key| key.to_vec()).collect(),
        slices_per_page: 1,
        slices: Vec::new(),
    }
}

/// The leading pages are stored; of those behind a gap nothing is claimed.
fn outcome_of(asked: usize, stored: usize, bytes: u64, reason: &'static str) -> Outcome {
    let mut ok = vec![false; asked];
    ok[..stored].fill(true);
    let reason = if stored == asked { "" } else { reason };
    Outcome { pages: stored, bytes, seconds: 0.0, reason, ok }
}
