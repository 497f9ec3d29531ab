//! Reserving space for a put: groups the missing pages into runs and places each of them.

use super::StoreCore;
use super::plan::{check_lengths, missing_runs, run_lengths};
use super::reservations::{PlannedRun, Reservation};
use super::space::SpaceDeadline;
use crate::catalog::{LeaseNumber, Refusal, ReserveRequest, Reserved, ReservedRun, ScopeRef};
use crate::client_id::ClientId;
use crate::eviction::Demand;
use ritornello_format::{Error, PageHash, Place, Result, UNIT, check_keys};
use ritornello_index::RunId;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Maximum pages of one put.
const PUT_PAGES_MAX: usize = 65_535;
/// Lease time of a put's parents; a put that takes longer may fail at commit.
const PUT_LEASE: Duration = Duration::from_secs(600);

impl StoreCore {
    pub(super) fn reserve(
        &self,
        client: ClientId,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        request: &ReserveRequest,
    ) -> Result<Reserved> {
        self.lifecycle.check_writable()?;
        self.scopes.check(scope)?;
        let deadline = Instant::now() + request.timeout;
        let mut hashes = hash_batch(scope, keys)?;
        check_lengths(scope, keys.len(), request)?;
        self.shape.ensure_numbers(deadline)?;
        let until = SpaceDeadline::until(deadline);
        // Pages in absent space can neither be read nor stored again.
        let parent = parent.map(|key| check_keys(&[key]).map(|()| PageHash::of(&scope.id, key)));
        let parent = parent.transpose()?;
        let behind_hidden = parent.is_some_and(|page| self.is_hidden(scope.slot, page));
        let hidden = match behind_hidden && scope.chained {
            true => Some(0),
            false => hashes.iter().position(|page| self.is_hidden(scope.slot, *page)),
        };
        let absent = hidden.map(|_| Refusal::Absent);
        if let Some(end) = hidden {
            // Pages in absent space are counted now, because `count_refused` never sees them.
            self.counters.refused_absent_space.add((keys.len() - end) as u64);
            self.counters.refused_pages.add((keys.len() - end) as u64);
            hashes.truncate(end);
        }
        let keys = &keys[..hashes.len()];
        let parent_present = parent.is_some_and(|p| self.index.locate(scope.slot, p).is_some());
        let present = self.index.exists(scope.slot, &hashes);
        let leading = present.iter().take_while(|present| **present).count();
        let mut reserved = Reserved {
            id: 0,
            store: self.shape.manifest().uuid,
            runs: Vec::new(),
            present: leading,
            refused: absent,
            durable: self.durable_puts(),
        };
        self.counters.present_pages.add(present.iter().filter(|present| **present).count() as u64);
        if leading == keys.len() {
            self.link_and_count(scope.slot, scope.chained, &hashes);
            if request.retain_until > 0 {
                self.retain(scope.slot, &hashes, request.retain_until);
            }
            // Another put of these pages may be visible and not durable yet.
            if self.durable_puts() && !request.flushed_later {
                self.make_durable()?;
            }
            return Ok(reserved);
        }
        let lease = self.lease_parents(client, scope, &hashes, &present, parent)?;
        self.report_demand(&hashes, &present, parent);
        let admitted = self.admit(scope, &hashes, &present, request);
        let end = admitted.end;
        reserved.refused = admitted.refused.or(absent);
        let mut promised = 0;
        let mut runs = Vec::new();
        let segment_bytes = self.shape.budget().segment_bytes;
        let missing = missing_runs(scope, &keys[..end], &present[..end], request, segment_bytes);
        for (at, pages) in missing {
            if !self.index_takes(&hashes[at..at + pages]) {
                reserved.refused = Some(Refusal::IndexMemory);
                break;
            }
            let units = admitted.run_units(pages);
            if !self.is_within_share(client, promised + units) {
                reserved.refused = Some(Refusal::NoSpace);
                break;
            }
            if let Err(refusal) = self.make_quota_space(scope.slot, units, deadline) {
                reserved.refused = Some(refusal);
                break;
            }
            promised += units;
            match self.place_run(scope, keys, at..at + pages, request, until) {
                Ok(place) => {
                    let before = at.checked_sub(1).map(|before| hashes[before]).or(parent);
                    runs.push(PlannedRun {
                        place,
                        at: at as u32,
                        pages: pages as u32,
                        parent: before.filter(|_| scope.chained),
                        parent_present: at > 0 || parent_present,
                    });
                }
                Err(refusal) => {
                    reserved.refused = Some(refusal);
                    break;
                }
            }
        }
        let planned: usize = runs.iter().map(|run| run.pages as usize).sum();
        self.count_refused(&admitted, planned, reserved.refused);
        self.give_back(&admitted, &runs);
        reserved.runs = runs
            .iter()
            .map(|run| ReservedRun { place: run.place.clone(), at: run.at, pages: run.pages })
            .collect();
        let logged = if runs.is_empty() {
            Ok(())
        } else {
            reserved.id = self.shape.unique_number();
            self.log_reservation(client, reserved.id, &runs)
        };
        if runs.is_empty() && request.retain_until > 0 {
            self.retain(scope.slot, &hashes, request.retain_until);
        }
        let mut state = self.state.lock();
        // The check is under the lock: a close that finds no open reservation records a clean end.
        let logged = logged.and_then(|()| self.lifecycle.check_open());
        state.residents.usage.release_promise(scope.slot, promised);
        if runs.is_empty() || logged.is_err() {
            state.release_lease(lease.0);
            for run in &runs {
                state.space.free(&run.place.extents);
            }
        } else {
            let ReserveRequest { retain_until, flushed_later, .. } = *request;
            let reservation =
                Reservation { client, scope, hashes, runs, retain_until, flushed_later, lease };
            state.reservations.insert(reserved.id, reservation);
        }
        drop(state);
        logged?;
        if reserved.id == 0 && self.durable_puts() && !request.flushed_later {
            self.make_durable()?;
        }
        Ok(reserved)
    }

