//! Removing pages: deleted pages, damaged pages, and the pages of dropped scopes.

use super::StoreCore;
use super::miss_causes::MissCause;
use super::state::State;
use crate::catalog::ScopeRef;
use parking_lot::MutexGuard;
use ritornello_format::{PageHash, Place, Result, ScopeSlot, ScopedKeys, check_keys};
use ritornello_index::RunId;

impl StoreCore {
    /// Removes pages; in a chained scope with all pages after them. Returns how many of `keys` were
    /// present.
    pub(super) fn delete(&self, scope: ScopeRef, keys: &[&[u8]]) -> Result<usize> {
        self.lifecycle.check_writable()?;
        self.scopes.check(scope)?;
        check_keys(keys)?;
        let scoped = ScopedKeys { scope: &scope.id, keys };
        let mut state = self.state.lock();
        let present = self.index.exists(scope.slot, &scoped);
        let removed = self.index.remove(scope.slot, &scoped);
        self.miss_causes.note_removed(&removed, MissCause::Deleted);
        let (pages, _) = self.state.apply_removals(&mut state, removed, None);
        self.counters.deleted_pages.add(pages);
        self.wake_if_limbo_is_large(&state);
        drop(state);
        // Sync even if this call removed nothing: an earlier call may have removed the pages and then
        // failed to make the removal durable.
        if self.durable_puts() {
            self.make_durable()?;
        }
        Ok(present.into_iter().filter(|present| *present).count())
    }

    /// Drops a scope and its pages; durable on return.
    pub(super) fn drop_scope(&self, scope: ScopeRef) -> Result<()> {
        self.lifecycle.check_writable()?;
        self.scopes.check(scope)?;
        self.drop_scopes(|slot| slot == scope.slot)
    }

    /// Drops all scopes and their pages; durable on return.
    pub(super) fn clear(&self) -> Result<()> {
        self.lifecycle.check_writable()?;
        self.drop_scopes(|_| true)?;
        self.make_durable()
    }

    /// Drops scopes, durably first and then in memory: after the call returns, no caller finds a
    /// dropped scope.
    fn drop_scopes(&self, which: impl Fn(ScopeSlot) -> bool) -> Result<()> {
        let gone = self.scopes.drop_selected(which)?;
        // Taking the lock waits for commits that found a scope live, because they insert their runs
        // under this lock. Later commits find the scope dropped.
        drop(self.state.lock());
        // Recorded before any pages are removed, which may take long: until then an explanation
        // would say that the pages of the later scopes were never offered.
        gone.iter().for_each(|(_, id)| self.miss_causes.note_dropped(*id));
        for (slot, _) in gone {
            // Count the removal as pending: until it is applied, `state` counts runs that the index
            // has dropped.
            self.state.lock().removals.dropping += 1;
            let removed = self.index.drop_scope(slot);
            let mut state = self.state.lock();
            state.removals.dropping -= 1;
            let (pages, _) = self.state.apply_removals(&mut state, removed, None);
            state.residents.usage.drop_scope(slot);
            self.counters.deleted_pages.add(pages);
            self.wake_if_limbo_is_large(&state);
        }
        Ok(())
    }

    /// Removes a page that a reader reported, if it is damaged on disk.
    pub(super) fn report_damage(
        &self,
        scope: ScopeRef,
        key: &[u8],
        generation: u64,
        reason: &str,
    ) -> Result<()> {
        self.lifecycle.check_open()?;
        self.scopes.check(scope)?;
        let hash = PageHash::of(&scope.id, key);
        let Some((run, page, place)) = self.placed(scope, hash, generation) else {
            return Ok(());
        };
        // The reporting reader may have lacked memory, file descriptors or time, so the owner reads
        // the page itself.
        if !self.is_damaged(&place, page) {
            return Ok(());
        }
        let mut state = self.state.lock();
        let stays = |now: Place| now.header() == place.header();
        if self.placed(scope, hash, generation).is_some_and(|(_, _, now)| stays(now)) {
            tracing::warn!(
                reason, generation, page, scope = %scope.id,
                "a page failed verification on disk and was removed"
            );
            self.remove_damaged_page(&mut state, scope, run, hash);
        }
        Ok(())
    }

    /// Locates a page, if it is still in the run with this generation. If it is not, the report
    /// does not concern the stored page: for example, the reader's lease expired, and the reader
    /// read the bytes of another run.
    fn placed(
        &self,
        scope: ScopeRef,
        page: PageHash,
        generation: u64,
    ) -> Option<(RunId, u32, Place)> {
        let (run, page) = self.index.locate(scope.slot, page)?;
        let place = self.index.place(run)?;
        (place.generation == generation).then_some((run, page, place))
    }

    /// Removes a page that failed verification and quarantines its space.
    pub(super) fn remove_damaged_page(
        &self,
        state: &mut MutexGuard<'_, State>,
        scope: ScopeRef,
        run: RunId,
        page: PageHash,
    ) {
        let removed = self.index.remove(scope.slot, &[page]);
        self.miss_causes.note_removed(&removed, MissCause::FailedVerification);
        let (pages, damaged_extents) = self.state.apply_removals(state, removed, Some(run));
        self.counters.damaged_pages.add(pages);
        state.space.quarantine(damaged_extents);
    }
}
