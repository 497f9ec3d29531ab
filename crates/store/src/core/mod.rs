//! The owner's half of a store: which pages exist and where they are stored, which puts get space,
//! which pages are evicted.

mod absence;
mod commit;
mod durability;
mod limits;
mod listing;
mod local_catalog;
mod maintenance;
mod plan;
mod recovery;
mod reservations;
mod reserve;
mod scopes;
mod space;
mod stats;

pub use local_catalog::LocalCatalog;
pub use maintenance::verify::{DamagedPage, Verification};
pub use space::capacity::CapacityChange;

use crate::admission::{Admission, WriteBudget};
use crate::budget::Budget;
use crate::directory::Directory;
use crate::eviction::{Eviction, RecencyClock, Resident};
use crate::lease::LeaseTable;
use crate::options::{Durability, Options};
use crate::rounds::Rounds;
use crate::stats::{AdmissionStats, CatalogStats, Counters, IoStats, LsmEstimate, VolumeStats};
use absence::Absence;
use absence::hidden::Hidden;
use limits::quota::Usage;
use limits::retention::{Retention, StoreClock};
use maintenance::space::SpaceMaintenance;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use recovery::drain::Draining;
use reservations::{ReservationLog, Reservations};
use ritornello_format::{
    Error, ErrorKind, Extent, Manifest, PageHash, Place, Result, ScopeSlot, SegmentId, UNIT,
};
use ritornello_index::{PrefixIndex, Removed, RunId};
use ritornello_medium::Medium;
use ritornello_volume::ForkSafeLock;
use ritornello_volume::segments::Segments;
use ritornello_volume::space::Space;
use scopes::Scopes;
use space::limbo::Limbo;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Identifies the calling process: the owner, or a connected client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

impl ClientId {
    /// The owner's own process. Its reservations are not logged: after an unclean end the next
    /// owner drains all free space.
    pub const LOCAL: Self = Self(0);
}

/// Maximum runs handled under one hold of the owner's lock. A waiting thread is delayed by at most
/// one step, independent of the store's size.
const STEP_RUNS: usize = 1024;

/// Maximum time that closing waits for a change of the manifest.
const SHAPE_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns whether the client process with this name may still be writing.
pub type ClientAlive = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The core of a store. The caller holds the directory's lock for as long as it lives.
pub struct StoreCore {
    /// The index is dropped before the medium: RocksDB uses the path of [`Medium::host_path`] until
    /// it is closed.
    index: Arc<dyn PrefixIndex>,
    directory: Directory,
    options: Options,
    manifest: RwLock<Arc<Manifest>>,
    budget: RwLock<Budget>,
    /// Locked while the capacity or the directories change. First in the lock order.
    shape: Mutex<()>,
    medium: Arc<dyn Medium>,
    segments: Arc<Segments>,
    scopes: Scopes,
    clock: RecencyClock,
    time: StoreClock,
    /// Never locked together with another lock.
    admission: Mutex<Admission>,
    started: Instant,
    state: Mutex<State>,
    log: Mutex<ReservationLog>,
    /// Locked while a segment file is created.
    growing: Mutex<()>,
    /// Locked while a scope's own eviction policy is built. Before `state` in the lock order.
    quotas: Mutex<()>,
    /// Signals that a scope's own eviction policy is complete, or removed.
    scope_eviction_built: Condvar,
    /// Signals that a removal is completely applied to `state`.
    removals_applied: Condvar,
    /// Signals that withheld space was freed.
    drained: Condvar,
    is_draining: AtomicBool,
    /// When a drain last failed.
    drain_failed: Mutex<Option<Instant>>,
    hidden: Hidden,
    rounds: Arc<Rounds>,
    next_generation: AtomicU64,
    periodic: BackgroundThread,
    maintenance: SpaceMaintenance,
    alive: ClientAlive,
    closed: AtomicBool,
    counters: Counters,
    opened: OpenReport,
}

/// State that must change together: space, eviction, leases, reservations. Never locked across I/O,
/// and not taken by a probe.
pub(crate) struct State {
    space: Space,
    eviction: Box<dyn Eviction>,
    retention: Retention,
    usage: Usage,
    leases: LeaseTable,
    reservations: Reservations,
    clients: HashMap<ClientId, String>,
    limbo: Limbo,
    draining: Draining,
    absence: Absence,
    /// Removals made by the index and not yet completely applied to this state.
    removals_under_way: usize,
    /// Scopes whose runs the index is removing.
    dropping: usize,
    /// Whether pages were used since the last durable record of uses.
    touched: bool,
    /// Runs committed before the page they follow, by that page: the hash of the run's first page.
    waiting_children: HashMap<(ScopeSlot, PageHash), PageHash>,
    /// Segments with commits since the last sync.
    dirty: BTreeSet<SegmentId>,
    /// Space whose bytes failed verification. Bounded: above the limit the oldest extents are
    /// released first.
    quarantine: std::collections::VecDeque<Extent>,
    quarantine_units: u64,
    /// Volumes whose growth failed, with the time of the next attempt.
    growth_paused: Vec<(u8, Instant)>,
    /// Whether the index refused a run because its memory was full, and no eviction has followed.
    index_full: bool,
    /// When `index_full` was last logged.
    index_full_logged_at: Option<Instant>,
}

