//! Becoming the owner: read what is on disk, believe what adds up, drop the rest.

use super::capacity::{Reshape, share_out};
use super::caretaker::Caretaker;
use super::limbo::Limbo;
use super::quota::Usage;
use super::reservations::{ReservationLog, Reservations};
use super::retention::{RETENTION_MAX, Retention, StoreClock};
use super::scopes::Scopes;
use super::{Alive, ClientId, Engine, OpenReport, State, Upkeep, resident};
use crate::admission::Admission;
use crate::budget::Budget;
use crate::conversion::{convert, open_index, tidy};
use crate::directory::Directory;
use crate::eviction::{RecencyClock, Resident};
use crate::lease::LeaseTable;
use crate::options::{IndexKind, Options};
use crate::rounds::Rounds;
use crate::stats::Counters;
use parking_lot::{Condvar, Mutex, RwLock};
use ritornello_format::{
    Error, ErrorKind, Extent, Manifest, PageHash, Result, ScopeRegistry, ScopeSlot, UNIT, units_of,
};
use ritornello_index::{PrefixIndex, RunId, RunView};
use ritornello_medium::Medium;
use ritornello_volume::segments::Segments;
use ritornello_volume::space::{Space, SpaceConfig};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

/// Scopes without pages are forgotten at open if there are more than this: every epoch is one. Not
/// sooner, because a lost index leaves all scopes without pages, and salvage needs them.
const SCOPES_KEPT: usize = 1024;
/// A ghost list is as long as the store would be full of pages of this length.
const GHOST_PAGE_BYTES: u64 = 64 << 10;
/// Part of the space that is kept free, in percent.
const RESERVE_PERCENT: u8 = 5;

