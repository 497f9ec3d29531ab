//! Reclaiming space: eviction, the limbo of freed space, and the sync that empties it.
//!
//! Space freed by an eviction is not reused before the journal record that frees it is durable.
//! Otherwise a crash could revive entries whose place holds another run: the checksums would catch
//! that, but a probe would have promised a hit.

use super::hidden::Hidden;
use super::retention::Retention;
use super::{ClientId, STEP_RUNS, State, StoreCore};
use crate::eviction::{EvictionContext, Victim};
use crate::lease::LeaseTable;
use parking_lot::MutexGuard;
use ritornello_format::{Error, Extent, Result, ScopeSlot, SegmentId, UNIT};
use ritornello_index::{PrefixIndex, RunId};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum units evicted under one hold of the owner's lock, which bounds the delay of waiting
/// threads.
pub(super) const STEP_UNITS: u64 = (16 << 20) / UNIT;
/// Longest pause between two passes of the upkeep thread.
const UPKEEP_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time that a sync waits for earlier ones.
const SYNC_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest time until uses of pages are durable.
const RECENCY_INTERVAL: Duration = Duration::from_secs(60);
/// Unsynced bytes of the index journal that trigger a sync.
pub(super) const PENDING_BYTES_MAX: u64 = 16 << 20;

/// What an eviction policy may ask about runs.
pub(super) struct Pins<'a> {
    pub(super) leases: &'a LeaseTable,
    pub(super) retention: &'a Retention,
    /// Evicting a run in absent space would free no present space.
    pub(super) hidden: &'a Hidden,
    pub(super) index: &'a dyn PrefixIndex,
}

impl EvictionContext for Pins<'_> {
    fn is_protected(&self, run: RunId) -> bool {
        self.leases.pinned(run) || self.retention.is_retained(run) || self.hidden.is_absent(run)
    }
    fn page_key(&self, run: RunId, page: u32) -> u64 {
        self.index.page(run, page).map_or(0, |page| page.low())
    }
}

impl StoreCore {
    /// Evicts about `units` from segments that are not closed, leaves first, and passes the lock on
    /// between steps. Returns whether any page was evicted.
    pub(super) fn evict(&self, state: &mut MutexGuard<'_, State>, units: u64) -> bool {
        let (mut left, mut any) = (units, false);
        while left > 0 {
            if any {
                MutexGuard::bump(state);
            }
            let leaving = state.leaving_units();
            let State { eviction, leases, retention, .. } = &mut **state;
            let hidden = &self.hidden;
            let held = Pins { leases, retention, hidden, index: self.index.as_ref() };
            let victims = eviction.victims(left.min(STEP_UNITS), &held);
            if !self.remove_victims(state, &victims, None) {
                break;
            }
            any = true;
            // Space in closed segments does not count, because no put can use it.
            let gone: u64 = victims.iter().map(|victim| victim.units).sum();
            left = left.saturating_sub(gone.saturating_sub(state.leaving_units() - leaving));
        }
        any
    }

    /// Removes the victims chosen by the store's eviction policy, or by that of the scope in
    /// `slot`. Returns whether any page was removed.
    pub(super) fn remove_victims(
        &self,
        state: &mut State,
        victims: &[Victim],
        slot: Option<ScopeSlot>,
    ) -> bool {
        let mut pages = 0;
        for victim in victims {
            let removed = self.index.truncate(victim.run, victim.keep_pages);
            if removed.is_empty() {
                // Unknown to the index: its policy must forget the run, or would choose it again.
                match slot {
                    Some(slot) => state.usage.forget_run(slot, victim.run),
                    None => state.eviction.remove(victim.run),
                }
            }
            pages += state.apply_removals(removed, None).0;
        }
        self.counters.pages_evicted.add(pages);
        self.wake_if_limbo_is_large(state);
        pages > 0
    }

    pub(super) fn wake_if_limbo_is_large(&self, state: &State) {
        if state.limbo.units() * 2 > state.space.reserve_units() {
            self.upkeep.wake();
        }
    }

