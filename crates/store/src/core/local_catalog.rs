//! The owner's [`Catalog`] for one client.

use super::reservations::Abandoned;
use super::{ClientId, State, StoreCore};
use crate::catalog::{
    Catalog, LEASE_PAGES_MAX, LeaseNumber, Leased, Located, LocatedRun, Request, Response, ScopeRef,
};
use crate::eviction::{Demand, Used};
use parking_lot::MutexGuard;
use ritornello_format::{
    Error, ErrorKind, PageHash, Place, RUN_HEADER_UNITS_MAX, Result, Scope, ScopeSettings,
    ScopedKeys, UNIT, check_keys,
};
use ritornello_index::{MatchedRun, RunId};
use std::sync::Arc;
use std::time::Duration;

/// Lease of a read, from `begin_read` to `release`.
const READ_LEASE: Duration = Duration::from_secs(120);
/// Maximum wait for a capacity change, which then continues in the background.
const CAPACITY_CHANGE_TIMEOUT: Duration = Duration::from_secs(240);

/// The catalog of one client, in the owner's process.
#[derive(Clone, Debug)]
pub struct LocalCatalog {
    core: Arc<StoreCore>,
    client: ClientId,
}

impl LocalCatalog {
    pub(super) fn new(core: Arc<StoreCore>, client: ClientId) -> Self {
        Self { core, client }
    }

    /// Walks the leading pages (in an unchained scope, all pages present) and leases their runs. No
    /// eviction comes between.
    fn lease_for_call(
        &self,
        scope: ScopeRef,
        keys: &[&[u8]],
        ttl: Duration,
    ) -> Result<(LeaseNumber, Vec<MatchedRun>)> {
        self.core.check_open()?;
        self.core.scopes.check(scope)?;
        check_keys(keys)?;
        let mut state = self.core.state.lock();
        let mut found = Vec::new();
        let steps = self.use_leading(&mut state, scope, keys, &mut found);
        let runs: Vec<RunId> = found.into_iter().map(|found| found.run).collect();
        Ok((self.lease_runs(state, &runs, ttl)?, steps))
    }

    /// Walks the pages of one scope, records the use, and adds their runs to `runs` in page order.
    fn use_leading(
        &self,
        state: &mut State,
        scope: ScopeRef,
        keys: &[&[u8]],
        runs: &mut Vec<LeasedRun>,
    ) -> Vec<MatchedRun> {
        let steps = self.core.walk(scope, keys);
        if steps.is_empty() {
            return steps;
        }
        let used = |step: &MatchedRun| Used { run: step.run, pages: step.first + step.pages };
        let path: Vec<Used> = steps.iter().map(used).collect();
        state.eviction.hit(&path);
        state.usage.hit(scope.slot, &path);
        let others = runs.len();
        runs.extend(steps.iter().map(|step| LeasedRun { run: step.run, at: step.at }));
        if !scope.chained {
            let mut own = runs.split_off(others);
            own.sort_unstable();
            own.dedup_by_key(|found| found.run);
            own.sort_unstable_by_key(|found| found.at);
            runs.append(&mut own);
        }
        steps
    }

    /// Leases the leading runs of `found` that fit the client's share; the runs were found under
    /// the lock that `state` holds, and together hold the `pages` leading pages. Returns the number
    /// of leading pages in leased runs.
    ///
    /// # Errors
    /// `Retry` if the client's share holds no page.
    fn lease_leading(
        &self,
        mut state: MutexGuard<'_, State>,
        found: &[LeasedRun],
        pages: usize,
        ttl: Duration,
    ) -> Result<Leased> {
        if found.is_empty() {
            return Ok(Leased { pages, lease: LeaseNumber::default() });
        }
        let core = &self.core;
        let (tick, capacity) = (core.clock.tick(), state.space.capacity_units());
        let runs: Vec<RunId> = found.iter().map(|found| found.run).collect();
        let units = |run| core.index.place(run).map_or(0, |place| place.units());
        let (lease, taken) =
            state.leases.grant_leading(&runs, units, capacity, ttl, self.client)?;
        let within = found.get(taken).map_or(pages, |next| pages.min(next.at as usize));
        if within == 0 && pages > 0 {
            // With several scopes, the share was used up before every scope's first page was
            // leased.
            let freed = state.leases.release(lease);
            state.add_to_limbo(freed);
            return Err(state.leases.share_exceeded(self.client, capacity));
        }
        state.touched = true;
        drop(state);
        if taken < runs.len() {
            core.counters.leases_shortened.add(1);
        }
        runs.iter().for_each(|run| core.index.touch(*run, tick));
        Ok(Leased { pages: within, lease: LeaseNumber(lease) })
    }