impl Engine {
    /// Opens the store in `options.dir`, or makes one. The caller holds the directory's lock.
    /// `alive` says whether the client process of a name may still be writing.
    ///
    /// # Errors
    /// `Invalid` for options that do not fit, a directory that is no store, or a file system that
    /// cannot be trusted; `Fatal` for a damaged manifest. Damage to anything else is not an
    /// error: what cannot be believed is dropped and counted.
    pub fn open(medium: Arc<dyn Medium>, options: &Options, alive: Alive) -> Result<Arc<Self>> {
        let started = Instant::now();
        let directory = Directory::new(Arc::clone(&medium), &options.dir);
        let mut manifest = directory.manifest_to_resize(options)?;
        let budget = Budget::divide(manifest.capacity, manifest.segment_bytes)?;
        let segments = directory.segments(&manifest, options.io)?;
        check_trust(&segments)?;
        let kind = take_index(&medium, &directory, &mut manifest, options)?;
        manifest.epoch += 1;
        manifest.owner = owner_line();
        directory.write_manifest(&manifest)?;
        let index = open_index(&medium, &directory.index(), kind, &budget, options.index_memory)?;
        let mut dropped = BTreeMap::new();
        let registry = match directory.registry()? {
            Some(registry) => registry,
            None => {
                tracing::warn!(dir = %options.dir.display(), "the scope registry is damaged: starting without any");
                *dropped.entry("scope_registry".to_owned()).or_default() += 1;
                never_reuse_slots(index.as_ref())
            }
        };
        let scopes = Scopes::new(directory.clone(), registry, options.codec)?;
        let mut space = Space::new(SpaceConfig {
            segment_units: (manifest.segment_bytes / UNIT) as u32,
            volumes: manifest.volumes.iter().map(|_| u32::MAX).collect(),
            reserve_percent: RESERVE_PERCENT,
        })?;
        let existing = segments.existing()?;
        for &segment in &existing {
            match segments.mend(segment) {
                Ok(false) => {}
                Ok(true) => *dropped.entry("segments_cut_short".to_owned()).or_default() += 1,
                Err(error) => {
                    tracing::warn!(%error, segment = segment.number(), "a segment cannot be used");
                    continue;
                }
            }
            if let Err(error) = space.add_segment(segment) {
                tracing::warn!(%error, "a segment file outside the budget is left alone");
            }
        }
        let kept = believe(index.as_ref(), &scopes, &mut space, &manifest, &mut dropped);
        if scopes.len() > SCOPES_KEPT {
            let used: HashSet<ScopeSlot> = kept.iter().map(|kept| kept.scope).collect();
            scopes.forget(|slot| !used.contains(&slot))?;
        }
        let clock = RecencyClock::starting_after(kept.iter().map(|run| run.recency).max());
        let mut eviction = options.eviction.build();
        let mut usage = Usage::new(scopes.with_quota());
        let time = StoreClock::starting_at(index.clock(), options.wall_clock);
        let retention = restore(eviction.as_mut(), &mut usage, time.now(), kept);
        let mut withheld = ReservationLog::outstanding(&directory.reservation_log()?);
        withheld.retain(|_, held| alive(&held.client));
        for held in withheld.values_mut() {
            // One by one: a part that a committed run holds by now is no reason to give up the rest.
            held.extents.retain(|extent| space.mark(std::slice::from_ref(extent)).is_ok());
        }
        // What is emptiest is known now.
        share_out(&mut space, &manifest, &budget);
        let log = ReservationLog::restart(directory.clone(), withheld.clone())?;
        for (reason, count) in &dropped {
            tracing::warn!(reason, count, dir = %options.dir.display(), "dropped at open");
        }
        let engine = Arc::new(Self {
            options: options.clone(),
            next_generation: AtomicU64::new((u64::from(manifest.epoch) << 32) | 1),
            manifest: RwLock::new(Arc::new(manifest)),
            budget: RwLock::new(budget),
            shape: Mutex::new(()),
            medium,
            segments,
            index,
            scopes,
            clock,
            time,
            admission: Mutex::new(Admission::new(
                options.admission,
                options.write_budget,
                usize::try_from(budget.capacity / GHOST_PAGE_BYTES).unwrap_or(usize::MAX),
            )),
            started,
            state: Mutex::new(State {
                space,
                eviction,
                retention,
                usage,
                leases: LeaseTable::new(),
                reservations: Reservations { open: HashMap::new(), withheld },
                clients: HashMap::from([(ClientId::LOCAL, String::new())]),
                limbo: Limbo::default(),
                settling: 0,
                touched: false,
                waiting: HashMap::new(),
                // What a former owner wrote last may be on no disk yet.
                dirty: existing.into_iter().collect(),
                quarantine: VecDeque::new(),
                quarantine_units: 0,
                growth_paused: Vec::new(),
                index_full: false,
                index_full_said: None,
            }),
            log: Mutex::new(log),
            growing: Mutex::new(()),
            quotas: Mutex::new(()),
            formed: Condvar::new(),
            rounds: Rounds::default(),
            upkeep: Upkeep::default(),
            caretaker: Caretaker::default(),
            alive,
            closed: AtomicBool::new(false),
            counters: Counters::default(),
            opened: OpenReport { millis: started.elapsed().as_secs_f64() * 1e3, dropped },
        });
        engine.keep_to_quotas();
        if options.upkeep {
            engine.start_upkeep()?;
        }
        // Before the caretaker may be at work on what a former owner left.
        engine.take_capacity()?;
        if options.upkeep {
            engine.start_caretaker()?;
        }
        Ok(engine)
    }
}

impl Engine {
    /// Resizes the store to what it was opened with. What takes long is done in the background.
    fn take_capacity(&self) -> Result<()> {
        let Some(capacity) = self.options.capacity else { return Ok(()) };
        if capacity == self.budget().capacity {
            return Ok(());
        }
        match self.reshape(&Reshape::Capacity(capacity), Duration::ZERO) {
            Err(error) if error.kind() == ErrorKind::Retry => Ok(()),
            result => result,
        }
        .inspect_err(|_| {
            // Whoever opens it again does so with another capacity.
            let _ = self.close();
        })
    }
}

fn check_trust(segments: &Segments) -> Result<()> {
    let report = segments.report();
    if report.trusted {
        return Ok(());
    }
    Err(Error::invalid(
        "this file system cannot be trusted to keep one owner's writes in order: \
         put the store on a local disk",
    )
    .with("file_system", report.file_systems.join(", "))
    .with("why", report.distrust))
}

/// Host and boot, for people who find the directory on a shared file system.
fn owner_line() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{host} {} pid {}", boot.trim(), std::process::id())
}