/// A background thread and its wake-up flag.
#[derive(Default)]
pub(crate) struct BackgroundThread {
    wakeup: ForkSafeLock<WakeState>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

#[derive(Default)]
struct WakeState {
    woken: bool,
    stopping: bool,
}

impl BackgroundThread {
    fn wake(&self) {
        self.wakeup.lock().woken = true;
        self.wakeup.wake_one();
    }

    /// Sleeps until woken, at most `long`. Returns whether the thread must end. May wake
    /// spuriously.
    fn sleep(&self, long: Duration) -> bool {
        let mut wakeup = self.wakeup.lock();
        if !wakeup.woken && !wakeup.stopping {
            wakeup = self.wakeup.wait_for(wakeup, long);
        }
        wakeup.woken = false;
        wakeup.stopping
    }

    /// Stops the thread and joins it, unless it is the calling thread.
    fn stop(&self) {
        self.wakeup.lock().stopping = true;
        self.wakeup.wake_one();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of that thread was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// Duration and dropped pages of the opening.
#[derive(Default)]
struct OpenReport {
    millis: f64,
    dropped: BTreeMap<String, u64>,
}

impl StoreCore {
    /// The segment files.
    #[must_use]
    pub fn segments(&self) -> Arc<Segments> {
        Arc::clone(&self.segments)
    }

    /// The current manifest.
    #[must_use]
    pub fn manifest(&self) -> Arc<Manifest> {
        Arc::clone(&self.manifest.read())
    }

    /// The division of the capacity.
    fn budget(&self) -> Budget {
        *self.budget.read()
    }

    /// Returns a catalog for one client. `name` is the client's lock file, or empty for the owner's
    /// process.
    #[must_use]
    pub fn catalog_for(self: &Arc<Self>, client: ClientId, name: &str) -> LocalCatalog {
        self.state.lock().clients.insert(client, name.to_owned());
        LocalCatalog::new(Arc::clone(self), client)
    }

    /// Handles the disconnection of a client: its leases end, and its reservations are withheld
    /// until the process is proven dead or a client with its name aborts them.
    pub fn client_left(&self, client: ClientId) {
        let mut state = self.state.lock();
        let name = state.clients.remove(&client).unwrap_or_default();
        let freed = state.leases.drop_client(client);
        state.add_to_limbo(freed);
        let ids: Vec<u64> = state
            .reservations
            .open
            .iter()
            .filter(|(_, reservation)| reservation.client == client)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some(reservation) = state.reservations.open.remove(&id) {
                let extents = reservation.runs.into_iter().flat_map(|run| run.place.extents);
                let withheld = reservations::Withheld {
                    client: name.clone(),
                    extents: extents.collect(),
                    absent: Vec::new(),
                };
                state.reservations.withheld.insert(id, withheld);
            }
        }
        drop(state);
        self.periodic.wake();
    }

    /// Makes everything durable, stops the background threads and refuses later calls.
    ///
    /// # Errors
    /// `Fatal` if the last sync failed; `Retry` if an earlier sync has not ended; file-system
    /// errors of the manifest.
    pub fn close(&self) -> Result<()> {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.maintenance.stop();
            self.periodic.stop();
        }
        match self.make_durable() {
            // An earlier close has completed.
            Err(error) if error.kind() == ErrorKind::Closed => self.rounds.check(),
            durable => durable.and_then(|()| self.note_clean()),
        }
    }

    /// Records a clean end in the manifest, unless a write of this owner may be in flight.
    fn note_clean(&self) -> Result<()> {
        let until = Instant::now() + SHAPE_TIMEOUT;
        let Some(_shape) = self.shape.try_lock_until(until) else { return Ok(()) };
        // A call made before the close may still lead a round. If the round fails, the end is not
        // clean.
        match self.rounds.end(until) {
            Err(error) if error.kind() == ErrorKind::Retry => return Ok(()),
            ended => ended?,
        }
        if !self.is_at_rest() {
            return Ok(());
        }
        self.scopes.compact();
        let manifest = Manifest { clean: true, ..Manifest::clone(&self.manifest()) };
        self.directory().write_manifest(&manifest)
    }

