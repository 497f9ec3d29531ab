//! Limits of the scope registry. Requests can create scopes (salts, epochs), so the registry is
//! bounded; at the limit, empty scopes are dropped, least recently used first.

use super::{Live, Registry, SCOPES_MAX, Scopes};
use crate::core::state::StateLock;
use ritornello_format::{Error, Result, ScopeRegistry, ScopeSettings, ScopeSlot};
use std::sync::atomic::Ordering;

/// Maximum scopes examined under one hold of the core state's lock.
const STEP_SCOPES: usize = 256;
/// A full registry drops empty scopes until 1/`SLACK` of its limits is free, so that not every
/// registration searches for empty scopes.
const SLACK: u64 = 64;

#[derive(Clone, Copy, Debug)]
struct Limits {
    scopes: u64,
    bytes: u64,
}

impl Limits {
    const fn hold(&self, scopes: u64, bytes: u64) -> bool {
        scopes <= self.scopes && bytes <= self.bytes
    }

    const fn with_slack(&self) -> Self {
        Self { scopes: self.scopes - self.scopes / SLACK, bytes: self.bytes - self.bytes / SLACK }
    }
}

/// Scopes already removed from lookups, to be dropped durably.
#[derive(Debug, Default)]
struct ChosenScopes {
    slots: Vec<ScopeSlot>,
    /// Bytes of the scopes' records in the registry.
    bytes: u64,
}

impl Scopes {
    /// Drops empty scopes if the registry has no room for a further scope whose record has `added`
    /// bytes. After the scope fits, continues until 1/[`SLACK`] of the limits is free or no further
    /// scope is empty. Returns the number of dropped scopes. With `unsearched`, a volume may have
    /// pages of scopes that seem empty, and no scope is dropped.
    ///
    /// # Errors
    /// `Miss` if too few scopes are empty and without settings, the record alone exceeds the limit,
    /// or `unsearched` forbids drops; file-system errors. After an error this owner keeps all
    /// scopes.
    pub(crate) fn drop_empty_scopes(
        &self,
        registry: &mut Registry,
        added: u64,
        state: &StateLock,
        unsearched: bool,
    ) -> Result<usize> {
        let limits = Limits { scopes: SCOPES_MAX as u64, bytes: self.bytes_max() };
        let (scopes, bytes) =
            (registry.table.scopes.len() as u64 + 1, registry.file.live() + added);
        if limits.hold(scopes, bytes) {
            return Ok(0);
        }
        if added > limits.bytes {
            return Err(Error::miss(
                "the scope's description is longer than the whole registry may be: shorten it (a \
                 digest can stand for the model's configuration), or make the store larger",
            )
            .with("bytes", added)
            .with("bytes_max", limits.bytes));
        }
        if unsearched {
            return Err(Error::miss(
                "the scope registry is full, and its empty scopes may have pages in a directory \
                 that a restore left out: search the directory with `ritornello fsck --salvage`, \
                 or give it up with `ritornello paths forget`",
            )
            .with("scopes", scopes - 1));
        }
        let left = |chosen: &ChosenScopes| {
            (scopes - chosen.slots.len() as u64, bytes.saturating_sub(chosen.bytes))
        };
        let is_enough = |limits: Limits, chosen: &ChosenScopes| {
            let (scopes, bytes) = left(chosen);
            limits.hold(scopes, bytes)
        };
        let (mut chosen, with_slack) = (ChosenScopes::default(), limits.with_slack());
        self.choose_empty(registry, state, &mut chosen, |chosen| is_enough(with_slack, chosen));
        let dropped = if is_enough(limits, &chosen) {
            self.drop_durably(registry, &chosen.slots)
        } else {
            Err(Error::miss(
                "the scope registry is full, and too few of its scopes have neither pages nor \
                 settings: drop scopes that are not needed, or make the store larger",
            )
            .with("scopes", scopes - 1)
            .with("bytes", bytes - added)
            .with("bytes_max", limits.bytes))
        };
        if dropped.is_err() {
            // Let lookups find the chosen scopes again, with default settings: `choose_empty`
            // chooses no scope with other settings.
            let mut live = self.live().write();
            for slot in &chosen.slots {
                if let Some(scope) = registry.table.scopes.get(slot) {
                    live.add(*slot, scope, ScopeSettings::default(), self.codec())?;
                }
            }
        }
        dropped.map(|()| chosen.slots.len())
    }

    /// Removes empty scopes from lookups, least recently used first, until `is_enough` is true.
    /// Each step holds the core state's lock, under which a commit checks that its scope is live:
    /// an empty scope therefore stays empty. Keeps scopes with settings, because an operator
    /// configured them.
    fn choose_empty(
        &self,
        registry: &Registry,
        state: &StateLock,
        chosen: &mut ChosenScopes,
        is_enough: impl Fn(&ChosenScopes) -> bool,
    ) {
        let oldest_first = oldest_first(&self.live().read());
        for step in oldest_first.chunks(STEP_SCOPES) {
            let mut state = state.lock();
            let written = state.reservations.scopes();
            let mut live = self.live().write();
            for slot in step {
                if is_enough(chosen) {
                    return;
                }
                if written.contains(slot) || !state.residents.usage.is_empty(*slot) {
                    continue;
                }
                if let Some(scope) = registry.table.scopes.get(slot) {
                    live.drop_scope(*slot);
                    state.residents.usage.drop_scope(*slot);
                    chosen.bytes += ScopeRegistry::registration(*slot, scope).len() as u64;
                    chosen.slots.push(*slot);
                }
            }
        }
    }
}

/// The scopes without settings, least recently used first.
fn oldest_first(live: &Live) -> Vec<ScopeSlot> {
    let is_set = |slot| live.settings.get(slot).is_some_and(|own| *own != ScopeSettings::default());
    let known = live.by_slot.iter().filter(|(slot, _)| !is_set(slot));
    let mut uses: Vec<(u64, ScopeSlot)> =
        known.map(|(slot, known)| (known.used.load(Ordering::Relaxed), *slot)).collect();
    uses.sort_unstable();
    uses.into_iter().map(|(_, slot)| slot).collect()
}
