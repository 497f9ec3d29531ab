//! The scopes of a store: registered durably, looked up without disk I/O.

mod arrangements;
mod limit;
mod lookup;
mod registration;

use crate::catalog::ScopeRef;
use crate::core::state::StateLock;
use crate::directory::Directory;
use crate::encode;
use crate::registry_file::RegistryFile;
use crate::rounds::Rounds;
use arrangements::Arrangements;
use parking_lot::{Mutex, RwLock};
use ritornello_codec::Codec;
use ritornello_format::{
    Error, Result, Scope, ScopeId, ScopeRegistry, ScopeSettings, ScopeSlot, StoredRegistry,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Maximum live scopes. The limit is needed because requests create scopes, by epochs and salts.
pub(crate) const SCOPES_MAX: usize = 65_536;

/// The scope table. `registry` is the state on disk, changed under its own lock because a change
/// does I/O; `live` serves lookups.
#[derive(Debug)]
pub(crate) struct Scopes {
    /// The sync rounds. A change that fails with `Fatal` poisons them: the next opening may read
    /// the registry with or without the change.
    rounds: Arc<Rounds>,
    /// The codec of scopes without a codec setting.
    codec: Codec,
    registry: Mutex<Registry>,
    live: RwLock<Live>,
    /// One more than the number of registrations by this owner. Uses of scopes are stamped with
    /// this number, so that the least recently used scope can be found.
    registrations: AtomicU64,
    /// Number of changes of the registry by this owner.
    changes: AtomicU64,
    /// Maximum bytes of the live scopes' records.
    bytes_max: AtomicU64,
}

/// The registry on disk, and a table that finds registered scopes which differ from a given scope
/// only in the arrangement of their pages: layout, page bytes and chaining. A new scope
/// with such a difference can cause a warning, because neither scope finds the other's pages.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) table: ScopeRegistry,
    pub(crate) file: RegistryFile,
    arrangements: Arrangements,
}

#[derive(Debug, Default)]
pub(crate) struct Live {
    by_id: HashMap<ScopeId, (ScopeRef, Arc<Scope>)>,
    pub(crate) by_slot: HashMap<ScopeSlot, LiveScope>,
    pub(crate) settings: HashMap<ScopeSlot, ScopeSettings>,
}

#[derive(Debug)]
pub(crate) struct LiveScope {
    reference: ScopeRef,
    /// Value of [`Scopes::registrations`] at the last use; zero if this owner has not used the
    /// scope.
    pub(crate) used: AtomicU64,
    /// Whether this owner has logged that a page of the scope exceeds the store.
    is_too_large: AtomicBool,
}

impl LiveScope {
    /// Records a use. Writes at most once between two registrations, so that lookups of many
    /// threads rarely write to the same cache line.
    fn note_use(&self, now: u64) {
        if self.used.load(Ordering::Relaxed) != now {
            self.used.store(now, Ordering::Relaxed);
        }
    }
}

impl Scopes {
    /// Loads the scopes of `stored`, which was read from the directory. The records of live scopes
    /// may take `bytes_max`.
    pub(crate) fn new(
        directory: Directory,
        rounds: Arc<Rounds>,
        stored: StoredRegistry,
        codec: Codec,
        bytes_max: u64,
    ) -> Result<Self> {
        let file = RegistryFile::open(directory, &stored);
        let file = file.inspect_err(|error| rounds.poison_if_fatal(error))?;
        let (mut live, mut arrangements) = (Live::default(), Arrangements::default());
        let table = stored.registry;
        for (slot, scope) in &table.scopes {
            let settings = table.settings.get(slot).copied().unwrap_or_default();
            live.add(*slot, scope, settings, codec)?;
            arrangements.note(*slot, scope);
        }
        Ok(Self {
            rounds,
            codec,
            registry: Mutex::new(Registry { table, file, arrangements }),
            live: RwLock::new(live),
            registrations: AtomicU64::new(1),
            changes: AtomicU64::new(0),
            bytes_max: AtomicU64::new(bytes_max),
        })
    }

