//! Lists scopes, and the keys of a scope. The index knows pages by their hashes; the run headers
//! hold the keys.

use super::StoreCore;
use crate::catalog::{KeyListing, ScopeListing, ScopeRef};
use ritornello_format::{PageHash, Result, Scope, ScopeSlot, UNIT};
use ritornello_index::RunId;

/// Maximum scopes per answer: their descriptions must fit a message.
const SCOPES_AT_ONCE: usize = 256;
/// Number of keys after which an answer ends. The last run is listed completely, so an answer may
/// have more keys.
const KEYS_AT_ONCE: u32 = 16_384;

impl StoreCore {
    pub(super) fn list_scopes(&self, from: ScopeSlot) -> Result<Vec<ScopeListing>> {
        self.lifecycle.check_open()?;
        let scopes = self.scopes.from(from, SCOPES_AT_ONCE);
        let state = self.state.lock();
        let held = scopes.into_iter().map(|(slot, scope)| {
            let (pages, units) = state.residents.usage.held(slot);
            let scope = Scope::clone(&scope);
            ScopeListing { slot, scope, pages, bytes: units * UNIT }
        });
        Ok(held.collect())
    }

    pub(super) fn list_keys(&self, scope: ScopeRef, after: u64, limit: u32) -> Result<KeyListing> {
        self.lifecycle.check_open()?;
        self.scopes.check(scope)?;
        let limit = limit.min(KEYS_AT_ONCE) as usize;
        let mut runs: Vec<(u64, RunId)> = Vec::new();
        self.index.for_each(&mut |run, view| {
            if view.scope == scope.slot && view.place.generation > after {
                runs.push((view.place.generation, run));
            }
        });
        runs.sort_unstable();
        let mut held = KeyListing::default();
        let mut runs = runs.into_iter();
        for (generation, run) in runs.by_ref() {
            self.add_keys(scope, run, &mut held.keys);
            held.last = generation;
            if held.keys.len() >= limit {
                break;
            }
        }
        if runs.len() == 0 {
            held.last = 0;
        }
        Ok(held)
    }

    /// Adds the keys of a run's pages; none if the run was removed concurrently, or its header
    /// cannot be read.
    fn add_keys(&self, scope: ScopeRef, run: RunId, keys: &mut Vec<Vec<u8>>) {
        let Some(view) = self.index.run(run) else { return };
        let Ok(header) = self.segments.read_header(&view.place) else { return };
        let known = header.keys.iter().zip(&view.pages).filter(|(key, page)| {
            **page != PageHash::NONE && PageHash::of(&scope.id, key) == **page
        });
        keys.extend(known.map(|(key, _)| key.to_vec()));
    }
}