    /// Leases `runs`, which were found under the lock that `state` holds, without counting them for
    /// the client's share: the lease ends with the call that it serves. The null lease if `runs` is
    /// empty.
    fn lease_runs(
        &self,
        mut state: MutexGuard<'_, State>,
        runs: &[RunId],
        ttl: Duration,
    ) -> Result<LeaseNumber> {
        if runs.is_empty() {
            return Ok(LeaseNumber::default());
        }
        let tick = self.core.clock.tick();
        let lease = state.leases.grant(runs, ttl, self.client)?;
        state.touched = true;
        drop(state);
        runs.iter().for_each(|run| self.core.index.touch(*run, tick));
        Ok(LeaseNumber(lease))
    }
}

/// A run that holds requested pages. The order is by run id, then by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LeasedRun {
    run: RunId,
    /// Position of the run's first page in the requested keys.
    at: u32,
}

/// Returns the number of leading pages before the first missing page.
fn leading(steps: &[MatchedRun]) -> usize {
    steps.iter().fold(0, |pages, step| {
        if step.at as usize == pages { pages + step.pages as usize } else { pages }
    })
}

impl Catalog for LocalCatalog {
    fn call(&self, request: &Request<'_>) -> Result<Response> {
        let done = |()| Response::Done;
        match *request {
            Request::Resolve { ref scope, create } => {
                self.resolve(scope, create).map(Response::Scope)
            }
            Request::Probe { scope, keys } => self.probe(scope, &keys.list()?).map(Response::Count),
            Request::Lease { ref scopes, keys, ttl } => {
                self.lease(scopes, &keys.list()?, ttl).map(Response::Leased)
            }
            Request::Release { lease } => {
                self.release(lease);
                Ok(Response::Done)
            }
            Request::BeginRead { scope, keys } => {
                self.begin_read(scope, &keys.list()?).map(Response::Located)
            }
            Request::Exists { scope, keys } => {
                self.exists(scope, &keys.list()?).map(Response::Exists)
            }
            Request::Reserve { scope, keys, parent, ref reserve_request } => {
                let keys = keys.list()?;
                let reserved =
                    self.core.reserve(self.client, scope, &keys, parent, reserve_request);
                reserved.map(Response::Reserved).map_err(|error| self.core.retryable(error))
            }
            Request::Commit { reservation, ref written } => {
                let committed = self.core.commit(self.client, reservation, written);
                committed.map(Response::Committed).map_err(|error| self.core.retryable(error))
            }
            Request::Abort { reservation } => self.abort(reservation).map(done),
            Request::ReportDamage { scope, key, generation, reason } => {
                self.report_damage(scope, key, generation, reason).map(done)
            }
            Request::Touch { scope, keys } => self.touch(scope, &keys.list()?).map(Response::Count),
            Request::Delete { scope, keys } => {
                self.delete(scope, &keys.list()?).map(Response::Count)
            }
            Request::DropScope { scope } => self.drop_scope(scope).map(done),
            Request::Configure { scope, settings } => self.configure(scope, &settings).map(done),
            Request::Scopes { from } => {
                self.core.check_open()?;
                Ok(Response::Scopes(self.core.list_scopes(from)))
            }
            Request::Keys { scope, after, limit } => {
                self.core.check_open()?;
                self.core.scopes.check(scope)?;
                Ok(Response::Keys(self.core.list_keys(scope, after, limit)))
            }
            Request::ChangeCapacity { ref change } => {
                let changed = self.core.change_capacity(change, CAPACITY_CHANGE_TIMEOUT);
                changed.map(done).map_err(|error| self.core.retryable(error))
            }
            Request::Clear => self.clear().map(done),
            Request::Flush => self.flush().map(done),
            Request::Stats => self.core.stats().map(Box::new).map(Response::Stats),
        }
    }
}

/// The answers.
impl LocalCatalog {
    fn resolve(&self, scope: &Scope, create: bool) -> Result<Option<ScopeRef>> {
        self.core.check_open()?;
        match self.core.scopes.find(scope)? {
            None if create => {
                self.core.check_fits(scope)?;
                self.core.register(scope).map(Some)
            }
            found => Ok(found),
        }
    }

    fn configure(&self, scope: ScopeRef, settings: &ScopeSettings) -> Result<()> {
        self.core.check_writable()?;
        let configured = self.core.scopes.configure(scope, *settings);
        configured.map_err(|error| self.core.retryable(error))?;
        self.core.apply_quota(scope.slot);
        self.core.trim_retention(scope.slot);
        Ok(())
    }

    fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let core = &self.core;
        core.check_open()?;
        core.scopes.check(scope)?;
        let scoped = ScopedKeys { scope: &scope.id, keys };
        let hit = if core.hidden.is_empty() {
            core.index.probe(scope.slot, &scoped)
        } else {
            leading(&core.visible(true, core.index.walk(scope.slot, &scoped)))
        };
        core.counters.probes.add(1);
        core.counters.probed_pages.add(keys.len() as u64);
        core.counters.hit_pages.add(hit as u64);
        Ok(hit)
    }

    fn lease(&self, scopes: &[ScopeRef], keys: &[&[u8]], ttl: Duration) -> Result<Leased> {
        if scopes.len() > 1 && keys.len().saturating_mul(scopes.len()) > LEASE_PAGES_MAX {
            return Err(Error::invalid("too many pages for one lease: use several calls")
                .with("keys", keys.len())
                .with("scopes", scopes.len())
                .with("at_most", LEASE_PAGES_MAX));
        }
        let core = &self.core;
        core.check_open()?;
        scopes.iter().try_for_each(|scope| core.scopes.check(*scope))?;
        check_keys(keys)?;
        let mut pages = if scopes.is_empty() { 0 } else { keys.len() };
        let mut runs = Vec::new();
        let mut state = core.state.lock();
        for (number, scope) in scopes.iter().enumerate() {
            let requested = &keys[..pages];
            pages = leading(&self.use_leading(&mut state, *scope, requested, &mut runs));
            core.counters.probes.add(1);
            core.counters.probed_pages.add(requested.len() as u64);
            core.counters.hit_pages.add(pages as u64);
            if pages == 0 && number > 0 {
                // No page is present in all scopes.
                runs.clear();
                break;
            }
        }
        if scopes.len() > 1 {
            runs.retain(|found: &LeasedRun| (found.at as usize) < pages);
            runs.sort_by_key(|found| found.at);
        }
        self.lease_leading(state, &runs, pages, ttl)
    }

    fn release(&self, lease: LeaseNumber) {
        let mut state = self.core.state.lock();
        // Lease numbers can be guessed, and ending another client's lease would fail its reads.
        if state.leases.holder(lease.0).is_some_and(|holder| holder != self.client) {
            drop(state);
            let foreign = &self.core.counters.foreign_releases;
            if foreign.get() == 0 {
                tracing::warn!(
                    client = self.client.0,
                    lease = lease.0,
                    "a client tried to release another client's lease: ignored; later attempts \
                     are only counted"
                );
            }
            foreign.add(1);
            return;
        }
        let freed = state.leases.release(lease.0);
        state.add_to_limbo(freed);
    }

    fn begin_read(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Located> {
        let (lease, steps) = self.lease_for_call(scope, keys, READ_LEASE)?;
        if !steps.is_empty() {
            let found =
                steps.iter().flat_map(|step| &keys[step.at as usize..][..step.pages as usize]);
            let mut read = found.map(|key| PageHash::of(&scope.id, key).low());
            self.core.state.lock().eviction.demanded(Demand::Read, None, &mut read);
        }
        let mut runs = Vec::with_capacity(steps.len());
        for step in steps {
            // If the run was deleted or truncated after the walk, the prefix ends at the cut.
            let place = self.core.index.place(step.run);
            let pages = place.as_ref().map_or(0, |place| place.holds().saturating_sub(step.first));
            let pages = pages.min(step.pages);
            if let Some(place) = place.filter(|_| pages > 0) {
                runs.push(LocatedRun { place, first: step.first, pages, at: step.at });
            }
            if pages < step.pages && scope.chained {
                break;
            }
        }
        Ok(Located { lease, runs })
    }

    fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.core.check_open()?;
        self.core.scopes.check(scope)?;
        check_keys(keys)?;
        let scoped = ScopedKeys { scope: &scope.id, keys };
        let mut present = self.core.index.exists(scope.slot, &scoped);
        if !self.core.hidden.is_empty() {
            for (present, key) in present.iter_mut().zip(keys) {
                *present &= !self.core.is_hidden(scope.slot, PageHash::of(&scope.id, key));
            }
        }
        Ok(present)
    }

    fn abort(&self, reservation: u64) -> Result<()> {
        self.core.state.lock().check_reservation_owner(self.client, reservation)?;
        self.core.abandon(reservation, Abandoned::ByCall);
        Ok(())
    }

    fn report_damage(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()> {
        let core = &self.core;
        core.check_open()?;
        core.scopes.check(scope)?;
        let hash = PageHash::of(&scope.id, key);
        let Some((run, page, place)) = core.placed(scope, hash, generation) else {
            return Ok(());
        };
        // The reporter may have lacked memory, files or time, so the owner reads the page itself.
        if !core.is_damaged(&place, page) {
            return Ok(());
        }
        let mut state = core.state.lock();
        let stays = |now: Place| now.header() == place.header();
        if core.placed(scope, hash, generation).is_some_and(|(_, _, now)| stays(now)) {
            tracing::warn!(
                reason, generation, page, scope = %scope.id,
                "a page failed verification on disk and was removed"
            );
            core.remove_damaged_page(&mut state, scope, run, hash);
        }
        Ok(())
    }

    fn touch(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let (lease, steps) = self.lease_for_call(scope, keys, READ_LEASE)?;
        self.release(lease);
        Ok(leading(&steps))
    }

    fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let core = &self.core;
        core.check_writable()?;
        core.scopes.check(scope)?;
        check_keys(keys)?;
        let scoped = ScopedKeys { scope: &scope.id, keys };
        let mut state = core.state.lock();
        let present = core.index.exists(scope.slot, &scoped);
        let removed = core.index.remove(scope.slot, &scoped);
        let (pages, _) = core.apply_removals(&mut state, removed, None);
        core.counters.deleted_pages.add(pages);
        core.wake_if_limbo_is_large(&state);
        drop(state);
        if core.durable_puts() && pages > 0 {
            core.make_durable().map_err(|error| core.retryable(error))?;
        }
        Ok(present.into_iter().filter(|present| *present).count())
    }

    fn drop_scope(&self, scope: ScopeRef) -> Result<()> {
        self.core.check_writable()?;
        self.core.scopes.check(scope)?;
        let dropped = self.core.drop_scopes(|slot| slot == scope.slot);
        dropped.map_err(|error| self.core.retryable(error))
    }

    fn clear(&self) -> Result<()> {
        self.core.check_writable()?;
        let cleared = self.core.drop_scopes(|_| true).and_then(|()| self.core.make_durable());
        cleared.map_err(|error| self.core.retryable(error))
    }

    fn flush(&self) -> Result<()> {
        self.core.check_writable()?;
        self.core.make_durable().map_err(|error| self.core.retryable(error))
    }
}