/// Gives the store the index that it is opened with, and removes what is left of others.
fn take_index(
    medium: &Arc<dyn Medium>,
    directory: &Directory,
    manifest: &mut Manifest,
    options: &Options,
) -> Result<IndexKind> {
    let stored = IndexKind::stored(&manifest.index)?;
    let wanted = options.index.unwrap_or(stored);
    if wanted == stored {
        // The index that counts does not depend on it.
        if let Err(error) = tidy(medium.as_ref(), directory, stored) {
            tracing::warn!(%error, "what a conversion left is still there");
        }
        return Ok(stored);
    }
    tracing::warn!(
        dir = %options.dir.display(),
        from = stored.word(),
        to = wanted.word(),
        "the store is opened with another index than it was written with, and is converted"
    );
    if stored == IndexKind::Memory {
        tracing::warn!("the index `memory` keeps nothing: the store starts without any page");
    }
    convert(medium, directory, manifest, wanted, options.index_memory, &mut |_, _| ())?;
    Ok(wanted)
}

/// A registry that was lost must not hand out slots that runs in the index still carry.
fn never_reuse_slots(index: &dyn PrefixIndex) -> ScopeRegistry {
    let mut next = 0;
    index.for_each(&mut |_, run| next = next.max(run.scope.0.saturating_add(1)));
    ScopeRegistry { next, ..ScopeRegistry::default() }
}

/// A run that was kept.
struct Kept {
    scope: ScopeSlot,
    resident: Resident,
    recency: u64,
    pages: u64,
    units: u64,
    generation: u64,
    retain_until: u64,
}

/// Marks the space of every run that adds up, and takes the others out of the index.
fn believe(
    index: &dyn PrefixIndex,
    scopes: &Scopes,
    space: &mut Space,
    manifest: &Manifest,
    dropped: &mut BTreeMap<String, u64>,
) -> Vec<Kept> {
    let mut kept: Vec<Kept> = Vec::new();
    let mut refused: Vec<(RunId, &'static str)> = Vec::new();
    let segment_units = (manifest.segment_bytes / UNIT) as u32;
    index.for_each(&mut |run, view| match doubt(&view, scopes, segment_units) {
        Some(reason) => refused.push((run, reason)),
        None => {
            let extents: Vec<Extent> = view.live_extents();
            if space.mark(&extents).is_err() {
                refused.push((run, "space"));
                return;
            }
            let resident = resident(run, view.parent, &view.pages, &view.place);
            kept.push(Kept {
                scope: view.scope,
                resident,
                recency: view.recency,
                pages: view.pages.iter().filter(|page| **page != PageHash::NONE).count() as u64,
                units: extents.iter().map(|extent| u64::from(extent.units)).sum(),
                generation: view.place.generation,
                retain_until: view.retain_until,
            });
        }
    });
    // What hangs behind a dropped run goes with it, and its space is free again.
    let believed: HashSet<RunId> = kept.iter().map(|kept| kept.resident.run).collect();
    let mut gone = HashSet::new();
    for (run, reason) in refused {
        let removed = index.truncate(run, 0);
        *dropped.entry(reason.to_owned()).or_default() +=
            removed.iter().map(|r| u64::from(r.pages)).sum::<u64>();
        for lost in removed {
            gone.insert(lost.run);
            if believed.contains(&lost.run) {
                // It was marked a moment ago, so freeing it cannot fail.
                let _ = space.free(&lost.extents);
            }
        }
    }
    kept.retain(|kept| !gone.contains(&kept.resident.run));
    kept
}

/// Why a run is not believed, if it is not.
fn doubt(view: &RunView, scopes: &Scopes, segment_units: u32) -> Option<&'static str> {
    let Some(scope) = scopes.by_slot(view.scope) else { return Some("dropped_scope") };
    let metadata_only = view.place.extents.is_empty();
    let adds_up = (1..=units_of(scope.page_bytes)).contains(&u64::from(view.place.page_units))
        && view.place.check(view.pages.len() as u32, segment_units).is_ok();
    if metadata_only || adds_up { None } else { Some("place") }
}

fn restore(
    eviction: &mut dyn crate::eviction::Eviction,
    usage: &mut Usage,
    now: u64,
    mut kept: Vec<Kept>,
) -> Retention {
    kept.sort_by_key(|kept| kept.recency);
    for kept in &kept {
        eviction.admit(&kept.resident);
        usage.admit(kept.scope, &kept.resident, kept.pages, kept.units);
    }
    // In the order in which they were put, so roots come before what hangs from them.
    let mut retained: Vec<Kept> = kept.into_iter().filter(|kept| kept.retain_until > 0).collect();
    retained.sort_by_key(|kept| kept.generation);
    let mut retention = Retention::default();
    for kept in retained {
        let end = kept.retain_until.min(now.saturating_add(RETENTION_MAX));
        retention.hold(kept.resident.run, kept.scope, kept.units, end);
    }
    retention
}
