//! The scopes of a store: registered durably, looked up without waiting for the disk.

use crate::catalog::ScopeRef;
use crate::directory::Directory;
use parking_lot::{Mutex, RwLock};
use ritornello_format::{Error, Result, Scope, ScopeId, ScopeRegistry, ScopeSlot};
use std::collections::HashMap;

/// Live scopes at most: epochs make new ones, and somebody may draw epochs in a loop.
const SCOPES_MAX: usize = 65_536;

/// The scope table. `registry` is what is on disk, changed under its own lock because changing it
/// means I/O; `live` is what lookups see.
#[derive(Debug)]
pub(crate) struct Scopes {
    directory: Directory,
    registry: Mutex<ScopeRegistry>,
    live: RwLock<Live>,
}

#[derive(Debug, Default)]
struct Live {
    by_id: HashMap<ScopeId, (ScopeRef, Scope)>,
    by_slot: HashMap<ScopeSlot, ScopeRef>,
}

impl Scopes {
    /// The scopes of `registry`, which is what the directory holds.
    pub(crate) fn new(directory: Directory, registry: ScopeRegistry) -> Result<Self> {
        let mut live = Live::default();
        for (slot, scope) in &registry.scopes {
            live.add(*slot, scope)?;
        }
        Ok(Self { directory, registry: Mutex::new(registry), live: RwLock::new(live) })
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
        let slot = ScopeSlot(registry.next);
        let mut changed = registry.clone();
        changed.next += 1;
        changed.scopes.push((slot, scope.clone()));
        self.directory.write_registry(&changed)?;
        *registry = changed;
        self.live.write().add(slot, scope)
    }

    /// Forgets the scopes that `which` names, durably, and returns them.
    pub(crate) fn forget(&self, which: impl Fn(ScopeSlot) -> bool) -> Result<Vec<ScopeSlot>> {
        let mut registry = self.registry.lock();
        let mut changed = registry.clone();
        changed.scopes.retain(|(slot, _)| !which(*slot));
        if changed.scopes.len() == registry.scopes.len() {
            return Ok(Vec::new());
        }
        self.directory.write_registry(&changed)?;
        let gone: Vec<ScopeSlot> =
            registry.scopes.iter().map(|(slot, _)| *slot).filter(|slot| which(*slot)).collect();
        *registry = changed;
        let mut live = self.live.write();
        gone.iter().for_each(|slot| live.forget(*slot));
        Ok(gone)
    }

    /// Refuses a reference whose scope was dropped, or that is not what was handed out.
    pub(crate) fn check(&self, scope: ScopeRef) -> Result<()> {
        if self.by_slot(scope.slot) == Some(scope) {
            Ok(())
        } else {
            Err(Error::retry("the scope was dropped: resolve it again").with("scope", scope.id))
        }
    }

    pub(crate) fn is_live(&self, slot: ScopeSlot) -> bool {
        self.live.read().by_slot.contains_key(&slot)
    }

    /// The reference behind a slot.
    pub(crate) fn by_slot(&self, slot: ScopeSlot) -> Option<ScopeRef> {
        self.live.read().by_slot.get(&slot).copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.live.read().by_id.len()
    }
}

impl Live {
    fn add(&mut self, slot: ScopeSlot, scope: &Scope) -> Result<ScopeRef> {
        let page_bytes = scope.resolved_page_bytes()?;
        let reference =
            ScopeRef { id: scope.id(), slot, page_bytes, chained: scope.chained, codec: 0 };
        self.by_id.insert(reference.id, (reference, scope.clone()));
        self.by_slot.insert(slot, reference);
        Ok(reference)
    }

    fn forget(&mut self, slot: ScopeSlot) {
        if let Some(reference) = self.by_slot.remove(&slot) {
            self.by_id.remove(&reference.id);
        }
    }
}
