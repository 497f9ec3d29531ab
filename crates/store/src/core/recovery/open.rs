//! Opening a store as its owner: reads the manifest and writes it with a new owner epoch, reads the
//! index, the scope registry and the segments, keeps the runs that pass validation, and drops all
//! further runs.

use super::validate::{find_segments, restore, validate_runs};
use crate::budget::Budget;
use crate::conversion::{convert, open_index, remove_leftovers};
use crate::core::absence::Absence;
use crate::core::absence::hidden::Hidden;
use crate::core::copies::Copies;
use crate::core::decisions::Decisions;
use crate::core::disk_call::DiskCalls;
use crate::core::lifecycle::{Lifecycle, OpenReport};
use crate::core::limits::admission::PutAdmission;
use crate::core::limits::index_memory::IndexMemory;
use crate::core::limits::quota::QuotaBuilds;
use crate::core::limits::retained_runs::Retention;
use crate::core::limits::store_clock::StoreClock;
use crate::core::limits::usage::Usage;
use crate::core::maintenance::Maintenance;
use crate::core::miss_causes::MissCauses;
use crate::core::reservations::{ReservationLog, Reservations, UNKNOWN_CLIENT, Withheld};
use crate::core::residents::Residents;
use crate::core::scopes::Scopes;
use crate::core::shape::Shape;
use crate::core::space::StoreSpace;
use crate::core::space::capacity::CapacityChange;
use crate::core::state::{PendingRemovals, State, StateLock, Unsynced};
use crate::core::{ClientAlive, StoreCore};
use crate::directory::Directory;
use crate::eviction::RecencyClock;
use crate::lease::LeaseTable;
use crate::options::{IndexKind, Options};
use crate::queue_lengths::ReportedQueues;
use crate::rounds::Rounds;
use crate::stats::Counters;
use crate::transfer_counts::TransferTotals;
use crate::volumes::VolumeState;
use parking_lot::Mutex;
use ritornello_format::{
    Error, ErrorKind, Manifest, Result, ScopeRegistry, ScopeSettings, ScopeSlot, StoredRegistry,
    UNIT, VolumeMarker, VolumeRecord,
};
use ritornello_index::PrefixIndex;
use ritornello_medium::Medium;
use ritornello_volume::segments::Segments;
use ritornello_volume::space::{Space, SpaceConfig};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Above this number of scopes, scopes with neither pages nor settings are dropped at open, because
/// every epoch of an engine creates a scope. Up to this number scopes without pages are kept,
/// because a lost index leaves all scopes without pages and salvage needs them; an open that finds
/// the index lost, or a volume that no salvage has searched, drops none: see [`may_need_salvage`].
const EMPTY_SCOPES_MAX: usize = 1024;
/// Maximum time that the addition of a directory, which the options list and the store lacks, waits
/// for other changes of the directories. After this time the store is opened without the directory.
const ADD_TIMEOUT: Duration = Duration::from_secs(10);
/// Percentage of the store's space that is kept free: the reserve.
const RESERVE_PERCENT: u8 = 5;

impl StoreCore {
    /// Opens the store in `options.dir`; creates a store if the directory holds neither a store nor
    /// other files. The caller holds the directory's lock. `alive` returns whether the client
    /// process with the given name may still be writing.
    ///
    /// # Errors
    /// `Invalid` if the options do not fit the store, the directory holds other files, cannot be
    /// written, or is on a full disk, or another machine or process serves its file system;
    /// `Fatal` if both copies of the manifest are damaged, or if a change of the store's files
    /// failed half-way; `Retry` if another file-system operation fails, a background thread cannot
    /// be started, or adding a listed directory poisoned the store. Other damage is not an error:
    /// runs that fail validation are dropped and counted. Absent volumes and segments are not an
    /// error either: their pages are misses until they return.
    pub fn open(
        medium: Arc<dyn Medium>,
        options: &Options,
        alive: ClientAlive,
    ) -> Result<Arc<Self>> {
        let directory = Directory::new(medium, &options.dir);
        let manifest = directory.manifest_to_resize(options)?;
        Self::open_as(&directory, manifest, options, alive)
    }