    /// Returns whether a client may reserve `units` more. The owner's own puts are not limited.
    fn is_within_share(&self, client: ClientId, units: u64) -> bool {
        let budget = self.shape.budget();
        let total = u64::from(budget.segments_max) * budget.segment_bytes / UNIT;
        client == ClientId::LOCAL || self.state.lock().reservations.allow(client, units, total)
    }

    /// Finds space for one run.
    fn place_run(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        pages: Range<usize>,
        request: &ReserveRequest,
        until: SpaceDeadline,
    ) -> std::result::Result<Place, Refusal> {
        let (header_units, page_units) = run_lengths(scope, keys, pages.clone(), request);
        let extents = self.find_space(header_units, page_units, pages.len() as u32, until)?;
        Ok(Place {
            generation: self.shape.unique_number(),
            header_checksum: 0,
            header_units,
            page_units,
            extents,
        })
    }

    /// Reports the missing pages to the eviction policy, gap by gap.
    fn report_demand(&self, hashes: &[PageHash], present: &[bool], parent: Option<PageHash>) {
        let mut state = self.state.lock();
        let mut at: usize = 0;
        for gap in present.chunk_by(|a, b| a == b) {
            if !gap[0] {
                let after = at.checked_sub(1).map(|before| hashes[before]).or(parent);
                let mut pages = hashes[at..at + gap.len()].iter().map(|page| page.low());
                state.residents.demanded(Demand::Write, after.map(PageHash::low), &mut pages);
            }
            at += gap.len();
        }
    }

    /// Logs a reservation before the client receives its space: see [`super::reservations`].
    fn log_reservation(&self, client: ClientId, id: u64, runs: &[PlannedRun]) -> Result<()> {
        if client == ClientId::LOCAL {
            return Ok(());
        }
        let name = self.state.lock().reservations.client_name(client);
        self.reservation_log.lock().reserved(id, &name, runs)
    }

    /// Leases the runs that the missing pages follow, and thereby their ancestors.
    fn lease_parents(
        &self,
        client: ClientId,
        scope: ScopeRef,
        hashes: &[PageHash],
        present: &[bool],
        parent: Option<PageHash>,
    ) -> Result<LeaseNumber> {
        if !scope.chained {
            return Ok(LeaseNumber::default());
        }
        let before_gaps = (1..hashes.len()).filter(|&at| !present[at] && present[at - 1]);
        let pages = before_gaps.map(|at| hashes[at - 1]).chain(parent);
        let mut state = self.state.lock();
        let mut runs: Vec<RunId> = pages
            .filter_map(|page| self.index.locate(scope.slot, page))
            .map(|(run, _)| run)
            .collect();
        runs.sort_unstable();
        runs.dedup();
        if runs.is_empty() {
            return Ok(LeaseNumber::default());
        }
        state.leases.grant(&runs, PUT_LEASE, client).map(LeaseNumber)
    }
}

/// Hashes the keys of a batch.
///
/// # Errors
/// `Invalid` for keys of a wrong length, too many keys, or duplicates.
fn hash_batch(scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<PageHash>> {
    check_keys(keys)?;
    if keys.len() > PUT_PAGES_MAX {
        return Err(Error::invalid(format!("a put takes at most {PUT_PAGES_MAX} pages"))
            .with("pages", keys.len()));
    }
    let hashes: Vec<PageHash> = keys.iter().map(|key| PageHash::of(&scope.id, key)).collect();
    let mut sorted = hashes.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(hashes),
        Some(pair) => {
            let twice: Vec<usize> = (0..hashes.len()).filter(|&at| hashes[at] == pair[0]).collect();
            Err(Error::invalid("a key comes twice in one batch: pass each page once")
                .with("positions", format!("{twice:?}")))
        }
    }
}
