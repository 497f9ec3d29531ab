//! The scopes of a store: registered durably, looked up without waiting for the disk.

use crate::catalog::ScopeRef;
use crate::directory::Directory;
use crate::encode;
use crate::rounds::Rounds;
use parking_lot::{Mutex, RwLock};
use ritornello_codec::Codec;
use ritornello_format::{Error, Result, Scope, ScopeId, ScopeRegistry, ScopeSettings, ScopeSlot};
use std::collections::HashMap;
use std::sync::Arc;

/// Live scopes at most: epochs make new ones, and somebody may draw epochs in a loop.
const SCOPES_MAX: usize = 65_536;

/// Scopes that differ in the arrangement of their pages only, after which new ones are not warned of.
const REARRANGED_MAX: usize = 8;

/// The scope table. `registry` is what is on disk, changed under its own lock because changing it
/// means I/O; `live` is what lookups see.
#[derive(Debug)]
pub(crate) struct Scopes {
    directory: Directory,
    /// Poisoned if a change may be on the disk that failed.
    rounds: Arc<Rounds>,
    /// For scopes that have no setting of their own.
    codec: Codec,
    registry: Mutex<ScopeRegistry>,
    live: RwLock<Live>,
}

#[derive(Debug, Default)]
struct Live {
    by_id: HashMap<ScopeId, (ScopeRef, Scope)>,
    by_slot: HashMap<ScopeSlot, ScopeRef>,
    settings: HashMap<ScopeSlot, ScopeSettings>,
}

impl Scopes {
    /// The scopes of `registry`, which is what the directory holds.
    pub(crate) fn new(
        directory: Directory,
        rounds: Arc<Rounds>,
        registry: ScopeRegistry,
        codec: Codec,
    ) -> Result<Self> {
        let mut live = Live::default();
        for (slot, scope) in &registry.scopes {
            let settings = registry.settings.get(slot).copied().unwrap_or_default();
            live.add(*slot, scope, settings, codec)?;
        }
        Ok(Self {
            directory,
            rounds,
            codec,
            registry: Mutex::new(registry),
            live: RwLock::new(live),
        })
    }

    /// The reference of `scope`, checked against the stored description.
    pub(crate) fn find(&self, scope: &Scope) -> Result<Option<ScopeRef>> {
        match self.live.read().by_id.get(&scope.id()) {
            None => Ok(None),
            Some((reference, stored)) => stored.check_same(scope).map(|()| Some(*reference)),
        }
    }

    /// Registers `scope` durably unless it is registered.
    pub(crate) fn register(&self, scope: &Scope) -> Result<ScopeRef> {
        scope.resolved_page_bytes()?;
        let mut registry = self.registry.lock();
        if let Some(found) = self.find(scope)? {
            return Ok(found);
        }
        if registry.scopes.len() >= SCOPES_MAX {
            return Err(Error::retry(
                "the store knows as many scopes as it may: drop some, or clear it",
            )
            .with("scopes", SCOPES_MAX));
        }
        warn_of_rearranged(&registry, scope);
        let slot = ScopeSlot(registry.next);
        let mut changed = registry.clone();
        changed.next += 1;
        changed.scopes.push((slot, scope.clone()));
        self.write(&changed)?;
        *registry = changed;
        self.live.write().add(slot, scope, ScopeSettings::default(), self.codec)
    }

    /// Sets what is to hold for a scope, durably.
    pub(crate) fn configure(&self, scope: ScopeRef, settings: ScopeSettings) -> Result<()> {
        let mut registry = self.registry.lock();
        self.check(scope)?;
        let mut changed = registry.clone();
        let Some((_, stored)) = registry.scopes.iter().find(|(slot, _)| *slot == scope.slot) else {
            return Err(gone(scope));
        };
        check_settings(stored, &settings)?;
        if settings == ScopeSettings::default() {
            changed.settings.remove(&scope.slot);
        } else {
            changed.settings.insert(scope.slot, settings);
        }
        if changed != *registry {
            self.write(&changed)?;
        }
        self.live.write().add(scope.slot, stored, settings, self.codec)?;
        *registry = changed;
        Ok(())
    }

    /// What was set for a scope.
    pub(crate) fn settings(&self, slot: ScopeSlot) -> ScopeSettings {
        self.live.read().settings.get(&slot).copied().unwrap_or_default()
    }

    /// The scopes that have a quota.
    pub(crate) fn with_quota(&self) -> Vec<ScopeSlot> {
        let live = self.live.read();
        let limited = live.settings.iter().filter(|(_, settings)| settings.quota_bytes.is_some());
        limited.map(|(slot, _)| *slot).collect()
    }

