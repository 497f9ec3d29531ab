//! Committing a put: its runs become visible, if what they hang behind is still there.

use super::reservations::{PlannedRun, Reservation};
use super::{Engine, resident};
use ritornello_format::{Error, ErrorKind, Extent, PageHash, Result};
use ritornello_index::NewRun;

impl Engine {
    pub(super) fn commit(&self, id: u64, written: &[Option<u64>]) -> Result<usize> {
        self.check_writable()?;
        let mut state = self.state.lock();
        let Some(reservation) = state.reservations.open.remove(&id) else {
            return Err(Error::retry("this reservation is not known here: put again")
                .with("reservation", id));
        };
        let Reservation { client, scope, hashes, runs, lease } = reservation;
        let mut unused: Vec<Extent> = Vec::new();
        let mut metadata_full = false;
        for (at, run) in runs.iter().enumerate() {
            let checksum = written.get(at).copied().flatten();
            let pages = &hashes[run.at as usize..(run.at + run.pages) as usize];
            let Some(checksum) = checksum.filter(|_| self.scopes.is_live(scope.slot)) else {
                unused.extend(&run.place.extents);
                self.counters.runs_abandoned.add(1);
                continue;
            };
            let mut place = run.place.clone();
            place.header_checksum = checksum;
            let new = NewRun {
                scope: scope.slot,
                chained: scope.chained,
                parent: run.parent,
                pages,
                place: &place,
                recency: self.clock.tick(),
            };
            match self.insert(&new) {
                Ok(run_id) => {
                    let parent = run.parent.and_then(|p| self.index.locate(scope.slot, p));
                    state.eviction.admit(&resident(run_id, parent, pages, &place));
                    state.dirty.extend(place.extents.iter().map(|e| e.segment));
                    self.counters.pages_stored.add(u64::from(run.pages));
                }
                Err(error) => {
                    metadata_full |= error.kind() == ErrorKind::Retry;
                    tracing::debug!(%error, "a run was not taken at commit");
                    unused.extend(&run.place.extents);
                    self.counters.runs_abandoned.add(1);
                }
            }
        }
        if metadata_full {
            let units = runs.iter().map(|run: &PlannedRun| run.place.units()).sum();
            self.evict(&mut state, units);
        }
        self.free(&mut state, &unused);
        let freed = state.leases.release(lease.0);
        state.release_later(freed);
        drop(state);
        if client != super::ClientId::LOCAL {
            self.log.lock().settled(id);
        }
        let stored = self.link_and_count(scope.slot, scope.chained, &hashes);
        if self.durable_puts() {
            self.make_durable()?;
        }
        Ok(stored)
    }

    /// Inserts a run unless somebody stored one of its pages meanwhile, or its parent went.
    fn insert(&self, new: &NewRun<'_>) -> Result<ritornello_index::RunId> {
        if self.index.exists(new.scope, &new.pages).contains(&true) {
            return Err(Error::invalid("stored by somebody else meanwhile"));
        }
        self.index.insert(new)
    }

    /// Links runs that turn out to follow one another, and counts the leading pages.
    pub(super) fn link_and_count(
        &self,
        slot: ritornello_format::ScopeSlot,
        chained: bool,
        hashes: &[PageHash],
    ) -> usize {
        let steps = self.index.walk(slot, &hashes);
        if chained {
            for pair in steps.windows(2) {
                let first = pair[1].at as usize;
                if pair[1].first == 0 {
                    let parent_page = pair[0].first + pair[0].pages - 1;
                    let mut state = self.state.lock();
                    self.index.link(slot, hashes[first - 1], hashes[first]);
                    state.eviction.link(pair[1].run, pair[0].run, parent_page);
                }
            }
        }
        steps.iter().map(|step| step.pages as usize).sum()
    }
}
