//! Committing a put: makes its runs visible. A run is refused, among other reasons, if its parent
//! page was removed since the run was planned, or if another put has stored one of its pages.

use super::StoreCore;
use super::durability::pending_max;
use super::eviction_cause::EvictionCause;
use super::miss_causes::MissCause;
use super::reservations::{PlannedRun, Reservation};
use super::residents::resident;
use super::state::State;
use crate::catalog::{Committed, Refusal, ScopeRef};
use crate::client_id::ClientId;
use ritornello_format::{Error, ErrorKind, Extent, PageHash, Place, Result, ScopeSlot, UNIT};
use ritornello_index::{NewRun, RunId};
use std::time::{Duration, Instant};

/// Maximum time that a commit waits for syncs which may make room in an index that refused a run.
const SYNC_WAIT: Duration = Duration::from_secs(10);
/// If the unsynced records of the index take more than [`pending_max`] bytes, or more than
/// 1/`JOURNAL_SHARE` of the index's share of the capacity, a sync may make room for a run that the
/// index refuses.
const JOURNAL_SHARE: u64 = 16;

impl StoreCore {
    pub(super) fn commit(
        &self,
        client: ClientId,
        id: u64,
        written: &[Option<u64>],
    ) -> Result<Committed> {
        self.lifecycle.check_writable()?;
        let mut state = self.state.lock();
        let Reservation {
            client,
            scope,
            hashes,
            runs,
            retain_until,
            flushed_later,
            lease,
            failed_volumes,
        } = state.reservations.take(client, id)?;
        let (mut unused, mut failed): (Vec<Extent>, Vec<Vec<Extent>>) = Default::default();
        let (mut refused_pages, mut retained, mut is_index_full) = (0, false, false);
        let sync_deadline = Instant::now() + SYNC_WAIT;
        for (at, run) in runs.iter().enumerate() {
            let checksum = written.get(at).copied().flatten();
            let pages = &hashes[run.at as usize..(run.at + run.pages) as usize];
            let is_on_failed = |e: &Extent| failed_volumes.contains(&e.segment.volume());
            if checksum.is_some() {
                state.space.note_written(&run.place.extents);
            } else if run.place.extents.iter().any(is_on_failed) {
                // After the loop `StoreSpace::note_failed` decides which of these extents may be
                // reused.
                failed.push(run.place.extents.clone());
                self.miss_causes.note(pages.iter().copied(), MissCause::Abandoned);
                self.counters.runs_failed.add(1);
                self.counters.runs_abandoned.add(1);
                continue;
            }
            let Some(checksum) = checksum else {
                unused.extend(&run.place.extents);
                self.miss_causes.note(pages.iter().copied(), MissCause::Abandoned);
                self.counters.runs_abandoned.add(1);
                continue;
            };
            self.counters.bytes_written.add(run.place.units() * UNIT);
            let place = Place { header_checksum: checksum, ..run.place.clone() };
            let mut inserted = self.insert(&mut state, scope, run, pages, &place);
            if inserted.as_ref().is_err_and(|error| error.kind() == ErrorKind::Retry) {
                let mut synced = true;
                if self.has_many_unsynced_records() {
                    // The open reservations no longer list the pages of this run and of later runs:
                    // explanations during the wait find them here.
                    let end = runs.last().map_or(0, |last| last.at + last.pages);
                    let waiting = &hashes[run.at as usize..end as usize];
                    let pending = state.reservations.add_pending(scope.slot, waiting);
                    drop(state);
                    synced = self.make_durable_within(sync_deadline).is_ok();
                    state = self.state.lock();
                    state.reservations.end_pending(pending);
                }
                if synced {
                    inserted = self.insert(&mut state, scope, run, pages, &place);
                    is_index_full |=
                        inserted.as_ref().is_err_and(|error| error.kind() == ErrorKind::Retry);
                }
            }
            match inserted {
                Ok(grew) => {
                    retained |= grew;
                    let stored = u64::from(run.pages);
                    self.counters.stored_pages.add(stored);
                    self.counters.bytes_admitted.add(stored * scope.page_bytes);
                }
                Err(error) => {
                    let mut cause = MissCause::Abandoned;
                    if error.kind() == ErrorKind::Retry {
                        refused_pages += u64::from(run.pages);
                        cause = MissCause::Refused(Refusal::Metadata);
                    }
                    self.miss_causes.note(pages.iter().copied(), cause);
                    // Poisons the store if the index failed, because a failed index accepts no
                    // further records.
                    self.lifecycle.rounds().poison_if_fatal(&error);
                    tracing::debug!(%error, "the index refused a run at commit");
                    unused.extend(&run.place.extents);
                    self.counters.runs_abandoned.add(1);
                }
            }
        }
        let refused = (refused_pages > 0).then_some(Refusal::Metadata);
        if refused.is_some() {
            self.counters.refused_metadata.add(refused_pages);
            self.counters.refused_pages.add(refused_pages);
        }
        if is_index_full {
            // The index is full: at its share of the capacity, at its memory ceiling, or at its
            // maximum number of runs. Evict as many units as this put has, to make room for the
            // next put.
            let units = runs.iter().map(|run: &PlannedRun| run.place.units()).sum();
            self.evict(&mut state, units, EvictionCause::Index);
        }
        state.release_lease(lease.0);
        drop(state);
        // Log the end of the reservation before its space is freed. If the space were freed first,
        // a crash could leave a log that withholds space which another put has received.
        if client != ClientId::LOCAL {
            self.reservation_log.lock().note_ended(id);
        }
        {
            let space = &mut self.state.lock().space;
            for extents in failed {
                unused.extend(space.note_failed(extents, &failed_volumes));
            }
            space.free(&unused);
        }
        if retained {
            self.trim_retention(scope.slot);
        }
        let stored = self.link_and_count(scope.slot, scope.chained, &hashes);
        self.retain(scope.slot, &hashes, retain_until);
        self.await_durable_put(flushed_later)?;
        Ok(Committed { stored, refused })
    }