    /// Like [`StoreCore::open`], with a manifest that the caller has read or made. The manifest of
    /// a store that is being restored keeps the owner epoch 0.
    ///
    /// # Errors
    /// Errors of [`StoreCore::open`].
    pub(crate) fn open_as(
        directory: &Directory,
        mut manifest: Manifest,
        options: &Options,
        alive: ClientAlive,
    ) -> Result<Arc<Self>> {
        let started = Instant::now();
        let (directory, medium) = (directory.clone(), Arc::clone(&directory.medium));
        let being_restored = manifest.is_being_restored();
        let budget = Budget::divide(manifest.capacity, manifest.segment_bytes)?;
        let being_made = manifest.owner_epoch == 0 && !being_restored;
        if being_made {
            // Make the store's identity durable before any directory is marked with it, so that the
            // next opening can continue an interrupted creation.
            directory.write_manifest(&manifest)?;
        }
        directory.mark_volumes(&mut manifest)?;
        let found = directory.volume_states(&manifest);
        directory.check_expected(&manifest, &found)?;
        let dirs = found.iter().map(VolumeState::dir).filter(|dir| !dir.as_os_str().is_empty());
        directory.check_not_restored(&manifest, &dirs.collect::<Vec<_>>())?;
        directory.repair_markers(&mut manifest, &found);
        let mut absence = Absence::of(&manifest, &found);
        let segments = directory.open_segments(&manifest, &found, options.io)?;
        check_trust(&segments)?;
        for (number, why) in segments.unusable_dirs() {
            if being_made {
                return Err(Error::invalid("a directory of the new store cannot be used")
                    .with("dir", options.dir.display())
                    .with("why", why));
            }
            absence.add_volume(number, why);
        }
        leave_out_unsyncable(&segments, &manifest, &mut absence);
        let clean = manifest.clean;
        let kind = resolve_index(&medium, &directory, &mut manifest, &absence, options)?;
        manifest.owner_epoch += u32::from(!being_restored);
        manifest.generations += 1;
        manifest.clean = false;
        manifest.owner = owner_line();
        directory.write_manifest(&manifest)?;
        // Remove the files that an interrupted conversion left. The files must not be removed
        // earlier: only now do both copies of the manifest name the index in use.
        if let Err(error) = remove_leftovers(medium.as_ref(), &directory, kind) {
            tracing::warn!(%error, "the files left by a conversion could not be removed");
        }
        let index =
            open_index(&medium, &directory.index(), kind, &budget, options.index_memory, clean)?;
        let mut dropped = BTreeMap::new();
        let index_ref = index.as_ref();
        if mark_empty_volumes(&directory, &mut manifest, &segments, index_ref, &mut absence, &found)
        {
            directory.write_manifest(&manifest)?;
        }
        let mut registry = directory.registry()?.unwrap_or_else(|| {
            *dropped.entry("scope_registry".to_owned()).or_default() += 1;
            StoredRegistry::default()
        });
        if !registry.is_whole {
            never_reuse_slots(&mut registry.registry, index.as_ref());
        }
        let rounds = Arc::new(Rounds::default());
        let scopes = Scopes::new(
            directory.clone(),
            Arc::clone(&rounds),
            registry,
            options.codec,
            budget.registry_bytes,
        )?;
        let mut space = Space::new(SpaceConfig {
            segment_units: (manifest.segment_bytes / UNIT) as u32,
            volumes: manifest.volumes.iter().map(|_| u32::MAX).collect(),
            reserve_percent: RESERVE_PERCENT,
        })?;
        space.set_long_page((options.long_page_bytes / UNIT) as u32);
        let here = |number| directory.is_volume_present(&manifest, number);
        let existing =
            find_segments(&segments, &mut space, &manifest, &here, &mut absence, &mut dropped);
        let (kept, absent) = validate_runs(
            index.as_ref(),
            &scopes,
            &mut space,
            &manifest,
            &mut absence,
            &mut dropped,
        );
        let parents =
            kept.iter().filter_map(|kept| Some((kept.resident.run, kept.resident.parent?.0)));
        let hidden = Hidden::new(&absent, &parents.collect());
        if scopes.len() > EMPTY_SCOPES_MAX
            && !being_restored
            && !options.keep_empty_scopes
            && !may_need_salvage(&manifest, kind, index.as_ref())
        {
            let used: HashSet<ScopeSlot> = kept.iter().map(|kept| kept.scope).collect();
            // Keep an empty scope with settings: they must apply when the scope gets pages again.
            let set = |slot| scopes.settings(slot) != ScopeSettings::default();
            scopes.drop_selected(|slot| !used.contains(&slot) && !set(slot))?;
        }
        let clock = RecencyClock::starting_after(kept.iter().map(|run| run.recency).max());
        let time = StoreClock::starting_at(index.clock(), options.wall_clock);
        let (eviction, usage) = (options.eviction.build(), Usage::new(scopes.with_quota()));
        let mut residents = Residents::new(clock, eviction, usage, Retention::new(time));
        restore(&mut residents, kept);
        let alive = alive_or_unknown(directory.clone(), alive);
        let log = directory.reservation_log()?;
        let mut withheld = ReservationLog::outstanding(log.as_deref().unwrap_or_default())?;
        let mut space = StoreSpace::new(space);
        if log.is_none() {
            let unknown = Withheld::unknown(space.take_free());
            tracing::warn!(
                dir = %options.dir.display(),
                "the disk cannot read RESERVATIONS: free space waits until all clients have ended"
            );
            withheld.insert(u64::MAX, unknown);
        } else {
            mark_reserved(&mut space, &absence, &mut withheld);
        }
        drain_dead(&mut space, &mut withheld, &alive);
        // Set the maximum segments of each volume only now, because they depend on the segments
        // that were found in the volumes.
        space.share_out(&absence, &manifest, &budget);
        if !clean {
            // The log lacks the reservations of the last owner's own process, whose writes may be
            // in flight. Withhold all free space until the segments are drained.
            space.withhold_free();
        }
        let log = ReservationLog::restart(directory.clone(), withheld.clone())?;
        for (reason, count) in &dropped {
            tracing::warn!(
                reason, count, dir = %options.dir.display(),
                "items were dropped or repaired at open"
            );
        }
        let core = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            index,
            segments,
            options: options.clone(),
            scopes,
            admission: PutAdmission::new(options, budget.capacity, started),
            quota_builds: QuotaBuilds::default(),
            shape: Shape::new(directory, Arc::clone(&rounds), manifest, budget),
            state: StateLock::new(State {
                space,
                residents,
                leases: LeaseTable::new(),
                reservations: Reservations::new(withheld),
                absence,
                // The last writes of a former owner may not be durable, so the first sync round
                // syncs all segments.
                unsynced: Unsynced { segments: existing.into_iter().collect(), uses: false },
                removals: PendingRemovals::default(),
                index_memory: IndexMemory::default(),
            }),
            reservation_log: Mutex::new(log),
            hidden,
            lifecycle: Lifecycle::new(
                rounds,
                OpenReport { millis: started.elapsed().as_secs_f64() * 1e3, dropped },
            ),
            maintenance: Maintenance::new(alive),
            copies: Copies::default(),
            disk_calls: DiskCalls::default(),
            counters: Counters::default(),
            transfers: TransferTotals::default(),
            queues: ReportedQueues::default(),
            miss_causes: MissCauses::new(budget.capacity),
            decisions: Decisions::default(),
        });
        match core.begin() {
            Ok(()) => Ok(core),
            Err(error) => {
                core.discard();
                Err(error)
            }
        }
    }

    /// Starts the background work, and applies the directories and the capacity given at open.
    ///
    /// # Errors
    /// `Retry` if a thread cannot be started; errors of [`StoreCore::add_listed_dirs`] and
    /// [`StoreCore::apply_capacity`]. The core may still write then.
    fn begin(self: &Arc<Self>) -> Result<()> {
        self.start_drain();
        self.enforce_quotas();
        if self.options.background_threads {
            self.start_periodic()?;
        }
        // Change directories and capacity before the maintenance thread starts, because that thread
        // empties sealed segments, of which a larger capacity unseals some. Add directories first,
        // because a larger capacity may need them.
        self.add_listed_dirs()?;
        self.apply_capacity()?;
        if self.options.background_threads {
            self.start_maintenance()?;
        }
        Ok(())
    }
}