    /// Maximum bytes of the live scopes' records.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.bytes_max.load(Ordering::Relaxed)
    }

    /// Number of changes of the registry by this owner.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The registry, with at least the changes that [`Scopes::changes`] counted before this call;
    /// `None` while another thread changes or lists the registry.
    pub(crate) fn table(&self) -> Option<ScopeRegistry> {
        self.registry.try_lock().map(|registry| registry.table.clone())
    }

    pub(crate) fn live(&self) -> &RwLock<Live> {
        &self.live
    }

    /// The codec of scopes without a codec setting.
    pub(crate) fn codec(&self) -> Codec {
        self.codec
    }

    pub(crate) fn set_bytes_max(&self, bytes: u64) {
        self.bytes_max.store(bytes, Ordering::Relaxed);
    }

    /// Returns the reference of `scope`; `None` if it is not registered. Counts as a use of the
    /// scope.
    ///
    /// # Errors
    /// `Fatal` if the registered scope with this digest has another description.
    pub(crate) fn find(&self, scope: &Scope) -> Result<Option<ScopeRef>> {
        let live = self.live.read();
        let Some((reference, stored)) = live.by_id.get(&scope.id()) else { return Ok(None) };
        stored.check_same(scope)?;
        if let Some(known) = live.by_slot.get(&reference.slot) {
            known.note_use(self.registrations.load(Ordering::Relaxed));
        }
        Ok(Some(*reference))
    }

    /// Registers `scope` durably unless it is registered already. If the registry is full, drops
    /// scopes that are empty according to `state`, least recently used first, unless `unsearched`,
    /// because a volume that was not searched may have their pages. Returns the reference and the
    /// number of dropped scopes.
    ///
    /// # Errors
    /// `Miss` if the registry has no room, also after empty scopes are dropped, or all scope
    /// numbers are used up; `Fatal` if another scope has the same digest; `Invalid` if the length
    /// of the scope's pages is unknown or out of range; file-system errors.
    pub(crate) fn register(
        &self,
        scope: &Scope,
        state: &StateLock,
        unsearched: bool,
    ) -> Result<(ScopeRef, usize)> {
        scope.resolved_page_bytes()?;
        let mut registry = self.registry.lock();
        if let Some(found) = self.find(scope)? {
            return Ok((found, 0));
        }
        let slot = ScopeSlot(registry.table.next);
        let Some(next) = slot.0.checked_add(1) else {
            return Err(Error::miss(
                "all scope numbers of the store are used up: make a new store",
            ));
        };
        let record = ScopeRegistry::registration(slot, scope);
        let dropped =
            self.drop_empty_scopes(&mut registry, record.len() as u64, state, unsearched)?;
        let Registry { table, file, arrangements } = &mut *registry;
        arrangements.warn(&table.scopes, scope);
        let scope = Arc::new(scope.clone());
        // Count the slot as used even if the registration fails, because the record may be on disk.
        table.next = next;
        table.scopes.insert(slot, Arc::clone(&scope));
        if let Err(error) = file.register(&record, table) {
            table.scopes.remove(&slot);
            self.rounds.poison_if_fatal(&error);
            return Err(error);
        }
        self.changes.fetch_add(1, Ordering::Release);
        arrangements.note(slot, &scope);
        let mut live = self.live.write();
        let reference = live.add(slot, &scope, ScopeSettings::default(), self.codec)?;
        let now = self.registrations.fetch_add(1, Ordering::Relaxed) + 1;
        live.by_slot.get(&slot).into_iter().for_each(|known| known.note_use(now));
        Ok((reference, dropped))
    }

    /// Records durably that no new scope gets `slot` or a slot before it.
    pub(crate) fn never_reuse(&self, slot: ScopeSlot) -> Result<()> {
        let mut registry = self.registry.lock();
        let Registry { table, file, .. } = &mut *registry;
        let next = slot.0.saturating_add(1);
        if table.next < next {
            table.next = next;
            file.replace(table).inspect_err(|error| self.rounds.poison_if_fatal(error))?;
            self.changes.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    /// Changes the settings of a scope, durably.
    pub(crate) fn configure(&self, scope: ScopeRef, settings: ScopeSettings) -> Result<()> {
        let mut registry = self.registry.lock();
        self.check(scope)?;
        let Registry { table, file, .. } = &mut *registry;
        let Some(stored) = table.scopes.get(&scope.slot).cloned() else {
            return Err(gone(scope));
        };
        check_settings(&stored, &settings)?;
        let mut changed = table.clone();
        if settings == ScopeSettings::default() {
            changed.settings.remove(&scope.slot);
        } else {
            changed.settings.insert(scope.slot, settings);
        }
        if changed != *table {
            file.replace(&changed).inspect_err(|error| self.rounds.poison_if_fatal(error))?;
            self.changes.fetch_add(1, Ordering::Release);
        }
        self.live.write().add(scope.slot, &stored, settings, self.codec)?;
        *table = changed;
        Ok(())
    }

    pub(crate) fn settings(&self, slot: ScopeSlot) -> ScopeSettings {
        self.live.read().settings.get(&slot).copied().unwrap_or_default()
    }

    pub(crate) fn with_quota(&self) -> Vec<ScopeSlot> {
        let live = self.live.read();
        let limited = live.settings.iter().filter(|(_, settings)| settings.quota_bytes.is_some());
        limited.map(|(slot, _)| *slot).collect()
    }

    /// The model named by the scope in `slot`.
    pub(crate) fn model(&self, slot: ScopeSlot) -> String {
        let live = self.live.read();
        let reference =
            live.by_slot.get(&slot).and_then(|known| live.by_id.get(&known.reference.id));
        reference.map(|(_, scope)| scope.model.clone()).unwrap_or_default()
    }

    /// Drops the scopes that `which` selects, durably. Returns their slots and ids.
    pub(crate) fn drop_selected(
        &self,
        which: impl Fn(ScopeSlot) -> bool,
    ) -> Result<Vec<(ScopeSlot, ScopeId)>> {
        let mut registry = self.registry.lock();
        let slots = registry.table.scopes.keys().copied();
        let slots: Vec<ScopeSlot> = slots.filter(|slot| which(*slot)).collect();
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        self.drop_durably(&mut registry, &slots)?;
        let mut live = self.live.write();
        let dropped = slots.into_iter().filter_map(|slot| Some((slot, live.drop_scope(slot)?)));
        Ok(dropped.collect())
    }

    /// Removes `slots` from the registry, durably; the caller updates `live`.
    pub(crate) fn drop_durably(&self, registry: &mut Registry, slots: &[ScopeSlot]) -> Result<()> {
        let Registry { table, file, arrangements } = registry;
        let mut changed = table.clone();
        let (mut gone, mut freed) = (Vec::with_capacity(slots.len()), 0);
        for slot in slots {
            changed.settings.remove(slot);
            if let Some(scope) = changed.scopes.remove(slot) {
                freed += ScopeRegistry::registration(*slot, &scope).len() as u64;
                gone.push((*slot, scope));
            }
        }
        let record = ScopeRegistry::removal(slots);
        let removed = file.remove(&record, freed, &changed, table);
        removed.inspect_err(|error| self.rounds.poison_if_fatal(error))?;
        gone.iter().for_each(|(slot, scope)| arrangements.drop_scope(*slot, scope));
        *table = changed;
        self.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Rewrites the registry's file without appended records, which earlier versions cannot read.
    pub(crate) fn compact(&self) {
        let mut registry = self.registry.lock();
        let Registry { table, file, .. } = &mut *registry;
        if let Err(error) = file.compact(table) {
            tracing::warn!(
                %error,
                "the scope registry could not be rewritten for earlier versions"
            );
        }
    }

    /// Refuses a reference whose scope was dropped, or given another codec, after the reference was
    /// resolved. Counts as a use of the scope.
    pub(crate) fn check(&self, scope: ScopeRef) -> Result<()> {
        let live = self.live.read();
        match live.by_slot.get(&scope.slot).filter(|known| known.reference == scope) {
            Some(known) => {
                known.note_use(self.registrations.load(Ordering::Relaxed));
                Ok(())
            }
            None => Err(gone(scope)),
        }
    }

    /// Notes that a page of the scope exceeds the store. Returns whether this is the first note.
    fn is_first_too_large(&self, slot: ScopeSlot) -> bool {
        let live = self.live.read();
        live.by_slot
            .get(&slot)
            .is_some_and(|known| !known.is_too_large.swap(true, Ordering::Relaxed))
    }

    pub(crate) fn is_live(&self, slot: ScopeSlot) -> bool {
        self.live.read().by_slot.contains_key(&slot)
    }

    pub(crate) fn by_slot(&self, slot: ScopeSlot) -> Option<ScopeRef> {
        self.live.read().by_slot.get(&slot).map(|known| known.reference)
    }

    /// Returns at most `most` scopes in slot order, starting at `slot`.
    pub(crate) fn from(&self, slot: ScopeSlot, most: usize) -> Vec<(ScopeSlot, Arc<Scope>)> {
        let registry = self.registry.lock();
        let scopes = registry.table.scopes.range(slot..).take(most);
        scopes.map(|(slot, scope)| (*slot, Arc::clone(scope))).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.live.read().by_id.len()
    }
}

impl Live {
    pub(crate) fn add(
        &mut self,
        slot: ScopeSlot,
        scope: &Arc<Scope>,
        settings: ScopeSettings,
        default: Codec,
    ) -> Result<ScopeRef> {
        let codec = settings.codec.unwrap_or_else(|| suited(default, scope).number());
        let reference = ScopeRef {
            id: scope.id(),
            slot,
            page_bytes: scope.resolved_page_bytes()?,
            chained: scope.chained,
            codec,
        };
        self.by_id.insert(reference.id, (reference, Arc::clone(scope)));
        let known = self.by_slot.entry(slot);
        let known = known.or_insert_with(|| LiveScope {
            reference,
            used: AtomicU64::new(0),
            is_too_large: AtomicBool::new(false),
        });
        known.reference = reference;
        self.settings.insert(slot, settings);
        Ok(reference)
    }

    /// Removes a scope, and returns its id.
    pub(crate) fn drop_scope(&mut self, slot: ScopeSlot) -> Option<ScopeId> {
        self.settings.remove(&slot);
        let id = self.by_slot.remove(&slot)?.reference.id;
        self.by_id.remove(&id);
        Some(id)
    }
}

fn gone(scope: ScopeRef) -> Error {
    Error::retry("the scope was dropped, or its codec was changed: resolve it again")
        .with("scope", scope.id)
}

/// Returns the codec of a scope without a codec setting: the store's default, or raw if the default
/// is lossy and cannot encode the scope's numbers. (An explicit setting of such a codec is refused
/// instead.)
fn suited(default: Codec, scope: &Scope) -> Codec {
    if encode::suits(default, scope) { default } else { Codec::Raw }
}

fn check_settings(scope: &Scope, settings: &ScopeSettings) -> Result<()> {
    if let Some(number) = settings.codec {
        let Some(codec) = Codec::from_number(number) else {
            return Err(Error::invalid(
                "the owner's version does not know this codec: upgrade the owner",
            )
            .with("codec", number));
        };
        if !encode::suits(codec, scope) {
            return Err(encode::unsuited(codec, scope));
        }
    }
    match (settings.quota_bytes, settings.retained_bytes) {
        (Some(quota), Some(retained)) if retained > quota => Err(Error::invalid(
            "the retention limit exceeds the quota: lower the limit, or raise the quota",
        )
        .with("retained_bytes", retained)
        .with("quota_bytes", quota)),
        _ => Ok(()),
    }
}