    /// Syncs the data, then the index, then frees the limbo. Requests that arrive during a round
    /// share the next one. Puts continue meanwhile; the next round records what they commit after
    /// the data sync began.
    ///
    /// # Errors
    /// `Fatal`: the store is poisoned. `Retry` if no round could begin.
    pub(super) fn make_durable(&self) -> Result<()> {
        self.make_durable_by(Instant::now() + SYNC_TIMEOUT)
    }

    /// Like [`StoreCore::make_durable`], if earlier rounds end by `deadline`.
    ///
    /// # Errors
    /// `Retry` if they do not.
    pub(super) fn make_durable_by(&self, deadline: Instant) -> Result<()> {
        self.rounds.join(deadline, || self.sync_all())
    }

    /// Runs one sync round.
    fn sync_all(&self) -> Result<()> {
        let started = Instant::now();
        // Taken before the index seals its records, so that the records which free this space are
        // among those sealed.
        let (limbo, returned) = {
            let mut state = self.state.lock();
            (state.limbo.take(), state.draining.take_undurable())
        };
        let synced = self.index.sync_after(&|| self.sync_dirty());
        // If the removals of this space are durable, it may be drained.
        self.state.lock().draining.put_back(returned, synced.is_ok());
        if let Err(error) = synced {
            self.state.lock().limbo.put_back(limbo);
            return Err(error.with("store", self.options.dir.display()));
        }
        let mut limbo = limbo.chunks(STEP_RUNS);
        self.in_steps(|state| {
            let Some(extents) = limbo.next() else { return false };
            self.free(state, extents);
            state.limbo.remove(extents);
            true
        });
        self.counters.syncs.add(1);
        self.counters.sync_micros.add(started.elapsed().as_micros() as u64);
        Ok(())
    }

    /// Syncs the data of all runs in the index. Only one thread may do this at a time: segments
    /// that another thread took are no longer dirty, and not durable either.
    fn sync_dirty(&self) -> Result<()> {
        let dirty = std::mem::take(&mut self.state.lock().dirty);
        let segments: Vec<_> = dirty.iter().copied().collect();
        let synced = self.segments.sync(&segments);
        if synced.is_err() {
            self.state.lock().dirty.extend(dirty);
        }
        synced
    }

    /// Syncs `segments` between two rounds.
    ///
    /// # Errors
    /// As of [`StoreCore::make_durable`].
    pub(super) fn sync_segments(&self, segments: &[SegmentId]) -> Result<()> {
        let _turn = self.rounds.between(Instant::now() + SYNC_TIMEOUT)?;
        self.rounds.check()?;
        self.segments.sync(segments).inspect_err(|error| self.rounds.poison(error))
    }

    /// Returns extents to the allocator. A double free is a bug: the space is leaked rather than
    /// allocated twice.
    pub(super) fn free(&self, state: &mut State, extents: &[Extent]) {
        for extent in extents {
            if let Err(error) = state.space.free(std::slice::from_ref(extent)) {
                tracing::error!(%error, "freed twice: the extent is left out of use until reopened");
            }
        }
    }

    /// Quarantines space whose bytes failed verification. Above one sixteenth of the store, the
    /// oldest extents go into limbo.
    pub(super) fn quarantine(&self, state: &mut State, extents: Vec<Extent>) {
        let bound = state.space.capacity_units() / 16;
        state.quarantine_units += extents.iter().map(|e| u64::from(e.units)).sum::<u64>();
        state.quarantine.extend(extents);
        while state.quarantine_units > bound {
            let Some(oldest) = state.quarantine.pop_front() else { break };
            state.quarantine_units -= u64::from(oldest.units);
            state.limbo.add([oldest]);
        }
    }

    /// Starts the thread that syncs in the background and drains the space of dead clients. It ends
    /// when the core is closed or dropped.
    pub(super) fn start_upkeep(self: &Arc<Self>) -> Result<()> {
        let core = Arc::downgrade(self);
        let thread = std::thread::Builder::new()
            .name("ritornello-upkeep".to_owned())
            .spawn(move || upkeep(&core))
            .map_err(|e| Error::retry("no thread for the store's upkeep").because(e))?;
        *self.upkeep.thread.lock() = Some(thread);
        Ok(())
    }