/// Withholds the space of logged reservations.
fn mark_reserved(space: &mut StoreSpace, absence: &Absence, withheld: &mut HashMap<u64, Withheld>) {
    for held in withheld.values_mut() {
        let logged = std::mem::take(&mut held.extents);
        (held.absent, held.extents) = logged.into_iter().partition(|e| absence.covers(e.segment));
        // Mark each extent separately: if an extent conflicts with a committed run, all other
        // extents are still withheld.
        held.extents.retain(|extent| space.mark(std::slice::from_ref(extent)));
    }
}

/// Ends the reservations of dead clients. The space of a living client is withheld until the client
/// aborts or dies, the space of a dead client until it is drained, because its last writes may
/// still be in flight.
fn drain_dead(space: &mut StoreSpace, withheld: &mut HashMap<u64, Withheld>, alive: &ClientAlive) {
    withheld.retain(|_, held| {
        let lives = alive(&held.client);
        if !lives {
            space.withhold(std::mem::take(&mut held.extents));
        }
        lives
    });
}

/// Extends `alive` to [`UNKNOWN_CLIENT`], which is alive as long as any client is that has a lock
/// file when their directory is first listed.
fn alive_or_unknown(directory: Directory, alive: ClientAlive) -> ClientAlive {
    let clients: OnceLock<Vec<String>> = OnceLock::new();
    Arc::new(move |name| {
        if name != UNKNOWN_CLIENT {
            return alive(name);
        }
        if let Some(names) = clients.get() {
            return names.iter().any(|name| alive(name));
        }
        directory
            .client_names()
            .map_or(true, |names| clients.get_or_init(|| names).iter().any(|name| alive(name)))
    })
}