    /// Returns whether no write of this owner, or of a dead process, may be in flight. The store is
    /// closed, so no new reservation is made.
    fn is_at_rest(&self) -> bool {
        let state = self.state.lock();
        let own = |open: &reservations::Reservation| open.client == ClientId::LOCAL;
        // An absent segment has not been drained.
        state.draining.is_empty()
            && state.absence.is_empty()
            && !state.reservations.open.values().any(own)
    }

    /// Replaces the manifest. The caller holds `shape`.
    ///
    /// # Errors
    /// File-system errors. After a `Fatal` error the next owner may read either manifest: the store
    /// is poisoned, so that no acknowledgement depends on one of the two.
    fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        let written = self.directory().write_manifest(manifest);
        written.inspect_err(|error| self.rounds.poison_if_fatal(error))
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the store is closed: open it again"));
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<()> {
        self.check_open()?;
        match self.rounds.cause() {
            None => Ok(()),
            Some(cause) => Err(durability::poisoned::refusal(cause)),
        }
    }

    fn durable_puts(&self) -> bool {
        self.options.durability == Durability::Durable
    }

    /// The owner's statistics.
    ///
    /// # Errors
    /// File-system errors.
    pub fn stats(&self) -> Result<CatalogStats> {
        let index = self.index.stats();
        let existing = self.segments.listable().len() as u64;
        let allocated = self.segments.allocated_bytes() + index.disk_bytes;
        let report = self.segments.report();
        let (manifest, budget) = (self.manifest(), self.budget());
        let admission = self.admission_stats();
        let mut health = self.health();
        let state = self.state.lock();
        let space = state.space.stats();
        health.reserve_bytes = space.reserve_units * UNIT;
        health.sealed_bytes = state.space.sealed().len() as u64 * budget.segment_bytes;
        let paths = paths(&manifest, &state);
        let absent_space = self.absent_space(&state);
        Ok(CatalogStats {
            uuid: manifest.uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
            owner_epoch: manifest.owner_epoch,
            owner_pid: std::process::id(),
            durability: self.options.durability.word().to_owned(),
            index: manifest.index.clone(),
            capacity_bytes: budget.capacity,
            allocated_bytes: allocated,
            segment_bytes: budget.segment_bytes,
            segments: existing,
            segments_max: u64::from(budget.segments_max),
            files: existing + index.files + 5 + manifest.volumes.len() as u64,
            used_bytes: (state.space.total_units()
                - state.space.free_units()
                - state.space.sealed_units())
            .saturating_sub(
                state.limbo.units()
                    + state.quarantine_units
                    + state.reservations.units()
                    + state.draining.units(),
            ) * UNIT,
            free_bytes: state.space.free_units() * UNIT,
            limbo_bytes: state.limbo.units() * UNIT,
            deferred_bytes: state.leases.deferred_units() * UNIT,
            reserved_bytes: (state.reservations.units() + state.draining.units()) * UNIT,
            quarantined_bytes: state.quarantine_units * UNIT,
            free_extents: space.free_extents.clone(),
            extents_per_run: space.extents_per_run(),
            eviction: state.eviction.measured(),
            health,
            paths,
            scopes: self.scopes.len() as u64,
            largest_scopes: self.largest_scopes(&state),
            retained_bytes: state.retention.units() * UNIT,
            admission,
            runs: index.runs,
            pages: index.pages,
            index_memory_bytes: index.memory_bytes,
            index_memory_max_bytes: index.memory_bytes_max,
            index_memory_percent: index.memory_percent,
            index_as_lsm: (manifest.index != "lsm")
                .then(|| LsmEstimate::of(index.runs, index.pages, budget.index_bytes)),
            index_disk_bytes: index.disk_bytes,
            index_written_bytes: index.written_bytes,
            index_tuning: self.index.tuning().map(Into::into),
            leases: state.leases.len() as u64,
            clients: state.clients.keys().filter(|c| **c != ClientId::LOCAL).count() as u64,
            reservations: state.reservations.open.len() as u64,
            io: IoStats {
                mode: report.mode.word().to_owned(),
                direct: report.direct,
                huge_pages: report.backing.is_huge(),
                file_system: report.file_systems.join(", "),
                warnings: report.advice(),
            },
            poisoned: self.rounds.cause().map(str::to_owned),
            absent_space,
            counters: self.counters.snapshot(),
            open_ms: self.opened.millis,
            dropped_at_open: self.opened.dropped.clone(),
        })
    }
}

impl StoreCore {
    /// Calls `step` under the owner's lock until it returns false, and passes the lock to waiting
    /// threads in between.
    fn in_steps(&self, mut step: impl FnMut(&mut State) -> bool) {
        loop {
            let mut state = self.state.lock();
            let more = step(&mut state);
            MutexGuard::unlock_fair(state);
            if !more {
                return;
            }
        }
    }

