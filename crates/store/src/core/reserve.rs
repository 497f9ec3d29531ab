//! Reserving space for a put: groups the missing pages into runs and places each of them.

use super::plan::check_lengths;
use super::reservations::{PlannedRun, Reservation};
use super::{ClientId, StoreCore};
use crate::budget::Budget;
use crate::catalog::{LeaseNumber, Refusal, ReserveRequest, Reserved, ReservedRun, ScopeRef};
use crate::eviction::Demand;
use crate::machine_memory::check_memory;
use ritornello_format::{Error, Extent, PageHash, Result, SegmentId, UNIT, check_keys};
use ritornello_index::RunId;
use ritornello_volume::space::Reserve;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum pages of one put.
const PUT_PAGES_MAX: usize = 65_535;
/// Lease time of a put's parents; a put that takes longer may fail at commit.
const PUT_LEASE: Duration = Duration::from_secs(600);
/// The pause before failed growth is retried.
const GROWTH_PAUSE: Duration = Duration::from_secs(10);
/// Maximum time that a put waits for withheld space before it grows the store or evicts.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum evict-and-sync rounds for one run.
const RECLAIM_ROUNDS: u32 = 16;

/// Deadlines of a put for its space.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceDeadline {
    /// For withheld space, over all runs of the put.
    drain: Instant,
    /// For any space.
    space: Instant,
}

impl SpaceDeadline {
    /// Deadlines of a put that ends at `space`, with a shorter deadline for withheld space.
    pub(super) fn until(space: Instant) -> Self {
        Self { drain: space.min(Instant::now() + DRAIN_TIMEOUT), space }
    }
}

/// The reason why a run cannot be placed.
enum Obstacle {
    /// Space is withheld until a dead process's writes have ended.
    Drain,
    Grow(SegmentId),
    Sync,
    Full,
}

