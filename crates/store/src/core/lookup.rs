//! Lookups of leading pages: to count, to lease, or to read them.

use super::StoreCore;
use super::state::State;
use crate::catalog::{LEASE_PAGES_MAX, LeaseNumber, Leased, Located, LocatedRun, ScopeRef};
use crate::client_id::ClientId;
use crate::eviction::{Demand, Used};
use crate::explanation::Answer;
use parking_lot::MutexGuard;
use ritornello_format::{Error, PageHash, Result, ScopedKeys, check_keys};
use ritornello_index::{MatchedRun, RunId};
use std::time::Duration;

/// Maximum duration of the lease that serves one read or touch.
const READ_LEASE: Duration = Duration::from_secs(120);

impl StoreCore {
    /// The number of leading pages present. Takes no lock that is held across I/O.
    pub(super) fn probe(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.lifecycle.check_open()?;
        self.scopes.check(scope)?;
        let scoped = ScopedKeys { scope: &scope.id, keys };
        let hit = if self.hidden.is_empty() {
            self.index.probe(scope.slot, &scoped)
        } else {
            leading(&self.visible(true, self.index.walk(scope.slot, &scoped)))
        };
        self.count_lookup(scope, keys, hit);
        Ok(hit)
    }

    /// Whether each page is present.
    pub(super) fn exists(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.lifecycle.check_open()?;
        self.scopes.check(scope)?;
        check_keys(keys)?;
        let scoped = ScopedKeys { scope: &scope.id, keys };
        let mut present = self.index.exists(scope.slot, &scoped);
        if !self.hidden.is_empty() {
            for (present, key) in present.iter_mut().zip(keys) {
                *present &= !self.is_hidden(scope.slot, PageHash::of(&scope.id, key));
            }
        }
        Ok(present)
    }