impl StoreCore {
    /// Adds the directories listed at open that the store lacks.
    ///
    /// # Errors
    /// `Retry` if the addition of a directory poisoned the store.
    fn add_listed_dirs(&self) -> Result<()> {
        self.shape.directory().add_listed(&self.options, |dir| {
            self.change_capacity(&CapacityChange::AddVolume(dir), ADD_TIMEOUT)
        });
        self.lifecycle.check_writable()
    }

    /// Resizes the store to the capacity given at open; long work runs in the background. If the
    /// capacity is impossible, logs a warning and keeps the current capacity.
    ///
    /// # Errors
    /// Errors of [`StoreCore::change_capacity`] except `Invalid` and `Retry`.
    fn apply_capacity(&self) -> Result<()> {
        let stored = self.shape.budget().capacity;
        let Some(capacity) = self.options.capacity.filter(|given| *given != stored) else {
            return Ok(());
        };
        match self.change_capacity(&CapacityChange::Capacity(capacity), Duration::ZERO) {
            Err(error) if error.kind() == ErrorKind::Invalid => {
                let dir = self.options.dir.display();
                tracing::warn!(%dir, given = capacity, stored, "the capacity was not changed: {error}");
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Retry => Ok(()),
            result => result,
        }
    }
}

/// Whether a salvage may find runs that the index lacks: their scopes seem empty.
fn may_need_salvage(manifest: &Manifest, kind: IndexKind, index: &dyn PrefixIndex) -> bool {
    // The index `memory` is empty at every open, and keeps no salvaged page either.
    let is_lost = kind != IndexKind::Memory && index.stats().runs == 0 && manifest.owner_epoch > 1;
    is_lost || index.was_damaged() || manifest.has_unsearched()
}

fn check_trust(segments: &Segments) -> Result<()> {
    let report = segments.report();
    if report.trusted {
        return Ok(());
    }
    Err(Error::invalid(
        "another machine or process serves this file system, so locks and durability are not \
         certain: put the store on a local disk",
    )
    .with("file_system", report.file_systems.join(", "))
    .with("why", report.distrust))
}

/// Makes the volumes absent whose newest segment cannot be synced: otherwise the first sync round
/// would fail, and poison the store. Makes none absent if no volume that can be synced takes puts,
/// because the pages on these volumes can still be read.
fn leave_out_unsyncable(segments: &Segments, manifest: &Manifest, absence: &mut Absence) {
    let here =
        |number, volume: &VolumeRecord| !volume.is_retired() && absence.why(number).is_none();
    let volumes = (0..=u8::MAX).zip(&manifest.volumes);
    let present: Vec<_> = volumes.filter(|(number, volume)| here(*number, volume)).collect();
    let (mut takes_puts, mut failed) = (false, Vec::new());
    if present.len() < 2 {
        return;
    }
    for (number, volume) in present {
        match segments.check_syncs(number) {
            Ok(()) => takes_puts |= !volume.draining,
            Err(error) => failed.push((number, error)),
        }
    }
    for (number, error) in failed.into_iter().filter(|_| takes_puts) {
        let dir = &manifest.volumes[usize::from(number)].dir;
        tracing::warn!(%error, dir, "a volume cannot be synced: its pages are misses");
        segments.detach(number);
        absence.add_volume(number, error.to_string());
    }
}

/// Host, boot id and process id of this owner, for diagnostics on a shared file system.
fn owner_line() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{host} {} pid {}", boot.trim(), std::process::id())
}

