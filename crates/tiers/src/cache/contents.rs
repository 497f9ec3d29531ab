//! The contents and the state of the local tiers: calls that move no pages. Lists of scopes and
//! keys come from the lowest local tier, because this tier is usually the largest.

use super::cache::Cache;
use super::local_tier::LocalTier;
use ritornello_format::{Result, Scope, check_keys};
use ritornello_node::Role;
use ritornello_store::{Decision, KeyListing, ScopeListing, StorePolicy};
use std::time::Duration;

impl Cache {
    /// Returns the permissions ([`StorePolicy`]) of the lowest local tier's store.
    ///
    /// # Errors
    /// `Closed`.
    pub fn policy(&self) -> Result<StorePolicy> {
        self.check()?;
        Ok(self.tiers.lowest().node.policy().clone())
    }

    /// Records what this process decided about the pages of a request, for the owner of the lowest
    /// local tier's store: see [`Store::note_decision`](ritornello_store::Store::note_decision).
    ///
    /// # Errors
    /// `Closed`.
    pub fn note_decision(&self, decision: Decision) -> Result<()> {
        self.check()?;
        self.tiers.lowest().store().note_decision(decision);
        Ok(())
    }

    /// Reports to the owner of the lowest local tier's store that `tokens` tokens were loaded, in
    /// the time `load`, and not computed: see
    /// [`Store::note_prefill_avoided`](ritornello_store::Store::note_prefill_avoided). The loaded
    /// tokens follow `before` earlier tokens; the gate estimates how long computing the loaded
    /// tokens would have taken.
    ///
    /// # Errors
    /// `Closed`.
    pub fn note_prefill_avoided(&self, before: u64, tokens: u64, load: Duration) -> Result<()> {
        self.check()?;
        let prefill = self.tiers.gate.prefill_time(before, tokens);
        self.tiers.lowest().store().note_prefill_avoided(tokens, prefill, load);
        Ok(())
    }

    /// Returns for each page whether it is on a local tier, also for pages after a missing page.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store.
    pub fn exists(&self, scope: &Scope, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.check()?;
        check_keys(keys)?;
        let mut present = vec![false; keys.len()];
        for tier in &self.tiers.local {
            let found = tier.store().exists(scope, keys)?;
            present.iter_mut().zip(found).for_each(|(present, found)| *present |= found);
        }
        Ok(present)
    }

    /// Records a use of the leading pages on each local tier; in an unchained scope, of every page
    /// present. Returns the largest number of leading pages that one tier has.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store.
    pub fn touch(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        self.check()?;
        let mut most = 0;
        for tier in &self.tiers.local {
            most = most.max(tier.store().touch(scope, keys)?);
        }
        Ok(most)
    }

    /// Returns the number of leading pages on local tiers. Unlike a lookup, the call leases no
    /// page, and asks no remote.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store.
    pub fn probe(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        self.check()?;
        let mut at = 0;
        // For each tier, the page at which its last answer ended: the tier lacks this page.
        let mut ended = vec![None; self.tiers.local.len()];
        loop {
            let before = at;
            // Pages of a prompt may alternate between the tiers: repeat the pass until no tier has
            // the next page.
            for (tier, ended) in self.tiers.local.iter().zip(&mut ended) {
                if at == keys.len() || *ended == Some(at) {
                    continue;
                }
                at += tier.store().probe(scope, &keys[at..])?;
                *ended = Some(at);
            }
            if at == before || at == keys.len() {
                return Ok(at);
            }
        }
    }

    /// Removes pages from the local tiers; in chained scopes with all pages after them. Pages on a
    /// remote stay, and later lookups fetch them again. A background copy between tiers that runs
    /// at the same time may store a page again. Returns how many of `keys` were on a local tier.
    ///
    /// # Errors
    /// `Invalid` for an invalid key; `Closed`; errors of a tier's store. If a removal, or a query
    /// whether the pages are present, fails on a tier, the call still removes pages from the other
    /// tiers.
    pub fn delete(&self, scope: &Scope, keys: &[&[u8]]) -> Result<usize> {
        self.check()?;
        check_keys(keys)?;
        let present = self.exists(scope, keys);
        self.on_each(|tier| tier.store().delete(scope, keys).map(drop))?;
        Ok(present?.into_iter().filter(|present| *present).count())
    }