impl StoreCore {
    /// Checks that a page and its run header fit into one segment.
    fn check_fits(&self, scope: &Scope) -> Result<()> {
        let page_bytes = scope.resolved_page_bytes()?;
        let most = self.budget().segment_bytes - u64::from(RUN_HEADER_UNITS_MAX) * UNIT;
        if page_bytes <= most {
            return Ok(());
        }
        Err(Error::invalid("a page is too large for the segments of this store")
            .with("page_bytes", page_bytes)
            .with("at_most", most))
    }

    fn register(&self, scope: &Scope) -> Result<ScopeRef> {
        match self.scopes.register(scope, &self.state) {
            Ok((reference, dropped)) => {
                self.counters.scopes_dropped.add(dropped as u64);
                Ok(reference)
            }
            Err(error) => {
                if error.kind() == ErrorKind::Miss {
                    let refused = &self.counters.refused_scopes;
                    if refused.get() == 0 {
                        tracing::warn!(%error, "a new scope was refused; more are only counted");
                    }
                    refused.add(1);
                }
                Err(self.retryable(error))
            }
        }
    }

    /// Locates a page, if it is in the run of `generation`. Otherwise the reader's lease had
    /// expired, and the bytes were another run's.
    fn placed(
        &self,
        scope: ScopeRef,
        page: PageHash,
        generation: u64,
    ) -> Option<(RunId, u32, Place)> {
        let (run, page) = self.index.locate(scope.slot, page)?;
        let place = self.index.place(run)?;
        (place.generation == generation).then_some((run, page, place))
    }

    /// Removes a page that failed verification and quarantines its space.
    pub(super) fn remove_damaged_page(
        &self,
        state: &mut MutexGuard<'_, State>,
        scope: ScopeRef,
        run: RunId,
        page: PageHash,
    ) {
        let removed = self.index.remove(scope.slot, &[page]);
        let (pages, damaged_extents) = self.apply_removals(state, removed, Some(run));
        self.counters.damaged_pages.add(pages);
        self.quarantine(state, damaged_extents);
    }

    /// Drops scopes, durably first and then in memory: after the call returns, no caller finds the
    /// scope.
    fn drop_scopes(&self, which: impl Fn(ritornello_format::ScopeSlot) -> bool) -> Result<()> {
        let gone = self.scopes.drop_selected(which)?;
        // A commit that still saw one of the scopes has inserted its runs after this.
        drop(self.state.lock());
        for slot in gone {
            // From here on a removal is pending: the index may have dropped runs that `state` still
            // counts.
            self.state.lock().dropping += 1;
            let removed = self.index.drop_scope(slot);
            let mut state = self.state.lock();
            state.dropping -= 1;
            let (pages, _) = self.apply_removals(&mut state, removed, None);
            state.usage.drop_scope(slot);
            self.counters.deleted_pages.add(pages);
            self.wake_if_limbo_is_large(&state);
        }
        Ok(())
    }
}