    /// The model that the scope of a slot names.
    pub(crate) fn model(&self, slot: ScopeSlot) -> String {
        let live = self.live.read();
        let reference = live.by_slot.get(&slot).and_then(|scope| live.by_id.get(&scope.id));
        reference.map(|(_, scope)| scope.model.clone()).unwrap_or_default()
    }

    /// Forgets the scopes that `which` names, durably, and returns them.
    pub(crate) fn forget(&self, which: impl Fn(ScopeSlot) -> bool) -> Result<Vec<ScopeSlot>> {
        let mut registry = self.registry.lock();
        let mut changed = registry.clone();
        changed.scopes.retain(|(slot, _)| !which(*slot));
        changed.settings.retain(|slot, _| !which(*slot));
        if changed.scopes.len() == registry.scopes.len() {
            return Ok(Vec::new());
        }
        self.write(&changed)?;
        let gone: Vec<ScopeSlot> =
            registry.scopes.iter().map(|(slot, _)| *slot).filter(|slot| which(*slot)).collect();
        *registry = changed;
        let mut live = self.live.write();
        gone.iter().for_each(|slot| live.forget(*slot));
        Ok(gone)
    }

    fn write(&self, changed: &ScopeRegistry) -> Result<()> {
        let written = self.directory.write_registry(changed);
        written.inspect_err(|error| self.rounds.poison_if_fatal(error))
    }

    /// Refuses a reference whose scope was dropped or configured since it was handed out.
    pub(crate) fn check(&self, scope: ScopeRef) -> Result<()> {
        if self.by_slot(scope.slot) == Some(scope) { Ok(()) } else { Err(gone(scope)) }
    }

    pub(crate) fn is_live(&self, slot: ScopeSlot) -> bool {
        self.live.read().by_slot.contains_key(&slot)
    }

    /// The reference behind a slot.
    pub(crate) fn by_slot(&self, slot: ScopeSlot) -> Option<ScopeRef> {
        self.live.read().by_slot.get(&slot).copied()
    }

    /// Scopes from a slot on, at most so many, in slot order.
    pub(crate) fn from(&self, slot: ScopeSlot, most: usize) -> Vec<(ScopeSlot, Scope)> {
        let registry = self.registry.lock();
        let scopes = registry.scopes.iter().filter(|(found, _)| *found >= slot);
        scopes.take(most).cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.live.read().by_id.len()
    }
}

impl Live {
    /// Adds a scope, or replaces it.
    fn add(
        &mut self,
        slot: ScopeSlot,
        scope: &Scope,
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
        self.by_id.insert(reference.id, (reference, scope.clone()));
        self.by_slot.insert(slot, reference);
        self.settings.insert(slot, settings);
        Ok(reference)
    }

    fn forget(&mut self, slot: ScopeSlot) {
        self.settings.remove(&slot);
        if let Some(reference) = self.by_slot.remove(&slot) {
            self.by_id.remove(&reference.id);
        }
    }
}

/// Says so where a scope is new only because its pages are arranged in another way: maybe a setting
/// is wrong, and in any case pages that are there are not found.
fn warn_of_rearranged(registry: &ScopeRegistry, scope: &Scope) {
    let newest_first = registry.scopes.iter().rev();
    let mut found = newest_first.filter_map(|(_, other)| Some((other, scope.rearranged(other)?)));
    let newest = found.next();
    // A caller with a size for every object, as LMCache with a serde has, is not told each time.
    if found.nth(REARRANGED_MAX - 2).is_some() {
        return;
    }
    if let Some((other, differences)) = newest {
        tracing::warn!(
            scope = %scope.id(), other = %other.id(), model = %scope.model,
            "a new scope differs from a registered one in {differences} only: neither finds the \
             pages of the other; if they should be shared, make these settings the same"
        );
    }
}

fn gone(scope: ScopeRef) -> Error {
    Error::retry("the scope was dropped or configured: resolve it again").with("scope", scope.id)
}

/// The default for a scope: nobody chose a lossy codec for this one, so where it does not know the
/// numbers they are stored as they come.
fn suited(default: Codec, scope: &Scope) -> Codec {
    if encode::suits(default, scope) { default } else { Codec::Raw }
}

fn check_settings(scope: &Scope, settings: &ScopeSettings) -> Result<()> {
    if let Some(number) = settings.codec {
        let Some(codec) = Codec::from_number(number) else {
            return Err(Error::invalid(
                "a codec that this version does not know: upgrade the owner",
            )
            .with("codec", number));
        };
        if !encode::suits(codec, scope) {
            return Err(encode::unsuited(codec, scope));
        }
    }
    match (settings.quota_bytes, settings.retained_bytes) {
        (Some(quota), Some(retained)) if retained > quota => {
            Err(Error::invalid("more is to be retained than the quota allows: retain less")
                .with("retained_bytes", retained)
                .with("quota_bytes", quota))
        }
        _ => Ok(()),
    }
}