    /// Applies removals from the index, as [`State::apply_removals`] does, and passes the lock on
    /// between steps of [`STEP_RUNS`]. Keeps the given order, because leaves come first.
    fn apply_removals(
        &self,
        state: &mut MutexGuard<'_, State>,
        removed: Vec<Removed>,
        damaged_run: Option<RunId>,
    ) -> (u64, Vec<Extent>) {
        let (mut pages, mut damaged_extents) = (0, Vec::new());
        let mut removed = removed.into_iter().peekable();
        state.removals_under_way += 1;
        while removed.peek().is_some() {
            let (more, found) =
                state.apply_removals(removed.by_ref().take(STEP_RUNS).collect(), damaged_run);
            pages += more;
            damaged_extents.extend(found);
            if removed.peek().is_some() {
                MutexGuard::bump(state);
            }
        }
        state.removals_under_way -= 1;
        self.removals_applied.notify_all();
        (pages, damaged_extents)
    }

    fn admission_stats(&self) -> AdmissionStats {
        let admission = self.admission.lock();
        let a_day = |budget: WriteBudget| (budget.bytes_per_second() * 86_400.0).round() as u64;
        AdmissionStats {
            mode: self.options.admission.word().to_owned(),
            policy: admission.policy().word().to_owned(),
            budget_bytes_per_day: admission.budget().map(a_day),
            available_bytes: admission.available_bytes(),
            ghost_pages: admission.ghost_pages() as u64,
        }
    }
}

impl State {
    /// Applies removals from the index to eviction, usage and retention. Extents go into limbo, or
    /// are deferred while leased. Returns the pages removed, and instead of freeing them the
    /// extents of the run `damaged_run`, whose bytes failed verification.
    fn apply_removals(
        &mut self,
        removed: Vec<Removed>,
        damaged_run: Option<RunId>,
    ) -> (u64, Vec<Extent>) {
        let (mut pages, mut damaged_extents) = (0, Vec::new());
        for gone in removed {
            pages += u64::from(gone.pages);
            self.usage.remove(&gone);
            if gone.whole {
                self.eviction.remove(gone.run);
                self.retention.release(gone.run);
            } else {
                self.eviction.shrink(gone.run, gone.pages);
                let units = gone.extents.iter().map(|extent| u64::from(extent.units)).sum();
                self.retention.shrink(gone.run, if gone.pages > 0 { units } else { 0 });
            }
            let extents = self.in_present_segments(gone.extents);
            if damaged_run == Some(gone.run) {
                damaged_extents.extend(extents);
            } else {
                let free = self.leases.defer(gone.run, extents);
                self.add_to_limbo(free);
            }
        }
        (pages, damaged_extents)
    }

    /// Refuses a commit or abort of another client's reservation. A withheld reservation may be
    /// aborted by a client with the name that made it, and by the owner, which may have been that
    /// client at the time.
    fn check_reservation_owner(&self, client: ClientId, id: u64) -> Result<()> {
        let theirs = match self.reservations.open.get(&id) {
            Some(reservation) => reservation.client == client,
            None => self.reservations.withheld.get(&id).is_none_or(|withheld| {
                let name = self.clients.get(&client);
                client == ClientId::LOCAL || name == Some(&withheld.client)
            }),
        };
        if theirs {
            return Ok(());
        }
        Err(Error::invalid("this reservation is another client's: commit or abort your own")
            .with("reservation", id))
    }
}

/// Statistics of the directories in use.
fn paths(manifest: &Manifest, state: &State) -> Vec<VolumeStats> {
    let (segments, used) = (state.space.segments_by_volume(), state.space.used_by_volume());
    let there = (0..=u8::MAX).zip(&manifest.volumes).filter(|(_, volume)| !volume.is_retired());
    there
        .map(|(number, volume)| {
            let at = usize::from(number);
            VolumeStats {
                dir: volume.dir.clone(),
                draining: volume.draining,
                segments: segments.get(at).copied().unwrap_or(0).into(),
                used_bytes: used.get(at).copied().unwrap_or(0) * UNIT,
                absent: state.absence.volumes.get(&number).cloned(),
            }
        })
        .collect()
}

/// Describes a run to an eviction policy.
fn resident(
    run: RunId,
    parent: Option<(RunId, u32)>,
    pages: &[PageHash],
    place: &Place,
) -> Resident {
    Resident {
        run,
        key: pages.first().map_or(0, |page| page.low()),
        parent,
        pages: pages.len() as u32,
        page_units: place.page_units,
        header_units: place.header_units,
    }
}

impl std::fmt::Debug for StoreCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreCore").field("dir", &self.options.dir).finish_non_exhaustive()
    }
}