    /// Links runs that were committed before the page they follow, if `pages` contains that page.
    /// Returns whether further runs are retained because of the links.
    fn link_waiting_children(
        &self,
        state: &mut State,
        slot: ScopeSlot,
        run: RunId,
        pages: &[PageHash],
    ) -> bool {
        let mut retained = false;
        for (at, child) in state.residents.waiting_children.take(slot, pages) {
            if let Some((child_run, 0)) = self.index.locate(slot, child) {
                self.index.link(slot, pages[at as usize], child);
                state.residents.link(slot, child_run, run, at);
                retained |= self.retain_parents(state, slot, child_run);
            }
        }
        retained
    }

    /// Makes a run visible. Checks first whether another put has stored one of its pages: a full
    /// index would otherwise refuse the run, and its pages would count as refused. Returns whether
    /// further runs are retained because of links to the run.
    ///
    /// # Errors
    /// `Invalid` if another put stored one of the run's pages, or the scope was dropped; the errors
    /// of [`PrefixIndex::insert`](ritornello_index::PrefixIndex::insert), for example if the parent
    /// was removed.
    fn insert(
        &self,
        state: &mut State,
        scope: ScopeRef,
        run: &PlannedRun,
        pages: &[PageHash],
        place: &Place,
    ) -> Result<bool> {
        if !self.scopes.is_live(scope.slot) {
            return Err(Error::invalid("the scope was dropped"));
        }
        if self.index.exists(scope.slot, &pages).contains(&true) {
            return Err(Error::invalid("another put has stored a page of this run"));
        }
        // Eviction takes the core state's lock, which the caller holds, so the parent cannot be
        // evicted before the run is inserted.
        let found = run.parent.and_then(|page| self.index.locate(scope.slot, page));
        let run_id = self.index.insert(&NewRun {
            scope: scope.slot,
            chained: scope.chained,
            // The index refuses the run if its parent existed at planning time and was removed
            // since.
            parent: run.parent.filter(|_| found.is_some() || run.parent_present),
            pages,
            place,
            recency: state.residents.clock.tick(),
        })?;
        let resident = resident(run_id, found, pages, place);
        state.residents.admit(scope.slot, &resident, u64::from(run.pages), place.units());
        // The page that this run follows is not stored. A concurrent put may still commit it.
        if found.is_none()
            && let Some(parent) = run.parent
        {
            state.residents.waiting_children.insert(scope.slot, parent, pages[0]);
        }
        state.unsynced.note(&place.extents);
        Ok(self.link_waiting_children(state, scope.slot, run_id, pages))
    }

    /// Returns whether a sync may make room in the index, because many of its records are unsynced.
    fn has_many_unsynced_records(&self) -> bool {
        let index = self.index.stats();
        let share = self.shape.budget().index_bytes / JOURNAL_SHARE;
        index.pending_bytes > pending_max(index.memory_bytes_max).min(share)
    }

    /// Links the stored runs of a chained put that follow one another. Returns how many leading
    /// pages of `hashes` are stored.
    pub(super) fn link_and_count(
        &self,
        slot: ScopeSlot,
        chained: bool,
        hashes: &[PageHash],
    ) -> usize {
        let steps = self.index.walk(slot, &hashes);
        let mut retained = false;
        if chained {
            for pair in steps.windows(2) {
                let first = pair[1].at as usize;
                if pair[1].first == 0 {
                    let parent_page = pair[0].first + pair[0].pages - 1;
                    // Record the link in the index and in the eviction policies under one lock:
                    // otherwise a policy could choose a victim that has a child.
                    let mut state = self.state.lock();
                    self.index.link(slot, hashes[first - 1], hashes[first]);
                    state.residents.link(slot, pair[1].run, pair[0].run, parent_page);
                    retained |= self.retain_parents(&mut state, slot, pair[1].run);
                }
            }
        }
        if retained {
            self.trim_retention(slot);
        }
        steps.iter().map(|step| step.pages as usize).sum()
    }
}