    /// Drops a scope and its pages from the local tiers, durably. Pages on a remote stay, and later
    /// lookups fetch them again.
    ///
    /// # Errors
    /// `Closed`; errors of a tier's store. The call drops the scope from the other tiers even if
    /// one fails.
    pub fn drop_scope(&self, scope: &Scope) -> Result<()> {
        self.check()?;
        self.on_each(|tier| tier.store().drop_scope(scope))
    }

    /// Lists the scopes of the lowest local tier in order of registration, each with the number and
    /// the bytes on disk of its pages.
    ///
    /// # Errors
    /// `Closed`; errors of the tier's store.
    pub fn scopes(&self) -> Result<Vec<ScopeListing>> {
        self.check()?;
        self.tiers.lowest().store().scopes()
    }

    /// Lists keys of a scope on the lowest local tier: see
    /// [`Store::keys`](ritornello_store::Store::keys).
    ///
    /// # Errors
    /// `Closed`; errors of the tier's store.
    pub fn keys(&self, scope: &Scope, after: u64, limit: u32) -> Result<KeyListing> {
        self.check()?;
        self.tiers.lowest().store().keys(scope, after, limit)
    }

    /// Capacity of the lowest local tier in bytes.
    ///
    /// # Errors
    /// `Closed`; errors of the connection to the tier's owner.
    pub fn capacity_bytes(&self) -> Result<u64> {
        self.check()?;
        Ok(self.tiers.lowest().store().stats()?.catalog.capacity_bytes)
    }

    /// Returns `Owner` if this process owns all local tiers, so that no call waits for another
    /// process; otherwise `Client`.
    ///
    /// # Errors
    /// `Closed`.
    pub fn role(&self) -> Result<Role> {
        self.check()?;
        let owns = |tier: &LocalTier| tier.node.role() == Role::Owner;
        Ok(if self.tiers.local.iter().all(owns) { Role::Owner } else { Role::Client })
    }

    /// Returns whether lookups in all local tiers return immediately: see
    /// [`ritornello_node::Node::answers_at_once`].
    ///
    /// # Errors
    /// `Closed`.
    pub fn answers_at_once(&self) -> Result<bool> {
        self.check()?;
        Ok(self.tiers.local.iter().all(|tier| tier.node.answers_at_once()))
    }

    /// Returns the problem that limits the use of a local tier, or `None`; the lowest tier is
    /// checked first.
    ///
    /// # Errors
    /// `Closed`.
    pub fn problem(&self) -> Result<Option<String>> {
        self.check()?;
        Ok(self.tiers.local.iter().rev().find_map(|tier| tier.node.problem()))
    }

    /// Calls every local tier, fastest first, and returns the first error.
    fn on_each(&self, call: impl Fn(&LocalTier) -> Result<()>) -> Result<()> {
        let answers: Vec<Result<()>> = self.tiers.local.iter().map(call).collect();
        answers.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::cache::{Settings, TierSpec};
    use ritornello_format::{Error, ErrorKind};
    use ritornello_store::PutOptions;
    use ritornello_volume::page_memory::BorrowedPages;
    use ritornello_volume::transfer::Control;

    #[test]
    fn delete_removes_pages_although_a_tier_fails() {
        let dir = tempfile::tempdir().unwrap();
        let list = [
            format!("host 16MiB {}/host", dir.path().display()),
            format!("disk {}/disk 64MiB", dir.path().display()),
        ];
        let list = TierSpec::list(&list).unwrap();
        let no_remote = |_: &str| Err(Error::invalid("the list has no remote"));
        let cache = Cache::open(&list, &Settings::default(), no_remote).unwrap();
        let scope = Scope::opaque("delete", 4096, false);
        let (keys, page) = ([b"page one".as_slice()], [0x5a; 4096]);
        let disk = cache.tiers.lowest().store();
        let pages = [page.as_slice()];
        let source = BorrowedPages::new(&pages);
        let options = PutOptions::default();
        disk.put_batch(&scope, &keys, &source, &options, &Control::default()).unwrap();
        assert_eq!(cache.exists(&scope, &keys).unwrap(), [true]);
        cache.tiers.first().node.close().unwrap();
        let error = cache.delete(&scope, &keys).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert_eq!(disk.exists(&scope, &keys).unwrap(), [false]);
    }
}