    /// Runs one pass of upkeep and maintenance, for a store that was opened without background
    /// threads.
    pub fn run_once(self: &Arc<Self>) {
        self.run_upkeep_once(&mut Instant::now());
        if let Err(error) = self.reattach_absent() {
            tracing::warn!(%error, "absent volumes could not be taken back for now");
        }
        self.start_drain();
        if self.needs_maintenance()
            && let Err(error) = self.maintain_space(&self.maintenance.control())
        {
            tracing::warn!(%error, "segments that are to go could not be emptied for now");
        }
    }

    fn run_upkeep_once(self: &Arc<Self>, last_sync: &mut Instant) {
        let mut state = self.state.lock();
        let (freed, expired) = state.leases.expire();
        state.add_to_limbo(freed);
        self.counters.leases_expired.add(expired);
        let names: Vec<(u64, String)> = state
            .reservations
            .withheld
            .iter()
            .map(|(id, withheld)| (*id, withheld.client.clone()))
            .collect();
        let pressing = state.limbo.units() * 2 > state.space.reserve_units();
        let busy = !state.dirty.is_empty() || state.limbo.has_waiting();
        let touched = state.touched && last_sync.elapsed() >= RECENCY_INTERVAL;
        // With other work pending, its sync records the uses, too.
        state.touched &= !(busy || touched);
        drop(state);
        for (id, name) in names {
            if !(self.alive)(&name) {
                tracing::info!(client = %name, "a client died while writing: its space is drained");
                self.abandon(id, Abandoned::ByDeath);
            }
        }
        self.retry_drain();
        if self.rounds.cause().is_some() {
            return;
        }
        self.maintain_retention();
        self.maintain_index_memory();
        let index = self.index.stats();
        let (pending, most) = (index.pending_bytes, pending_max(index.memory_bytes_max));
        let due = last_sync.elapsed() >= self.options.sync_interval || pending > most;
        if touched || ((busy || pending > 0) && (pressing || due)) {
            // An error has poisoned the store, and its next writer receives it.
            let _ = self.make_durable();
            *last_sync = Instant::now();
        }
        if let Err(error) = self.index.maintain_after(&|| self.make_durable()) {
            self.rounds.poison_if_fatal(&error);
            tracing::error!(%error, "the index could not be tidied");
        }
    }

    /// Frees the space of a reservation that will not be written: immediately, or after a drain if
    /// its client died.
    pub(super) fn abandon(&self, id: u64, by: Abandoned) {
        let (extents, logged) = {
            let mut state = self.state.lock();
            if let Some(withheld) = state.reservations.withheld.remove(&id) {
                (withheld.extents, true)
            } else if let Some(reservation) = state.reservations.open.remove(&id) {
                self.counters.runs_abandoned.add(reservation.runs.len() as u64);
                let freed = state.leases.release(reservation.lease.0);
                state.add_to_limbo(freed);
                let extents = reservation.runs.into_iter().flat_map(|run| run.place.extents);
                (extents.collect(), reservation.client != ClientId::LOCAL)
            } else {
                return;
            }
        };
        // Logged before the space is freed: a record that came later could withhold space that has
        // a new user.
        if logged {
            self.log.lock().note_ended(id);
        }
        let mut state = self.state.lock();
        match by {
            // No run and no journal record ever named this space, so it skips limbo.
            Abandoned::ByCall => self.free(&mut state, &extents),
            Abandoned::ByDeath => state.draining.add(extents),
        }
    }
}

/// How a reservation was abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abandoned {
    /// Its writer aborted it, and has no write in flight.
    ByCall,
    /// Its writer died, and its last writes may be in flight.
    ByDeath,
}

/// Journal bytes that trigger a sync of an index with a memory ceiling: a quarter of those that it
/// lets wait.
fn pending_max(ceiling: u64) -> u64 {
    if ceiling == 0 { PENDING_BYTES_MAX } else { PENDING_BYTES_MAX.min(ceiling / 64) }
}

const _: () = assert!(UNIT == 4096, "the arithmetic above counts 4 KiB units");

fn upkeep(core: &Weak<StoreCore>) {
    let mut last_sync = Instant::now();
    loop {
        let Some(core) = core.upgrade() else { return };
        if core.upkeep.sleep(UPKEEP_INTERVAL) {
            return;
        }
        core.run_upkeep_once(&mut last_sync);
    }
}