    /// Leases the leading pages present in all of `scopes` (in a single unchained scope, all pages
    /// present), as far as they fit the client's share of the space that leases may keep from
    /// eviction.
    pub(super) fn lease(
        &self,
        client: ClientId,
        scopes: &[ScopeRef],
        keys: &[&[u8]],
        ttl: Duration,
    ) -> Result<Leased> {
        if scopes.len() > 1 && keys.len().saturating_mul(scopes.len()) > LEASE_PAGES_MAX {
            return Err(Error::invalid("too many pages for one lease: use several calls")
                .with("keys", keys.len())
                .with("scopes", scopes.len())
                .with("at_most", LEASE_PAGES_MAX));
        }
        self.lifecycle.check_open()?;
        scopes.iter().try_for_each(|scope| self.scopes.check(*scope))?;
        check_keys(keys)?;
        let mut pages = if scopes.is_empty() { 0 } else { keys.len() };
        // The scope that lacks the first page that is not found in all scopes.
        let mut ended = scopes.first().copied();
        let mut runs = Vec::new();
        let mut state = self.state.lock();
        for (number, scope) in scopes.iter().enumerate() {
            let requested = pages;
            pages = leading(&self.use_leading(&mut state, *scope, &keys[..pages], &mut runs));
            if pages < requested {
                ended = Some(*scope);
            }
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
        let leased = self.lease_leading(state, client, &runs, pages, ttl);
        // Count after the state's lock is released, because most calls wait for this lock.
        // A refused call is repeated, and then counted.
        if let (Some(scope), Ok(_)) = (ended, &leased) {
            self.count_lookup(scope, keys, pages);
        }
        leased
    }

    /// Leases the leading pages (in an unchained scope, all pages present) for a read, and returns
    /// the places of their runs.
    pub(super) fn locate(
        &self,
        client: ClientId,
        scope: ScopeRef,
        keys: &[&[u8]],
    ) -> Result<Located> {
        let (lease, steps) = self.lease_for_call(client, scope, keys)?;
        if !steps.is_empty() {
            let found =
                steps.iter().flat_map(|step| &keys[step.at as usize..][..step.pages as usize]);
            let read = found.map(|key| PageHash::of(&scope.id, key));
            self.state.lock().residents.demanded(Demand::Read, None, read);
        }
        let mut runs = Vec::with_capacity(steps.len());
        for step in steps {
            // The run may have been deleted or truncated after the lookup. In a chained scope the
            // prefix then ends where the run ends now.
            let place = self.index.place(step.run);
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

    /// Records a use of the leading pages (in an unchained scope, of all pages present). Returns
    /// the number of leading pages.
    pub(super) fn touch(&self, client: ClientId, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        let (lease, steps) = self.lease_for_call(client, scope, keys)?;
        self.release(client, lease);
        Ok(leading(&steps))
    }

    /// Ends a lease of this client.
    pub(super) fn release(&self, client: ClientId, lease: LeaseNumber) {
        let mut state = self.state.lock();
        // Lease numbers can be guessed, and ending another client's lease would fail its reads.
        if state.leases.holder(lease.0).is_some_and(|holder| holder != client) {
            drop(state);
            let foreign = &self.counters.foreign_releases;
            if foreign.get() == 0 {
                tracing::warn!(
                    client = client.0,
                    lease = lease.0,
                    "a client tried to release another client's lease: ignored; later attempts \
                     are only counted"
                );
            }
            foreign.add(1);
            return;
        }
        state.release_lease(lease.0);
    }

    /// Counts a lookup of `keys`, of which the `hit` leading pages were found; `scope` lacks the
    /// first page after them. In an unchained scope too, the first missing page and all pages after
    /// it count as missed, for the reason why the first is missing.
    fn count_lookup(&self, scope: ScopeRef, keys: &[&[u8]], hit: usize) {
        let counters = &self.counters;
        counters.probes.add(1);
        counters.probed_pages.add(keys.len() as u64);
        counters.hit_pages.add(hit as u64);
        let Some(missing) = keys.get(hit) else { return };
        let missing = PageHash::of(&scope.id, missing);
        let reason = if self.is_hidden(scope.slot, missing) {
            &counters.missed_absent_volume
        } else {
            match self.miss_causes.answer(scope.id, missing) {
                Answer::Evicted => &counters.missed_evicted,
                Answer::Removed => &counters.missed_removed,
                Answer::Damaged => &counters.missed_damaged,
                Answer::Refused => &counters.missed_refused,
                Answer::Abandoned => &counters.missed_abandoned,
                _ => &counters.missed_unknown,
            }
        };
        reason.add((keys.len() - hit) as u64);
    }

    /// Looks up the leading pages (in an unchained scope, all pages present) and leases their runs,
    /// under one lock, so that no run is evicted in between. The lease ends with the call that it
    /// serves, so it does not count towards the client's share of the space that leases may keep
    /// from eviction. Returns the null lease if no page is present.
    fn lease_for_call(
        &self,
        client: ClientId,
        scope: ScopeRef,
        keys: &[&[u8]],
    ) -> Result<(LeaseNumber, Vec<MatchedRun>)> {
        self.lifecycle.check_open()?;
        self.scopes.check(scope)?;
        check_keys(keys)?;
        let mut state = self.state.lock();
        let mut found = Vec::new();
        let steps = self.use_leading(&mut state, scope, keys, &mut found);
        if found.is_empty() {
            return Ok((LeaseNumber::default(), steps));
        }
        let runs: Vec<RunId> = found.into_iter().map(|found| found.run).collect();
        let tick = state.residents.clock.tick();
        let lease = state.leases.grant(&runs, READ_LEASE, client)?;
        state.unsynced.uses = true;
        drop(state);
        runs.iter().for_each(|run| self.index.touch(*run, tick));
        Ok((LeaseNumber(lease), steps))
    }

    /// Looks up the pages of one scope, records the use, and adds their runs to `runs` in page
    /// order.
    fn use_leading(
        &self,
        state: &mut State,
        scope: ScopeRef,
        keys: &[&[u8]],
        runs: &mut Vec<LeasedRun>,
    ) -> Vec<MatchedRun> {
        let steps = self.walk(scope, keys);
        if steps.is_empty() {
            return steps;
        }
        let used = |step: &MatchedRun| Used { run: step.run, pages: step.first + step.pages };
        let path: Vec<Used> = steps.iter().map(used).collect();
        state.residents.hit(scope.slot, &path);
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

    /// Leases the leading runs of `found` that fit the client's share of the space that leases may
    /// keep from eviction; the runs were found under the lock that `state` holds, and together hold
    /// the `pages` leading pages. Returns the number of leading pages in leased runs.
    ///
    /// # Errors
    /// `Retry` if the client has too many leases or leased runs ([`crate::lease::PINS_MAX`]), or if
    /// the first run, or with several scopes the first page of every scope, does not fit the rest
    /// of the client's share.
    fn lease_leading(
        &self,
        mut state: MutexGuard<'_, State>,
        client: ClientId,
        found: &[LeasedRun],
        pages: usize,
        ttl: Duration,
    ) -> Result<Leased> {
        if found.is_empty() {
            return Ok(Leased { pages, lease: LeaseNumber::default() });
        }
        let tick = state.residents.clock.tick();
        let capacity = state.space.allocator().capacity_units();
        let runs: Vec<RunId> = found.iter().map(|found| found.run).collect();
        let units = |run| self.index.place(run).map_or(0, |place| place.units());
        let (lease, taken) = state.leases.grant_leading(&runs, units, capacity, ttl, client)?;
        let within = found.get(taken).map_or(pages, |next| pages.min(next.at as usize));
        if within == 0 && pages > 0 {
            // With several scopes, the client's share of the space was used up before every scope's
            // first page was leased.
            state.release_lease(lease);
            return Err(state.leases.share_exceeded(client, capacity));
        }
        state.unsynced.uses = true;
        drop(state);
        if taken < runs.len() {
            self.counters.leases_shortened.add(1);
        }
        runs.iter().for_each(|run| self.index.touch(*run, tick));
        Ok(Leased { pages: within, lease: LeaseNumber(lease) })
    }

    /// Looks up `keys`. Returns the runs of the leading pages or, in an unchained scope, of all
    /// pages present.
    fn walk(&self, scope: ScopeRef, keys: &[&[u8]]) -> Vec<MatchedRun> {
        let walk = |from: usize| {
            let keys = &keys[from..];
            self.index.walk(scope.slot, &ScopedKeys { scope: &scope.id, keys })
        };
        let mut steps = walk(0);
        if scope.chained {
            return self.visible(true, steps);
        }
        let after = |steps: &[MatchedRun], from: usize| {
            steps.last().map_or(from, |step| from + (step.at + step.pages) as usize)
        };
        // Continues after the first missing key.
        let mut from = after(&steps, 0) + 1;
        while from < keys.len() {
            let further = walk(from);
            let next = after(&further, from) + 1;
            steps.extend(
                further.into_iter().map(|step| MatchedRun { at: step.at + from as u32, ..step }),
            );
            from = next;
        }
        self.visible(false, steps)
    }
}

/// A run that holds requested pages. Ordered by run id, then by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LeasedRun {
    run: RunId,
    /// Position, in the requested keys, of the first requested page that the run holds.
    at: u32,
}

/// Returns the number of leading pages before the first missing page.
fn leading(steps: &[MatchedRun]) -> usize {
    steps.iter().fold(0, |pages, step| {
        if step.at as usize == pages { pages + step.pages as usize } else { pages }
    })
}