/// Converts the store to the index that it is opened with, unless a volume is absent. Returns the
/// index in use.
fn resolve_index(
    medium: &Arc<dyn Medium>,
    directory: &Directory,
    manifest: &mut Manifest,
    absence: &Absence,
    options: &Options,
) -> Result<IndexKind> {
    let stored = IndexKind::stored(&manifest.index)?;
    let chosen = options.index.unwrap_or(stored);
    if chosen == stored {
        return Ok(stored);
    }
    if !absence.is_empty() {
        tracing::warn!(
            dir = %options.dir.display(),
            "the index cannot be converted while a volume is absent, so the store keeps its index: \
             mount the volume, or give it up with `ritornello paths forget`"
        );
        return Ok(stored);
    }
    tracing::warn!(
        dir = %options.dir.display(),
        from = stored.word(),
        to = chosen.word(),
        "the index named at open differs from the store's index: the store is converted"
    );
    if stored == IndexKind::Memory {
        tracing::warn!("the index `memory` kept no pages on disk: the converted store is empty");
    }
    convert(medium, directory, manifest, chosen, options.index_memory, &mut |_, _| ())?;
    Ok(chosen)
}

/// Raises the next slot of a registry that lost its last records, or all records, above the slots
/// of all runs in the index, so that no slot is reused.
fn never_reuse_slots(registry: &mut ScopeRegistry, index: &dyn PrefixIndex) {
    index.for_each(&mut |_, run| {
        registry.next = registry.next.max(run.scope.0.saturating_add(1));
    });
}

/// Writes the missing markers of empty volumes of a store from an earlier build, which `found`
/// reports as absent. A volume gets its marker if its directory is empty and inside the store's
/// directory, and if the index names no segment of the volume. Any other empty directory may be a
/// mount point. Returns whether any volume met these conditions, even if its marker could not be
/// written.
fn mark_empty_volumes(
    directory: &Directory,
    manifest: &mut Manifest,
    segments: &Segments,
    index: &dyn PrefixIndex,
    absence: &mut Absence,
    found: &[VolumeState],
) -> bool {
    let absent = (0..=u8::MAX).zip(found).filter(|(_, at)| matches!(at, VolumeState::Absent(_)));
    let candidates = absent.map(|(number, _)| number);
    let is_empty = |number: &u8| {
        let volume = &manifest.volumes[usize::from(*number)];
        let dir = directory.path().join(&volume.dir);
        let inside = Path::new(&volume.dir).is_relative();
        inside && !volume.marked && directory.medium.list(&dir).is_ok_and(|names| names.is_empty())
    };
    let mut empty: BTreeSet<u8> = candidates.filter(is_empty).collect();
    if !empty.is_empty() {
        index.for_each(&mut |_, view| {
            view.place.extents.iter().for_each(|extent| {
                empty.remove(&extent.segment.volume());
            });
        });
    }
    for &number in &empty {
        let volume = &mut manifest.volumes[usize::from(number)];
        let dir = directory.path().join(&volume.dir);
        let marker = VolumeMarker { store: manifest.uuid, volume: number };
        let marked = directory.write_marker(&dir, marker).map_err(Error::from);
        let attached = marked
            .and_then(|()| segments.examine(&dir))
            .and_then(|candidate| segments.attach(number, candidate));
        match attached {
            Ok(()) => {
                volume.marked = true;
                absence.remove_volume(number);
            }
            Err(error) => {
                tracing::warn!(
                    %error, dir = volume.dir,
                    "an empty volume could not be marked and attached"
                )
            }
        }
    }
    !empty.is_empty()
}