impl StoreCore {
    pub(super) fn reserve(
        &self,
        client: ClientId,
        scope: ScopeRef,
        keys: &[&[u8]],
        parent: Option<&[u8]>,
        request: &ReserveRequest,
    ) -> Result<Reserved> {
        self.check_writable()?;
        self.scopes.check(scope)?;
        let deadline = Instant::now() + request.timeout;
        let mut hashes = hash_batch(scope, keys)?;
        check_lengths(scope, keys.len(), request)?;
        self.ensure_numbers(deadline)?;
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
            store: self.manifest().uuid,
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
        for (at, pages) in self.missing_runs(scope, &keys[..end], &present[..end], request) {
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
            reserved.id = self.unique_number();
            self.log_reservation(client, reserved.id, &runs)
        };
        if runs.is_empty() && request.retain_until > 0 {
            self.retain(scope.slot, &hashes, request.retain_until);
        }
        let mut state = self.state.lock();
        // The check is under the lock: a close that finds no open reservation records a clean end.
        let logged = logged.and_then(|()| self.check_open());
        state.release_promise(scope.slot, promised);
        if runs.is_empty() || logged.is_err() {
            let freed = state.leases.release(lease.0);
            state.add_to_limbo(freed);
            for run in &runs {
                self.free(&mut state, &run.place.extents);
            }
        } else {
            let ReserveRequest { retain_until, flushed_later, .. } = *request;
            let reservation =
                Reservation { client, scope, hashes, runs, retain_until, flushed_later, lease };
            state.reservations.open.insert(reserved.id, reservation);
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
        let budget = self.budget();
        let total = u64::from(budget.segments_max) * budget.segment_bytes / UNIT;
        client == ClientId::LOCAL || self.state.lock().reservations.allow(client, units, total)
    }

    /// Reports the missing pages to the eviction policy, gap by gap.
    fn report_demand(&self, hashes: &[PageHash], present: &[bool], parent: Option<PageHash>) {
        let mut state = self.state.lock();
        let mut at: usize = 0;
        for gap in present.chunk_by(|a, b| a == b) {
            if !gap[0] {
                let after = at.checked_sub(1).map(|before| hashes[before]).or(parent);
                let mut pages = hashes[at..at + gap.len()].iter().map(|page| page.low());
                state.eviction.demanded(Demand::Write, after.map(PageHash::low), &mut pages);
            }
            at += gap.len();
        }
    }

    /// Logs a reservation before the client receives its space: see [`super::reservations`].
    fn log_reservation(&self, client: ClientId, id: u64, runs: &[PlannedRun]) -> Result<()> {
        if client == ClientId::LOCAL {
            return Ok(());
        }
        let name = self.state.lock().clients.get(&client).cloned().unwrap_or_default();
        self.log.lock().reserved(id, &name, runs)
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

    /// Finds extents for a header and pages: by growth, eviction and reclaim, in that order.
    pub(super) fn find_space(
        &self,
        header_units: u32,
        page_units: u32,
        pages: u32,
        until: SpaceDeadline,
    ) -> std::result::Result<Vec<Extent>, Refusal> {
        let SpaceDeadline { drain: drain_until, space: deadline } = until;
        let (mut round, mut drains) = (0, true);
        while round < RECLAIM_ROUNDS {
            let obstacle = match self.try_place(header_units, page_units, pages, round, drains) {
                Ok(extents) => return Ok(extents),
                Err(obstacle) => obstacle,
            };
            if let Obstacle::Drain = obstacle {
                drains = self.await_drain(drain_until);
                continue;
            }
            round += 1;
            match obstacle {
                Obstacle::Drain => {}
                Obstacle::Full => return Err(Refusal::NoSpace),
                Obstacle::Grow(segment) => self.grow(segment, deadline)?,
                Obstacle::Sync => {
                    if Instant::now() >= deadline {
                        return Err(Refusal::Deadline);
                    }
                    self.counters.reclaim_waits.add(1);
                    if self.make_durable_by(deadline).is_err() {
                        let late = Instant::now() >= deadline;
                        return Err(if late { Refusal::Deadline } else { Refusal::NoSpace });
                    }
                }
            }
        }
        Err(Refusal::NoSpace)
    }

    fn try_place(
        &self,
        header_units: u32,
        page_units: u32,
        pages: u32,
        round: u32,
        drains: bool,
    ) -> std::result::Result<Vec<Extent>, Obstacle> {
        let mut state = self.state.lock();
        state.resume_growth();
        let place = |state: &mut super::State, reserve| {
            state.space.allocate(header_units, page_units, pages, reserve)
        };
        if let Some(extents) = place(&mut state, Reserve::Keep) {
            return Ok(extents);
        }
        if drains && !state.draining.is_empty() {
            return Err(Obstacle::Drain);
        }
        if let Some(segment) = state.space.next_segment() {
            return Err(Obstacle::Grow(segment));
        }
        let run = u64::from(header_units) + u64::from(page_units) * u64::from(pages);
        let needed = state.space.reserve_units() + run;
        let have = state.reclaimable();
        if have < needed {
            self.evict(&mut state, needed - have);
        }
        if let Some(extents) = place(&mut state, Reserve::Use) {
            return Ok(extents);
        }
        // Enough space is reclaimable, but fragmented or not durably free: each round evicts more.
        let more = (round > 0 || state.limbo.units() == 0) && self.evict(&mut state, run);
        if more || state.limbo.units() > 0 { Err(Obstacle::Sync) } else { Err(Obstacle::Full) }
    }

    /// Adds a segment file, unless the free-space floor or the file system prevents it. Threads
    /// take turns: the next thread finds the new segment.
    fn grow(&self, segment: SegmentId, deadline: Instant) -> std::result::Result<(), Refusal> {
        let growing = self.growing.try_lock_until(deadline);
        let _growing = growing.ok_or(Refusal::Deadline)?;
        if self.state.lock().space.next_segment() != Some(segment) {
            return Ok(());
        }
        let segment_bytes = self.budget().segment_bytes;
        let manifest = self.manifest();
        let volume = manifest.volumes.get(usize::from(segment.volume()));
        let volume = volume.map_or("", |volume| volume.dir.as_str());
        let refused = match self.medium.room(&self.options.dir.join(volume)) {
            Ok(room) if room.available < segment_bytes + Budget::floor(room.total) => {
                Some(format!("the free-space floor is reached ({} bytes left)", room.available))
            }
            // The file system may promise memory that the machine does not have, and using it would
            // kill a process.
            Ok(room) => check_memory(&room, segment_bytes)
                .and_then(|()| self.create(segment))
                .err()
                .map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        let mut state = self.state.lock();
        let refused = refused
            .or_else(|| state.space.add_segment(segment).err().map(|error| error.to_string()));
        if let Some(reason) = refused {
            tracing::warn!(%reason, segment = segment.number(), "growth stops temporarily");
            state.space.stop_growth(segment.volume());
            state.growth_paused.push((segment.volume(), Instant::now() + GROWTH_PAUSE));
        }
        Ok(())
    }

    /// Creates the file. A file that a failed creation left blocks its number until the next
    /// opening.
    fn create(&self, segment: SegmentId) -> Result<()> {
        self.segments.create(segment).inspect_err(|_| {
            let mut state = self.state.lock();
            state.space.start_numbers_at(segment.volume(), segment.number() + 1);
        })
    }

    /// Whether the core is open; checked in long loops.
    pub(super) fn is_running(self: &Arc<Self>) -> bool {
        !self.closed.load(Ordering::Acquire)
    }
}

impl super::State {
    /// Resumes growth of volumes whose pause has ended.
    fn resume_growth(&mut self) {
        let now = Instant::now();
        let Self { space, growth_paused, .. } = self;
        growth_paused.retain(|(volume, until)| {
            if now >= *until {
                space.resume_growth(*volume);
            }
            now < *until
        });
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
